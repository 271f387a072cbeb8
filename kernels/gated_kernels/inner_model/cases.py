"""Test inputs for the inner model. Keys and queries have length 1 and steps hardly overshoot, because otherwise errors
would grow from token to token."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as nnf

from gated_kernels.splits import in_pieces, one_by_one

__all__ = ["CASES", "in_pieces", "inputs", "one_by_one"]


class Case(NamedTuple):
    """T tokens in mini-batches of `mini_batch` tokens. `hidden`: size of the hidden layer; 0: none."""

    T: int
    mini_batch: int = 16
    hidden: int = 0
    norm: bool = False
    decay: bool = False
    momentum: bool = False
    state: bool = True
    segments: bool = False
    exclusive: bool = False
    dtype: torch.dtype = torch.float32
    B: int = 2
    G: int = 2
    R: int = 3
    F: int = 5


CASES = {
    "one token": Case(1),
    "one token, all pieces, exclusive": Case(1, 4, 6, True, True, True, exclusive=True),
    "two tokens, no state": Case(2, state=False),
    "three tokens, float64": Case(3, 2, 6, dtype=torch.float64),
    "a mini-batch": Case(16, norm=True, state=False),
    "a token more than a mini-batch": Case(17, hidden=6),
    "linear": Case(50, 7),
    "linear, norm": Case(50, 7, norm=True),
    "hidden": Case(50, 7, 6),
    "hidden, norm, float64": Case(50, 7, 6, True, dtype=torch.float64),
    "a token a mini-batch": Case(20, 1, 6, decay=True, momentum=True),
    "decay and momentum": Case(50, 7, 6, decay=True, momentum=True),
    "momentum": Case(40, 7, momentum=True),
    "exclusive, float64": Case(40, 7, 6, True, decay=True, exclusive=True, dtype=torch.float64),
    "segments, float64": Case(60, 7, 6, True, segments=True, dtype=torch.float64),
    "segments": Case(60, 7, 6, segments=True),
    "segments, exclusive, all pieces, float64": Case(
        60, 5, 6, True, True, True, segments=True, exclusive=True, dtype=torch.float64
    ),
    "bf16": Case(50, 8, 6, decay=True, dtype=torch.bfloat16),
}


def inputs(case: Case) -> dict[str, Any]:
    random = torch.Generator().manual_seed(case.T)
    B, T, G, F = case.B, case.T, case.G, case.F

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    written = torch.rand(B, T, G, 1, generator=random) > 0.2
    hidden = case.hidden or F
    first, second = normal(G, F + 1, hidden), normal(G, hidden + 1, F) / hidden**0.5 if case.hidden else None
    P = first[0].numel() + (0 if second is None else second[0].numel())
    x: dict[str, Any] = {
        "q_BTHF": nnf.normalize(normal(B, T, G * case.R, F), dim=-1),
        "k_BTGF": nnf.normalize(normal(B, T, G, F), dim=-1),
        "v_BTGV": normal(B, T, G, F),
        "eta_BTG1": torch.rand(B, T, G, 1, generator=random, dtype=torch.float64) * written / (10 + 4 * case.hidden),
        "log_a": nnf.logsigmoid(normal(B, T, G, 1) + 3) * written if case.decay else None,
        "log_m": nnf.logsigmoid(normal(B, T, G, 1)) * written if case.momentum else None,
        "written_BTG1": written,
        "first_GFW": first,
        "second_GWV": second,
        "norm_G2V": torch.stack([normal(G, F) * 0.3 + 1, normal(G, F) * 0.3], 1) if case.norm else None,
        "scale": 1.5,
        "mini_batch": case.mini_batch,
        "initial_state": None,
        "segment_ids_BT": None,
        "exclusive": case.exclusive,
    }
    if case.state:
        state = normal(B, G, 3 if case.momentum else 2, P + 2) * 0.1
        state[..., -2] = -state[..., -2].abs()
        state[..., -1] = torch.randint(0, case.mini_batch, state.shape[:-1], generator=random).to(state)
        state[:, :, 1:, -1] = 0
        state[:, :, 2:, -2] = 0
        x["initial_state"] = state
    if case.segments:
        lengths = torch.tensor([[3, 20, 2, 9, T - 34], [1, 7, 30, 5, T - 43]])
        x["segment_ids_BT"] = torch.stack([torch.arange(5).repeat_interleave(row) for row in lengths])
    return {
        name: value.to(case.dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in x.items()
    }
