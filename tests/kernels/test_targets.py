"""Every op's kernels fit the shared memory and registers of every chip that they are launched on. This needs no GPU.

As a script, `test_targets.py 86 "swa 64" ...` compiles the kernels of these cases for sm_86. It prints each kernel's
name, its shared memory in bytes, the registers of a thread, the bytes that a thread spills, and its columns of tensor
memory.

Shapes: B batch, T tokens, S keys, M sinks, H query heads, G key-value heads, D head size, E size of a code, F features.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="Triton is not installed")
import triton.language as tl  # noqa: E402
from compiled import compile_instead_of_launching, resources, told_by  # noqa: E402
from gated_kernels.codebook import triton as codebook  # noqa: E402
from gated_kernels.codebook_gla import read  # noqa: E402
from gated_kernels.common import chips  # noqa: E402
from gated_kernels.delta_rule import by_feature_launch as by_feature  # noqa: E402
from gated_kernels.delta_rule import launch as delta_rule  # noqa: E402
from gated_kernels.delta_rule import step as delta_rule_step  # noqa: E402
from gated_kernels.elementwise import launch as elementwise  # noqa: E402
from gated_kernels.fused_step import cases as step_cases  # noqa: E402
from gated_kernels.fused_step import triton as fused_step  # noqa: E402
from gated_kernels.fused_step.cases import Case, changed, inputs  # noqa: E402
from gated_kernels.gla import bf16, fp32  # noqa: E402
from gated_kernels.projections import triton as projections  # noqa: E402
from gated_kernels.projections.arguments import ScaledWeight  # noqa: E402
from gated_kernels.prompt import triton as prompt  # noqa: E402
from gated_kernels.simple_gla import launch  # noqa: E402
from gated_kernels.swa import triton as swa  # noqa: E402

BF16, FP32, INT = torch.bfloat16, torch.float32, torch.int64
CODES = 256  # of a head, gla's features
HEADS = {64: (9, 3), 128: (32, 8)}  # H and G of SmolLM2-135M and of Llama-3-8B
# KB that a block may have, from the table of compute capabilities in the CUDA programming guide.
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
TENSOR_MEMORY = 512  # columns, where there is some: on sm_100

# Bytes that a thread may put elsewhere than in registers, by op and kernel: on chips that multiply in registers (see
# common/chips.py), and on the others. All else spills nothing. These are what Triton 3.9 makes of the tiles, and an
# eighth more. The tiles were chosen by time on an H200, by Triton 3.6, which spills next to nothing there. What is
# spilled stays in the nearest cache: it costs time, and the result is the same. The largest are a gate per feature
# backwards, which holds several fp32 tiles at once, and windows in fp32.
SPILLS = {
    ("codebook", "codes_kernel"): (560, 376),
    ("codebook", "forward_kernel"): (24, 88),
    ("codebook", "projections_kernel"): (168, 0),
    ("codebook", "rows_kernel"): (16, 0),
    ("codebook_gla", "read_kernel"): (16, 0),
    ("delta_rule", "dqk_kernel"): (8432, 808),  # of sm_80, gla's; 3424 on the others
    ("delta_rule", "dqkr_kernel"): (224, 0),
    ("delta_rule", "dread_kernel"): (5680, 984),  # of sm_80; 1104 on the others
    ("delta_rule", "dscores_kernel"): (16, 16),
    ("delta_rule", "dstates_kernel"): (88, 136),
    ("delta_rule", "outputs_kernel"): (272, 216),
    ("delta_rule", "solve_kernel"): (1120, 48),
    ("elementwise", "dinputs_kernel"): (56, 72),
    ("elementwise", "dq_kernel"): (0, 24),  # of sm_100
    ("fused_step", "read_kernel"): (48, 24),  # of fp32; 8 of liger-paper, of sm_120
    ("fused_step", "write_kernel"): (24, 48),  # of 256 codes
    ("gla", "dqk_kernel"): (7160, 1104),  # of sm_80, where 8 warps do not help; 1944 on the others
    ("gla", "dstates_kernel"): (72, 0),
    ("gla", "dv_kernel"): (536, 480),
    ("gla", "outputs_kernel"): (336, 360),
    ("gla", "states_kernel"): (120, 24),
    ("projections", "linear_kernel"): (88, 24),
    ("simple_gla", "dqk_kernel"): (456, 0),
    ("simple_gla", "dscores_kernel"): (0, 24),
    ("simple_gla", "dstates_kernel"): (16, 16),
    ("simple_gla", "dv_kernel"): (64, 0),
    ("simple_gla", "outputs_kernel"): (104, 0),
    ("slots", "dqk_kernel"): (3664, 640),
    ("slots", "dstates_kernel"): (16, 0),
    ("slots", "dv_kernel"): (232, 0),
    ("slots", "outputs_kernel"): (320, 0),
    ("slots", "states_kernel"): (0, 24),
    ("slots", "transposed_kernel"): (1760, 0),
    ("swa", "backward_k_kernel"): (1368, 1352),
    ("swa", "backward_q_kernel"): (472, 544),
    ("swa", "forward_kernel"): (1312, 1360),
}


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def swa_case(D: int, dtype: torch.dtype, forget: bool = False) -> None:
    """The window alone, with sinks and a memory, and with all else; `forget` adds two fp32 channels to queries."""
    (H, G), B, T, S, M = HEADS[D], 1, 70, 133, 4
    C, of_q = (D + 2, FP32) if forget else (D, dtype)
    q, k, v = empty(B, T, H, C, dtype=of_q), empty(B, S, G, C, dtype=of_q), empty(B, S, G, D, dtype=dtype)
    masks = empty(B, S, dtype=torch.bool), empty(B, S, dtype=INT)
    sinks = empty(B, M, G, C, dtype=of_q), empty(B, M, G, D, dtype=dtype), empty(B, T, M, dtype=torch.bool)
    memory, share = empty(B, T, H, D, dtype=dtype), empty(B, T, H, dtype=FP32)
    for given, beside in (
        ((None,) * 5, (None,) * 4),
        ((None, None, *sinks), (memory, None, None, share[0, 0])),
        ((*masks, *sinks), (memory, share, share, None)),
    ):
        o, lse = swa.forward(q, k, v, *given, *beside, 64, 0.1)
        swa.backward(q, k, v, *given, *beside, 64, 0.1, lse, o, lse)


def codebook_case(D: int) -> None:
    (H, G), E, F = HEADS[D], D // 2, CODES
    given = empty(2, 1024, H, D), empty(H, D, E), empty(H, E), empty(H), empty(G, F, E)
    phi = codebook.forward._init_fn(*given)
    codebook.backward._init_fn(*given, phi)
    codebook.gradients(*given, phi, (empty(H, 2048, dtype=FP32), empty(H, 2048, dtype=FP32)))


def recurrence(D: int, F: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k, v, write_mask, segments"""
    (H, G), B, T = HEADS[D], 1, 4096
    q, k, v = (empty(B, T, n, size, dtype=dtype) for n, size in ((H, F), (G, F), (G, D)))
    return q, k, v, empty(B, T, G, dtype=torch.bool), empty(B, T, dtype=INT)


