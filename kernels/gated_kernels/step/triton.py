"""A linearized layer's step of one token in two Triton kernels, which take nothing from the host and can be captured.

A step moves few bytes, so its time is that of what waits for what. `read_kernel` has programs of two kinds, which need
nothing of each other: a piece of the features of a head, for 16 rows, which meet the codebook's matrices together; and
the window of a row and key-value head. Pieces are not normalised: their reader puts largest logits and sums together,
so that a large codebook is spread over the GPU. `write_kernel` goes through the state once: a program fetches a tile of
a row's state, in which it is alone, waits for the first kernel only then, writes the decayed state and reads it with
all query heads, and mixes that with the window. A few query heads are a multiplication and a sum over the tile's rows,
with neither a product's padding to 16 nor its way through shared memory; warps take rows, so that a thread uses a
feature for several columns. Only the first kernel reads the normaliser's column, which every column's program would
need, and only the second one writes it. Where a GPU can, each kernel is launched while the one before it runs, has what
does not depend on that one brought near, and waits for it before it reads anything else: the first kernel waits, and
only then lets the second begin, so that nothing that came before the first is open when the second fetches the state.
Sums are in fp32, as are features and the state; products of fp32 are three TF32 ones.

Shapes: see chunk.py; R = H / G, S pieces of features. In a kernel: N rows of a product, K block of keys, BD and BF
block of channels and features, BV columns of a tile of the state, by BC, and the powers of two that hold them: CD
channels, CE of a code, CS pieces, PP slots of the ring.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gated_kernels.interpreter import INTERPRETED, rounded
from gated_kernels.step import chunk
from gated_kernels.step.chunk import Kept, Rules, Token

ROWS = 16  # the fewest that a product takes
# Of a tile's axes but the last, Triton 3.6 gives the first one to a program's warps and 3.9 the last one.
ROWS_AXIS = tl.constexpr(1 if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7) else 2)
LEAST_MASS, EMPTY = tl.constexpr(chunk.LEAST_MASS), tl.constexpr(chunk.EMPTY)


class Config(NamedTuple):
    """What a program takes, by measurement on an H200 (kernels/results/step-h200.md). Of a codebook `codes`, by
    `channels` at a time. Of the state at most `columns`, fewer until there are `programs`, and of them `whole` numbers
    at once or else `part` at a time, of which two are under way: a warp for each `a_warp`, 4 at least."""

    codes: int = 64
    channels: int = 32
    ahead: int = 1  # brought near before the kernel before has ended: 0 nothing, 1 all but the state, 2 all
    read_warps: int = 4  # twice as many for heads of more than 256 bytes
    read_registers: int | None = None  # of a thread, at most; None leaves it to the compiler
    columns: int = 32
    programs: int = 128
    whole: int = 4096
    part: int = 8192
    a_warp: int = 1024
    write_registers: int | None = None


CONFIG = Config()


@triton.jit
def _dot(x, y):
    """x y, of the dtype of y and summed in fp32."""
    x = rounded(x, y.dtype)
    if INTERPRETED:  # it would multiply the bits of bfloat16
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, y, input_precision="tf32x3")


@triton.jit
def _rotated(x, d, inside, cos, sin, D: tl.constexpr, C: tl.constexpr):
    """Channels d of what stands at x, after rotary, in the dtype of x."""
    own = tl.load(x + d, mask=inside & (d < D), other=0.0)
    if C > 0:
        turned = d < C
        other = tl.where(d < C // 2, d + C // 2, d - C // 2)
        pair = tl.load(x + other, mask=inside & turned, other=0.0).to(tl.float32)
        pair = tl.where(d < C // 2, -pair, pair)
        c = tl.load(cos + d, mask=turned, other=1.0).to(tl.float32)
        s = tl.load(sin + d, mask=turned, other=0.0).to(tl.float32)
        own = rounded(own.to(tl.float32) * c + pair * s, own.dtype)
    return own


@triton.jit
def _log_sigmoid(x):
    return tl.minimum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _ahead(x, i, count):
    """Has numbers i, of `count`, of what stands at x come as near as the L2 cache: a hint, which waits for nothing and
    may come too early."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0", "=r,l", [x + tl.minimum(i, count - 1)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _features(
    x, b, B, n, g, c, along, z, turn, shift, log_tau, codes, logits, totals, tops, sums, masses,
    COUNT: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, F: tl.constexpr, V: tl.constexpr,
    S: tl.constexpr, CE: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Piece c of the features of head n of COUNT, of group g, of the vectors at x, of rows b: their logits, the largest
    of these, the sum of their exponentials, and with z that of z under them. Also the vectors' sums, along a direction
    if one is given."""
    inside = b < B
    f = c * BF + tl.arange(0, BF)
    row = b.to(tl.int64) * COUNT + n
    # all is asked for before anything is waited for
    if z is not None:
        z += (b.to(tl.int64) * G + g)[:, None] * (F * V) + D
        masses_z = tl.load(z + (f * V)[None, :], mask=inside[:, None] & (f < F)[None, :], other=0.0)
    if codes is None:
        block = inside[:, None] & (f < F)[None, :]
        found = tl.load(x[:, None] + f[None, :], mask=block, other=0.0).to(tl.float32)
    else:
        e = tl.arange(0, CE)[None, :]
        code = tl.load(codes + (g * F + f)[:, None] * E + e, mask=(f < F)[:, None] & (e < E), other=0.0)
        shifted = tl.load(shift + e, mask=e < E, other=0.0)
        tau = tl.load(log_tau)
        u = tl.zeros([b.shape[0], CE], tl.float32)
        total = tl.zeros([b.shape[0]], tl.float32)
        for first in range(0, D, BD):
            d = first + tl.arange(0, BD)
            matrix = tl.load(turn + d[:, None] * E + e, mask=(d < D)[:, None] & (e < E), other=0.0)
            part = tl.load(x[:, None] + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
            u += _dot(part, matrix)
            if along is not None:
                part *= tl.load(along + d, mask=d < D, other=0.0)[None, :]
            total += tl.sum(part, 1)
        u += shifted
        u *= (tl.exp(tau) / tl.maximum(tl.sqrt(tl.sum(u * u, 1)), 1e-12))[:, None]
        found = _dot(u, tl.trans(code))
        tl.store(totals + row, total, mask=b < tl.where(c == 0, B, 0))
    tl.store(logits + row[:, None] * F + f[None, :], found, mask=inside[:, None] & (f < F)[None, :])
    found = tl.where((f < F)[None, :], found, float("-inf"))
    top = tl.max(found, 1)
    weights = tl.exp(found - top[:, None])
    tl.store(tops + row * S + c, top, mask=inside)
    tl.store(sums + row * S + c, tl.sum(weights, 1), mask=inside)
    if z is not None:
        tl.store(masses + row * S + c, tl.sum(weights * masses_z, 1), mask=inside)


@triton.jit
def _add(q, k, v, seen, scale, o, top, mass):
    """Takes more keys into a running softmax."""
    logits = tl.where(seen[None, :], _dot(q, tl.trans(k)) * scale, float("-inf"))
    higher = tl.maximum(top, tl.max(logits, 1))
    finite = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp(logits - finite[:, None])
    keep = tl.exp(top - finite)
    o = o * keep[:, None] + _dot(weights, v)
    return o, higher, mass * keep + tl.sum(weights, 1)


@triton.jit
def _slots(ring_k, ring_v, p, column, P: tl.constexpr, G: tl.constexpr, D: tl.constexpr):
    """The keys and values in slots p."""
    at = p[:, None] * (G * D) + column
    inside = (p < P)[:, None] & (column < D)
    values = tl.load(ring_v + at, mask=inside, other=0.0)
    return tl.load(ring_k + at, mask=inside, other=0.0), values


@triton.jit
def _seen(rank, p, slot, P: tl.constexpr):
    """Whether there is a token in slots p, where that of `slot` is the oldest."""
    return tl.load(rank + tl.where(p < slot, p - slot + P, p - slot), mask=p < P, other=-1) >= 0


@triton.jit
def _sinks(sink_k, sink_v, visible, m, column, M: tl.constexpr, G: tl.constexpr, D: tl.constexpr):
    """The keys and values of sinks m, and whether they are seen."""
    shown = tl.load(visible + m, mask=m < M, other=0) != 0
    keys, values = _slots(sink_k, sink_v, m, column, M, G, D)
    return keys, values, shown


@triton.jit
def _window(
    b, g, taken, q, k, v, q_step, k_step, v_step, cos, sin, cos_step, ring_k, ring_v, rank, sink_k, sink_v, visible,
    o, lse, scale,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, C: tl.constexpr, P: tl.constexpr, M: tl.constexpr,
    CD: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SINKS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """What the R queries of a row's key-value head see: the ring by its slots, the sinks, their own key."""
    n = tl.arange(0, N)
    column = tl.arange(0, CD)[None, :]
    head = g * R + n
    slot = tl.load(taken).to(tl.int32) % P
    if C > 0:
        cos += b * cos_step
        sin += b * cos_step
    queries = _rotated(q + b * q_step + head[:, None] * D, column, (n < R)[:, None], cos, sin, D, C)
    new_k = _rotated(k + b * k_step + g * D, column, column < D, cos, sin, D, C)
    new_v = tl.load(v + b * v_step + g * D + column, mask=column < D, other=0.0)
    rank += b * (P + 1)
    is_token = tl.load(rank + P) >= 0
    ring_k += (b * P * G + g) * D
    ring_v += (b * P * G + g) * D
    # the first tiles last, since the compiler has them wait at once: then all that is asked for is under way
    next_seen = _seen(rank, tl.arange(0, K), slot, P)
    if sink_k is not None:
        sink_k += (b * M * G + g) * D
        sink_v += (b * M * G + g) * D
        visible += b * M
        if EARLY:
            sinks, values_of_sinks, shown = _sinks(sink_k, sink_v, visible, tl.arange(0, SINKS), column, M, G, D)
    next_keys, next_values = _slots(ring_k, ring_v, tl.arange(0, K), column, P, G, D)
    top = tl.full([N], float("-inf"), tl.float32)
    mass = tl.zeros([N], tl.float32)
    mean = tl.zeros([N, CD], tl.float32)
    for start in range(0, P, K):
        p = start + K + tl.arange(0, K)
        keys, values, seen = next_keys, next_values, next_seen
        if K < P:
            next_seen = _seen(rank, p, slot, P)
            next_keys, next_values = _slots(ring_k, ring_v, p, column, P, G, D)
        mean, top, mass = _add(queries, keys, values, seen, scale, mean, top, mass)
    if sink_k is not None:
        for start in tl.static_range(0, M, SINKS):
            if start > 0 or not EARLY:
                m = start + tl.arange(0, SINKS)
                sinks, values_of_sinks, shown = _sinks(sink_k, sink_v, visible, m, column, M, G, D)
            mean, top, mass = _add(queries, sinks, values_of_sinks, shown, scale, mean, top, mass)
    own = tl.sum(queries.to(tl.float32) * new_k.to(tl.float32), 1) * scale
    own = tl.where(is_token, own, float("-inf"))
    higher = tl.maximum(top, own)
    finite = tl.where(higher == float("-inf"), 0.0, higher)
    keep, weight = tl.exp(top - finite), tl.exp(own - finite)
    mass = mass * keep + weight
    mean = mean * keep[:, None] + weight[:, None] * new_v.to(tl.float32)
    nothing = mass == 0.0
    mean = mean / tl.where(nothing, 1.0, mass)[:, None]
    row = b * (G * R) + head
    tl.store(o + row[:, None] * D + column, mean, mask=(n < R)[:, None] & (column < D))
    tl.store(lse + row, tl.where(nothing, float("-inf"), higher + tl.log(mass)), mask=n < R)


@triton.jit
def read_kernel(
    q, k, v, q_step, k_step, v_step, cos, sin, cos_step, rank, visible,
    ring_k, ring_v, pending, sink_k, sink_v, state, taken,
    q_turn, q_shift, q_log_tau, k_turn, k_shift, k_log_tau, codes, asked,
    logits, totals, tops, sums, masses, o, lse, scale, B,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, C: tl.constexpr, E: tl.constexpr, F: tl.constexpr,
    V: tl.constexpr, P: tl.constexpr, M: tl.constexpr, S: tl.constexpr, CD: tl.constexpr, CE: tl.constexpr,
    BD: tl.constexpr, BF: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SINKS: tl.constexpr, ROWS: tl.constexpr,
    PP: tl.constexpr, AHEAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(B, ROWS)
    i = tl.program_id(0)
    c = i % S
    n = i // S // tiles
    b = i // S % tiles * ROWS + tl.arange(0, ROWS)
    if OVERLAP:
        if AHEAD > 0:
            if n >= G * R + G:
                bg = (i - (G * R + G) * tiles * S).to(tl.int64)
                at = tl.arange(0, PP)[:, None] * (G * D) + tl.arange(0, CD // 16)[None, :] * 16
                first = (bg // G * P * G + bg % G) * D
                last = (P - 1) * G * D + D
                _ahead(ring_k + first, at, last)
                _ahead(ring_v + first, at, last)
                if AHEAD > 1:
                    for line in range(0, F * V, 32 * 1024):
                        _ahead(state + bg * (F * V), line + tl.arange(0, 1024) * 32, F * V)
            elif codes is not None:
                lines = tl.arange(0, CD * CE // 32) * 32
                g = tl.where(n < G * R, n // R, n - G * R)
                _ahead(codes + (g * F + c * BF) * E, tl.arange(0, BF * CE // 32) * 32, tl.minimum(BF, F - c * BF) * E)
                if n < G * R:
                    _ahead(q_turn + n * D * E, lines, D * E)
                else:
                    _ahead(k_turn + g * D * E, lines, D * E)
        tl.extra.cuda.gdc_wait()  # before anything is read, by this kernel or by the next one, which fetches early
        tl.extra.cuda.gdc_launch_dependents()
    if n < G * R:
        x = q + b.to(tl.int64) * q_step + n * D
        if codes is not None:
            q_turn += n * D * E
            q_shift += n * E
            q_log_tau += n
        _features(
            x, b, B, n, n // R, c, None if asked is None else asked + n * D, None if asked is None else state,
            q_turn, q_shift, q_log_tau, codes, logits, totals, tops, sums, masses,
            G * R + G, G, D, E, F, V, S, CE, BD, BF,
        )  # fmt: skip
    elif n < G * R + G:
        g = n - G * R
        x = k + b.to(tl.int64) * k_step + g * D
        if pending is not None:
            x = pending + (b.to(tl.int64) * P + tl.load(taken).to(tl.int32) % P) * (G * D) + g * D
        if codes is not None:
            k_turn += g * D * E
            k_shift += g * E
            k_log_tau += g
        _features(
            x, b, B, n, g, c, None, None, k_turn, k_shift, k_log_tau, codes, logits, totals, tops, sums, masses,
            G * R + G, G, D, E, F, V, S, CE, BD, BF,
        )  # fmt: skip
    else:
        i -= (G * R + G) * tiles * S
        _window(
            (i // G).to(tl.int64), i % G, taken, q, k, v, q_step, k_step, v_step, cos, sin, cos_step,
            ring_k, ring_v, rank, sink_k, sink_v, visible, o, lse, scale, G, R, D, C, P, M, CD, N, K, SINKS, K == 64,
        )  # fmt: skip


@triton.jit
def _down(x):
    """What belongs to rows of a tile, [N or 1,BF], as it stands in it."""
    return x[:, :, None, None] if ROWS_AXIS == 1 else x[:, None, :, None]


@triton.jit
def _of_state(state, f, column, masses_too, D: tl.constexpr, F: tl.constexpr, V: tl.constexpr):
    """Rows f of the state, and of the normaliser's column behind it."""
    f_in_tile = _down(f[None, :])
    block = (f_in_tile < F) & (column < D)
    rows = tl.load(state + f_in_tile * V + column, mask=block, other=0.0)
    masses = tl.zeros([f.shape[0]], tl.float32)
    if V > D:
        masses = tl.load(state + f * V + D, mask=f < tl.where(masses_too, F, 0), other=0.0)
    return rows, masses


@triton.jit
def _of_features(logits, f, n, g, G: tl.constexpr, R: tl.constexpr, F: tl.constexpr):
    """Logits f of the key and of the queries."""
    of_key = tl.load(logits + (G * R + g) * F + f, mask=f < F, other=float("-inf"))
    block = (n < R)[:, None] & (f < F)[None, :]
    return of_key, tl.load(logits + (g * R + n)[:, None] * F + f[None, :], mask=block, other=float("-inf"))


@triton.jit
def _softmax(top_of, sum_of):
    """Of rows of pieces, by their largest logits and sums: the largest logit, what makes of a piece's sum its part of
    the whole one, and the whole one."""
    top = tl.max(top_of, 1)
    top = tl.where(top == float("-inf"), 0.0, top)  # of no row
    weight = tl.exp(top_of - top[:, None])
    total = tl.sum(weight * sum_of, 1)
    return top, weight, tl.where(total == 0.0, 1.0, total)


@triton.jit
def write_kernel(
    k, v, k_step, v_step, cos, sin, cos_step, rank, ring_k, ring_v, pending, sink_k, sink_v, state, taken,
    bias, power, log_share, logits, totals, tops, sums, masses, window, lse, o, tau, root,
    GATE: tl.constexpr, SHARED: tl.constexpr, G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
    F: tl.constexpr, FG: tl.constexpr, V: tl.constexpr, P: tl.constexpr, M: tl.constexpr, S: tl.constexpr,
    CD: tl.constexpr, CS: tl.constexpr, N: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    bg = tl.program_id(0).to(tl.int64)
    b, g = bg // G, (bg % G).to(tl.int32)
    is_first = tl.program_id(1) == 0
    column = tl.program_id(1) * BV + tl.arange(0, BV)
    inside = column < D
    n = tl.arange(0, N)
    d = tl.arange(0, CD)
    # a tile of the state is [1,BF,BV/BC,BC], or [1,BV/BC,BF,BC]: then a thread has several columns of the same rows
    group = tl.arange(0, BV // BC)
    group = group[None, None, :, None] if ROWS_AXIS == 1 else group[None, :, None, None]
    in_tile = tl.program_id(1) * BV + group * BC + tl.arange(0, BC)
    # everything is asked for before anything is waited for, and first of all what the other kernel has no part in
    state += bg * (F * V)  # offsets within it take 32 bits
    next_rows, next_masses = _of_state(state, tl.arange(0, BF), in_tile, is_first, D, F, V)
    new_rank = tl.load(rank + b * (P + 1) + P)
    new_v = tl.load(v + b * v_step + g * D + column, mask=inside, other=0.0)
    if C > 0:
        cos += b * cos_step
        sin += b * cos_step
    key = k + b * k_step + g * D
    new_k = _rotated(key, d, d < D, cos, sin, D, C)
    at_slot = ((b * P + tl.load(taken).to(tl.int32) % P) * G + g) * D
    if pending is not None:
        new_key = tl.load(key + d, mask=d < D, other=0.0)
        written = tl.load(rank + b * (P + 1)) >= M
        value = tl.load(ring_v + at_slot + in_tile, mask=in_tile < D, other=0.0).to(tl.float32)
    else:
        written = new_rank >= 0
        value = tl.load(v + b * v_step + g * D + in_tile, mask=in_tile < D, other=0.0).to(tl.float32)
    if GATE == "head":
        head_bias = tl.load(bias + g)
    if SHARED:
        gamma = tl.load(power + g * R + n, mask=n < R, other=0.0)
        beta = tl.load(log_share + g * R + n, mask=n < R, other=0.0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    logits += b * (G * R + G) * F
    next_key, next_queries = _of_features(logits, tl.arange(0, BF), n, g, G, R, F)
    row = b * (G * R) + g * R + n
    out = row[:, None] * D + column[None, :]
    block = (n < R)[:, None] & inside[None, :]
    seen = tl.load(window + out, mask=block, other=0.0)
    heads = b * (G * R + G) + g * R + n
    key_head = b * (G * R + G) + G * R + g
    s = tl.arange(0, CS)[None, :]
    pieces = heads[:, None] * S + s
    is_piece = (n < R)[:, None] & (s < S)
    q_top_of = tl.load(tops + pieces, mask=is_piece, other=float("-inf"))
    k_top_of = tl.load(tops + key_head * S + s, mask=s < S, other=float("-inf"))
    q_sum_of = tl.load(sums + pieces, mask=is_piece, other=0.0)
    k_sum_of = tl.load(sums + key_head * S + s, mask=s < S, other=0.0)
    if SHARED:
        mass_of = tl.load(masses + pieces, mask=is_piece, other=0.0)
        window_lse = tl.load(lse + row, mask=n < R, other=0.0)
        by_query = tl.load(totals + heads, mask=n < R, other=0.0)
    if GATE == "head":
        gate = head_bias + tl.load(totals + key_head) / D
        head_decay = tl.where(written, tl.exp(_log_sigmoid(gate) / tau), 1.0)
    q_top, q_weight, q_sum = _softmax(q_top_of, q_sum_of)
    k_top, _, k_sum = _softmax(k_top_of, k_sum_of)
    if SHARED:
        mass = tl.maximum(tl.sum(mass_of * q_weight, 1) / q_sum, LEAST_MASS)
        log_mass = tl.log(mass)
        weight = gamma * log_mass + by_query * root + beta
        weight = tl.where(log_mass <= EMPTY, -1e4, weight) - window_lse
    read = tl.zeros([N, BV], tl.float32)
    for start in range(0, F, BF):
        f = start + tl.arange(0, BF)
        old, old_masses, k_logits, q_logits = next_rows, next_masses, next_key, next_queries
        if BF < F:
            next_rows, next_masses = _of_state(state, f + BF, in_tile, is_first, D, F, V)
            next_key, next_queries = _of_features(logits, f + BF, n, g, G, R, F)
        feature = tl.where(written, tl.exp(k_logits - k_top) / k_sum, 0.0)
        if GATE is None:
            decay = tl.full([BF], 1.0, tl.float32)
        elif GATE == "head":
            decay = tl.full([BF], 1.0, tl.float32) * head_decay
        else:
            if GATE == "keys":
                gate = tl.where(f < F, k_logits, 0.0)
            else:
                gate = tl.load(bias + g * FG + f % FG, mask=f < F, other=0.0)
            decay = tl.where(written, tl.exp(_log_sigmoid(gate) / tau), 1.0)
        new = old * _down(decay[None, :]) + _down(feature[None, :]) * value
        f_in_tile = _down(f[None, :])
        at = state + f_in_tile * V + in_tile
        if F % BF == 0 and D % BV == 0:
            tl.store(at, new)  # a mask would make a branch of every number
        else:
            tl.store(at, new, mask=(f_in_tile < F) & (in_tile < D))
        if SHARED:
            tl.store(state + f * V + D, old_masses * decay + feature, mask=f < tl.where(is_first, F, 0))
        asked = tl.exp(q_logits - q_top[:, None]) / q_sum[:, None]
        asked_of = old if pending is not None else new
        if N < 16:
            read += tl.reshape(tl.sum(_down(asked) * asked_of, ROWS_AXIS), [N, BV])
        else:
            if ROWS_AXIS == 2:
                asked_of = tl.permute(asked_of, (0, 2, 1, 3))
            read += _dot(asked, tl.reshape(asked_of, [BF, BV]))
    if SHARED:
        share = (1.0 / (1.0 + tl.exp(-weight)))[:, None]
        mixed = seen + share * (read / mass[:, None] - seen)
    else:
        mixed = 0.5 * (seen + read)
    tl.store(o + out, rounded(mixed, o.dtype.element_ty), mask=block)
    sink_columns = tl.where(new_rank < 0, 0, tl.where(new_rank < M, D, 0))  # none where it is no sink
    at_sink = ((b * M + new_rank) * G + g) * D
    if is_first:
        tl.store(ring_k + at_slot + d, new_k, mask=d < D)
        if sink_k is not None:
            tl.store(sink_k + at_sink + d, new_k, mask=d < sink_columns)
        if pending is not None:
            tl.store(pending + at_slot + d, new_key, mask=d < D)
    tl.debug_barrier()  # the value that leaves the ring has been read
    tl.store(ring_v + at_slot + column, new_v, mask=inside)
    if sink_v is not None:
        tl.store(sink_v + at_sink + column, new_v, mask=column < sink_columns)


def step(token: Token, kept: Kept, rules: Rules) -> Tensor:
    """See `gated_kernels.step.chunk.step`."""
    (B, H, D), (_, P, G, _), (F, V) = token.q_BHD.shape, kept.k_BPGD.shape, kept.state_BGFV.shape[2:]
    cos, sin, codes, gate, share = token.cos_BC, token.sin_BC, rules.codes, rules.gate, rules.share
    q, k, v = (x if x.stride()[1:] == (D, 1) else x.contiguous() for x in (token.q_BHD, token.k_BGD, token.v_BGD))
    visible = None if token.sink_visible_BM is None else token.sink_visible_BM.contiguous()
    cos_step = 0 if cos is None or len(cos) == 1 else cos.stride(0)
    new, R, CD = kept.state_BGFV.new_empty, H // G, _held(D)
    piece = CD if codes is None else min(CONFIG.codes, _held(F))
    S = triton.cdiv(F, piece)
    logits, totals, window, lse = new(B, H + G, F), new(B, H + G), new(B, H, D), new(B, H)
    tops, sums, masses = new(B, H + G, S), new(B, H + G, S), new(B, H + G, S)
    o, E, FG = v.new_empty(B, H, D), 1 if codes is None else codes.codes_GFE.shape[2], 1
    if gate is not None and gate.bias_GF is not None:
        FG = gate.bias_GF.shape[1]
    BF, BV = _block_of_state(F, D, R, B * G)
    wide = CD * v.element_size() > 256
    overlap = o.is_cuda and _overlaps(o.device)
    sizes = {"G": G, "R": R, "D": D, "F": F, "V": V, "P": P, "S": S, "CD": CD, "OVERLAP": overlap}
    sizes |= {"C": 0 if cos is None else cos.shape[1], "M": 0 if visible is None else visible.shape[1]}
    with torch.cuda.device_of(o):
        read_kernel[((H + G) * triton.cdiv(B, ROWS) * S + B * G,)](
            q, k, v, q.stride(0), k.stride(0), v.stride(0), cos, sin, cos_step, token.rank_BS, visible,
            *kept, *(codes or (None,) * 7), None if share is None else share.query_HD,
            logits, totals, tops, sums, masses, window, lse, token.scale, B,
            **sizes, E=E, CE=_held(E), BD=min(CONFIG.channels, CD), BF=piece, N=_held(R), K=16 if wide else 64,
            SINKS=16, ROWS=ROWS, PP=triton.next_power_of_2(P), AHEAD=CONFIG.ahead,
            num_warps=CONFIG.read_warps * (2 if wide else 1), maxnreg=CONFIG.read_registers,
            launch_pdl=overlap,
        )  # fmt: skip
        write_kernel[(B * G, triton.cdiv(D, BV))](
            k, v, k.stride(0), v.stride(0), cos, sin, cos_step, token.rank_BS, *kept,
            None if gate is None else gate.bias_GF, *((None, None) if share is None else (share.power_H, share.log_H)),
            logits, totals, tops, sums, masses, window, lse, o, 1.0 if gate is None else gate.normalizer, D**-0.5,
            **sizes, GATE=None if gate is None else gate.of, SHARED=share is not None, FG=FG,
            CS=triton.next_power_of_2(S), N=triton.next_power_of_2(R), BF=BF, BV=BV, BC=min(BV, 32),
            num_warps=max(4, BF * BV // CONFIG.a_warp), maxnreg=CONFIG.write_registers, launch_pdl=overlap,
        )  # fmt: skip
    return o


@functools.cache
def _overlaps(device: torch.device) -> bool:
    """Whether a kernel may begin while the one before it still runs, and wait for it where it has to."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


def _held(size: int) -> int:
    return max(ROWS, triton.next_power_of_2(size))


def _block_of_state(F: int, D: int, R: int, heads: int) -> tuple[int, int]:
    """BF and BV: few enough columns for many programs, and all rows at once where registers hold them."""
    BV = min(CONFIG.columns, _held(D))
    while BV > 16 and heads * triton.cdiv(D, BV) < CONFIG.programs:
        BV //= 2
    BF = _held(F) if _held(F) * BV <= CONFIG.whole else CONFIG.part // BV
    return min(BF, 128 if R > 8 else BF), BV  # many query heads take a matrix product
