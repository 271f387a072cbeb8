"""The kernels of `bf16.py` that handle chunks independently, once the states are known. `bf16.py` has the legend of
shapes.

Each is compiled twice, for STRONG chunks and for the others, and returns at once for chunks of the other kind.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gated_kernels.common.interpreter import rounded
from gated_kernels.common.tiles import dot, load, load_again, store, store_vector
from gated_kernels.gla.fp32_kernels import is_after_start, is_before_end, is_pair, is_to_middle
from gated_kernels.gla.state_scan import queries_of, starts, stops, sum_at, sums_at


@triton.jit
def _sum_from(x, C: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr):
    """[C, BF] the sums over a token and all after it. All 24 bits of x count, because large terms cancel."""
    after = (tl.arange(0, C)[None, :] >= tl.arange(0, C)[:, None]).to(tl.float32)
    coarse = rounded(x, D)
    x -= coarse.to(tl.float32)
    fine = rounded(x, D)
    sums = dot(after, x - fine.to(tl.float32), None, D, PRECISION)
    sums = dot(after, fine, sums, D, PRECISION)
    return dot(after, coarse, sums, D, PRECISION)


@triton.jit
def is_readable(bounds, chunk, i, EXCLUSIVE: tl.constexpr, TRANSPOSED: tl.constexpr, C: tl.constexpr):
    """[t, s], or [s, t] if TRANSPOSED: whether t reads what s writes."""
    row = i[:, None]
    column = i[None, :]
    if TRANSPOSED:
        readable = column >= row + EXCLUSIVE
        if bounds is not None:
            readable = readable & (column <= stops(bounds, chunk, i, C)[:, None])
    else:
        readable = row >= column + EXCLUSIVE
        if bounds is not None:
            readable = readable & (column >= starts(bounds, chunk, i, C)[:, None])
    return readable


@triton.jit
def decay_to_read(sums, chunk, i, f, F: tl.constexpr, EXCLUSIVE: tl.constexpr, C: tl.constexpr):
    """[C, BF] the decay from the middle of the chunk to what a token reads; at least 1 before the middle."""
    return tl.exp2(sums_at(sums, chunk, i + 1 - EXCLUSIVE, f, F, C))


@triton.jit
def decay_to_middle(sums, chunk, i, f, F: tl.constexpr, C: tl.constexpr):
    """[C, BF] the decay from what a token writes to the middle of the chunk; at least 1 after the middle."""
    return tl.exp2(-sums_at(sums, chunk, i + 1, f, F, C))


@triton.jit
def decay_to_end(sums, chunk, i, f, F: tl.constexpr, C: tl.constexpr):
    """[C, BF] the decay from what a token writes to the state after the chunk."""
    return tl.exp2(sum_at(sums, chunk, C, f, F, C)[None, :] - sums_at(sums, chunk, i + 1, f, F, C))


@triton.jit
def state_at_middle(states, sums, chunk, f, x, F: tl.constexpr, V: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    """[BF, BV] the state before the chunk, decayed to the middle. The decay is a power of 2: exact in bf16."""
    to_middle = tl.exp2(-sum_at(sums, chunk, 0, f, F, C))
    return rounded(load(states, f, F, V, x, V) * to_middle[:, None], D)


@triton.jit
def level_decay(sums, chunk, i, f, level, F: tl.constexpr, EXCLUSIVE: tl.constexpr, C: tl.constexpr):
    """[C, BF] the decay between a token and the middle of its block, which consists of two halves of 2^level tokens.
    Tokens in the second half read, those in the first half write."""
    middle = ((i >> (level + 1)) << (level + 1)) + (1 << level) - 1
    until = sums_at(sums, chunk, middle + 1, f, F, C)
    read = sums_at(sums, chunk, i + 1 - EXCLUSIVE, f, F, C)
    write_mask = sums_at(sums, chunk, i + 1, f, F, C)
    return tl.exp2(tl.where(((i >> level) % 2 == 1)[:, None], read - until, until - write_mask))


@triton.jit
def scores_by_level(
    queries, k, sums, chunk, i, f, rows, G: tl.constexpr, F: tl.constexpr, EXCLUSIVE: tl.constexpr,
    TRANSPOSED: tl.constexpr, C: tl.constexpr, D: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[t, s], or [s, t] if TRANSPOSED: the scores summed over these features, before masking, for gates of any
    strength."""
    row = i[:, None]
    column = i[None, :]
    queries = queries.to(tl.float32)
    keys = load(k, i, rows, G * F, f, F).to(tl.float32)
    scores = tl.where(row == column, tl.sum(queries * keys, 1)[:, None], 0.0)
    for level in tl.range(LEVELS, disable_licm=True):
        decay = level_decay(sums, chunk, i, f, level, F, EXCLUSIVE, C)
        left = rounded(queries * decay, D)
        right = rounded(keys * decay, D)
        if TRANSPOSED:
            part = dot(right, tl.trans(left), None, D, PRECISION)
            scores += tl.where(is_pair(column, row, level), part, 0.0)
        else:
            part = dot(left, tl.trans(right), None, D, PRECISION)
            scores += tl.where(is_pair(row, column, level), part, 0.0)
    return scores