def codebook_gla_case(D: int) -> None:
    (H, G), E, F = HEADS[D], D // 2, CODES
    _, phi_k, v, mask, segment = recurrence(D, F, BF16)
    of_q = empty(1, 4096, H, D), empty(H, D, E), empty(H, E), empty(H), empty(G, F, E)
    log_a, state = empty(1, 4096, G, 1, dtype=FP32), empty(1, G, F, D + 1, dtype=FP32)
    read.forward(of_q, phi_k, v, log_a, mask, state, segment, True)
    read.forward(of_q, phi_k, v, None, None, state[..., :D], None, False)


def gla_case(D: int, dtype: torch.dtype) -> None:
    """Exclusive, and of queries with a log-sum-exp in segments."""
    q, k, v, _, segment = recurrence(D, D, dtype)
    (B, T, H, _), G = q.shape, k.shape[2]
    log_a, state = empty(B, T, G, D, dtype=FP32), empty(B, G, D, D, dtype=FP32)
    q_lse = empty(B, T, H, dtype=FP32)
    for lse, segments, exclusive in ((None, None, True), (q_lse, segment, False)):
        given = k, v, log_a, state, segments, exclusive
        kernels, queries = (bf16, (q, lse)) if dtype == BF16 else (fp32, (q,))
        kernels.forward(*queries, *given)
        kernels.backward(*queries, *given, q, state)


