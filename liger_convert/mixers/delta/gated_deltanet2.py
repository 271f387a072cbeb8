"""Gated DeltaNet-2: the delta rule with separate gates for erasing and writing (2605.22791).

S_t = (I - u_t^T (b_t u_t)) diag(a_t) S_{t-1} + u_t^T (w_t v_t),   o_t = q_t S_t
b_t = sigmoid(k_t + c_b),   w_t = sigmoid(v_t + c_w),   a_t = exp(-softplus(k_t + c_a))

with u and q as in `deltanet`; b has one value per key channel, w one per value channel. If all entries of b and w are
the same number, this is `kda`. The paper projects the layer's input for each gate; here the logits of a and b are the
pretrained keys, and those of w, which acts on value channels, are the values. `gate_proj` adds projections. If b
differs between channels, nothing bounds the state: the eigenvalues of I - u^T (b u) are between 0 and 1, but the matrix
is not symmetric.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import initialization as init

from liger_convert.mixers.base import HeadDims, MixerSpec
from liger_convert.mixers.delta.base import DecaySpec, unit
from liger_convert.mixers.delta.kda import KDA
from liger_convert.mixers.registry import register_mixer


@dataclass(frozen=True)
class GatedDeltaNet2Spec(DecaySpec):
    """Options of the erase gate b, the write gate w and the decay.

    beta: what the gates are computed from. With `pooled`, the logits are keys (for b) and values (for w), plus learned
        biases. With `constant`, they are the biases alone.
    beta_bias: where the bias c_b of the erase gate starts. A larger value erases more of the old value.
    write_bias: where the bias c_w of the write gate starts. A larger value writes more of the new value.
    gate_bias: where the bias c_a of the decay starts, as in `kda`.
    """

    write_bias: float = 0.0


@register_mixer("gated-deltanet-2")
class GatedDeltaNet2(KDA):
    summary = "delta rule with a decay and an erase gate per key channel, and a write gate per value channel"
    gate_rule = "exp(-softplus(k + bias))"
    left_out = (
        "nothing; off by default: `short_conv` with `conv_activation: silu`, `gate_proj`, `decay_scale`, "
        "`output_norm`, `output_gate`"
    )
    Spec = GatedDeltaNet2Spec
    spec: GatedDeltaNet2Spec
    beta_per_channel = True

    def __init__(self, spec: GatedDeltaNet2Spec, dims: HeadDims):
        super().__init__(spec, dims)
        self.write_bias_GV = nn.Parameter(torch.empty(dims.kv_heads, dims.dim))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        init.constant_(self.write_bias_GV, self.spec.write_bias)

    @classmethod
    def gate_sizes(cls, spec: MixerSpec, dims: HeadDims) -> dict[str, int]:
        return super().gate_sizes(spec, dims) | {"write": dims.dim}

    def write(self, inputs: tuple[Tensor, ...], v_BTGV: Tensor) -> tuple[Tensor, ...]:
        u_BTGD, v_BTGV = unit(inputs[-1]), v_BTGV.float()
        written_BTGV = self.strength(v_BTGV, inputs, "write", self.write_bias_GV) * v_BTGV
        return u_BTGD, written_BTGV, self.beta(inputs) * u_BTGD, self.log_gate(inputs)
