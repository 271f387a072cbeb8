"""Base of the delta-rule mixers: the value stored under a key is removed before a new one is written.

S_t = D_t S_{t-1} - e_t^T (r_t D_t S_{t-1}) + k_t^T v_t,   D_t = diag(a_t),   o_t = q_t S_t

For a key scaled to length 1, u, and a strength b in (0, 1), r = u and k = e = b u. The value stored under u then moves
by a fraction b towards the new one. Queries have length 1, too, so a query equal to a key reads the value of that key.
The read is not a weighted mean of values and has no normalizer, so it cannot share a denominator with the window.

Shapes: B batch, T tokens, H query heads, G key-value heads, D head size, V value size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from gated_kernels.common.derivatives import unit as over_length
from gated_kernels.delta_rule.chunk import chunk_delta_rule
from torch import Tensor, nn
from transformers import initialization as init

from liger_convert.mixers.base import QKV, Combine, HeadDims, MemoryOutput, Mixer, MixerSpec
from liger_convert.mixers.gates import pool_to
from liger_convert.mixers.precision import multiplies_in_bf16
from liger_convert.mixers.spec import GateProjSpec, ReadSpec


@dataclass(frozen=True)
class DeltaSpec(ReadSpec, GateProjSpec):
    """Options of the delta rule.

    rope: whether the memory uses queries and keys after rotary, as the window does, instead of before.
    beta: what the strength b is computed from: its logit is the pooled key plus a learned bias (`pooled`), or the bias
        alone (`constant`).
    beta_bias: where that bias starts. A larger value replaces more of the old value at each write; 0 replaces about
        half of it.
    """

    combine: Combine = "learned"
    rope: bool = False
    beta: Literal["pooled", "constant"] = "pooled"
    beta_bias: float = 0.0

    def problem(self) -> str | None:
        if self.combine == "shared":
            return "combine: shared needs a normalizer, which memories of the delta rule do not have; use learned"
        return super().problem()


@dataclass(frozen=True)
class DecaySpec(DeltaSpec):
    """Options of a decay exp(-softplus(logits)).

    gate_bias: where the learned bias of the decay's logits starts. A larger value forgets faster; with -7 the memory
        lasts about 1,100 tokens.
    decay_scale: whether the softplus is multiplied by e^A, as published. A is learned per key-value head and starts at
        0. As long as the decay is near 1, the bias has the same effect.
    """

    gate_bias: float = -7.0
    decay_scale: bool = False


class DeltaMixer(Mixer):
    """The delta rule with one strength per head and no gate. Subclasses define another gate or other entries."""

    recurrence = "delta_rule"
    gate_rule = "none"
    Spec = DeltaSpec
    spec: DeltaSpec
    beta_per_channel = False

    def __init__(self, spec: DeltaSpec, dims: HeadDims):
        super().__init__(spec, dims)
        self.beta_bias_GX = nn.Parameter(torch.empty(dims.kv_heads, dims.dim if self.beta_per_channel else 1))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        init.constant_(self.beta_bias_GX, self.spec.beta_bias)

    @classmethod
    def state_shape(cls, spec: MixerSpec, dims: HeadDims) -> dict[str, tuple[int, ...]]:
        return {"state": (dims.kv_heads, dims.dim, dims.dim)}

    @classmethod
    def gate_sizes(cls, spec: MixerSpec, dims: HeadDims) -> dict[str, int]:
        return {"beta": dims.dim if cls.beta_per_channel else 1}

    @classmethod
    def deferred_input_sizes(cls, spec: MixerSpec, dims: HeadDims) -> tuple[int, ...]:
        assert isinstance(spec, DeltaSpec)
        return *cls.projected_sizes(spec, dims), *((dims.dim, dims.dim) if spec.rope else (dims.dim,))

    def deferred_inputs(self, qkv: QKV) -> tuple[Tensor, ...]:
        # strengths and gates are pooled from keys before rotary: their channels mean the same at every position
        keys = (qkv.k_BTGD, qkv.k_rot_BTGD) if self.spec.rope else (qkv.k_BTGD,)
        return self.with_projected_gates(keys, qkv)

    def query(self, qkv: QKV) -> Tensor:
        """Unit queries [B,T,H,D]."""
        return unit(qkv.q_rot_BTHD if self.spec.rope else qkv.q_BTHD)

    def beta(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """b in (0, 1), [B,T,G,1] or [B,T,G,D]."""
        return self.strength(self.gate_key(inputs), inputs, "beta", self.beta_bias_GX)

    def strength(self, x_BTGD: Tensor, inputs: tuple[Tensor, ...], name: str, bias_GX: Tensor) -> Tensor:
        """A strength in (0, 1), [B,T,G,1] or [B,T,G,D].

        It is the sigmoid of pool(x) + bias with `beta: pooled`, and of the bias alone with `beta: constant`; with
        `gate_proj`, the projection to the gate `name` is added.
        """
        logits = bias_GX.float() if self.spec.beta == "constant" else pooled(x_BTGD, bias_GX)
        strength = self.plus_projection(logits, inputs, name).sigmoid()
        return strength.expand(*x_BTGD.shape[:2], *bias_GX.shape)

    def gate_logits(self, inputs: tuple[Tensor, ...], name: str, bias_GX: Tensor) -> Tensor:
        """The logits of a gate [B,T,G,X]: pool(k) + bias and, with `gate_proj`, the projection to it."""
        return self.plus_projection(pooled(self.gate_key(inputs), bias_GX), inputs, name)

    def log_gate(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """log a <= 0, [B,T,G,1] or [B,T,G,D]."""
        return inputs[0].new_zeros(*inputs[0].shape[:-1], 1, dtype=torch.float32)

    def write(self, inputs: tuple[Tensor, ...], v_BTGV: Tensor) -> tuple[Tensor, ...]:
        """k, v, r, log a, and e if it differs from k."""
        u_BTGD = unit(inputs[-1])
        return self.beta(inputs) * u_BTGD, v_BTGV.float(), u_BTGD, self.log_gate(inputs)

    def scan(
        self,
        qkv: QKV,
        entries: tuple[Tensor, ...],
        states: dict[str, Tensor],
        segment_ids_BT: Tensor | None,
        exclusive: bool,
    ) -> tuple[MemoryOutput, dict[str, Tensor]]:
        k_BTGD, v_BTGV, r_BTGD, log_a, *e_BTGD = entries
        factors = [self.query(qkv), k_BTGD, v_BTGV, r_BTGD, *e_BTGD]
        if multiplies_in_bf16(qkv.v_BSGD):
            factors = [x.to(qkv.v_BSGD.dtype) for x in factors]
        q_BTHD, k_BTGD, v_BTGV, r_BTGD, *e_BTGD = factors
        o_BTHV, state = chunk_delta_rule(
            q_BTHD,
            k_BTGD,
            v_BTGV,
            r_BTGD,
            log_a,
            e_BTGF=e_BTGD[0] if e_BTGD else None,
            initial_state=states.get("state"),
            segment_ids_BT=segment_ids_BT,
            exclusive=exclusive,
        )
        return MemoryOutput(o_BTHV.to(qkv.v_BSGD.dtype), None), {"state": state}


class DecayScale(nn.Module):
    """The learned scale of a decay, e^A per key-value head; A starts at 0."""

    def __init__(self, dims: HeadDims):
        super().__init__()
        self.log_scale_G1 = nn.Parameter(torch.empty(dims.kv_heads, 1))

    def reset_parameters(self) -> None:
        init.zeros_(self.log_scale_G1)

    def forward(self, log_gate: Tensor) -> Tensor:
        return self.log_scale_G1.float().exp() * log_gate


def unit(x: Tensor) -> Tensor:
    """x divided by its length, in float32."""
    return over_length(x.float())


def pooled(k_BTGD: Tensor, bias_GX: Tensor) -> Tensor:
    """Logits [B,T,G,X]: keys pooled to the size of a learned bias, plus the bias."""
    return pool_to(k_BTGD.float(), bias_GX.shape[-1]) + bias_GX.float()
