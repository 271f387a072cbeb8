"""The Triton kernels of the diagonal recurrence: on a GPU or, without one, in Triton's interpreter; and compiled.

Run as a script, it compiles them for sm_90, which needs no GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if __name__ != "__main__" and DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
triton = pytest.importorskip("triton", reason="Triton is not installed")
if __name__ != "__main__" and DEVICE == "cpu" and isinstance(triton.language.sum, triton.JITFunction):
    pytest.skip("another module imported Triton before it could be told to interpret", allow_module_level=True)

import gated_kernels  # noqa: E402
from compiled import compiled_for_hopper, spilled, told_by  # noqa: E402
from gated_kernels.check import Inputs, error, faults, run  # noqa: E402
from gated_kernels.diagonal import features_bf16, scalar  # noqa: E402
from gated_kernels.diagonal import triton as kernels  # noqa: E402
from gated_kernels.diagonal.cases import CASES, Case, in_pieces, inputs  # noqa: E402
from gated_kernels.diagonal.reference import diagonal as reference  # noqa: E402

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROUNDING = torch.finfo(BF16).eps / 8  # `faults` allows four of these: half a unit of bf16's last digit
SMALL: dict[str, Any] = {"G": 1, "R": 2, "F": 16, "V": 17}
SHARED = {
    name: CASES[name]._replace(T=min(CASES[name].T, 70), **SMALL)
    for name in (
        "two tokens, no state",
        "a token less than a chunk",
        "a chunk",
        "a token more than a chunk",
        "no decay",
        "no decay, exclusive, segments",
        "strong, exclusive",
        "steady -0.7",
        "steady -20",
        "-200 and 0",
        "-200 and 0, bf16",
        "mild, but for some tokens, bf16",
        "bf16 values",
        "segments, -200 and 0",
    )
} | {name: CASES[name] for name in ("scalar", "scalar, -200 and 0", "scalar, strong, exclusive")}
OWN = {
    "steady -20, exclusive": Case(65, gate="-20", exclusive=True, **SMALL),
    "segments, exclusive, bf16": Case(65, gate="mixed", segments=True, exclusive=True, dtype=BF16, **SMALL),
    "fp16": Case(40, dtype=FP16, **SMALL),
    "several heads": Case(33, gate="mixed"),
    "blocks of 32": Case(33, G=1, R=1, F=80, V=65),
    "blocks of 64": Case(33, G=1, R=1, F=128, V=64, dtype=BF16),
    "512 features": Case(33, G=1, R=1, F=512, V=16),
    "5 features": Case(33, G=1, R=1, F=5, V=3),
    "two tokens, bf16": Case(2, dtype=BF16, **SMALL),
    "a chunk of 64, exclusive, bf16": Case(64, exclusive=True, dtype=BF16, **SMALL),
    "three chunks of 64, four heads, bf16": Case(131, G=1, R=4, F=128, V=128, segments=True, dtype=BF16),
    "some strong, segments, exclusive, bf16": Case(
        200, gate="patches", segments=True, exclusive=True, dtype=BF16, **SMALL
    ),
    "some strong, blocks, bf16": Case(97, G=1, R=2, F=192, V=130, gate="patches", segments=True, dtype=BF16),
    "steady -1.4, bf16": Case(130, gate="-1.4", dtype=BF16, **SMALL),
    "steady -5, exclusive, bf16": Case(130, gate="-5", exclusive=True, dtype=BF16, **SMALL),
    "steady -20, bf16": Case(130, gate="-20", dtype=BF16, **SMALL),
    "steady -20, exclusive, bf16": Case(65, gate="-20", exclusive=True, dtype=BF16, **SMALL),
    "scalar, fp16": Case(70, scalar=True, gate="mixed", exclusive=True, dtype=FP16, **SMALL),
    "scalar, 5 features": Case(33, G=1, R=1, F=5, V=3, scalar=True),
    "scalar, 33 of 64 values": Case(33, G=1, R=1, V=97, scalar=True, dtype=BF16),
    "scalar, three blocks of values": Case(65, G=1, R=1, V=257, scalar=True, gate="strong", dtype=BF16),
    "scalar, three heads, bf16": Case(130, G=1, R=3, F=128, V=65, scalar=True, exclusive=True, dtype=BF16),
    "scalar, four heads, bf16": Case(129, G=1, R=4, F=128, V=129, scalar=True, gate="mixed", segments=True, dtype=BF16),
    "scalar, 80 features": Case(97, G=1, R=1, F=80, V=65, scalar=True, gate="strong", segments=True, exclusive=True),
    "scalar, 1024 features": Case(65, G=1, R=1, F=1024, V=65, scalar=True, exclusive=True, dtype=BF16),
    "scalar, bf16 gates and values": Case(70, gate="mixed", scalar=True, v_dtype=BF16, **SMALL),
    "no decay, bf16": Case(130, gate="none", exclusive=True, dtype=BF16, **SMALL),
}
EVERY = SHARED | OWN
COMPILED = (  # every pair of block sizes, every dtype
    # F, V, dtype, exclusive, segments
    (64, 65, FP16, True, True),
    (128, 128, FP32, True, True),
    (80, 64, FP16, False, False),
)
SCALAR = (  # every way through the kernels for scalar gates, every dtype
    # F, V, R, dtype, exclusive, gated
    (16, 17, 1, BF16, False, False),
    (128, 65, 3, BF16, True, True),
    (128, 129, 4, BF16, True, True),
    (256, 65, 3, BF16, True, True),
    (1024, 129, 4, BF16, True, True),
    (128, 257, 4, BF16, False, True),
    (80, 64, 4, FP16, False, True),
    (128, 129, 4, FP32, True, True),
)
FEATURES = (  # every way through the kernels for a gate per feature in bf16
    # F, V, R, exclusive, segments
    (64, 64, 4, False, True),
    (128, 128, 4, True, True),
    (128, 128, 4, False, False),
    (192, 129, 3, True, False),
)
LEAST_SHARED = 99 * 1024  # bytes of shared memory a block may have, on the smallest of the Ampere and Hopper chips


@pytest.fixture(autouse=True)
def _in_triton() -> Iterator[None]:
    kernels._warn_once.cache_clear()
    gated_kernels.use("triton")
    yield
    gated_kernels.use("torch")


def inputs_of(case: str) -> Inputs:
    return {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in inputs(EVERY[case]).items()}


@pytest.mark.parametrize("case", EVERY)
def test_kernels_err_at_most_twice_as_much_as_the_reference_and_the_roundings_of_their_products(case: str) -> None:
    # The interpreter multiplies everything but bf16 in fp32. On a GPU fp16 is rounded like TF32, which has as many
    # digits, and fp32 is three such products, of which the smallest is left out.
    given = {EVERY[case].dtype, EVERY[case].v_dtype}
    products = ROUNDING if BF16 in given else None
    if DEVICE == "cuda" and products is None:
        products = torch.finfo(FP16).eps if FP16 in given else 2**-21
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "diagonal runs in torch")  # nothing is left to it
        assert not faults(gated_kernels.diagonal, reference, inputs_of(case), products)


@pytest.mark.parametrize("case", ["segments, -200 and 0", "scalar, -200 and 0"])
def test_cutting_a_sequence_changes_nothing(case: str) -> None:
    inputs = inputs_of(case)
    assert not faults(lambda **x: in_pieces(gated_kernels.diagonal, x), reference, inputs)


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("gate", ["mixed", "none"])
def test_states_may_be_passed_over_in_parts(gate: str, exclusive: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scalar, "STEPS", 1)
    case = Case(300, gate=gate, scalar=True, exclusive=exclusive, **SMALL)  # the last of five parts is shorter
    given = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in inputs(case).items()}
    assert not faults(gated_kernels.diagonal, reference, given)


@pytest.mark.parametrize("ends_at", [None, 130])
def test_states_decayed_by_feature_may_be_passed_over_in_parts(
    ends_at: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scalar, "STEPS", 1)
    monkeypatch.setattr(scalar, "PROGRAMS", 10)  # of two chunks each, the last of one
    case = Case(550, exclusive=ends_at is None, dtype=BF16, **SMALL)
    given = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in inputs(case).items()}
    if ends_at is not None:
        given["segment_BT"] = (torch.arange(550, device=DEVICE) >= ends_at).long().expand(2, -1)
    assert not faults(gated_kernels.diagonal, reference, given, ROUNDING)


@pytest.mark.parametrize("case", ["a token more than a chunk", "scalar, fp16"])
def test_results_do_not_depend_on_how_the_inputs_lie_in_memory_nor_on_autocast(case: str) -> None:
    inputs = inputs_of(case)
    strided = {name: x.mT.contiguous().mT if isinstance(x, Tensor) else x for name, x in inputs.items()}

    def autocast(**x: Any) -> tuple[Tensor, ...]:
        with torch.autocast(DEVICE, dtype=BF16):
            return gated_kernels.diagonal(**x)

    first, second = run(gated_kernels.diagonal, inputs), run(autocast, strided)
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize("case", ["a token more than a chunk", "scalar, 5 features", "steady -1.4, bf16"])
def test_a_gate_of_minus_infinity_forgets_everything_before_it(case: str) -> None:
    inputs = inputs_of(case)
    inputs["log_a"][:, 20] = -torch.inf
    after = {name: x[:, 20:] if "_BT" in name or name == "log_a" else x for name, x in inputs.items() if x is not None}
    after |= {"state_BGFV": torch.zeros_like(inputs["state_BGFV"]), "segment_BT": None, "exclusive": False}
    (o, last), (o_after, last_after) = gated_kernels.diagonal(**inputs), gated_kernels.diagonal(**after)
    allowed = 1e-6 if o.dtype == FP32 else 0.02  # the chunks begin elsewhere
    assert error(o[:, 20:], o_after) <= allowed
    assert error(last, last_after) <= allowed


@pytest.mark.parametrize("case", ["a token more than a chunk", "scalar", "steady -1.4, bf16"])
def test_tokens_of_zeros_leave_a_state_exactly_as_it_was(case: str) -> None:
    inputs = inputs_of(case)
    idle = inputs | {name: torch.zeros_like(inputs[name]) for name in ("k_BTGF", "v_BTGV", "log_a")}
    assert torch.equal(gated_kernels.diagonal(**idle)[1], inputs["state_BGFV"])


@pytest.mark.parametrize("case", ["a token less than a chunk", "scalar, 5 features", "two tokens, bf16"])
def test_torch_compile_sees_through_the_op(case: str) -> None:
    inputs = inputs_of(case)
    compiled = torch.compile(gated_kernels.diagonal, backend="aot_eager", fullgraph=True)
    eager, traced = run(gated_kernels.diagonal, inputs), run(compiled, inputs)
    assert [name for name in eager if not torch.equal(eager[name], traced[name])] == []


@pytest.mark.parametrize("gate", ["each", "scalar", "none"])
def test_the_custom_ops_keep_to_what_torch_asks_of_them(gate: str) -> None:
    torch.use_deterministic_algorithms(False)  # its checks compare uninitialised memory
    x = inputs_of("two tokens, no state")
    q, k, v, log_a = (x[name].requires_grad_() for name in ("q_BTHF", "k_BTGF", "v_BTGV", "log_a"))
    log_a = {"each": log_a, "scalar": log_a[..., :1].detach().requires_grad_(), "none": None}[gate]
    state = q.new_zeros(2, 1, 16, 17, requires_grad=True)
    torch.library.opcheck(kernels.forward, (q, k, v, log_a, state, None, True))
    o, last = kernels.forward(q, k, v, log_a, state, None, False)
    torch.library.opcheck(kernels.backward, tuple(
        x if x is None or isinstance(x, bool) else x.detach() for x in (q, k, v, log_a, state, None, False, o, last)
    ))  # fmt: skip


def test_what_the_kernels_do_not_take_is_left_to_torch_with_one_warning() -> None:
    inputs = inputs_of("two tokens, no state")
    doubles = {name: x.double() if isinstance(x, Tensor) else x for name, x in inputs.items()}
    with pytest.warns(UserWarning, match="do not take inputs in float64") as caught:
        first, second = gated_kernels.diagonal(**doubles), gated_kernels.diagonal(**doubles)
    assert len(caught) == 1
    assert first[0].dtype == torch.float64
    assert torch.equal(first[0], second[0])


def test_the_kernels_are_on_where_there_is_a_gpu_or_when_asked_for() -> None:
    asked = "from importlib import import_module; print(import_module('gated_kernels.diagonal.chunk').fast)"
    usual = "<function diagonal" if DEVICE == "cuda" else "None"
    for environment, said in (
        ({}, usual),
        ({"GATED_KERNELS": "triton"}, "<function diagonal"),
        ({"GATED_KERNELS": "torch"}, "None"),
    ):
        without = {name: value for name, value in os.environ.items() if name != "GATED_KERNELS"}
        done = subprocess.run([sys.executable, "-c", asked], env=without | environment, capture_output=True, text=True)
        assert done.stdout.startswith(said), done.stderr
    with pytest.raises(ValueError, match="'cuda'"):
        gated_kernels.use("cuda")


def test_configurations_of_every_kind_compile_for_hopper_within_the_shared_memory_of_ampere(tmp_path: Path) -> None:
    lines = told_by(__file__, tmp_path)
    assert len(lines) == 5 * len(COMPILED) + 9 * len(SCALAR) + 10 * len(FEATURES)
    assert max(int(line[0]) for line in lines) <= LEAST_SHARED
    assert max(int(line[1]) for line in lines if len(line) > 1) <= 192  # bytes a thread: 8 by Triton 3.6


def compile_all() -> None:
    """Prints the shared memory of every kernel in all of COMPILED, SCALAR and FEATURES; and the bytes that a thread
    puts elsewhere than in registers, where there must be none."""
    for F, V, dtype, exclusive, segments in COMPILED:
        constants = kernels.constants(8, 4, F, V, exclusive, dtype) | kernels.options(dtype)
        for name in ("states", "outputs", "dstates", "dv", "dqk"):
            shared_by(getattr(kernels, f"{name}_kernel"), constants | ({} if segments else {"segment": None}), dtype)
    for F, V, R, dtype, exclusive, gated in SCALAR:
        absent = {} if gated else dict.fromkeys(("read", "write", "dread", "dwrite", "dtotal", "dpairs"))
        for name, kernel in scalar.KERNELS.items():
            shared_by(kernel, scalar.constants(name, 8, R, F, V, exclusive, dtype) | absent, dtype)
        sizes = {"G": 8, "EXCLUSIVE": exclusive, "C": scalar.CHUNK[kernels.PRODUCTS[dtype][0]], "num_warps": 1}
        shared_by(scalar.sums_kernel, sizes | ({} if gated else {"log_a": None}), dtype)
        shared_by(scalar.dgates_kernel, sizes | {"OF_F": 2, "OF_V": 1}, dtype)
        constants = {"SIZE": F * V, "CHUNKS": 16, "BLOCK": 1024, "REVERSED": exclusive}
        shared_by(scalar.carry_kernel, sizes | constants | absent | {"num_warps": 4}, dtype)
        shared_by(scalar.pad_kernel, {"V": V, "W": scalar.row_size(V), "ROWS": 16, "COLUMNS": 256}, dtype)

    for F, V, R, exclusive, segments in FEATURES:
        absent = {} if segments else {"segment": None, "bounds": None}
        for name, kernel in features_bf16.KERNELS.items():
            for strong in [False] + [True] * (name in features_bf16.STRONG_BLOCKS):
                constants = features_bf16.constants(name, 8, R, F, V, exclusive, strong) | absent
                shared_by(kernel, constants, BF16, spills=not strong and F == V)
        constants = {"F": F, "V": V, "C": features_bf16.CHUNK, "CHUNKS": 16, "BF": 16, "BV": 64, "REVERSED": exclusive}
        shared_by(features_bf16.carry_kernel, constants | absent, BF16)


def shared_by(kernel: Any, constants: dict[str, Any], dtype: torch.dtype, spills: bool = False) -> None:
    """Prints the shared memory of one kernel, and what it spills."""
    pointers = {BF16: "*bf16", FP16: "*fp16", FP32: "*fp32"}
    types = dict.fromkeys(("T", "B", "N", "PART", "rows"), "i32") | {"segment": "*i64"}
    types |= dict.fromkeys(("strong", "bounds"), "*i32")
    types |= dict.fromkeys(("states", "dstates"), pointers[kernels.PRODUCTS[dtype][0]])
    states = "state", "first", "last", "dstate", "dlast", "ends"
    gates = "log_a", "dlog_a", "read", "write", "sums"
    types |= dict.fromkeys((*states, *gates, "dread", "dwrite", "dtotal", "dpairs"), "*fp32")
    given = {x: value for x, value in constants.items() if x in kernel.arg_names}
    signature = {x: "constexpr" if x in given else types.get(x, pointers[dtype]) for x in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, x in enumerate(kernel.arg_names) if signature[x][0] == "*"}
    source = triton.compiler.ASTSource(kernel, signature, given, aligned)
    compiled = compiled_for_hopper(source, {x: constants[x] for x in ("num_warps", "num_stages") if x in constants})
    print(compiled.metadata.shared, *(spilled(compiled.asm["cubin"]) if spills else ()))


if __name__ == "__main__":
    compile_all()
