"""Lightning attention: a constant decay per head, from fast to slow (2401.04658; 2307.14995).

S_t = a_g S_{t-1} + k_t^T v_t,   a_g = exp(-slope 2^{-8 g / G}) of head g = 1 to G,   o_t = norm(q_t S_t)

The slopes are ALiBi's, as in the released code, with one per key-value head. They form a geometric series even if the
number of heads is not a power of two. The released code also multiplies them by about 1 - layer / layers. A mixer does
not know its layer, but a recipe can set this factor as `slope`. The swish of q and k is left out, because pretrained
queries and keys match without it. `output_gate` is the output gate; TransNormerLLM's has no sigmoid. The first layer of
TransNormerLLM also rotates queries and keys by learned angles, which is left out; `rope: true` is the base's rotation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from liger_convert.mixers.linear.base import LinearMixer, LinearSpec
from liger_convert.mixers.registry import register_mixer


@dataclass(frozen=True)
class LightningSpec(LinearSpec):
    """Options of the decay.

    slope: a factor on the decay rate -log a of every head; 1 as published. A larger value forgets faster, and with 0
        nothing is forgotten.
    """

    slope: float = 1.0

    def problem(self) -> str | None:
        if self.slope < 0:
            return f"slope: {self.slope} would let the memory grow; use 0 or more"
        return super().problem()


@register_mixer("lightning")
class Lightning(LinearMixer):
    summary = "linear attention with a constant decay per head, by ALiBi's slopes"
    gate_rule = "exp(-slope 2^(-8 g / G)), constant"
    left_out = (
        "swish of queries and keys, decays that depend on the layer, a rotation in the first layer (that layer may "
        "have a mixer with `rope: true`); off by default: `output_gate`"
    )
    Spec = LightningSpec
    spec: LightningSpec

    @staticmethod
    def rates(heads: int, device: torch.device | None = None) -> Tensor:
        """-log a of each head, float64 [G]; created on the device, as a CUDA graph cannot copy from the host."""
        return torch.exp2(torch.arange(1, heads + 1, dtype=torch.float64, device=device) * (-8 / heads))

    def log_gate(self, inputs: tuple[Tensor, ...]) -> Tensor:
        log_a_G = -self.spec.slope * self.rates(self.dims.kv_heads, inputs[0].device)
        return log_a_G.float()[:, None].expand(*inputs[0].shape[:2], -1, -1)
