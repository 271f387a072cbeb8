"""What an op may do while it is traced into a graph, by torch or as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


@torch.compiler.assume_constant_result
def is_exporting() -> bool:
    """Whether torch.export traces. In a graph of torch.compile, torch 2.11 takes its own function of this name for
    true; it asks this one when it traces."""
    return torch.compiler.is_exporting()


def reads_no_values() -> bool:
    """Whether an op must do without looking at a value: it would cut a graph of torch.compile, and a CUDA graph cannot
    hold it. Before a capture, waiting for the GPU is made an error."""
    if torch.compiler.is_compiling():
        return True
    if not torch.cuda.is_initialized():
        return False
    return torch.cuda.is_current_stream_capturing() or torch.cuda.get_sync_debug_mode() == 2


def outside_of_graphs(function: Callable[..., Result], *args: Any, on_gpu: bool, **options: Any) -> Result:
    """What `function` returns, which loops over the chunks of a row. torch.compile unrolls loops, and for a long row
    takes minutes to compile them, so on a GPU they are left out of its graphs: a CUDA graph holds them as they are.
    What is exported stays one graph."""
    if is_exporting() or not on_gpu:
        return function(*args, **options)
    outside: Result = _outside(function, *args, **options)
    return outside


@torch.compiler.disable
def _outside(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return function(*args, **options)
