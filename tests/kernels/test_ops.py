"""Every op on every one of its cases: the fast implementation against the plain reference in float64.

An op that is added to OPS, with its folder's `naive.py` and `cases.py`, is tested without a change here.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from gated_kernels import OPS
from gated_kernels.check import Inputs, Op, error, faults, run
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def cases_of(op: str) -> Any:
    return import_module(f"gated_kernels.{op}.cases")


def reference_of(op: str) -> Op:
    return getattr(import_module(f"gated_kernels.{op}.naive"), f"naive_{op}")


def inputs_of(op: str, case: str) -> Inputs:
    return cases_of(op).inputs(cases_of(op).CASES[case])


IDLE = ("one token", "a token more than a chunk", "normalizer, one token", "normalizer, segments", "normalizer, strong")
every_op = pytest.mark.parametrize("op", OPS)
every_case = pytest.mark.parametrize(("op", "case"), [(op, case) for op in OPS for case in cases_of(op).CASES])


@every_case
def test_op_errs_at_most_twice_as_much_as_the_reference_in_its_dtype(op: str, case: str) -> None:
    assert not faults(OPS[op], reference_of(op), inputs_of(op, case))


@every_case
@pytest.mark.parametrize("way", ["in_pieces", "one_by_one"])
def test_cutting_a_sequence_changes_nothing(op: str, case: str, way: str) -> None:
    inputs, cut = inputs_of(op, case), getattr(cases_of(op), way)
    whole, pieces = run(OPS[op], inputs, torch.float64), run(lambda **x: cut(OPS[op], x), inputs, torch.float64)
    assert {name: error(pieces[name], whole[name]) for name in whole if error(pieces[name], whole[name]) > 1e-12} == {}


@every_case
def test_results_are_deterministic_and_the_same_under_autocast(op: str, case: str) -> None:
    inputs = inputs_of(op, case)

    def autocast(**x: Any) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return OPS[op](**x)

    first, second = run(OPS[op], inputs), run(autocast, inputs)
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize("case", cases_of("swa").CASES)
def test_a_long_window_is_right_in_parts_too(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("gated_kernels.swa.chunk"), "LOGITS", 1)
    assert not faults(OPS["swa"], reference_of("swa"), inputs_of("swa", case))


def test_one_gate_per_head_multiplies_no_features_one_by_one() -> None:
    """Such products took most of the time of a backward pass."""
    inputs = inputs_of("simple_gla", "normalizer, strong") | {"exclusive": True}
    q, k = inputs["q_BTHF"].requires_grad_(), inputs["k_BTGF"].requires_grad_()
    with Products() as products:
        o, normalizer, _ = OPS["simple_gla"](**inputs)
        (o.sum() + normalizer.sum()).backward()
    assert products.largest < q.numel()
    with Products() as products:
        k.mul(k.new_ones(())), q.mul(2.0)
    assert products.largest == q.numel(), "the measure itself"


class Products(TorchDispatchMode):
    """Notes the size of the largest product of elements that is computed."""

    largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket in (torch.ops.aten.mul, torch.ops.aten.mul_, torch.ops.aten.div):
            self.largest = max(self.largest, result.numel())
        return result


@every_op
def test_inference_mode_gives_the_same(op: str) -> None:
    inputs = inputs_of(op, next(reversed(cases_of(op).CASES)))
    with torch.inference_mode():
        inferred = OPS[op](**{name: x.clone() if isinstance(x, Tensor) else x for name, x in inputs.items()})
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(inferred, OPS[op](**inputs), strict=True))


@every_op
def test_heads_that_do_not_divide_are_refused(op: str) -> None:
    inputs = inputs_of(op, next(iter(cases_of(op).CASES)))
    query = next(name for name in inputs if name.startswith(("q_", "x_")))
    with pytest.raises(ValueError, match=r"5 (query )?heads"):
        OPS[op](**inputs | {query: inputs[query][:, :, :5]})


@pytest.mark.parametrize(
    ("op", "case"),
    [(op, case) for op in OPS if "one token" in cases_of(op).CASES for case in cases_of(op).CASES if case in IDLE],
)
def test_tokens_of_zeros_leave_a_state_exactly_as_it_was(op: str, case: str) -> None:
    inputs = inputs_of(op, case)
    tokens = {name for name in inputs if ("_BT" in name or name.startswith("log_")) and name[:2] != "q_"}
    written = {name for name in tokens if isinstance(inputs[name], Tensor)}
    idle = inputs | {name: torch.zeros_like(inputs[name]) for name in written}
    o_BTHV, *_, last_state = OPS[op](**idle)
    assert torch.equal(last_state, inputs["initial_state"])
    assert o_BTHV.any()