def simple_gla_case(D: int, F: int, dtype: torch.dtype) -> None:
    """With a gate, segments and a normalizer; and with none of them."""
    q, k, v, mask, segment = recurrence(D, F, dtype)
    G = k.shape[2]
    log_a, state = empty(1, 4096, G, 1, dtype=FP32), empty(1, G, F, D + 1, dtype=FP32)
    for given in ((log_a, mask, state, segment, True), (None, None, state[..., :D], None, False)):
        o, normalizer, last = launch.forward(q, k, v, *given)
        launch.backward(q, k, v, *given, o, normalizer, last)
    if F > D:  # as the codebook's features are, whose gradients take their places
        given = log_a, mask, state, segment, True
        launch.backward_in_place(q, k, v, *given, o, empty(*q.shape[:3], dtype=FP32), state)


def delta_rule_case(D: int, dtype: torch.dtype) -> None:
    """Exclusive with a gate per head in segments, with neither, and in bf16 both with a gate per feature."""
    q, k, v, _, segment = recurrence(D, D, dtype)
    G = k.shape[2]
    log_a, state = empty(1, 4096, G, D, dtype=FP32), empty(1, G, D, D, dtype=FP32)
    cases = [(delta_rule, (log_a[..., :1], state, segment, True)), (delta_rule, (None, state, None, False))]
    if dtype == BF16:
        cases += [(by_feature, (log_a, state, segment, True)), (by_feature, (log_a, state, None, False))]
    for passes, given in cases:
        passes.forward(q, k, v, k, *given)
        passes.backward(q, k, v, k, *given, q, state)
    one = [x[:, :1] for x in (q, k, v, k)]
    delta_rule_step.step(*one, log_a[:, :1], k[:, :1], state, False)
    delta_rule_step.step(*one, log_a[:, :1, :, :1], None, state, True)


def elementwise_case(D: int) -> None:
    """As Mamba has it, in fp32 in segments and exclusive, and in bf16; and as S4 has it, with a head a channel."""
    (H, G), B, T, F = HEADS[D], 1, 4096, 16
    q, k, v = (empty(B, T, n, size, dtype=FP32) for n, size in ((H, F), (G, F), (G, 2 * D)))
    segment = empty(B, T, dtype=INT)
    log_A, state = empty(G, F, 2 * D, dtype=FP32), empty(B, G, F, 2 * D, dtype=FP32)
    in_bf16 = *(x.bfloat16() for x in (q, k, v)), v, log_A, state, None, False
    for given in ((q, k, v, v, log_A, state, segment, True), in_bf16):
        o, last = elementwise.forward(*given)
        elementwise.backward(*given, o, last, (True,) * 4)
    heads = D * G
    q, k = empty(1, 1, D * H, F, dtype=FP32), empty(B, T, heads, 1, dtype=FP32).expand(-1, -1, -1, F)
    v, log_A, state = (empty(*n, 2, dtype=FP32) for n in ((B, T, heads), (heads, F), (B, heads, F)))
    given = q, k, v, k[..., :2], log_A, state, None, False
    o, last = elementwise.forward(*given)
    elementwise.backward(*given, o, last, (True, False, True, False))


