"""Test inputs for the elementwise recurrence, and other ways to get the same result."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gated_kernels.splits import in_pieces, one_by_one

__all__ = ["CASES", "in_pieces", "inputs", "one_by_one"]


class Case(NamedTuple):
    T: int
    G: int = 2
    R: int = 3
    F: int = 8
    V: int = 17
    dt: float = 0.1  # the median step; steps are log-normal around it
    holes: bool = False  # whether some tokens leave the state untouched
    state: bool = True
    segments: bool = False
    exclusive: bool = False
    dtype: torch.dtype = torch.float32
    v_dtype: torch.dtype | None = None  # dtype of the values; None: `dtype`


CASES = {
    "one token": Case(1),
    "one token, exclusive, no state": Case(1, exclusive=True, state=False),
    "two tokens of segments": Case(2, segments=True),
    "a token less than a chunk, float64": Case(31, F=5, V=5, R=1, dtype=torch.float64),
    "a chunk": Case(32, G=1, R=4, state=False),
    "a token more than a chunk": Case(33),
    "long": Case(130, F=16, V=64),
    "long, bf16": Case(97, F=16, dtype=torch.bfloat16),
    "bf16 values": Case(97, v_dtype=torch.bfloat16),
    "slow": Case(97, dt=1e-4),
    "strong, exclusive": Case(97, dt=20.0, exclusive=True),
    "strong, float64": Case(97, dt=200.0, dtype=torch.float64),
    "holes": Case(97, holes=True),
    "segments": Case(97, segments=True),
    "segments, exclusive, holes, float64": Case(97, segments=True, exclusive=True, holes=True, dtype=torch.float64),
}


def inputs(case: Case) -> dict[str, Any]:
    B, H = 2, case.G * case.R
    random = torch.Generator().manual_seed(case.T)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(case.dtype)

    written = torch.rand(B, case.T, 1, 1, generator=random) < (0.6 if case.holes else 1)
    starts = torch.rand(B, case.T, generator=random) < 0.06
    return {
        "q_BTHF": normal(B, case.T, H, case.F),
        "k_BTGF": normal(B, case.T, case.G, case.F) * written,
        "v_BTGV": normal(B, case.T, case.G, case.V).to(case.v_dtype or case.dtype),
        "dt_BTGV": normal(B, case.T, case.G, case.V).exp() * case.dt * written,
        "log_A_GFV": -normal(case.G, case.F, case.V).exp(),
        "initial_state": normal(B, case.G, case.F, case.V) if case.state else None,
        "segment_ids_BT": 7 + starts.cumsum(1) if case.segments else None,
        "exclusive": case.exclusive,
    }
