"""Whether an op is being traced into a graph, which no number of a tensor may enter."""

from __future__ import annotations

import torch


@torch.compiler.assume_constant_result
def is_exporting() -> bool:
    """Whether torch.export traces. In a graph of torch.compile, torch 2.11 takes its own function of this name for
    true; it asks this one when it traces."""
    return torch.compiler.is_exporting()


def reads_no_values() -> bool:
    """Whether an op must do without looking at a value: where it would cut a graph, and with it what is captured."""
    return torch.compiler.is_compiling()
