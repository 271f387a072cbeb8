"""Test inputs for the delta rule with momentum: those of the delta rule with one gate per head."""

from __future__ import annotations

from typing import Any

import torch

from gated_kernels.delta_rule import cases as delta
from gated_kernels.splits import in_pieces, one_by_one

__all__ = ["CASES", "in_pieces", "inputs", "one_by_one"]

CASES = {
    name: case._replace(sizes=case.sizes._replace(per_head=True))
    for name, case in delta.CASES.items()
    if case.sizes.gate != "none" and not case.erases_elsewhere
}


def inputs(case: delta.Case) -> dict[str, Any]:
    x = delta.inputs(case)
    random = torch.Generator().manual_seed(case.sizes.T + 2)
    shape = x["log_a"].shape
    del x["e_BTGF"]
    x["log_m"] = x["log_a"][:, torch.randperm(case.sizes.T, generator=random)] - 0.1
    x["c_BTG1"] = (torch.rand(shape, generator=random) > 0.2).to(x["k_BTGF"].dtype)
    state = x["initial_state"]
    x["initial_state"] = None if state is None else torch.cat([state, state.flip(-1) / 2], 2)
    return x
