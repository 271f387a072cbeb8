"""Base of the slot mixers: a fixed number of running means of keys and values, read by softmax attention.

K_t = diag(a_t) K_{t-1} + w_t^T k_t,   V_t = diag(a_t) V_{t-1} + w_t^T v_t,   z_t = diag(a_t) z_{t-1} + w_t
o_t = softmax(q_t (K_t / z_t)^T / sqrt(D)) (V_t / z_t)

In a shared denominator, a slot counts like one more token of the window. Its weight is e^logit, scaled per head.
Shapes: B batch, T tokens, H query heads, G key-value heads, D head size, V value size, M slots.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from gated_kernels.fused_step.arguments import MIN_NORMALIZER
from gated_kernels.slots.chunk import chunk_slots
from torch import Tensor

from liger_convert.mixers.base import QKV, HeadDims, MemoryOutput, Mixer, MixerSpec
from liger_convert.mixers.precision import factors


@dataclass(frozen=True)
class SlotSpec(MixerSpec):
    """Options of the slot mixers.

    slots: how many slots a key-value head has. Each holds one running mean of keys and one of values.
    """

    slots: int = 64

    def problem(self) -> str | None:
        if self.slots < 1:
            return f"slots: {self.slots} is too small; use 1 or more"
        return super().problem()


class SlotMixer(Mixer):
    """Subclasses define the write weights w of a token and the decay a of each slot.

    normalize: whether slots are divided by their normalizers z, and logits are scaled by 1 / sqrt(D). If not, there is
    no z, the logits are not scaled, and the read cannot share a denominator.
    """

    recurrence = "slots"
    normalize = True
    initial_log_share = -6.0  # a slot's logit is as large as a token's, and there are as many of them
    spec: SlotSpec

    @abstractmethod
    def weights(self, k_BTGD: Tensor) -> tuple[Tensor, Tensor]:
        """w >= 0 [B,T,G,M] and log a <= 0, [B,T,G,M] or [B,T,G,1], of float32 keys before rotary."""

    @classmethod
    def state_shape(cls, spec: MixerSpec, dims: HeadDims) -> dict[str, tuple[int, ...]]:
        assert isinstance(spec, SlotSpec)
        size = (dims.kv_heads, spec.slots)
        return {"keys": (*size, dims.dim), "values": (*size, dims.dim), "z": size}

    @classmethod
    def deferred_input_sizes(cls, spec: MixerSpec, dims: HeadDims) -> tuple[int, ...]:
        return (dims.dim,)

    def deferred_inputs(self, qkv: QKV) -> tuple[Tensor, ...]:
        # before rotary: a mean of keys rotated to different positions would match no position
        return (qkv.k_BTGD,)

    def write(self, inputs: tuple[Tensor, ...], v_BTGV: Tensor) -> tuple[Tensor, ...]:
        return inputs[0], v_BTGV, *self.weights(inputs[0].float())

    def scan(
        self,
        qkv: QKV,
        entries: tuple[Tensor, ...],
        states: dict[str, Tensor],
        segment_ids_BT: Tensor | None,
        exclusive: bool,
    ) -> tuple[MemoryOutput, dict[str, Tensor]]:
        k_BTGD, v_BTGV, w_BTGM, log_a = entries
        q_BTHD, k_BTGD, v_BTGV = factors(qkv.q_BTHD, k_BTGD, v_BTGV)
        keys_before = states.get("keys")
        if self.normalize and states:  # the op takes z as the last column of the keys
            keys_before = torch.cat((states["keys"], states["z"][..., None]), -1)
        o_BTHV, lse_BTH, keys, values = chunk_slots(
            q_BTHD,
            k_BTGD,
            v_BTGV,
            w_BTGM,
            log_a,
            scale=self.dims.dim**-0.5 if self.normalize else 1.0,
            keys_BGMD=keys_before,
            values_BGMV=states.get("values"),
            segment_ids_BT=segment_ids_BT,
            exclusive=exclusive,
            normalize=self.normalize,
        )
        read_BTHV = o_BTHV.to(qkv.v_BSGD.dtype)
        if not self.normalize:
            return MemoryOutput(read_BTHV, None), {"keys": keys, "values": values}
        memory = MemoryOutput(read_BTHV, lse_BTH.clamp_min(math.log(MIN_NORMALIZER)))
        return memory, {"keys": keys[..., :-1], "values": values, "z": keys[..., -1]}
