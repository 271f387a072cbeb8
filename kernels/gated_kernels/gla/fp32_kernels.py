"""The kernels of gated linear attention with a gate per feature in fp32 and fp16 (see `fp32.py`, also for shapes)."""

from __future__ import annotations

import triton
import triton.language as tl

from gated_kernels.common.interpreter import rounded
from gated_kernels.common.tiles import dot, load, store


@triton.jit
def _load_gates(log_a, b, t, T, g, f, G: tl.constexpr, F: tl.constexpr):
    """[C, BF] the log gates, in fp32."""
    gates = load(log_a + (b * T * G + g) * F, t, T, G * F, f, F).to(tl.float32)
    return tl.maximum(gates, -1e30)  # sums are products with zeros and ones, and 0 times -inf is NaN


@triton.jit
def is_after_start(t, u, EXCLUSIVE: tl.constexpr):
    """Whether gate u lies between the state before the chunk and what token t reads."""
    return t >= u + EXCLUSIVE


@triton.jit
def is_before_end(t, u):
    """Whether gate u lies between what token t writes and the state after the chunk."""
    return u > t


@triton.jit
def is_to_middle(t, u, level, EXCLUSIVE: tl.constexpr):
    """Whether gate u lies between token t and the middle of its block, which consists of two halves of 2^level tokens.
    Tokens in the second half read, those in the first half write."""
    second = (t >> level) % 2 == 1
    return (t >> level == u >> level) & tl.where(second, t >= u + EXCLUSIVE, u > t)


@triton.jit
def _decay(between, gates):
    """[C, BF] every token's decay by the gates selected by `between`. The sums have nearly fp32 precision for every
    dtype of the inputs."""
    return tl.exp(dot(between, gates, None, tl.float32, "tf32x3"))


@triton.jit
def is_pair(t, s, level):
    """Whether t is in the second and s in the first half of the same block."""
    return ((s >> level) % 2 == 0) & (t >> level == (s >> level) + 1)


@triton.jit
def _same(segment, b, t, s, T):
    """Whether two tokens belong to the same segment. Positions beyond the sequence count as its first or last token."""
    t_segment = tl.load(segment + b * T + tl.minimum(tl.maximum(t, 0), T - 1))
    return t_segment == tl.load(segment + b * T + tl.minimum(tl.maximum(s, 0), T - 1))


@triton.jit
def _readable(segment, b, first, t, s, T, EXCLUSIVE: tl.constexpr):
    """Whether token t reads what token s writes. Both are relative to `first`, the chunk's first token."""
    readable = t >= s + EXCLUSIVE
    if segment is not None:
        readable = readable & _same(segment, b, first + t, first + s, T)
    return readable


@triton.jit
def _total(gates, segment, b, first, T, C: tl.constexpr):
    """[BF] the decay over the whole chunk; 0 if a segment ends in it, or just before it."""
    total = tl.exp(tl.sum(gates, 0))
    if segment is not None:
        total = tl.where(_same(segment, b, first - 1, first + C - 1, T), total, 0.0)
    return total


@triton.jit
def _read_decay(gates, segment, b, first, i, T, EXCLUSIVE: tl.constexpr):
    """[C, BF] the decay from the state before the chunk to what a token reads; 0 if that state is another segment's."""
    decay = _decay(is_after_start(i[:, None], i[None, :], EXCLUSIVE), gates)
    if segment is not None:
        decay = tl.where(_same(segment, b, first + i, first - 1, T)[:, None], decay, 0.0)
    return decay


@triton.jit
def _write_decay(gates, segment, b, first, i, T, C: tl.constexpr):
    """[C, BF] the decay from what a token writes to the state after the chunk; 0 if that state is another segment's."""
    decay = _decay(is_before_end(i[:, None], i[None, :]), gates)
    if segment is not None:
        decay = tl.where(_same(segment, b, first + i, first + C - 1, T)[:, None], decay, 0.0)
    return decay