@triton.jit(do_not_specialize=["T"])
def outputs_kernel(
    q, q_lse, k, v, sums, strong, bounds, states, o, T,
    G: tl.constexpr, R: tl.constexpr, F: tl.constexpr, V: tl.constexpr, EXCLUSIVE: tl.constexpr, C: tl.constexpr,
    D: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, TWO: tl.constexpr, HEADS: tl.constexpr,
    LEVELS: tl.constexpr, PRECISION: tl.constexpr, STRONG: tl.constexpr,
):  # fmt: skip
    """A chunk's outputs, for HEADS query heads per program: all of a key-value head's if one tile holds all features.
    TWO: a program handles two tiles of BV columns."""
    N = tl.cdiv(T, C)
    program = tl.program_id(0).to(tl.int64)
    chunk, h0 = program // (R // HEADS), program % (R // HEADS) * HEADS
    if tl.load(strong + chunk) != STRONG:
        return
    n, b, g = chunk % N, chunk // N // G, chunk // N % G
    x = tl.program_id(1) * (1 + TWO) * BV + tl.arange(0, BV)
    f = tl.arange(0, BF)
    i = tl.arange(0, C)
    first = n * C
    rows = (T - first).to(tl.int32)
    row = b * T + first
    q += (row * G * R + g * R + h0) * F
    if q_lse is not None:
        q_lse += row * G * R + g * R + h0
    k += (row * G + g) * F
    v += (row * G + g) * V
    o += (row * G * R + g * R + h0) * V
    states += chunk * F * V
    readable = is_readable(bounds, chunk, i, EXCLUSIVE, False, C)
    values = load(v, i, rows, G * V, x, V)
    if TWO:
        values_2 = load(v, i, rows, G * V, BV + x, V)
    if F <= BF:
        if not STRONG:
            right = rounded(load(k, i, rows, G * F, f, F) * decay_to_middle(sums, chunk, i, f, F, C), D)
        read = decay_to_read(sums, chunk, i, f, F, EXCLUSIVE, C)
        before = state_at_middle(states, sums, chunk, f, x, F, V, C, D)
        if TWO:
            before_2 = state_at_middle(states, sums, chunk, f, BV + x, F, V, C, D)
    for r in tl.range(HEADS, disable_licm=True):
        scores = tl.zeros((C, C), tl.float32)
        outputs = tl.zeros((C, BV), tl.float32)
        if TWO:
            outputs_2 = tl.zeros((C, BV), tl.float32)
        for f0 in range(0, F, BF):
            if F > BF:
                read = decay_to_read(sums, chunk, i, f0 + f, F, EXCLUSIVE, C)
            queries = queries_of(q, q_lse, r, i, rows, G * R, f0 + f, F, BF)
            left = rounded(queries * read, D)
            if STRONG:
                scores += scores_by_level(
                    queries, k, sums, chunk, i, f0 + f, rows, G, F, EXCLUSIVE, False, C, D, LEVELS, PRECISION
                )  # fmt: skip
            else:
                if F > BF:
                    right = rounded(
                        load(k, i, rows, G * F, f0 + f, F) * decay_to_middle(sums, chunk, i, f0 + f, F, C), D
                    )
                scores = dot(left, tl.trans(right), scores, D, PRECISION)
            if F > BF:
                before = state_at_middle(states, sums, chunk, f0 + f, x, F, V, C, D)
            outputs = dot(left, before, outputs, D, PRECISION)
            if TWO:
                if F > BF:
                    before_2 = state_at_middle(states, sums, chunk, f0 + f, BV + x, F, V, C, D)
                outputs_2 = dot(left, before_2, outputs_2, D, PRECISION)
        if bounds is not None:
            own = (starts(bounds, chunk, i, C) < 0)[:, None]
            outputs = tl.where(own, outputs, 0.0)
            if TWO:
                outputs_2 = tl.where(own, outputs_2, 0.0)
        scores = tl.where(readable, scores, 0.0)
        outputs = dot(scores, values, outputs, D, PRECISION)
        store(o + r * V, outputs, i, rows, G * R * V, x, V)
        if TWO:
            outputs_2 = dot(scores, values_2, outputs_2, D, PRECISION)
            store(o + r * V, outputs_2, i, rows, G * R * V, BV + x, V)


