"""TTT-Linear one token at a time: the memory is a linear model W, trained at every token (2407.04620, eq. 1 to 5).

W_t = W_{t-1} - eta_t u_t^T (u_t W_{t-1} - v_t),   eta_t = eta sigmoid(pool(k_t) + c),   o_t = q_t W_t

That is one gradient step on |u W - v|^2 / 2 per token: the delta rule with a learned step size and a learned W_0, from
which every document starts (it starts at 0). Written as S = W - W_0, whose target is v - u W_0. Against the paper:
u and q have length 1, gradients are taken at every token and not once in 16, and the inner model has neither residual
nor layer norm, so that the step stays linear.

Shapes: B batch, T tokens, H query heads, G key-value heads, R = H / G, D head size, V value size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import initialization as init

from liger_convert.mixers.base import QKV, HeadDims, MemoryOutput
from liger_convert.mixers.delta.base import DeltaMixer, DeltaSpec, unit
from liger_convert.mixers.registry import register_mixer


@dataclass(frozen=True)
class TTTSpec(DeltaSpec):
    """learning_rate: eta; from 2 on, steps can overshoot for ever."""

    learning_rate: float = 1.0

    def problem(self) -> str | None:
        if not 0 < self.learning_rate < 2:
            return f"learning_rate: {self.learning_rate} must be between 0 and 2, where a step on a unit key converges"
        return super().problem()


@register_mixer("ttt")
class TTT(DeltaMixer):
    summary = "a linear model trained by a gradient step per token, from a learned start"
    left_out = (
        "the inner model's residual and norm, mini-batches of 16 tokens, the learning rate's projection; off by "
        "default: `short_conv`, `output_norm`, `output_gate`"
    )
    Spec = TTTSpec
    spec: TTTSpec

    def __init__(self, spec: TTTSpec, dims: HeadDims):
        super().__init__(spec, dims)
        self.start_GDV = nn.Parameter(torch.empty(dims.kv_heads, dims.dim, dims.dim))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        init.zeros_(self.start_GDV)

    def beta(self, inputs: tuple[Tensor, ...]) -> Tensor:
        return self.spec.learning_rate * super().beta(inputs)

    def write(self, inputs: tuple[Tensor, ...], v_BTGV: Tensor) -> tuple[Tensor, ...]:
        predicted_BTGV = torch.einsum("btgd,gdv->btgv", unit(inputs[-1]), self.start_GDV.float())
        return super().write(inputs, v_BTGV.float() - predicted_BTGV)

    def scan(
        self,
        qkv: QKV,
        entries: tuple[Tensor, ...],
        states: dict[str, Tensor],
        segment_ids_BT: Tensor | None,
        exclusive: bool,
    ) -> tuple[MemoryOutput, dict[str, Tensor]]:
        memory, states = super().scan(qkv, entries, states, segment_ids_BT, exclusive)
        q_BTGRD = self.query(qkv).unflatten(2, (self.dims.kv_heads, -1))
        start_BTHV = torch.einsum("btgrd,gdv->btgrv", q_BTGRD, self.start_GDV.float()).flatten(2, 3)
        return MemoryOutput((memory.o_BTHV.float() + start_BTHV).to(memory.o_BTHV.dtype), None), states
