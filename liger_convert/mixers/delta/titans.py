"""Titans with a matrix as its memory: the delta rule with momentum and forgetting (2501.00663, eq. 12 to 14).

Z_t = eta_t Z_{t-1} - theta_t u_t^T (u_t M_{t-1} - v_t),   M_t = (1 - alpha_t) M_{t-1} + Z_t,   o_t = q_t M_t
theta_t = sigmoid(pool(k_t) + c),   eta_t = sigmoid(pool(k_t) + d),   1 - alpha_t = exp(-softplus(pool(k_t) + e))

with u = k / |k| and q of length 1. Momentum Z carries an update on for some tokens. Against
the paper: the memory is linear, so the step is the gradient of |u M - v|^2 / 2 exactly, the three rates come from
pooled keys instead of new projections, and there are no persistent tokens. Two states of the head's size squared.

Shapes: B batch, T tokens, H query heads, G key-value heads, D head size, V value size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from gated_kernels.momentum.chunk import chunk_momentum
from torch import Tensor, nn
from transformers import initialization as init

from liger_convert.mixers.base import QKV, HeadDims, MemoryOutput, MixerSpec
from liger_convert.mixers.delta.base import DeltaMixer, DeltaSpec, pooled
from liger_convert.mixers.registry import register_mixer


@dataclass(frozen=True)
class TitansSpec(DeltaSpec):
    """momentum_bias: d; 0 halves a step at every token. gate_bias: e; -7 keeps a memory for about a thousand tokens.

    Both are learned from there.
    """

    momentum_bias: float = 0.0
    gate_bias: float = -7.0


@register_mixer("titans")
class Titans(DeltaMixer):
    summary = "delta rule with momentum and forgetting"
    gate_rule = "exp(-softplus(pool(k) + e))"
    left_out = (
        "memories of several layers, mini-batches of tokens, persistent memory, the rates' projections, SiLU of "
        "queries, keys and values; off by default: `short_conv`, `output_norm`, `output_gate`"
    )
    recurrence = "momentum"
    Spec = TitansSpec
    spec: TitansSpec

    def __init__(self, spec: TitansSpec, dims: HeadDims):
        super().__init__(spec, dims)
        self.momentum_bias_G1 = nn.Parameter(torch.empty(dims.kv_heads, 1))
        self.gate_bias_G1 = nn.Parameter(torch.empty(dims.kv_heads, 1))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        init.constant_(self.momentum_bias_G1, self.spec.momentum_bias)
        init.constant_(self.gate_bias_G1, self.spec.gate_bias)

    @classmethod
    def state_shape(cls, spec: MixerSpec, dims: HeadDims) -> dict[str, tuple[int, ...]]:
        return {"state": (dims.kv_heads, 2 * dims.dim, dims.dim)}

    def log_gate(self, inputs: tuple[Tensor, ...]) -> Tensor:
        return -F.softplus(pooled(inputs[0], self.gate_bias_G1))

    def write(self, inputs: tuple[Tensor, ...], v_BTGV: Tensor) -> tuple[Tensor, ...]:
        log_eta = F.logsigmoid(pooled(inputs[0], self.momentum_bias_G1))
        # the last entry lets the momentum act: of a token that is not written, it too must be 0
        return *super().write(inputs, v_BTGV), log_eta, torch.ones_like(log_eta)

    def scan(
        self,
        qkv: QKV,
        entries: tuple[Tensor, ...],
        states: dict[str, Tensor],
        segment_ids_BT: Tensor | None,
        exclusive: bool,
    ) -> tuple[MemoryOutput, dict[str, Tensor]]:
        o_BTHV, state = chunk_momentum(
            self.query(qkv),
            *entries,
            initial_state=states.get("state"),
            segment_ids_BT=segment_ids_BT,
            exclusive=exclusive,
        )
        return MemoryOutput(o_BTHV.to(qkv.v_BSGD.dtype), None), {"state": state}
