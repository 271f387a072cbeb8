"""The elementwise recurrence: how its Triton kernels are launched.

A decay of every entry leaves no matrix product over tokens, so programs hold blocks of a state in registers and step
through tokens one by one. All chunks of a sequence do so at once, from a state of zeros; a pass over the chunks makes
the states before them of that; and from these all chunks step through their tokens again, which makes the outputs.

Backwards the same is done from the end, for the gradients of the states. Those of the exponents take the states as they
were: `dq_kernel` keeps every fourth of them, and `dinputs_kernel` makes those between again in registers. That is done
for so many chunks at a time that what is kept stays within SCRATCH. Only the inputs are kept between the passes.

Everything is computed in fp32. q, k and dt may be expanded views, of one key for all features, as S4 has them:
the kernels take their strides. Nothing of this is tuned.

Shapes: B batch, T tokens, H query heads, G key-value heads, R = H / G, F feature size, V value size, N chunks, C chunk
length.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gated_kernels.common.integers import cdiv, next_power_of_2
from gated_kernels.elementwise.reverse_scan import dends_kernel, dinputs_kernel
from gated_kernels.elementwise.scan import carry_kernel, dq_kernel, ends_kernel, outputs_kernel

FP32 = torch.float32
CHUNKS = (64, 32, 16)  # lengths of chunks: the longest of which there are enough
PROGRAMS = 132 * 16  # warps at which a GPU of 132 processors is full enough
INNER = 4  # tokens between two states that `dinputs_kernel` reads: it has as many in registers
LARGEST = 256  # features
ENTRIES, CHANNELS = 512, 32  # of a program of one warp at most: 16 registers a thread for a state, a thread a value
CARRIED = 128  # entries of a program that goes from chunk to chunk
SCRATCH = 2**26  # numbers, 256 MB


class Gradients(NamedTuple):
    """None: not wanted."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    dt: Tensor | None
    log_A: Tensor
    state: Tensor


