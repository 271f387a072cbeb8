"""What an op may do while it is traced by torch or captured as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


@torch.compiler.assume_constant_result
def is_exporting() -> bool:
    """Whether torch.export is tracing. In graphs of torch.compile, torch 2.11 treats its own function of this name as
    constantly true, whereas it calls this one when it traces."""
    return torch.compiler.is_exporting()


def reads_no_values() -> bool:
    """Whether an op must not read tensor values on the host. A read would break the graph of torch.compile, and a CUDA
    graph cannot contain it. Sync debug mode 2 ("error"), which is set in the runs before a capture, counts as well."""
    if torch.compiler.is_compiling():
        return True
    if not torch.cuda.is_initialized():
        return False
    return torch.cuda.is_current_stream_capturing() or torch.cuda.get_sync_debug_mode() == 2


def launches_at_once(x: Tensor) -> bool:
    """Whether an op on `x` may launch its kernels itself. An operator of torch, which autograd and tracers need, takes
    the host longer than ten operations."""
    return not (torch.compiler.is_compiling() or torch.is_grad_enabled()) and type(x) is Tensor


def outside_of_graphs(function: Callable[..., Result], *args: Any, on_gpu: bool, **options: Any) -> Result:
    """Returns the result of `function`, which loops over the chunks of a row.

    torch.compile unrolls loops and would take minutes to compile that of a long row. So on a GPU, `function` is kept
    out of its graphs. A CUDA graph can still capture it. An exported program stays one graph.
    """
    if is_exporting() or not on_gpu:
        return function(*args, **options)
    outside: Result = _outside(function, *args, **options)
    return outside


@torch.compiler.disable
def _outside(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return function(*args, **options)