@triton.jit
def dv_kernel(
    q, q_lse, k, sums, strong, bounds, do, dstates, dv, T,
    G: tl.constexpr, R: tl.constexpr, F: tl.constexpr, V: tl.constexpr, EXCLUSIVE: tl.constexpr, C: tl.constexpr,
    D: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
    STRONG: tl.constexpr,
):  # fmt: skip
    """The gradient of a chunk's values, BV columns per program. Scores are computed transposed, as they are needed."""
    N = tl.cdiv(T, C)
    chunk = tl.program_id(0).to(tl.int64)
    if tl.load(strong + chunk) != STRONG:
        return
    n, b, g = chunk % N, chunk // N // G, chunk // N % G
    x = tl.program_id(1) * BV + tl.arange(0, BV)
    f = tl.arange(0, BF)
    i = tl.arange(0, C)
    first = n * C
    rows = (T - first).to(tl.int32)
    row = b * T + first
    q += (row * G * R + g * R) * F
    if q_lse is not None:
        q_lse += row * G * R + g * R
    k += (row * G + g) * F
    do += (row * G * R + g * R) * V
    dv += (row * G + g) * V
    dstates += chunk * F * V
    readable = is_readable(bounds, chunk, i, EXCLUSIVE, True, C)
    dvalues = tl.zeros((C, BV), tl.float32)
    for f0 in range(0, F, 64):
        few = f0 + tl.arange(0, 64)
        late = load(k, i, rows, G * F, few, F) * decay_to_end(sums, chunk, i, few, F, C)
        dafter = load(dstates, few, F, V, x, V)
        dvalues = dot(late, dafter, dvalues, D, PRECISION)
    if bounds is not None:
        dvalues = tl.where((stops(bounds, chunk, i, C) == C)[:, None], dvalues, 0.0)
    if F <= BF:
        if not STRONG:
            right = rounded(load(k, i, rows, G * F, f, F) * decay_to_middle(sums, chunk, i, f, F, C), D)
        read = decay_to_read(sums, chunk, i, f, F, EXCLUSIVE, C)
    for r in tl.range(R, disable_licm=True):
        scores = tl.zeros((C, C), tl.float32)
        if STRONG:
            for f0 in range(0, F, BF):
                queries = queries_of(q, q_lse, r, i, rows, G * R, f0 + f, F, BF)
                scores += scores_by_level(
                    queries, k, sums, chunk, i, f0 + f, rows, G, F, EXCLUSIVE, True, C, D, LEVELS, PRECISION
                )  # fmt: skip
        elif F <= BF:
            queries = queries_of(q, q_lse, r, i, rows, G * R, f, F, BF)
            scores = dot(right, tl.trans(rounded(queries * read, D)), scores, D, PRECISION)
        else:
            for f0 in range(0, F, BF):
                right = rounded(load(k, i, rows, G * F, f0 + f, F) * decay_to_middle(sums, chunk, i, f0 + f, F, C), D)
                queries = queries_of(q, q_lse, r, i, rows, G * R, f0 + f, F, BF)
                left = rounded(queries * decay_to_read(sums, chunk, i, f0 + f, F, EXCLUSIVE, C), D)
                scores = dot(right, tl.trans(left), scores, D, PRECISION)
        douts = load(do + r * V, i, rows, G * R * V, x, V)
        dvalues = dot(tl.where(readable, scores, 0.0), douts, dvalues, D, PRECISION)
    store(dv, dvalues, i, rows, G * V, x, V)


