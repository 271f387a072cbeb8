"""The Triton kernels of the window: on a GPU or, without one, in Triton's interpreter; and through the compiler.

Run as a script it compiles every shipped configuration for sm_90, which needs the compiler but no GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
triton = pytest.importorskip("triton", reason="Triton is not installed")

import gated_kernels  # noqa: E402
from compiled import compile_instead_of_launching, told_by  # noqa: E402
from gated_kernels.check import Inputs, error, faults, run  # noqa: E402
from gated_kernels.swa import triton as kernels  # noqa: E402
from gated_kernels.swa.cases import CASES, Case, in_pieces, inputs  # noqa: E402
from gated_kernels.swa.naive import naive_swa as reference  # noqa: E402

BF16 = torch.bfloat16
REORDERED = 8 * torch.finfo(torch.float32).eps  # twice what `faults` allows an op: both sides round
SHARED = {name: CASES[name] for name in (
    "one token, more past than window, bf16",
    "one token, holes and segments",
    "window of 1, past keys",
    "window of 2",
    "window of 64, a few past keys",
    "window longer than the sequence",
    "holes, sinks, bf16",
    "a memory as a key",
    "a memory as a key, bf16",
    "a memory's sum as a key",
    "a memory by a mix weight, holes",
    "a memory's sum by a mix weight",
    "a memory by a mix weight, bf16",
    "window of 64, bf16",
)}  # fmt: skip
OWN = {
    "head size 16": Case(19, P=6, W=7, M=8, G=1, D=16, V=16, dtype=BF16),
    "head size 80, fp16": Case(19, P=6, W=7, M=1, G=1, D=80, V=80, dtype=torch.float16),
    "head size 96": Case(19, P=6, W=7, M=1, G=1, R=1, D=96, V=96),
    "head size 128": Case(19, P=6, W=7, M=1, G=1, R=8, D=128, V=128, dtype=BF16),
    "head size 256": Case(9, P=6, W=7, M=1, G=1, D=256, V=256, dtype=BF16),
    "head size 64, forgetting": Case(19, P=6, W=7, M=4, G=1, D=66, V=64, v_dtype=BF16),
    "head size 128, forgetting": Case(9, P=6, W=7, M=4, G=1, R=1, D=130, V=128, v_dtype=BF16),
    "head size 256, forgetting": Case(9, P=6, W=7, M=4, G=1, R=1, D=258, V=256, v_dtype=BF16),
    "window of 256": Case(9, P=255, W=256, G=1, R=2, dtype=BF16),
    "window of 300": Case(9, P=310, W=300, G=1, R=2),
    "as many sinks as a block, bf16": Case(33, P=9, W=6, M=16, G=1, R=2, D=64, V=64, dtype=BF16),
    "more sinks than a block, holes, segments": Case(33, P=9, W=6, M=37, G=1, R=2, valid=True, segments=True),
    "more sinks than a block, a memory": Case(33, P=9, W=6, M=37, G=1, R=3, memory="key", dtype=BF16),
}
SIZES = {  # of q and v, for every row of BLOCKS
    (2, 64): (64, BF16, 64, BF16),
    (2, 128): (128, BF16, 128, BF16),
    (2, 256): (256, BF16, 256, BF16),
    (4, 64): (64, torch.float32, 64, torch.float32),
    (4, 128): (66, torch.float32, 64, BF16),
    (4, 256): (130, torch.float32, 128, BF16),
    (4, 512): (258, torch.float32, 256, BF16),
}


@pytest.fixture(autouse=True)
def _quiet_numpy() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")  # numpy's, of hidden logits
        yield


@pytest.fixture
def use() -> Iterator[Callable[[str], None]]:
    yield gated_kernels.use
    gated_kernels.use("torch")


def inputs_of(case: Case) -> Inputs:
    return {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in inputs(case).items()}


def window(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    found = kernels.triton_swa(*args, **options)
    assert found is not None
    return found


class Window(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return gated_kernels.chunk_swa(q, k, v, window_size=4, scale=0.5)


@pytest.mark.parametrize("case", [*SHARED, *OWN])
def test_the_kernels_err_at_most_twice_as_much_as_the_reference_in_its_dtype(case: str) -> None:
    assert not faults(window, reference, inputs_of((SHARED | OWN)[case]))


def test_the_blocks_of_chips_that_multiply_in_registers_are_right_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    case = OWN["head size 128"]
    monkeypatch.setattr(kernels.chips, "multiplies_in_registers", lambda device: True)
    blocks, _, sizes = kernels._plan(*(inputs_of(case)[name] for name in ("q_BTHD", "k_BSGD", "v_BSGV")), None, 7)
    assert (blocks, sizes["D"]) == (kernels.BLOCKS_IN_REGISTERS[2, 128], 128)
    assert not faults(window, reference, inputs_of(case))


def test_cutting_a_sequence_changes_nothing_but_the_last_bits() -> None:
    x = inputs_of(Case(40, P=3, W=9, M=2, R=2, D=5, V=3, segments=True))
    whole, pieces = run(window, x), run(lambda **x: in_pieces(window, x), x)
    assert {name: e for name in whole if (e := error(pieces[name], whole[name])) > REORDERED} == {}


def test_results_are_deterministic() -> None:
    x = inputs_of(OWN["more sinks than a block, holes, segments"])
    first, second = run(window, x), run(window, x)
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def test_the_op_takes_the_kernels_when_told_to_and_compiles_and_exports_with_them(use: Callable[[str], None]) -> None:
    x = inputs_of(Case(5, P=3, W=4, M=2, G=1, R=2, D=5, V=3, valid=True))
    by_torch, by_triton = run(gated_kernels.chunk_swa, x), run(window, x)
    use("triton")
    chosen = run(gated_kernels.chunk_swa, x)
    compiled = run(torch.compile(lambda **x: gated_kernels.chunk_swa(**x), fullgraph=True, backend="aot_eager"), x)
    for name in by_triton:
        assert torch.equal(chosen[name], by_triton[name])
        assert torch.equal(compiled[name], by_triton[name])
        assert error(by_triton[name], by_torch[name]) <= REORDERED
    exported = torch.export.export(Window(), (x["q_BTHD"], x["k_BSGD"], x["v_BSGV"]))
    assert torch.ops.gated_kernels.swa.default in {node.target for node in exported.graph.nodes}
    sinks = (x["sink_k_BMGD"], x["sink_v_BMGV"], x["sink_visible_BTM"])
    torch.library.opcheck(
        kernels._forward, (x["q_BTHD"], x["k_BSGD"], x["v_BSGV"], x["valid_BS"], None, *sinks, *4 * [None], 4, 0.5)
    )
    use("torch")
    assert gated_kernels.kernel_for("swa") is None


def test_what_the_kernels_cannot_do_falls_back_with_one_warning(use: Callable[[str], None]) -> None:
    x = inputs_of(Case(5, P=3, W=4, G=1, R=2, D=5, V=3, dtype=torch.float64))
    use("triton")
    with pytest.warns(UserWarning, match=r"does not support torch\.float64"):
        once = gated_kernels.chunk_swa(**x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(gated_kernels.chunk_swa(**x)[0], once[0])
    with pytest.raises(ValueError, match="not by 'cuda'"):
        use("cuda")


@pytest.mark.parametrize("R", range(1, 9))
@pytest.mark.parametrize("rows", [32, 64])
def test_keys_taken_at_once_are_all_that_a_block_of_rows_sees(R: int, rows: int) -> None:
    for W in range(1, 90):
        spans = {(n + rows - 1) // R + 1 - (n // R - W + 1) for n in range(0, rows * R, rows)}
        assert kernels.at_once(kernels.Block(rows, 32, 4, 99), R, W, 0) == -(-max(spans) // 32)


@pytest.mark.slow
def test_every_configuration_compiles_for_sm_90_and_fits_into_shared_memory(tmp_path: Path) -> None:
    each = ["forward_kernel", "backward_q_kernel", "backward_k_kernel"]
    launched = []
    for blocks in kernels.BLOCKS.values():
        of_sinks = [] if kernels.at_once(blocks.queries, 4, 64, 5) else ["backward_k_kernel"]
        launched += [*each, *2 * [*each, *of_sinks]]
    assert [word for line in told_by(__file__, tmp_path) for word in line] == launched


def compile_all() -> None:
    """Calls the op for every row of BLOCKS, alone, with sinks and a memory's share, and with all else.

    The tensors hold nothing; what would be launched is compiled.
    """

    def tell(name: str, compiled: Any) -> None:
        assert compiled.metadata.shared <= 227 * 1024
        print(name)

    compile_instead_of_launching(tell)
    B, T, S, G, R, M = 1, 70, 79, 2, 4, 5
    for key in kernels.BLOCKS:
        D, dtype, V, v_dtype = SIZES[key]
        shapes = [((B, T, G * R, D), dtype), ((B, S, G, D), dtype), ((B, S, G, V), v_dtype)]
        shapes += [((B, S), torch.bool), ((B, S), torch.int64)]
        shapes += [((B, M, G, D), dtype), ((B, M, G, V), v_dtype), ((B, T, M), torch.bool)]
        shapes += [((B, T, G * R, V), v_dtype), ((B, T, G * R), torch.float32), ((G * R,), torch.float32)]
        x = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in shapes]
        sinks, (memory, weight, share) = x[5:8], x[8:]
        for masks, beside in (
            (5 * [None], 4 * [None]),
            ([None, None, *sinks], [memory, None, None, share]),
            (x[3:8], [memory, weight, weight, None]),
        ):
            given = *x[:3], *masks, *beside
            o, lse = kernels.forward(*given, 64, 0.1)
            kernels.backward(*given, 64, 0.1, lse, o, lse)


if __name__ == "__main__":
    compile_all()
