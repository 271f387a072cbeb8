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
triton = pytest.importorskip("triton", reason="Triton is not installed")

import gated_kernels  # noqa: E402
from compiled import compiled_for_capability, resources, told_by  # noqa: E402
from gated_kernels.check import Inputs, error, faults, run  # noqa: E402
from gated_kernels.common import gated_inputs, parts  # noqa: E402
from gated_kernels.common.tiles import PRODUCTS  # noqa: E402
from gated_kernels.gla import bf16, fp32  # noqa: E402
from gated_kernels.gla import cases as per_channel  # noqa: E402
from gated_kernels.gla import triton as kernels  # noqa: E402
from gated_kernels.gla.naive import naive_gla as reference  # noqa: E402
from gated_kernels.simple_gla import cases as per_head  # noqa: E402
from gated_kernels.simple_gla import launch  # noqa: E402
from gated_kernels.simple_gla import triton as simple_kernels  # noqa: E402
from gated_kernels.simple_gla.cases import Case, in_pieces, inputs  # noqa: E402

CASES = per_channel.CASES | per_head.CASES
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
} | {
    "per head": CASES["per head"]._replace(T=70, G=1),
    **{name: CASES[name] for name in ("per head, -200 and 0", "per head, strong, exclusive")},
}
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
    "per head, fp16": Case(70, per_head=True, gate="mixed", exclusive=True, dtype=FP16, **SMALL),
    "per head, 5 features": Case(33, G=1, R=1, F=5, V=3, per_head=True),
    "per head, 97 of 128 values": Case(33, G=1, R=1, V=97, per_head=True, dtype=BF16),
    "per head, three blocks of values": Case(65, G=1, R=1, V=257, per_head=True, gate="strong", dtype=BF16),
    "per head, three heads, bf16": Case(130, G=1, R=3, F=128, V=65, per_head=True, exclusive=True, dtype=BF16),
    "per head, 80 features": Case(
        97, G=1, R=1, F=80, V=65, per_head=True, gate="strong", segments=True, exclusive=True
    ),
    "per head, bf16 gates and values": Case(70, gate="mixed", per_head=True, v_dtype=BF16, **SMALL),
    "no decay, bf16": Case(130, gate="none", exclusive=True, dtype=BF16, **SMALL),
    "normalizer, no state": Case(70, per_head=True, normalizer=True, state=False, **SMALL),
    "normalizer, two tokens, no decay": Case(2, gate="none", normalizer=True, **SMALL),
    "normalizer, no decay": Case(130, gate="none", normalizer=True, **SMALL),
    "normalizer, strong, exclusive": Case(97, gate="strong", per_head=True, normalizer=True, exclusive=True),
    "normalizer, fp16": Case(70, gate="mixed", per_head=True, segments=True, normalizer=True, dtype=FP16, **SMALL),
    "normalizer, bf16 gates and values": Case(70, gate="mixed", per_head=True, normalizer=True, v_dtype=BF16, **SMALL),
    "normalizer, three heads, bf16": Case(
        130, G=1, R=3, F=128, V=64, per_head=True, normalizer=True, exclusive=True, dtype=BF16
    ),
    "normalizer, four heads, bf16": Case(
        65, R=4, F=128, V=128, per_head=True, gate="mixed", segments=True, normalizer=True, dtype=BF16
    ),
    "normalizer, blocks of features": Case(
        65, R=1, F=300, V=65, per_head=True, gate="mixed", normalizer=True, exclusive=True
    ),
    "normalizer, blocks of features, bf16": Case(
        70, G=1, R=3, F=300, V=64, per_head=True, gate="mixed", segments=True, normalizer=True, dtype=BF16
    ),
    "normalizer, three whole blocks of features, bf16": Case(
        65, G=1, R=1, F=192, V=64, per_head=True, normalizer=True, exclusive=True, dtype=BF16
    ),
    "normalizer, 2048 features": Case(
        65, G=1, R=1, F=2048, V=64, per_head=True, normalizer=True, exclusive=True, dtype=BF16
    ),
    "normalizer, blocks of values, bf16": Case(
        70, G=1, R=2, F=130, V=257, per_head=True, gate="strong", normalizer=True, dtype=BF16, B=1
    ),
    "normalizer, a gate per feature": Case(70, gate="mixed", normalizer=True, exclusive=True, **SMALL),
    "normalizer, a gate per feature, bf16": Case(130, segments=True, normalizer=True, dtype=BF16, **SMALL),
    "softmax, exclusive": Case(33, exclusive=True, q_lse=True, **SMALL),
    "softmax, bf16 queries": Case(40, q_lse=True, dtype=BF16, v_dtype=FP32, **SMALL),
    "softmax, fp16": Case(40, q_lse=True, dtype=FP16, **SMALL),
    "softmax, per head": Case(70, gate="mixed", per_head=True, q_lse=True, **SMALL),
    "softmax, per head, bf16": Case(
        70, per_head=True, exclusive=True, normalizer=True, q_lse=True, dtype=BF16, **SMALL
    ),
    "softmax, some strong, bf16": Case(
        200, G=1, R=2, F=64, V=64, gate="patches", segments=True, q_lse=True, dtype=BF16, B=1
    ),
    "softmax, 40 features, bf16": Case(70, G=1, R=3, F=40, V=17, exclusive=True, q_lse=True, dtype=BF16),
    "softmax, 80 features, bf16": Case(
        97, G=1, R=2, F=80, V=65, gate="patches", exclusive=True, normalizer=True, q_lse=True, dtype=BF16, B=1
    ),
    "softmax, 128 features, bf16": Case(130, G=1, R=4, F=128, V=128, segments=True, q_lse=True, dtype=BF16),
    "softmax, 128 features, some strong, bf16": Case(
        130, G=1, R=2, F=128, V=64, gate="patches", segments=True, exclusive=True, q_lse=True, dtype=BF16, B=1
    ),
    "softmax, blocks, bf16": Case(97, G=1, R=2, F=192, V=130, gate="patches", q_lse=True, dtype=BF16, B=1),
}
EVERY = SHARED | OWN
COMPILED = (  # every pair of block sizes, every dtype
    # F, V, dtype, exclusive, segments
    (64, 65, FP16, True, True),
    (128, 128, FP32, True, True),
    (80, 64, FP16, False, False),
)
PER_HEAD = (  # every way through the kernels for scalar gates, every dtype
    # F, V, R, dtype, exclusive, gated, normalizer
    (16, 17, 1, BF16, False, False, False),
    (64, 65, 1, BF16, False, True, False),
    (128, 64, 3, BF16, True, True, True),
    (128, 128, 4, BF16, True, True, True),
    (256, 64, 3, BF16, True, True, True),
    (1024, 128, 4, BF16, True, True, True),
    (256, 128, 4, BF16, True, False, True),
    (128, 256, 4, BF16, False, True, True),
    (128, 128, 4, BF16, False, True, False),
    (80, 64, 4, FP16, False, True, True),
    (128, 128, 4, FP32, True, True, True),
)
PER_CHANNEL = (  # every way through the kernels for a gate per feature in bf16
    # F, V, R, exclusive, segments
    (64, 64, 4, False, True),
    (128, 128, 4, True, True),
    (128, 128, 4, False, False),
    (192, 129, 3, True, False),
)
LEAST_SHARED = 99 * 1024  # bytes of shared memory a block may have, on the smallest of the Ampere and Hopper chips


