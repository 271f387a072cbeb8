"""The kernel of `launch.py` that solves a chunk's triangular system. The letters are there."""

from __future__ import annotations

import triton
import triton.language as tl

from gated_kernels.common.interpreter import rounded
from gated_kernels.common.tiles import dot, load, load_again, store
from gated_kernels.simple_gla.intra_chunk import decays_between
from gated_kernels.simple_gla.state_scan import decay_from_start, decay_to_end


@triton.jit
def inverse_of_one_and(below, C: tl.constexpr, LEVELS: tl.constexpr):
    """(1 + below)^-1 of what is zero on and above the diagonal.

    Blocks on the diagonal are inverted, twice as long at every level: of [[a, 0], [b, c]] the inverse is that of a and
    c with -c^-1 b a^-1 below. This is forward substitution by blocks, without its rows one by one, and in fp32.
    """
    row = tl.arange(0, C)[:, None]
    column = tl.arange(0, C)[None, :]
    inverse = tl.where(row == column, 1.0, 0.0) - tl.where(row >> 1 == column >> 1, below, 0.0)
    for level in tl.range(1, LEVELS, disable_licm=True):
        left = (row >> (level + 1) == column >> (level + 1)) & (row >> level != column >> level)
        between = dot(tl.where(left, below, 0.0), inverse, None, tl.float32, "tf32x3")
        inverse -= dot(inverse, between, None, tl.float32, "tf32x3")
    return inverse


@triton.jit(do_not_specialize=["T"])
def solve_kernel(
    k, v, r, write, inverse, held, fresh, sent, T,
    G: tl.constexpr, F: tl.constexpr, V: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BF: tl.constexpr,
    BV: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A chunk's inverse times its values, and times the keys that look up in the state before.

    Backwards the inverse itself is needed, too, and its transpose times the keys that write to the state after.
    """
    N = tl.cdiv(T, C)
    chunk = tl.program_id(0).to(tl.int64)
    n, b, g = chunk % N, chunk // N // G, chunk // N % G
    f = tl.arange(0, BF)
    i = tl.arange(0, C)
    rows = (T - n * C).to(tl.int32)
    row = b * T + n * C
    at = chunk * 2 * C
    keys = load(k + (row * G + g) * F, i, rows, G * F, f, F).to(D)
    looks = load(r + (row * G + g) * F, i, rows, G * F, f, F).to(D)
    below = dot(looks, tl.trans(keys), None, D, PRECISION)
    below *= decays_between(write, write, at, i[:, None], i[None, :], 1, C, tl.float32)
    found = rounded(inverse_of_one_and(below, C, LEVELS), D)
    if sent is not None:
        store(inverse + chunk * C * C, found, i, C, C, i, C)
        keys = load_again(k + (row * G + g) * F, i, rows, G * F, f, F)
        if write is not None:
            keys = keys * decay_to_end(write, at, i, C)[:, None]
        store(sent + (row * G + g) * F, dot(tl.trans(found), keys, None, D, PRECISION), i, rows, G * F, f, F)
    looks = load_again(r + (row * G + g) * F, i, rows, G * F, f, F)
    if write is not None:
        looks = looks * decay_from_start(write, at, i)[:, None]
    store(held + (row * G + g) * F, dot(found, looks, None, D, PRECISION), i, rows, G * F, f, F)
    for v0 in range(0, V, BV):
        x = v0 + tl.arange(0, BV)
        values = load(v + (row * G + g) * V, i, rows, G * V, x, V)
        store(fresh + (row * G + g) * V, dot(found, values, None, D, PRECISION), i, rows, G * V, x, V)
