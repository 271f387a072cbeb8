"""The kernels of `by_feature_launch.py` that take every chunk by itself. The letters are there.

As those of gla for a gate per feature, each is compiled twice, for STRONG chunks and for the others, and leaves alone
the chunks that are not its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gated_kernels.common.interpreter import rounded
from gated_kernels.common.tiles import dot, load, load_again, store
from gated_kernels.delta_rule.solve import inverse_of_one_and
from gated_kernels.gla.intra_chunk import (
    decay_to_end,
    decay_to_middle,
    decay_to_read,
    is_readable,
    scores_by_level,
)
from gated_kernels.gla.state_scan import starts, stops, sum_at, sums_at


@triton.jit
def _read_from_start(x, sums, bounds, chunk, i, f, F: tl.constexpr, EXCLUSIVE: tl.constexpr, C: tl.constexpr):
    """[C, BF] x times the decay from the state before the chunk; 0 where that is another segment's."""
    before = sum_at(sums, chunk, 0, f, F, C)
    x = x * tl.exp2(sums_at(sums, chunk, i + 1 - EXCLUSIVE, f, F, C) - before[None, :])
    if bounds is not None:
        x = tl.where((starts(bounds, chunk, i, C) < 0)[:, None], x, 0.0)
    return x


@triton.jit(do_not_specialize=["T"])
def solve_kernel(
    k, v, r, sums, strong, bounds, inverse, held, fresh, sent, late, early, total, T,
    G: tl.constexpr, F: tl.constexpr, V: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BF: tl.constexpr,
    BV: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr, STRONG: tl.constexpr,
):  # fmt: skip
    """As `solve.py`; also the keys decayed to the end of the chunk, the decay of all of it and, backwards, the keys
    that look up decayed from its start."""
    N = tl.cdiv(T, C)
    chunk = tl.program_id(0).to(tl.int64)
    if tl.load(strong + chunk) != STRONG:
        return
    n, b, g = chunk % N, chunk // N // G, chunk // N % G
    f = tl.arange(0, BF)
    i = tl.arange(0, C)
    rows = (T - n * C).to(tl.int32)
    row = b * T + n * C
    k += (row * G + g) * F
    r += (row * G + g) * F
    looks = load(r, i, rows, G * F, f, F)
    if STRONG:
        below = scores_by_level(looks, k, sums, chunk, i, f, rows, G, F, 1, False, C, D, LEVELS, PRECISION)
    else:
        left = rounded(looks * decay_to_read(sums, chunk, i, f, F, 1, C), D)
        right = rounded(load(k, i, rows, G * F, f, F) * decay_to_middle(sums, chunk, i, f, F, C), D)
        below = dot(left, tl.trans(right), None, D, PRECISION)
    below = tl.where(is_readable(bounds, chunk, i, 1, False, C), below, 0.0)
    found = rounded(inverse_of_one_and(below, C, LEVELS), D)
    of_chunk = tl.exp2(sum_at(sums, chunk, C, f, F, C) - sum_at(sums, chunk, 0, f, F, C))
    keys = load_again(k, i, rows, G * F, f, F) * decay_to_end(sums, chunk, i, f, F, C)
    if bounds is not None:
        of_chunk = tl.where(starts(bounds, chunk, C - 1, C) < 0, of_chunk, 0.0)
        keys = tl.where((stops(bounds, chunk, i, C) == C)[:, None], keys, 0.0)
    tl.store(total + chunk * F + f, of_chunk, mask=f < F)
    keys = rounded(keys, D)
    store(late + (row * G + g) * F, keys, i, rows, G * F, f, F)
    if sent is not None:
        store(inverse + chunk * C * C, found, i, C, C, i, C)
        store(sent + (row * G + g) * F, dot(tl.trans(found), keys, None, D, PRECISION), i, rows, G * F, f, F)
    looks = load_again(r, i, rows, G * F, f, F)
    looks = rounded(_read_from_start(looks, sums, bounds, chunk, i, f, F, 1, C), D)
    if sent is not None:
        store(early + (row * G + g) * F, looks, i, rows, G * F, f, F)
    store(held + (row * G + g) * F, dot(found, looks, None, D, PRECISION), i, rows, G * F, f, F)
    for v0 in range(0, V, BV):
        x = v0 + tl.arange(0, BV)
        values = load(v + (row * G + g) * V, i, rows, G * V, x, V)
        store(fresh + (row * G + g) * V, dot(found, values, None, D, PRECISION), i, rows, G * V, x, V)


@triton.jit(do_not_specialize=["T"])
def dread_kernel(
    q, k, inverse, sums, strong, bounds, do, dv, dread, T,
    G: tl.constexpr, R: tl.constexpr, F: tl.constexpr, V: tl.constexpr, EXCLUSIVE: tl.constexpr, C: tl.constexpr,
    D: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
    STRONG: tl.constexpr,
):  # fmt: skip
    """What the outputs of a chunk send back to its values and to the state before it, in BV columns a program."""
    N = tl.cdiv(T, C)
    chunk = tl.program_id(0).to(tl.int64)
    if tl.load(strong + chunk) != STRONG:
        return
    n, b, g = chunk % N, chunk // N // G, chunk // N % G
    x = tl.program_id(1) * BV + tl.arange(0, BV)
    f = tl.arange(0, BF)
    i = tl.arange(0, C)
    rows = (T - n * C).to(tl.int32)
    row = b * T + n * C
    k += (row * G + g) * F
    if not STRONG:
        right = rounded(load(k, i, rows, G * F, f, F) * decay_to_middle(sums, chunk, i, f, F, C), D)
    dwritten = tl.zeros((C, BV), tl.float32)
    dbefore = tl.zeros((BF, BV), tl.float32)
    for h in tl.range(R, disable_licm=True):
        reader = row * G * R + g * R + h
        queries = load(q + reader * F, i, rows, G * R * F, f, F)
        if STRONG:
            scores = scores_by_level(
                queries, k, sums, chunk, i, f, rows, G, F, EXCLUSIVE, True, C, D, LEVELS, PRECISION
            )  # fmt: skip
        else:
            left = rounded(queries * decay_to_read(sums, chunk, i, f, F, EXCLUSIVE, C), D)
            scores = dot(right, tl.trans(left), None, D, PRECISION)
        scores = tl.where(is_readable(bounds, chunk, i, EXCLUSIVE, True, C), scores, 0.0)
        douts = load(do + reader * V, i, rows, G * R * V, x, V)
        dwritten = dot(scores, douts, dwritten, D, PRECISION)
        queries = _read_from_start(queries, sums, bounds, chunk, i, f, F, EXCLUSIVE, C)
        dbefore = dot(tl.trans(rounded(queries, D)), douts, dbefore, D, PRECISION)
    store(dread + chunk * F * V, dbefore, f, F, V, x, V)
    solved = load(inverse + chunk * C * C, i, C, C, i, C)
    store(dv + (row * G + g) * V, dot(tl.trans(solved), dwritten, None, D, PRECISION), i, rows, G * V, x, V)
