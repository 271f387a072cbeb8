"""Fixtures for the tests of all ops."""

import pytest
from poison import poisoned_memory

_poisoned_memory = pytest.fixture(autouse=True)(poisoned_memory)