@triton.jit
def _scores(
    q, k, gates, D: tl.constexpr, EXCLUSIVE: tl.constexpr, TRANSPOSED: tl.constexpr,
    C: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[t, s], or [s, t] if TRANSPOSED: the scores summed over these features, before masking. D: dtype of operands."""
    row = tl.arange(0, C)[:, None]
    column = tl.arange(0, C)[None, :]
    scores = tl.zeros((C, C), tl.float32)
    for level in tl.range(LEVELS, disable_licm=True):
        decay = _decay(is_to_middle(row, column, level, EXCLUSIVE), gates)
        left = q * decay
        right = k * decay
        if TRANSPOSED:
            part = dot(right, tl.trans(rounded(left, D)), None, D, PRECISION)
            scores += tl.where(is_pair(column, row, level), part, 0.0)
        else:
            part = dot(left, tl.trans(rounded(right, D)), None, D, PRECISION)
            scores += tl.where(is_pair(row, column, level), part, 0.0)
    return scores + tl.where(row == column, tl.sum(q * k, 1)[:, None], 0.0)


@triton.jit(do_not_specialize=["T"])
def states_kernel(
    k, v, log_a, segment, state, states, last, T,
    G: tl.constexpr, R: tl.constexpr, F: tl.constexpr, V: tl.constexpr, EXCLUSIVE: tl.constexpr,
    C: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state before every chunk, and the last state. One program per [BF, BV] tile of a head's state."""
    D: tl.constexpr = states.dtype.element_ty
    head = tl.program_id(0).to(tl.int64)
    b, g = head // G, head % G
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    v_ = tl.program_id(2) * BV + tl.arange(0, BV)
    i = tl.arange(0, C).to(tl.int64)
    N = tl.cdiv(T, C)
    now = load(state + head * F * V, f, F, V, v_, V)
    for n in range(N):
        store(states + (head * N + n) * F * V, now, f, F, V, v_, V)
        first = n * C
        t = first + i
        gates = _load_gates(log_a, b, t, T, g, f, G, F)
        keys = load(k + (b * T * G + g) * F, t, T, G * F, f, F).to(tl.float32)
        values = load(v + (b * T * G + g) * V, t, T, G * V, v_, V)
        write = keys * _write_decay(gates, segment, b, first, i, T, C)
        now = now * _total(gates, segment, b, first, T, C)[:, None]
        now = dot(tl.trans(rounded(write, D)), values, now, D, PRECISION)
    store(last + head * F * V, now, f, F, V, v_, V)


@triton.jit(do_not_specialize=["T"])
def outputs_kernel(
    q, k, v, log_a, segment, states, o, T,
    G: tl.constexpr, R: tl.constexpr, F: tl.constexpr, V: tl.constexpr, EXCLUSIVE: tl.constexpr,
    C: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The outputs of a chunk. One program per query head."""
    D: tl.constexpr = states.dtype.element_ty
    N = tl.cdiv(T, C)
    program = tl.program_id(0).to(tl.int64)
    n, b, h = program % N, program // N // (G * R), program // N % (G * R)
    g = h // R
    first = n * C
    i = tl.arange(0, C)
    t = first + i
    scores = tl.zeros((C, C), tl.float32)
    for f0 in range(0, F, BF):
        f = f0 + tl.arange(0, BF)
        gates = _load_gates(log_a, b, t, T, g, f, G, F)
        queries = load(q + (b * T * G * R + h) * F, t, T, G * R * F, f, F).to(tl.float32)
        keys = load(k + (b * T * G + g) * F, t, T, G * F, f, F).to(tl.float32)
        scores += _scores(queries, keys, gates, D, EXCLUSIVE, False, C, LEVELS, PRECISION)
    scores = tl.where(_readable(segment, b, first, i[:, None], i[None, :], T, EXCLUSIVE), scores, 0.0)
    for v0 in range(0, V, BV):
        v_ = v0 + tl.arange(0, BV)
        values = load(v + (b * T * G + g) * V, t, T, G * V, v_, V)
        outputs = dot(scores, values, None, D, PRECISION)
        for f0 in range(0, F, BF):
            f = f0 + tl.arange(0, BF)
            gates = _load_gates(log_a, b, t, T, g, f, G, F)
            queries = load(q + (b * T * G * R + h) * F, t, T, G * R * F, f, F).to(tl.float32)
            read = queries * _read_decay(gates, segment, b, first, i, T, EXCLUSIVE)
            before = load(states + ((b * G + g) * N + n) * F * V, f, F, V, v_, V)
            outputs = dot(read, before, outputs, D, PRECISION)
        store(o + (b * T * G * R + h) * V, outputs, t, T, G * R * V, v_, V)


@triton.jit
def dstates_kernel(
    q, log_a, segment, do, dlast, dstates, dstate, T,
    G: tl.constexpr, R: tl.constexpr, F: tl.constexpr, V: tl.constexpr, EXCLUSIVE: tl.constexpr,
    C: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of the state after every chunk, and of the initial state. One program per [BF, BV] tile of a head's
    state."""
    D: tl.constexpr = dstates.dtype.element_ty
    head = tl.program_id(0).to(tl.int64)
    b, g = head // G, head % G
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    v_ = tl.program_id(2) * BV + tl.arange(0, BV)
    i = tl.arange(0, C).to(tl.int64)
    N = tl.cdiv(T, C)
    dnow = load(dlast + head * F * V, f, F, V, v_, V)
    for back in range(N):
        n = N - 1 - back
        store(dstates + (head * N + n) * F * V, dnow, f, F, V, v_, V)
        first = n * C
        t = first + i
        gates = _load_gates(log_a, b, t, T, g, f, G, F)
        decay = _read_decay(gates, segment, b, first, i, T, EXCLUSIVE)
        dnow = dnow * _total(gates, segment, b, first, T, C)[:, None]
        for r in tl.range(R, disable_licm=True):
            h = g * R + r
            queries = load(q + (b * T * G * R + h) * F, t, T, G * R * F, f, F).to(tl.float32)
            douts = load(do + (b * T * G * R + h) * V, t, T, G * R * V, v_, V)
            dnow = dot(tl.trans(rounded(queries * decay, D)), douts, dnow, D, PRECISION)
    store(dstate + head * F * V, dnow, f, F, V, v_, V)


@triton.jit
def dv_kernel(
    q, k, log_a, segment, do, dstates, dv, T,
    G: tl.constexpr, R: tl.constexpr, F: tl.constexpr, V: tl.constexpr, EXCLUSIVE: tl.constexpr,
    C: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of a chunk's values, BV columns per program. Scores are computed transposed, as they are needed."""
    D: tl.constexpr = dstates.dtype.element_ty
    N = tl.cdiv(T, C)
    program = tl.program_id(0).to(tl.int64)
    n, b, g = program % N, program // N // G, program // N % G
    first = n * C
    i = tl.arange(0, C)
    t = first + i
    v_ = tl.program_id(1) * BV + tl.arange(0, BV)
    readable = _readable(segment, b, first, i[None, :], i[:, None], T, EXCLUSIVE)
    dvalues = tl.zeros((C, BV), tl.float32)
    for f0 in range(0, F, BF):
        f = f0 + tl.arange(0, BF)
        gates = _load_gates(log_a, b, t, T, g, f, G, F)
        keys = load(k + (b * T * G + g) * F, t, T, G * F, f, F).to(tl.float32)
        write = keys * _write_decay(gates, segment, b, first, i, T, C)
        dafter = load(dstates + ((b * G + g) * N + n) * F * V, f, F, V, v_, V)
        dvalues = dot(write, dafter, dvalues, D, PRECISION)
    for r in tl.range(R, disable_licm=True):
        h = g * R + r
        scores = tl.zeros((C, C), tl.float32)
        for f0 in range(0, F, BF):
            f = f0 + tl.arange(0, BF)
            gates = _load_gates(log_a, b, t, T, g, f, G, F)
            queries = load(q + (b * T * G * R + h) * F, t, T, G * R * F, f, F).to(tl.float32)
            keys = load(k + (b * T * G + g) * F, t, T, G * F, f, F).to(tl.float32)
            scores += _scores(queries, keys, gates, D, EXCLUSIVE, True, C, LEVELS, PRECISION)
        douts = load(do + (b * T * G * R + h) * V, t, T, G * R * V, v_, V)
        dvalues = dot(tl.where(readable, scores, 0.0), douts, dvalues, D, PRECISION)
    store(dv + (b * T * G + g) * V, dvalues, t, T, G * V, v_, V)


@triton.jit
def dqk_kernel(
    q, k, v, log_a, segment, do, states, dstates, dq, dk, dlog_a, T,
    G: tl.constexpr, R: tl.constexpr, F: tl.constexpr, V: tl.constexpr, EXCLUSIVE: tl.constexpr,
    C: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of a chunk's queries, keys and gates, BF features per program."""
    D: tl.constexpr = states.dtype.element_ty
    N = tl.cdiv(T, C)
    program = tl.program_id(0).to(tl.int64)
    n, b, g = program % N, program // N // G, program // N % G
    first = n * C
    i = tl.arange(0, C)
    t = first + i
    row = i[:, None]
    column = i[None, :]
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    gates = _load_gates(log_a, b, t, T, g, f, G, F)
    keys = load(k + (b * T * G + g) * F, t, T, G * F, f, F).to(tl.float32)

    dkeys = tl.zeros((C, BF), tl.float32)
    dtotal = tl.zeros((BF,), tl.float32)
    for v0 in range(0, V, BV):
        v_ = v0 + tl.arange(0, BV)
        values = load(v + (b * T * G + g) * V, t, T, G * V, v_, V)
        before = load(states + ((b * G + g) * N + n) * F * V, f, F, V, v_, V)
        dafter = load(dstates + ((b * G + g) * N + n) * F * V, f, F, V, v_, V)
        dkeys = dot(values, tl.trans(dafter), dkeys, D, PRECISION)
        dtotal += tl.sum(before.to(tl.float32) * dafter.to(tl.float32), 1)
    dkeys *= _write_decay(gates, segment, b, first, i, T, C)
    dgates = tl.zeros((C, BF), tl.float32) + (dtotal * _total(gates, segment, b, first, T, C))[None, :]
    dgates = dot(is_before_end(column, row), dkeys * keys, dgates, tl.float32, PRECISION)

    for r in tl.range(R, disable_licm=True):
        h = g * R + r
        queries = load(q + (b * T * G * R + h) * F, t, T, G * R * F, f, F).to(tl.float32)
        dqueries = tl.zeros((C, BF), tl.float32)
        dscores = tl.zeros((C, C), tl.float32)  # [t, s]
        dscores_t = tl.zeros((C, C), tl.float32)  # [s, t]: computed anew, as transposing an accumulator costs more
        for v0 in range(0, V, BV):
            v_ = v0 + tl.arange(0, BV)
            values = load(v + (b * T * G + g) * V, t, T, G * V, v_, V)
            douts = load(do + (b * T * G * R + h) * V, t, T, G * R * V, v_, V)
            before = load(states + ((b * G + g) * N + n) * F * V, f, F, V, v_, V)
            dscores = dot(douts, tl.trans(values), dscores, D, PRECISION)
            dscores_t = dot(values, tl.trans(douts), dscores_t, D, PRECISION)
            dqueries = dot(douts, tl.trans(before), dqueries, D, PRECISION)
        dqueries *= _read_decay(gates, segment, b, first, i, T, EXCLUSIVE)
        dgates = dot(is_after_start(column, row, EXCLUSIVE), dqueries * queries, dgates, tl.float32, PRECISION)
        dscores = tl.where(_readable(segment, b, first, row, column, T, EXCLUSIVE), dscores, 0.0)
        dscores_t = tl.where(_readable(segment, b, first, column, row, T, EXCLUSIVE), dscores_t, 0.0)
        # A token reads itself without decay: not part of the gates' gradients, where it would only cancel.
        dself = tl.sum(tl.where(row == column, dscores, 0.0), 1)[:, None]
        dqueries += dself * keys
        dkeys += dself * queries
        for level in tl.range(LEVELS, disable_licm=True):
            decay = _decay(is_to_middle(row, column, level, EXCLUSIVE), gates)
            left = queries * decay
            right = keys * decay
            pair = tl.where(is_pair(row, column, level), dscores, 0.0)
            pair_t = tl.where(is_pair(column, row, level), dscores_t, 0.0)
            dleft = dot(pair, right, None, D, PRECISION)
            dright = dot(pair_t, left, None, D, PRECISION)
            dqueries += dleft * decay
            dkeys += dright * decay
            between = is_to_middle(column, row, level, EXCLUSIVE)
            dgates = dot(between, dleft * left + dright * right, dgates, tl.float32, PRECISION)
        store(dq + (b * T * G * R + h) * F, dqueries, t, T, G * R * F, f, F)

    store(dk + (b * T * G + g) * F, dkeys, t, T, G * F, f, F)
    store(dlog_a + (b * T * G + g) * F, dgates, t, T, G * F, f, F)
