"""Every op on every one of its cases: the fast implementation against the plain reference in float64.

Adding an op adds a line to OPS and its folder's `reference.py` and `cases.py`; nothing here changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from gated_kernels import OPS

Inputs = dict[str, Any]
Op = Callable[..., tuple[Tensor, ...]]


def cases_of(op: str) -> Any:
    return import_module(f"gated_kernels.{op}.cases")


def reference_of(op: str) -> Op:
    return getattr(import_module(f"gated_kernels.{op}.reference"), op)


every_case = pytest.mark.parametrize(("op", "case"), [(op, case) for op in OPS for case in cases_of(op).CASES])


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Uninitialised memory holds NaN, so that whoever reads it is found out."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


def inputs_of(op: str, case: str) -> Inputs:
    cases = cases_of(op)
    return cases.inputs(cases.CASES[case])


def run(function: Op, inputs: Inputs, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Outputs and the gradients of a random weighting of them by every floating-point input, by name."""
    leaves = {
        name: value.to(dtype or value.dtype, copy=True).requires_grad_()
        for name, value in inputs.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    outputs = function(**inputs | leaves)
    random = torch.Generator().manual_seed(0)
    loss = torch.zeros((), dtype=torch.float64)
    for output in outputs:
        weights = torch.randn(output.shape, generator=random, dtype=torch.float64)
        loss = loss + (output.masked_fill(output == -torch.inf, 0).double() * weights).sum()
    loss.backward()
    results = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
    for name, leaf in leaves.items():
        assert leaf.grad is not None, name
        results[f"gradient of {name}"] = leaf.grad
    return results


def error(got: Tensor, exact: Tensor) -> float:
    """Largest difference over largest magnitude, of what is finite."""
    assert torch.equal(got == -torch.inf, exact == -torch.inf)
    exact = exact.masked_fill(exact == -torch.inf, 0)
    got = got.double().masked_fill(got == -torch.inf, 0)
    assert got.isfinite().all()
    return float((got - exact).abs().max() / exact.abs().max().clamp(min=1e-300))


@every_case
def test_op_errs_at_most_twice_as_much_as_the_reference_in_its_dtype(op: str, case: str) -> None:
    inputs = inputs_of(op, case)
    exact = run(reference_of(op), inputs, torch.float64)
    plain, got, again = (run(f, inputs) for f in (reference_of(op), OPS[op], OPS[op]))
    for name in exact:
        assert got[name].dtype == plain[name].dtype, name
        # The reference may be exact by luck, and always is in float64: some roundings are allowed beside its error.
        computed_in = torch.promote_types(got[name].dtype, torch.float32)
        floor = (64 if computed_in == torch.float64 else 4) * torch.finfo(computed_in).eps
        assert error(got[name], exact[name]) <= 2 * error(plain[name], exact[name]) + floor, name
        assert torch.equal(got[name], again[name]), f"{name} is not deterministic"


@every_case
@pytest.mark.parametrize("way", ["in_pieces", "one_by_one"])
def test_cutting_a_sequence_changes_nothing(op: str, case: str, way: str) -> None:
    inputs = inputs_of(op, case)
    other = getattr(cases_of(op), way)
    whole, cut = run(OPS[op], inputs, torch.float64), run(lambda **x: other(OPS[op], x), inputs, torch.float64)
    for name in whole:
        assert error(cut[name], whole[name]) < 1e-12, name
