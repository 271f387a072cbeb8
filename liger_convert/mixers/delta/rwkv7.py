"""RWKV-7's memory: a decay and a strength per channel, and separate keys for erasing and writing (2503.14456).

S_t = (diag(w_t) - (b_t * u_t)^T u_t) S_{t-1} + k~_t^T v_t,   o_t = q_t S_t
u_t = unit(k_t * xi),   k~_t = unit(k_t) * (1 + alpha * (b_t - 1)),   b_t = sigmoid(k_t + c)
w_t = exp(-e^-0.5 sigmoid(k_t + d))

Unlike in the paper, decay and strength come from the key itself instead of low-rank projections of a shifted input
(`gate_proj` adds projections of the input), and queries and keys have length 1 instead of a group norm after the read.
The mixing of values across layers is left out. The paper's token shift mixes in a fixed share of the previous token per
channel, which is a convolution with two taps: `short_conv: 2`, though after the projections.

With `bonus: true`, the query's own token is added after the norm: o'_t = o_t + (q_t * rho) k~_t^T v_t. rho has a value
per channel of a query head and starts at 0. The key is the token's own, without the short convolution.

Shapes: B batch, T tokens, H query heads, G key-value heads, D head size, V value size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import initialization as init

from liger_convert.mixers.base import QKV, HeadDims, MemoryOutput, MixerSpec
from liger_convert.mixers.delta.base import DeltaMixer, DeltaSpec, unit
from liger_convert.mixers.registry import register_mixer


@dataclass(frozen=True)
class RWKV7Spec(DeltaSpec):
    """Options of the decay, which has one value per key channel, and of the bonus.

    gate_bias: where the learned bias d of the decay starts. A larger value forgets faster; with -7 the memory lasts
        about 1,800 tokens.
    bonus: whether the query's own token is added to the read, with a learned weight per key channel that starts at 0.
    """

    gate_bias: float = -7.0
    bonus: bool = False


@register_mixer("rwkv7")
class RWKV7(DeltaMixer):
    summary = "delta rule with a decay and a strength per key channel"
    gate_rule = "exp(-e^-0.5 sigmoid(k + bias))"
    left_out = (
        "the mixing of values across layers; off by default: `gate_proj` (of full rank instead of low rank), the "
        "token shift (`short_conv: 2`, after the projections), `bonus`, `output_norm`, `output_gate`"
    )
    Spec = RWKV7Spec
    spec: RWKV7Spec
    beta_per_channel = True

    def __init__(self, spec: RWKV7Spec, dims: HeadDims):
        super().__init__(spec, dims)
        self.gate_bias_GD, self.xi_GD, self.alpha_GD = (
            nn.Parameter(torch.empty(dims.kv_heads, dims.dim)) for _ in range(3)
        )
        if spec.bonus:
            self.bonus_HD = nn.Parameter(torch.empty(dims.heads, dims.dim))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        init.constant_(self.gate_bias_GD, self.spec.gate_bias)
        init.ones_(self.xi_GD)
        init.ones_(self.alpha_GD)
        if self.spec.bonus:
            init.zeros_(self.bonus_HD)

    @classmethod
    def gate_sizes(cls, spec: MixerSpec, dims: HeadDims) -> dict[str, int]:
        return super().gate_sizes(spec, dims) | {"gate": dims.dim}

    def log_gate(self, inputs: tuple[Tensor, ...]) -> Tensor:
        return -math.exp(-0.5) * self.gate_logits(inputs, "gate", self.gate_bias_GD).sigmoid()

    def write(self, inputs: tuple[Tensor, ...], v_BTGV: Tensor) -> tuple[Tensor, ...]:
        beta, log_w = self.beta(inputs), self.log_gate(inputs)
        u_BTGD = unit(inputs[-1].float() * self.xi_GD.float())
        # the op looks up the old value after the decay, RWKV-7 before it; w >= 0.54, so dividing by it is safe
        return self.new_key(inputs, beta), v_BTGV.float(), u_BTGD * (-log_w).exp(), log_w, beta * u_BTGD

    def new_key(self, inputs: tuple[Tensor, ...], beta_BTGD: Tensor) -> Tensor:
        """k~ [B,T,G,D], under which a new value is written, in float32."""
        return unit(inputs[-1]) * (1 + self.alpha_GD.float() * (beta_BTGD - 1))

    def with_own_token(self, memory: MemoryOutput, qkv: QKV) -> MemoryOutput:
        if not self.spec.bonus:
            return memory
        inputs, o_BTHV, shared = self.deferred_inputs(qkv), memory.o_BTHV, self.dims.heads // self.dims.kv_heads
        k_BTHD = self.new_key(inputs, self.beta(inputs)).repeat_interleave(shared, 2)
        v_BTHV = qkv.v_BSGD[:, -o_BTHV.shape[1] :].repeat_interleave(shared, 2).float()
        weight_BTH1 = (self.query(qkv) * self.bonus_HD.float() * k_BTHD).sum(-1, keepdim=True)
        return MemoryOutput((o_BTHV.float() + weight_BTH1 * v_BTHV).to(o_BTHV.dtype), memory.log_normalizer_BTH)
