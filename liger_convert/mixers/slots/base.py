"""What mixers over slots share: a fixed number of running means of keys and values, read by softmax attention.

K_t = diag(a_t) K_{t-1} + w_t^T [k_t, 1],   V_t = diag(a_t) V_{t-1} + w_t^T v_t,   z_t = the last column of K_t
o_t = softmax(q_t (K_t / z_t)^T / sqrt(D)) (V_t / z_t)

A slot is one more token of the window: its mass in a shared denominator is e^logit, with a learned scale per head.
Shapes: B batch, T tokens, H query heads, G key-value heads, D head size, V value size, M slots.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

from gated_kernels.slots.chunk import chunk_slots
from torch import Tensor

from liger_convert.mixers.base import MIN_NORMALIZER, HeadDims, Heads, Memory, Mixer, MixerSpec


@dataclass(frozen=True)
class SlotSpec(MixerSpec):
    """slots: how many running means a key-value head keeps."""

    slots: int = 64

    def problem(self) -> str | None:
        if self.slots < 1:
            return f"slots: {self.slots} is too small; use 1 or more"
        return super().problem()


class SlotMixer(Mixer):
    """Subclasses say with which weights w a token is written, and how far it makes each slot forget, a."""

    recurrence = "slots"
    initial_log_share = -6.0  # a slot's logit is as large as a token's, and there are as many of them
    spec: SlotSpec

    @abstractmethod
    def weights(self, k_BTGD: Tensor) -> tuple[Tensor, Tensor]:
        """w >= 0 [B,T,G,M] and log a <= 0, [B,T,G,M] or [B,T,G,1], of float32 keys before rotary."""

    @classmethod
    def state_shape(cls, spec: MixerSpec, dims: HeadDims) -> dict[str, tuple[int, ...]]:
        assert isinstance(spec, SlotSpec)
        size = (dims.kv_heads, spec.slots)
        return {"keys": (*size, dims.dim + 1), "values": (*size, dims.dim)}

    @classmethod
    def pending_sizes(cls, spec: MixerSpec, dims: HeadDims) -> tuple[int, ...]:
        return (dims.dim,)

    def inputs(self, heads: Heads) -> tuple[Tensor, ...]:
        # not rotated: a mean of keys turned to different positions would be a key of none
        return (heads.k_BTGD,)

    def write(self, inputs: tuple[Tensor, ...], v_BTGV: Tensor) -> tuple[Tensor, ...]:
        k_BTGD = inputs[0].float()
        return k_BTGD, v_BTGV, *self.weights(k_BTGD)

    def recur(
        self,
        heads: Heads,
        entries: tuple[Tensor, ...],
        states: dict[str, Tensor],
        document_BT: Tensor | None,
        exclusive: bool,
    ) -> tuple[Memory, dict[str, Tensor]]:
        k_BTGD, v_BTGV, w_BTGM, log_a = entries
        o_BTHV, lse_BTH, keys, values = chunk_slots(
            heads.q_BTHD.float(),
            k_BTGD,
            v_BTGV.float(),
            w_BTGM,
            log_a,
            scale=self.dims.dim**-0.5,
            keys_BGMD=states.get("keys"),
            values_BGMV=states.get("values"),
            segment_ids_BT=document_BT,
            exclusive=exclusive,
        )
        memory = Memory(o_BTHV.to(heads.v_BSGD.dtype), lse_BTH.clamp_min(math.log(MIN_NORMALIZER)))
        return memory, {"keys": keys, "values": values}
