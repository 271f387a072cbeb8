"""Launches the Triton kernels of gated linear attention with one gate per key-value head, or none.

With one gate for all features, the decay from what token s writes to what token t reads is exp(x_t - y_s). Here x_t and
y_s are the cumulative sums of the chunk's log gates up to there. They are computed in fp64 and stored as two fp32
numbers each, so that their differences have full fp32 precision. Log gates below -1000 count as -1000, which is a decay
of 0 in fp32 as well, and so does the start of a segment. A chunk's scores are one matrix product of the unscaled
queries and keys, times a matrix of decays. Keys and queries that write to or read from states are decayed row by row.
The gradient of a log gate is the sum of dscore * score over the pairs that it lies between. It is computed by a product
with zeros and ones, so that nothing cancels. The scores' gradients are computed once and stored, in the dtype of the
products, because all tiles of features need them.

The normalizer is read from one more column of the states, z, to which tokens add their keys. It is kept in separate
fp32 vectors, because rows of V + 1 elements would hardly allow vectorized loads. Only the first and the last state,
which are visible to callers, have it as their last column. The states and, if one tile holds all features, keys and
values are loaded once for the R query heads of a key-value head.

In a pipelined loop, no tile may be both an operand of a product and used in registers. For such a tile Triton (3.6 and
3.9) allocates one buffer where the others have two, and loads the next tile over data that an asynchronous product
still reads. Hence the normalizer has a separate loop if there are several tiles of features.

If a scan over the states has too few programs to fill a GPU, the sequence is split into parts (common/parts.py).

Shapes: B batch, T tokens, H query heads, G key-value heads, R = H / G, F feature size, V value size, S = V, or V + 1
with a normalizer, N chunks, C chunk length. A tile has BF features and BV values; NV tiles hold all values.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from gated_kernels.common import chips, parts
from gated_kernels.common.gated_inputs import Sizes, promoted, sizes_of
from gated_kernels.common.integers import cdiv, next_power_of_2
from gated_kernels.common.tiles import PRODUCTS
from gated_kernels.simple_gla.intra_chunk import (
    dgates_kernel,
    dqk_kernel,
    dscores_kernel,
    dv_kernel,
    outputs_kernel,
)
from gated_kernels.simple_gla.state_scan import carry_kernel, dstates_kernel, states_kernel, sums_kernel

BF16, FP32 = torch.bfloat16, torch.float32
# By the dtype of the products: the chunk length, and each kernel's largest BF and BV, num_warps and num_stages. In bf16
# with Triton 3.6, none spills more than 16 bytes per thread at the usual sizes, F of 64 to 1024, V of 64 and 128.
CHUNK = {BF16: 64, FP32: 32}
BLOCKS = {
    "states": {BF16: (64, 128, 4, 2), FP32: (64, 32, 4, 2)},
    "outputs": {BF16: (128, 128, 4, 2), FP32: (32, 32, 8, 1)},
    "dstates": {BF16: (64, 128, 4, 3), FP32: (64, 32, 4, 2)},
    "dscores": {BF16: (64, 128, 4, 2), FP32: (32, 32, 4, 2)},
    "dv": {BF16: (128, 128, 4, 1), FP32: (32, 32, 8, 1)},
    "dqk": {BF16: (64, 128, 4, 1), FP32: (16, 32, 4, 1)},  # one stage: queries are both operand and in registers
}
NARROWEST = {BF16: 64, FP32: 16}  # fewest columns of a tile: with 16 or 32, Triton 3.6 misreads shared memory on Hopper
# BF and num_stages in bf16 of kernels that loop over features.
LOOPED = {"outputs": (64, 2), "dv": (64, 3)}
LOOPED_BV = 64  # BV of dqk if it loops over values
WARPS_IN_REGISTERS = 8  # of outputs, dv and dqk in bf16 at V > 64, where products are in registers (common/chips.py)

KERNELS = {
    "states": states_kernel,
    "outputs": outputs_kernel,
    "dstates": dstates_kernel,
    "dscores": dscores_kernel,
    "dv": dv_kernel,
    "dqk": dqk_kernel,
}


@functools.cache
def constants(
    kernel: str,
    G: int,
    R: int,
    F: int,
    V: int,
    normalizer: bool,
    exclusive: bool,
    dtype: torch.dtype,
    in_registers: bool = False,
    tensor_memory: bool = False,
) -> dict[str, Any]:
    """A kernel's constexprs and launch options. They follow from sizes, dtype and chip; there is no autotuning."""
    computed_in, precision = PRODUCTS[dtype]
    BF, BV, warps, stages = BLOCKS[kernel][computed_in]
    BF = min(BF, max(NARROWEST[computed_in], next_power_of_2(F)))
    BV = min(BV, max(NARROWEST[computed_in], next_power_of_2(V)))
    if kernel in LOOPED and F > BF:
        BF, stages = LOOPED[kernel] if computed_in == BF16 else (BF, 2)
    elif kernel == "dqk" and V > BV:
        BV = min(BV, LOOPED_BV)
    elif kernel == "dstates" and computed_in == BF16 and BV == 64 and F > BF:
        BF, stages = 128, 2  # a tile of 128 x 64 has as many elements as one of 64 x 128
    elif kernel == "outputs" and BV > 64:
        stages = 1  # more would not fit into the 99 KB of shared memory of sm_86
    if in_registers and computed_in == BF16 and V > 64 and kernel in ("outputs", "dv", "dqk"):
        warps = WARPS_IN_REGISTERS
    if tensor_memory and kernel == "dstates":
        stages = 1  # Triton 3.9 fails to compile the pipelined loop for sm_100
    found = {
        "G": G,
        "R": R,
        "F": F,
        "V": V,
        "S": V + normalizer,
        "EXCLUSIVE": int(exclusive),
        "C": CHUNK[computed_in],
        "D": {BF16: tl.bfloat16, FP32: tl.float32}[computed_in],
        "BF": BF,
        "BV": BV,
        "NV": cdiv(V, BV),
        "HEADS": R if F <= BF else 1,
        "PRECISION": precision,
    }
    return {x: found[x] for x in KERNELS[kernel].arg_names if x in found} | {"num_warps": warps, "num_stages": stages}


