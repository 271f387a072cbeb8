"""Liger-GSA exactly as published (arXiv 2503.01496 and its released code): raw slots, read by unscaled queries.

K_t = diag(a_t) K_{t-1} + (1 - a_t)^T k_t,   V_t likewise with v_t,   a_t = sigmoid(pool(k_t))^(1/16)
o_t = 0.5 softmax(q_t K_t^T) V_t + 0.5 window_64(q, k, v)_t

pool averages neighboring channels of a key. With as many slots as channels, as published, it is the identity. A nearly
empty slot takes part in the softmax with a logit near 0. Keys are written before rotary. There are no new parameters.
In `gsa`, the gates have a bias, the slots are divided by their normalizers, and the logits by sqrt(D).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from liger_convert.mixers.base import Combine, HeadDims, MixerSpec, Scope
from liger_convert.mixers.gates import log_sigmoid_gate, pool_to
from liger_convert.mixers.registry import register_mixer
from liger_convert.mixers.slots.base import SlotMixer, SlotSpec
from liger_convert.utils.errors import BadInput


@dataclass(frozen=True)
class LigerGSASpec(SlotSpec):
    """The defaults are the published values.

    window: 64 as published; the paper also tries sizes from 16 to 256.
    slots: how many slots a key-value head has, a divisor of the head size; 0 means as many as the head size.
    """

    sinks: int = 0
    scope: Scope = "all"
    combine: Combine = "fixed"
    slots: int = 0

    def problem(self) -> str | None:
        if self.combine == "shared":
            return "combine: shared needs a normalized memory, which liger-gsa does not have; use gsa"
        if self.slots < 0:
            return f"slots: {self.slots} is negative; use 0 for as many as a key has channels"
        return MixerSpec.problem(self)


@register_mixer("liger-gsa")
class LigerGSA(SlotMixer):
    summary = "Liger-GSA as published: softmax over unnormalized slots, averaged with the window"
    gate_rule = "sigmoid(pool(k))^(1/16)"
    left_out = "nothing of Liger's layer; of GSA's, everything but the recurrence"
    Spec = LigerGSASpec
    spec: LigerGSASpec
    normalize = False

    def __init__(self, spec: LigerGSASpec, dims: HeadDims):
        super().__init__(spec, dims)
        self.slots = spec.slots or dims.dim
        if dims.dim % self.slots:
            raise BadInput(f"slots: keys of size {dims.dim} cannot be pooled to {self.slots}; use 0 or a divisor")

    @classmethod
    def state_shape(cls, spec: MixerSpec, dims: HeadDims) -> dict[str, tuple[int, ...]]:
        assert isinstance(spec, LigerGSASpec)
        size = (dims.kv_heads, spec.slots or dims.dim, dims.dim)
        return {"keys": size, "values": size}

    def weights(self, k_BTGD: Tensor) -> tuple[Tensor, Tensor]:
        log_a_BTGM = log_sigmoid_gate(pool_to(k_BTGD, self.slots), 16.0)
        return -log_a_BTGM.expm1(), log_a_BTGM
