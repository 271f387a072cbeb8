"""Liger-HGRN2 exactly as published (arXiv 2503.01496 and its released code): a token is written with weight 1 - a.

S_t = diag(a_t) S_{t-1} + (1 - a_t)^T v_t,   a_t = sigmoid(k_t)            (the released "pooling" is the identity)
o_t = 0.5 softmax(q_t) S_t + 0.5 window_64(q, k, v)_t

The gates have no lower bound, and the read has neither a norm nor a scale. There are no new parameters. In `hgrn2`, the
gates have a bias and a lower bound, and the read has an RMS norm with a learned scale.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from liger_convert.mixers.base import QKV, Combine, HeadDims, MixerSpec, Scope
from liger_convert.mixers.gates import log_sigmoid_gate
from liger_convert.mixers.linear.diagonal import DiagonalMixer
from liger_convert.mixers.registry import register_mixer


@dataclass(frozen=True)
class LigerHGRN2Spec(MixerSpec):
    """The defaults are the published values.

    window: 64 as published; the paper also tries sizes from 16 to 256.
    """

    sinks: int = 0
    scope: Scope = "all"
    combine: Combine = "fixed"

    def problem(self) -> str | None:
        if self.combine == "shared":
            return "combine: shared needs a normalized memory, which liger-hgrn2 does not have; use hgrn2"
        return super().problem()


@register_mixer("liger-hgrn2")
class LigerHGRN2(DiagonalMixer):
    summary = "Liger-HGRN2 as published: a running mean per key channel, averaged with the window"
    gate_rule = "sigmoid(k)"
    left_out = "nothing of Liger's layer; of HGRN2's, everything but the recurrence"
    Spec = LigerHGRN2Spec
    spec: LigerHGRN2Spec
    normalize = False

    @classmethod
    def state_shape(cls, spec: MixerSpec, dims: HeadDims) -> dict[str, tuple[int, ...]]:
        return {"state": (dims.kv_heads, dims.dim, dims.dim)}

    @classmethod
    def deferred_input_sizes(cls, spec: MixerSpec, dims: HeadDims) -> tuple[int, ...]:
        return (dims.dim,)

    def deferred_inputs(self, qkv: QKV) -> tuple[Tensor, ...]:
        return (qkv.k_BTGD,)

    def query_features(self, qkv: QKV) -> Tensor:
        return qkv.q_BTHD.float().softmax(-1)

    def key_features(self, inputs: tuple[Tensor, ...]) -> Tensor:
        return (-inputs[0].float()).sigmoid()  # 1 - a, precise even if a is nearly 1

    def log_gate(self, inputs: tuple[Tensor, ...]) -> Tensor:
        return log_sigmoid_gate(inputs[0], 1.0)
