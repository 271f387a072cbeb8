"""The Triton kernels of the codebook, and of the recurrence over it: on a GPU or, without one, in Triton's interpreter;
and through the compiler.

Run as a script it compiles them for sm_90, which needs the compiler but no GPU.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
triton = pytest.importorskip("triton", reason="Triton is not installed")

import gated_kernels  # noqa: E402
from compiled import compile_instead_of_launching, resources, told_by  # noqa: E402
from gated_kernels.check import Inputs, error, faults, run  # noqa: E402
from gated_kernels.codebook import triton as kernels  # noqa: E402
from gated_kernels.codebook.cases import CASES, Case, inputs  # noqa: E402
from gated_kernels.codebook.chunk import per_head, unit_projection  # noqa: E402
from gated_kernels.codebook.naive import naive_codebook as reference  # noqa: E402
from gated_kernels.codebook_gla import cases as codebook_gla  # noqa: E402
from gated_kernels.codebook_gla import read  # noqa: E402
from gated_kernels.codebook_gla.naive import naive_codebook_gla as gla_reference  # noqa: E402
from gated_kernels.common import gated_inputs  # noqa: E402
from gated_kernels.gla.cases import Case as Sizes  # noqa: E402

BF16, FP32 = torch.bfloat16, torch.float32
ROUNDING = torch.finfo(BF16).eps / 4  # `faults` allows four of these: a map's and those of what meets it
OWN = {
    "65 codes, heads of 16": Case(67, G=2, R=1, F=65),
    "two heads of 64": Case(33, G=2, R=2, D=64, F=64),
    "three heads of 80": Case(65, G=1, R=3, D=80, F=130),
    "heads of 128": Case(71, G=1, R=2, D=128, F=256),
    "heads of 64, more codes than a block": Case(70, G=1, R=3, D=64, F=400),
    "heads of 256": Case(9, G=1, R=1, D=256, F=33),
    "codes of 5": Case(9, G=2, R=2, D=10, F=7),
}
EVERY = CASES | OWN
FEW = Case(5, G=1, R=3, F=7)  # heads, for what runs an op many times
CODEBOOK_GLA = {
    name: case._replace(sizes=case.sizes._replace(T=min(case.sizes.T, 70)))
    for name, case in codebook_gla.CASES.items()
    if case.sizes.dtype == BF16 and case.sizes.T > 1
} | {
    "segments": codebook_gla.Case(Sizes(70, per_head=True, gate="mixed", segments=True, dtype=BF16)),
    "no state, no decay": codebook_gla.Case(Sizes(33, gate="none", state=False, dtype=BF16)),
    "normalizer, no state": codebook_gla.Case(Sizes(33, per_head=True, state=False, normalizer=True, dtype=BF16)),
    "one head of 80, blocks of codes and values": codebook_gla.Case(
        Sizes(70, G=1, R=1, F=130, V=257, per_head=True, segments=True, dtype=BF16), D=80
    ),
    "four heads of 128": codebook_gla.Case(
        Sizes(70, G=1, R=4, F=130, V=128, gate="mixed", per_head=True, segments=True, normalizer=True, dtype=BF16, B=1),
        D=128,
    ),
    "normalizer, one code in nearly all weights": codebook_gla.Case(
        Sizes(40, G=6, F=200, V=65, per_head=True, normalizer=True, exclusive=True, dtype=BF16), log_inv_temperature=4.0
    ),
    "normalizer, blocks of values, flat": codebook_gla.Case(
        Sizes(33, R=2, F=65, V=130, gate="none", normalizer=True, dtype=BF16), log_inv_temperature=-3.0
    ),
    "heads of 256": codebook_gla.Case(Sizes(9, G=1, R=2, F=64, per_head=True, normalizer=True, dtype=BF16), D=256),
}
COMPILED = (  # N, G, D, F
    (32, 8, 128, 256),
    (9, 3, 64, 256),
    (9, 3, 64, 2048),
    (16, 16, 128, 128),
    (6, 2, 80, 65),
)
HEADS_OF_256 = (4, 2, 256, 256)


@pytest.fixture(autouse=True)
def _in_triton() -> Iterator[None]:
    gated_inputs.warn_once.cache_clear()
    gated_kernels.use("triton")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "(codebook|gla|simple_gla) runs in torch")  # nothing is left to it
        yield
    gated_kernels.use("torch")


def placed(x: Inputs) -> Inputs:
    return {name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in x.items()}


def inputs_of(case: Case, parameters: torch.dtype = BF16) -> Inputs:
    """Vectors are bf16. Parameters are bf16, as in a bf16 model, or fp32, as in training."""
    x = inputs(case._replace(dtype=FP32, v_dtype=BF16))
    return placed(
        {
            name: value if name in ("x_BTND", "log_inv_temperature_N") else value.to(parameters)
            for name, value in x.items()
        }
    )


@pytest.mark.parametrize("case", EVERY)
def test_the_kernels_err_at_most_twice_as_much_as_the_reference_and_the_roundings_of_their_products(case: str) -> None:
    assert not faults(gated_kernels.chunk_codebook, reference, inputs_of(EVERY[case]), ROUNDING)


@pytest.mark.parametrize("case", ["odd sizes", "heads of 128", "heads of 64, more codes than a block"])
@pytest.mark.parametrize("programs", [1, 4])
def test_a_program_may_take_several_blocks_of_rows(case: str, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "PROGRAMS", programs)
    assert not faults(gated_kernels.chunk_codebook, reference, inputs_of(EVERY[case]), ROUNDING)


def test_parameters_may_be_in_float32() -> None:
    assert not faults(gated_kernels.chunk_codebook, reference, inputs_of(OWN["heads of 128"], FP32), ROUNDING)


LONG = "normalizer, one code in nearly all weights"
CODEBOOK_GLA_CASES = [
    pytest.param(case, marks=[pytest.mark.slow] * (case == LONG)) for case in CODEBOOK_GLA
]  # that one takes a quarter of a minute in the interpreter


@pytest.mark.parametrize("case", CODEBOOK_GLA_CASES)
def test_the_recurrence_over_a_codebook_is_right_by_kernels_that_keep_no_map(case: str) -> None:
    x, kept = placed(codebook_gla.inputs(CODEBOOK_GLA[case])), []

    def watched(**given: Any) -> tuple[Tensor, ...]:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
            return gated_kernels.chunk_codebook_gla(**given)

    assert not faults(watched, gla_reference, x, ROUNDING)
    columns = x["v_BTGV"].shape[3] + CODEBOOK_GLA[case].sizes.normalizer
    state = x["k_BTGD"].new_empty(2, *x["codes_GFE"].shape[:2], columns)  # made where none is given
    with_ones = x["v_BTGV"].new_empty(*x["v_BTGV"].shape[:3], columns)  # as gates per feature have their values
    given = {value.shape for value in (*x.values(), state, with_ones) if isinstance(value, Tensor)}
    assert kept
    assert {tensor.shape for tensor in kept} <= given


@pytest.mark.parametrize("log_inv_temperature", [6.0, 12.0, 40.0, 80.0])
def test_what_is_read_is_right_at_any_temperature(log_inv_temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    x = placed(codebook_gla.inputs(CODEBOOK_GLA["many codes, bf16"]))
    x["q_log_inv_temperature_H"].fill_(log_inv_temperature)
    u_BTHE = unit_projection(x["q_BTHD"].double(), x["q_proj_HDE"].double(), x["q_bias_HE"].double())
    codes_HEF = x["codes_GFE"].double().mT.repeat_interleave(u_BTHE.shape[2] // len(x["codes_GFE"]), 0)
    nearest_BTH2 = per_head(u_BTHE, codes_HEF).topk(2).values
    clear_BTH = nearest_BTH2[..., 0] - nearest_BTH2[..., 1] > 0.02  # else a last bit decides which code it is
    found = gated_kernels.chunk_codebook_gla(**x)
    monkeypatch.setattr(read, "is_supported", lambda *_: False)
    expected = gated_kernels.chunk_codebook_gla(**x)
    assert clear_BTH.float().mean() > 0.5
    assert error(found[2], expected[2]) <= 4 * ROUNDING
    for ours, theirs in zip(found[:2], expected[:2]):
        assert ours.isfinite().all()
        assert error(ours[clear_BTH], theirs[clear_BTH]) <= 4 * ROUNDING


@pytest.mark.parametrize(
    ("case", "of_queries"), [("four heads of 128", 0), ("heads of 256", 1), ("a gate per feature, bf16", 1)]
)
def test_features_of_queries_are_stored_only_if_the_read_does_not_compute_them(
    case: str, of_queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, made, mapped = placed(codebook_gla.inputs(CODEBOOK_GLA[case])), [], kernels.mapped
    monkeypatch.setattr(kernels, "mapped", lambda x, *given: made.append(x.shape) or mapped(x, *given))
    gated_kernels.chunk_codebook_gla(**x)
    assert made == [x["k_BTGD"].shape] + [x["q_BTHD"].shape] * of_queries


def test_a_vector_projected_to_zero_is_equally_close_to_every_code() -> None:
    x = inputs_of(Case(9, bias=0.0))
    x["x_BTND"][0, 3] = 0
    leaves = {name: value.requires_grad_() for name, value in x.items()}
    phi = gated_kernels.chunk_codebook(**leaves)
    assert torch.equal(phi[0, 3], torch.full_like(phi[0, 3], 1 / 33))
    weights = torch.randn_like(phi)
    weights[0, 3] = 0  # a map that nothing reads, as of the padding
    phi.backward(weights)
    assert all(leaf.grad.isfinite().all() for leaf in leaves.values())
    assert not leaves["x_BTND"].grad[0, 3].any()


def test_tokens_without_value_and_gate_leave_a_state_exactly_as_it_was() -> None:
    x = placed(codebook_gla.inputs(CODEBOOK_GLA["heads of 64, bf16"]))
    idle = x | {name: torch.zeros_like(x[name]) for name in ("v_BTGV", "log_a", "write_mask_BTG")}
    assert torch.equal(gated_kernels.chunk_codebook_gla(**idle)[2], x["initial_state"].float())


def test_results_do_not_depend_on_how_the_inputs_lie_in_memory_nor_on_autocast() -> None:
    x = inputs_of(CASES["odd sizes"])
    strided = {name: value.mT.contiguous().mT if value.ndim > 1 else value for name, value in x.items()}

    def autocast(**given: Tensor) -> Tensor:
        with torch.autocast(DEVICE, dtype=BF16):
            return gated_kernels.chunk_codebook(**given)

    first, second = run(gated_kernels.chunk_codebook, x), run(autocast, strided)
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize("op", ["codebook", "codebook_gla"])
def test_torch_compile_sees_through_the_ops(op: str) -> None:
    x = inputs_of(FEW) if op == "codebook" else placed(codebook_gla.inputs(CODEBOOK_GLA["normalizer, no state"]))
    call: Callable[..., Any] = gated_kernels.OPS[op]
    eager, traced = run(call, x), run(torch.compile(call, backend="aot_eager", fullgraph=True), x)
    assert [name for name in eager if not torch.equal(eager[name], traced[name])] == []


@pytest.mark.parametrize(
    ("normalizer", "gated"),
    [
        (True, True),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in [(True, False), (False, True), (False, False)]),
    ],
)
def test_the_custom_ops_keep_to_what_torch_asks_of_them(normalizer: bool, gated: bool) -> None:
    torch.use_deterministic_algorithms(False)  # its checks compare uninitialised memory
    x = {name: value.requires_grad_() for name, value in inputs_of(FEW).items()}
    torch.library.opcheck(kernels.forward, tuple(x.values()))
    phi = kernels.forward(*x.values())
    torch.library.opcheck(kernels.backward, (*(value.detach() for value in x.values()), phi.detach()))
    both = import_module("gated_kernels.codebook_gla.triton")
    sizes = Sizes(3, G=1, R=2, F=5, V=7, per_head=True, normalizer=normalizer, dtype=BF16)
    c = placed(codebook_gla.inputs(codebook_gla.Case(sizes)))
    names = (
        "q_BTHD",
        "k_BTGD",
        "q_proj_HDE",
        "q_bias_HE",
        "q_log_inv_temperature_H",
        "k_proj_GDE",
        "k_bias_GE",
        "k_log_inv_temperature_G",
    )
    given = [c[name].requires_grad_() for name in (*names, "codes_GFE", "v_BTGV")]
    given += [c["log_a"].requires_grad_() if gated else None, c.get("write_mask_BTG")]
    given += [c["initial_state"].float().requires_grad_(), None, True]
    torch.library.opcheck(both._forward, tuple(given))
    plain = (value.detach() if isinstance(value, Tensor) else value for value in (*given, *both._forward(*given)))
    torch.library.opcheck(both.backward, tuple(plain))


def test_what_the_kernels_do_not_take_is_left_to_torch_with_one_warning() -> None:
    warnings.resetwarnings()
    x = inputs_of(CASES["two codes"])
    x["x_BTND"] = x["x_BTND"].float()
    with pytest.warns(UserWarning, match="do not support vectors in float32") as caught:
        first, second = gated_kernels.chunk_codebook(**x), gated_kernels.chunk_codebook(**x)
    assert len(caught) == 1
    assert first.dtype == FP32
    assert torch.equal(first, second)
    c = placed(codebook_gla.inputs(codebook_gla.CASES["a token more than a chunk"]))
    assert gated_kernels.chunk_codebook_gla(**c)[0].dtype == FP32, "the maps by torch, the recurrence by its kernels"
    for name, wrong, said in (
        ("proj_NDE", x["proj_NDE"][:1], r"\(1, 16, 8\) on .* where \(32, 16, 8\)"),
        ("codes_GFE", x["codes_GFE"].half(), "parameters in float16"),
    ):
        assert kernels.unsupported(**x | {"x_BTND": x["x_BTND"].bfloat16()}) is None
        found = kernels.unsupported(**x | {"x_BTND": x["x_BTND"].bfloat16(), name: wrong})
        assert re.search(said, found or "")
    assert "heads of 512" in (kernels.unsupported(*inputs_of(Case(2, D=512)).values()) or "")


@pytest.mark.slow
def test_every_configuration_compiles_for_hopper_and_hardly_spills(tmp_path: Path) -> None:
    told = [(name, int(shared), int(stack)) for name, shared, stack in told_by(__file__, tmp_path)]
    each = ["forward_kernel", "rows_kernel", "projections_kernel", "codes_kernel"]
    of_codebook_gla = ["sums_kernel", "states_kernel", "read_kernel", "states_kernel", "read_kernel"]
    assert [name for name, _, _ in told] == (each + of_codebook_gla) * len(COMPILED) + each
    usual, heads_of_256 = told[:-4], told[-4:]
    assert max(shared for _, shared, _ in usual) <= 99 * 1024  # of the smallest chips
    assert max(shared for _, shared, _ in heads_of_256) <= 227 * 1024
    assert max(stack for _, _, stack in usual) <= 32  # bytes a thread: none by Triton 3.6


def compile_all() -> None:
    """Calls the ops with tensors that hold nothing; what would be launched is compiled."""

    def tell(name: str, compiled: Any) -> None:
        print(name, compiled.metadata.shared, resources(compiled.asm["cubin"])[1])

    compile_instead_of_launching(tell)
    for N, G, D, F in (*COMPILED, HEADS_OF_256):
        shapes = ((2, 1024, N, D), (N, D, D // 2), (N, D // 2), (N,), (G, F, D // 2))
        x, *parameters = (torch.empty(shape, dtype=BF16, device="meta") for shape in shapes)
        phi = kernels.forward._init_fn(x, *parameters)
        kernels.backward._init_fn(x, *parameters, phi)
        if D > read.LARGEST:
            continue
        phi_k, v = phi[:, :, :G].contiguous(), x[:, :, :G].contiguous()
        log_a, write_mask = v[..., :1].float(), v[..., 0].bool()
        state = phi.new_empty(2, G, F, D + 1, dtype=FP32)
        read.forward((x, *parameters), phi_k, v, log_a, write_mask, state, None, True)
        read.forward((x, *parameters), phi_k, v, None, None, state[..., :D], None, False)


if __name__ == "__main__":
    compile_all()
