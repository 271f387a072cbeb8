"""Runs vLLM on a CPU, in an environment of its own: `make test-serve`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

WHY = "vllm is not installed here; `make test-serve` runs these in an environment that has it"


class Absent(pytest.Module):
    """Stands for a test file if vLLM is missing: a single test that is skipped, with the reason."""

    def collect(self) -> Any:
        pytest.skip(WHY, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> Any:
    return None if importlib.util.find_spec("vllm") else Absent.from_parent(parent, path=module_path)
