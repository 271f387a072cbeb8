"""A loop over chunks whose backward pass recomputes everything, so that only its inputs are saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch.utils.checkpoint import checkpoint

from gated_kernels.common.tracing import outside_of_graphs

Result = TypeVar("Result")


def recomputed(chunked: Callable[..., Result], *inputs: Any, on_gpu: bool) -> Result:
    """`chunked(*inputs)` under activation checkpointing. `chunked` must not draw random numbers.

    on_gpu: keep it out of the graphs of torch.compile, see `outside_of_graphs`.
    """
    options = {"use_reentrant": False, "preserve_rng_state": False}
    return outside_of_graphs(checkpoint, chunked, *inputs, on_gpu=on_gpu, **options)
