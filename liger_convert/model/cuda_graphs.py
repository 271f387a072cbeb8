"""A step of decoding or training as one captured CUDA graph."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

WARM_UP = 2  # steps before a capture: in the first one libraries allocate what they keep


def capture(
    step: Callable[..., Tensor],
    given: tuple[Tensor | None, ...],
    tensors: Callable[[], list[Tensor]],
    pool: Any = None,
) -> Callable[..., Tensor]:
    """`step` as one CUDA graph, replayed by a call with inputs of the shapes of `given`, whose result the next call
    overwrites. `tensors()` lists what a step changes; it is left as it was. Graphs of one `pool` take turns in the same
    memory. Raises RuntimeError where `step` cannot be captured, as when it looks at a value; what runs afterwards is
    as if nothing had been tried."""
    slots = tuple(None if x is None else x.clone() for x in given)
    before = [tensor.clone() for tensor in tensors()]
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    # casts that autocast keeps for what comes next would not live as long as the graph, which makes its own
    casting, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    try:
        with torch.autocast("cuda", dtype, enabled=casting, cache_enabled=False):
            side.wait_stream(torch.cuda.current_stream())
            try:
                with torch.cuda.stream(side):
                    for _ in range(WARM_UP - 1):
                        step(*slots)
                    with _without_waiting():
                        step(*slots)
            finally:  # a step that failed may have queued work, which reads the slots and writes the tensors
                torch.cuda.current_stream().wait_stream(side)
            with _undone_if_it_fails(), torch.cuda.graph(graph, pool=pool, capture_error_mode=_error_mode()):
                result = step(*slots)
    finally:
        for tensor, old in zip(tensors(), before, strict=True):
            tensor.copy_(old)

    def replay(*inputs: Tensor | None) -> Tensor:
        for slot, x in zip(slots, inputs, strict=True):
            if slot is not None and x is not None:
                slot.copy_(x)
        graph.replay()
        return result

    return replay


def _error_mode() -> str:
    """Where processes work together, a thread of NCCL looks at the GPU now and then, which would end a capture."""
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    return "thread_local" if together else "global"


@contextlib.contextmanager
def _without_waiting() -> Iterator[None]:
    """In the block, what makes the host wait for the GPU is a RuntimeError. Found here, no capture fails of it."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(action="ignore"):  # that not all of what waits is found
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@contextlib.contextmanager
def _undone_if_it_fails() -> Iterator[None]:
    """Takes back what torch leaves of a failed capture: its stream as the current one, and random numbers that can be
    drawn in a capture only, until one ends well."""
    stream = torch.cuda.current_stream()
    try:
        yield
    except BaseException:
        torch.cuda.set_stream(stream)
        with (
            contextlib.suppress(RuntimeError),
            torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode=_error_mode()),
        ):
            torch.zeros((), device="cuda")  # a graph of nothing would be warned of
        torch.cuda.set_stream(stream)
        raise
