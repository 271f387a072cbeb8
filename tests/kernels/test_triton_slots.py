"""Attention over slots by Triton kernels: on a GPU or, without one, in Triton's interpreter."""

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
from gated_kernels.check import Inputs, faults, run  # noqa: E402
from gated_kernels.common import gated_inputs, parts  # noqa: E402
from gated_kernels.gla import bf16  # noqa: E402
from gated_kernels.slots import cases  # noqa: E402
from gated_kernels.slots import triton as kernels  # noqa: E402
from gated_kernels.slots.cases import Case, in_pieces, inputs, one_by_one  # noqa: E402
from gated_kernels.slots.naive import naive_slots as reference  # noqa: E402

BF16, FP32 = torch.bfloat16, torch.float32
# `faults` allows four of these. Of the last digit of bf16 one half is a read: of the keys, then of the values
ROUNDING = torch.finfo(BF16).eps / 4
SMALL: dict[str, Any] = {"G": 1, "R": 2, "D": 16, "V": 17, "M": 7, "dtype": BF16}
# a quarter of a minute each in the interpreter
LONG = ("three chunks of segments, exclusive, holes, no state", "several heads", "blocks of slots", "keys of 128")
OWN = {
    "two tokens, no state": Case(2, state=False, **SMALL),
    "a token less than a chunk": Case(63, **SMALL),
    "a chunk, exclusive": Case(64, exclusive=True, **SMALL),
    "a token more than a chunk": Case(65, **SMALL),
    "three chunks of segments": Case(131, segments=True, **SMALL),
    "three chunks of segments, exclusive, holes, no state": Case(
        131, segments=True, exclusive=True, holes=True, state=False, **SMALL
    ),
    "strong": Case(97, gate="strong", **SMALL),
    "-200 and 0, segments": Case(97, gate="mixed", segments=True, **SMALL),
    "-200 and 0, exclusive": Case(97, gate="mixed", exclusive=True, **SMALL),
    "no decay": Case(97, gate="none", **SMALL),
    "not normalized": Case(97, normalize=False, **SMALL),
    "not normalized, -200 and 0, segments, exclusive": Case(
        97, gate="mixed", normalize=False, segments=True, exclusive=True, **SMALL
    ),
    "several heads": Case(70, G=2, R=3, M=33, dtype=BF16),
    "blocks of slots": Case(70, G=1, R=1, D=8, V=8, M=97, dtype=BF16),
    "keys of 128": Case(70, G=1, R=2, D=128, V=128, M=64, gate="mixed", segments=True, dtype=BF16),
}


@pytest.fixture(autouse=True)
def _in_triton() -> Iterator[None]:
    gated_inputs.warn_once.cache_clear()
    gated_kernels.use("triton")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "(slots|gla|simple_gla) runs in torch")  # nothing is left to it
        yield
    gated_kernels.use("torch")


def inputs_of(case: Case) -> Inputs:
    return {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in inputs(case).items()}


@pytest.mark.parametrize(
    "case", [pytest.param(OWN[name], id=name, marks=[pytest.mark.slow] * (name in LONG)) for name in OWN]
)
def test_kernels_err_at_most_twice_as_much_as_the_reference_and_the_roundings_of_their_products(case: Case) -> None:
    assert not faults(gated_kernels.chunk_slots, reference, inputs_of(case), ROUNDING)


def test_the_scale_applies_to_logits_and_not_to_normalizers() -> None:
    given = inputs_of(OWN["a token more than a chunk"]) | {"scale": 0.3}
    assert not faults(gated_kernels.chunk_slots, reference, given, ROUNDING)


@pytest.mark.parametrize("wrong", [1.0, 1.2])
def test_gates_of_slots_that_are_never_written_may_lose_the_digits_that_cancel(wrong: float) -> None:
    """The gate of such a slot scales its logit's numerator and its normalizer, so that their gradients cancel."""
    given = inputs_of(Case(97, segments=True, exclusive=True, holes=True, **SMALL | {"dtype": FP32}))
    given |= {name: given[name].to(BF16) for name in ("q_BTHD", "k_BTGD", "v_BTGV", "w_BTGM")}

    def slots(log_a: Tensor, **others: Any) -> tuple[Tensor, ...]:
        # the same gates, whose gradient is `wrong` times as large
        return gated_kernels.chunk_slots(log_a=wrong * log_a + (1 - wrong) * log_a.detach(), **others)

    found = faults(slots, reference, given, torch.finfo(BF16).eps)
    assert ["gradient of log_a" in fault for fault in found] == [True] * (wrong != 1)


