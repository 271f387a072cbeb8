"""The delta rule with a gate per feature, in bf16: how its Triton kernels are launched.

As `launch.py`, but that decays differ by feature, so that scores are those of gla's kernels for such gates, which
gla/bf16.py explains: one product in most chunks, one for every level in the `strong`. To look up under r after a
token's decay is to look up before it under r times that decay. So it is a query of an exclusive read, and gla's kernel
for gradients takes it as such, with what tokens write for their values.

Keys decayed to the end of their chunk (`late`) and from its start (`early`) are kept for the passes over the states.

Shapes: B batch, T tokens, H query heads, G key-value heads, R = H / G, F feature size, V value size, N chunks, C chunk
length. Kernels see all features in one block and BV of the values at a time.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from gated_kernels.common import chips
from gated_kernels.common.gated_inputs import sizes_of
from gated_kernels.common.integers import cdiv, next_power_of_2
from gated_kernels.delta_rule import launch
from gated_kernels.delta_rule.by_feature import dread_kernel, solve_kernel
from gated_kernels.gla import bf16 as gla
from gated_kernels.gla.intra_chunk import dqk_kernel, outputs_kernel
from gated_kernels.gla.state_scan import sums_kernel

CHUNK = gla.CHUNK
KERNELS = {"solve": solve_kernel, "dread": dread_kernel}
WARPS = 8


@functools.cache
def constants(kernel: str, G: int, R: int, F: int, V: int, exclusive: bool, strong: bool) -> dict[str, Any]:
    """What a kernel is compiled for and with; fixed by the sizes and the kind of chunk, never searched for."""
    found = {
        "G": G,
        "R": R,
        "F": F,
        "V": V,
        "EXCLUSIVE": int(exclusive),
        "C": CHUNK,
        "D": tl.bfloat16,
        "BF": max(64, next_power_of_2(F)),
        "BV": 64,
        "LEVELS": CHUNK.bit_length() - 1,
        "PRECISION": "tf32",
        "STRONG": int(strong),
    }
    return {x: found[x] for x in KERNELS[kernel].arg_names if x in found} | {"num_warps": WARPS, "num_stages": 1}


class _Call:
    """The sizes of a call, and what both of its passes begin with: the states and what the tokens write."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        r: Tensor,
        log_a: Tensor,
        state: Tensor,
        segment: Tensor | None,
        exclusive: bool,
        backwards: bool,
    ):
        B, self.T, H, self.G, self.F, self.V = sizes_of(q, v)
        self.R, self.exclusive, self.heads = H // self.G, exclusive, B * self.G
        self.chunks = self.heads * cdiv(self.T, CHUNK)
        self.in_registers = chips.multiplies_in_registers(v.device)
        new = functools.partial(torch.empty, device=v.device)
        self.sums = new(self.chunks, CHUNK + 1, self.F, dtype=torch.float32)
        self.strong = new(self.chunks, dtype=torch.int32)
        self.bounds = None if segment is None else new(self.chunks, 2, CHUNK, dtype=torch.int32)
        sizes = self.G, self.R, self.F, self.V, exclusive
        sums_kernel[(self.chunks,)](
            log_a, segment, self.sums, self.bounds, self.strong, self.T, **gla.constants("sums", *sizes)
        )
        self.inverse = self.sent = self.early = None
        if backwards:
            self.inverse = new(self.chunks, CHUNK, CHUNK, dtype=k.dtype)
            self.sent, self.early = torch.empty_like(k), torch.empty_like(k)
        self.held, self.late, self.written = torch.empty_like(k), torch.empty_like(k), torch.empty_like(v)
        self.total = new(self.chunks, self.F, dtype=torch.float32)
        self.states = new(self.chunks, self.F, self.V, dtype=k.dtype)
        self.last = torch.empty_like(state)
        of_chunks = self.sums, self.strong, self.bounds
        made = self.inverse, self.held, self.written, self.sent, self.late, self.early, self.total
        self.by_chunk("solve", k, v, r, *of_chunks, *made)
        self.scan("states", self.late, self.held, self.written, None, self.total, state, self.states, self.last)

    def by_chunk(self, name: str, *tensors: Tensor | None) -> None:
        """Launches a kernel for the strong chunks and for the others, which leaves out the strong."""
        for strong in (False, True):
            compiled_for = constants(name, self.G, self.R, self.F, self.V, self.exclusive, strong)
            grid = (self.chunks, cdiv(self.V, compiled_for["BV"])) if name == "dread" else (self.chunks,)
            KERNELS[name][grid](*tensors, self.T, **compiled_for)

    def scan(self, name: str, *tensors: Tensor | None) -> None:
        compiled_for = launch.constants(
            name, self.G, self.R, self.F, self.V, self.exclusive, torch.bfloat16, self.in_registers
        )
        grid = (self.heads * cdiv(self.V, compiled_for["BV"]),)
        launch.KERNELS[name][grid](*tensors, self.T, **compiled_for)

    def of_gla(self, name: str, R: int, exclusive: bool, strong: bool) -> tuple[dict[str, Any], int, int]:
        """What a kernel of gla is compiled for, and its blocks of features and of values."""
        found = gla.constants(name, self.G, R, self.F, self.V, exclusive, strong, self.in_registers)
        of_V = cdiv(self.V, found["BV"] * (1 + found.get("TWO", 0)))
        return found, cdiv(self.F, found["BF"]), of_V

    def outputs(self, q: Tensor, k: Tensor, o: Tensor) -> None:
        for strong in (False, True):
            compiled_for, _, of_V = self.of_gla("outputs", self.R, self.exclusive, strong)
            outputs_kernel[self.chunks * (self.R // compiled_for["HEADS"]), of_V](
                q, None, k, self.written, self.sums, self.strong, self.bounds, self.states, o, self.T, **compiled_for
            )

    def gradients(
        self, readers: Tensor, exclusive: bool, k: Tensor, do: Tensor, dstates: Tensor, dreaders: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Fills that of the readers, which are queries or keys that look up; their part of k's and of the gates'."""
        dk, dlog_a = (torch.empty_like(k, dtype=torch.float32) for _ in range(2))
        for strong in (False, True):
            compiled_for, of_F, _ = self.of_gla("dqk", readers.shape[2] // self.G, exclusive, strong)
            dqk_kernel[(self.chunks * of_F,)](
                readers, None, k, self.written, self.sums, self.strong, self.bounds, do, self.states, dstates,
                dreaders, None, dk, dlog_a, self.T, **compiled_for,
            )  # fmt: skip
        return dk, dlog_a


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    log_a: Tensor,
    state: Tensor,
    segment: Tensor | None,
    exclusive: bool,
) -> tuple[Tensor, Tensor]:
    """The outputs and the last state."""
    call = _Call(q, k, v, (r * log_a.exp()).to(r.dtype), log_a, state, segment, exclusive, backwards=False)
    o = v.new_empty(*q.shape[:3], v.shape[-1])
    call.outputs(q, k, o)
    return o, call.last


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    log_a: Tensor,
    state: Tensor,
    segment: Tensor | None,
    exclusive: bool,
    do: Tensor,
    dlast: Tensor,
) -> launch.Gradients:
    """`dlast` is the gradient of the last state."""
    decay = log_a.exp()
    looks = (r * decay).to(r.dtype)
    call = _Call(q, k, v, looks, log_a, state, segment, exclusive, backwards=True)
    dv, dread, dstates = (torch.empty_like(x) for x in (call.written, call.states, call.states))
    dstate = torch.empty_like(state)
    call.by_chunk("dread", q, k, call.inverse, call.sums, call.strong, call.bounds, do, dv, dread)
    call.scan("dstates", call.early, call.sent, dv, dread, None, call.total, dlast, dstates, dstate)
    dq, dlooks = torch.empty_like(q), torch.empty_like(r, dtype=torch.float32)
    dk, dlog_a = call.gradients(q, exclusive, k, do, dstates, dq)
    # what the state after a chunk gives to keys and gates is in these already
    dk_of_looks, dlog_a_of_looks = call.gradients(looks, True, k, -dv, dstates.zero_(), dlooks)
    dlog_a = dlog_a + dlog_a_of_looks + dlooks * looks
    dk, dr = (dk + dk_of_looks).to(k.dtype), (dlooks * decay).to(r.dtype)
    return launch.Gradients(dq, dk, dv, dr, dlog_a.to(log_a.dtype), dstate)
