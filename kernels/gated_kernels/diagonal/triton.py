"""The diagonal recurrence in Triton kernels.

The state before every chunk is made first, then all chunks' outputs at once. Within a chunk, the score of tokens t and
s is q_t k_s times every decay after s up to t. It is taken at the one level at which t and s lie in the second and the
first half of the same block: there both decays end at the boundary between the halves, so that each is the exponential
of a sum of gates, at most 1 at any strength. A level is one matrix product of the whole chunk, masked.

Matrix products take the inputs' dtype and accumulate in fp32: bf16 as it is, fp32 as three TF32 products, and fp16 as
one TF32 product, which holds it exactly and does not overflow. The backward pass computes all of it again; only the
inputs are kept. A state belongs to a key-value head and is never repeated.

All of this is for a gate per feature. One gate a head, or none, needs no levels: `scalar.py` has kernels for these.

Shapes: B batch, T tokens, H query heads, G key-value heads, R = H / G, F feature size, V value size, N chunks, C chunk
length. Kernels see BF of the features and BV of the values at a time.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gated_kernels.diagonal import scalar
from gated_kernels.diagonal.tiles import PRODUCTS, load, product, store
from gated_kernels.interpreter import INTERPRETED

CHUNK = 32


@triton.jit
def _load_gates(log_a, b, t, T, g, f, G: tl.constexpr, F: tl.constexpr):
    """[C, BF] in fp32."""
    gates = load(log_a + (b * T * G + g) * F, t, T, G * F, f, F).to(tl.float32)
    return tl.maximum(gates, -1e30)  # sums are products with zeros and ones, and 0 times -inf is none


# Which gates u lie between token t and ...


@triton.jit
def _start(t, u, EXCLUSIVE: tl.constexpr):
    """... the state before the chunk, for who reads it."""
    return t >= u + EXCLUSIVE


@triton.jit
def _end(t, u):
    """... the state after the chunk, for who writes it."""
    return u > t


@triton.jit
def _middle(t, u, level, EXCLUSIVE: tl.constexpr):
    """... the middle of its block, two halves of 2^level, for who reads in the second or writes in the first."""
    second = (t >> level) % 2 == 1
    return (t >> level == u >> level) & tl.where(second, t >= u + EXCLUSIVE, u > t)


@triton.jit
def _decay(between, gates):
    """[C, BF] the decay of every token by the gates between; their sums are nearly fp32 whatever the dtype."""
    return tl.exp(product(between, gates, None, tl.float32, "tf32x3"))


@triton.jit
def _is_pair(t, s, level):
    """Whether t is in the second and s in the first half of the same block."""
    return ((s >> level) % 2 == 0) & (t >> level == (s >> level) + 1)


@triton.jit
def _same(segment, b, t, s, T):
    """Whether two tokens are of one segment; what lies outside of the sequence belongs to its ends."""
    t_segment = tl.load(segment + b * T + tl.minimum(tl.maximum(t, 0), T - 1))
    return t_segment == tl.load(segment + b * T + tl.minimum(tl.maximum(s, 0), T - 1))


@triton.jit
def _readable(segment, b, first, t, s, T, EXCLUSIVE: tl.constexpr):
    """Whether t reads what s writes; both count from the chunk's token `first`."""
    readable = t >= s + EXCLUSIVE
    if segment is not None:
        readable = readable & _same(segment, b, first + t, first + s, T)
    return readable


@triton.jit
def _total(gates, segment, b, first, T, C: tl.constexpr):
    """[BF] the decay of the whole chunk, 0 where a segment ends within."""
    total = tl.exp(tl.sum(gates, 0))
    if segment is not None:
        total = tl.where(_same(segment, b, first - 1, first + C - 1, T), total, 0.0)
    return total


@triton.jit
def _read_decay(gates, segment, b, first, i, T, EXCLUSIVE: tl.constexpr):
    """The decay from the state before the chunk to what a token reads, 0 where that state is another segment's."""
    decay = _decay(_start(i[:, None], i[None, :], EXCLUSIVE), gates)
    if segment is not None:
        decay = tl.where(_same(segment, b, first + i, first - 1, T)[:, None], decay, 0.0)
    return decay


