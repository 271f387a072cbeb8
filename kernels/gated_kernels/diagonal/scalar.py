"""The diagonal recurrence with one gate a key-value head, or none, in Triton kernels.

With one gate for all features, the decay from what token s writes to what token t reads is exp(x_t - y_s), where x and
y are sums of the chunk's gates up to there, in fp64: differences of sums of up to 64 gates keep all digits that fp32
has. Gates below -1000 are -1000, which is a decay of 0 in fp32 all the same, and so is the start of a segment. Hence
a chunk's scores are one matrix product of queries and keys as they are, times a matrix of decays; what enters and
leaves through the states is scaled by rows. The gradient of a gate is the sum of dscore * score over the pairs around
it, by products with zeros and ones, so that nothing cancels.

Values and their like are padded to rows of whole 16 bytes. Their last few columns (a column of ones is the usual case)
are a narrow tile of their own beside the last whole one. The R query heads of a key-value head share its tiles.

Long sequences of few heads are cut into P parts: all of them run from a state of zeros, then one after another hands
its last state on, and all of them run again.

Shapes: B batch, T tokens, H query heads, G key-value heads, R = H / G, F feature size, V value size, W = V padded, N
chunks, C chunk length. Kernels see BF of the features and BV of the values at a time, and TAIL beside the last of NV.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gated_kernels.diagonal.tiles import PRODUCTS, load, product, store

BF16, FP32 = torch.bfloat16, torch.float32
# By the dtype of the products: tokens of a chunk, and of each kernel the largest BF and BV, then what it is compiled
# with. Features beyond BF are taken in a loop, or by another program.
CHUNK = {BF16: 64, FP32: 32}
BLOCKS = {
    "states": {BF16: (64, 64, 4, 3), FP32: (64, 32, 4, 2)},
    "outputs": {BF16: (128, 128, 4, 1), FP32: (32, 64, 4, 1)},
    "dstates": {BF16: (64, 64, 4, 3), FP32: (64, 32, 4, 2)},
    "dv": {BF16: (128, 128, 4, 1), FP32: (32, 64, 4, 1)},
    "dqk": {BF16: (64, 128, 4, 1), FP32: (32, 64, 4, 1)},
}
LOOPED = 64  # BF of outputs and dv where they loop over features
PROGRAMS = 528  # of a pass over the states: enough to fill a GPU
LEAST = 16  # chunks of a part


@triton.jit
def _store_sums(to, sums, C: tl.constexpr):
    """In two fp32 numbers: rounded, and what was lost."""
    rounded = sums.to(tl.float32)
    tl.store(to, rounded)
    tl.store(to + C, (sums - rounded.to(tl.float64)).to(tl.float32))


@triton.jit
def sums_kernel(
    log_a, segment, read, write, T, G: tl.constexpr, EXCLUSIVE: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """A chunk's sums of gates: up to what each token reads, and up to what it writes."""
    N = tl.cdiv(T, C)
    program = tl.program_id(0).to(tl.int64)
    n, b, g = program % N, program // N // G, program // N % G
    i = tl.arange(0, C)
    t = n * C + i
    gates = tl.zeros((C,), tl.float64)
    if log_a is not None:
        gates = tl.load(log_a + (b * T + t) * G + g, mask=t < T, other=0.0).to(tl.float64)
        gates = tl.maximum(gates, -1000.0)
    sums = gates
    if segment is not None:
        now = tl.load(segment + b * T + t, mask=t < T, other=0)
        before = tl.load(segment + b * T + t - 1, mask=(t > 0) & (t < T), other=0)
        sums += tl.where((t > 0) & (t < T) & (now != before), -1000.0, 0.0).to(tl.float64)
    sums = tl.cumsum(sums, 0)
    _store_sums(write + program * 2 * C + i, sums, C)
    if EXCLUSIVE:
        _store_sums(read + program * 2 * C + i, sums - gates, C)


