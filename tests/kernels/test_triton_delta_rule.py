"""The Triton kernels of the delta rule: on a GPU or, without one, in Triton's interpreter."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
triton = pytest.importorskip("triton", reason="Triton is not installed")

import gated_kernels  # noqa: E402
from gated_kernels.check import Inputs, error, faults, run  # noqa: E402
from gated_kernels.common import gated_inputs  # noqa: E402
from gated_kernels.common.registry import kernels_for, set_kernel  # noqa: E402
from gated_kernels.delta_rule import cases, launch  # noqa: E402
from gated_kernels.delta_rule import triton as kernels  # noqa: E402
from gated_kernels.delta_rule.cases import Case, gla, in_pieces, inputs  # noqa: E402
from gated_kernels.delta_rule.naive import naive_delta_rule as reference  # noqa: E402

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROUNDING = torch.finfo(BF16).eps / 8  # `faults` allows four of these: half a unit of bf16's last digit
SMALL: dict[str, Any] = {"G": 1, "R": 2, "F": 16, "V": 17}
SHARED = {
    name: cases.CASES[name]._replace(sizes=cases.CASES[name].sizes._replace(T=70, **SMALL))
    for name in (
        "no decay",
        "no decay, exclusive, segments",
        "per head",
        "per head, -200 and 0",
        "per head, strong, exclusive",
        "one key, no decay",
        "erases elsewhere, no decay, exclusive, segments",
        "erases elsewhere, per head",
    )
}
OWN = {
    "two tokens, no state": Case(gla.Case(2, state=False, per_head=True, **SMALL)),
    "a chunk of 32": Case(gla.Case(32, per_head=True, **SMALL)),
    "a token more than a chunk": Case(gla.Case(33, per_head=True, exclusive=True, **SMALL)),
    "three heads and groups, 5 features": Case(gla.Case(40, F=5, V=3, per_head=True, gate="mixed", segments=True)),
    "heads of 80 and 65": Case(gla.Case(40, G=1, R=1, F=80, V=65, per_head=True)),
    "fp16": Case(gla.Case(70, gate="mixed", per_head=True, exclusive=True, dtype=FP16, **SMALL)),
    "bf16 values": Case(gla.Case(40, per_head=True, v_dtype=BF16, **SMALL)),
    "two tokens, bf16": Case(gla.Case(2, gate="none", dtype=BF16, **SMALL)),
    "a chunk of 64, exclusive, bf16": Case(gla.Case(64, per_head=True, exclusive=True, dtype=BF16, **SMALL)),
    "segments, three chunks, bf16": Case(
        gla.Case(130, per_head=True, gate="mixed", segments=True, exclusive=True, dtype=BF16, **SMALL)
    ),
    "steady -20, bf16": Case(gla.Case(70, per_head=True, gate="-20", dtype=BF16, **SMALL)),
    "steady -60, exclusive, bf16": Case(gla.Case(70, per_head=True, gate="-60", exclusive=True, dtype=BF16, **SMALL)),
    "heads of 128, bf16": Case(gla.Case(130, G=1, R=4, F=128, V=128, per_head=True, dtype=BF16, B=1)),
    "heads of 96 and 80, no decay, bf16": Case(gla.Case(97, R=1, F=96, V=80, gate="none", dtype=BF16, B=1)),
    "erases elsewhere, bf16": Case(gla.Case(40, per_head=True, segments=True, dtype=BF16, **SMALL), True),
}
LONG = {
    "300 tokens": Case(gla.Case(300, F=64, V=65, per_head=True)),
    "300 tokens, bf16": Case(gla.Case(300, F=64, V=64, per_head=True, gate="strong", segments=True, dtype=BF16)),
    "300 tokens, heads of 128": Case(gla.Case(300, G=1, R=4, F=128, V=128, per_head=True, exclusive=True)),
    "300 tokens, one head, fp16": Case(gla.Case(300, G=1, R=1, F=128, V=64, per_head=True, dtype=FP16)),
    "500 tokens, no decay, bf16": Case(gla.Case(500, G=1, R=3, F=64, V=128, gate="none", dtype=BF16, B=1)),
    "300 tokens, erases elsewhere, bf16": Case(gla.Case(300, F=64, V=64, per_head=True, dtype=BF16), True),
}


@pytest.fixture(autouse=True)
def _kernels_alone() -> Iterator[None]:
    """The op runs by the kernels or, with a warning, which fails here, not at all."""
    before = kernels_for("delta_rule")
    set_kernel("delta_rule", kernels.triton_delta_rule)
    gated_inputs.warn_once.cache_clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="delta_rule runs in torch")
        yield
    set_kernel("delta_rule", *before)


def inputs_of(case: Case) -> Inputs:
    return {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in inputs(case).items()}


def rounding_of(case: Case) -> float | None:
    if case.sizes.dtype == FP32 and case.sizes.v_dtype is None:
        return 2**-21 if DEVICE == "cuda" else None  # three TF32 products hold 22 bits of a factor
    if case.sizes.dtype == FP16:
        return torch.finfo(FP16).eps if DEVICE == "cuda" else None  # one does 11
    return ROUNDING if case.sizes.dtype == BF16 else None


every_case = pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=name) for name, case in (SHARED | OWN).items()),
        *(pytest.param(case, id=name, marks=pytest.mark.slow) for name, case in LONG.items()),
    ],
)


@every_case
def test_kernels_err_at_most_twice_as_much_as_the_reference_in_its_dtype(case: Case) -> None:
    assert not faults(gated_kernels.chunk_delta_rule, reference, inputs_of(case), rounding_of(case))


def in_bf16_chunks(**x: Any) -> tuple[Tensor, Tensor]:
    """The plain computation in chunks with all products in bf16, which tokens of one key make inexact."""
    return x["v_BTGV"], x["initial_state"]