@triton.jit
def _write_decay(gates, segment, b, first, i, T, C: tl.constexpr):
    """The decay of what a token writes to the state after the chunk, 0 where that state is another segment's."""
    decay = _decay(_end(i[:, None], i[None, :]), gates)
    if segment is not None:
        decay = tl.where(_same(segment, b, first + i, first + C - 1, T)[:, None], decay, 0.0)
    return decay


@triton.jit
def _scores(
    q, k, gates, D: tl.constexpr, EXCLUSIVE: tl.constexpr, TRANSPOSED: tl.constexpr,
    C: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[t, s], or [s, t], before the mask: these features' part; D is the dtype of the products."""
    row = tl.arange(0, C)[:, None]
    column = tl.arange(0, C)[None, :]
    scores = tl.zeros((C, C), tl.float32)
    for level in tl.range(LEVELS, disable_licm=True):
        decay = _decay(_middle(row, column, level, EXCLUSIVE), gates)
        left = q * decay
        right = k * decay
        if TRANSPOSED:
            part = product(right, tl.trans(left.to(D)), None, D, PRECISION)
            scores += tl.where(_is_pair(column, row, level), part, 0.0)
        else:
            part = product(left, tl.trans(right.to(D)), None, D, PRECISION)
            scores += tl.where(_is_pair(row, column, level), part, 0.0)
    return scores + tl.where(row == column, tl.sum(q * k, 1)[:, None], 0.0)


@triton.jit
def states_kernel(
    k, v, log_a, segment, state, states, last, T,
    G: tl.constexpr, R: tl.constexpr, F: tl.constexpr, V: tl.constexpr, EXCLUSIVE: tl.constexpr,
    C: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state before every chunk, and the last one; a program per [BF, BV] of a head's state."""
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
        now = product(tl.trans(write.to(D)), values, now, D, PRECISION)
    store(last + head * F * V, now, f, F, V, v_, V)


@triton.jit
def outputs_kernel(
    q, k, v, log_a, segment, states, o, T,
    G: tl.constexpr, R: tl.constexpr, F: tl.constexpr, V: tl.constexpr, EXCLUSIVE: tl.constexpr,
    C: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A chunk's outputs of one query head a program."""
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
        outputs = product(scores, values, None, D, PRECISION)
        for f0 in range(0, F, BF):
            f = f0 + tl.arange(0, BF)
            gates = _load_gates(log_a, b, t, T, g, f, G, F)
            queries = load(q + (b * T * G * R + h) * F, t, T, G * R * F, f, F).to(tl.float32)
            read = queries * _read_decay(gates, segment, b, first, i, T, EXCLUSIVE)
            before = load(states + ((b * G + g) * N + n) * F * V, f, F, V, v_, V)
            outputs = product(read, before, outputs, D, PRECISION)
        store(o + (b * T * G * R + h) * V, outputs, t, T, G * R * V, v_, V)


@triton.jit
def dstates_kernel(
    q, log_a, segment, do, dlast, dstates, dstate, T,
    G: tl.constexpr, R: tl.constexpr, F: tl.constexpr, V: tl.constexpr, EXCLUSIVE: tl.constexpr,
    C: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of the state after every chunk, and of the first one; a program per [BF, BV] of a head's state."""
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
            dnow = product(tl.trans((queries * decay).to(D)), douts, dnow, D, PRECISION)
    store(dstate + head * F * V, dnow, f, F, V, v_, V)


@triton.jit
def dv_kernel(
    q, k, log_a, segment, do, dstates, dv, T,
    G: tl.constexpr, R: tl.constexpr, F: tl.constexpr, V: tl.constexpr, EXCLUSIVE: tl.constexpr,
    C: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of BV of a chunk's values a program; scores are computed transposed, as they are used."""
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
        dvalues = product(write, dafter, dvalues, D, PRECISION)
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
        dvalues = product(tl.where(readable, scores, 0.0), douts, dvalues, D, PRECISION)
    store(dv + (b * T * G + g) * V, dvalues, t, T, G * V, v_, V)


@triton.jit
def dqk_kernel(
    q, k, v, log_a, segment, do, states, dstates, dq, dk, dlog_a, T,
    G: tl.constexpr, R: tl.constexpr, F: tl.constexpr, V: tl.constexpr, EXCLUSIVE: tl.constexpr,
    C: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of BF features of a chunk's queries, keys and gates a program."""
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
        dkeys = product(values, tl.trans(dafter), dkeys, D, PRECISION)
        dtotal += tl.sum(before.to(tl.float32) * dafter.to(tl.float32), 1)
    dkeys *= _write_decay(gates, segment, b, first, i, T, C)
    dgates = tl.zeros((C, BF), tl.float32) + (dtotal * _total(gates, segment, b, first, T, C))[None, :]
    dgates = product(_end(column, row), dkeys * keys, dgates, tl.float32, PRECISION)

    for r in tl.range(R, disable_licm=True):
        h = g * R + r
        queries = load(q + (b * T * G * R + h) * F, t, T, G * R * F, f, F).to(tl.float32)
        dqueries = tl.zeros((C, BF), tl.float32)
        dscores = tl.zeros((C, C), tl.float32)  # [t, s]
        dscores_t = tl.zeros((C, C), tl.float32)  # [s, t]: made anew, as turning an accumulator over costs more
        for v0 in range(0, V, BV):
            v_ = v0 + tl.arange(0, BV)
            values = load(v + (b * T * G + g) * V, t, T, G * V, v_, V)
            douts = load(do + (b * T * G * R + h) * V, t, T, G * R * V, v_, V)
            before = load(states + ((b * G + g) * N + n) * F * V, f, F, V, v_, V)
            dscores = product(douts, tl.trans(values), dscores, D, PRECISION)
            dscores_t = product(values, tl.trans(douts), dscores_t, D, PRECISION)
            dqueries = product(douts, tl.trans(before), dqueries, D, PRECISION)
        dqueries *= _read_decay(gates, segment, b, first, i, T, EXCLUSIVE)
        dgates = product(_start(column, row, EXCLUSIVE), dqueries * queries, dgates, tl.float32, PRECISION)
        dscores = tl.where(_readable(segment, b, first, row, column, T, EXCLUSIVE), dscores, 0.0)
        dscores_t = tl.where(_readable(segment, b, first, column, row, T, EXCLUSIVE), dscores_t, 0.0)
        # A token meets itself without a decay: kept out of the gates' gradients, where it would only cancel.
        dself = tl.sum(tl.where(row == column, dscores, 0.0), 1)[:, None]
        dqueries += dself * keys
        dkeys += dself * queries
        for level in tl.range(LEVELS, disable_licm=True):
            decay = _decay(_middle(row, column, level, EXCLUSIVE), gates)
            left = queries * decay
            right = keys * decay
            pair = tl.where(_is_pair(row, column, level), dscores, 0.0)
            pair_t = tl.where(_is_pair(column, row, level), dscores_t, 0.0)
            dleft = product(pair, right, None, D, PRECISION)
            dright = product(pair_t, left, None, D, PRECISION)
            dqueries += dleft * decay
            dkeys += dright * decay
            between = _middle(column, row, level, EXCLUSIVE)
            dgates = product(between, dleft * left + dright * right, dgates, tl.float32, PRECISION)
        store(dq + (b * T * G * R + h) * F, dqueries, t, T, G * R * F, f, F)

    store(dk + (b * T * G + g) * F, dkeys, t, T, G * F, f, F)
    store(dlog_a + (b * T * G + g) * F, dgates, t, T, G * F, f, F)


def constants(G: int, R: int, F: int, V: int, exclusive: bool, dtype: torch.dtype) -> dict[str, Any]:
    """What the kernels are compiled for; fixed by the sizes and the dtype, never searched for."""
    return {
        "G": G,
        "R": R,
        "F": F,
        "V": V,
        "EXCLUSIVE": int(exclusive),
        "C": CHUNK,
        "BF": _block(F),
        "BV": _block(V),
        "LEVELS": CHUNK.bit_length() - 1,
        "PRECISION": PRODUCTS[dtype][1],
    }


def options(dtype: torch.dtype) -> dict[str, int]:
    return {"num_warps": 8 if PRODUCTS[dtype][0] == torch.float32 else 4}


def _block(size: int) -> int:
    """64, or 32 where that leaves less unused: for 65 and 80, say."""
    return 32 if 0 < size % 64 <= 32 else 64


class _Problem:
    """The sizes of one call, and what every kernel is given."""

    def __init__(self, q_BTHF: Tensor, k_BTGF: Tensor, v_BTGV: Tensor, exclusive: bool):
        B, T, H, F = q_BTHF.shape
        G, V = v_BTGV.shape[2:]
        dtype = _promoted(q_BTHF, k_BTGF, v_BTGV)
        N = triton.cdiv(T, CHUNK)
        self.T = T
        self.states_BGNFV = v_BTGV.new_empty(B, G, N, F, V, dtype=PRODUCTS[dtype][0])
        blocks_of_F, blocks_of_V = triton.cdiv(F, _block(F)), triton.cdiv(V, _block(V))
        self.by_state, self.by_query = (B * G, blocks_of_F, blocks_of_V), (B * H * N,)
        self.by_feature, self.by_value = (B * G * N, blocks_of_F), (B * G * N, blocks_of_V)
        self.compiled_for = constants(G, H // G, F, V, exclusive, dtype) | options(dtype)


def _promoted(*tensors: Tensor) -> torch.dtype:
    return functools.reduce(torch.promote_types, (x.dtype for x in tensors))


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _rows(like: Tensor, shape: Sequence[int], log_a: Tensor | None) -> Tensor:
    """What holds values or their like, as the kernels for this kind of gate lay them out."""
    V = shape[-1]
    return like.new_empty(*shape[:-1], scalar.row_size(V) if log_a is None or log_a.shape[-1] == 1 else V)[..., :V]


@torch.library.custom_op("gated_kernels::diagonal", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, log_a: Tensor | None, state: Tensor, segment: Tensor | None, exclusive: bool
) -> tuple[Tensor, Tensor]:
    """The outputs and the last state."""
    q, k, v, state = (x.contiguous() for x in (q, k, v, state))
    log_a, segment = _contiguous(log_a), _contiguous(segment)
    if log_a is None or log_a.shape[-1] == 1:
        with torch.cuda.device_of(v):
            return scalar.forward(q, k, v, log_a, state, segment, exclusive)
    p = _Problem(q, k, v, exclusive)
    o, last = v.new_empty(*q.shape[:3], v.shape[-1]), torch.empty_like(state)
    with torch.cuda.device_of(v):
        states_kernel[p.by_state](k, v, log_a, segment, state, p.states_BGNFV, last, p.T, **p.compiled_for)
        outputs_kernel[p.by_query](q, k, v, log_a, segment, p.states_BGNFV, o, p.T, **p.compiled_for)
    return o, last


@_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, log_a: Tensor | None, state: Tensor, segment: Tensor | None, exclusive: bool
) -> tuple[Tensor, Tensor]:
    return _rows(v, (*q.shape[:3], v.shape[-1]), log_a), state.new_empty(state.shape)


@torch.library.custom_op("gated_kernels::diagonal_backward", mutates_args=())
def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_a: Tensor | None,
    state: Tensor,
    segment: Tensor | None,
    exclusive: bool,
    do: Tensor,
    dlast: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v, log_a (empty where there is none) and the state."""
    q, k, v, state, do, dlast = (x.contiguous() for x in (q, k, v, state, do, dlast))
    log_a, segment = _contiguous(log_a), _contiguous(segment)
    if log_a is None or log_a.shape[-1] == 1:
        with torch.cuda.device_of(v):
            dq, dk, dv, dlog_a, dstate = scalar.backward(q, k, v, log_a, state, segment, exclusive, do, dlast)
        return dq, dk, dv, v.new_empty(0) if dlog_a is None else dlog_a, dstate
    p = _Problem(q, k, v, exclusive)
    states, dstates, last = p.states_BGNFV, torch.empty_like(p.states_BGNFV), torch.empty_like(state)
    dq, dk, dv, dlog_a, dstate = (torch.empty_like(x) for x in (q, k, v, log_a, state))
    with torch.cuda.device_of(v):
        states_kernel[p.by_state](k, v, log_a, segment, state, states, last, p.T, **p.compiled_for)
        dstates_kernel[p.by_state](q, log_a, segment, do, dlast, dstates, dstate, p.T, **p.compiled_for)
        dv_kernel[p.by_value](q, k, log_a, segment, do, dstates, dv, p.T, **p.compiled_for)
        dqk_kernel[p.by_feature](q, k, v, log_a, segment, do, states, dstates, dq, dk, dlog_a, p.T, **p.compiled_for)
    return dq, dk, dv, dlog_a, dstate


@_backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_a: Tensor | None,
    state: Tensor,
    segment: Tensor | None,
    exclusive: bool,
    do: Tensor,
    dlast: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dstate = (x.new_empty(x.shape) for x in (q, k, state))
    return dq, dk, _rows(v, v.shape, log_a), v.new_empty(0) if log_a is None else log_a.new_empty(log_a.shape), dstate


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.exclusive = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, do: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
    log_a = ctx.saved_tensors[3]
    dq, dk, dv, dlog_a, dstate = _backward(*ctx.saved_tensors, ctx.exclusive, do, dlast)
    return dq, dk, dv, None if log_a is None else dlog_a, dstate, None, None


_forward.register_autograd(_differentiate, setup_context=_keep)


def diagonal(
    q_BTHF: Tensor,
    k_BTGF: Tensor,
    v_BTGV: Tensor,
    log_a: Tensor | None,
    *,
    state_BGFV: Tensor | None = None,
    segment_BT: Tensor | None = None,
    exclusive: bool = False,
) -> tuple[Tensor, Tensor] | None:
    """As `gated_kernels.diagonal`; None on a CPU, and with a warning once for what the kernels cannot do."""
    if not (v_BTGV.is_cuda or INTERPRETED.value):
        return None
    if problem := _problem(q_BTHF, k_BTGF, v_BTGV, log_a, state_BGFV, segment_BT):
        if not torch.compiler.is_compiling():
            _warn_once(problem)
        return None
    if state_BGFV is None:
        B, _, G, F = k_BTGF.shape
        state_BGFV = v_BTGV.new_zeros(B, G, F, v_BTGV.shape[-1], dtype=torch.float32)
    return _forward(q_BTHF, k_BTGF, v_BTGV, log_a, state_BGFV.float(), segment_BT, exclusive)


def _problem(
    q_BTHF: Tensor,
    k_BTGF: Tensor,
    v_BTGV: Tensor,
    log_a: Tensor | None,
    state_BGFV: Tensor | None,
    segment_BT: Tensor | None,
) -> str | None:
    (B, T, _, F), (G, V) = q_BTHF.shape, v_BTGV.shape[2:]
    if (dtype := _promoted(q_BTHF, k_BTGF, v_BTGV)) not in PRODUCTS:
        return f"inputs in {str(dtype).removeprefix('torch.')}"
    gates = (B, T, G, F if log_a is None or log_a.shape[-1] > 1 else 1)
    shapes = ((B, T, G, F), (B, T, G, V), gates, (B, G, F, V), (B, T))
    for x, shape in zip((k_BTGF, v_BTGV, log_a, state_BGFV, segment_BT), shapes):
        if x is not None and (x.shape != shape or x.device != q_BTHF.device):  # a kernel would read what is not there
            return f"{tuple(x.shape)} on {x.device} where {shape} on {q_BTHF.device} is due"
    return None


@functools.cache
def _warn_once(problem: str) -> None:
    warnings.warn(f"diagonal runs in torch, its Triton kernels do not take {problem}", stacklevel=4)
