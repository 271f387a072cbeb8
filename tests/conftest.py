"""Read before any test module: what has to be set before Triton is imported."""

import os

import torch
from folders import remove_shared_folders

# Triton reads this when it is imported, which any test module may do first. Tests that compile for a GPU run as scripts
# in processes of their own, see support/compiled.py.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_unconfigure() -> None:
    remove_shared_folders()
