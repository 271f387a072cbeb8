"""What has to be set before Triton is imported, which any test module may do, and what goes when the tests end."""

import os

import torch
from folders import remove_shared_folders

# Triton reads this when it is imported. Tests that compile for a GPU run as scripts in processes of their own, see
# support/compiled.py.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_unconfigure() -> None:
    remove_shared_folders()
