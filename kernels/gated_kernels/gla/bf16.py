"""Launches the Triton kernels of gated linear attention with a gate per feature and inputs in bf16.

Let x_t and y_s be the cumulative sums of a chunk's log gates up to what token t reads and up to what s writes, relative
to the sum at the middle of the chunk. Then the score of t and s is the product of q_t exp(x_t) and k_s exp(-y_s): one
matrix product per chunk, if none of the exponents is too large. Chunks in which one is too large are `strong`. There,
the score of a pair is computed at the one level at which t and s lie in the second and the first half of the same
block. Both decays are taken to the boundary between the halves, so each is at most 1, and a level is one masked
product. The kernels that handle chunks independently are compiled and launched twice, once for each kind of chunk.

A transposed read, o_t = S_t q_t, has a feature size where a read has a value size. In it q is as wide as the values.

States and keys are loaded once for the R query heads of a key-value head if one tile holds all features. Queries with a
log-sum-exp are turned into exp(q - lse) wherever they are loaded, so that it is never stored. If a scan over the states
has too few programs to fill a GPU, the sequence is split into parts (see `common/parts.py`).

Shapes: B batch, T tokens, H query heads, G key-value heads, R = H / G, F feature size, V value size, N chunks, C chunk
length. A tile has BF features and BV values.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from gated_kernels.common import chips, parts
from gated_kernels.common.integers import cdiv, next_power_of_2
from gated_kernels.gla.intra_chunk import dqk_kernel, dv_kernel, outputs_kernel
from gated_kernels.gla.state_scan import carry_kernel, dstates_kernel, states_kernel, sums_kernel
from gated_kernels.gla.transposed import transposed_kernel

CHUNK = 64
LIMIT = 87.0  # of an exponent to base 2: its factor may then be as large as 2^40 in bf16 and fp32
STEP = 11.0  # of one log gate to base 2: a stronger gate's gradient would be lost in rounding, as larger terms cancel
# BF and BV at most, num_warps and num_stages: the fastest on an H200 at F = V = 128. With Triton 3.6, the kernels for
# chunks that are not strong spill no registers at F = V = 64 or 128, save 8 bytes for exclusive reads with segments.
# With 3.9 they spill up to 176 bytes. Tiles of fewer than 64 columns are misread on Hopper, see `simple_gla/launch.py`.
BLOCKS = {
    "sums": (128, 64, 4, 1),
    "states": (64, 128, 4, 2),
    "outputs": (128, 64, 4, 2),
    "dstates": (64, 128, 4, 3),
    "dv": (128, 128, 4, 2),
    "dqk": (64, 128, 4, 1),
    "transposed": (64, 128, 4, 1),  # not measured; those of dqk, which computes the same and more
}
STRONG_BLOCKS = {
    "outputs": (64, 64, 8, 1),
    "dv": (64, 64, 8, 1),
    "dqk": (64, 64, 8, 1),
    "transposed": (64, 64, 8, 1),
}
# For chips that multiply in registers (see common/chips.py): what spills least according to the compiler, not measured.
BLOCKS_IN_REGISTERS = BLOCKS | {"outputs": (64, 64, 8, 1), "dqk": (64, 64, 4, 1)}
LOOPED = 64  # BF of outputs and dv where they loop over features, BV of the others where they loop over values
BY_FEATURE = ("dqk", "transposed")  # kernels with one program for each tile of features, which loop over values
KERNELS = {
    "sums": sums_kernel,
    "states": states_kernel,
    "outputs": outputs_kernel,
    "dstates": dstates_kernel,
    "dv": dv_kernel,
    "dqk": dqk_kernel,
    "transposed": transposed_kernel,
}


@functools.cache
def constants(
    kernel: str, G: int, R: int, F: int, V: int, exclusive: bool, strong: bool = False, in_registers: bool = False
) -> dict[str, Any]:
    """A kernel's constexprs and launch options. They follow from the sizes and the chip; there is no autotuning."""
    BF, BV, warps, stages = (STRONG_BLOCKS if strong else BLOCKS_IN_REGISTERS if in_registers else BLOCKS)[kernel]
    BF, BV = min(BF, max(64, next_power_of_2(F))), min(BV, max(64, next_power_of_2(V)))
    if kernel in ("outputs", "dv") and F > BF:
        BF = min(BF, LOOPED)
    elif kernel in BY_FEATURE and V > BV:
        BV = min(BV, LOOPED)
    found = {
        "G": G,
        "R": R,
        "F": F,
        "V": V,
        "EXCLUSIVE": int(exclusive),
        "C": CHUNK,
        "D": tl.bfloat16,
        "BF": BF,
        "BV": BV,
        "TWO": int(V > BV and not strong),
        "HEADS": R if F <= BF else 1,
        "LEVELS": CHUNK.bit_length() - 1,
        "LIMIT": LIMIT,
        "STEP": STEP,
        "PRECISION": "tf32",
        "STRONG": int(strong),
    }
    return {x: found[x] for x in KERNELS[kernel].arg_names if x in found} | {"num_warps": warps, "num_stages": stages}


