"""Uninitialized memory that cannot be read without a trace."""

from __future__ import annotations

from collections.abc import Iterator

import torch

GPU = torch.cuda.is_available()


def poisoned_memory() -> Iterator[None]:
    """A fixture: uninitialized memory holds NaN, so that what reads it gives a wrong result."""
    torch.use_deterministic_algorithms(True)
    assert all(torch.empty(1, device=device).isnan() for device in ("cpu", "cuda")[: 1 + GPU])
    yield
    torch.use_deterministic_algorithms(False)
