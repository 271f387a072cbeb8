"""Whether an op is being traced into a graph, which no number of a tensor may enter."""

from __future__ import annotations

import torch
from torch import Tensor


def reads_no_values(x: Tensor) -> bool:
    """Whether an op must do without looking at a value of `x`: under torch.export, and under torch.compile on a CPU.

    On a GPU compiled layers are cut into graphs where a value is read: what the value decides is worth more.
    """
    return torch.compiler.is_exporting() or (torch.compiler.is_compiling() and not x.is_cuda)
