"""The kernels of `launch.py` that handle chunks independently, once the states are known. See there for shapes."""

from __future__ import annotations

import triton
import triton.language as tl

from gated_kernels.common.interpreter import rounded
from gated_kernels.common.tiles import dot, load, load_vector, store, store_vector
from gated_kernels.simple_gla.state_scan import decay_from_start, decay_of_chunk, decay_to_end


@triton.jit
def decays_between(read, write, at, t, s, EXCLUSIVE: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    """The decays from what tokens s write to what tokens t read; 0 where t does not read s. `at`: offset of the chunk's
    sums."""
    if write is None:
        decays = (t >= s + EXCLUSIVE).to(tl.float32)
    else:
        lost = tl.load(read + at + C + t) - tl.load(write + at + C + s)
        between = tl.load(read + at + t) - tl.load(write + at + s) + lost
        decays = tl.exp2(tl.where(t >= s + EXCLUSIVE, between, -float("inf")))
    if D.is_bf16():
        decays = decays.to(tl.float16)  # half the registers, and still more precise than bf16
    return decays


@triton.jit
def read_by(scores, outputs, normalizers, decays, values, ones, read, at, t, D: tl.constexpr, PRECISION: tl.constexpr):
    """The outputs and normalizers of tokens t: those read from the state before the chunk, not yet decayed, plus what
    `scores`, not yet decayed, read within the chunk."""
    if read is not None:
        start = decay_from_start(read, at, t)
        outputs *= start[:, None]
        normalizers *= start
    scores *= decays
    outputs = dot(scores, values, outputs, D, PRECISION)
    if ones is not None:
        normalizers += tl.sum(scores * ones[None, :], 1)
    return outputs, normalizers


@triton.jit(do_not_specialize=["T"])
def outputs_kernel(
    q, k, v, write_mask, read, write, states, z, o, normalizer, T,
    G: tl.constexpr, R: tl.constexpr, F: tl.constexpr, V: tl.constexpr, EXCLUSIVE: tl.constexpr, C: tl.constexpr,
    D: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, HEADS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A chunk's outputs for HEADS query heads per program: all of a key-value head's if one tile holds all features."""
    N = tl.cdiv(T, C)
    program = tl.program_id(0).to(tl.int64)
    chunk, h0 = program // (R // HEADS), program % (R // HEADS) * HEADS
    n, b, g = chunk % N, chunk // N // G, chunk // N % G
    x = tl.program_id(1) * BV + tl.arange(0, BV)
    i = tl.arange(0, C)
    rows = (T - n * C).to(tl.int32)
    row = b * T + n * C
    at = chunk * 2 * C
    decays = decays_between(read, write, at, i[:, None], i[None, :], EXCLUSIVE, C, D)
    f = tl.arange(0, BF)
    values = load(v + (row * G + g) * V, i, rows, G * V, x, V)
    ones = None
    if write_mask is not None:
        mine = tl.program_id(1) == 0  # of the programs with the same queries, one computes the normalizer
        features = tl.where(mine, F, 0)
        ones = load_vector(write_mask + row * G + g, i, tl.where(mine, rows, 0), G)
    if F <= BF:
        keys = load(k + (row * G + g) * F, i, rows, G * F, f, F)
        before = load(states + chunk * F * V, f, F, V, x, V)
        if write_mask is not None:
            z_before = load_vector(z + chunk * F, f, features, 1)
    for r in tl.range(HEADS, disable_licm=True):
        h = g * R + h0 + r
        scores = tl.zeros((C, C), tl.float32)
        outputs = tl.zeros((C, BV), tl.float32)
        normalizers = tl.zeros((C,), tl.float32)
        if F <= BF:
            queries = load(q + (row * G * R + h) * F, i, rows, G * R * F, f, F)
            scores = dot(queries, tl.trans(keys.to(D)), scores, D, PRECISION)
            outputs = dot(queries, before, outputs, D, PRECISION)
            if write_mask is not None:
                normalizers += tl.sum(queries.to(tl.float32) * z_before[None, :], 1)
        else:
            for f0 in range(0, F, BF):
                queries = load(q + (row * G * R + h) * F, i, rows, G * R * F, f0 + f, F)
                keys = load(k + (row * G + g) * F, i, rows, G * F, f0 + f, F)
                before = load(states + chunk * F * V, f0 + f, F, V, x, V)
                scores = dot(queries, tl.trans(keys.to(D)), scores, D, PRECISION)
                outputs = dot(queries, before, outputs, D, PRECISION)
            if write_mask is not None:
                for f0 in range(0, F, BF):  # a separate loop, see launch.py
                    queries = load(q + (row * G * R + h) * F, i, rows, G * R * F, f0 + f, F)
                    z_before = load_vector(z + chunk * F, f0 + f, features, 1)
                    normalizers += tl.sum(queries.to(tl.float32) * z_before[None, :], 1)
        outputs, normalizers = read_by(scores, outputs, normalizers, decays, values, ones, read, at, i, D, PRECISION)
        store(o + (row * G * R + h) * V, outputs, i, rows, G * R * V, x, V)
        if write_mask is not None:
            store_vector(normalizer + row * G * R + h, normalizers, i, tl.where(mine, rows, 0), G * R)


@triton.jit
def dscores_kernel(
    v, write_mask, read, write, do, dnormalizer, dscores, T,
    G: tl.constexpr, R: tl.constexpr, V: tl.constexpr, EXCLUSIVE: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients [s, t] of a chunk's scores, times the decays from s to t. One program per query head."""
    N = tl.cdiv(T, C)
    program = tl.program_id(0).to(tl.int64)
    chunk, r = program // R, program % R
    n, b, g = chunk % N, chunk // N // G, chunk // N % G
    i = tl.arange(0, C)
    rows = (T - n * C).to(tl.int32)
    row = b * T + n * C
    h = g * R + r
    found = tl.zeros((C, C), tl.float32)
    for v0 in range(0, V, BV):
        x = v0 + tl.arange(0, BV)
        values = load(v + (row * G + g) * V, i, rows, G * V, x, V)
        douts = load(do + (row * G * R + h) * V, i, rows, G * R * V, x, V)
        found = dot(values.to(D), tl.trans(douts.to(D)), found, D, PRECISION)
    if write_mask is not None:
        ones = load_vector(write_mask + row * G + g, i, rows, G)
        found += ones[:, None] * load_vector(dnormalizer + row * G * R + h, i, rows, G * R)[None, :]
    found *= decays_between(read, write, chunk * 2 * C, i[None, :], i[:, None], EXCLUSIVE, C, D)
    store(dscores + program * C * C, found, i, C, C, i, C)


@triton.jit
def dv_kernel(
    q, k, dscores, read, write, do, dstates, dv, dpairs, T,
    G: tl.constexpr, R: tl.constexpr, F: tl.constexpr, V: tl.constexpr, EXCLUSIVE: tl.constexpr, C: tl.constexpr,
    D: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of a chunk's values, BV columns per program, and the gates' gradients from pairs in the chunk."""
    N = tl.cdiv(T, C)
    chunk = tl.program_id(0).to(tl.int64)
    n, b, g = chunk % N, chunk // N // G, chunk // N % G
    x = tl.program_id(1) * BV + tl.arange(0, BV)
    f = tl.arange(0, BF)
    i = tl.arange(0, C)
    rows = (T - n * C).to(tl.int32)
    row = b * T + n * C
    at = chunk * 2 * C
    if F <= BF:
        keys = load(k + (row * G + g) * F, i, rows, G * F, f, F)
    dvalues = tl.zeros((C, BV), tl.float32)
    for f0 in range(0, F, BF):
        if F > BF:
            keys = load(k + (row * G + g) * F, i, rows, G * F, f0 + f, F)
        dafter = load(dstates + chunk * F * V, f0 + f, F, V, x, V)
        dvalues = dot(keys, dafter, dvalues, D, PRECISION)
    if write is not None:
        dvalues *= decay_to_end(write, at, i, C)[:, None]
    decays = decays_between(read, write, at, i[None, :], i[:, None], EXCLUSIVE, C, D)
    if dpairs is not None:
        mine = tl.where(tl.program_id(1) == 0, C, 0)  # of the programs with the same scores, one sums the pairs
        pairs = tl.zeros((C, C), tl.float32)  # [s, t] score times its gradient
    for r in tl.range(R, disable_licm=True):
        h = g * R + r
        scores = tl.zeros((C, C), tl.float32)
        for f0 in range(0, F, BF):
            queries = load(q + (row * G * R + h) * F, i, rows, G * R * F, f0 + f, F)
            if F > BF:
                keys = load(k + (row * G + g) * F, i, rows, G * F, f0 + f, F)
            scores = dot(keys, tl.trans(queries.to(D)), scores, D, PRECISION)
        if dpairs is not None:  # dscores include the decays
            pairs += scores * load(dscores + (chunk * R + r) * C * C, i, mine, C, i, C).to(tl.float32)
        douts = load(do + (row * G * R + h) * V, i, rows, G * R * V, x, V)
        dvalues = dot(scores * decays, douts.to(D), dvalues, D, PRECISION)
    store(dv + (row * G + g) * V, dvalues, i, rows, G * V, x, V)
    if dpairs is not None:
        u = i[:, None]
        column = i[None, :]
        finer: tl.constexpr = PRECISION if D.is_bf16() else "tf32x3"
        around = dot((column < u).to(tl.float32), pairs, None, tl.float32, finer)  # [u, t], summed over all s before u
        dgates = tl.sum(tl.where(column >= u + EXCLUSIVE, around, 0.0), 1)
        store_vector(dpairs + chunk * C, dgates, i, mine, 1)


@triton.jit
def _meet_states(values, before, dafter, dkeys, through, D: tl.constexpr, PRECISION: tl.constexpr):
    """Adds the contributions of some columns of the states: to dkeys, and to the dot products of the state before the
    chunk with the gradient of the state after it."""
    through += tl.sum(before.to(tl.float32) * dafter.to(tl.float32), 1)
    return dot(values, tl.trans(dafter), dkeys, D, PRECISION), through


@triton.jit
def dqk_kernel(
    q, k, v, write_mask, dscores, read, write, do, dnormalizer, states, z, dstates, dz, dq, dk, dread, dwrite, dtotal,
    q_along, k_along, B, T,
    G: tl.constexpr, R: tl.constexpr, F: tl.constexpr, V: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    BF: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of a chunk's queries and keys, BF features per program. Also these features' part of the gradients
    of the decays (`dread` from the state before the chunk, `dwrite` to the state after it, `dtotal` of the chunk), and
    of the dot products of q and k with their gradients (`q_along`, `k_along`). dq and dk may overwrite q and k, because
    no other program reads what this one writes.
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
    at = chunk * 2 * C
    keys = load(k + (row * G + g) * F, i, rows, G * F, f, F)
    dkeys = tl.zeros((C, BF), tl.float32)
    through = tl.zeros((BF,), tl.float32)  # gradient of the decay of the state over the chunk
    if NV == 1:
        x = tl.arange(0, BV)
        values = load(v + (row * G + g) * V, i, rows, G * V, x, V)
        before = load(states + chunk * F * V, f, F, V, x, V)
        dafter = load(dstates + chunk * F * V, f, F, V, x, V)
        dkeys, through = _meet_states(values, before, dafter, dkeys, through, D, PRECISION)
    else:
        for v0 in range(0, NV * BV, BV):
            x = v0 + tl.arange(0, BV)
            values = load(v + (row * G + g) * V, i, rows, G * V, x, V)
            before = load(states + chunk * F * V, f, F, V, x, V)
            dafter = load(dstates + chunk * F * V, f, F, V, x, V)
            dkeys, through = _meet_states(values, before, dafter, dkeys, through, D, PRECISION)
    if write_mask is not None:
        ones = load_vector(write_mask + row * G + g, i, rows, G)
        z_before = load_vector(z + chunk * F, f, F, 1)
        dz_after = load_vector(dz + chunk * F, f, F, 1)
        dkeys += ones[:, None] * dz_after[None, :]
        through += z_before * dz_after
    if write is not None:
        dkeys *= decay_to_end(write, at, i, C)[:, None]
        start = decay_from_start(read, at, i)
    if dread is not None:
        part = (block * B * N * G + chunk) * C
        tl.store(dwrite + part + i, tl.sum(dkeys * keys.to(tl.float32), 1))
        tl.store(dtotal + block * B * N * G + chunk, tl.sum(through) * decay_of_chunk(write, at, C))
        dreads = tl.zeros((C,), tl.float32)
    for r in tl.range(R, disable_licm=True):
        h = g * R + r
        queries = load(q + (row * G * R + h) * F, i, rows, G * R * F, f, F)
        dqueries = tl.zeros((C, BF), tl.float32)
        if NV == 1:
            douts = load(do + (row * G * R + h) * V, i, rows, G * R * V, x, V)
            dqueries = dot(douts.to(D), tl.trans(before), dqueries, D, PRECISION)
        else:
            for v0 in range(0, NV * BV, BV):
                x = v0 + tl.arange(0, BV)
                douts = load(do + (row * G * R + h) * V, i, rows, G * R * V, x, V)
                before = load(states + chunk * F * V, f, F, V, x, V)
                dqueries = dot(douts.to(D), tl.trans(before), dqueries, D, PRECISION)
        if write_mask is not None:
            dnormalizers = load_vector(dnormalizer + row * G * R + h, i, rows, G * R)
            dqueries += dnormalizers[:, None] * z_before[None, :]
        if write is not None:
            dqueries *= start[:, None]
        if dread is not None:
            dreads += tl.sum(dqueries * queries.to(tl.float32), 1)
        of_scores = load(dscores + (chunk * R + r) * C * C, i, C, C, i, C)
        dkeys = dot(of_scores, queries, dkeys, D, PRECISION)
        dqueries = dot(tl.trans(of_scores), keys, dqueries, D, PRECISION)
        dqueries = rounded(dqueries, dq.dtype.element_ty)
        if q_along is not None:
            along = tl.sum(dqueries.to(tl.float32) * queries.to(tl.float32), 1)
            store_vector(q_along + (block * G * R + h) * B * T + row, along, i, rows, 1)
        store(dq + (row * G * R + h) * F, dqueries, i, rows, G * R * F, f, F)
    dkeys = rounded(dkeys, dk.dtype.element_ty)
    if k_along is not None:
        along = tl.sum(dkeys.to(tl.float32) * keys.to(tl.float32), 1)
        store_vector(k_along + (block * G + g) * B * T + row, along, i, rows, 1)
    store(dk + (row * G + g) * F, dkeys, i, rows, G * F, f, F)
    if dread is not None:
        tl.store(dread + part + i, dreads)


@triton.jit
def dgates_kernel(
    dread, dwrite, dtotal, dpairs, dlog_a, B, T, G: tl.constexpr, EXCLUSIVE: tl.constexpr, C: tl.constexpr,
    OF_F: tl.constexpr,
):  # fmt: skip
    """The gradients of a chunk's log gates, from the parts of all blocks of features and from its pairs."""
    N = tl.cdiv(T, C)
    chunk = tl.program_id(0).to(tl.int64)
    n, b, g = chunk % N, chunk // N // G, chunk // N % G
    i = tl.arange(0, C)
    u = i[:, None]
    token = i[None, :]
    dgates = tl.load(dpairs + chunk * C + i)
    for block in range(OF_F):
        part = block * B * N * G + chunk
        dreads = tl.where(token >= u + EXCLUSIVE, tl.load(dread + part * C + token), 0.0)
        dwrites = tl.where(token < u, tl.load(dwrite + part * C + token), 0.0)
        dgates += tl.sum(dreads + dwrites, 1) + tl.load(dtotal + part)
    t = n * C + i
    tl.store(dlog_a + (b * T + t) * G + g, dgates.to(dlog_a.dtype.element_ty), mask=t < T)
