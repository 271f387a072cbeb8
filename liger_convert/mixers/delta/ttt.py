"""TTT: the memory is a model trained at every token (2407.04620, eq. 1 to 5), by default a linear one.

W_t = W_{t-1} - eta_t u_t^T (u_t W_{t-1} - v_t),   eta_t = eta sigmoid(pool(k_t) + c),   o_t = q_t W_t

This is one gradient step on |u W - v|^2 / 2 per token: the delta rule with a learned step size and a learned W_0 that
every document starts from (initially 0). The state is S = W - W_0, with v - u W_0 as target. u and q have length 1.

The paper trains `inner_norm: true` with `mini_batch: 16`, and for TTT-MLP `model: mlp`, as in inner_model.py:
f(x) = x + norm(y(x)), with gradients through the norm, taken at the weights from the start of the mini-batch. Unlike in
the paper's code, a learning rate is divided by the size of a mini-batch, not by the position of the token that reads,
and the initial scale of weights and keys differs.

Shapes: B batch, T tokens, H query heads, G key-value heads, R = H / G, D head size, V value size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import initialization as init

from liger_convert.mixers.base import QKV, HeadDims, MemoryOutput, MixerSpec
from liger_convert.mixers.delta.base import DeltaMixer, unit
from liger_convert.mixers.delta.inner_model import InnerModel, InnerModelSpec, state_shape
from liger_convert.mixers.registry import register_mixer


@dataclass(frozen=True)
class TTTSpec(InnerModelSpec):
    """Options of the gradient steps.

    learning_rate: eta, the upper limit of a step: every step is eta times the strength b of DeltaSpec. It has to be
        above 0 and below 2, because steps of 2 or more do not converge.
    inner_norm: whether the model is x plus a layer norm of y(x), as published, instead of y(x). It changes the memory
        that a conversion starts with.
    """

    learning_rate: float = 1.0
    inner_norm: bool = False

    @property
    def is_recurrent(self) -> bool:
        return super().is_recurrent and not self.inner_norm

    @property
    def has_norm(self) -> bool:
        return self.inner_norm

    def problem(self) -> str | None:
        if not 0 < self.learning_rate < 2:
            return f"learning_rate: {self.learning_rate} must be between 0 and 2, where a step on a unit key converges"
        return super().problem()


@register_mixer("ttt")
class TTT(DeltaMixer):
    summary = "test-time training: a small model with a learned start, trained by a gradient step at each token"
    left_out = (
        "the division of the learning rate by the token's position, rotary within a mini-batch; "
        "off by default: `gate_proj`, `inner_norm` (with the residual), `mini_batch: 16`, `model: mlp`, `short_conv`, "
        "`output_norm`, `output_gate` (a sigmoid instead of GELU)"
    )
    Spec = TTTSpec
    spec: TTTSpec

    def __init__(self, spec: TTTSpec, dims: HeadDims):
        super().__init__(spec, dims)
        self.model: InnerModel | None = None
        if spec.is_recurrent:
            self.start_GDV = nn.Parameter(torch.empty(dims.kv_heads, dims.dim, dims.dim))
        else:
            self.model = InnerModel(spec, dims)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.model is None:
            init.zeros_(self.start_GDV)
        else:
            self.model.reset_parameters()

    @classmethod
    def state_shape(cls, spec: MixerSpec, dims: HeadDims) -> dict[str, tuple[int, ...]]:
        assert isinstance(spec, TTTSpec)
        return super().state_shape(spec, dims) if spec.is_recurrent else {"state": state_shape(spec, dims, rows=2)}

    def beta(self, inputs: tuple[Tensor, ...]) -> Tensor:
        return self.spec.learning_rate * super().beta(inputs)

    def write(self, inputs: tuple[Tensor, ...], v_BTGV: Tensor) -> tuple[Tensor, ...]:
        if self.model is not None:
            eta_BTG1 = self.beta(inputs) * self.spec.step_scale(self.dims)
            return unit(inputs[-1]), v_BTGV.float(), eta_BTG1, torch.ones_like(eta_BTG1, dtype=torch.bool)
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
        if self.model is not None:
            o_BTHV, state = self.model(self.query(qkv), entries, states.get("state"), segment_ids_BT, exclusive)
            return MemoryOutput(o_BTHV.to(qkv.v_BSGD.dtype), None), {"state": state}
        memory, states = super().scan(qkv, entries, states, segment_ids_BT, exclusive)
        q_BTGRD = self.query(qkv).unflatten(2, (self.dims.kv_heads, -1))
        start_BTHV = torch.einsum("btgrd,gdv->btgrv", q_BTGRD, self.start_GDV.float()).flatten(2, 3)
        return MemoryOutput((memory.o_BTHV.float() + start_BTHV).to(memory.o_BTHV.dtype), None), states
