"""The kernels of `launch.py` for the sums of gates and the scans over states. See there for shapes."""

from __future__ import annotations

import triton
import triton.language as tl

from gated_kernels.common.tiles import dot, load, load_vector, store, store_vector


@triton.jit
def _store_sums(to, sums, C: tl.constexpr):
    """Stores fp64 sums as two fp32 numbers: the rounded sum and the rounding error."""
    rounded = sums.to(tl.float32)
    tl.store(to, rounded)
    tl.store(to + C, (sums - rounded.to(tl.float64)).to(tl.float32))


@triton.jit(do_not_specialize=["T"])
def sums_kernel(
    log_a, segment, read, write, T, G: tl.constexpr, EXCLUSIVE: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """A chunk's cumulative sums of log gates, to base 2: up to what each token reads, and up to what it writes."""
    N = tl.cdiv(T, C)
    program = tl.program_id(0).to(tl.int64)
    n, b, g = program % N, program // N // G, program // N % G
    i = tl.arange(0, C)
    t = n * C + i
    gates = tl.zeros((C,), tl.float64)
    if log_a is not None:
        gates = tl.load(log_a + (b * T + t) * G + g, mask=t < T, other=0.0).to(tl.float64)
        gates = tl.maximum(gates, -1000.0)
    gates *= 1.4426950408889634  # to base 2
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
def decay_from_start(read, at, i):
    """The decay from the state before the chunk to what token i reads."""
    return tl.exp2(tl.load(read + at + i))


@triton.jit
def decay_to_end(write, at, i, C: tl.constexpr):
    """The decay from what token i writes to the state after the chunk."""
    lost = tl.load(write + at + 2 * C - 1) - tl.load(write + at + C + i)
    return tl.exp2(tl.load(write + at + C - 1) - tl.load(write + at + i) + lost)


@triton.jit
def decay_of_chunk(write, at, C: tl.constexpr):
    """The decay of the whole chunk."""
    return tl.exp2(tl.load(write + at + C - 1))


@triton.jit(do_not_specialize=["T", "PART"])
def states_kernel(
    k, v, write_mask, write, state, states, z, last, T, PART,
    G: tl.constexpr, F: tl.constexpr, V: tl.constexpr, S: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    BF: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state before every chunk of a part of PART chunks, and the part's last state. One program per tile of a
    head's state."""
    N = tl.cdiv(T, C)
    parts = tl.cdiv(N, PART)
    blocks: tl.constexpr = (F + BF - 1) // BF * NV
    block = tl.program_id(0) % blocks  # programs that load the same data have consecutive indices
    program = (tl.program_id(0) // blocks).to(tl.int64)
    head, part = program // parts, program % parts
    b, g = head // G, head % G
    f = block // NV * BF + tl.arange(0, BF)
    x = block % NV * BV + tl.arange(0, BV)
    i = tl.arange(0, C)
    now = tl.zeros((BF, BV), tl.float32)
    if state is not None:
        now = load(state + program * F * S, f, F, S, x, V)
    if write_mask is not None:
        mine = block % NV == 0  # of the programs with the same features, one computes the normalizer
        features = tl.where(mine, F, 0)
        z_now = tl.zeros((BF,), tl.float32)
        if state is not None:
            z_now = load_vector(state + program * F * S + V, f, features, S)
    first = (part * PART).to(tl.int32)
    for n in range(first, tl.minimum(N, first + PART)):
        if states is not None:
            to = (head * N + n) * F
            store(states + to * V, now, f, F, V, x, V)
            if write_mask is not None:
                store_vector(z + to, z_now, f, features, 1)
        rows = T - n * C
        row = b * T + n * C
        keys = load(k + (row * G + g) * F, i, rows, G * F, f, F).to(D)
        values = load(v + (row * G + g) * V, i, rows, G * V, x, V)
        if write is not None:
            at = (head * N + n) * 2 * C
            to_end = decay_to_end(write, at, i, C)
            total = decay_of_chunk(write, at, C)
            values = values * to_end[:, None]
            now *= total
        now = dot(tl.trans(keys), values, now, D, PRECISION)
        if write_mask is not None:
            ones = load_vector(write_mask + row * G + g, i, tl.where(mine, rows, 0), G)
            if write is not None:
                ones *= to_end
                z_now *= total
            z_now += tl.sum(keys.to(tl.float32) * ones[:, None], 0)
    if last is not None:
        store(last + program * F * S, now, f, F, S, x, V)
        if write_mask is not None:
            store_vector(last + program * F * S + V, z_now, f, features, S)


@triton.jit
def dstates_kernel(
    q, do, dnormalizer, read, write, dlast, dstates, dz, dstate, T, PART,
    G: tl.constexpr, R: tl.constexpr, F: tl.constexpr, V: tl.constexpr, S: tl.constexpr, C: tl.constexpr,
    D: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of the state after every chunk of a part, and of the state before the part. Like `states_kernel`,
    but from the end."""
    N = tl.cdiv(T, C)
    parts = tl.cdiv(N, PART)
    blocks: tl.constexpr = (F + BF - 1) // BF * NV
    block = tl.program_id(0) % blocks  # programs that load the same data have consecutive indices
    program = (tl.program_id(0) // blocks).to(tl.int64)
    head, part = program // parts, program % parts
    b, g = head // G, head % G
    f = block // NV * BF + tl.arange(0, BF)
    x = block % NV * BV + tl.arange(0, BV)
    i = tl.arange(0, C)
    dnow = tl.zeros((BF, BV), tl.float32)
    if dlast is not None:
        dnow = load(dlast + program * F * S, f, F, S, x, V)
    if dnormalizer is not None:
        mine = block % NV == 0  # of the programs with the same features, one computes the normalizer
        features = tl.where(mine, F, 0)
        dz_now = tl.zeros((BF,), tl.float32)
        if dlast is not None:
            dz_now = load_vector(dlast + program * F * S + V, f, features, S)
    first = (part * PART).to(tl.int32)
    end = tl.minimum(N, first + PART)
    for step in range((end - first) * R):  # a single loop, so that loads for the next chunk are pipelined
        n = end - 1 - step // R
        r = step % R
        if dstates is not None:
            to = (head * N + n) * F
            if r == 0:
                store(dstates + to * V, dnow, f, F, V, x, V)
                if dnormalizer is not None:
                    store_vector(dz + to, dz_now, f, features, 1)
        rows = T - n * C
        row = (b * T + n * C) * G * R + g * R + r
        queries = load(q + row * F, i, rows, G * R * F, f, F).to(D)
        douts = load(do + row * V, i, rows, G * R * V, x, V)
        if write is not None:
            at = (head * N + n) * 2 * C
            start = decay_from_start(read, at, i)
            total = tl.where(r == 0, decay_of_chunk(write, at, C), 1.0)
            douts = douts * start[:, None]
            dnow *= total
        dnow = dot(tl.trans(queries), douts, dnow, D, PRECISION)
        if dnormalizer is not None:
            dnormalizers = load_vector(dnormalizer + row, i, tl.where(mine, rows, 0), G * R)
            if write is not None:
                dnormalizers *= start
                dz_now *= total
            dz_now += tl.sum(queries.to(tl.float32) * dnormalizers[:, None], 0)
    if dstate is not None:
        store(dstate + program * F * S, dnow, f, F, S, x, V)
        if dnormalizer is not None:
            store_vector(dstate + program * F * S + V, dz_now, f, features, S)


@triton.jit(do_not_specialize=["N", "PART"])
def carry_kernel(
    write, state, ends, last, N, PART, SIZE: tl.constexpr, C: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
    REVERSED: tl.constexpr,
):  # fmt: skip
    """Replaces every part's last state in `ends`, run from zeros, by the state before the part, and writes the last
    state of all. REVERSED: the same for gradients, from the end. One program per BLOCK elements of a head's state."""
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
            now *= tl.exp2(tl.sum(sums, 0))
        now += end
    tl.store(last + head * SIZE + e, now, mask=e < SIZE)