def slots_case(D: int) -> None:
    """The keys' read of 64 slots: with normalizers in segments, and without; the values' is gla's."""
    (H, G), B, T, M = HEADS[D], 1, 4096, 64
    segment, log_a, w = empty(B, T, dtype=INT), empty(B, T, G, M, dtype=FP32), empty(B, T, G, M)
    for extra, segments, exclusive in ((1, segment, True), (0, None, False)):
        heads = H + G * extra
        q, k = empty(B, T, heads, D + extra), empty(B, T, G, D + extra)
        given = q, w, k, log_a, empty(B, G, M, D + extra, dtype=FP32), segments, exclusive
        _, last = bf16.transposed_forward(*given)
        bf16.transposed_backward(*given, empty(B, T, heads, M), last)


def projections_case(D: int) -> None:
    """Layers with one input, a SwiGLU and one layer, for each size of block: in bf16, with biases, and in 8 bits."""
    H, G = HEADS[D]
    hidden, inner = H * D, 8 * H * D // 3 // 16 * 16
    shapes = (hidden, hidden), (G * D, hidden), (inner, hidden), (hidden, inner)
    biases = [empty(hidden), empty(G * D), empty(G * D)]
    for rows in (1, 32, 64):
        x, after = empty(rows, hidden), empty(rows, inner)
        stored: list[list[Any]] = [[empty(*shape) for shape in shapes]]
        for dtype in sorted(chips.eight_bit_dtypes(x.device), key=str):
            stored.append([ScaledWeight(empty(*shape, dtype=dtype), empty(shape[0], dtype=FP32)) for shape in shapes])
        for q, kv, half, down in stored:
            projections.linear(x, [q, kv, kv], [], False)
            projections.linear(x, [half, half], [], True)
            projections.linear(after, [down], [], False)
        q, kv, *_ = stored[0]
        projections.linear(x, [q, kv, kv], biases, False)


def prompt_case(D: int, dtype: torch.dtype) -> None:
    (H, G), B, T = HEADS[D], 1, 4096
    q, k = (empty(B, T, n, D, dtype=dtype) for n in (H, G))
    angles = empty(B, T, D, dtype=dtype)
    prompt.rotary(q, k, angles, angles)
    normalizer, query = empty(B, T, H, dtype=FP32), empty(H, D, dtype=FP32)
    prompt.memory_logit(q, normalizer, query, query[:, 0], query[:, 0])
    prompt.rms_norm(empty(B, T, H * D, dtype=dtype), empty(H * D, dtype=dtype), 1e-5)


def fused_step_case(case: Case, in_pages: bool = False) -> None:
    token, cache, config = changed(inputs(case), lambda t: t.to("meta"))
    if in_pages:
        _, cache = step_cases.in_pages(cache, gap=16)
    fused_step.triton_fused_step(token, cache, config)