class _Call:
    """The sizes of a call, its cumulative sums of gates and the scans over its states."""

    def __init__(self, q: Tensor, v: Tensor, log_a: Tensor, segment: Tensor | None, exclusive: bool):
        (B, self.T, H, self.F), (self.G, self.V) = q.shape, v.shape[2:]
        self.N, self.heads = cdiv(self.T, CHUNK), B * self.G
        self.chunks = self.heads * self.N
        self.sizes = self.G, H // self.G, self.F, self.V, exclusive
        self.log_a = log_a
        self.states = v.new_empty(self.chunks, self.F, self.V)
        self.sums = v.new_empty(self.chunks, CHUNK + 1, self.F, dtype=torch.float32)
        self.strong = v.new_empty(self.chunks, dtype=torch.int32)
        self.bounds = None if segment is None else self.strong.new_empty(self.chunks, 2, CHUNK)
        outputs = self.sums, self.bounds, self.strong
        sums_kernel[(self.chunks,)](log_a, segment, *outputs, self.T, **constants("sums", *self.sizes))

    def scan(self, name: str, start: Tensor, states: Tensor, *inputs: Tensor | None) -> Tensor:
        """Runs kernel `name` over the states from `start` on. Fills `states` and returns the state at the end."""
        end, compiled_for = torch.empty_like(start), constants(name, *self.sizes)
        steps = self.N * compiled_for.get("R", 1)
        programs = self.heads * cdiv(self.F, compiled_for["BF"]) * cdiv(self.V, compiled_for["BV"])
        part, count = parts.cut(self.N, steps, programs)

        def run(*states: Tensor | None) -> None:
            grid = (programs * count,)
            KERNELS[name][grid](*inputs, self.sums, self.bounds, *states, self.T, part, **compiled_for)

        if count == 1:
            run(start, states, end)
            return end
        ends = start.new_empty(self.heads * count, self.F, self.V)
        run(None, None, ends)
        carry_kernel[self.heads, cdiv(self.F, 16), cdiv(self.V, 64)](
            self.sums, self.bounds, start, ends, end, self.T, part, F=self.F, V=self.V, C=CHUNK,
            CHUNKS=parts.held(part), BF=16, BV=64, REVERSED=name == "dstates",
        )  # fmt: skip
        run(ends, states, None)
        return end

    def by_chunk(self, name: str, *inputs: Tensor | None) -> None:
        """Launches a kernel twice: for the chunks that are not strong, and for the strong ones."""
        for strong in (False, True):
            compiled_for = constants(name, *self.sizes, strong, chips.multiplies_in_registers(self.states.device))
            if name in BY_FEATURE:
                grid: tuple[int, ...] = (self.chunks * cdiv(self.F, compiled_for["BF"]),)
            else:
                programs = self.chunks * (self.sizes[1] // compiled_for.get("HEADS", self.sizes[1]))
                grid = programs, cdiv(self.V, compiled_for["BV"] * (1 + compiled_for.get("TWO", 0)))
            KERNELS[name][grid](*inputs, self.T, **compiled_for)


def forward(
    q: Tensor,
    q_lse: Tensor | None,
    k: Tensor,
    v: Tensor,
    log_a: Tensor,
    state: Tensor,
    segment: Tensor | None,
    exclusive: bool,
) -> tuple[Tensor, Tensor]:
    """The outputs and the last state."""
    call = _Call(q, v, log_a, segment, exclusive)
    last = call.scan("states", state, call.states, k, v)
    o = v.new_empty(*q.shape[:3], v.shape[-1])
    call.by_chunk("outputs", q, q_lse, k, v, call.sums, call.strong, call.bounds, call.states, o)
    return o, last


def backward(
    q: Tensor,
    q_lse: Tensor | None,
    k: Tensor,
    v: Tensor,
    log_a: Tensor,
    state: Tensor,
    segment: Tensor | None,
    exclusive: bool,
    do: Tensor,
    dlast: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, q_lse (None without one), k, v, log_a and the state."""
    call = _Call(q, v, log_a, segment, exclusive)
    call.scan("states", state, call.states, k, v)
    return _gradients(call, q, q_lse, k, v, do, dlast)


def _gradients(
    call: _Call, q: Tensor, q_lse: Tensor | None, k: Tensor, v: Tensor, do: Tensor, dlast: Tensor
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor]:
    """Same as `backward`, once the states of the call are known."""
    dstates = torch.empty_like(call.states)
    dstate = call.scan("dstates", dlast, dstates, q, q_lse, do)
    dq, dk, dv, dlog_a = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.empty_like(call.log_a)
    dlse = None
    if q_lse is not None:
        blocks = cdiv(call.F, constants("dqk", *call.sizes)["BF"])  # the same for strong chunks
        dlse = q_lse.new_empty(len(q), blocks, *q_lse.shape[1:])
    shared = call.sums, call.strong, call.bounds, do
    call.by_chunk("dv", q, q_lse, k, *shared, dstates, dv)
    call.by_chunk("dqk", q, q_lse, k, v, *shared, call.states, dstates, dq, dlse, dk, dlog_a)
    if dlse is not None:
        dlse = dlse.squeeze(1) if blocks == 1 else dlse.sum(1)
    return dq, dlse, dk, dv, dlog_a, dstate


def transposed_forward(
    q_BTHV: Tensor,
    k_BTGF: Tensor,
    v_BTGV: Tensor,
    log_a: Tensor,
    state: Tensor,
    segment: Tensor | None,
    exclusive: bool,
) -> tuple[Tensor, Tensor]:
    """S_t q_t in fp32, [B, T, H, F], and the last state. The state is that of the other reads."""
    o = q_BTHV.new_empty(*q_BTHV.shape[:3], k_BTGF.shape[-1], dtype=torch.float32)
    call = _Call(o, v_BTGV, log_a, segment, exclusive)
    last = call.scan("states", state, call.states, k_BTGF, v_BTGV)
    call.by_chunk("transposed", q_BTHV, k_BTGF, v_BTGV, call.sums, call.strong, call.bounds, call.states, o)
    return o, last


def transposed_backward(
    q_BTHV: Tensor,
    k_BTGF: Tensor,
    v_BTGV: Tensor,
    log_a: Tensor,
    state: Tensor,
    segment: Tensor | None,
    exclusive: bool,
    do_BTHF: Tensor,
    dlast: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v, log_a and the state of `transposed_forward`, where do is in bf16.

    The sum of do_t S_t q_t is also that of a read by do_t whose output's gradient is q_t. So the gradient of q is that
    read's output, and the others are the read's own gradients.
    """
    call = _Call(do_BTHF, v_BTGV, log_a, segment, exclusive)
    call.scan("states", state, call.states, k_BTGF, v_BTGV)
    dq = torch.empty_like(q_BTHV)
    shared = call.sums, call.strong, call.bounds, call.states
    call.by_chunk("outputs", do_BTHF, None, k_BTGF, v_BTGV, *shared, dq)
    _, _, dk, dv, dlog_a, dstate = _gradients(call, do_BTHF, None, k_BTGF, v_BTGV, q_BTHV, dlast)
    return dq, dk, dv, dlog_a, dstate
