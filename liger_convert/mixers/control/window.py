"""The control: the window with its sinks and no memory. Any memory must be better than this.

A window of 0 is unbounded, which is the base's own softmax attention with a growing cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from liger_convert.mixers.base import QKV, Branches, Combine, HeadDims, MemoryOutput, Mixer, MixerSpec, Scope
from liger_convert.mixers.registry import register_mixer
from liger_convert.mixers.window_attention import WindowInputs, window_attention

if TYPE_CHECKING:
    from liger_convert.model.cache import LinearizedCacheLayer
    from liger_convert.model.sequence import SequenceMetadata


@dataclass(frozen=True)
class WindowSpec(MixerSpec):
    """There is no memory, so `scope` and `combine` have no effect and cannot be changed."""

    scope: Scope = "all"
    combine: Combine = "fixed"

    def problem(self) -> str | None:
        if (self.scope, self.combine) != ("all", "fixed"):
            return "scope: a window without a memory has no scope and no combine; leave both out"
        if self.window == 0:
            return "sinks: an unlimited window leaves no tokens behind, so use 0" if self.sinks else None
        return super().problem()


@register_mixer("window")
class Window(Mixer):
    summary = "control: the window and its sinks, without a memory"
    gate_rule = "none"
    recurrence = "none"
    Spec = WindowSpec

    @classmethod
    def state_shape(cls, spec: MixerSpec, dims: HeadDims) -> dict[str, tuple[int, ...]]:
        return {}

    @classmethod
    def deferred_input_sizes(cls, spec: MixerSpec, dims: HeadDims) -> tuple[int, ...]:
        return ()

    def deferred_inputs(self, qkv: QKV) -> tuple[Tensor, ...]:
        return ()

    def write(self, inputs: tuple[Tensor, ...], v_BTGV: Tensor) -> tuple[Tensor, ...]:
        return ()

    def scan(
        self,
        qkv: QKV,
        entries: tuple[Tensor, ...],
        states: dict[str, Tensor],
        segment_ids_BT: Tensor | None,
        exclusive: bool,
    ) -> tuple[MemoryOutput, dict[str, Tensor]]:
        return MemoryOutput(qkv.q_BTHD.new_zeros(()), None), {}

    def prefill(
        self,
        qkv: QKV,
        window_inputs: WindowInputs,
        metadata: SequenceMetadata,
        past: LinearizedCacheLayer | None,
        branches: Branches,
    ) -> Tensor:
        o_BTHV, _ = window_attention(window_inputs, self.log_forget(qkv, metadata, past), None)
        if self.read_norm is not None:
            o_BTHV = self.read_norm(o_BTHV)
        if self.read_gate is not None:
            o_BTHV = self.read_gate(o_BTHV, qkv.x_BTC)
        return o_BTHV.new_zeros(o_BTHV.shape) if branches == "memory" else o_BTHV
