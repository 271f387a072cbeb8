"""Test inputs for attention over slots, and other ways to get the same result."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor

from gated_kernels.splits import in_pieces, one_by_one

__all__ = ["CASES", "in_pieces", "inputs", "one_by_one"]


class Case(NamedTuple):
    T: int
    G: int = 2
    R: int = 3
    D: int = 16
    V: int = 17
    M: int = 7
    gate: str = "mild"
    state: bool = True
    segments: bool = False
    exclusive: bool = False
    holes: bool = False  # whether some tokens write nothing, and some slots are never written
    normalize: bool = True
    dtype: torch.dtype = torch.float32
    v_dtype: torch.dtype | None = None  # dtype of the values; None: `dtype`


CASES = {
    "one token, slots filled before": Case(1),
    "one token, exclusive, no state": Case(1, exclusive=True, state=False),
    "two tokens, exclusive, no state, no decay": Case(2, gate="none", exclusive=True, state=False),
    "three tokens, float64": Case(3, dtype=torch.float64),
    "a token more than a chunk": Case(33, R=1, D=5, V=5, M=64),
    "odd length, float64": Case(97, gate="mixed", dtype=torch.float64),
    "long": Case(200, D=64, V=64, M=16),
    "long, bf16": Case(130, D=64, V=64, M=16, dtype=torch.bfloat16),
    "bf16 values": Case(97, v_dtype=torch.bfloat16),
    "no decay": Case(97, gate="none"),
    "no decay, holes": Case(97, gate="none", holes=True, state=False),
    "strong": Case(97, gate="strong", M=33),
    "-200 and 0, exclusive": Case(97, gate="mixed", exclusive=True),
    "segments": Case(97, segments=True),
    "not normalized": Case(97, normalize=False),
    "not normalized, exclusive, segments, holes, no state": Case(
        97, normalize=False, exclusive=True, segments=True, holes=True, state=False
    ),
    "not normalized, one token": Case(1, normalize=False),
    "segments, exclusive, holes, float64": Case(97, segments=True, exclusive=True, holes=True, dtype=torch.float64),
}


def inputs(case: Case) -> dict[str, Any]:
    B, H = 2, case.G * case.R
    random = torch.Generator().manual_seed(case.T)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(case.dtype)

    gate, w = normal(B, case.T, case.G, case.M), normal(B, case.T, case.G, case.M).sigmoid()
    log_a: Tensor | None
    if case.gate == "none":
        log_a = None
    elif case.gate == "mixed":
        log_a = gate.new_tensor([0.0, -0.01, -20.0, -200.0])[torch.randint(4, gate.shape, generator=random)]
    else:
        log_a = nnf.logsigmoid(gate) * (1 / 16 if case.gate == "mild" else 2)
    if case.holes:
        w = w * (torch.rand(B, case.T, 1, 1, generator=random) < 0.6) * (torch.arange(case.M) < case.M - 2)
    keys = torch.cat([normal(B, case.G, case.M, case.D), normal(B, case.G, case.M, 1).exp()], -1)
    keys = keys if case.normalize else keys[..., : case.D]
    starts = torch.rand(B, case.T, generator=random) < 0.06
    return {
        "q_BTHD": normal(B, case.T, H, case.D),
        "k_BTGD": normal(B, case.T, case.G, case.D),
        "v_BTGV": normal(B, case.T, case.G, case.V).to(case.v_dtype or case.dtype),
        "w_BTGM": w,
        "log_a": log_a,
        "scale": case.D**-0.5,
        "keys_BGMD": keys if case.state else None,
        "values_BGMV": normal(B, case.G, case.M, case.V) if case.state else None,
        "segment_ids_BT": 7 + starts.cumsum(1) if case.segments else None,
        "exclusive": case.exclusive,
        "normalize": case.normalize,
    }
