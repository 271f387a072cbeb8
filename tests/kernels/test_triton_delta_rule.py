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
from gated_kernels.delta_rule import by_feature_launch, cases, launch, step  # noqa: E402
from gated_kernels.delta_rule import triton as kernels  # noqa: E402
from gated_kernels.delta_rule.cases import Case, gla, in_pieces, inputs  # noqa: E402
from gated_kernels.delta_rule.naive import naive_delta_rule as reference  # noqa: E402

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROUNDING = torch.finfo(BF16).eps / 8  # `faults` allows four of these: half a unit of bf16's last digit
SMALL: dict[str, Any] = {"G": 1, "R": 2, "F": 16, "V": 17}
SHARED = {
    name: cases.CASES[name]._replace(sizes=cases.CASES[name].sizes._replace(T=40, B=1, **SMALL))
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
    "fp16": Case(gla.Case(70, gate="mixed", per_head=True, exclusive=True, dtype=FP16, **SMALL)),
    "bf16 values": Case(gla.Case(40, per_head=True, v_dtype=BF16, **SMALL)),
    "two tokens, bf16": Case(gla.Case(2, gate="none", dtype=BF16, **SMALL)),
    "a chunk of 64, exclusive, bf16": Case(gla.Case(64, per_head=True, exclusive=True, dtype=BF16, **SMALL)),
    "segments, three chunks, bf16": Case(
        gla.Case(130, per_head=True, gate="mixed", segments=True, exclusive=True, dtype=BF16, **SMALL)
    ),
    "steady -60, exclusive, bf16": Case(gla.Case(70, per_head=True, gate="-60", exclusive=True, dtype=BF16, **SMALL)),
    "heads of 128, bf16": Case(gla.Case(130, G=1, R=4, F=128, V=128, per_head=True, dtype=BF16, B=1)),
    "a gate per feature, bf16": Case(gla.Case(70, dtype=BF16, B=1, **SMALL)),
    "a gate per feature, -200 and 0, segments, bf16": Case(
        gla.Case(70, gate="mixed", segments=True, dtype=BF16, B=1, **SMALL)
    ),
    "a gate per feature, some strong, exclusive, bf16": Case(
        gla.Case(130, gate="patches", exclusive=True, segments=True, dtype=BF16, B=1, **SMALL)
    ),
    "a gate per feature, erases elsewhere, bf16": Case(gla.Case(40, segments=True, dtype=BF16, B=1, **SMALL), True),
    "erases elsewhere, bf16": Case(gla.Case(40, per_head=True, segments=True, dtype=BF16, **SMALL), True),
}
LONG = {
    "heads of 80 and 65": Case(gla.Case(40, G=1, R=1, F=80, V=65, per_head=True)),
    "heads of 96 and 80, no decay, bf16": Case(gla.Case(97, R=1, F=96, V=80, gate="none", dtype=BF16, B=1)),
    "a gate per feature, heads of 80 and 128, bf16": Case(gla.Case(70, G=1, F=80, V=128, dtype=BF16, B=1)),
    "a gate per feature, steady -20, bf16": Case(gla.Case(65, gate="-20", dtype=BF16, B=1, **SMALL)),
    "steady -20, bf16": Case(gla.Case(70, per_head=True, gate="-20", dtype=BF16, **SMALL)),
    "300 tokens": Case(gla.Case(300, F=64, V=65, per_head=True)),
    "300 tokens, bf16": Case(gla.Case(300, F=64, V=64, per_head=True, gate="strong", segments=True, dtype=BF16)),
    "300 tokens, heads of 128": Case(gla.Case(300, G=1, R=4, F=128, V=128, per_head=True, exclusive=True)),
    "300 tokens, one head, fp16": Case(gla.Case(300, G=1, R=1, F=128, V=64, per_head=True, dtype=FP16)),
    "500 tokens, no decay, bf16": Case(gla.Case(500, G=1, R=3, F=64, V=128, gate="none", dtype=BF16, B=1)),
    "300 tokens, a gate per feature, bf16": Case(gla.Case(300, F=128, V=128, gate="strong", dtype=BF16, B=1)),
    "300 tokens, erases elsewhere, bf16": Case(gla.Case(300, F=64, V=64, per_head=True, dtype=BF16), True),
}


