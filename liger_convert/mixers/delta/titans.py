"""Titans: a memory trained with momentum and forgetting (2501.00663, eq. 12 to 14), by default a matrix.

Z_t = eta_t Z_{t-1} - theta_t u_t^T (u_t M_{t-1} - v_t),   M_t = (1 - alpha_t) M_{t-1} + Z_t,   o_t = q_t M_t
theta_t = sigmoid(pool(k_t) + c),   eta_t = sigmoid(pool(k_t) + d),   1 - alpha_t = exp(-softplus(pool(k_t) + e))

with u = k / |k| and q of length 1. The momentum Z applies an update again at later tokens. The paper computes the three
rates with new projections; here they are computed from pooled keys. The recurrent state is two matrices of D x D per
head.

`model: mlp` is the paper's deep memory with two layers. `mini_batch` is its chunk size: all gradients of a chunk are
taken at the memory from the start of the chunk (section 3.2). Both begin with a learned M_0, as in inner_model.py.
Persistent tokens write the same into the memory for every text, so M_0 replaces them. Those that attention sees are
left out; the window has sinks instead.

The paper has three ways to combine memory and attention. A mixer here is closest to memory as a gate: two branches over
the same tokens. Their outputs are added with learned weights, whereas the paper normalizes and multiplies them. In the
other two, attention takes the memory's output as its input, or the reverse. A checkpoint has no projections for that.

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
from liger_convert.mixers.delta.base import DeltaMixer, pooled, unit
from liger_convert.mixers.delta.inner_model import InnerModel, InnerModelSpec, state_shape
from liger_convert.mixers.registry import register_mixer


@dataclass(frozen=True)
class TitansSpec(InnerModelSpec):
    """Options of momentum and decay, which have one value each per key-value head.

    momentum_bias: where the learned bias d of the momentum starts. With a larger value, the momentum lasts longer; with
        0, it halves at every token.
    gate_bias: where the learned bias e of the decay starts. A larger value forgets faster; with -7 the memory lasts
        about 1,100 tokens.
    """

    momentum_bias: float = 0.0
    gate_bias: float = -7.0


@register_mixer("titans")
class Titans(DeltaMixer):
    summary = "delta rule with momentum and a decay per head"
    gate_rule = "exp(-softplus(pool(k) + bias))"
    left_out = (
        "persistent tokens in attention, memory as context, memory as layer, memory as gate (a learned mix instead), "
        "the projections to the rates, SiLU of queries, keys and values; off by default: `model: mlp`, "
        "`mini_batch: 16`, `short_conv`, `output_norm`, `output_gate`"
    )
    recurrence = "momentum"
    Spec = TitansSpec
    spec: TitansSpec

    def __init__(self, spec: TitansSpec, dims: HeadDims):
        super().__init__(spec, dims)
        self.model = None if spec.is_recurrent else InnerModel(spec, dims)
        self.momentum_bias_G1 = nn.Parameter(torch.empty(dims.kv_heads, 1))
        self.gate_bias_G1 = nn.Parameter(torch.empty(dims.kv_heads, 1))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        init.constant_(self.momentum_bias_G1, self.spec.momentum_bias)
        init.constant_(self.gate_bias_G1, self.spec.gate_bias)
        if self.model is not None:
            self.model.reset_parameters()

    @classmethod
    def state_shape(cls, spec: MixerSpec, dims: HeadDims) -> dict[str, tuple[int, ...]]:
        assert isinstance(spec, TitansSpec)
        if spec.is_recurrent:
            return {"state": (dims.kv_heads, 2 * dims.dim, dims.dim)}
        return {"state": state_shape(spec, dims, rows=3)}

    def log_gate(self, inputs: tuple[Tensor, ...]) -> Tensor:
        return -F.softplus(pooled(inputs[0], self.gate_bias_G1))

    def write(self, inputs: tuple[Tensor, ...], v_BTGV: Tensor) -> tuple[Tensor, ...]:
        log_eta = F.logsigmoid(pooled(inputs[0], self.momentum_bias_G1))
        if self.model is not None:
            theta_BTG1 = self.beta(inputs) * self.spec.step_scale(self.dims)
            gates = self.log_gate(inputs), log_eta
            return unit(inputs[-1]), v_BTGV.float(), theta_BTG1, *gates, torch.ones_like(log_eta, dtype=torch.bool)
        # the last entry lets the momentum act: it, too, must be 0 for a token that is not written
        return *super().write(inputs, v_BTGV), log_eta, torch.ones_like(log_eta)

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
        else:
            o_BTHV, state = chunk_momentum(
                self.query(qkv),
                *entries,
                initial_state=states.get("state"),
                segment_ids_BT=segment_ids_BT,
                exclusive=exclusive,
            )
        return MemoryOutput(o_BTHV.to(qkv.v_BSGD.dtype), None), {"state": state}