@functools.cache
def blocks(G: int, F: int, V: int) -> tuple[int, int, int]:
    """The features, heads and values of a program."""
    BF = next_power_of_2(F)
    channels = max(1, min(CHANNELS, ENTRIES // BF))
    BV = min(channels, next_power_of_2(V))
    return BF, min(channels // BV, next_power_of_2(G)), BV


class _Call:
    """The sizes of a call, and what both of its passes begin with: the states before all chunks."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dt: Tensor,
        log_A: Tensor,
        state: Tensor,
        segment: Tensor | None,
        exclusive: bool,
    ):
        H, self.F = q.shape[2:]
        self.B, self.T, self.G, self.V = v.shape
        self.one_query = q.shape[:2] != v.shape[:2]
        self.R = H // self.G
        BF, BG, self.BV = blocks(self.G, self.F, self.V)
        self.blocks = cdiv(self.G, BG) * cdiv(self.V, self.BV)
        self.block = BF * BG * self.BV
        self.C = next((C for C in CHUNKS if self.B * self.blocks * (self.T // C) >= PROGRAMS), CHUNKS[-1])
        self.N = cdiv(self.T, self.C)
        self.log_A, self.state = log_A, state
        self.strides = {
            f"{name}_{axis}": step
            for name, x, axes in (
                ("q", q.expand(self.B, self.T, H, self.F), "bthf"),
                ("k", k, "btgf"),
                ("dt", dt, "btgv"),
            )
            for axis, step in zip(axes, x.stride())
        }
        self.fixed = {
            "G": self.G, "R": self.R, "F": self.F, "V": self.V, "EXCLUSIVE": int(exclusive), "C": self.C,
            "INNER": INNER, "ONE_QUERY": int(self.one_query), "BF": BF, "BG": BG, "BV": self.BV,
        }  # fmt: skip
        self.states, self.last = state, None
        if self.N > 1:
            new = functools.partial(torch.empty, device=v.device, dtype=FP32)
            self.states = new(self.B, self.N, self.G, self.F, self.V)
            self.sums = new(self.B, self.N, self.G, self.V)
            self.run(ends_kernel, k, v, dt, log_A, segment, self.states, self.sums)
            self.last = torch.empty_like(state)
            self.carry(state, self.states, self.last)

    def run(self, kernel: Any, *tensors: Tensor | None, first: int = 0, chunks: int | None = None) -> None:
        """A program for every block of values in every chunk of `chunks` (all), from `first` on; where one query is
        for all tokens, `dq_kernel` has one for each query head of a block, which sums over the tokens."""
        chunks = self.N if chunks is None else chunks
        sizes = {"T": self.T, "FIRST": first, "CHUNKS": chunks, "SEQUENCES": self.B} | self.strides | self.fixed
        constants = {name: sizes[name] for name in kernel.arg_names if name in sizes}
        heads = self.R if kernel is dq_kernel and self.one_query else 1
        kernel[self.B * chunks * self.blocks, heads](*tensors, **constants, num_warps=1)

    def carry(self, first: Tensor, added: Tensor, last: Tensor | None, backwards: bool = False) -> None:
        entries = self.G * self.F * self.V
        carry_kernel[(self.B * cdiv(entries, CARRIED),)](
            self.log_A, self.sums, first, added, last, self.N, F=self.F, V=self.V, E=entries, GV=self.G * self.V,
            REVERSED=int(backwards), BE=CARRIED, num_warps=CARRIED // 32,
        )  # fmt: skip

    def parts(self, x: Tensor) -> Tensor:
        """For the gradient of q or k: a part for each block of values, which are summed then; where one query is for
        all tokens, for each chunk, too."""
        of_V = cdiv(self.V, self.BV)
        if x.shape[:2] != (self.B, self.T):
            return torch.empty(of_V * self.B * self.N, *x.shape, device=x.device, dtype=FP32)
        return torch.empty(of_V, *x.shape, device=x.device, dtype=x.dtype if of_V == 1 else FP32)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dt: Tensor,
    log_A: Tensor,
    state: Tensor,
    segment: Tensor | None,
    exclusive: bool,
) -> tuple[Tensor, Tensor]:
    """The outputs and the last state."""
    call = _Call(q, k, v, dt, log_A, state, segment, exclusive)
    o = v.new_empty(call.B, call.T, q.shape[2], call.V)
    last = torch.empty_like(state) if call.last is None else None  # of one chunk: the same kernel makes it
    call.run(outputs_kernel, q, k, v, dt, log_A, segment, call.states, o, last)
    last = call.last if last is None else last
    assert last is not None
    return o, last


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dt: Tensor,
    log_A: Tensor,
    state: Tensor,
    segment: Tensor | None,
    exclusive: bool,
    do: Tensor,
    dlast: Tensor,
    wanted: Sequence[bool],
) -> Gradients:
    """`dlast` is the gradient of the last state; `wanted` are those of q, k, v and dt."""
    call = _Call(q, k, v, dt, log_A, state, segment, exclusive)
    dstates = dlast
    if call.N > 1:
        dstates = torch.empty_like(call.states)
        call.run(dends_kernel, q, dt, log_A, segment, do, dstates)
        call.carry(dlast, dstates, None, backwards=True)
    dq, dk = (call.parts(x) if wants else None for x, wants in zip((q, k), wanted))
    dv, ddt = (torch.empty(x.shape, device=x.device, dtype=x.dtype) if w else None for x, w in zip((v, dt), wanted[2:]))
    drates = torch.empty(call.B, call.N, *log_A.shape, device=v.device, dtype=FP32)
    dstate = torch.empty_like(state)
    kept = call.B * call.blocks * (call.C // INNER) * call.block  # numbers of one chunk of all sequences
    at_once = min(call.N, max(1, SCRATCH // kept))
    inner = torch.empty(at_once * kept, device=v.device, dtype=FP32)
    for first in range(0, call.N, at_once):
        chunks = min(at_once, call.N - first)
        call.run(
            dq_kernel, k, v, dt, log_A, segment, call.states, do, dq, inner, first=first, chunks=chunks
        )  # fmt: skip
        call.run(
            dinputs_kernel, q, k, v, dt, log_A, segment, do, inner, dstates, dk, dv, ddt, drates, dstate, first=first,
            chunks=chunks,
        )  # fmt: skip
    dq, dk = (None if d is None else _summed(d, x.dtype) for d, x in ((dq, q), (dk, k)))
    return Gradients(dq, dk, dv, ddt, drates.sum((0, 1)).to(log_A.dtype), dstate)


def _summed(parts: Tensor, dtype: torch.dtype) -> Tensor:
    return (parts[0] if len(parts) == 1 else parts.sum(0)).to(dtype)
