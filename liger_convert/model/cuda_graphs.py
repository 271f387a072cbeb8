"""Capture of a decoding or training step as one CUDA graph."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result", bound=Tensor | tuple[Tensor, ...])

WARM_UP = 2  # steps before a capture: libraries allocate their persistent buffers in the first one


class SharedMemory:
    """Memory on the current GPU for several graphs that never run at the same time, and for the steps before their
    captures.

    Outside of it, the steps before a capture would need as much memory again as the graphs that are there already. The
    allocator reuses memory only on the stream that it was allocated on, so all of them have one stream.
    """

    def __init__(self) -> None:
        self.pool, self.stream = torch.cuda.MemPool(), torch.cuda.Stream()

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Context whose work is on `stream` and allocates in `pool`. The work of other threads, such as a backward
        pass, is on that stream, too, but allocates elsewhere."""
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream), torch.cuda.use_mem_pool(self.pool):
                yield
        finally:  # a failed step may have queued work that still reads its inputs and writes to tensors
            current.wait_stream(self.stream)


def capture(
    step: Callable[..., Result],
    given: tuple[Tensor | None, ...],
    tensors: Callable[[], list[Tensor]],
    memory: SharedMemory | None = None,
) -> Callable[..., Result]:
    """Captures `step` as one CUDA graph and returns a callable that replays it.

    given: example inputs, on the GPU that the step runs on. Replay takes inputs of the same shapes; each replay
    overwrites the result of the one before.
    tensors: lists the tensors that a step changes; their values are restored after the capture.
    memory: what the graph shares with others; by default, it has memory of its own.

    Raises RuntimeError when `step` cannot be captured, for example because it reads a value on the host. A failed
    capture leaves no trace in torch's state.
    """
    slots = tuple(None if x is None else x.clone() for x in given)
    before = [tensor.clone() for tensor in tensors()]
    # a graph, its stream and its memory are those of the current GPU: on another one, nothing would be captured
    with torch.cuda.device_of(next(x for x in slots if x is not None)):
        graph, memory = torch.cuda.CUDAGraph(), memory or SharedMemory()
        where: dict[str, Any] = {"pool": memory.pool.id, "stream": memory.stream, "capture_error_mode": _error_mode()}
        try:
            with without_cached_casts():
                with memory.used():
                    for _ in range(WARM_UP - 1):
                        step(*slots)
                    with without_waiting():
                        step(*slots)
                with _undone_if_it_fails(), torch.cuda.graph(graph, **where):
                    result = step(*slots)
        finally:
            for tensor, old in zip(tensors(), before, strict=True):
                tensor.copy_(old)

    def replay(*inputs: Tensor | None) -> Result:
        for slot, x in zip(slots, inputs, strict=True):
            if slot is not None and x is not None:
                slot.copy_(x)
        graph.replay()
        return result

    return replay


def record(work: Callable[[], None], memory: SharedMemory) -> Callable[[], None]:
    """Captures `work` as one CUDA graph, without a run before, and returns a callable that replays it.

    `work` must have run before in the same way, so that libraries and kernels are ready. Its capture leaves the values
    of all tensors unchanged. Raises RuntimeError like `capture`, which is for steps that never ran.
    """
    graph = torch.cuda.CUDAGraph()
    memory.stream.wait_stream(torch.cuda.current_stream())
    # torch.cuda.graph would wait for the GPU and free all cached memory, for each of many small graphs
    with _undone_if_it_fails(), torch.cuda.stream(memory.stream):
        pool: Any = memory.pool.id
        graph.capture_begin(pool=pool, capture_error_mode=_error_mode())
        try:
            work()
        finally:
            graph.capture_end()
    return graph.replay


@contextlib.contextmanager
def without_cached_casts() -> Iterator[None]:
    """Context in which autocast keeps no casts: they would not live as long as a graph, so the graph makes its own.

    What is compiled depends on it. So a step that `capture` gets must not be compiled outside of it before, or it will
    be compiled twice.
    """
    casting, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    with torch.autocast("cuda", dtype, enabled=casting, cache_enabled=False):
        yield


def _error_mode() -> str:
    """The capture error mode: `thread_local` in distributed runs, because NCCL's watchdog thread queries the GPU.

    In `global` mode such a query would abort the capture.
    """
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    return "thread_local" if together else "global"


@contextlib.contextmanager
def without_waiting() -> Iterator[None]:
    """Makes host-device synchronization raise RuntimeError in the block, before it can break a capture."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(action="ignore"):  # torch warns that it does not detect every synchronization
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@contextlib.contextmanager
def _undone_if_it_fails() -> Iterator[None]:
    """Cleans up torch's state after a failed capture.

    torch leaves the capture stream current, and the random generator in capture mode until a capture succeeds.
    """
    stream = torch.cuda.current_stream()
    try:
        yield
    except BaseException:
        torch.cuda.set_stream(stream)
        with (
            contextlib.suppress(RuntimeError),
            torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode=_error_mode()),
        ):
            torch.zeros((), device="cuda")  # torch warns about an empty graph
        torch.cuda.set_stream(stream)
        raise