@pytest.fixture(autouse=True)
def _in_triton() -> Iterator[None]:
    gated_inputs.warn_once.cache_clear()
    gated_kernels.use("triton")
    yield
    gated_kernels.use("torch")


def inputs_of(case: str) -> Inputs:
    return {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in inputs(EVERY[case]).items()}


# up to a quarter of a minute each in the interpreter, and each like another in all but one number
LONG = ("some strong, blocks, bf16", "normalizer, blocks of features", "normalizer, 2048 features")


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case in LONG)) for case in EVERY])
def test_kernels_err_at_most_twice_as_much_as_the_reference_and_the_roundings_of_their_products(case: str) -> None:
    # The interpreter multiplies everything but bf16 in fp32, though exp(q - lse) is made in fp16. On a GPU fp16 is
    # rounded like TF32, which has as many digits, and fp32 is three such products, of which the smallest is left out.
    given = {EVERY[case].dtype, EVERY[case].v_dtype}
    products = ROUNDING if BF16 in given else None
    if FP16 in given and EVERY[case].q_lse:
        products = torch.finfo(FP16).eps / 8
    if DEVICE == "cuda" and BF16 not in given:
        products = torch.finfo(FP16).eps if FP16 in given else 2**-21
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "(simple_)?gla runs in torch")  # nothing is left to it
        assert not faults(gated_kernels.chunk_gla, reference, inputs_of(case), products)


def test_the_tiles_of_chips_that_multiply_in_registers_are_right_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16.chips, "multiplies_in_registers", lambda device: True)
    case = Case(70, B=1, G=1, R=2, F=128, V=128, gate="patches", segments=True, q_lse=True, dtype=BF16)
    for scalar in (False, True):
        x = {
            name: v.to(DEVICE) if isinstance(v, Tensor) else v
            for name, v in inputs(case._replace(per_head=scalar)).items()
        }
        assert not faults(gated_kernels.chunk_gla, reference, x, ROUNDING)