@triton.jit
def dqk_kernel(
    q, q_lse, k, v, sums, strong, bounds, do, states, dstates, dq, dlse, dk, dlog_a, T,
    G: tl.constexpr, R: tl.constexpr, F: tl.constexpr, V: tl.constexpr, EXCLUSIVE: tl.constexpr, C: tl.constexpr,
    D: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
    STRONG: tl.constexpr,
):  # fmt: skip
    """The gradients of a chunk's queries, keys and gates, BF features per program.

    A gate's gradient is the sum over all pairs of tokens that it lies between. It is computed as the sum over reads by
    tokens after the gate, minus the sum over reads from tokens after it. Pairs that are in both sums consist of the
    same rounded products, so they cancel to fp32 precision. Next to strong gates even that is too inexact, so there the
    pairs are summed for each level.

    For queries with a log-sum-exp, `dlse` [B, blocks of F, T, H] receives these features' part of its gradient.
    """
    N = tl.cdiv(T, C)
    blocks: tl.constexpr = (F + BF - 1) // BF
    program = tl.program_id(0).to(tl.int64)
    chunk, block = program // blocks, program % blocks
    if tl.load(strong + chunk) != STRONG:
        return
    n, b, g = chunk % N, chunk // N // G, chunk // N % G
    f = block.to(tl.int32) * BF + tl.arange(0, BF)
    i = tl.arange(0, C)
    row_ = i[:, None]
    column = i[None, :]
    first = n * C
    rows = (T - first).to(tl.int32)
    row = b * T + first
    q += (row * G * R + g * R) * F
    if q_lse is not None:
        q_lse += row * G * R + g * R
        dlse += ((b * blocks + block) * T + first) * G * R + g * R
    k += (row * G + g) * F
    v += (row * G + g) * V
    do += (row * G * R + g * R) * V
    dq += (row * G * R + g * R) * F
    dk += (row * G + g) * F
    dlog_a += (row * G + g) * F
    states += chunk * F * V
    dstates += chunk * F * V
    if not STRONG:
        right = rounded(load(k, i, rows, G * F, f, F) * decay_to_middle(sums, chunk, i, f, F, C), D)
    if V <= BV:
        x = tl.arange(0, BV)
        values = load(v, i, rows, G * V, x, V)
        before = state_at_middle(states, sums, chunk, f, x, F, V, C, D)
    dkeys = tl.zeros((C, BF), tl.float32)
    if STRONG:
        dgates = tl.zeros((C, BF), tl.float32)
    else:
        reads = tl.zeros((C, BF), tl.float32)
    for r in tl.range(R, disable_licm=True):
        if not STRONG:
            queries = queries_of(q, q_lse, r, i, rows, G * R, f, F, BF)
            left = rounded(queries * decay_to_read(sums, chunk, i, f, F, EXCLUSIVE, C), D)
        if V <= BV:
            douts = load(do + r * V, i, rows, G * R * V, x, V)
            dscores = dot(douts, tl.trans(values), None, D, PRECISION)
            dscores_t = dot(values, tl.trans(douts), None, D, PRECISION)
            dqueries = dot(douts, tl.trans(before), None, D, PRECISION)
        else:
            dscores = tl.zeros((C, C), tl.float32)
            dscores_t = tl.zeros((C, C), tl.float32)
            dqueries = tl.zeros((C, BF), tl.float32)
            for v0 in range(0, V, BV):
                x = v0 + tl.arange(0, BV)
                values = load(v, i, rows, G * V, x, V)
                douts = load(do + r * V, i, rows, G * R * V, x, V)
                before = state_at_middle(states, sums, chunk, f, x, F, V, C, D)
                dscores = dot(douts, tl.trans(values), dscores, D, PRECISION)
                dscores_t = dot(values, tl.trans(douts), dscores_t, D, PRECISION)
                dqueries = dot(douts, tl.trans(before), dqueries, D, PRECISION)
        if bounds is not None:
            dqueries = tl.where((starts(bounds, chunk, i, C) < 0)[:, None], dqueries, 0.0)
        # dscores_t, [s, t], is computed on its own because transposing an accumulator costs more.
        dscores = rounded(tl.where(is_readable(bounds, chunk, i, EXCLUSIVE, False, C), dscores, 0.0), D)
        dscores_t = rounded(tl.where(is_readable(bounds, chunk, i, EXCLUSIVE, True, C), dscores_t, 0.0), D)
        if STRONG:
            dqueries *= decay_to_read(sums, chunk, i, f, F, EXCLUSIVE, C)
            queries = queries_of(q, q_lse, r, i, rows, G * R, f, F, BF)
            after = is_after_start(column, row_, EXCLUSIVE).to(tl.float32)
            dgates = dot(after, dqueries * queries, dgates, D, PRECISION)
            # A token reads itself without decay, so this stays out of the gates' gradients, where it would only cancel.
            dself = tl.sum(tl.where(row_ == column, dscores.to(tl.float32), 0.0), 1)[:, None]
            dkeys += dself * queries
            dqueries += dself * load_again(k, i, rows, G * F, f, F)
            for level in tl.range(LEVELS, disable_licm=True):
                decay = level_decay(sums, chunk, i, f, level, F, EXCLUSIVE, C)
                keys = load_again(k, i, rows, G * F, f, F)
                pair = tl.where(is_pair(row_, column, level), dscores, 0.0)
                part = dot(pair, keys * decay, None, D, PRECISION) * decay
                dqueries += part
                queries = queries_of(q, q_lse, r, i, rows, G * R, f, F, BF, True)
                between = part * queries
                pair = tl.where(is_pair(column, row_, level), dscores_t, 0.0)
                part = dot(pair, queries * decay, None, D, PRECISION) * decay
                dkeys += part
                between += part * keys
                inside = is_to_middle(column, row_, level, EXCLUSIVE).to(tl.float32)
                dgates = dot(inside, between, dgates, D, PRECISION)
        else:
            dqueries = dot(dscores, right, dqueries, D, PRECISION)
            dkeys = dot(dscores_t, left, dkeys, D, PRECISION)
            if q_lse is None:
                reads += dqueries * left.to(tl.float32)
                at = sums + chunk * (C + 1) * F
                dqueries *= tl.exp2(load_again(at, i + 1 - EXCLUSIVE, C + 1, F, f, F))
            else:  # the gradient with respect to log(queries) is the same with and without the decay
                dqueries *= left.to(tl.float32)
                reads += dqueries
        if q_lse is not None:
            if STRONG:
                dqueries *= queries_of(q, q_lse, r, i, rows, G * R, f, F, BF, True)
            store_vector(dlse + r, -tl.sum(dqueries, 1), i, rows, G * R)
        store(dq + r * F, dqueries, i, rows, G * R * F, f, F)

    late = tl.zeros((C, BF), tl.float32)  # gradient of what the keys write to the state after the chunk
    through = tl.zeros((BF,), tl.float32)
    for v0 in range(0, V, 64):
        y = v0 + tl.arange(0, 64)
        state = load_again(states, f, F, V, y, V)
        dafter = load(dstates, f, F, V, y, V)
        values_y = load_again(v, i, rows, G * V, y, V)
        late = dot(values_y, tl.trans(dafter), late, D, PRECISION)
        through += tl.sum(state.to(tl.float32) * dafter.to(tl.float32), 1)
    end = sum_at(sums, chunk, C, f, F, C)
    through *= tl.exp2(end - sum_at(sums, chunk, 0, f, F, C))
    if bounds is not None:
        late = tl.where((stops(bounds, chunk, i, C) == C)[:, None], late, 0.0)
        through = tl.where(starts(bounds, chunk, C - 1, C) < 0, through, 0.0)
    if STRONG:
        late *= decay_to_end(sums, chunk, i, f, F, C)
        dkeys += late
        late *= load_again(k, i, rows, G * F, f, F)
        dgates = dot(is_before_end(column, row_).to(tl.float32), late, dgates, D, PRECISION)
    else:
        right = rounded(load_again(k, i, rows, G * F, f, F) * decay_to_middle(sums, chunk, i, f, F, C), D)
        late *= tl.exp2(end)[None, :]
        through += tl.sum(late * right.to(tl.float32), 0)
        dkeys += late
        dgates = _sum_from(reads - dkeys * right.to(tl.float32), C, D, PRECISION)
        if EXCLUSIVE:
            dgates -= reads
        dkeys *= decay_to_middle(sums, chunk, i, f, F, C)
    store(dk, dkeys, i, rows, G * F, f, F)
    store(dlog_a, dgates + through[None, :], i, rows, G * F, f, F)
