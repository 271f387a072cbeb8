"""The kernels of `bf16.py` for the sums of gates and the scans over states. `bf16.py` has the legend of shapes."""

from __future__ import annotations

import triton
import triton.language as tl

from gated_kernels.common.interpreter import rounded
from gated_kernels.common.tiles import dot, load, store


@triton.jit(do_not_specialize=["T"])
def sums_kernel(
    log_a, segment, sums, bounds, strong, T,
    G: tl.constexpr, F: tl.constexpr, C: tl.constexpr, BF: tl.constexpr, LIMIT: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """A chunk's cumulative sums of log gates, to base 2, and where its segments start and stop.

    A feature's sums are relative to the sum in the middle of the chunk, rounded down to an integer, if none is more
    than LIMIT away from it. If one is, or a gate is stronger than STEP, the chunk is marked as strong.
    """
    N = tl.cdiv(T, C)
    chunk = tl.program_id(0).to(tl.int64)
    n, b, g = chunk % N, chunk // N // G, chunk // N % G
    i = tl.arange(0, C)
    rows = (T - n * C).to(tl.int32)
    farthest = tl.zeros((BF,), tl.float32)
    longest = tl.zeros((BF,), tl.float32)
    for f0 in range(0, F, BF):
        f = f0 + tl.arange(0, BF)
        gates = load(log_a + ((b * T + n * C) * G + g) * F, i, rows, G * F, f, F).to(tl.float32)
        gates = tl.maximum(gates * 1.4426950408889634, -151.0)  # 2^-151 is 0 in fp32
        now = tl.cumsum(gates, 0)
        middle = tl.sum(tl.where((i == C // 2 - 1)[:, None], now, 0.0), 0)
        far = tl.maximum(tl.abs(middle), tl.max(tl.abs(now - middle[None, :]), 0))
        middle = tl.where(far > LIMIT, 0.0, tl.floor(middle))
        tl.store(sums + chunk * (C + 1) * F + f, -middle, mask=f < F)
        store(sums + (chunk * (C + 1) + 1) * F, now - middle[None, :], i, C, F, f, F)
        farthest = tl.maximum(farthest, far)
        longest = tl.maximum(longest, tl.max(tl.abs(gates), 0))
    tl.store(strong + chunk, ((tl.max(farthest, 0) > LIMIT) | (tl.max(longest, 0) > STEP)).to(tl.int32))
    if segment is not None:
        t = n * C + i
        inside = (t > 0) & (t < T)
        now = tl.load(segment + b * T + t, mask=inside, other=0)
        changes = (inside & (now != tl.load(segment + b * T + t - 1, mask=inside, other=0)))[None, :]
        row = i[:, None]
        column = i[None, :]
        tl.store(bounds + chunk * 2 * C + i, tl.max(tl.where(changes & (column <= row), column, -1), 1))
        tl.store(bounds + (chunk * 2 + 1) * C + i, tl.min(tl.where(changes & (column > row), column - 1, C), 1))


@triton.jit
def starts(bounds, chunk, i, C: tl.constexpr):
    """Where in the chunk the segment of token i starts; -1 if before the chunk."""
    return tl.load(bounds + chunk * 2 * C + i)


@triton.jit
def stops(bounds, chunk, i, C: tl.constexpr):
    """The last token of the segment of token i; C if the segment continues to the end of the chunk."""
    return tl.load(bounds + (chunk * 2 + 1) * C + i)


@triton.jit
def sums_at(sums, chunk, j, f, F: tl.constexpr, C: tl.constexpr):
    """[.., BF] the sums of the chunk's first j log gates, relative to the middle. For token t, j is t + 1 for what it
    writes and t + 1 - EXCLUSIVE for what it reads."""
    return load(sums + chunk * (C + 1) * F, j, C + 1, F, f, F)


@triton.jit
def sum_at(sums, chunk, j, f, F: tl.constexpr, C: tl.constexpr):
    """[BF] the sum of the chunk's first j log gates, relative to the middle."""
    return tl.load(sums + (chunk * (C + 1) + j) * F + f, mask=f < F, other=0.0)


@triton.jit
def queries_of(
    q, q_lse, r, i, rows, H: tl.constexpr, f, F: tl.constexpr, BF: tl.constexpr, AGAIN: tl.constexpr = False
):
    """[.., BF] rows i of head r of H: q or, with a log-sum-exp, exp(q - lse) in fp32. Zeros out of bounds.

    AGAIN: a volatile load, so that the compiler does not keep an earlier one in registers.
    """
    mask = (i < rows)[:, None] & (f < F)[None, :]
    queries = tl.load(q + r * F + i[:, None] * (H * F) + f[None, :], mask=mask, other=0.0, volatile=AGAIN)
    if q_lse is not None:
        lse = tl.load(q_lse + r + i * H, mask=i < rows, other=float("inf"))
        queries = tl.exp2((queries.to(tl.float32) - lse[:, None]) * 1.4426950408889634)
        if F % BF != 0:
            queries = tl.where((f < F)[None, :], queries, 0.0)
    return queries


@triton.jit(do_not_specialize=["T", "PART"])
def states_kernel(
    k, v, sums, bounds, state, states, last, T, PART,
    G: tl.constexpr, F: tl.constexpr, V: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    BF: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state before every chunk of a part of PART chunks, and the part's last state. One program per tile of a
    head's state."""
    N = tl.cdiv(T, C)
    parts = tl.cdiv(N, PART)
    columns: tl.constexpr = (V + BV - 1) // BV
    blocks: tl.constexpr = (F + BF - 1) // BF * columns
    block = tl.program_id(0) % blocks  # programs that load the same data have consecutive indices
    program = (tl.program_id(0) // blocks).to(tl.int64)
    head, part = program // parts, program % parts
    b, g = head // G, head % G
    f = block // columns * BF + tl.arange(0, BF)
    x = block % columns * BV + tl.arange(0, BV)
    i = tl.arange(0, C)
    now = tl.zeros((BF, BV), tl.float32)
    if state is not None:
        now = load(state + program * F * V, f, F, V, x, V)
    start = (part * PART).to(tl.int32)
    for n in range(start, tl.minimum(N, start + PART)):
        chunk = head * N + n
        if states is not None:
            store(states + chunk * F * V, now, f, F, V, x, V)
        first = n * C
        row = b * T + first
        keys = load(k + (row * G + g) * F, i, T - first, G * F, f, F)
        values = load(v + (row * G + g) * V, i, T - first, G * V, x, V)
        end = sum_at(sums, chunk, C, f, F, C)
        decay = tl.exp2(end[None, :] - sums_at(sums, chunk, i + 1, f, F, C))
        total = tl.exp2(end - sum_at(sums, chunk, 0, f, F, C))
        if bounds is not None:
            decay = tl.where((stops(bounds, chunk, i, C) == C)[:, None], decay, 0.0)
            total = tl.where(starts(bounds, chunk, C - 1, C) < 0, total, 0.0)
        now = dot(tl.trans(rounded(keys * decay, D)), values, now * total[:, None], D, PRECISION)
    if last is not None:
        store(last + program * F * V, now, f, F, V, x, V)


@triton.jit
def dstates_kernel(
    q, q_lse, do, sums, bounds, dlast, dstates, dstate, T, PART,
    G: tl.constexpr, R: tl.constexpr, F: tl.constexpr, V: tl.constexpr, EXCLUSIVE: tl.constexpr, C: tl.constexpr,
    D: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of the state after every chunk of a part, and of the state before the part. Like `states_kernel`,
    but from the end."""
    N = tl.cdiv(T, C)
    parts = tl.cdiv(N, PART)
    columns: tl.constexpr = (V + BV - 1) // BV
    blocks: tl.constexpr = (F + BF - 1) // BF * columns
    block = tl.program_id(0) % blocks  # programs that load the same data have consecutive indices
    program = (tl.program_id(0) // blocks).to(tl.int64)
    head, part = program // parts, program % parts
    b, g = head // G, head % G
    f = block // columns * BF + tl.arange(0, BF)
    x = block % columns * BV + tl.arange(0, BV)
    i = tl.arange(0, C)
    heads: tl.constexpr = G * R
    dnow = tl.zeros((BF, BV), tl.float32)
    if dlast is not None:
        dnow = load(dlast + program * F * V, f, F, V, x, V)
    start = (part * PART).to(tl.int32)
    end = tl.minimum(N, start + PART)
    for step in range((end - start) * R):  # a single loop, so that loads for the next chunk are pipelined
        n = end - 1 - step // R
        r = step % R
        chunk = head * N + n
        if dstates is not None:  # noqa: SIM102
            if r == 0:
                store(dstates + chunk * F * V, dnow, f, F, V, x, V)
        first = n * C
        row = (b * T + first) * heads + g * R + r
        queries = queries_of(q, q_lse, row, i, T - first, heads, f, F, BF)
        douts = load(do + row * V, i, T - first, heads * V, x, V)
        before = sum_at(sums, chunk, 0, f, F, C)
        decay = tl.exp2(sums_at(sums, chunk, i + 1 - EXCLUSIVE, f, F, C) - before[None, :])
        total = tl.exp2(sum_at(sums, chunk, C, f, F, C) - before)
        if bounds is not None:
            decay = tl.where((starts(bounds, chunk, i, C) < 0)[:, None], decay, 0.0)
            total = tl.where(starts(bounds, chunk, C - 1, C) < 0, total, 0.0)
        total = tl.where(r == 0, total, 1.0)
        dnow = dot(tl.trans(rounded(queries * decay, D)), douts, dnow * total[:, None], D, PRECISION)
    if dstate is not None:
        store(dstate + program * F * V, dnow, f, F, V, x, V)


@triton.jit(do_not_specialize=["T", "PART"])
def carry_kernel(
    sums, bounds, first, ends, last, T, PART, F: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    CHUNKS: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, REVERSED: tl.constexpr,
):  # fmt: skip
    """Replaces every part's last state in `ends`, run from zeros, by the state before the part, and writes the last
    state of all. REVERSED: the same for gradients, from the end. One program per tile of a head's state."""
    N = tl.cdiv(T, C)
    parts = tl.cdiv(N, PART)
    head = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    x = tl.program_id(2) * BV + tl.arange(0, BV)
    i = tl.arange(0, CHUNKS)
    now = load(first + head * F * V, f, F, V, x, V)
    for step in range(parts):
        part = step
        if REVERSED:
            part = parts - 1 - step
        state = ends + (head * parts + part) * F * V
        end = load(state, f, F, V, x, V)
        store(state, now, f, F, V, x, V)
        chunk = head * N + part * PART
        chunks = tl.minimum(PART, N - part * PART)
        at = sums + chunk * (C + 1) * F
        gates = load(at + C * F, i, chunks, (C + 1) * F, f, F) - load(at, i, chunks, (C + 1) * F, f, F)
        total = tl.exp2(tl.sum(gates, 0))
        if bounds is not None:
            start = tl.load(bounds + (chunk + i) * 2 * C + C - 1, mask=i < chunks, other=-1)
            total = tl.where(tl.max(start, 0) < 0, total, 0.0)
        now = now * total[:, None] + end
    store(last + head * F * V, now, f, F, V, x, V)
