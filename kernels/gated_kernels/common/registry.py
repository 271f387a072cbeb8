"""Which kernels run in the place of the torch ops: `chunk.py` files look here, and `gated_kernels.use` writes here.

It imports nothing, so that an exported model, which ships the `chunk.py` files alone, finds it empty and runs in torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_KERNELS: dict[str, tuple[Callable[..., Any], ...]] = {}
_ASKED: dict[str, Callable[..., Any]] = {}  # one for each op, which asks those above in their order


def kernel_for(op: str) -> Callable[..., Any] | None:
    """The kernels chosen for an op, or None. They take the op's arguments, and return None for what they leave to
    torch. Of several the first that takes a call runs."""
    return _ASKED.get(op)


def kernels_for(op: str) -> tuple[Callable[..., Any], ...]:
    """All kernels chosen for an op, in the order in which they are asked."""
    return _KERNELS.get(op, ())


def set_kernel(op: str, *kernels: Callable[..., Any] | None) -> None:
    """Has an op run by `kernels` from now on; None: in torch."""
    chosen = tuple(kernel for kernel in kernels if kernel is not None)
    if chosen:
        _KERNELS[op], _ASKED[op] = chosen, chosen[0] if len(chosen) == 1 else _first_of(chosen)
    else:
        _KERNELS.pop(op, None)
        _ASKED.pop(op, None)


def _first_of(kernels: tuple[Callable[..., Any], ...]) -> Callable[..., Any]:
    """Gives what the first of them gives that takes a call, or None."""

    def first_that_takes_it(*args: Any, **options: Any) -> Any:
        for kernel in kernels:
            found = kernel(*args, **options)
            if found is not None:
                return found
        return None

    return first_that_takes_it
