"""The kernels of `launch.py` that take every chunk by itself, backwards. The letters are there."""

from __future__ import annotations

import triton
import triton.language as tl

from gated_kernels.common.tiles import dot, load, store
from gated_kernels.simple_gla.intra_chunk import decays_between
from gated_kernels.simple_gla.state_scan import decay_from_start, decay_of_chunk, decay_to_end


@triton.jit(do_not_specialize=["T"])
def dread_kernel(
    q, k, inverse, read, write, do, dv, dread, T,
    G: tl.constexpr, R: tl.constexpr, F: tl.constexpr, V: tl.constexpr, EXCLUSIVE: tl.constexpr, C: tl.constexpr,
    D: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What the outputs of a chunk send back to its values and to the state before it, in BV columns a program."""
    N = tl.cdiv(T, C)
    chunk = tl.program_id(0).to(tl.int64)
    n, b, g = chunk % N, chunk // N // G, chunk // N % G
    x = tl.program_id(1) * BV + tl.arange(0, BV)
    f = tl.arange(0, BF)
    i = tl.arange(0, C)
    rows = (T - n * C).to(tl.int32)
    row = b * T + n * C
    at = chunk * 2 * C
    keys = load(k + (row * G + g) * F, i, rows, G * F, f, F).to(D)
    decays = decays_between(read, write, at, i[None, :], i[:, None], EXCLUSIVE, C, D)
    dwritten = tl.zeros((C, BV), tl.float32)
    dbefore = tl.zeros((BF, BV), tl.float32)
    for h in tl.range(R, disable_licm=True):
        reader = row * G * R + g * R + h
        queries = load(q + reader * F, i, rows, G * R * F, f, F).to(D)
        scores = dot(keys, tl.trans(queries), None, D, PRECISION)
        douts = load(do + reader * V, i, rows, G * R * V, x, V).to(D)
        dwritten = dot(scores * decays, douts, dwritten, D, PRECISION)
        if read is not None:
            douts = douts * decay_from_start(read, at, i)[:, None]
        dbefore = dot(tl.trans(queries), douts, dbefore, D, PRECISION)
    store(dread + chunk * F * V, dbefore, f, F, V, x, V)
    solved = load(inverse + chunk * C * C, i, C, C, i, C)
    store(dv + (row * G + g) * V, dot(tl.trans(solved), dwritten, None, D, PRECISION), i, rows, G * V, x, V)


@triton.jit(do_not_specialize=["T"])
def dscores_kernel(
    q, k, r, written, read, write, do, dv, dscores, dpairs, T,
    G: tl.constexpr, R: tl.constexpr, F: tl.constexpr, V: tl.constexpr, EXCLUSIVE: tl.constexpr, C: tl.constexpr,
    D: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients [s, t] of a chunk's scores times the decays from s to t, and the gates' by these pairs: of one
    query head a program, or of the keys that look up, which count as the last of R + 1 heads."""
    N = tl.cdiv(T, C)
    program = tl.program_id(0).to(tl.int64)
    chunk, h = program // (R + 1), program % (R + 1)
    n, b, g = chunk % N, chunk // N // G, chunk // N % G
    f = tl.arange(0, BF)
    i = tl.arange(0, C)
    s = i[:, None]
    t = i[None, :]
    rows = (T - n * C).to(tl.int32)
    row = b * T + n * C
    at = chunk * 2 * C
    found = tl.zeros((C, C), tl.float32)
    if h < R:
        reader = row * G * R + g * R + h
        for v0 in range(0, V, BV):
            x = v0 + tl.arange(0, BV)
            values = load(written + (row * G + g) * V, i, rows, G * V, x, V)
            douts = load(do + reader * V, i, rows, G * R * V, x, V)
            found = dot(values, tl.trans(douts.to(D)), found, D, PRECISION)
        found *= decays_between(read, write, at, t, s, EXCLUSIVE, C, tl.float32)
    else:
        for v0 in range(0, V, BV):
            x = v0 + tl.arange(0, BV)
            values = load(written + (row * G + g) * V, i, rows, G * V, x, V)
            dvalues = load(dv + (row * G + g) * V, i, rows, G * V, x, V)
            found = dot(values, tl.trans(dvalues), found, D, PRECISION)
        found *= -decays_between(write, write, at, t, s, 1, C, tl.float32)
    store(dscores + program * C * C, found, i, C, C, i, C)
    if dpairs is not None:  # decays are part of the gradients
        keys = load(k + (row * G + g) * F, i, rows, G * F, f, F).to(D)
        if h < R:
            looks = load(q + (row * G * R + g * R + h) * F, i, rows, G * R * F, f, F).to(D)
        else:
            looks = load(r + (row * G + g) * F, i, rows, G * F, f, F).to(D)
        pairs = dot(keys, tl.trans(looks), None, D, PRECISION) * found
        # the sum over the pairs that gate u lies between, by a product with zeros and ones, so that nothing cancels
        finer: tl.constexpr = PRECISION if D.is_bf16() else "tf32x3"
        around = dot((t < s).to(tl.float32), pairs, None, tl.float32, finer)  # [u, t], of all s before u
        first = s + tl.where(h < R, EXCLUSIVE, 0)
        dgates = tl.sum(tl.where(t >= first, around, 0.0), 1)
        chunks = tl.num_programs(0) // (R + 1)
        tl.store(dpairs + (h * chunks + chunk) * C + i, dgates)


@triton.jit(do_not_specialize=["T"])
def dqkr_kernel(
    q, k, r, written, dscores, read, write, do, dv, states, dstates, dq, dk, dr, dreads, dlooks, dwrites, dtotal,
    T,
    G: tl.constexpr, R: tl.constexpr, F: tl.constexpr, V: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    BF: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of BF features of a chunk's queries and keys a program, and these features' part of those of the
    decays from the state before to who reads or looks up, to the state after, and of the chunk."""
    N = tl.cdiv(T, C)
    blocks: tl.constexpr = (F + BF - 1) // BF
    program = tl.program_id(0).to(tl.int64)
    chunk, block = program // blocks, program % blocks
    n, b, g = chunk % N, chunk // N // G, chunk // N % G
    f = block.to(tl.int32) * BF + tl.arange(0, BF)
    i = tl.arange(0, C)
    rows = (T - n * C).to(tl.int32)
    row = b * T + n * C
    at = chunk * 2 * C
    keys = load(k + (row * G + g) * F, i, rows, G * F, f, F)
    looks = load(r + (row * G + g) * F, i, rows, G * F, f, F)
    dkeys = tl.zeros((C, BF), tl.float32)
    dlooked = tl.zeros((C, BF), tl.float32)
    through = tl.zeros((BF,), tl.float32)  # of the states that pass the chunk
    for v0 in range(0, V, BV):
        x = v0 + tl.arange(0, BV)
        before = load(states + chunk * F * V, f, F, V, x, V)
        dafter = load(dstates + chunk * F * V, f, F, V, x, V)
        values = load(written + (row * G + g) * V, i, rows, G * V, x, V)
        dvalues = load(dv + (row * G + g) * V, i, rows, G * V, x, V)
        through += tl.sum(before.to(tl.float32) * dafter.to(tl.float32), 1)
        dkeys = dot(values, tl.trans(dafter), dkeys, D, PRECISION)
        dlooked = dot(dvalues, tl.trans(before), dlooked, D, PRECISION)
    dlooked = -dlooked
    if write is not None:
        dkeys *= decay_to_end(write, at, i, C)[:, None]
        dlooked *= decay_from_start(write, at, i)[:, None]
        start = decay_from_start(read, at, i)
    if dreads is not None:
        chunks = tl.num_programs(0) // blocks
        part = (block * chunks + chunk) * C
        tl.store(dwrites + part + i, tl.sum(dkeys * keys.to(tl.float32), 1))
        tl.store(dlooks + part + i, tl.sum(dlooked * looks.to(tl.float32), 1))
        tl.store(dtotal + block * chunks + chunk, tl.sum(through) * decay_of_chunk(write, at, C))
        of_reads = tl.zeros((C,), tl.float32)
    of_scores = load(dscores + (chunk * (R + 1) + R) * C * C, i, C, C, i, C)
    dkeys = dot(of_scores, looks, dkeys, D, PRECISION)
    dlooked = dot(tl.trans(of_scores), keys, dlooked, D, PRECISION)
    store(dr + (row * G + g) * F, dlooked, i, rows, G * F, f, F)
    for h in tl.range(R, disable_licm=True):
        reader = row * G * R + g * R + h
        queries = load(q + reader * F, i, rows, G * R * F, f, F)
        dqueries = tl.zeros((C, BF), tl.float32)
        for v0 in range(0, V, BV):
            x = v0 + tl.arange(0, BV)
            douts = load(do + reader * V, i, rows, G * R * V, x, V)
            before = load(states + chunk * F * V, f, F, V, x, V)
            dqueries = dot(douts.to(D), tl.trans(before), dqueries, D, PRECISION)
        if write is not None:
            dqueries *= start[:, None]
        if dreads is not None:
            of_reads += tl.sum(dqueries * queries.to(tl.float32), 1)
        of_scores = load(dscores + (chunk * (R + 1) + h) * C * C, i, C, C, i, C)
        dkeys = dot(of_scores, queries, dkeys, D, PRECISION)
        dqueries = dot(tl.trans(of_scores), keys, dqueries, D, PRECISION)
        store(dq + reader * F, dqueries, i, rows, G * R * F, f, F)
    store(dk + (row * G + g) * F, dkeys, i, rows, G * F, f, F)
    if dreads is not None:
        tl.store(dreads + part + i, of_reads)


@triton.jit(do_not_specialize=["T"])
def dgates_kernel(
    dreads, dlooks, dwrites, dtotal, dpairs, dlog_a, T, G: tl.constexpr, R: tl.constexpr, EXCLUSIVE: tl.constexpr,
    C: tl.constexpr, OF_F: tl.constexpr,
):  # fmt: skip
    """The gradients of a chunk's gates, from the parts of all blocks of features and of all heads' pairs."""
    N = tl.cdiv(T, C)
    chunk = tl.program_id(0).to(tl.int64)
    n, b, g = chunk % N, chunk // N // G, chunk // N % G
    i = tl.arange(0, C)
    u = i[:, None]
    token = i[None, :]
    chunks = tl.num_programs(0)
    dgates = tl.zeros((C,), tl.float32)
    for h in range(R + 1):
        dgates += tl.load(dpairs + (h * chunks + chunk) * C + i)
    for block in range(OF_F):
        part = block * chunks + chunk
        of_reads = tl.where(token >= u + EXCLUSIVE, tl.load(dreads + part * C + token), 0.0)
        of_looks = tl.where(token >= u, tl.load(dlooks + part * C + token), 0.0)
        of_writes = tl.where(token < u, tl.load(dwrites + part * C + token), 0.0)
        dgates += tl.sum(of_reads + of_looks + of_writes, 1) + tl.load(dtotal + part)
    t = n * C + i
    tl.store(dlog_a + (b * T + t) * G + g, dgates.to(dlog_a.dtype.element_ty), mask=t < T)