@pytest.fixture(autouse=True)
def _kernels_alone() -> Iterator[None]:
    """The op must run by the kernels. If it falls back to torch, its warning fails the test."""
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


@pytest.mark.parametrize("result", ["output", "state"])
def test_a_gradient_may_come_by_one_result_alone(result: str) -> None:
    inputs = inputs_of(OWN["a token more than a chunk"])
    alone = ("output", "state").index(result)
    assert not faults(lambda **x: gated_kernels.chunk_delta_rule(**x)[alone], lambda **x: reference(**x)[alone], inputs)


@pytest.mark.parametrize("case", ["per head, -200 and 0", "erases elsewhere, no decay, exclusive, segments"])
def test_cutting_a_sequence_changes_nothing(case: str) -> None:
    inputs = inputs_of(SHARED[case])
    rounding = rounding_of(SHARED[case])
    assert not faults(lambda **x: in_pieces(gated_kernels.chunk_delta_rule, x), reference, inputs, rounding)


@pytest.mark.parametrize("case", ["a token more than a chunk", "fp16", "a chunk of 64, exclusive, bf16"])
def test_results_do_not_depend_on_how_the_inputs_lie_in_memory_nor_on_autocast(case: str) -> None:
    inputs = inputs_of(OWN[case])
    strided = {name: x.mT.contiguous().mT if isinstance(x, Tensor) else x for name, x in inputs.items()}

    def autocast(**x: Any) -> tuple[Tensor, ...]:
        with torch.autocast(DEVICE, dtype=BF16):
            return gated_kernels.chunk_delta_rule(**x)

    first, second = run(gated_kernels.chunk_delta_rule, inputs), run(autocast, strided)
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize(
    "case", ["a token more than a chunk", "a chunk of 64, exclusive, bf16", "a gate per feature, bf16"]
)
def test_a_gate_of_minus_infinity_forgets_everything_before_it(case: str) -> None:
    inputs = inputs_of(OWN[case])
    inputs["log_a"][:, 20] = -torch.inf
    after = {name: x[:, 20:] if "_BT" in name or name == "log_a" else x for name, x in inputs.items() if x is not None}
    after |= {"initial_state": torch.zeros_like(inputs["initial_state"]), "exclusive": inputs["exclusive"]}
    first = 20 + inputs["exclusive"]  # the token of the gate reads what was before it
    (o, last), (o_after, last_after) = (gated_kernels.chunk_delta_rule(**x) for x in (inputs, after))
    allowed = 1e-6 if o.dtype == FP32 else 0.02  # the chunks begin elsewhere
    assert error(o[:, first:], o_after[:, first - 20 :]) <= allowed
    assert error(last, last_after) <= allowed
    assert all(x.isfinite().all() for x in run(gated_kernels.chunk_delta_rule, inputs).values())


@pytest.mark.parametrize(
    "case", ["a token more than a chunk", "a chunk of 64, exclusive, bf16", "a gate per feature, bf16"]
)
@pytest.mark.parametrize("erases_elsewhere", [False, True])
def test_tokens_of_zeros_leave_a_state_exactly_as_it_was(case: str, erases_elsewhere: bool) -> None:
    inputs = inputs_of(OWN[case]._replace(erases_elsewhere=erases_elsewhere))
    zeros = [name for name in ("k_BTGF", "e_BTGF", "log_a") if inputs[name] is not None]
    idle = inputs | {name: torch.zeros_like(inputs[name]) for name in zeros}
    assert torch.equal(gated_kernels.chunk_delta_rule(**idle)[1], inputs["initial_state"].float())


def never_asked(*args: Any, **options: Any) -> None:
    raise AssertionError("ours take this call")


@pytest.mark.parametrize("case", ["two tokens, no state", "a gate per feature, bf16"])
def test_torch_compile_sees_through_the_op(case: str) -> None:
    set_kernel("delta_rule", kernels.triton_delta_rule, torch.compiler.disable(never_asked))  # as fla-core's is
    inputs = inputs_of(OWN[case])
    compiled = torch.compile(gated_kernels.chunk_delta_rule, backend="aot_eager", fullgraph=True)
    eager, traced = run(gated_kernels.chunk_delta_rule, inputs), run(compiled, inputs)
    assert [name for name in eager if not torch.equal(eager[name], traced[name])] == []


