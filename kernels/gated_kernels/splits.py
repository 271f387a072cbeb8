"""Other ways to compute the result of a recurrence: the sequence in pieces, or its segments one at a time.

Inputs per token, [B, T, ...], have BT in their names, or are a gate, log_a or log_m. States, [B, G, ...], have BG in
their names, or are the `initial_state`. An op returns its outputs per token (None for those not requested), then its
states in the order of its arguments.

This module lives beside `check.py` and not in the tests because every op's `cases.py` names the splits that hold for
it. A new op is then tested without a change to the tests.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gated_kernels.check import Op


def in_pieces(op: Op, x: dict[str, Any]) -> tuple[Tensor, ...]:
    """Runs the op on pieces of uneven length, each starting from the states after the one before it."""
    T = x["segment_ids_BT"].shape[1] if x["segment_ids_BT"] is not None else next(iter(x.values())).shape[1]
    states, pieces = {name: x[name] for name in _states(x)}, []
    for start, end in pairwise(sorted({0, min(1, T), T // 3, T // 2 + 1, T})):
        if start and x["segment_ids_BT"] is not None:  # a segment that starts with the piece must not see these states
            same = x["segment_ids_BT"][:, start] == x["segment_ids_BT"][:, start - 1]
            states = {name: state * same[:, None, None, None] for name, state in states.items()}
        *outputs, states = _run(op, _slice(x, slice(start, end)) | states)
        pieces.append(outputs)
    return *(torch.cat(parts, 1) for parts in zip(*pieces)), *states.values()


def one_by_one(op: Op, x: dict[str, Any]) -> tuple[Tensor, ...]:
    """Runs the op on every segment of every sequence separately. The given states belong to the first segment."""
    B, T = next(iter(x.values())).shape[:2]
    segment_ids_BT = torch.zeros(B, T) if x["segment_ids_BT"] is None else x["segment_ids_BT"]
    rows = []
    for b in range(B):
        states = {name: None if x[name] is None else x[name][b : b + 1] for name in _states(x)}
        start, pieces = 0, []
        for length in segment_ids_BT[b].unique_consecutive(return_counts=True)[1].tolist():
            piece = _slice(x, slice(start, start + length), slice(b, b + 1))
            *outputs, last = _run(op, piece | states | {"segment_ids_BT": None})
            pieces.append(outputs)
            start, states = start + length, dict.fromkeys(states)
        rows.append((*(torch.cat(parts, 1) for parts in zip(*pieces)), *last.values()))
    return tuple(torch.cat(parts) for parts in zip(*rows))


def _states(x: dict[str, Any]) -> list[str]:
    return [name for name in x if name == "initial_state" or "_BG" in name]


def _run(op: Op, x: dict[str, Any]) -> tuple[Any, ...]:
    """The op's outputs per token, then a dict of its states by name."""
    names, results = _states(x), [result for result in op(**x) if result is not None]
    return *results[: -len(names)], dict(zip(names, results[-len(names) :]))


def _slice(x: dict[str, Any], tokens: slice, rows: slice = slice(None)) -> dict[str, Any]:
    cut = [name for name in x if ("_BT" in name or name in ("log_a", "log_m")) and x[name] is not None]
    return x | {name: x[name][rows, tokens] for name in cut}
