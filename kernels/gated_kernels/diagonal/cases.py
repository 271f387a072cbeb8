"""Inputs on which the diagonal recurrence is tested, and other ways to get the same result."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor

from gated_kernels.cuts import in_pieces, one_by_one

__all__ = ["CASES", "in_pieces", "inputs", "one_by_one"]


class Case(NamedTuple):
    T: int
    G: int = 2
    R: int = 3
    F: int = 16
    V: int = 17
    gate: str = "mild"
    scalar: bool = False
    state: bool = True
    segments: bool = False
    mass: bool = False
    exclusive: bool = False
    q_lse: bool = False
    dtype: torch.dtype = torch.float32
    v_dtype: torch.dtype | None = None  # of the values, when another


CASES = {
    "one token": Case(1),
    "one token, exclusive": Case(1, exclusive=True),
    "one token of a segment": Case(1, segments=True, scalar=True),
    "one token, no decay, bf16": Case(1, gate="none", dtype=torch.bfloat16),
    "two tokens, no state": Case(2, state=False),
    "three tokens, float64": Case(3, dtype=torch.float64),
    "a token less than a chunk": Case(31, R=1, F=5, V=5),
    "a chunk": Case(32, G=1, R=4, F=64, V=65),
    "a token more than a chunk": Case(33, F=80, V=16),
    "odd length, float64": Case(97, gate="mixed", dtype=torch.float64),
    "long": Case(300, F=64, V=65),
    "long, bf16": Case(200, F=64, V=65, dtype=torch.bfloat16),
    "bf16 values": Case(97, F=64, V=65, v_dtype=torch.bfloat16),
    "no decay": Case(97, gate="none"),
    "no decay, exclusive, segments": Case(97, gate="none", exclusive=True, segments=True),
    "strong": Case(130, gate="strong", F=64, V=64),
    "strong, exclusive": Case(130, gate="strong", F=64, V=64, exclusive=True),
    "steady -0.7": Case(130, gate="-0.7"),
    "steady -1.4": Case(130, gate="-1.4"),
    "steady -5": Case(130, gate="-5"),
    "steady -20": Case(130, gate="-20"),
    "-200 and 0": Case(97, gate="mixed"),
    "-200 and 0, bf16": Case(97, gate="mixed", dtype=torch.bfloat16),
    "mild, but for some tokens": Case(200, gate="patches"),
    "mild, but for some tokens, bf16": Case(200, gate="patches", F=64, V=65, dtype=torch.bfloat16),
    "segments": Case(130, segments=True),
    "segments, -200 and 0": Case(130, gate="mixed", segments=True),
    "segments, exclusive, float64": Case(97, gate="strong", segments=True, exclusive=True, dtype=torch.float64),
    "scalar": Case(130, scalar=True, R=4, F=80, V=16),
    "scalar, -200 and 0": Case(97, gate="mixed", scalar=True, segments=True),
    "scalar, strong, exclusive": Case(65, gate="strong", scalar=True, exclusive=True),
    "scalar, heads of 64 over a codebook, bf16": Case(
        200, G=1, F=256, V=64, scalar=True, mass=True, exclusive=True, dtype=torch.bfloat16
    ),
    "scalar, heads of 128 over a codebook, bf16": Case(
        200, G=1, R=4, F=256, V=128, scalar=True, mass=True, exclusive=True, dtype=torch.bfloat16
    ),
    "mass, one token": Case(1, mass=True),
    "mass, two tokens, no state": Case(2, state=False, scalar=True, mass=True),
    "mass, a gate per feature": Case(97, gate="mixed", mass=True),
    "mass, a gate per feature, bf16": Case(97, F=64, V=64, mass=True, dtype=torch.bfloat16),
    "mass, segments, float64": Case(97, gate="mixed", scalar=True, segments=True, mass=True, dtype=torch.float64),
    "mass, no decay, exclusive": Case(97, gate="none", mass=True, exclusive=True),
    "mass, strong": Case(130, gate="strong", scalar=True, R=4, F=80, V=16, mass=True),
    "mass, bf16 values": Case(97, scalar=True, F=64, V=64, mass=True, v_dtype=torch.bfloat16),
    "heads of 128, bf16": Case(200, G=1, R=4, F=128, V=128, dtype=torch.bfloat16),
    "softmax, one token": Case(1, q_lse=True),
    "softmax, exclusive": Case(33, F=40, exclusive=True, q_lse=True),
    "softmax, segments, exclusive, float64": Case(
        97, gate="strong", segments=True, exclusive=True, q_lse=True, dtype=torch.float64
    ),
    "softmax, scalar": Case(130, gate="mixed", scalar=True, segments=True, mass=True, q_lse=True),
    "softmax, scalar, bf16": Case(97, scalar=True, F=64, V=65, q_lse=True, dtype=torch.bfloat16),
    "softmax, bf16 values": Case(97, F=64, V=65, q_lse=True, v_dtype=torch.bfloat16),
    "softmax, heads of 64, bf16": Case(
        200, F=64, V=64, gate="patches", segments=True, q_lse=True, dtype=torch.bfloat16
    ),
    "softmax, heads of 80, bf16": Case(130, F=80, V=80, mass=True, exclusive=True, q_lse=True, dtype=torch.bfloat16),
    "softmax, heads of 128, bf16": Case(200, G=1, R=4, F=128, V=128, q_lse=True, dtype=torch.bfloat16),
}


def inputs(case: Case) -> dict[str, Any]:
    B, H = 2, case.G * case.R
    random = torch.Generator().manual_seed(case.T)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(case.dtype)

    gate = normal(B, case.T, case.G, 1 if case.scalar else case.F)
    log_a: Tensor | None
    if case.gate == "none":
        log_a = None
    elif case.gate == "mixed":
        log_a = gate.new_tensor([0.0, -0.01, -20.0, -200.0])[torch.randint(4, gate.shape, generator=random)]
    elif case.gate in ("mild", "strong"):
        log_a = nnf.logsigmoid(gate) * (1 / 16 if case.gate == "mild" else 2)
    elif case.gate == "patches":  # of strong gates, in every other 64 tokens
        log_a = nnf.logsigmoid(gate) / 16
        log_a[:, 70:80] *= 200
        log_a[:, -1] -= 90
    else:
        log_a = float(case.gate) * (1 + 0.01 * gate)
    starts = torch.rand(B, case.T, generator=random) < 0.06
    made: dict[str, Any] = {
        "q_BTHF": normal(B, case.T, H, case.F),
        "k_BTGF": normal(B, case.T, case.G, case.F),
        "v_BTGV": normal(B, case.T, case.G, case.V).to(case.v_dtype or case.dtype),
        "log_a": log_a,
        "state_BGFV": normal(B, case.G, case.F, case.V + case.mass) if case.state else None,
        "segment_BT": 7 + starts.cumsum(1) if case.segments else None,
        "exclusive": case.exclusive,
    }
    if case.q_lse:  # not quite that of q, as the op takes it for an input of its own
        exact_BTH = made["q_BTHF"].to(torch.promote_types(case.dtype, torch.float32)).logsumexp(-1)
        made["q_lse_BTH"] = exact_BTH + torch.randn(exact_BTH.shape, generator=random) / 4
    if case.mass:
        written_BTG = torch.rand(B, case.T, case.G, generator=random) < 0.8
        written_BTG[0, : case.T // 3] = False
        made["written_BTG"] = written_BTG
    return made