@pytest.mark.parametrize("gated", ["no", "per head", pytest.param("per feature", marks=pytest.mark.slow)])
def test_the_custom_ops_keep_to_what_torch_asks_of_them(gated: str) -> None:
    torch.use_deterministic_algorithms(False)  # its checks compare uninitialised memory
    sizes = OWN["two tokens, no state"].sizes
    per_feature = sizes._replace(per_head=False, dtype=BF16)
    x = inputs_of(Case(per_feature if gated == "per feature" else sizes))
    q, k, v, r, log_a = (x[name].requires_grad_() for name in ("q_BTHF", "k_BTGF", "v_BTGV", "r_BTGF", "log_a"))
    state = q.new_zeros(2, 1, 16, 17, requires_grad=True, dtype=FP32)
    given = (q, k, v, r, None if gated == "no" else log_a, state, None, True)
    torch.library.opcheck(kernels.forward, given)
    o, last = kernels.forward(*given)
    torch.library.opcheck(
        kernels.backward, tuple(x.detach() if isinstance(x, Tensor) else x for x in (*given, o, last))
    )


@pytest.mark.parametrize(
    "case", ["a gate per feature, -200 and 0, segments, bf16", "segments, three chunks, bf16", "fp16"]
)
def test_launches_look_at_no_value_so_that_a_cuda_graph_holds_them(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device without values, reading a value raises an error, and tensors made on another device are noticed."""
    launched: list[Tensor] = []

    def launch_nothing(kernel: Any, grid: Any) -> Any:
        return lambda *given, **options: launched.extend(x for x in given if isinstance(x, Tensor))

    monkeypatch.setattr(type(launch.solve_kernel), "__getitem__", launch_nothing)
    x = {name: x.to("meta") if isinstance(x, Tensor) else x for name, x in inputs(OWN[case]).items()}
    factors = [x[name] for name in ("q_BTHF", "k_BTGF", "v_BTGV", "r_BTGF", "log_a")]
    given = *factors, x["initial_state"].float(), x["segment_ids_BT"], x["exclusive"]
    passed = launch if OWN[case].sizes.per_head else by_feature_launch
    results = passed.forward(*given)
    gradients = passed.backward(*given, *results)
    token = [f[:, :1].contiguous() for f in factors]
    results += step.step(*token, token[1], given[5], x["exclusive"])
    assert {f.device.type for f in (*results, *gradients, *launched)} == {"meta"}
    assert len(launched) > 30


STEPS = {
    "per head": gla.Case(1, per_head=True, **SMALL),
    "no decay, exclusive, bf16": gla.Case(1, gate="none", exclusive=True, dtype=BF16),
    "a gate per feature, -200 and 0, bf16": gla.Case(1, gate="mixed", F=80, V=65, dtype=BF16),
    "fp16": gla.Case(1, per_head=True, F=128, V=128, dtype=FP16),
}


@pytest.mark.parametrize("erases_elsewhere", [False, True])
@pytest.mark.parametrize("case", STEPS)
def test_a_step_of_one_token_errs_as_little_as_the_reference(case: str, erases_elsewhere: bool) -> None:
    inputs = inputs_of(Case(STEPS[case], erases_elsewhere=erases_elsewhere))
    set_kernel("delta_rule_step", kernels.triton_delta_rule_step)
    try:
        with torch.no_grad():
            o, last = gated_kernels.chunk_delta_rule(**inputs)
        assert gated_kernels.chunk_delta_rule(**inputs | {"q_BTHF": inputs["q_BTHF"].requires_grad_()})[0].requires_grad
    finally:
        set_kernel("delta_rule_step")
    inputs["q_BTHF"].requires_grad_(False)
    doubled = {name: x.double() if isinstance(x, Tensor) else x for name, x in inputs.items()}
    for got, plain, exact in zip((o, last), reference(**inputs), reference(**doubled)):
        assert got.dtype == plain.dtype
        assert error(got, exact) <= 2 * error(plain, exact) + 4 * torch.finfo(FP32).eps


def test_a_step_of_zeros_leaves_the_state_exactly_as_it_was() -> None:
    inputs = inputs_of(Case(STEPS["per head"]))
    idle = inputs | {name: torch.zeros_like(inputs[name]) for name in ("k_BTGF", "log_a")}
    del idle["segment_ids_BT"]
    assert torch.equal(kernels.triton_delta_rule_step(**idle)[1], inputs["initial_state"])


def test_only_the_inputs_are_kept_for_the_backward_pass() -> None:
    inputs = inputs_of(OWN["a chunk of 32"])
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    leaves = {name: x.requires_grad_() if isinstance(x, Tensor) else x for name, x in inputs.items()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        gated_kernels.chunk_delta_rule(**leaves)
    given = {x.data_ptr() for x in inputs.values() if isinstance(x, Tensor)}
    assert {x.data_ptr() for x in kept} <= given


@pytest.mark.parametrize(
    ("case", "changes", "why"),
    [
        ("two tokens, no state", {"dtype": torch.float64}, "inputs in float64"),
        ("two tokens, no state", {"F": 130}, "130 features and 17 values a head"),
        ("two tokens, no state", {"per_head": False}, "a gate per feature in float32"),
    ],
)
def test_what_the_kernels_do_not_take_is_left_to_others_with_one_warning(case: str, changes: dict, why: str) -> None:
    inputs = inputs_of(Case(OWN[case].sizes._replace(**changes)))
    with pytest.warns(UserWarning, match=f"do not support {why}") as caught:
        assert [kernels.triton_delta_rule(**inputs) for _ in range(2)] == [None, None]
    assert len(caught) == 1


def test_fla_core_is_asked_for_what_the_kernels_leave() -> None:
    asked: list[str] = []

    def another(*args: Any, **options: Any) -> str:
        asked.append("another")
        return "found"

    set_kernel("delta_rule", kernels.triton_delta_rule, another)
    inputs = inputs_of(OWN["two tokens, no state"])
    assert isinstance(gated_kernels.chunk_delta_rule(**inputs)[0], Tensor)
    assert asked == []
    with pytest.warns(UserWarning, match="or by fla-core"):
        assert gated_kernels.chunk_delta_rule(**inputs | {"v_BTGV": inputs["v_BTGV"].double()}) == "found"
    assert asked == ["another"]


@pytest.mark.parametrize(
    "path",
    [
        "torch",
        "triton",
        *(["fla", "triton+fla"] if gated_kernels.has_fla() else []),
    ],
)
def test_the_path_says_which_kernels_run(path: str) -> None:
    """Of the delta rule ours before fla-core's."""
    gated_kernels.use(path)
    try:
        assert gated_kernels.in_use() == path
        modules = [kernel.__module__.rpartition(".")[2] for kernel in kernels_for("delta_rule")]
        assert modules == [library for library in path.split("+") if library in ("triton", "fla")]
        steps = [kernel.__module__.rpartition(".")[2] for kernel in kernels_for("delta_rule_step")]
        assert steps == ["triton"] * ("triton" in path)
    finally:
        gated_kernels.use("torch")


def test_the_name_that_the_kernels_had_before_is_refused_with_the_paths_there_are() -> None:
    with pytest.raises(ValueError, match=r"some of triton, fla joined by \+, not by 'triton\+delta'"):
        gated_kernels.use("triton+delta")


@pytest.mark.skipif(DEVICE == "cuda", reason="compiled kernels do not see what is changed in Python")
@pytest.mark.parametrize("broken", ["levels", "mask", "later chunks"])
def test_the_comparison_notices_broken_kernels(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    constants, launched = launch.constants, launch._Call.run

    def changed(kernel: str, *sizes: Any) -> dict[str, Any]:
        found = dict(constants(kernel, *sizes))
        if broken == "levels" and kernel == "solve":
            found["LEVELS"] -= 1  # the halves of a chunk do not see each other
        elif broken == "mask" and kernel == "dscores":
            found["EXCLUSIVE"] = 1 - found["EXCLUSIVE"]
        return found

    def run_without(self: Any, name: str, *tensors: Any) -> None:
        if broken == "later chunks" and name == "dstates":
            tensors[1].zero_()
        launched(self, name, *tensors)

    monkeypatch.setattr(launch, "constants", changed)
    monkeypatch.setattr(launch._Call, "run", run_without)
    assert faults(gated_kernels.chunk_delta_rule, reference, inputs_of(OWN["a token more than a chunk"]))
