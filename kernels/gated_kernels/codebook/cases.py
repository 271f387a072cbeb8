"""Test inputs for the codebook's feature map, and other ways to get the same result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Case(NamedTuple):
    T: int
    G: int = 2
    R: int = 3
    D: int = 16
    F: int = 33
    log_inv_temperature: float = 2.0
    bias: float = 0.5
    dtype: torch.dtype = torch.float32
    v_dtype: torch.dtype | None = None  # dtype of the vectors; None: `dtype`
    B: int = 2


CASES = {  # small ones have so many heads that gradients with one number per head are not exact by luck
    "one vector": Case(1, G=8, R=4),
    "two codes": Case(5, G=4, R=8, F=2),
    "a head's own codes": Case(7, G=16, R=1, F=64),
    "no bias, float64": Case(9, bias=0.0, dtype=torch.float64),
    "odd sizes": Case(67, G=1, R=9, D=10, F=65),
    "two heads of 64": Case(65, R=2, D=64, F=128),
    "heads of 80": Case(33, D=80, F=257, G=1, R=9),
    "heads of 128, bf16": Case(70, G=1, R=4, D=128, F=256, log_inv_temperature=3.0, dtype=torch.bfloat16),
    "bf16 vectors": Case(97, D=64, v_dtype=torch.bfloat16),
    "many codes, bf16 vectors": Case(40, G=1, R=8, F=600, D=64, v_dtype=torch.bfloat16),
    "flat": Case(20, log_inv_temperature=-3.0),
    "one code in nearly all weights": Case(20, log_inv_temperature=5.0),
}


def inputs(case: Case) -> dict[str, Any]:
    B, N, E = case.B, case.G * case.R, max(1, case.D // 2)
    random = torch.Generator().manual_seed(case.T)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    found = {
        "proj_NDE": normal(N, case.D, E) * case.D**-0.5,
        "bias_NE": normal(N, E) * case.bias,
        "log_inv_temperature_N": case.log_inv_temperature + 0.2 * normal(N),
        "codes_GFE": normal(case.G, case.F, E) * E**-0.5,
    }
    x_BTND = normal(B, case.T, N, case.D).to(case.v_dtype or case.dtype)
    return {"x_BTND": x_BTND, **{name: x.to(case.dtype) for name, x in found.items()}}


def in_pieces(op: Callable[..., Tensor], x: dict[str, Any]) -> Tensor:
    """The tokens in two calls."""
    parts = x["x_BTND"].split(x["x_BTND"].shape[1] // 2 + 1, 1)
    return torch.cat([op(**x | {"x_BTND": part}) for part in parts], 1)


def one_by_one(op: Callable[..., Tensor], x: dict[str, Any]) -> Tensor:
    """Every row in a call of its own."""
    return torch.cat([op(**x | {"x_BTND": row}) for row in x["x_BTND"].split(1)])
