"""Registry of the kernels that replace torch ops. `chunk.py` files look kernels up, `gated_kernels.use` sets them.

It imports no kernels. An exported model ships without them, so the registry stays empty and the ops run in torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_KERNELS: dict[str, tuple[Callable[..., Any], ...]] = {}
_ASKED: dict[str, Callable[..., Any]] = {}  # one function per op, which tries the op's kernels in order


def kernel_for(op: str) -> Callable[..., Any] | None:
    """A function that runs the kernels chosen for an op, or None. It takes the op's arguments. It returns the result of
    the first kernel that supports the call, or None if none does and the call is left to torch."""
    return _ASKED.get(op)


def kernels_for(op: str) -> tuple[Callable[..., Any], ...]:
    """All kernels chosen for an op, in the order in which they are tried."""
    return _KERNELS.get(op, ())


def all_kernels() -> dict[str, tuple[Callable[..., Any], ...]]:
    """The kernels chosen for every op that does not run in torch, as they are now."""
    return dict(_KERNELS)


def set_kernel(op: str, *kernels: Callable[..., Any] | None) -> None:
    """Makes an op run in `kernels`, tried in order, from now on. With none, or only None, it runs in torch."""
    chosen = tuple(kernel for kernel in kernels if kernel is not None)
    if chosen:
        _KERNELS[op], _ASKED[op] = chosen, chosen[0] if len(chosen) == 1 else _first_of(chosen)
    else:
        _KERNELS.pop(op, None)
        _ASKED.pop(op, None)


def _first_of(kernels: tuple[Callable[..., Any], ...]) -> Callable[..., Any]:
    """A function that returns the result of the first kernel that supports the call, or None."""

    def first_that_takes_it(*args: Any, **options: Any) -> Any:
        for kernel in kernels:
            found = kernel(*args, **options)
            if found is not None:
                return found
        return None

    return first_that_takes_it