def cases_of(D: int) -> dict[str, Callable[[], None]]:
    """All kernels at heads of D channels, by op."""
    H, G = HEADS[D]
    step = Case(D=D, G=G, R=H // G, B=16, dtype=BF16)
    found: dict[str, Callable[[], None]] = {
        f"swa {D}": lambda: swa_case(D, BF16),
        f"swa {D} fp32": lambda: swa_case(D, FP32),
        f"swa {D} forgetting": lambda: swa_case(D, BF16, forget=True),
        f"codebook {D}": lambda: codebook_case(D),
        f"codebook_gla {D}": lambda: codebook_gla_case(D),
        f"delta_rule {D}": lambda: delta_rule_case(D, BF16),
        f"delta_rule {D} fp32": lambda: delta_rule_case(D, FP32),
        f"elementwise {D}": lambda: elementwise_case(D),
        f"gla {D}": lambda: gla_case(D, BF16),
        f"gla {D} fp32": lambda: gla_case(D, FP32),
        f"prompt {D}": lambda: prompt_case(D, BF16),
        f"prompt {D} fp32": lambda: prompt_case(D, FP32),
        f"projections {D}": lambda: projections_case(D),
        f"slots {D}": lambda: slots_case(D),
        f"simple_gla {D}": lambda: simple_gla_case(D, D, BF16),
        f"simple_gla {D} of codes": lambda: simple_gla_case(D, CODES, BF16),
        f"simple_gla {D} fp32": lambda: simple_gla_case(D, D, FP32),
        f"fused_step {D}": lambda: fused_step_case(step._replace(F=128)),
        f"fused_step {D}, more codes": lambda: fused_step_case(step._replace(F=CODES)),
        f"fused_step {D} in pages": lambda: fused_step_case(step._replace(F=128), in_pages=True),
        f"fused_step {D} liger-paper in pages": lambda: fused_step_case(
            step._replace(kind="liger-paper", M=0), in_pages=True
        ),
        f"fused_step {D} fp32": lambda: fused_step_case(step._replace(F=128, dtype=FP32)),
        f"fused_step {D} liger-paper": lambda: fused_step_case(step._replace(kind="liger-paper", M=0)),
    }
    return found


CASES = cases_of(64) | cases_of(128)


@triton.jit
def products_kernel(x, o, N, C: tl.constexpr):
    i = tl.arange(0, C)
    at = i[:, None] * C + i[None, :]
    total = tl.zeros((C, C), tl.float32)
    for n in range(N):
        a = tl.load(x + n * C * C + at)
        total = tl.dot(a, tl.load(x + (N + n) * C * C + at), total)
    tl.store(o + at, total)


def products(C: int, stages: int, warps: int = 4) -> None:
    products_kernel[(1,)](empty(14, C, C), empty(C, C, dtype=FP32), 7, C=C, num_warps=warps, num_stages=stages)


CONTROLS: dict[str, Callable[[], None]] = {
    "more stages than the memory holds": lambda: products(64, 8),
    "more numbers than the warps hold": lambda: products(128, 1, warps=2),
    "one that fits": lambda: products(64, 1),
    "none at all": lambda: None,
}


def misfits(capability: int, cases: Sequence[str], cache: Path) -> list[str]:
    """What does not fit the chips of that capability, a sentence each."""
    found, case, silent = [], "", set(cases)
    for name, *words in told_by(__file__, cache, str(capability), *cases):
        if name == "case":
            case = " ".join(words)
            continue
        silent.discard(case)
        shared, _, stack, tensor = map(int, words)
        allowed = SPILLS.get((case.split()[0], name), (0, 0))[capability in (90, 100)]
        if shared > SHARED[capability] * 1024:
            found.append(f"{name} of {case} takes {shared} bytes of shared memory")
        if tensor > TENSOR_MEMORY:
            found.append(f"{name} of {case} takes {tensor} columns of tensor memory")
        if stack > allowed:
            found.append(f"{name} of {case} spills {stack} bytes, allowed {allowed}")
    return found + [f"{case} launches nothing" for case in sorted(silent)]


def test_a_kernel_that_cannot_fit_is_found(tmp_path: Path) -> None:
    large, spills, silent = misfits(86, list(CONTROLS), tmp_path)
    assert large.startswith("products_kernel of more stages than the memory holds takes")
    assert spills.startswith("products_kernel of more numbers than the warps hold spills")
    assert silent == "none at all launches nothing"


@pytest.mark.parametrize("capability", [86, pytest.param(120, marks=pytest.mark.slow)])
def test_the_step_of_one_token_fits_the_smallest_chips(capability: int, tmp_path: Path) -> None:
    assert misfits(capability, ["fused_step 64", "fused_step 64 in pages"], tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED)
def test_all_kernels_fit_every_chip(capability: int, tmp_path: Path) -> None:
    assert misfits(capability, list(CASES), tmp_path) == []


def compile_all(capability: int, cases: list[str]) -> None:
    def tell(name: str, compiled: Any) -> None:
        told = *resources(compiled.asm["cubin"]), compiled.metadata.tmem_size
        print(name, compiled.metadata.shared, *told, flush=True)

    compile_instead_of_launching(tell, capability)
    for case in cases:
        print("case", case, flush=True)
        (CASES | CONTROLS)[case]()


if __name__ == "__main__":
    compile_all(int(sys.argv[1]), sys.argv[2:])
