"""The Triton kernels of the elementwise recurrence: on a GPU or, without one, in Triton's interpreter."""

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
from gated_kernels.common import gated_inputs  # noqa: E402
from gated_kernels.common.registry import kernels_for, set_kernel  # noqa: E402
from gated_kernels.elementwise import cases, launch  # noqa: E402
from gated_kernels.elementwise import triton as kernels  # noqa: E402
from gated_kernels.elementwise.cases import Case, in_pieces, inputs, one_by_one  # noqa: E402
from gated_kernels.elementwise.naive import naive_elementwise as reference  # noqa: E402

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SMALL: dict[str, Any] = {"G": 1, "R": 2, "F": 5, "V": 6}  # in the interpreter every chunk is of 16 tokens
OWN = {
    "one token": Case(1, **SMALL),
    "one token, exclusive, no state": Case(1, exclusive=True, state=False, **SMALL),
    "two tokens of segments": Case(2, segments=True, **SMALL),
    "a token less than a chunk": Case(15, **SMALL),
    "a chunk": Case(16, exclusive=True, **SMALL),
    "a token more than a chunk": Case(17, **SMALL),
    "three chunks, no state": Case(45, state=False, **SMALL),
    "six chunks": Case(83, G=1, R=1, F=2, V=3),
    "segments, exclusive, holes": Case(37, segments=True, exclusive=True, holes=True, **SMALL),
    "segments": Case(37, segments=True, **SMALL),
    "slow": Case(33, dt=1e-4, **SMALL),
    "no decay": Case(33, dt=0.0, **SMALL),
    "strong, exclusive": Case(33, dt=20.0, exclusive=True, **SMALL),
    "stronger": Case(33, dt=200.0, **SMALL),
    "bf16": Case(33, dtype=BF16, **SMALL),
    "fp16": Case(33, exclusive=True, dtype=FP16, **SMALL),
    "bf16 values": Case(20, v_dtype=BF16, **SMALL),
    "several blocks of values": Case(18, G=2, R=2, F=3, V=65),
    "several blocks of values, bf16": Case(18, G=1, R=2, F=3, V=65, dtype=BF16),
    "many features": Case(18, G=1, R=1, F=130, V=7),
    "heads of two values": Case(18, G=19, R=2, F=5, V=2, segments=True),
}
LONG = {name: case for name, case in cases.CASES.items() if case.dtype != torch.float64}


@pytest.fixture(autouse=True)
def _kernels_alone() -> Iterator[None]:
    """The op must run by the kernels. If it falls back to torch, its warning fails the test."""
    before = kernels_for("elementwise")
    set_kernel("elementwise", kernels.triton_elementwise)
    gated_inputs.warn_once.cache_clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="elementwise runs in torch")
        yield
    set_kernel("elementwise", *before)


def inputs_of(case: Case) -> Inputs:
    return {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in inputs(case).items()}


every_case = pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=name) for name, case in OWN.items()),
        *(pytest.param(case, id=f"{name} of all paths", marks=pytest.mark.slow) for name, case in LONG.items()),
    ],
)


@every_case
def test_kernels_err_at_most_twice_as_much_as_the_reference_in_its_dtype(case: Case) -> None:
    assert not faults(gated_kernels.chunk_elementwise, reference, inputs_of(case))


@pytest.mark.parametrize(("chunk", "T"), [(32, 71), (64, 66)])
def test_results_depend_neither_on_chunk_length_nor_on_scratch_size(
    chunk: int, T: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "CHUNKS", (chunk,))
    monkeypatch.setattr(launch, "SCRATCH", 1)  # one chunk at a time
    assert not faults(gated_kernels.chunk_elementwise, reference, inputs_of(Case(T, segments=True, **SMALL)))


@pytest.mark.parametrize("result", ["output", "state"])
def test_a_gradient_may_come_by_one_result_alone(result: str) -> None:
    inputs = inputs_of(OWN["a token more than a chunk"])
    alone = ("output", "state").index(result)
    op = gated_kernels.chunk_elementwise
    assert not faults(lambda **x: op(**x)[alone], lambda **x: reference(**x)[alone], inputs)


@pytest.mark.parametrize("case", ["segments", "strong, exclusive"])
@pytest.mark.parametrize("split", [in_pieces, one_by_one])
def test_cutting_a_sequence_changes_nothing(split: Any, case: str) -> None:
    assert not faults(lambda **x: split(gated_kernels.chunk_elementwise, x), reference, inputs_of(OWN[case]))


@pytest.mark.parametrize("case", ["a token more than a chunk", "bf16"])
def test_results_do_not_depend_on_how_the_inputs_lie_in_memory_nor_on_autocast(case: str) -> None:
    inputs = inputs_of(OWN[case])
    strided = {name: x.mT.contiguous().mT if isinstance(x, Tensor) else x for name, x in inputs.items()}

    def autocast(**x: Any) -> tuple[Tensor, ...]:
        with torch.autocast(DEVICE, dtype=BF16):
            return gated_kernels.chunk_elementwise(**x)

    first, second = run(gated_kernels.chunk_elementwise, inputs), run(autocast, strided)
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize("case", ["heads of two values", "strong, exclusive"])
def test_one_query_for_all_tokens_and_one_key_and_step_for_all_channels_are_taken_as_they_are(case: str) -> None:
    """The mixer s4 has such inputs: keys and steps are expanded, so that their strides are 0."""
    x = inputs_of(OWN[case])
    given = x | {"q_BTHF": x["q_BTHF"][:1, :1], "k_BTGF": x["k_BTGF"][..., :1], "dt_BTGV": x["dt_BTGV"][..., :1]}

    def expanded(op: Any) -> Any:
        def call(**y: Any) -> Any:
            shapes = {name: x[name].shape for name in ("k_BTGF", "dt_BTGV")}
            return op(**y | {name: y[name].expand(shape) for name, shape in shapes.items()})

        return call

    assert not faults(expanded(gated_kernels.chunk_elementwise), expanded(reference), given)
    with_all = {"q_BTHF": given["q_BTHF"].expand_as(x["q_BTHF"])}
    one, each = (run(expanded(gated_kernels.chunk_elementwise), y)["output 0"] for y in (given, given | with_all))
    assert torch.equal(one, each)


