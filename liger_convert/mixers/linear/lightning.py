"""Lightning attention: one constant decay per head, slow and fast heads side by side (2401.04658; 2307.14995).

S_t = a_g S_{t-1} + k_t^T v_t,   a_g = exp(-slope 2^{-8 g / G}) of head g = 1 to G,   o_t = norm(q_t S_t)

The slopes are those of the released code, ALiBi's, at the key-value heads, and geometric also where their number is no
power of two. It multiplies them by about 1 - layer / layers, which a mixer cannot know; a recipe can set it by `slope`.
The swish of q and k is left out: pretrained queries meet pretrained keys as they are. `output_gate` is the gate of the
output.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from liger_convert.mixers.base import HeadDims
from liger_convert.mixers.linear.base import LinearMixer, LinearSpec
from liger_convert.mixers.registry import register_mixer


@dataclass(frozen=True)
class LightningSpec(LinearSpec):
    """slope: multiplies -log a of every head; 1 as published, 0 forgets nothing."""

    slope: float = 1.0

    def problem(self) -> str | None:
        if self.slope < 0:
            return f"slope: {self.slope} would let the memory grow; use 0 or more"
        return super().problem()


@register_mixer("lightning")
class Lightning(LinearMixer):
    summary = "linear attention with a constant decay per head, by ALiBi's slopes"
    gate_rule = "exp(-slope 2^(-8 g / G)), constant"
    left_out = "swish of queries and keys, the decay's dependence on the layer; off by default: `output_gate`"
    Spec = LightningSpec
    spec: LightningSpec

    def __init__(self, spec: LightningSpec, dims: HeadDims):
        super().__init__(spec, dims)
        self.log_a_G = [-spec.slope * rate for rate in self.rates(dims.kv_heads)]

    @staticmethod
    def rates(heads: int) -> list[float]:
        """-log a of each head."""
        return [2 ** (-8 * g / heads) for g in range(1, heads + 1)]

    def log_gate(self, inputs: tuple[Tensor, ...]) -> Tensor:
        log_a_G1 = torch.tensor(self.log_a_G, device=inputs[0].device)[:, None]
        return log_a_G1.expand(*inputs[0].shape[:2], *log_a_G1.shape)
