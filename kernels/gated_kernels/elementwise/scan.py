"""The kernels of `launch.py` that pass over the tokens of a chunk from its start, and from chunk to chunk.

A program holds a block of a state in registers, BF >= F features of BG heads times BV of their values: one head where
it has many values, several where it has few. It steps through the tokens one by one.

Shapes: B batch, T tokens, H query heads, G key-value heads, R = H / G, F feature size, V value size, N chunks of C
tokens, E entries of all states of a sequence, G F V.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gated_kernels.common.interpreter import rounded


@triton.jit
def place(
    T, FIRST, CHUNKS, G: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BF: tl.constexpr, BG: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    """Of this program: its sequence, chunk, tokens there and block of values, then its features, heads and values.

    The launch is of CHUNKS chunks of every sequence, from chunk FIRST on. Blocks that share what they load run side by
    side.
    """
    of_V: tl.constexpr = (V + BV - 1) // BV
    blocks: tl.constexpr = (G + BG - 1) // BG * of_V
    block = tl.program_id(0) % blocks
    chunk = (tl.program_id(0) // blocks).to(tl.int64)
    b, n = chunk // CHUNKS, FIRST + chunk % CHUNKS
    rows = tl.minimum(C, T - n * C).to(tl.int32)
    f, g, x = tl.arange(0, BF), block // of_V * BG + tl.arange(0, BG), block % of_V * BV + tl.arange(0, BV)
    return b, n, rows, block % of_V, f, g, x


@triton.jit
def tile(f, g, x, G: tl.constexpr, F: tl.constexpr, V: tl.constexpr):
    """[BF, BG, BV] where the entries of a block stand in states [G, F, V], and which of them there are."""
    at = g[None, :, None] * (F * V) + f[:, None, None] * V + x[None, None, :]
    return at, (f < F)[:, None, None] & (g < G)[None, :, None] & (x < V)[None, None, :]


@triton.jit
def rates(log_A, at, mask):
    """log A to base 2, 0 where there is none: such an entry stays 0."""
    return tl.load(log_A + at, mask=mask, other=0.0).to(tl.float32) * 1.4426950408889634


@triton.jit
def number(x, mask):
    return tl.load(x, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def here(mask, condition):
    """A mask, or nothing of it; the interpreter's loads do not take what & makes of a mask and a single condition."""
    return mask & tl.where(condition, tl.full(mask.shape, 1, tl.int1), tl.full(mask.shape, 0, tl.int1))


@triton.jit
def begins(segment, t, T):
    """Whether token t is the first of a segment other than that of the first state."""
    inside = (t > 0) & (t < T)
    return tl.load(segment + t, mask=inside, other=0) != tl.load(segment + t - 1, mask=inside, other=0)


@triton.jit
def restarted(state, segment, t, T):
    """A state before token t as the token finds it: 0 where a segment begins with it."""
    if segment is not None:
        state = tl.where(begins(segment, t, T), 0.0, state)
    return state


@triton.jit
def after(past, keys, values, steps, rate):
    """The state after a token, [BF, BG, BV], from keys [BF, BG], values and steps [BG, BV]."""
    return past * tl.exp2(steps[None, :, :] * rate) + keys[:, :, None] * values[None, :, :]


