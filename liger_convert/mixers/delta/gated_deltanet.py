"""Gated DeltaNet: the delta rule with a scalar decay per head (2412.06464, eq. 10).

S_t = a_t S_{t-1} + b_t u_t^T (v_t - u_t a_t S_{t-1}),   a_t = exp(-softplus(pool(k_t) + c)),   o_t = q_t S_t

with u, q, b and the short convolution as in `deltanet`. With every option of `left_out`, and `combine: memory` and
`scope: all` in place of the window, this is the layer of Qwen3-Next and Qwen3.5.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from liger_convert.mixers.base import HeadDims, MixerSpec
from liger_convert.mixers.delta.base import DecayScale, DecaySpec, DeltaMixer
from liger_convert.mixers.registry import register_mixer


@register_mixer("gated-deltanet")
class GatedDeltaNet(DeltaMixer):
    summary = "delta rule with a decay per head"
    gate_rule = "exp(-softplus(pool(k) + bias))"
    left_out = (
        "nothing; off by default: `short_conv` with `conv_activation: silu`, `gate_proj`, `decay_scale`, "
        "`output_norm`, `output_gate` with `output_gate_activation: silu`"
    )
    Spec = DecaySpec
    spec: DecaySpec

    def __init__(self, spec: DecaySpec, dims: HeadDims):
        super().__init__(spec, dims)
        self.gate_bias_G1 = nn.Parameter(torch.empty(dims.kv_heads, 1))
        self.decay_scale = DecayScale(dims) if spec.decay_scale else None

    def reset_parameters(self) -> None:
        super().reset_parameters()
        init.constant_(self.gate_bias_G1, self.spec.gate_bias)
        if self.decay_scale is not None:
            self.decay_scale.reset_parameters()

    @classmethod
    def gate_sizes(cls, spec: MixerSpec, dims: HeadDims) -> dict[str, int]:
        return super().gate_sizes(spec, dims) | {"gate": 1}

    def log_gate(self, inputs: tuple[Tensor, ...]) -> Tensor:
        log_a = -F.softplus(self.gate_logits(inputs, "gate", self.gate_bias_G1))
        return log_a if self.decay_scale is None else self.decay_scale(log_a)
