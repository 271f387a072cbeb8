"""Which kernels run in the place of the torch ops: `chunk.py` files look here, and `gated_kernels.use` writes here.

It imports nothing, so that an exported model, which ships the `chunk.py` files alone, finds it empty and runs in torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_KERNELS: dict[str, Callable[..., Any]] = {}


def kernel_for(op: str) -> Callable[..., Any] | None:
    """The kernels chosen for an op, or None. They take the op's arguments, and return None for what they leave to
    torch."""
    return _KERNELS.get(op)


def set_kernel(op: str, kernel: Callable[..., Any] | None) -> None:
    """Has an op run by `kernel` from now on; None: in torch."""
    if kernel is None:
        _KERNELS.pop(op, None)
    else:
        _KERNELS[op] = kernel
