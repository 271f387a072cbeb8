"""Test inputs for gated linear attention with one gate per head, or none. `gla` uses `inputs`, too."""

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
    F: int = 16
    V: int = 17
    gate: str = "mild"
    per_head: bool = False  # one gate per key-value head instead of one per feature
    state: bool = True
    segments: bool = False
    normalizer: bool = False
    exclusive: bool = False
    q_lse: bool = False
    dtype: torch.dtype = torch.float32
    v_dtype: torch.dtype | None = None  # dtype of the values; None: `dtype`
    B: int = 2


CASES = {
    "one token of a segment": Case(1, segments=True, per_head=True),
    "one token, no decay, bf16": Case(1, gate="none", dtype=torch.bfloat16),
    "no decay": Case(97, gate="none"),
    "no decay, exclusive, segments": Case(97, gate="none", exclusive=True, segments=True),
    "per head": Case(130, per_head=True, R=4, F=80, V=16),
    "per head, -200 and 0": Case(97, gate="mixed", per_head=True, segments=True),
    "per head, strong, exclusive": Case(65, gate="strong", per_head=True, exclusive=True),
    "per head, heads of 64 over a codebook, bf16": Case(
        200, G=1, F=256, V=64, per_head=True, normalizer=True, exclusive=True, dtype=torch.bfloat16
    ),
    "per head, heads of 128 over a codebook, bf16": Case(
        200, G=1, R=4, F=256, V=128, per_head=True, normalizer=True, exclusive=True, dtype=torch.bfloat16
    ),
    "normalizer, two tokens, no state": Case(2, state=False, per_head=True, normalizer=True),
    "normalizer, segments, float64": Case(
        97, gate="mixed", per_head=True, segments=True, normalizer=True, dtype=torch.float64
    ),
    "normalizer, no decay, exclusive": Case(97, gate="none", normalizer=True, exclusive=True),
    "normalizer, strong": Case(130, gate="strong", per_head=True, R=4, F=80, V=16, normalizer=True),
    "normalizer, bf16 values": Case(97, per_head=True, F=64, V=64, normalizer=True, v_dtype=torch.bfloat16),
    "softmax, per head": Case(130, gate="mixed", per_head=True, segments=True, normalizer=True, q_lse=True),
    "softmax, per head, bf16": Case(97, per_head=True, F=64, V=65, q_lse=True, dtype=torch.bfloat16),
}


def inputs(case: Case) -> dict[str, Any]:
    B, H = case.B, case.G * case.R
    random = torch.Generator().manual_seed(case.T)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(case.dtype)

    gate = normal(B, case.T, case.G, 1 if case.per_head else case.F)
    log_a: Tensor | None
    if case.gate == "none":
        log_a = None
    elif case.gate == "mixed":
        log_a = gate.new_tensor([0.0, -0.01, -20.0, -200.0])[torch.randint(4, gate.shape, generator=random)]
    elif case.gate in ("mild", "strong"):
        log_a = nnf.logsigmoid(gate) * (1 / 16 if case.gate == "mild" else 2)
    elif case.gate == "patches":  # strong gates in every other 64 tokens
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
        "initial_state": normal(B, case.G, case.F, case.V + case.normalizer) if case.state else None,
        "segment_ids_BT": 7 + starts.cumsum(1) if case.segments else None,
        "exclusive": case.exclusive,
    }
    if case.q_lse:  # deliberately not exactly that of q, because the op treats it as an independent input
        exact_BTH = made["q_BTHF"].to(torch.promote_types(case.dtype, torch.float32)).logsumexp(-1)
        made["q_lse_BTH"] = exact_BTH + torch.randn(exact_BTH.shape, generator=random) / 4
    if case.normalizer:
        write_mask_BTG = torch.rand(B, case.T, case.G, generator=random) < 0.8
        write_mask_BTG[0, : case.T // 3] = False
        made["write_mask_BTG"] = write_mask_BTG
    return made
