"""In which numbers a recurrence multiplies."""

from __future__ import annotations

import torch
from torch import Tensor


def multiplies_in_bf16(v_BSGD: Tensor) -> bool:
    """Whether a recurrence takes its factors in the bf16 of the layer's values, on a GPU: tensor cores multiply it at
    several times the speed of float32, and sum up in that; it has its range, too."""
    return v_BSGD.is_cuda and v_BSGD.dtype == torch.bfloat16
