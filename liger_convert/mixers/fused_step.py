"""A layer's cache in the form that the fused decode step takes."""

from __future__ import annotations

from collections.abc import Mapping

from gated_kernels.fused_step.arguments import StepCache
from torch import Tensor

RING = {"k", "v"}  # the rings that the step requires; it also supports one deferred input


def step_cache(
    ring: Mapping[str, Tensor],
    sinks: Mapping[str, Tensor],
    states: Mapping[str, Tensor],
    ring_position: Tensor,
    row_B: Tensor | None = None,
) -> StepCache | None:
    """The tensors that a fused step updates; None if there are some that the step does not support.

    ring, sinks, states: a layer's cache tensors by name. ring_position, row_B: see StepCache.
    """
    if not RING <= ring.keys() <= RING | {"deferred0"} or not {"state"} <= states.keys() <= {"state", "z"}:
        return None
    of_sinks = sinks.get("k"), sinks.get("v")
    of_ring = ring["k"], ring["v"], ring.get("deferred0")
    return StepCache(*of_ring, *of_sinks, states["state"], states.get("z"), ring_position, row_B)
