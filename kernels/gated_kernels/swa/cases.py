"""Test inputs for sliding-window attention, and other ways to get the same result."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gated_kernels.check import Op


class Case(NamedTuple):
    T: int
    P: int = 0
    W: int = 64
    M: int = 0
    G: int = 2
    R: int = 3
    D: int = 16
    V: int = 17
    valid: bool = False
    segments: bool = False
    dtype: torch.dtype = torch.float32
    v_dtype: torch.dtype | None = None  # dtype of the values; None: `dtype`
    memory: str = ""  # how a memory joins the output: as one more "key" of each query, or by a "mix weight"
    normalizer: bool = False  # whether the memory has a normalizer to be divided by
    softcap: float | None = None
    bias_channels: int = 0


CASES = {
    "one token, nothing before": Case(1),
    "one token, full window": Case(1, P=63, M=4),
    "one token, more past than window, bf16": Case(1, P=70, dtype=torch.bfloat16),
    "one token, holes and segments": Case(1, P=9, W=10, M=2, valid=True, segments=True),
    "window of 1": Case(70, W=1, G=1, R=4, D=64, V=65),
    "window of 1, past keys": Case(3, P=5, W=1, M=1),
    "window of 2": Case(33, P=1, W=2, R=1, D=5, V=5),
    "window of 5, float64": Case(97, P=4, W=5, M=3, dtype=torch.float64),
    "short, window of 64": Case(31, D=80, V=64),
    "window of 64": Case(130, D=64, V=64),
    "window of 64, past keys, sinks": Case(97, P=63, M=4, R=4),
    "window of 64, a few past keys": Case(65, P=7),
    "window of 64, more past than window": Case(65, P=80, M=2),
    "window of 100": Case(150, W=100, P=20, M=4),
    "window longer than the sequence": Case(40, W=100),
    "window of 300, float64": Case(330, W=300, P=10, dtype=torch.float64),
    "holes": Case(97, P=9, W=5, valid=True),
    "holes, sinks, bf16": Case(97, P=9, W=5, M=3, valid=True, dtype=torch.bfloat16),
    "segments": Case(97, P=30, W=64, segments=True),
    "segments, holes, sinks": Case(130, P=30, W=10, M=4, valid=True, segments=True),
    "bf16 values": Case(97, P=5, M=2, v_dtype=torch.bfloat16),
    "a memory as a key": Case(41, P=9, W=10, M=2, valid=True, segments=True, memory="key"),
    "a memory as a key, bf16": Case(97, M=4, D=64, V=64, memory="key", normalizer=True, dtype=torch.bfloat16),
    "a memory's sum as a key": Case(41, P=3, W=70, M=3, memory="key", normalizer=True),
    "a memory by a mix weight, holes": Case(41, P=9, W=10, valid=True, memory="mix weight"),
    "a memory by a mix weight, bf16": Case(97, D=64, V=64, memory="mix weight", dtype=torch.bfloat16),
    "a memory's sum by a mix weight": Case(21, P=9, W=10, M=3, memory="mix weight", normalizer=True),
    "one token and a memory": Case(1, P=20, W=16, M=2, memory="key", normalizer=True),
    "bounded logits, holes, segments, sinks": Case(97, P=9, W=10, M=2, valid=True, segments=True, softcap=2.0),
    "bounded logits, a bias, a memory as a key": Case(
        41, P=9, W=70, M=3, memory="key", normalizer=True, softcap=1.5, bias_channels=2
    ),
    "bounded logits of one token, a bias": Case(1, P=20, W=16, M=2, softcap=2.0, bias_channels=3),
    "bounded logits, bf16": Case(97, M=4, D=64, V=64, softcap=3.0, dtype=torch.bfloat16),
    "window of 64, bf16": Case(130, M=4, D=64, V=64, dtype=torch.bfloat16),
}


def inputs(case: Case) -> dict[str, Any]:
    B, S, H = 2, case.P + case.T, case.G * case.R
    random = torch.Generator().manual_seed(case.T)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(case.dtype)

    x: dict[str, Any] = {
        "q_BTHD": normal(B, case.T, H, case.D) * 3,
        "k_BSGD": normal(B, S, case.G, case.D),
        "v_BSGV": normal(B, S, case.G, case.V).to(case.v_dtype or case.dtype),
        "window_size": case.W,
        "scale": case.D**-0.5,
    }
    if case.softcap is not None:
        x |= {"softcap": case.softcap, "bias_channels": case.bias_channels}
    if case.valid:
        x["valid_BS"] = torch.rand(B, S, generator=random) < 0.4
        x["valid_BS"][0, : case.P + case.T // 2] = False  # padding on the left
    if case.segments:
        x["segment_ids_BS"] = 7 + (torch.rand(B, S, generator=random) < 0.06).cumsum(1)
    if case.M:
        x["sink_k_BMGD"] = normal(B, case.M, case.G, case.D)
        x["sink_v_BMGV"] = normal(B, case.M, case.G, case.V).to(case.v_dtype or case.dtype)
        x["sink_visible_BTM"] = torch.rand(B, case.T, case.M, generator=random) < 0.6
        x["sink_visible_BTM"][0, : case.T // 3] = False
    if case.memory:
        x["memory_BTHV"] = normal(B, case.T, H, case.V).to(case.v_dtype or case.dtype)
        memory_logit_BTH = torch.randn(B, case.T, H, generator=random, dtype=torch.float64) * 3
        float32 = torch.promote_types(case.dtype, torch.float32)
        if case.memory == "key":
            x["memory_logit_BTH"] = memory_logit_BTH.to(float32)
        else:
            x["mix_weight_H"] = memory_logit_BTH[0, 0].sigmoid().to(float32)
        if case.normalizer:
            x["normalizer_BTH"] = torch.rand(B, case.T, H, generator=random, dtype=torch.float64).to(float32) * 9 + 0.1
    return x


def _slice(x: dict[str, Any], queries: slice, keys: slice, rows: slice = slice(None)) -> dict[str, Any]:
    by_query = ("q_BTHD", "sink_visible_BTM", "memory_BTHV", "normalizer_BTH", "memory_logit_BTH")
    by_key = ("k_BSGD", "v_BSGV", "valid_BS", "segment_ids_BS")
    sliced = {name: x[name][rows, queries] for name in by_query if name in x}
    sliced |= {name: x[name][rows, keys] for name in by_key if name in x}
    return x | sliced | {name: x[name][rows] for name in ("sink_k_BMGD", "sink_v_BMGV") if name in x}


def in_pieces(op: Op, x: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Runs the op on pieces of uneven length, each with the window - 1 keys before it as past keys."""
    T, S = x["q_BTHD"].shape[1], x["k_BSGD"].shape[1]
    cuts = sorted({0, min(1, T), T // 3, T // 2 + 1, T})
    pieces = []
    for start, end in pairwise(cuts):
        keys = slice(max(S - T + start - x["window_size"] + 1, 0), S - T + end)
        pieces.append(op(**_slice(x, slice(start, end), keys)))
    o, lse = zip(*pieces)
    return torch.cat(o, 1), torch.cat(lse, 1)


def one_by_one(op: Op, x: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Runs the op on every segment of every sequence separately."""
    (B, T), S = x["q_BTHD"].shape[:2], x["k_BSGD"].shape[1]
    rows = []
    for b in range(B):
        segment = x["segment_ids_BS"][b] if "segment_ids_BS" in x else torch.zeros(S)
        start, pieces = 0, []
        for length in segment.unique_consecutive(return_counts=True)[1].tolist():
            end = start + length
            if end > S - T:
                queries = slice(max(start - (S - T), 0), end - (S - T))
                piece = _slice(x, queries, slice(start, end), slice(b, b + 1))
                pieces.append(op(**piece | {"segment_ids_BS": None}))
            start = end
        rows.append([torch.cat(part, 1) for part in zip(*pieces)])
    o, lse = zip(*rows)
    return torch.cat(o), torch.cat(lse)
