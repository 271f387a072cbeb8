"""The published Liger layer, exactly, as the baseline (arXiv 2503.01496, eq. 6 to 9, and its released code).

S_t = diag(a_t) S_{t-1} + softmax(k_t)^T v_t,   a_t = sigmoid(k_t)^(1/16)   (the released "pooling" is the identity)
o_t = 0.5 softmax(q_t) S_t + 0.5 window_64(q, k, v)_t

Neither normalised nor scaled: its memory grows with the length. No new parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from liger_convert.mixers.base import DiagonalMixer, HeadDims, Heads, Join, MixerSpec, Scope
from liger_convert.mixers.gates import log_sigmoid_gate


@dataclass(frozen=True)
class LigerPaperSpec(MixerSpec):
    """The published values; they can be changed one at a time to see what each does."""

    window: int = 64
    sinks: int = 0
    scope: Scope = "all"
    join: Join = "fixed"

    def problem(self) -> str | None:
        if self.join == "shared":
            return "join: shared needs a normalised memory, which liger-paper has not; use gla"
        return super().problem()


class LigerPaper(DiagonalMixer):
    name = "liger-paper"
    summary = "the published recipe: unnormalised memory of all tokens, half and half with the window"
    gate_rule = "sigmoid(k)^(1/16)"
    Spec = LigerPaperSpec
    normalize = False

    @classmethod
    def state_shape(cls, spec: MixerSpec, dims: HeadDims) -> dict[str, tuple[int, ...]]:
        return {"state": (dims.kv_heads, dims.dim, dims.dim)}

    @classmethod
    def pending_sizes(cls, spec: MixerSpec, dims: HeadDims) -> tuple[int, ...]:
        return (dims.dim,)

    def inputs(self, heads: Heads) -> tuple[Tensor, ...]:
        return (heads.k_BTGD,)

    def query_features(self, heads: Heads) -> Tensor:
        return heads.q_BTHD.float().softmax(-1)

    def key_features(self, inputs: tuple[Tensor, ...]) -> Tensor:
        return inputs[0].float().softmax(-1)

    def log_gate(self, inputs: tuple[Tensor, ...]) -> Tensor:
        return log_sigmoid_gate(inputs[0], 16.0)
