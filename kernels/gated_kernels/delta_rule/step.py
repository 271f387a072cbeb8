"""One token of the delta rule in one Triton kernel: what decoding runs. It reads and writes each state once.

Shapes: B batch, H query heads, G key-value heads, R = H / G, F feature size, V value size. Kernels see BV of the values
at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gated_kernels.common.integers import cdiv, next_power_of_2
from gated_kernels.common.interpreter import rounded
from gated_kernels.common.tiles import load, load_vector, store, store_vector

LARGEST = 256  # features: a program holds them all, of BV values
BV, WARPS = 32, 4


@triton.jit
def step_kernel(
    q, k, v, r, e, log_a, state, o, last,
    R: tl.constexpr, F: tl.constexpr, V: tl.constexpr, PER_FEATURE: tl.constexpr, EXCLUSIVE: tl.constexpr,
    BF: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """BV columns of a key-value head's next state, and what its R queries read there."""
    head = tl.program_id(0).to(tl.int64)
    x = tl.program_id(1) * BV + tl.arange(0, BV)
    f = tl.arange(0, BF)
    before = load(state + head * F * V, f, F, V, x, V)
    now = before
    if log_a is not None:
        if PER_FEATURE:
            now *= tl.exp(load_vector(log_a + head * F, f, F, 1))[:, None]
        else:
            now *= tl.exp(tl.load(log_a + head).to(tl.float32))
    keys = load_vector(k + head * F, f, F, 1)[:, None]
    values = load_vector(v + head * V, x, V, 1)
    held = tl.sum(load_vector(r + head * F, f, F, 1)[:, None] * now, 0)
    if e is None:
        now += keys * (values - held)[None, :]
    else:
        now += keys * values[None, :] - load_vector(e + head * F, f, F, 1)[:, None] * held[None, :]
    store(last + head * F * V, now, f, F, V, x, V)
    if EXCLUSIVE:
        now = before
    for h in range(R):
        queries = load_vector(q + (head * R + h) * F, f, F, 1)
        found = rounded(tl.sum(queries[:, None] * now, 0), o.dtype.element_ty)
        store_vector(o + (head * R + h) * V, found, x, V, 1)


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    log_a: Tensor | None,
    e: Tensor | None,
    state: Tensor,
    exclusive: bool,
) -> tuple[Tensor, Tensor]:
    """[B, 1, ...], all contiguous: the outputs and the next state."""
    B, _, H, F = q.shape
    G, V = v.shape[2:]
    o, last = v.new_empty(B, 1, H, V), torch.empty_like(state)
    step_kernel[B * G, cdiv(V, BV)](
        q, k, v, r, e, log_a, state, o, last, R=H // G, F=F, V=V,
        PER_FEATURE=log_a is not None and log_a.shape[-1] != 1, EXCLUSIVE=exclusive, BF=next_power_of_2(F),
        BV=BV, num_warps=WARPS,
    )  # fmt: skip
    return o, last