@pytest.mark.parametrize("result", ["output", "log-sum-exp", "keys", "values"])
def test_a_gradient_may_come_by_one_result_alone(result: str) -> None:
    alone = ("output", "log-sum-exp", "keys", "values").index(result)
    ours, plain = (lambda **x: gated_kernels.chunk_slots(**x)[alone], lambda **x: reference(**x)[alone])
    assert not faults(ours, plain, inputs_of(OWN["a token more than a chunk"]), ROUNDING)


@pytest.mark.slow
@pytest.mark.parametrize("split", [in_pieces, one_by_one])
def test_cutting_a_sequence_changes_nothing_beyond_roundings(split: Any) -> None:
    given = inputs_of(OWN["three chunks of segments"])
    assert not faults(lambda **x: split(gated_kernels.chunk_slots, x), reference, given, ROUNDING)


@pytest.mark.slow
def test_the_tiles_of_chips_that_multiply_in_registers_are_right_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16.chips, "multiplies_in_registers", lambda device: True)
    assert not faults(gated_kernels.chunk_slots, reference, inputs_of(OWN["keys of 128"]), ROUNDING)


@pytest.mark.slow
def test_states_may_be_passed_over_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "STEPS", 1)
    monkeypatch.setattr(parts, "PROGRAMS", 8)
    assert not faults(gated_kernels.chunk_slots, reference, inputs_of(Case(420, segments=True, **SMALL)), ROUNDING)


def test_a_kernel_that_ignores_the_states_before_a_chunk_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    by_chunk = bf16._Call.by_chunk

    def forgetful(call: Any, name: str, *given: Any) -> None:
        if name == "transposed":
            call.states.zero_()
        by_chunk(call, name, *given)

    monkeypatch.setattr(bf16._Call, "by_chunk", forgetful)
    assert faults(gated_kernels.chunk_slots, reference, inputs_of(OWN["a token more than a chunk"]), ROUNDING)


def test_results_do_not_depend_on_how_the_inputs_lie_in_memory_nor_on_autocast() -> None:
    given = inputs_of(OWN["a token more than a chunk"])
    strided = {name: x.mT.contiguous().mT if isinstance(x, Tensor) else x for name, x in given.items()}

    def autocast(**x: Any) -> tuple[Tensor, ...]:
        with torch.autocast(DEVICE, dtype=BF16):
            return gated_kernels.chunk_slots(**x)

    first, second = run(gated_kernels.chunk_slots, given), run(autocast, strided)
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize("case", ["a token more than a chunk", "no decay"])
def test_torch_compile_sees_through_the_op(case: str) -> None:
    given = inputs_of(OWN[case])
    compiled = torch.compile(gated_kernels.chunk_slots, backend="aot_eager", fullgraph=True)
    eager, traced = run(gated_kernels.chunk_slots, given), run(compiled, given)
    assert [name for name in eager if not torch.equal(eager[name], traced[name])] == []


def test_other_dtypes_are_left_to_the_torch_op() -> None:
    given = inputs_of(cases.CASES["segments"])
    assert kernels.triton_slots(**given) is None
    assert kernels.triton_slots(**given | {"q_BTHD": given["q_BTHD"].to(BF16)}) is None
    assert kernels.triton_slots(**{n: x.to(BF16) if n[:2] in ("q_", "k_", "v_") else x for n, x in given.items()})


@pytest.mark.parametrize("wrong", ["k_BTGD", "w_BTGM", "keys_BGMD", "values_BGMV", "segment_ids_BT"])
def test_tensors_of_unexpected_shapes_never_reach_a_kernel(wrong: str) -> None:
    given = inputs_of(OWN["-200 and 0, segments"])
    given[wrong] = given[wrong][:, :-1]
    with pytest.warns(UserWarning, match="slots runs in torch"):
        assert kernels.triton_slots(**given) is None
