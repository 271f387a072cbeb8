"""A layer's cache in the form that the fused decode step takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gated_kernels.fused_step.chunk import StepCache

if TYPE_CHECKING:
    from liger_convert.model.cache import LinearizedCacheLayer

RING = {"k", "v"}  # the rings that the step requires; it also supports one deferred input


def step_cache(past: LinearizedCacheLayer) -> StepCache | None:
    """The tensors that a fused step updates; None if the cache holds tensors that the step does not support."""
    ring, sinks, states, positions = past.ring, past.sinks, past.states, past.positions
    if not RING <= ring.keys() <= RING | {"deferred0"} or not {"state"} <= states.keys() <= {"state", "z"}:
        return None
    if positions is None or positions.ring_position is None:
        return None
    of_sinks = sinks.get("k"), sinks.get("v")
    return StepCache(
        ring["k"],
        ring["v"],
        ring.get("deferred0"),
        *of_sinks,
        states["state"],
        states.get("z"),
        positions.ring_position,
    )