@triton.jit
def ends_kernel(
    k, v, dt, log_A, segment, ends, sums, T, FIRST, CHUNKS, k_b, k_t, k_g, k_f, dt_b, dt_t, dt_g, dt_v,
    G: tl.constexpr, F: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BF: tl.constexpr, BG: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    """Every chunk's last state from one of zeros, and the sum of its steps: -inf if a segment begins in it."""
    b, n, rows, _, f, g, x = place(T, FIRST, CHUNKS, G, V, C, BF, BG, BV)
    at, mask = tile(f, g, x, G, F, V)
    rate = rates(log_A, at, mask)
    of_k, of_v = (f < F)[:, None] & (g < G)[None, :], (g < G)[:, None] & (x < V)[None, :]
    k += b * k_b + n * C * k_t + g[None, :] * k_g + f[:, None] * k_f
    v += (b * T + n * C) * (G * V) + g[:, None] * V + x[None, :]
    dt += b * dt_b + n * C * dt_t + g[:, None] * dt_g + x[None, :] * dt_v
    if segment is not None:
        segment += b * T
    state = tl.zeros((BF, BG, BV), tl.float32)
    total = tl.zeros((BG, BV), tl.float32)
    for i in range(rows):
        state = restarted(state, segment, n * C + i, T)
        if segment is not None:
            total = tl.where(begins(segment, n * C + i, T), -float("inf"), total)
        steps = number(dt + i * dt_t, of_v)
        total += steps
        state = after(state, number(k + i * k_t, of_k), number(v + i * (G * V), of_v), steps, rate)
    chunk = b * tl.cdiv(T, C) + n
    tl.store(ends + chunk * (G * F * V) + at, state, mask=mask)
    tl.store(sums + chunk * (G * V) + g[:, None] * V + x[None, :], total, mask=of_v)


@triton.jit
def of_chunk(ends, sums, chunk, e, of_sum, mask, E: tl.constexpr, GV: tl.constexpr):
    """What a chunk adds to the entries of a state, and the sum of its steps; of one that is not there, zeros."""
    return number(ends + chunk * E + e, mask), number(sums + chunk * GV + of_sum, mask)


@triton.jit
def past_chunk(state, added, total, rate):
    return state * tl.where(total == -float("inf"), 0.0, tl.exp2(total * rate)) + added


@triton.jit
def carry_kernel(
    log_A, sums, first, ends, last, N, F: tl.constexpr, V: tl.constexpr, E: tl.constexpr, GV: tl.constexpr,
    REVERSED: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """What every chunk adds becomes the state before it, and the last of all; REVERSED: the gradient of the one after
    it. BE entries a program."""
    blocks: tl.constexpr = (E + BE - 1) // BE
    e = tl.program_id(0) % blocks * BE + tl.arange(0, BE)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    mask = e < E
    rate = rates(log_A, e, mask)
    of_sum = e // (F * V) * V + e % V
    state = tl.zeros((BE,), tl.float32)
    if first is not None:
        state = number(first + b * E + e, mask)
    turn: tl.constexpr = -1 if REVERSED else 1
    chunk = b * N
    if REVERSED:
        chunk += N - 1
    for i in range(0, N, 4):
        left = N - i
        # what four chunks add is on its way before the first of them is passed
        added0, total0 = of_chunk(ends, sums, chunk, e, of_sum, mask, E, GV)
        added1, total1 = of_chunk(ends, sums, chunk + turn, e, of_sum, here(mask, left > 1), E, GV)
        added2, total2 = of_chunk(ends, sums, chunk + 2 * turn, e, of_sum, here(mask, left > 2), E, GV)
        added3, total3 = of_chunk(ends, sums, chunk + 3 * turn, e, of_sum, here(mask, left > 3), E, GV)
        tl.store(ends + chunk * E + e, state, mask=mask)
        state = past_chunk(state, added0, total0, rate)
        tl.store(ends + (chunk + turn) * E + e, state, mask=here(mask, left > 1))
        state = past_chunk(state, added1, total1, rate)
        tl.store(ends + (chunk + 2 * turn) * E + e, state, mask=here(mask, left > 2))
        state = past_chunk(state, added2, total2, rate)
        tl.store(ends + (chunk + 3 * turn) * E + e, state, mask=here(mask, left > 3))
        state = past_chunk(state, added3, total3, rate)
        chunk += 4 * turn
    if last is not None:
        tl.store(last + b * E + e, state, mask=mask)


@triton.jit
def outputs_kernel(
    q, k, v, dt, log_A, segment, states, o, last, T, FIRST, CHUNKS, q_b, q_t, q_h, q_f, k_b, k_t, k_g, k_f, dt_b, dt_t,
    dt_g, dt_v,
    G: tl.constexpr, R: tl.constexpr, F: tl.constexpr, V: tl.constexpr, EXCLUSIVE: tl.constexpr, C: tl.constexpr,
    BF: tl.constexpr, BG: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """What the tokens of a chunk read; with `last`, of the only chunk, the state after it."""
    b, n, rows, _, f, g, x = place(T, FIRST, CHUNKS, G, V, C, BF, BG, BV)
    at, mask = tile(f, g, x, G, F, V)
    rate = rates(log_A, at, mask)
    of_k, of_v = (f < F)[:, None] & (g < G)[None, :], (g < G)[:, None] & (x < V)[None, :]
    q += b * q_b + n * C * q_t + g[None, :] * (R * q_h) + f[:, None] * q_f
    k += b * k_b + n * C * k_t + g[None, :] * k_g + f[:, None] * k_f
    v += (b * T + n * C) * (G * V) + g[:, None] * V + x[None, :]
    o += (b * T + n * C) * (G * R * V) + g[:, None] * (R * V) + x[None, :]
    dt += b * dt_b + n * C * dt_t + g[:, None] * dt_g + x[None, :] * dt_v
    if segment is not None:
        segment += b * T
    state = number(states + (b * tl.cdiv(T, C) + n) * (G * F * V) + at, mask)
    for i in range(rows):
        past = restarted(state, segment, n * C + i, T)
        keys, values = number(k + i * k_t, of_k), number(v + i * (G * V), of_v)
        state = after(past, keys, values, number(dt + i * dt_t, of_v), rate)
        seen = state
        if EXCLUSIVE:
            seen = past
        for r in range(R):
            read = tl.sum(number(q + i * q_t + r * q_h, of_k)[:, :, None] * seen, 0)
            tl.store(o + i * (G * R * V) + r * V, rounded(read, o.dtype.element_ty), mask=of_v)
    if last is not None:
        tl.store(last + b * (G * F * V) + at, state, mask=mask)


@triton.jit
def dq_kernel(
    k, v, dt, log_A, segment, states, do, dq, inner, T, FIRST, CHUNKS, SEQUENCES, k_b, k_t, k_g, k_f, dt_b, dt_t, dt_g,
    dt_v,
    G: tl.constexpr, R: tl.constexpr, F: tl.constexpr, V: tl.constexpr, EXCLUSIVE: tl.constexpr, C: tl.constexpr,
    INNER: tl.constexpr, ONE_QUERY: tl.constexpr, BF: tl.constexpr, BG: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The gradient of the queries (None: not wanted), a part of it for each block of values; and every INNER tokens
    the state, block by block as the programs have them. ONE_QUERY: a program sums that of one head over its tokens."""
    b, n, rows, part, f, g, x = place(T, FIRST, CHUNKS, G, V, C, BF, BG, BV)
    at, mask = tile(f, g, x, G, F, V)
    rate = rates(log_A, at, mask)
    of_k, of_v = (f < F)[:, None] & (g < G)[None, :], (g < G)[:, None] & (x < V)[None, :]
    k += b * k_b + n * C * k_t + g[None, :] * k_g + f[:, None] * k_f
    v += (b * T + n * C) * (G * V) + g[:, None] * V + x[None, :]
    dt += b * dt_b + n * C * dt_t + g[:, None] * dt_g + x[None, :] * dt_v
    do += (b * T + n * C) * (G * R * V) + g[:, None] * (R * V) + x[None, :]
    if dq is not None:
        row = (part.to(tl.int64) * SEQUENCES + b) * T + n * C
        if ONE_QUERY:
            row = (part.to(tl.int64) * SEQUENCES + b) * tl.cdiv(T, C) + n
        dq += row * (G * R * F) + g[None, :] * (R * F) + f[:, None]
    if segment is not None:
        segment += b * T
    inner += inside_program(C, INNER, BF, BG, BV)
    state = number(states + (b * tl.cdiv(T, C) + n) * (G * F * V) + at, mask)
    head = tl.program_id(1)  # the only one, unless ONE_QUERY
    total = tl.zeros((BF, BG, BV), tl.float32)
    for i in range(rows):
        if (i % INNER == 0) & (head == 0):
            tl.store(inner + i // INNER * (BF * BG * BV), state)
        past = restarted(state, segment, n * C + i, T)
        keys, values = number(k + i * k_t, of_k), number(v + i * (G * V), of_v)
        state = after(past, keys, values, number(dt + i * dt_t, of_v), rate)
        if dq is not None:
            seen = state
            if EXCLUSIVE:
                seen = past
            if ONE_QUERY:
                total += number(do + i * (G * R * V) + head * V, of_v)[None, :, :] * seen
            for r in range(0 if ONE_QUERY else R):
                dqueries = tl.sum(number(do + i * (G * R * V) + r * V, of_v)[None, :, :] * seen, 2)
                tl.store(dq + i * (G * R * F) + r * F, rounded(dqueries, dq.dtype.element_ty), mask=of_k)
    if ONE_QUERY and dq is not None:
        tl.store(dq + head * F, tl.sum(total, 2), mask=of_k)


@triton.jit
def inside_program(C: tl.constexpr, INNER: tl.constexpr, BF: tl.constexpr, BG: tl.constexpr, BV: tl.constexpr):
    """[BF, BG, BV] where a program's first state stands among those kept every INNER tokens."""
    f, g, x = tl.arange(0, BF)[:, None, None], tl.arange(0, BG)[None, :, None], tl.arange(0, BV)[None, None, :]
    return tl.program_id(0).to(tl.int64) * (C // INNER * BF * BG * BV) + (f * BG + g) * BV + x
