"""Gated DeltaNet: the delta rule with a scalar decay per head (2412.06464, eq. 10).

S_t = a_t S_{t-1} + b_t u_t^T (v_t - u_t a_t S_{t-1}),   a_t = exp(-softplus(pool(k_t) + c)),   o_t = q_t S_t

with u, q, b and the short convolution as in `deltanet`. The paper multiplies the softplus by a learned e^A. If a is
near 1, the bias c has the same effect. `output_norm: rms` is the paper's norm after the read. The paper's output gate
is a SiLU; `output_gate` is a sigmoid.
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
class GatedDeltaNetSpec(DeltaSpec):
    """Options of the decay, which has one value per key-value head.

    gate_bias: where the learned bias c of the decay starts. A larger value forgets faster; with -7 the memory lasts
        about 1,100 tokens.
    """

    gate_bias: float = -7.0


@register_mixer("gated-deltanet")
class GatedDeltaNet(DeltaMixer):
    summary = "delta rule with a decay per head"
    gate_rule = "exp(-softplus(pool(k) + bias))"
    left_out = (
        "SiLU of queries, keys and values, the projections to the gates, the learned scale of the decay; off by "
        "default: `short_conv`, `output_norm`, `output_gate` (a sigmoid instead of SiLU)"
    )
    Spec = GatedDeltaNetSpec
    spec: GatedDeltaNetSpec

    def __init__(self, spec: GatedDeltaNetSpec, dims: HeadDims):
        super().__init__(spec, dims)
        self.gate_bias_G1 = nn.Parameter(torch.empty(dims.kv_heads, 1))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        init.constant_(self.gate_bias_G1, self.spec.gate_bias)

    def log_gate(self, inputs: tuple[Tensor, ...]) -> Tensor:
        return -F.softplus(pooled(inputs[0], self.gate_bias_G1))
