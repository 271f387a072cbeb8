"""Gated linear attention with a gate per feature and inputs in bf16: how its Triton kernels are launched.

With x and y the sums of a chunk's gates up to what token t reads and what s writes, less the sum in the middle of the
chunk, the score of t and s is the product of q_t exp(x_t) and k_s exp(-y_s): one matrix product a chunk, if none of the
exponents is too large. Chunks in which one is are `strong`. There the score of a pair is taken at the one level at
which t and s lie in the second and the first half of the same block: both decays end at the boundary between the
halves, so that each is at most 1, and a level is one product, masked. The kernels that take every chunk by itself are
compiled and launched twice, for either kind of chunk.

States and keys are loaded once for the R query heads of a key-value head where a block holds all features. Queries
with a log-sum-exp are made exp(q - lse) wherever they are loaded, so that it is never stored. When a pass over the
states has too few programs to fill a GPU, the sequence is cut into parts, as `common/parts.py` says.

Shapes: B batch, T tokens, H query heads, G key-value heads, R = H / G, F feature size, V value size, N chunks, C chunk
length. Kernels see BF of the features and BV of the values at a time.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gated_kernels.common import chips, parts
from gated_kernels.gla.intra_chunk import dqk_kernel, dv_kernel, outputs_kernel
from gated_kernels.gla.state_scan import carry_kernel, dstates_kernel, states_kernel, sums_kernel

CHUNK = 64
LIMIT = 87.0  # of an exponent to base 2: what it multiplies may be as large as 2^40 in bf16 and fp32
STEP = 11.0  # of one gate to base 2: the gradient of a stronger one would drown in what cancels beside it
# BF and BV at most, num_warps and num_stages, the fastest on an H200 at F = V = 128 (by Triton 3.6 kernels for
# chunks that are not strong spill nothing at F = V = 64 or 128 but 8 bytes of exclusive reads in segments; by 3.9 up to
# 176); tiles of fewer than 64 columns are misread on Hopper, see `simple_gla/launch.py`.
BLOCKS = {
    "sums": (128, 64, 4, 1),
    "states": (64, 128, 4, 2),
    "outputs": (128, 64, 4, 2),
    "dstates": (64, 128, 4, 3),
    "dv": (128, 128, 4, 2),
    "dqk": (64, 128, 4, 1),
}
STRONG_BLOCKS = {"outputs": (64, 64, 8, 1), "dv": (64, 64, 8, 1), "dqk": (64, 64, 8, 1)}
# For chips that multiply in registers, see common/chips.py: what spills least by the compiler, not measured.
BLOCKS_IN_REGISTERS = BLOCKS | {"outputs": (64, 64, 8, 1), "dqk": (64, 64, 4, 1)}
LOOPED = 64  # BF of outputs and dv where they loop over features, BV of dqk where it loops over values
KERNELS = {
    "sums": sums_kernel,
    "states": states_kernel,
    "outputs": outputs_kernel,
    "dstates": dstates_kernel,
    "dv": dv_kernel,
    "dqk": dqk_kernel,
}


@functools.cache
def constants(
    kernel: str, G: int, R: int, F: int, V: int, exclusive: bool, strong: bool = False, in_registers: bool = False
) -> dict[str, Any]:
    """What a kernel is compiled for and with; fixed by the sizes and the kind of chip, never searched for."""
    BF, BV, warps, stages = (STRONG_BLOCKS if strong else BLOCKS_IN_REGISTERS if in_registers else BLOCKS)[kernel]
    BF, BV = min(BF, max(64, triton.next_power_of_2(F))), min(BV, max(64, triton.next_power_of_2(V)))
    if kernel in ("outputs", "dv") and F > BF:
        BF = min(BF, LOOPED)
    elif kernel == "dqk" and V > BV:
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
    """The sizes of a call, its sums of gates and the passes over its states."""

    def __init__(self, q: Tensor, v: Tensor, log_a: Tensor, segment: Tensor | None, exclusive: bool):
        (B, self.T, H, self.F), (self.G, self.V) = q.shape, v.shape[2:]
        self.N, self.heads = triton.cdiv(self.T, CHUNK), B * self.G
        self.chunks = self.heads * self.N
        self.sizes = self.G, H // self.G, self.F, self.V, exclusive
        self.states = v.new_empty(self.chunks, self.F, self.V)
        self.sums = v.new_empty(self.chunks, CHUNK + 1, self.F, dtype=torch.float32)
        self.strong = v.new_empty(self.chunks, dtype=torch.int32)
        self.bounds = None if segment is None else self.strong.new_empty(self.chunks, 2, CHUNK)
        outputs = self.sums, self.bounds, self.strong
        sums_kernel[(self.chunks,)](log_a, segment, *outputs, self.T, **constants("sums", *self.sizes))

    def scan(self, name: str, start: Tensor, states: Tensor, *inputs: Tensor | None) -> Tensor:
        """A pass over the states from `start` on; fills `states` and returns the one at the end."""
        end, compiled_for = torch.empty_like(start), constants(name, *self.sizes)
        steps = self.N * compiled_for.get("R", 1)
        programs = self.heads * triton.cdiv(self.F, compiled_for["BF"]) * triton.cdiv(self.V, compiled_for["BV"])
        part, count = parts.cut(self.N, steps, programs)

        def run(*states: Tensor | None) -> None:
            grid = (programs * count,)
            KERNELS[name][grid](*inputs, self.sums, self.bounds, *states, self.T, part, **compiled_for)

        if count == 1:
            run(start, states, end)
            return end
        ends = start.new_empty(self.heads * count, self.F, self.V)
        run(None, None, ends)
        carry_kernel[self.heads, triton.cdiv(self.F, 16), triton.cdiv(self.V, 64)](
            self.sums, self.bounds, start, ends, end, self.T, part, F=self.F, V=self.V, C=CHUNK,
            CHUNKS=triton.next_power_of_2(part), BF=16, BV=64, REVERSED=name == "dstates",
        )  # fmt: skip
        run(ends, states, None)
        return end

    def by_chunk(self, name: str, *inputs: Tensor | None) -> None:
        """Launches a kernel for the strong chunks and for the others, which leaves out the strong."""
        for strong in (False, True):
            compiled_for = constants(name, *self.sizes, strong, chips.multiplies_in_registers(self.states.device))
            if name == "dqk":
                grid: tuple[int, ...] = (self.chunks * triton.cdiv(self.F, compiled_for["BF"]),)
            else:
                programs = self.chunks * (self.sizes[1] // compiled_for.get("HEADS", self.sizes[1]))
                grid = programs, triton.cdiv(self.V, compiled_for["BV"] * (1 + compiled_for.get("TWO", 0)))
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
    """The gradients of q, q_lse, k, v, log_a and the state."""
    call = _Call(q, v, log_a, segment, exclusive)
    dstates = torch.empty_like(call.states)
    call.scan("states", state, call.states, k, v)
    dstate = call.scan("dstates", dlast, dstates, q, q_lse, do)
    dq, dk, dv, dlog_a = (torch.empty_like(x) for x in (q, k, v, log_a))
    dlse = None
    if q_lse is not None:
        blocks = triton.cdiv(call.F, constants("dqk", *call.sizes)["BF"])  # of strong chunks as of the others
        dlse = q_lse.new_empty(len(q), blocks, *q_lse.shape[1:])
    shared = call.sums, call.strong, call.bounds, do
    call.by_chunk("dv", q, q_lse, k, *shared, dstates, dv)
    call.by_chunk("dqk", q, q_lse, k, v, *shared, call.states, dstates, dq, dlse, dk, dlog_a)
    if dlse is not None:
        dlse = dlse.squeeze(1) if blocks == 1 else dlse.sum(1)
    return dq, dlse, dk, dv, dlog_a, dstate
