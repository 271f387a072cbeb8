"""Read before any test module: what has to be set before Triton is imported."""

import os

import torch

if not torch.cuda.is_available():  # Triton reads this when it is imported, which any test module may do first
    os.environ.setdefault("TRITON_INTERPRET", "1")