@pytest.mark.parametrize("results", ["output", "normalizer", "state"])
def test_a_gradient_may_come_by_one_result_alone(results: str) -> None:
    alone = ("output", "normalizer", "state").index(results)
    inputs = inputs_of("normalizer, fp16") | {"segment_ids_BT": None}
    ours, plain = (
        lambda **x: gated_kernels.chunk_gla(**x)[alone],
        lambda **x: reference(**x)[alone],
    )
    assert not faults(ours, plain, inputs, torch.finfo(FP16).eps if DEVICE == "cuda" else None)


@pytest.mark.parametrize("case", ["segments, -200 and 0", "per head, -200 and 0", "normalizer, no state"])
def test_cutting_a_sequence_changes_nothing(case: str) -> None:
    inputs = inputs_of(case)
    assert not faults(lambda **x: in_pieces(gated_kernels.chunk_gla, x), reference, inputs)


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("normalizer", [False, True])
@pytest.mark.parametrize("gate", ["mixed", "none"])
def test_states_may_be_passed_over_in_parts(
    gate: str, normalizer: bool, exclusive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "STEPS", 1)
    # the last of five parts is shorter
    case = Case(130, gate=gate, per_head=True, normalizer=normalizer, exclusive=exclusive, **SMALL)
    given = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in inputs(case).items()}
    assert not faults(gated_kernels.chunk_gla, reference, given)


@pytest.mark.parametrize("ends_at", [None, 130])
def test_states_decayed_by_feature_may_be_passed_over_in_parts(
    ends_at: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "STEPS", 1)
    monkeypatch.setattr(parts, "PROGRAMS", 8)  # four parts of two chunks each, the last of one
    case = Case(420, exclusive=ends_at is None, q_lse=ends_at is None, dtype=BF16, **SMALL)
    given = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in inputs(case).items()}
    if ends_at is not None:
        given["segment_ids_BT"] = (torch.arange(420, device=DEVICE) >= ends_at).long().expand(2, -1)
    assert not faults(gated_kernels.chunk_gla, reference, given, ROUNDING)


@pytest.mark.parametrize(
    "case", ["a token more than a chunk", "per head, fp16", "normalizer, fp16", "softmax, per head, bf16"]
)
def test_results_do_not_depend_on_how_the_inputs_lie_in_memory_nor_on_autocast(case: str) -> None:
    inputs = inputs_of(case)
    strided = {name: x.mT.contiguous().mT if isinstance(x, Tensor) else x for name, x in inputs.items()}

    def autocast(**x: Any) -> tuple[Tensor, ...]:
        with torch.autocast(DEVICE, dtype=BF16):
            return gated_kernels.chunk_gla(**x)

    first, second = run(gated_kernels.chunk_gla, inputs), run(autocast, strided)
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize(
    "case", ["a token more than a chunk", "per head, 5 features", "normalizer, strong, exclusive", "steady -1.4, bf16"]
)
def test_a_gate_of_minus_infinity_forgets_everything_before_it(case: str) -> None:
    inputs = inputs_of(case)
    inputs["log_a"][:, 20] = -torch.inf
    after = {name: x[:, 20:] if "_BT" in name or name == "log_a" else x for name, x in inputs.items() if x is not None}
    after |= {"initial_state": torch.zeros_like(inputs["initial_state"]), "segment_ids_BT": None}
    after["exclusive"] = inputs["exclusive"]
    (o, normalizer, last), (o_after, normalizer_after, last_after) = (
        gated_kernels.chunk_gla(**x) for x in (inputs, after)
    )
    allowed = 1e-6 if o.dtype == FP32 else 0.02  # the chunks begin elsewhere
    first = 20 + inputs["exclusive"]  # the token of the gate reads what was before it
    assert error(o[:, first:], o_after[:, first - 20 :]) <= allowed
    assert error(last, last_after) <= allowed
    assert normalizer is None or error(normalizer[:, first:], normalizer_after[:, first - 20 :]) <= allowed


@pytest.mark.parametrize(
    "case", ["a token more than a chunk", "per head", "normalizer, four heads, bf16", "steady -1.4, bf16"]
)
def test_tokens_of_zeros_leave_a_state_exactly_as_it_was(case: str) -> None:
    inputs = inputs_of(case) | {"segment_ids_BT": None}
    zeros = [name for name in ("k_BTGF", "v_BTGV", "log_a", "write_mask_BTG") if name in inputs]
    idle = inputs | {name: torch.zeros_like(inputs[name]) for name in zeros}
    assert torch.equal(gated_kernels.chunk_gla(**idle)[2], inputs["initial_state"].float())


