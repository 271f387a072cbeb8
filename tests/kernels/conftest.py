"""Fixtures for the tests of all ops."""

from collections.abc import Iterator

import pytest
import torch

GPU = torch.cuda.is_available()


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Uninitialized memory holds NaN, so that a kernel that reads it gives a wrong result."""
    torch.use_deterministic_algorithms(True)
    assert all(torch.empty(1, device=device).isnan() for device in ("cpu", "cuda")[: 1 + GPU])
    yield
    torch.use_deterministic_algorithms(False)