@functools.cache
def by_kernel(*compiled_for: Any) -> tuple[dict[str, dict[str, Any]], dict[str, tuple[int, int]]]:
    """For each kernel, its `constants`, and how many of its tiles hold all features and all values."""
    found, (F, V) = {name: constants(name, *compiled_for) for name in KERNELS}, compiled_for[2:4]
    return found, {name: (cdiv(F, c.get("BF", F)), cdiv(V, c["BV"])) for name, c in found.items()}


class Call:
    """The sizes of a call, its cumulative sums of gates and the scans over its states."""

    def __init__(
        self,
        sizes: Sizes,
        dtype: torch.dtype,
        device: torch.device,
        log_a: Tensor | None,
        normalized: bool,
        segment: Tensor | None,
        exclusive: bool,
    ):
        self.B, self.T, H, G, F, V = sizes
        new = functools.partial(torch.empty, device=device)
        chip = chips.multiplies_in_registers(device), chips.has_tensor_memory(device)
        self.constants, self.blocks = by_kernel(G, H // G, F, V, normalized, exclusive, dtype, *chip)
        self.C = CHUNK[PRODUCTS[dtype][0]]
        self.G, self.N, self.heads = G, cdiv(self.T, self.C), self.B * G
        self.chunks = self.heads * self.N
        self.states = new(self.chunks, F, V, dtype=PRODUCTS[dtype][0])
        self.z = new(self.chunks, F, dtype=torch.float32) if normalized else None
        self.read = self.write = None
        if log_a is not None or segment is not None:
            self.write = new(self.chunks, 2, self.C, dtype=torch.float32)
            self.read = torch.empty_like(self.write) if exclusive else self.write
            sums_kernel[(self.chunks,)](
                log_a, segment, self.read, self.write, self.T, G=G, EXCLUSIVE=exclusive, C=self.C, num_warps=1
            )  # fmt: skip

    def scan(self, name: str, start: Tensor, states: Tensor, z: Tensor | None, *inputs: Tensor | None) -> Tensor:
        """Runs kernel `name` over the states from `start` on. Fills `states` and `z`, returns the state at the end."""
        end = torch.empty_like(start)
        steps = self.N * self.constants[name].get("R", 1)
        programs = self.heads * self.blocks[name][0] * self.blocks[name][1]
        part, count = parts.cut(self.N, steps, programs)

        def run(*states: Tensor | None) -> None:
            KERNELS[name][(programs * count,)](*inputs, *states, self.T, part, **self.constants[name])

        if count == 1:
            run(start, states, z, end)
            return end
        size = start[0, 0].numel()
        ends = start.new_empty(self.heads * count, size)
        run(None, None, None, ends)
        carry_kernel[self.heads, cdiv(size, 1024)](
            self.write, start, ends, end, self.N, part, SIZE=size, C=self.C,
            CHUNKS=parts.held(part), BLOCK=1024, REVERSED=name == "dstates",
        )  # fmt: skip
        run(ends, states, z, None)
        return end


class Gradients(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    log_a: Tensor | None
    state: Tensor


class _Targets(NamedTuple):
    """What the backward pass writes for queries and keys: their gradients and, if requested, the dot product of each
    row with its gradient, [blocks of F, H, B T] and [blocks of F, G, B T], in a part for every block of features."""

    dq: Tensor
    dk: Tensor
    q_products: Tensor | None
    k_products: Tensor | None


def _call_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_a: Tensor | None,
    write_mask: Tensor | None,
    segment: Tensor | None,
    exclusive: bool,
) -> Call:
    normalized = write_mask is not None
    return Call(sizes_of(q, v), promoted(q, k, v), v.device, log_a, normalized, segment, exclusive)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_a: Tensor | None,
    write_mask: Tensor | None,
    state: Tensor,
    segment: Tensor | None,
    exclusive: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The outputs, the normalizer (empty without `write_mask`) and the last state."""
    call = _call_of(q, k, v, log_a, write_mask, segment, exclusive)
    last = call.scan("states", state, call.states, call.z, k, v, write_mask, call.write)
    o = v.new_empty(*q.shape[:3], v.shape[-1])
    normalizer = q.new_empty(0 if write_mask is None else q.shape[:3], dtype=torch.float32)
    compiled_for = call.constants["outputs"]
    grid = call.chunks * (compiled_for["R"] // compiled_for["HEADS"]), call.blocks["outputs"][1]
    outputs_kernel[grid](
        q, k, v, write_mask, call.read, call.write, call.states, call.z, o, normalizer, call.T, **compiled_for
    )  # fmt: skip
    return o, normalizer, last


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_a: Tensor | None,
    write_mask: Tensor | None,
    state: Tensor,
    segment: Tensor | None,
    exclusive: bool,
    do: Tensor,
    dnormalizer: Tensor,
    dlast: Tensor,
) -> Gradients:
    """The gradients of all inputs. `dnormalizer`, `dlast`: the gradients of the normalizer and of the last state."""
    call = _call_of(q, k, v, log_a, write_mask, segment, exclusive)
    targets = _Targets(torch.empty_like(q), torch.empty_like(k), None, None)
    return _backward(call, targets, q, k, v, log_a, write_mask, state, exclusive, do, dnormalizer, dlast)


def backward_in_place(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_a: Tensor | None,
    write_mask: Tensor | None,
    state: Tensor,
    segment: Tensor | None,
    exclusive: bool,
    do: Tensor,
    dnormalizer: Tensor,
    dlast: Tensor,
) -> tuple[Gradients, Tensor, Tensor]:
    """Same as `backward`, but overwrites q and k with their gradients.

    Also returns the dot products of each row of q and k with its gradient, [H, B T] and [G, B T], because they cannot
    be computed afterwards.
    """
    call = _call_of(q, k, v, log_a, write_mask, segment, exclusive)
    shape = call.blocks["dqk"][0], call.B * call.T
    q_products, k_products = (x.new_empty(shape[0], x.shape[2], shape[1], dtype=torch.float32) for x in (q, k))
    targets = _Targets(q, k, q_products, k_products)
    found = _backward(call, targets, q, k, v, log_a, write_mask, state, exclusive, do, dnormalizer, dlast)
    return found, q_products.sum(0), k_products.sum(0)


def _backward(
    call: Call,
    targets: _Targets,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_a: Tensor | None,
    write_mask: Tensor | None,
    state: Tensor,
    exclusive: bool,
    do: Tensor,
    dnormalizer: Tensor,
    dlast: Tensor,
) -> Gradients:
    of_normalizer = None if write_mask is None else dnormalizer
    R, of_F = q.shape[2] // call.G, call.blocks["dqk"][0]
    dstates, dz = torch.empty_like(call.states), None if call.z is None else torch.empty_like(call.z)
    call.scan("states", state, call.states, call.z, k, v, write_mask, call.write)
    dstate = call.scan("dstates", dlast, dstates, dz, q, do, of_normalizer, call.read, call.write)
    dv = torch.empty_like(v)
    dscores = call.states.new_empty(call.chunks, R, call.C, call.C)
    dread = dwrite = dtotal = dpairs = dlog_a = None
    if log_a is not None:
        dread, dwrite = q.new_empty(2, of_F, call.chunks, call.C, dtype=torch.float32)
        dtotal = q.new_empty(of_F, call.chunks, dtype=torch.float32)
        dpairs = q.new_empty(call.chunks, call.C, dtype=torch.float32)
    dscores_kernel[(call.chunks * R,)](
        v, write_mask, call.read, call.write, do, of_normalizer, dscores, call.T, **call.constants["dscores"]
    )  # fmt: skip
    dv_kernel[call.chunks, call.blocks["dv"][1]](
        q, k, dscores, call.read, call.write, do, dstates, dv, dpairs, call.T, **call.constants["dv"]
    )  # fmt: skip
    dqk_kernel[(call.chunks * of_F,)](
        q, k, v, write_mask, dscores, call.read, call.write, do, of_normalizer, call.states, call.z, dstates, dz,
        targets.dq, targets.dk, dread, dwrite, dtotal, targets.q_products, targets.k_products, call.B, call.T,
        **call.constants["dqk"],
    )  # fmt: skip
    if log_a is not None:
        dlog_a = torch.empty_like(log_a)
        dgates_kernel[(call.chunks,)](
            dread, dwrite, dtotal, dpairs, dlog_a, call.B, call.T, G=call.G, EXCLUSIVE=int(exclusive), C=call.C,
            OF_F=of_F, num_warps=1,
        )  # fmt: skip
    return Gradients(targets.dq, targets.dk, dv, dlog_a, dstate)