@pytest.mark.parametrize(
    "case",
    [
        "a token less than a chunk",
        "per head, 5 features",
        "normalizer, no state",
        "two tokens, bf16",
        "normalizer, two tokens, no decay",
        "softmax, exclusive",
    ],
)
def test_torch_compile_sees_through_the_op(case: str) -> None:
    inputs = inputs_of(case)
    compiled = torch.compile(gated_kernels.chunk_gla, backend="aot_eager", fullgraph=True)
    eager, traced = run(gated_kernels.chunk_gla, inputs), run(compiled, inputs)
    assert [name for name in eager if not torch.equal(eager[name], traced[name])] == []


@pytest.mark.parametrize(
    ("gate", "normalizer", "q_lse"),
    [
        ("each", False, True),
        ("per head", True, True),
        ("none", False, False),
        *(  # torch.compile sees through these above
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [("each", False, False), ("per head", False, False), ("none", True, False)]
        ),
    ],
)
def test_the_custom_ops_keep_to_what_torch_asks_of_them(gate: str, normalizer: bool, q_lse: bool) -> None:
    torch.use_deterministic_algorithms(False)  # its checks compare uninitialised memory
    x = inputs_of("two tokens, no state")
    q, k, v, log_a = (x[name].requires_grad_() for name in ("q_BTHF", "k_BTGF", "v_BTGV", "log_a"))
    log_a = {"each": log_a, "per head": log_a[..., :1].detach().requires_grad_(), "none": None}[gate]
    write_mask = torch.ones(2, 2, 1, dtype=torch.bool, device=DEVICE) if normalizer else None
    state = q.new_zeros(2, 1, 16, 17 + normalizer, requires_grad=True)
    lse = q.detach().logsumexp(-1).requires_grad_() if q_lse else None
    ops = kernels if gate == "each" else simple_kernels
    given = (q, lse, k, v, log_a, *([] if gate == "each" else [write_mask]), state, None, True)
    torch.library.opcheck(ops.forward, given)
    torch.library.opcheck(ops.backward, tuple(
        x.detach() if isinstance(x, Tensor) else x for x in (*given, *ops.forward(*given))
    ))  # fmt: skip


@pytest.mark.parametrize("case", ["softmax, fp16", "softmax, per head, bf16", "softmax, 40 features, bf16"])
def test_the_features_of_queries_are_not_kept_for_the_backward_pass(case: str) -> None:
    inputs = inputs_of(case)
    q, kept = inputs["q_BTHF"].requires_grad_(), []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        gated_kernels.chunk_gla(**inputs)
    assert {x.data_ptr() for x in kept if x.shape == q.shape} == {q.data_ptr()}


def test_what_the_kernels_do_not_take_is_left_to_torch_with_one_warning() -> None:
    inputs = inputs_of("two tokens, no state")
    doubles = {name: x.double() if isinstance(x, Tensor) else x for name, x in inputs.items()}
    with pytest.warns(UserWarning, match="do not support inputs in float64") as caught:
        first, second = gated_kernels.chunk_gla(**doubles), gated_kernels.chunk_gla(**doubles)
    assert len(caught) == 1
    assert first[0].dtype == torch.float64
    assert torch.equal(first[0], second[0])


def test_the_kernels_are_on_where_there_is_a_gpu_or_when_asked_for() -> None:
    # each in a process of its own, after torch was imported once
    asked = """if True:
        import os, torch
        for environment in ({}, {"GATED_KERNELS": "triton"}, {"GATED_KERNELS": "torch"}):
            if not os.fork():
                os.environ |= environment
                from gated_kernels import in_use, kernel_for
                print(in_use(), kernel_for("gla"), flush=True)
                os._exit(0)
            os.wait()
    """
    without = {name: value for name, value in os.environ.items() if name != "GATED_KERNELS"}
    done = subprocess.run([sys.executable, "-c", asked], env=without, capture_output=True, text=True)
    default, triton_asked, torch_asked = done.stdout.splitlines()
    assert default.startswith("triton" if DEVICE == "cuda" else "torch None"), done.stderr
    assert triton_asked.startswith("triton <function triton_gla")
    assert torch_asked == "torch None"
    with pytest.raises(ValueError, match="'cuda'"):
        gated_kernels.use("cuda")


