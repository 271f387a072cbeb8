"""Mamba2: a data-dependent step size sets both how much is forgotten and how much is written (2405.21060).

dt_t = softplus(pool(k_t) + b),   a_t = exp(-A dt_t),   S_t = a_t S_{t-1} + dt_t k_t^T v_t,   o_t = norm(q_t S_t)

A > 0 and b are learned per head. The pooled step is Liger's (2503.01496, table 1); `gate_proj` adds the paper's
projection. With `skip: true`, the read is norm(q_t S_t + d v_t), with one learned d per query head. `output_gate` is
applied after the norm of each head. The paper applies it before one norm over all heads: `norm_after_gate` and
`norm_all_heads`. The heads' queries and keys are the base's own, whereas the paper's heads share one query and one key.
With all of these options, it is the Mamba2 layer of transformers with as many groups as heads.

Shapes: B batch, T tokens, H query heads, G key-value heads, V value size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from liger_convert.mixers.base import QKV, HeadDims, MemoryOutput
from liger_convert.mixers.linear.base import GatedMixer, GatedSpec
from liger_convert.mixers.read_pieces import normed
from liger_convert.mixers.registry import register_mixer

if TYPE_CHECKING:
    from liger_convert.model.cache import LinearizedCacheLayer
    from liger_convert.model.sequence import SequenceMetadata


@dataclass(frozen=True)
class Mamba2Spec(GatedSpec):
    """Options of the step size, which has one value per key-value head, of the skip, and of the read's norm.

    gate_bias: where the learned bias b of the step size dt starts. A larger value writes more and forgets faster. -7
        starts with dt near 0.001, the paper's smallest, where the memory lasts about 1,100 tokens. A starts at 1, also
        the paper's smallest.
    skip: whether d v of the query's own token is added to the read, before its norm. d is learned per query head and
        starts at 0; the paper starts it at 1.
    norm_after_gate: whether the RMS norm comes after `output_gate`, as in the paper, instead of before it.
    norm_all_heads: whether one RMS norm covers all heads, as in the paper, instead of one for each head.
    """

    skip: bool = False
    norm_after_gate: bool = False
    norm_all_heads: bool = False
    gate: Literal["head", "learned", "constant"] = "head"
    gate_bias: float = -7.0

    def problem(self) -> str | None:
        if self.skip and self.normalize:
            return "skip: a normalized read is a mean of values, to which nothing can be added; use normalize: false"
        if self.normalize and (self.norm_after_gate or self.norm_all_heads):
            name = "norm_after_gate" if self.norm_after_gate else "norm_all_heads"
            return f"{name}: a read that is divided by its normalizer has no RMS norm; use normalize: false"
        if self.norm_after_gate and not self.output_gate:
            return "norm_after_gate: needs the gate; set output_gate: true"
        return super().problem()


@register_mixer("mamba2")
class Mamba2(GatedMixer):
    summary = "state space duality: one step size per head sets both how much is forgotten and how much is written"
    gate_rule = "exp(-A softplus(pool(k) + bias)), per head"
    left_out = (
        "one query and one key for all heads (here each has its own); off by default: `gate_proj`, `short_conv` with "
        "`conv_bias` and `conv_activation: silu`, `skip`, `output_gate` with `output_gate_activation: silu`, "
        "`norm_after_gate`, `norm_all_heads`"
    )
    Spec = Mamba2Spec
    spec: Mamba2Spec
    scalar = True

    def __init__(self, spec: Mamba2Spec, dims: HeadDims):
        super().__init__(spec, dims)
        self.log_A_G1 = nn.Parameter(torch.empty(dims.kv_heads, 1))
        if spec.skip:
            self.skip_H1 = nn.Parameter(torch.empty(dims.heads, 1))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        init.constant_(self.log_A_G1, 0.0)
        if self.spec.skip:
            init.zeros_(self.skip_H1)

    def key_features(self, inputs: tuple[Tensor, ...]) -> Tensor:
        return super().key_features(inputs) * F.softplus(self.gate_logits(inputs))

    def decay(self, logits: Tensor) -> Tensor:
        return -self.log_A_G1.float().exp() * F.softplus(logits)

    def add_current(
        self,
        qkv: QKV,
        q_BTHF: Tensor,
        entries: tuple[Tensor, ...],
        o_BTHV: Tensor,
        normalizer_BTH: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        if self.spec.skip:
            v_BTHV = qkv.v_BSGD[:, -o_BTHV.shape[1] :].repeat_interleave(self.dims.heads // self.dims.kv_heads, 2)
            o_BTHV = o_BTHV + self.skip_H1.float() * v_BTHV.float()
        return o_BTHV, normalizer_BTH

    def read(self, o_BTHV: Tensor, normalizer_BTH: Tensor | None) -> MemoryOutput:
        return MemoryOutput(o_BTHV, None) if self.spec.norm_after_gate else super().read(o_BTHV, normalizer_BTH)

    def remember(self, qkv: QKV, metadata: SequenceMetadata, past: LinearizedCacheLayer | None) -> MemoryOutput:
        memory = super().remember(qkv, metadata, past)
        if self.spec.norm_after_gate:
            memory = MemoryOutput(self.rescale(memory.o_BTHV.float()).to(memory.o_BTHV.dtype), None)
        return memory

    def rescale(self, o_BTHV: Tensor) -> Tensor:
        if not self.spec.norm_all_heads:
            return super().rescale(o_BTHV)
        return normed(o_BTHV.flatten(2), self.size_HV.flatten()).view(o_BTHV.shape)
