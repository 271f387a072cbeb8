"""Triton reads how it should run when it is imported, which any test module here may do first."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