def test_gradients_that_are_not_needed_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = inputs_of(OWN["a token more than a chunk"])
    wanted: list[list[bool]] = []
    backward = launch.backward

    def told(*given: Any) -> launch.Gradients:
        wanted.append(given[-1])
        return backward(*given)

    monkeypatch.setattr(launch, "backward", told)
    whole = run(gated_kernels.chunk_elementwise, inputs)
    of_v = run(lambda **x: gated_kernels.chunk_elementwise(**inputs | {"v_BTGV": x["v_BTGV"]}), inputs)
    assert wanted == [[True] * 4, [False, False, True, False]]
    assert torch.equal(of_v["gradient of v_BTGV"], whole["gradient of v_BTGV"])


def test_steps_of_zero_and_keys_of_zero_leave_a_state_exactly_as_it_was() -> None:
    inputs = inputs_of(OWN["a token more than a chunk"])
    idle = inputs | {name: torch.zeros_like(inputs[name]) for name in ("k_BTGF", "dt_BTGV")}
    assert torch.equal(gated_kernels.chunk_elementwise(**idle)[1], inputs["initial_state"])


def test_the_kernels_are_ops_that_torch_can_trace() -> None:
    x = inputs_of(OWN["two tokens of segments"])
    names = ("q_BTHF", "k_BTGF", "v_BTGV", "dt_BTGV", "log_A_GFV", "initial_state")
    given = (*(x[name].requires_grad_() for name in names), x["segment_ids_BT"], True)
    torch.library.opcheck(kernels.forward, given)
    o, last = kernels.forward(*given)
    given = tuple(y.detach() if isinstance(y, Tensor) else y for y in (*given, o, last))
    torch.library.opcheck(kernels.backward, (*given, [True, False, True, True]))


def test_only_the_inputs_are_kept_for_the_backward_pass() -> None:
    inputs = inputs_of(OWN["a token more than a chunk"])
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    leaves = {name: x.requires_grad_() if isinstance(x, Tensor) else x for name, x in inputs.items()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        gated_kernels.chunk_elementwise(**leaves)
    given = {x.data_ptr() for x in inputs.values() if isinstance(x, Tensor)}
    assert {x.data_ptr() for x in kept} <= given


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"dtype": torch.float64}, "inputs in float64"), ({"F": 257}, "257 features a head")],
)
def test_what_the_kernels_do_not_take_is_left_to_torch_with_one_warning(changes: dict, why: str) -> None:
    inputs = inputs_of(OWN["one token"]._replace(**changes))
    with pytest.warns(UserWarning, match=f"do not support {why}") as caught:
        assert [kernels.triton_elementwise(**inputs) for _ in range(2)] == [None, None]
    assert len(caught) == 1
    assert gated_kernels.chunk_elementwise(**inputs)[0].shape == (2, 1, 2, 6)


def test_a_tensor_of_another_shape_is_left_to_torch() -> None:
    inputs = inputs_of(OWN["one token"])
    with pytest.warns(UserWarning, match=r"do not support \(2, 1, 1, 1\) on \w+(:0)? where \(2, 1, 1, 6\)"):
        assert kernels.triton_elementwise(**inputs | {"dt_BTGV": inputs["dt_BTGV"][..., :1]}) is None


@pytest.mark.parametrize("path", ["triton", "torch"])
def test_the_kernels_run_unless_torch_is_asked_for(path: str) -> None:
    gated_kernels.use(path)
    try:
        assert gated_kernels.in_use() == path
        assert kernels_for("elementwise") == ((kernels.triton_elementwise,) if path == "triton" else ())
    finally:
        gated_kernels.use("torch")


@pytest.mark.parametrize("broken", ["states", "sums", "kept states", "read"])
def test_the_comparison_notices_broken_kernels(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = inputs_of(OWN["a token more than a chunk"])
    launched = launch._Call.run

    def changed(self: Any, kernel: Any, *tensors: Any, **which: Any) -> None:
        if broken == "states" and kernel is launch.outputs_kernel:
            tensors[6][:, 1].zero_()  # that before the second chunk
        elif broken == "kept states" and kernel is launch.dinputs_kernel:
            tensors[7][: self.block].zero_()
        elif broken == "read" and kernel is launch.dends_kernel:
            self.fixed["EXCLUSIVE"] = 1
        launched(self, kernel, *tensors, **which)
        if broken == "sums" and kernel is launch.ends_kernel:
            tensors[6].zero_()
        self.fixed["EXCLUSIVE"] = 0

    monkeypatch.setattr(launch._Call, "run", changed)
    assert faults(gated_kernels.chunk_elementwise, reference, inputs)
