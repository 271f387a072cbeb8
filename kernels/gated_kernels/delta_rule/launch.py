"""The delta rule with one gate a key-value head, or none: how its Triton kernels are launched.

Within a chunk what the tokens write, y, solves a triangular system of the scores between the keys r that look up and
the keys k that write (the WY form, 2406.06484). With S the state before the chunk, start_t the decay from there until
token t, and A the decayed scores of t and the tokens before it:

    (1 + A) y = v - start r S,   so y = fresh - held S with fresh = (1 + A)^-1 v and held = (1 + A)^-1 start r

The inverse is made chunk by chunk, in fp32 and without a loop over rows; then one pass over the states turns `fresh`
into y. What is left is gated linear attention of k and y, whose kernel for the outputs it shares (simple_gla, which
explains the sums of gates and the dtypes of products, too).

Backwards the gradient of v is x = (1 + A)^-T dy with dy that of y, and r counts as one more query, whose outputs have
the gradient -x. What the outputs send to x and to S is summed over the query heads first; one pass over the states from
the end adds `sent` dS' to x, with dS' the gradient of the state after the chunk and sent = (1 + A)^-T k times the
decays to there. Multiplied out before they meet the states, neither `held` nor `sent` leaves large numbers to cancel
where tokens overwrite each other. Only the inputs are kept between the passes.

Shapes: B batch, T tokens, H query heads, G key-value heads, R = H / G, F feature size, V value size, N chunks, C chunk
length. Kernels see BF of the features and BV of the values at a time; all but one have all features in a block.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from gated_kernels.common import chips
from gated_kernels.common.gated_inputs import promoted, sizes_of
from gated_kernels.common.integers import cdiv, next_power_of_2
from gated_kernels.common.tiles import PRODUCTS
from gated_kernels.delta_rule.intra_chunk import dgates_kernel, dqkr_kernel, dread_kernel, dscores_kernel
from gated_kernels.delta_rule.solve import solve_kernel
from gated_kernels.delta_rule.state_scan import dstates_kernel, states_kernel
from gated_kernels.simple_gla import launch as simple_gla
from gated_kernels.simple_gla.intra_chunk import outputs_kernel
from gated_kernels.simple_gla.state_scan import sums_kernel

BF16, FP32 = torch.bfloat16, torch.float32
CHUNK, NARROWEST = simple_gla.CHUNK, simple_gla.NARROWEST
LARGEST = 128  # features or values: a kernel holds all features of a state
# By the dtype of the products: for each kernel BF and BV at most, num_warps and num_stages; what spills least by the
# compiler, not measured.
BLOCKS = {
    "solve": {BF16: (128, 64, 4, 1), FP32: (128, 32, 4, 1)},
    "states": {BF16: (128, 64, 4, 2), FP32: (128, 16, 4, 1)},
    "dread": {BF16: (128, 64, 8, 1), FP32: (128, 16, 4, 1)},
    "dstates": {BF16: (128, 64, 4, 2), FP32: (128, 16, 4, 1)},
    "dscores": {BF16: (128, 64, 4, 1), FP32: (128, 32, 4, 1)},
    "dqkr": {BF16: (64, 64, 4, 1), FP32: (16, 32, 4, 1)},
}
WARPS_IN_REGISTERS = 8  # in bf16 on the chips of common/chips.py that multiply in registers, where more spill
KERNELS = {
    "solve": solve_kernel,
    "states": states_kernel,
    "dread": dread_kernel,
    "dstates": dstates_kernel,
    "dscores": dscores_kernel,
    "dqkr": dqkr_kernel,
}


@functools.cache
def constants(
    kernel: str, G: int, R: int, F: int, V: int, exclusive: bool, dtype: torch.dtype, in_registers: bool = False
) -> dict[str, Any]:
    """What a kernel is compiled for and with; fixed by the sizes, the dtype and the chip, never searched for."""
    computed_in, precision = PRODUCTS[dtype]
    BF, BV, warps, stages = BLOCKS[kernel][computed_in]
    if in_registers and computed_in == BF16 and kernel != "dscores":
        warps = WARPS_IN_REGISTERS
    C = CHUNK[computed_in]
    found = {
        "G": G,
        "R": R,
        "F": F,
        "V": V,
        "EXCLUSIVE": int(exclusive),
        "C": C,
        "D": {BF16: tl.bfloat16, FP32: tl.float32}[computed_in],
        "BF": min(BF, max(NARROWEST[computed_in], next_power_of_2(F))),
        "BV": min(BV, max(NARROWEST[computed_in], next_power_of_2(V))),
        "LEVELS": C.bit_length() - 1,
        "PRECISION": precision,
    }
    return {x: found[x] for x in KERNELS[kernel].arg_names if x in found} | {"num_warps": warps, "num_stages": stages}


class Gradients(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    r: Tensor
    log_a: Tensor | None
    state: Tensor


class _Call:
    """The sizes of a call, and what both of its passes begin with: the states and what the tokens write."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        r: Tensor,
        log_a: Tensor | None,
        state: Tensor,
        segment: Tensor | None,
        exclusive: bool,
        backwards: bool,
    ):
        dtype = promoted(q, k, v, r)
        B, self.T, H, self.G, F, V = sizes_of(q, v)
        self.of_chip = chips.multiplies_in_registers(v.device)
        self.compiled_for = self.G, H // self.G, F, V, exclusive, dtype, self.of_chip
        products = PRODUCTS[dtype][0]
        self.C = CHUNK[products]
        self.heads = B * self.G
        self.chunks = self.heads * cdiv(self.T, self.C)
        new = functools.partial(torch.empty, device=v.device)
        self.read = self.write = None
        if log_a is not None or segment is not None:
            self.write = new(self.chunks, 2, self.C, dtype=FP32)
            self.read = torch.empty_like(self.write) if exclusive else self.write
            sums_kernel[(self.chunks,)](
                log_a, segment, self.read, self.write, self.T, G=self.G, EXCLUSIVE=exclusive, C=self.C, num_warps=1
            )  # fmt: skip
        self.inverse = self.sent = None
        if backwards:
            self.inverse = new(self.chunks, self.C, self.C, dtype=products)
            self.sent = torch.empty_like(k, dtype=products)
        self.held, self.written = (torch.empty_like(x, dtype=products) for x in (r, v))
        self.states = new(self.chunks, F, V, dtype=products)
        self.last = torch.empty_like(state)
        self.run("solve", k, v, r, self.write, self.inverse, self.held, self.written, self.sent)
        self.run("states", k, self.held, self.written, self.write, None, state, self.states, self.last)

    def run(self, name: str, *tensors: Tensor | None) -> None:
        compiled_for = constants(name, *self.compiled_for)
        of_F = cdiv(self.compiled_for[2], compiled_for["BF"])
        of_V = cdiv(self.compiled_for[3], compiled_for["BV"])
        grid: tuple[int, ...] = (self.chunks,)
        if name == "dread":
            grid = self.chunks, of_V
        elif name in ("states", "dstates"):
            grid = (self.heads * of_V,)
        elif name == "dscores":
            grid = (self.chunks * (compiled_for["R"] + 1),)
        elif name == "dqkr":
            grid = (self.chunks * of_F,)
        KERNELS[name][grid](*tensors, self.T, **compiled_for)

    def of_simple_gla(self, name: str) -> dict[str, Any]:
        """What a kernel of simple_gla is compiled for."""
        G, R, F, V, exclusive, dtype, in_registers = self.compiled_for
        tensor_memory = chips.has_tensor_memory(self.states.device)
        return simple_gla.constants(name, G, R, F, V, False, exclusive, dtype, in_registers, tensor_memory)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    log_a: Tensor | None,
    state: Tensor,
    segment: Tensor | None,
    exclusive: bool,
) -> tuple[Tensor, Tensor]:
    """The outputs and the last state."""
    call = _Call(q, k, v, r, log_a, state, segment, exclusive, backwards=False)
    o = v.new_empty(*q.shape[:3], v.shape[-1])
    compiled_for = call.of_simple_gla("outputs")
    of_V = cdiv(v.shape[-1], compiled_for["BV"])
    grid = call.chunks * (compiled_for["R"] // compiled_for["HEADS"]), of_V
    outputs_kernel[grid](
        q, k, call.written, None, call.read, call.write, call.states, None, o, None, call.T, **compiled_for
    )  # fmt: skip
    return o, call.last


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    log_a: Tensor | None,
    state: Tensor,
    segment: Tensor | None,
    exclusive: bool,
    do: Tensor,
    dlast: Tensor,
) -> Gradients:
    """`dlast` is the gradient of the last state."""
    call = _Call(q, k, v, r, log_a, state, segment, exclusive, backwards=True)
    R, F, C = call.compiled_for[1], q.shape[-1], call.C
    of_F = cdiv(F, constants("dqkr", *call.compiled_for)["BF"])
    new = functools.partial(torch.empty, device=v.device, dtype=FP32)
    dreads = dlooks = dwrites = dtotal = dpairs = dlog_a = None
    if log_a is not None:
        dreads, dlooks, dwrites = new(3, of_F, call.chunks, C)
        dtotal = new(of_F, call.chunks)
        dpairs = new(R + 1, call.chunks, C)
    dv, dread, dstates = (torch.empty_like(x) for x in (call.written, call.states, call.states))
    dstate = torch.empty_like(state)
    call.run("dread", q, k, call.inverse, call.read, call.write, do, dv, dread)
    call.run("dstates", r, call.sent, dv, dread, call.write, None, dlast, dstates, dstate)
    dscores = call.states.new_empty(call.chunks, R + 1, C, C)
    call.run("dscores", q, k, r, call.written, call.read, call.write, do, dv, dscores, dpairs)
    dq, dk, dr = (torch.empty_like(x) for x in (q, k, r))
    call.run(
        "dqkr", q, k, r, call.written, dscores, call.read, call.write, do, dv, call.states, dstates, dq, dk, dr, dreads,
        dlooks, dwrites, dtotal,
    )  # fmt: skip
    if log_a is not None:
        dlog_a = torch.empty_like(log_a)
        dgates_kernel[(call.chunks,)](
            dreads, dlooks, dwrites, dtotal, dpairs, dlog_a, call.T, G=call.G, R=R, EXCLUSIVE=int(exclusive),
            C=C, OF_F=of_F, num_warps=1,
        )  # fmt: skip
    return Gradients(dq, dk, dv.to(v.dtype), dr, dlog_a, dstate)