@triton.jit
def _decays(
    read, write, at, EXCLUSIVE: tl.constexpr, TRANSPOSED: tl.constexpr, C: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """[t, s], or [s, t], the decay of what s writes until t reads it, 0 where t does not; sums of a chunk are `at`."""
    i = tl.arange(0, C)
    if TRANSPOSED:
        t = i[None, :]
        s = i[:, None]
    else:
        t = i[:, None]
        s = i[None, :]
    decays = (t >= s + EXCLUSIVE).to(tl.float32)
    if write is not None:
        lost = tl.load(read + at + C + t) - tl.load(write + at + C + s)
        decays *= tl.exp(tl.minimum(tl.load(read + at + t) - tl.load(write + at + s) + lost, 0.0))
    if D == tl.bfloat16:  # noqa: SIM300
        decays = decays.to(tl.float16)  # half the registers, still finer than what it is multiplied with
    return decays


@triton.jit
def _from_start(read, at, i):
    """The decay from the state before the chunk to what token i reads."""
    return tl.exp(tl.load(read + at + i))


@triton.jit
def _to_end(write, at, i, C: tl.constexpr):
    """The decay of what token i writes to the state after the chunk."""
    lost = tl.load(write + at + 2 * C - 1) - tl.load(write + at + C + i)
    return tl.exp(tl.load(write + at + C - 1) - tl.load(write + at + i) + lost)


@triton.jit
def _total(write, at, C: tl.constexpr):
    """The decay of the whole chunk."""
    return tl.exp(tl.load(write + at + C - 1))


@triton.jit
def _tail(block, NV: tl.constexpr, BV: tl.constexpr, TAIL: tl.constexpr, W: tl.constexpr):
    """The columns beside the last whole block; none, all beyond the padding, of another."""
    return tl.where(block == NV - 1, NV * BV, W) + tl.arange(0, TAIL)


@triton.jit
def states_kernel(
    k, v, write, state, states, last, T, PART,
    G: tl.constexpr, F: tl.constexpr, V: tl.constexpr, W: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    BF: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr, TAIL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state before every chunk of a part of PART chunks, and the last one; a program per tile of a head's state."""
    N = tl.cdiv(T, C)
    parts = tl.cdiv(N, PART)
    program = tl.program_id(0).to(tl.int64)
    head, part = program // parts, program % parts
    b, g = head // G, head % G
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    x = tl.program_id(2) * BV + tl.arange(0, BV)
    i = tl.arange(0, C)
    now = tl.zeros((BF, BV), tl.float32)
    if state is not None:
        now = load(state + program * F * V, f, F, V, x, V)
    if TAIL:
        y = _tail(tl.program_id(2), NV, BV, TAIL, W)
        now_y = tl.zeros((BF, TAIL), tl.float32)
        if state is not None:
            now_y = load(state + program * F * V, f, F, V, y, V)
    for n in range(part * PART, tl.minimum(N, (part + 1) * PART)):
        to = states
        if states is not None:
            to = states + (head * N + n) * F * W
            store(to, now, f, F, W, x, W)
            if TAIL:
                store(to, now_y, f, F, W, y, W)
        rows = T - n * C
        row = b * T + n * C
        keys = load(k + (row * G + g) * F, i, rows, G * F, f, F).to(D)
        values = load(v + (row * G + g) * W, i, rows, G * W, x, W)
        if write is not None:
            at = (head * N + n) * 2 * C
            to_end = _to_end(write, at, i, C)[:, None]
            total = _total(write, at, C)
            values = values * to_end
            now *= total
        now = product(tl.trans(keys), values, now, D, PRECISION)
        if TAIL:
            values_y = load(v + (row * G + g) * W, i, rows, G * W, y, W)
            if write is not None:
                values_y = values_y * to_end
                now_y *= total
            now_y = product(tl.trans(keys), values_y, now_y, D, PRECISION)
    if last is not None:
        store(last + program * F * V, now, f, F, V, x, V)
        if TAIL:
            store(last + program * F * V, now_y, f, F, V, y, V)


@triton.jit
def dstates_kernel(
    q, do, read, write, dlast, dstates, dstate, T, PART,
    G: tl.constexpr, R: tl.constexpr, F: tl.constexpr, V: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
    D: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr, TAIL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of the state after every chunk of a part, and of its first one; as `states_kernel`, from the end."""
    N = tl.cdiv(T, C)
    parts = tl.cdiv(N, PART)
    program = tl.program_id(0).to(tl.int64)
    head, part = program // parts, program % parts
    b, g = head // G, head % G
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    x = tl.program_id(2) * BV + tl.arange(0, BV)
    i = tl.arange(0, C)
    dnow = tl.zeros((BF, BV), tl.float32)
    if dlast is not None:
        dnow = load(dlast + program * F * V, f, F, V, x, V)
    if TAIL:
        y = _tail(tl.program_id(2), NV, BV, TAIL, W)
        dnow_y = tl.zeros((BF, TAIL), tl.float32)
        if dlast is not None:
            dnow_y = load(dlast + program * F * V, f, F, V, y, V)
    chunks = tl.minimum(N, (part + 1) * PART) - part * PART
    for step in range(chunks * R):  # one loop, so that what the next chunk needs is on its way
        n = part * PART + chunks - 1 - step // R
        r = step % R
        if dstates is not None:
            to = dstates + (head * N + n) * F * W
            if r == 0:
                store(to, dnow, f, F, W, x, W)
                if TAIL:
                    store(to, dnow_y, f, F, W, y, W)
        rows = T - n * C
        row = (b * T + n * C) * G * R + g * R + r
        queries = load(q + row * F, i, rows, G * R * F, f, F).to(D)
        douts = load(do + row * W, i, rows, G * R * W, x, W)
        if write is not None:
            at = (head * N + n) * 2 * C
            start = _from_start(read, at, i)[:, None]
            total = tl.where(r == 0, _total(write, at, C), 1.0)
            douts = douts * start
            dnow *= total
        dnow = product(tl.trans(queries), douts, dnow, D, PRECISION)
        if TAIL:
            douts_y = load(do + row * W, i, rows, G * R * W, y, W)
            if write is not None:
                douts_y = douts_y * start
                dnow_y *= total
            dnow_y = product(tl.trans(queries), douts_y, dnow_y, D, PRECISION)
    if dstate is not None:
        store(dstate + program * F * V, dnow, f, F, V, x, V)
        if TAIL:
            store(dstate + program * F * V, dnow_y, f, F, V, y, V)


@triton.jit
def carry_kernel(
    write, state, ends, last, N, PART, SIZE: tl.constexpr, C: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
    REVERSED: tl.constexpr,
):  # fmt: skip
    """Every part's last state becomes the one before it, and the last of all; a program per piece of a head's state."""
    head = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, CHUNKS)
    parts = tl.cdiv(N, PART)
    now = tl.load(state + head * SIZE + e, mask=e < SIZE, other=0.0)
    for step in range(parts):
        part = step
        if REVERSED:
            part = parts - 1 - step
        at = ends + (head * parts + part) * SIZE + e
        end = tl.load(at, mask=e < SIZE, other=0.0)
        tl.store(at, now, mask=e < SIZE)
        if write is not None:
            chunk = part * PART + n
            sums = tl.load(write + (head * N + chunk) * 2 * C + C - 1, mask=(n < PART) & (chunk < N), other=0.0)
            now *= tl.exp(tl.sum(sums, 0))
        now += end
    tl.store(last + head * SIZE + e, now, mask=e < SIZE)


@triton.jit
def outputs_kernel(
    q, k, v, read, write, states, o, T,
    G: tl.constexpr, R: tl.constexpr, F: tl.constexpr, W: tl.constexpr, EXCLUSIVE: tl.constexpr, C: tl.constexpr,
    D: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr, TAIL: tl.constexpr, HEADS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A chunk's outputs of HEADS query heads a program: all of a key-value head when one block holds the features."""
    N = tl.cdiv(T, C)
    program = tl.program_id(0).to(tl.int64)
    chunk, h0 = program // (R // HEADS), program % (R // HEADS) * HEADS
    n, b, g = chunk % N, chunk // N // G, chunk // N % G
    x = tl.program_id(1) * BV + tl.arange(0, BV)
    if TAIL:
        y = _tail(tl.program_id(1), NV, BV, TAIL, W)
    i = tl.arange(0, C)
    rows = (T - n * C).to(tl.int32)
    row = b * T + n * C
    decays = _decays(read, write, chunk * 2 * C, EXCLUSIVE, False, C, D)
    f = tl.arange(0, BF)
    values = load(v + (row * G + g) * W, i, rows, G * W, x, W)
    if TAIL:
        values_y = load(v + (row * G + g) * W, i, rows, G * W, y, W)
    if F <= BF:
        keys = load(k + (row * G + g) * F, i, rows, G * F, f, F)
        before = load(states + chunk * F * W, f, F, W, x, W)
        if TAIL:
            before_y = load(states + chunk * F * W, f, F, W, y, W)
    for r in tl.range(HEADS, disable_licm=True):
        h = g * R + h0 + r
        scores = tl.zeros((C, C), tl.float32)
        outputs = tl.zeros((C, BV), tl.float32)
        if TAIL:
            outputs_y = tl.zeros((C, TAIL), tl.float32)
        if F <= BF:
            queries = load(q + (row * G * R + h) * F, i, rows, G * R * F, f, F)
            scores = product(queries, tl.trans(keys.to(D)), scores, D, PRECISION)
            outputs = product(queries, before, outputs, D, PRECISION)
            if TAIL:
                outputs_y = product(queries, before_y, outputs_y, D, PRECISION)
        else:
            for f0 in range(0, F, BF):
                queries = load(q + (row * G * R + h) * F, i, rows, G * R * F, f0 + f, F)
                keys = load(k + (row * G + g) * F, i, rows, G * F, f0 + f, F)
                before = load(states + chunk * F * W, f0 + f, F, W, x, W)
                scores = product(queries, tl.trans(keys.to(D)), scores, D, PRECISION)
                outputs = product(queries, before, outputs, D, PRECISION)
                if TAIL:
                    before_y = load(states + chunk * F * W, f0 + f, F, W, y, W)
                    outputs_y = product(queries, before_y, outputs_y, D, PRECISION)
        if write is not None:
            start = _from_start(read, chunk * 2 * C, i)[:, None]
            outputs *= start
            if TAIL:
                outputs_y *= start
        scores = (scores * decays).to(D)
        outputs = product(scores, values, outputs, D, PRECISION)
        store(o + (row * G * R + h) * W, outputs, i, rows, G * R * W, x, W)
        if TAIL:
            outputs_y = product(scores, values_y, outputs_y, D, PRECISION)
            store(o + (row * G * R + h) * W, outputs_y, i, rows, G * R * W, y, W)


@triton.jit
def dv_kernel(
    q, k, v, read, write, do, dstates, dv, dpairs, B, T,
    G: tl.constexpr, R: tl.constexpr, F: tl.constexpr, W: tl.constexpr, EXCLUSIVE: tl.constexpr, C: tl.constexpr,
    D: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr, TAIL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of BV of a chunk's values a program, and these values' part of the gates' by pairs in the chunk."""
    N = tl.cdiv(T, C)
    chunk = tl.program_id(0).to(tl.int64)
    n, b, g = chunk % N, chunk // N // G, chunk // N % G
    x = tl.program_id(1) * BV + tl.arange(0, BV)
    if TAIL:
        y = _tail(tl.program_id(1), NV, BV, TAIL, W)
    f = tl.arange(0, BF)
    i = tl.arange(0, C)
    rows = (T - n * C).to(tl.int32)
    row = b * T + n * C
    if F <= BF:
        keys = load(k + (row * G + g) * F, i, rows, G * F, f, F)
    dvalues = tl.zeros((C, BV), tl.float32)
    if TAIL:
        dvalues_y = tl.zeros((C, TAIL), tl.float32)
    for f0 in range(0, F, BF):
        if F > BF:
            keys = load(k + (row * G + g) * F, i, rows, G * F, f0 + f, F)
        dafter = load(dstates + chunk * F * W, f0 + f, F, W, x, W)
        dvalues = product(keys, dafter, dvalues, D, PRECISION)
        if TAIL:
            dafter_y = load(dstates + chunk * F * W, f0 + f, F, W, y, W)
            dvalues_y = product(keys, dafter_y, dvalues_y, D, PRECISION)
    if write is not None:
        to_end = _to_end(write, chunk * 2 * C, i, C)[:, None]
        dvalues *= to_end
        if TAIL:
            dvalues_y *= to_end
    decays = _decays(read, write, chunk * 2 * C, EXCLUSIVE, True, C, D)
    if dpairs is not None:
        values = load(v + (row * G + g) * W, i, rows, G * W, x, W)
        if TAIL:
            values_y = load(v + (row * G + g) * W, i, rows, G * W, y, W)
        pairs = tl.zeros((C, C), tl.float32)  # [s, t], score times gradient
    for r in tl.range(R, disable_licm=True):
        h = g * R + r
        scores = tl.zeros((C, C), tl.float32)
        for f0 in range(0, F, BF):
            queries = load(q + (row * G * R + h) * F, i, rows, G * R * F, f0 + f, F)
            if F > BF:
                keys = load(k + (row * G + g) * F, i, rows, G * F, f0 + f, F)
            scores = product(keys, tl.trans(queries.to(D)), scores, D, PRECISION)
        scores *= decays
        douts = load(do + (row * G * R + h) * W, i, rows, G * R * W, x, W).to(D)
        dvalues = product(scores, douts, dvalues, D, PRECISION)
        if TAIL:
            douts_y = load(do + (row * G * R + h) * W, i, rows, G * R * W, y, W).to(D)
            dvalues_y = product(scores, douts_y, dvalues_y, D, PRECISION)
        if dpairs is not None:
            dscores = product(values, tl.trans(douts), tl.zeros((C, C), tl.float32), D, PRECISION)
            if TAIL:
                dscores = product(values_y, tl.trans(douts_y), dscores, D, PRECISION)
            pairs += scores * dscores
    store(dv + (row * G + g) * W, dvalues, i, rows, G * W, x, W)
    if TAIL:
        store(dv + (row * G + g) * W, dvalues_y, i, rows, G * W, y, W)
    if dpairs is not None:
        u = i[:, None]
        column = i[None, :]
        around = product((column < u).to(tl.float32), pairs, None, tl.float32, PRECISION)  # [u, t], of all s before u
        dgates = tl.sum(tl.where(column >= u + EXCLUSIVE, around, 0.0), 1)
        tl.store(dpairs + (tl.program_id(1) * B * N * G + chunk) * C + i, dgates)


@triton.jit
def _meet_states(values, before, dafter, dkeys, through, D: tl.constexpr, PRECISION: tl.constexpr):
    """Gradients by some columns of the states: of keys, and of the features of the state that passes the chunk."""
    through += tl.sum(before.to(tl.float32) * dafter.to(tl.float32), 1)
    return product(values, tl.trans(dafter), dkeys, D, PRECISION), through


@triton.jit
def _meet(douts, values, before, dqueries, dscores, dscores_t, D: tl.constexpr, PRECISION: tl.constexpr):
    """Gradients by some columns of the outputs. dscores_t is made anew: to turn an accumulator over costs more."""
    douts = douts.to(D)
    values = values.to(D)
    dqueries = product(douts, tl.trans(before), dqueries, D, PRECISION)
    dscores = product(douts, tl.trans(values), dscores, D, PRECISION)
    return dqueries, dscores, product(values, tl.trans(douts), dscores_t, D, PRECISION)


@triton.jit
def dqk_kernel(
    q, k, v, read, write, do, states, dstates, dq, dk, dread, dwrite, dtotal, B, T,
    G: tl.constexpr, R: tl.constexpr, F: tl.constexpr, W: tl.constexpr, EXCLUSIVE: tl.constexpr, C: tl.constexpr,
    D: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr, TAIL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of BF features of a chunk's queries and keys a program, and these features' part of those of the
    decays from the state before, to the one after and of the chunk.
    """
    N = tl.cdiv(T, C)
    blocks: tl.constexpr = (F + BF - 1) // BF
    program = tl.program_id(0).to(tl.int64)
    chunk, block = program // blocks, program % blocks
    n, b, g = chunk % N, chunk // N // G, chunk // N % G
    f = block.to(tl.int32) * BF + tl.arange(0, BF)
    i = tl.arange(0, C)
    rows = (T - n * C).to(tl.int32)
    row = b * T + n * C
    keys = load(k + (row * G + g) * F, i, rows, G * F, f, F)
    dkeys = tl.zeros((C, BF), tl.float32)
    through = tl.zeros((BF,), tl.float32)  # of the states that pass the chunk
    if NV == 1:
        x = tl.arange(0, BV)
        values = load(v + (row * G + g) * W, i, rows, G * W, x, W)
        before = load(states + chunk * F * W, f, F, W, x, W)
        dafter = load(dstates + chunk * F * W, f, F, W, x, W)
        dkeys, through = _meet_states(values, before, dafter, dkeys, through, D, PRECISION)
    else:
        for v0 in range(0, NV * BV, BV):
            x = v0 + tl.arange(0, BV)
            values = load(v + (row * G + g) * W, i, rows, G * W, x, W)
            before = load(states + chunk * F * W, f, F, W, x, W)
            dafter = load(dstates + chunk * F * W, f, F, W, x, W)
            dkeys, through = _meet_states(values, before, dafter, dkeys, through, D, PRECISION)
    if TAIL:
        y = NV * BV + tl.arange(0, TAIL)
        values_y = load(v + (row * G + g) * W, i, rows, G * W, y, W)
        before_y = load(states + chunk * F * W, f, F, W, y, W)
        dafter_y = load(dstates + chunk * F * W, f, F, W, y, W)
        dkeys, through = _meet_states(values_y, before_y, dafter_y, dkeys, through, D, PRECISION)
    if write is not None:
        dkeys *= _to_end(write, chunk * 2 * C, i, C)[:, None]
        start = _from_start(read, chunk * 2 * C, i)
    if dread is not None:
        part = (block * B * N * G + chunk) * C
        tl.store(dwrite + part + i, tl.sum(dkeys * keys.to(tl.float32), 1))
        tl.store(dtotal + block * B * N * G + chunk, tl.sum(through) * _total(write, chunk * 2 * C, C))
        dreads = tl.zeros((C,), tl.float32)
    decays = _decays(read, write, chunk * 2 * C, EXCLUSIVE, False, C, D)
    decays_t = _decays(read, write, chunk * 2 * C, EXCLUSIVE, True, C, D)
    for r in tl.range(R, disable_licm=True):
        h = g * R + r
        queries = load(q + (row * G * R + h) * F, i, rows, G * R * F, f, F)
        dqueries = tl.zeros((C, BF), tl.float32)
        dscores = tl.zeros((C, C), tl.float32)
        dscores_t = tl.zeros((C, C), tl.float32)
        if NV == 1:
            douts = load(do + (row * G * R + h) * W, i, rows, G * R * W, x, W)
            dqueries, dscores, dscores_t = _meet(
                douts, values, before, dqueries, dscores, dscores_t, D, PRECISION
            )  # fmt: skip
        else:
            for v0 in range(0, NV * BV, BV):
                x = v0 + tl.arange(0, BV)
                douts = load(do + (row * G * R + h) * W, i, rows, G * R * W, x, W)
                values = load(v + (row * G + g) * W, i, rows, G * W, x, W)
                before = load(states + chunk * F * W, f, F, W, x, W)
                dqueries, dscores, dscores_t = _meet(
                    douts, values, before, dqueries, dscores, dscores_t, D, PRECISION
                )  # fmt: skip
        if TAIL:
            douts_y = load(do + (row * G * R + h) * W, i, rows, G * R * W, y, W)
            dqueries, dscores, dscores_t = _meet(
                douts_y, values_y, before_y, dqueries, dscores, dscores_t, D, PRECISION
            )  # fmt: skip
        if write is not None:
            dqueries *= start[:, None]
        if dread is not None:
            dreads += tl.sum(dqueries * queries.to(tl.float32), 1)
        dqueries = product(dscores * decays, keys, dqueries, D, PRECISION)
        dkeys = product(dscores_t * decays_t, queries, dkeys, D, PRECISION)
        store(dq + (row * G * R + h) * F, dqueries, i, rows, G * R * F, f, F)
    store(dk + (row * G + g) * F, dkeys, i, rows, G * F, f, F)
    if dread is not None:
        tl.store(dread + part + i, dreads)


@triton.jit
def dgates_kernel(
    dread, dwrite, dtotal, dpairs, dlog_a, B, T, G: tl.constexpr, EXCLUSIVE: tl.constexpr, C: tl.constexpr,
    OF_F: tl.constexpr, OF_V: tl.constexpr,
):  # fmt: skip
    """The gradients of a chunk's gates, from the parts of all blocks of features and of values."""
    N = tl.cdiv(T, C)
    chunk = tl.program_id(0).to(tl.int64)
    n, b, g = chunk % N, chunk // N // G, chunk // N % G
    i = tl.arange(0, C)
    u = i[:, None]
    token = i[None, :]
    dgates = tl.zeros((C,), tl.float32)
    for block in range(OF_F):
        part = block * B * N * G + chunk
        dreads = tl.where(token >= u + EXCLUSIVE, tl.load(dread + part * C + token), 0.0)
        dwrites = tl.where(token < u, tl.load(dwrite + part * C + token), 0.0)
        dgates += tl.sum(dreads + dwrites, 1) + tl.load(dtotal + part)
    for block in range(OF_V):
        dgates += tl.load(dpairs + (block * B * N * G + chunk) * C + i)
    t = n * C + i
    tl.store(dlog_a + (b * T + t) * G + g, dgates.to(dlog_a.dtype.element_ty), mask=t < T)


@triton.jit
def pad_kernel(x, padded, rows, V: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Zeros after each row's V numbers, W in all."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    i = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    numbers = load(x + first * V, i, rows - first, V, column, V)
    store(padded + first * W, numbers, i, rows - first, W, column, W)


KERNELS = {
    "states": states_kernel,
    "outputs": outputs_kernel,
    "dstates": dstates_kernel,
    "dv": dv_kernel,
    "dqk": dqk_kernel,
}


def constants(kernel: str, G: int, R: int, F: int, V: int, exclusive: bool, dtype: torch.dtype) -> dict[str, Any]:
    """What a kernel is compiled for and with; fixed by the sizes and the dtype, never searched for."""
    computed_in, precision = PRODUCTS[dtype]
    BF, BV, warps, stages = BLOCKS[kernel][computed_in]
    BF = min(BF, max(16, triton.next_power_of_2(F)))
    BV = min(BV, max(16, triton.next_power_of_2(V + 1) // 2))
    if F > BF and kernel in ("outputs", "dv"):
        BF, stages = min(BF, LOOPED), 3
    rest = V % BV if V > BV else 0
    narrow = 0 < rest <= 32
    found = {
        "G": G,
        "R": R,
        "F": F,
        "V": V,
        "W": row_size(V),
        "EXCLUSIVE": int(exclusive),
        "C": CHUNK[computed_in],
        "D": {BF16: tl.bfloat16, FP32: tl.float32}[computed_in],
        "BF": BF,
        "BV": BV,
        "NV": V // BV if narrow else triton.cdiv(V, BV),
        "TAIL": max(16, triton.next_power_of_2(rest)) if narrow else 0,
        "HEADS": R if F <= BF else 1,
        "PRECISION": precision,
    }
    return {x: found[x] for x in KERNELS[kernel].arg_names if x in found} | {"num_warps": warps, "num_stages": stages}


def row_size(V: int) -> int:
    """W: 8 numbers are at least 16 bytes."""
    return triton.cdiv(V, 8) * 8


def _padded(x: Tensor) -> Tensor:
    V, W = x.shape[-1], row_size(x.shape[-1])
    if V == W:
        return x
    y = x.new_empty(*x.shape[:-1], W)
    rows, columns = x.numel() // V, triton.next_power_of_2(W)
    at_once = max(1, 4096 // columns)
    pad_kernel[(triton.cdiv(rows, at_once),)](x, y, rows, V=V, W=W, ROWS=at_once, COLUMNS=columns)
    return y


class _Call:
    """The sizes of a call and its sums of gates."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, log_a: Tensor | None, segment: Tensor | None, exclusive: bool):
        (self.B, self.T, H, F), (self.G, V) = q.shape, v.shape[2:]
        G = self.G
        dtype = functools.reduce(torch.promote_types, (q.dtype, k.dtype, v.dtype))
        self.constants = {name: constants(name, G, H // G, F, V, exclusive, dtype) for name in KERNELS}
        self.blocks = {name: (triton.cdiv(F, c["BF"]), c["NV"]) for name, c in self.constants.items()}
        self.C = CHUNK[PRODUCTS[dtype][0]]
        self.N, self.heads = triton.cdiv(self.T, self.C), self.B * G
        self.chunks = self.heads * self.N
        self.states_BGNFW = q.new_empty(self.B, G, self.N, F, row_size(V), dtype=PRODUCTS[dtype][0])
        self.read = self.write = None
        if log_a is not None or segment is not None:
            self.write = q.new_empty(self.chunks, 2, self.C, dtype=torch.float32)
            self.read = torch.empty_like(self.write) if exclusive else self.write
            sums_kernel[(self.chunks,)](
                log_a, segment, self.read, self.write, self.T, G=G, EXCLUSIVE=exclusive, C=self.C, num_warps=1
            )  # fmt: skip

    def scan(self, name: str, start: Tensor, states: Tensor, *inputs: Tensor | None) -> Tensor:
        """A pass over the states from `start` on; fills `states` and returns the one at the end."""
        end = torch.empty_like(start)
        parts = min(self.N // LEAST, PROGRAMS // (self.heads * self.blocks[name][0] * self.blocks[name][1]))
        part = triton.cdiv(self.N, parts) if parts >= 4 else self.N  # worth it, though every part is run twice
        parts = triton.cdiv(self.N, part)

        def run(*states: Tensor | None) -> None:
            grid = self.heads * parts, *self.blocks[name]
            KERNELS[name][grid](*inputs, *states, self.T, part, **self.constants[name])

        if parts == 1:
            run(start, states, end)
            return end
        size = start[0, 0].numel()
        ends = start.new_empty(self.heads * parts, size)
        run(None, None, ends)
        carry_kernel[self.heads, triton.cdiv(size, 1024)](
            self.write, start, ends, end, self.N, part, SIZE=size, C=self.C,
            CHUNKS=triton.next_power_of_2(part), BLOCK=1024, REVERSED=name == "dstates",
        )  # fmt: skip
        run(ends, states, None)
        return end


def forward(
    q: Tensor, k: Tensor, v: Tensor, log_a: Tensor | None, state: Tensor, segment: Tensor | None, exclusive: bool
) -> tuple[Tensor, Tensor]:
    """The outputs, in rows of W numbers, and the last state."""
    call, V, v = _Call(q, k, v, log_a, segment, exclusive), v.shape[-1], _padded(v)
    states = call.states_BGNFW
    last = call.scan("states", state, states, k, v, call.write)
    o = v.new_empty(*q.shape[:3], v.shape[-1])
    constants = call.constants["outputs"]
    programs = call.chunks * (constants["R"] // constants["HEADS"])
    outputs_kernel[programs, call.blocks["outputs"][1]](
        q, k, v, call.read, call.write, states, o, call.T, **constants
    )  # fmt: skip
    return o[..., :V], last


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_a: Tensor | None,
    state: Tensor,
    segment: Tensor | None,
    exclusive: bool,
    do: Tensor,
    dlast: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """The gradients of q, k, v (in rows of W numbers), log_a and the state."""
    call, V, v, do = _Call(q, k, v, log_a, segment, exclusive), v.shape[-1], _padded(v), _padded(do)
    states, dstates = call.states_BGNFW, torch.empty_like(call.states_BGNFW)
    call.scan("states", state, states, k, v, call.write)
    dstate = call.scan("dstates", dlast, dstates, q, do, call.read, call.write)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    of_F, of_V = call.blocks["dqk"][0], call.blocks["dv"][1]
    dread = dwrite = dtotal = dpairs = dlog_a = None
    if log_a is not None:
        dread, dwrite = q.new_empty(2, of_F, call.chunks, call.C, dtype=torch.float32)
        dtotal = q.new_empty(of_F, call.chunks, dtype=torch.float32)
        dpairs = q.new_empty(of_V, call.chunks, call.C, dtype=torch.float32)
    shared = q, k, v, call.read, call.write, do
    dv_kernel[call.chunks, of_V](*shared, dstates, dv, dpairs, call.B, call.T, **call.constants["dv"])
    dqk_kernel[(call.chunks * of_F,)](
        *shared, states, dstates, dq, dk, dread, dwrite, dtotal, call.B, call.T, **call.constants["dqk"]
    )  # fmt: skip
    if log_a is not None:
        dlog_a = torch.empty_like(log_a)
        dgates_kernel[(call.chunks,)](
            dread, dwrite, dtotal, dpairs, dlog_a, call.B, call.T, G=call.G, EXCLUSIVE=int(exclusive), C=call.C,
            OF_F=of_F, OF_V=of_V, num_warps=1,
        )  # fmt: skip
    return dq, dk, dv[..., :V], dlog_a, dstate
