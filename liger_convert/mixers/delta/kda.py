"""Kimi delta attention: the delta rule with a decay per key channel (2510.26692, eq. 1).

S_t = (I - b_t u_t^T u_t) diag(a_t) S_{t-1} + b_t u_t^T v_t,   a_t = exp(-softplus(k_t + c)),   o_t = q_t S_t

with u, q and b as in `deltanet`. The logits of the decay are the pretrained keys, where the paper has a low-rank
projection of the layer's input; `gate_proj` adds one of full rank. `decay_scale` is the paper's factor of the softplus.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from liger_convert.mixers.base import HeadDims, MixerSpec
from liger_convert.mixers.delta.base import DecayScale, DecaySpec, DeltaMixer
from liger_convert.mixers.registry import register_mixer


@register_mixer("kda")
class KDA(DeltaMixer):
    summary = "Kimi delta attention: delta rule with a decay per key channel"
    gate_rule = "exp(-softplus(k + bias))"
    left_out = (
        "nothing; off by default: `short_conv` with `conv_activation: silu`, `gate_proj` (of full rank instead of low "
        "rank), `decay_scale`, `output_norm`, `output_gate` (of full rank, too)"
    )
    Spec = DecaySpec
    spec: DecaySpec

    def __init__(self, spec: DecaySpec, dims: HeadDims):
        super().__init__(spec, dims)
        self.gate_bias_GD = nn.Parameter(torch.empty(dims.kv_heads, dims.dim))
        self.decay_scale = DecayScale(dims) if spec.decay_scale else None

    def reset_parameters(self) -> None:
        super().reset_parameters()
        init.constant_(self.gate_bias_GD, self.spec.gate_bias)
        if self.decay_scale is not None:
            self.decay_scale.reset_parameters()

    @classmethod
    def gate_sizes(cls, spec: MixerSpec, dims: HeadDims) -> dict[str, int]:
        return super().gate_sizes(spec, dims) | {"gate": dims.dim}

    def log_gate(self, inputs: tuple[Tensor, ...]) -> Tensor:
        log_a = -F.softplus(self.gate_logits(inputs, "gate", self.gate_bias_GD))
        return log_a if self.decay_scale is None else self.decay_scale(log_a)