@pytest.mark.slow
def test_configurations_of_every_kind_compile_for_hopper_within_the_shared_memory_of_ampere(tmp_path: Path) -> None:
    lines = told_by(__file__, tmp_path)
    assert len(lines) == 5 * len(COMPILED) + 9 * len(PER_HEAD) + 17 * len(PER_CHANNEL)
    assert max(int(line[0]) for line in lines) <= LEAST_SHARED
    assert max(int(line[1]) for line in lines if len(line) > 1) <= 192  # bytes a thread: 8 by Triton 3.6


def compile_all() -> None:
    """Prints the shared memory of every kernel in all of COMPILED, PER_HEAD and PER_CHANNEL; and the bytes that a
    thread puts elsewhere than in registers, where there must be none."""
    for F, V, dtype, exclusive, segments in COMPILED:
        constants = fp32.constants(8, 4, F, V, exclusive, dtype)
        for kernel in fp32.KERNELS.values():
            shared_by(kernel, constants | ({} if segments else {"segment": None}), dtype)
    for F, V, R, dtype, exclusive, gated, normalizer in PER_HEAD:
        absent = {} if gated else dict.fromkeys(("read", "write", "dread", "dwrite", "dtotal", "dpairs"))
        absent |= {} if gated and normalizer else {"q_along": None, "k_along": None}
        absent |= {} if normalizer else dict.fromkeys(("write_mask", "dnormalizer", "z", "dz"))
        for name, kernel in launch.KERNELS.items():
            compiled_for = launch.constants(name, 8, R, F, V, normalizer, exclusive, dtype) | absent
            shared_by(kernel, compiled_for, dtype, spills=dtype == BF16 and V in (64, 128))
        sizes = {"G": 8, "EXCLUSIVE": exclusive, "C": launch.CHUNK[PRODUCTS[dtype][0]], "num_warps": 1}
        shared_by(launch.sums_kernel, sizes | ({} if gated else {"log_a": None}), dtype)
        shared_by(launch.dgates_kernel, sizes | {"OF_F": 2}, dtype)
        constants = {"SIZE": F * (V + normalizer), "CHUNKS": 16, "BLOCK": 1024, "REVERSED": exclusive}
        shared_by(launch.carry_kernel, sizes | constants | absent | {"num_warps": 4}, dtype)
    for F, V, R, exclusive, segments in PER_CHANNEL:
        absent = {} if segments else {"segment": None, "bounds": None}
        for name, kernel in bf16.KERNELS.items():
            for strong in [False] + [True] * (name in bf16.STRONG_BLOCKS):
                constants = bf16.constants(name, 8, R, F, V, exclusive, strong) | absent
                for without in [{"q_lse": None, "dlse": None}] + [{}] * ("q_lse" in kernel.arg_names):
                    shared_by(kernel, constants | without, BF16, spills=not strong and F == V)
        constants = {"F": F, "V": V, "C": bf16.CHUNK, "CHUNKS": 16, "BF": 16, "BV": 64, "REVERSED": exclusive}
        shared_by(bf16.carry_kernel, constants | absent, BF16)


def shared_by(kernel: Any, constants: dict[str, Any], dtype: torch.dtype, spills: bool = False) -> None:
    """Prints the shared memory of one kernel, and what it spills."""
    pointers = {BF16: "*bf16", FP16: "*fp16", FP32: "*fp32"}
    types = dict.fromkeys(("T", "B", "N", "PART", "rows"), "i32") | {"segment": "*i64"}
    types |= dict.fromkeys(("strong", "bounds"), "*i32") | {"write_mask": "*i1"}
    types |= dict.fromkeys(("states", "dstates", "dscores"), pointers[PRODUCTS[dtype][0]])
    states = "state", "first", "last", "dstate", "dlast", "ends"
    gates = "log_a", "dlog_a", "read", "write", "sums"
    types |= dict.fromkeys((*states, *gates, "q_lse", "dlse", "dread", "dwrite", "dtotal", "dpairs"), "*fp32")
    types |= dict.fromkeys(("normalizer", "dnormalizer", "z", "dz", "q_along", "k_along"), "*fp32")
    given = {x: value for x, value in constants.items() if x in kernel.arg_names}
    signature = {x: "constexpr" if x in given else types.get(x, pointers[dtype]) for x in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, x in enumerate(kernel.arg_names) if signature[x][0] == "*"}
    source = triton.compiler.ASTSource(kernel, signature, given, aligned)
    options = {x: constants[x] for x in ("num_warps", "num_stages") if x in constants}
    compiled = compiled_for_capability(90, source, options)
    print(compiled.metadata.shared, *(resources(compiled.asm["cubin"])[1:] if spills else ()))


if __name__ == "__main__":
    compile_all()
