"""Kimi delta attention: the delta rule with a decay per key channel (2510.26692, eq. 1).

S_t = (I - b_t u_t^T u_t) diag(a_t) S_{t-1} + b_t u_t^T v_t,   a_t = exp(-softplus(k_t + c)),   o_t = q_t S_t

with u, q and b as in `deltanet`. The logits of the decay are the pretrained keys, where the paper has a low-rank
projection of the layer's input; its learned scale of the softplus is left out. `short_conv: 4`, `output_norm: rms` and
`output_gate` are as in the paper, but there is no SiLU after the convolution, and the output gate has full rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from liger_convert.mixers.base import HeadDims
from liger_convert.mixers.delta.base import DeltaMixer, DeltaSpec, pooled
from liger_convert.mixers.registry import register_mixer


@dataclass(frozen=True)
class KDASpec(DeltaSpec):
    """Options of the decay, which has one value per key channel.

    gate_bias: where the learned bias c of the decay starts. A larger value forgets faster; with -7 the memory lasts
        about 1,100 tokens.
    """

    gate_bias: float = -7.0


@register_mixer("kda")
class KDA(DeltaMixer):
    summary = "Kimi delta attention: delta rule with a decay per key channel"
    gate_rule = "exp(-softplus(k + bias))"
    left_out = (
        "SiLU of queries, keys and values, the projections to the gates, the learned scale of the decay; off by "
        "default: `short_conv`, `output_norm`, `output_gate` (of full rank instead of low rank)"
    )
    Spec = KDASpec
    spec: KDASpec

    def __init__(self, spec: KDASpec, dims: HeadDims):
        super().__init__(spec, dims)
        self.gate_bias_GD = nn.Parameter(torch.empty(dims.kv_heads, dims.dim))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        init.constant_(self.gate_bias_GD, self.spec.gate_bias)

    def log_gate(self, inputs: tuple[Tensor, ...]) -> Tensor:
        return -F.softplus(pooled(inputs[0], self.gate_bias_GD))
