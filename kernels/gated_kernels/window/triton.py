"""Sliding-window attention with sinks in three Triton kernels: the function of `chunk.py`, for a GPU.

The R query heads of a key-value head are rows of one problem: row n is query n // R of head n % R. The forward pass and
that of dq give a program a block of rows, which meets the keys in their windows and then the sinks; the pass of dk and
dv gives it a block of keys or of sinks, which meets the rows that may see them. Beside the inputs only the logs of the
sums of weights are kept. Products are of the inputs' dtype with fp32 sums, the softmax is in fp32, and no program adds
to what another one writes: gradients are deterministic.

Shapes: B batch, T queries, S = P + T keys, H query heads, G key-value heads, R = H / G, D head size, V value size,
M sinks. In a kernel: N block of rows, K block of keys or sinks, C and E the powers of two that hold D and V.
"""

from __future__ import annotations

import math
import warnings
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gated_kernels.interpreter import INTERPRETED, rounded

SINKS = 16  # in a block of them
PROGRAMS = 1024  # for the gradients of the sinks, which all rows share: enough to fill a GPU


class Block(NamedTuple):
    rows: int
    keys: int
    warps: int
    at_once: int = 0  # as many blocks of keys fit into registers, should they be all that a block of rows may see
    looped: int = 0  # keys in a block, should they be more


class Blocks(NamedTuple):
    """Of the forward pass, and of the gradients of queries and of keys."""

    forward: Block
    queries: Block
    keys: Block


# By bytes of a number and the larger one of C and E: in two bytes, heads of up to 128, the fastest on an H200 with a
# window of 64; else what fits into registers, or nearly, according to the compiler. Windows are a few blocks long, so
# loops are not pipelined.
BLOCKS = {
    (2, 64): Blocks(Block(64, 16, 4, 6, 32), Block(64, 32, 4, 3), Block(64, 32, 4)),
    (2, 128): Blocks(Block(64, 16, 4, 6, 32), Block(64, 32, 4, 3), Block(64, 64, 4)),
    (2, 256): Blocks(*3 * [Block(32, 32, 8)]),
    (4, 64): Blocks(*3 * [Block(32, 32, 8)]),
    (4, 128): Blocks(*3 * [Block(32, 16, 8)]),
    (4, 256): Blocks(*3 * [Block(16, 16, 8)]),
    (4, 512): Blocks(*3 * [Block(16, 16, 8)]),
}


@triton.jit
def _row(n, g, G: tl.constexpr, R: tl.constexpr):
    """Row n of key-value head g as a row of [T, H]."""
    return (n // R * G + g) * R + n % R


@triton.jit
def _load(x, row, inside, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """[rows, PADDED] of a matrix with SIZE columns, 0 elsewhere."""
    column = tl.arange(0, PADDED)
    at = row.to(tl.int64)[:, None] * SIZE + column[None, :]
    return tl.load(x + at, mask=inside[:, None] & (column < SIZE)[None, :], other=0.0)


@triton.jit
def _store(x, row, inside, value, SIZE: tl.constexpr, PADDED: tl.constexpr):
    column = tl.arange(0, PADDED)
    at = row.to(tl.int64)[:, None] * SIZE + column[None, :]
    tl.store(x + at, rounded(value, x.dtype.element_ty), mask=inside[:, None] & (column < SIZE)[None, :])


@triton.jit
def _in_window(query, key, real, T, S, b, window, valid, segment):
    """Whether queries, [N, 1] or [1, N], see keys, [1, K] or [K, 1], that are real."""
    own = query + (S - T)
    seen = real & (own - key >= 0) & (own - key < window) & (own < S)
    if valid is not None:
        seen = seen & (tl.load(valid + b * S + key, mask=real, other=0) != 0)
    if segment is not None:
        of_query = tl.load(segment + b * S + own, mask=own < S, other=0)
        seen = seen & (of_query == tl.load(segment + b * S + key, mask=real, other=0))
    return seen


@triton.jit
def _sink_seen(query, sink, T, M, b, visible):
    return tl.load(visible + (b * T + query) * M + sink, mask=(query < T) & (sink < M), other=0) != 0


@triton.jit
def _sinks_seen(query, start, T, M, b, visible, K: tl.constexpr, SINKS: tl.constexpr):
    """[N, K] which of the K sinks from `start` on, SINKS at most, queries see: by one number a row, as a tile of K
    addresses would take half of all registers all along."""
    m = tl.arange(0, SINKS)
    sees = _sink_seen(query[:, None], start + m[None, :], T, M, b, visible).to(tl.int64)
    bits = tl.sum(sees << m[None, :], 1)
    return (bits[:, None] >> tl.arange(0, K)[None, :]) & 1 != 0


@triton.jit
def _keys(
    k, v, sink_k, sink_v, valid, segment, visible, start, first, end, query, T, S, M, b, g, window,
    G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, C: tl.constexpr, E: tl.constexpr, K: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """Of all that a block of rows may see, the M sinks and then keys `first` to `end`, the K from `start` on: which of
    them each row sees, and their k and v. Without `visible` there is no sink among them, else in the first SINKS."""
    index = start + tl.arange(0, K)
    key = first + index - M
    real = key < end
    if visible is not None:
        real = real & (index >= M)
    seen = _in_window(query[:, None], key[None, :], real[None, :], T, S, b, window, valid, segment)
    at = (b * S + key) * G + g
    sink = index < M
    if visible is not None:
        seen = seen | _sinks_seen(query, start, T, M, b, visible, K, SINKS)
        at = tl.where(sink, (b * M + index) * G + g, at)
        real = real | sink
    else:
        sink_k = None
        sink_v = None
    return seen, _load_either(k, sink_k, sink, at, real, D, C), _load_either(v, sink_v, sink, at, real, V, E)


@triton.jit
def _load_either(x, of_sinks, sink, row, inside, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """[rows, PADDED] of x or, where they are sinks, of another matrix with as many columns."""
    column = tl.arange(0, PADDED)
    at = row.to(tl.int64) * SIZE
    source = x + at
    if of_sinks is not None:
        source = tl.where(sink, of_sinks + at, source)
    return tl.load(source[:, None] + column[None, :], mask=inside[:, None] & (column < SIZE)[None, :], other=0.0)


@triton.jit
def _load_memory(memory, mass, row, inside, V: tl.constexpr, E: tl.constexpr):
    """[N, E] what a memory has for each row, in fp32."""
    value = _load(memory, row, inside, V, E).to(tl.float32)
    if mass is not None:
        value *= (1.0 / tl.load(mass + row, mask=inside, other=1.0))[:, None]
    return value


@triton.jit
def _dot(x, y, total):
    """total + x y, of the dtype of y and summed in fp32."""
    x = rounded(x, y.dtype)
    if INTERPRETED:  # it would multiply the bits of bfloat16
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, y, total, input_precision="ieee")  # tf32 would lose the forget gate's sums


@triton.jit
def _logits(x, y, scale, seen):
    """x y^T, -inf where not seen."""
    return tl.where(seen, _dot(x, tl.trans(y), None) * scale, float("-inf"))


@triton.jit
def _rest(share):
    """What a share leaves to the window; never 0, as logs and quotients are taken of it."""
    return tl.maximum(1.0 - share, 1e-30)


@triton.jit
def _finite(top):
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _add(logits, v, o, top, mass):
    """Takes more keys into a running softmax."""
    higher = tl.maximum(top, tl.max(logits, 1))
    keep = tl.exp(top - _finite(higher))
    weights = tl.exp(logits - _finite(higher)[:, None])
    return _dot(weights, v, o * keep[:, None]), higher, mass * keep + tl.sum(weights, 1)


@triton.jit
def forward_kernel(
    q, k, v, valid, segment, sink_k, sink_v, visible, memory, mass, log_weight, share, o, lse, scale, T, S, M, window,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, E: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SINKS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * N + tl.arange(0, N)
    g, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    query, inside = n // R, n < T * R
    row = b * T * G * R + _row(n, g, G, R)
    q_NC = _load(q, row, inside, D, C)
    o_NE = tl.zeros([N, E], tl.float32)
    top_N = tl.full([N], float("-inf"), tl.float32)
    mass_N = tl.zeros([N], tl.float32)
    first = tl.maximum(S - T + tl.program_id(0) * N // R - window + 1, 0)
    end = tl.minimum(S - T + (tl.program_id(0) * N + N - 1) // R + 1, S)
    if BLOCKS:
        each = ()  # type: tuple[Any, ...]
        highest = tl.full([N, K], float("-inf"), tl.float32)
        for i in tl.static_range(BLOCKS):
            if i == 0:
                seen, k_KC, v_KE = _keys(
                    k, v, sink_k, sink_v, valid, segment, visible, 0, first, end, query, T, S, M, b, g, window,
                    G, D, V, C, E, K, SINKS,
                )  # fmt: skip
            else:
                seen, k_KC, v_KE = _keys(
                    k, v, sink_k, sink_v, valid, segment, None, i * K, first, end, query, T, S, M, b, g, window,
                    G, D, V, C, E, K, SINKS,
                )  # fmt: skip
            logits = _logits(q_NC, k_KC, scale, seen)
            highest = tl.maximum(highest, logits)
            each += ((logits, v_KE),)
        top_N = tl.max(highest, 1)
        total = tl.zeros([N, K], tl.float32)
        for i in tl.static_range(BLOCKS):
            logits, v_KE = each[i]
            weights = tl.exp(logits - _finite(top_N)[:, None])
            total += weights
            o_NE = _dot(weights, v_KE, o_NE)
        mass_N = tl.sum(total, 1)
    else:
        for start in range(M, M + end - first, K):
            seen, k_KC, v_KE = _keys(
                k, v, sink_k, sink_v, valid, segment, None, start, first, end, query, T, S, M, b, g, window,
                G, D, V, C, E, K, SINKS,
            )  # fmt: skip
            o_NE, top_N, mass_N = _add(_logits(q_NC, k_KC, scale, seen), v_KE, o_NE, top_N, mass_N)
        if visible is not None:
            for start in range(0, M, SINKS):
                sink = start + tl.arange(0, SINKS)
                seen = _sink_seen(query[:, None], sink[None, :], T, M, b, visible)
                if tl.max(seen.to(tl.int32)) > 0:  # packed rows: most sinks are other documents'
                    at, real = (b * M + sink) * G + g, sink < M
                    k_KC, v_KE = _load(sink_k, at, real, D, C), _load(sink_v, at, real, V, E)
                    o_NE, top_N, mass_N = _add(_logits(q_NC, k_KC, scale, seen), v_KE, o_NE, top_N, mass_N)
    some = mass_N > 0
    mass_N = tl.where(some, mass_N, 1.0)
    o_NE *= (1.0 / mass_N)[:, None]
    lse_N = tl.where(some, top_N + tl.log(mass_N), float("-inf"))
    if log_weight is not None:
        logit_N = tl.load(log_weight + row, mask=inside, other=float("-inf"))
        top_N = _finite(tl.maximum(lse_N, logit_N))
        lse_N = top_N + tl.log(tl.exp(lse_N - top_N) + tl.exp(logit_N - top_N))
        share_N = tl.exp(logit_N - _finite(lse_N))
    elif share is not None:
        share_N = tl.load(share + g * R + n % R)
        lse_N -= tl.log(_rest(share_N))
    if memory is not None:
        o_NE += share_N[:, None] * (_load_memory(memory, mass, row, inside, V, E) - o_NE)
    _store(o, row, inside, o_NE, V, E)
    tl.store(lse + row, lse_N, mask=inside)


@triton.jit
def _weighed(q, k, v, do, lse, scale, seen):
    """The weights of keys, and the gradients of these."""
    return tl.exp(_logits(q, k, scale, seen) - lse[:, None]), _dot(do, tl.trans(v), None)


@triton.jit
def backward_q_kernel(
    q, k, v, valid, segment, sink_k, sink_v, visible, memory, mass, log_weight, share, lse, do, dlse,
    dq, mean, dmemory, dmass, dweight, scale, T, S, M, window,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, E: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SINKS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Writes dq, what the memory is due and, for the other kernel, the means of do.v over the weights of each row, less
    dlse.

    They are taken over the very products that they will be subtracted from: do.o, their equal, would not cancel as
    well. Hence two sweeps over the keys, unless all that a block of rows may see are few BLOCKS, which stay at hand.
    """
    n = tl.program_id(0) * N + tl.arange(0, N)
    g, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    query, inside = n // R, n < T * R
    row = b * T * G * R + _row(n, g, G, R)
    q_NC, do_NE = _load(q, row, inside, D, C), _load(do, row, inside, V, E)
    lse_N = tl.load(lse + row, mask=inside, other=float("-inf"))
    some = lse_N != float("-inf")
    lse_N = tl.where(some, lse_N, float("inf"))
    dlse_N = tl.load(dlse + row, mask=some, other=0.0)
    if memory is not None:
        due = do_NE.to(tl.float32)
        if mass is not None:
            inverse = 1.0 / tl.load(mass + row, mask=inside, other=1.0)
            due *= inverse[:, None]
        of_memory_N = tl.sum(_load(memory, row, inside, V, E).to(tl.float32) * due, 1)
        if log_weight is not None:
            weight_N = tl.exp(tl.load(log_weight + row, mask=inside, other=float("-inf")) - lse_N)
        else:
            weight_N = tl.load(share + g * R + n % R)
        _store(dmemory, row, inside, due * weight_N[:, None], V, E)
        if mass is not None:
            tl.store(dmass + row, -weight_N * of_memory_N * inverse, mask=inside)
    mean_N = tl.zeros([N], tl.float32)
    dq_NC = tl.zeros([N, C], tl.float32)
    first = tl.maximum(S - T + tl.program_id(0) * N // R - window + 1, 0)
    end = tl.minimum(S - T + (tl.program_id(0) * N + N - 1) // R + 1, S)
    if BLOCKS:
        each = ()  # type: tuple[Any, ...]
        products = tl.zeros([N, K], tl.float32)
        for i in tl.static_range(BLOCKS):
            if i == 0:
                seen, k_KC, v_KE = _keys(
                    k, v, sink_k, sink_v, valid, segment, visible, 0, first, end, query, T, S, M, b, g, window,
                    G, D, V, C, E, K, SINKS,
                )  # fmt: skip
            else:
                seen, k_KC, v_KE = _keys(
                    k, v, sink_k, sink_v, valid, segment, None, i * K, first, end, query, T, S, M, b, g, window,
                    G, D, V, C, E, K, SINKS,
                )  # fmt: skip
            weights, dweights = _weighed(q_NC, k_KC, v_KE, do_NE, lse_N, scale, seen)
            products += weights * dweights
            each += ((weights, dweights, k_KC),)
        mean_N = tl.sum(products, 1)
    else:
        for start in range(M, M + end - first, K):
            seen, k_KC, v_KE = _keys(
                k, v, sink_k, sink_v, valid, segment, None, start, first, end, query, T, S, M, b, g, window,
                G, D, V, C, E, K, SINKS,
            )  # fmt: skip
            weights, dweights = _weighed(q_NC, k_KC, v_KE, do_NE, lse_N, scale, seen)
            mean_N += tl.sum(weights * dweights, 1)
        if visible is not None:
            for start in range(0, M, SINKS):
                sink = start + tl.arange(0, SINKS)
                seen = _sink_seen(query[:, None], sink[None, :], T, M, b, visible)
                if tl.max(seen.to(tl.int32)) > 0:  # packed rows: most sinks are other documents'
                    at, real = (b * M + sink) * G + g, sink < M
                    k_KC, v_KE = _load(sink_k, at, real, D, C), _load(sink_v, at, real, V, E)
                    weights, dweights = _weighed(q_NC, k_KC, v_KE, do_NE, lse_N, scale, seen)
                    mean_N += tl.sum(weights * dweights, 1)
    if memory is not None:
        if log_weight is not None:
            mean_N += weight_N * of_memory_N
        else:
            mean_N /= _rest(weight_N)
            dlse_N /= _rest(weight_N)
        dweight_N = of_memory_N - mean_N + dlse_N
        if log_weight is not None:
            dweight_N *= weight_N
        tl.store(dweight + row, dweight_N, mask=inside)
    mean_N -= dlse_N
    tl.store(mean + row, mean_N, mask=inside)
    if BLOCKS:
        for i in tl.static_range(BLOCKS):
            weights, dweights, k_KC = each[i]
            dq_NC = _dot(weights * (dweights - mean_N[:, None]) * scale, k_KC, dq_NC)
    else:
        for start in range(M, M + end - first, K):
            seen, k_KC, v_KE = _keys(
                k, v, sink_k, sink_v, valid, segment, None, start, first, end, query, T, S, M, b, g, window,
                G, D, V, C, E, K, SINKS,
            )  # fmt: skip
            weights, dweights = _weighed(q_NC, k_KC, v_KE, do_NE, lse_N, scale, seen)
            dq_NC = _dot(weights * (dweights - mean_N[:, None]) * scale, k_KC, dq_NC)
        if visible is not None:
            for start in range(0, M, SINKS):
                sink = start + tl.arange(0, SINKS)
                seen = _sink_seen(query[:, None], sink[None, :], T, M, b, visible)
                if tl.max(seen.to(tl.int32)) > 0:  # packed rows: most sinks are other documents'
                    at, real = (b * M + sink) * G + g, sink < M
                    k_KC, v_KE = _load(sink_k, at, real, D, C), _load(sink_v, at, real, V, E)
                    weights, dweights = _weighed(q_NC, k_KC, v_KE, do_NE, lse_N, scale, seen)
                    dq_NC = _dot(weights * (dweights - mean_N[:, None]) * scale, k_KC, dq_NC)
    _store(dq, row, inside, dq_NC, D, C)


@triton.jit
def backward_k_kernel(
    q, k, v, valid, segment, visible, lse, do, mean, dk, dv, scale, T, S, window, part_size,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, E: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Writes dk and dv of a block of keys or, when given `visible`, of S sinks: what part_size rows contribute."""
    key = tl.program_id(0) * K + tl.arange(0, K)
    B = tl.num_programs(2)
    g, b = tl.program_id(1) % G, tl.program_id(2).to(tl.int64)
    part = tl.program_id(1) // G
    if visible is None:
        first = tl.program_id(0) * K - (S - T)
        end = tl.minimum(first + K - 1 + window, T) * R
        first = tl.maximum(first, 0) * R
    else:
        first = part * part_size
        end = tl.minimum(first + part_size, T * R)
    at, real = (b * S + key) * G + g, key < S
    k_KC, v_KE = _load(k, at, real, D, C), _load(v, at, real, V, E)
    dk_KC = tl.zeros([K, C], tl.float32)
    dv_KE = tl.zeros([K, E], tl.float32)
    for start in range(first, end, N):
        n = start + tl.arange(0, N)
        query, inside = n // R, n < end
        if visible is None:
            seen = _in_window(query[None, :], key[:, None], real[:, None], T, S, b, window, valid, segment)
        else:
            seen = _sink_seen(query[None, :], key[:, None], T, S, b, visible)
        if tl.max(seen.to(tl.int32)) > 0:
            row = b * T * G * R + _row(n, g, G, R)
            q_NC, do_NE = _load(q, row, inside, D, C), _load(do, row, inside, V, E)
            lse_N = tl.load(lse + row, mask=inside, other=float("-inf"))
            some = lse_N != float("-inf")
            lse_N = tl.where(some, lse_N, float("inf"))
            mean_N = tl.load(mean + row, mask=some, other=0.0)
            weights = tl.exp(_logits(k_KC, q_NC, scale, seen) - lse_N[None, :])
            dv_KE = _dot(weights, do_NE, dv_KE)
            dweights = _dot(v_KE, tl.trans(do_NE), None)
            dk_KC = _dot(weights * (dweights - mean_N[None, :]) * scale, q_NC, dk_KC)
    at += part.to(tl.int64) * B * S * G
    _store(dk, at, real, dk_KC, D, C)
    _store(dv, at, real, dv_KE, V, E)


def forward(
    q_BTHD: Tensor,
    k_BSGD: Tensor,
    v_BSGV: Tensor,
    valid_BS: Tensor | None,
    segment_BS: Tensor | None,
    sink_k_BMGD: Tensor | None,
    sink_v_BMGV: Tensor | None,
    visible_BTM: Tensor | None,
    memory_BTHV: Tensor | None,
    mass_BTH: Tensor | None,
    log_weight_BTH: Tensor | None,
    share_H: Tensor | None,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """-> o_BTHV, lse_BTH"""
    (B, T, H, _), V = q_BTHD.shape, v_BSGV.shape[3]
    o, lse = q_BTHD.new_empty(B, T, H, V, dtype=v_BSGV.dtype), q_BTHD.new_empty(B, T, H, dtype=torch.float32)
    masks = valid_BS, segment_BS, sink_k_BMGD, sink_v_BMGV, visible_BTM
    blocks, numbers, sizes = _plan(q_BTHD, k_BSGD, v_BSGV, sink_k_BMGD, window)
    tensors = _plain(q_BTHD, k_BSGD, v_BSGV, *masks, memory_BTHV, mass_BTH, log_weight_BTH, share_H)
    with torch.cuda.device_of(q_BTHD):
        forward_kernel[triton.cdiv(T * sizes["R"], blocks.forward.rows), sizes["G"], B](
            *tensors, o, lse, scale, *numbers, **sizes,
            **_launch_rows(blocks.forward, sizes["R"], window, numbers[2]),
        )  # fmt: skip
    return o, lse


def backward(
    q_BTHD: Tensor,
    k_BSGD: Tensor,
    v_BSGV: Tensor,
    valid_BS: Tensor | None,
    segment_BS: Tensor | None,
    sink_k_BMGD: Tensor | None,
    sink_v_BMGV: Tensor | None,
    visible_BTM: Tensor | None,
    memory_BTHV: Tensor | None,
    mass_BTH: Tensor | None,
    log_weight_BTH: Tensor | None,
    share_H: Tensor | None,
    window: int,
    scale: float,
    lse_BTH: Tensor,
    do_BTHV: Tensor,
    dlse_BTH: Tensor,
) -> list[Tensor]:
    """-> the gradients of all that is given and has one."""
    masks = valid_BS, segment_BS, sink_k_BMGD, sink_v_BMGV, visible_BTM
    blocks, numbers, sizes = _plan(q_BTHD, k_BSGD, v_BSGV, sink_k_BMGD, window)
    (T, S, M, _), (B, G, R) = numbers, (len(q_BTHD), sizes["G"], sizes["R"])
    q, k, v, valid, segment, sink_k, sink_v, visible = _plain(q_BTHD, k_BSGD, v_BSGV, *masks)
    beside = memory, mass, _, _ = _plain(memory_BTHV, mass_BTH, log_weight_BTH, share_H)
    lse, do, dlse = _plain(lse_BTH, do_BTHV, dlse_BTH)
    dq, dk, dv, mean = (torch.empty_like(x) for x in (q, k, v, lse))
    dmemory, dmass = (None if x is None else torch.empty_like(x) for x in (memory, mass))
    dweight = None if memory is None else torch.empty_like(lse)
    with torch.cuda.device_of(q):
        backward_q_kernel[triton.cdiv(T * R, blocks.queries.rows), G, B](
            q, k, v, valid, segment, sink_k, sink_v, visible, *beside, lse, do, dlse,
            dq, mean, dmemory, dmass, dweight, scale, *numbers, **sizes,
            **_launch_rows(blocks.queries, R, window, M),
        )  # fmt: skip
        backward_k_kernel[triton.cdiv(S, blocks.keys.keys), G, B](
            q, k, v, valid, segment, None, lse, do, mean, dk, dv, scale, T, S, window, 0,
            **sizes, **_launch(blocks.keys),
        )  # fmt: skip
        grads = [dq, dk, dv]
        if sink_k is not None:
            rows = blocks.keys.rows
            row_blocks, sink_blocks = triton.cdiv(T * R, rows), triton.cdiv(M, SINKS)
            part_size = triton.cdiv(row_blocks, max(PROGRAMS // max(B * G * sink_blocks, 1), 1)) * rows
            parts = triton.cdiv(T * R, part_size)
            dsink_k, dsink_v = (q.new_empty(parts, *x.shape, dtype=torch.float32) for x in (sink_k, sink_v))
            backward_k_kernel[sink_blocks, G * parts, B](
                q, sink_k, sink_v, None, None, visible, lse, do, mean, dsink_k, dsink_v,
                scale, T, M, window, part_size, **sizes, **_launch(blocks.keys._replace(keys=SINKS)),
            )  # fmt: skip
            grads += [dsink_k.sum(0).to(sink_k.dtype), dsink_v.sum(0).to(sink_v.dtype)]
    if share_H is not None and dweight is not None:
        dweight = dweight.sum((0, 1))
    return [*grads, *(x for x in (dmemory, dmass, dweight) if x is not None)]


def _plain(*tensors: Tensor | None) -> list[Any]:
    """What a kernel can address: dense, booleans as bytes."""
    dense = [None if x is None else x.contiguous() for x in tensors]
    return [x.view(torch.uint8) if x is not None and x.dtype == torch.bool else x for x in dense]


def _size(q: Tensor, v: Tensor) -> tuple[int, int]:
    """The key of BLOCKS."""
    channels = triton.next_power_of_2(max(q.shape[3], v.shape[3], 64))
    return max(q.element_size(), v.element_size()), channels


def _plan(q: Tensor, k: Tensor, v: Tensor, sink_k: Tensor | None, window: int) -> tuple[Blocks, tuple, dict[str, int]]:
    """The blocks, the kernels' numbers T, S, M, window, and their constants."""
    (T, H, D), (S, G), V = q.shape[1:], k.shape[1:3], v.shape[3]
    C, E = (max(triton.next_power_of_2(size), 16) for size in (D, V))
    blocks = BLOCKS[_size(q, v)]
    sizes = {"G": G, "R": H // G, "D": D, "V": V, "C": C, "E": E}
    return blocks, (T, S, 0 if sink_k is None else sink_k.shape[1], window), sizes


def at_once(block: Block, R: int, window: int, sinks: int) -> int:
    """How many blocks of keys hold all that a block of rows may see; 0 if too many, or if sinks are in several."""
    queries = (R - math.gcd(R, block.rows) + block.rows - 1) // R + 1
    blocks = triton.cdiv(sinks + window + queries - 1, block.keys)
    return blocks if blocks <= block.at_once and sinks <= block.keys else 0


def _launch(block: Block) -> dict[str, int]:
    return {"N": block.rows, "K": block.keys, "num_warps": block.warps, "num_stages": 1}


def _launch_rows(block: Block, R: int, window: int, sinks: int) -> dict[str, int]:
    """For a kernel that gives a program a block of rows."""
    blocks = at_once(block, R, window, sinks)
    keys = block.keys if blocks else block.looped or block.keys
    held = {"BLOCKS": blocks, "SINKS": triton.next_power_of_2(max(sinks, 1)) if blocks else SINKS}
    return _launch(block) | {"K": keys} | held


_forward = torch.library.custom_op("gated_kernels::window", forward, mutates_args=())
_backward = torch.library.custom_op("gated_kernels::window_backward", backward, mutates_args=())


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return v.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


@_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, valid: Any, segment: Any, sink_k: Any, sink_v: Any, *rest: Any) -> list[Tensor]:
    given = q, k, v, sink_k, sink_v, *rest[1:5]
    return [x.new_empty(x.shape) for x in given if x is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(*tensors, output[1])


def _differentiate(ctx: Any, do: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, lse = ctx.saved_tensors
    grads = iter(_backward(*tensors, ctx.window, ctx.scale, lse, do, dlse))
    with_gradients = 0, 1, 2, 5, 6, 8, 9, 10, 11
    return *(next(grads) if i in with_gradients and x is not None else None for i, x in enumerate(tensors)), None, None


_forward.register_autograd(_differentiate, setup_context=_setup_context)


def window(
    q_BTHD: Tensor,
    k_BSGD: Tensor,
    v_BSGV: Tensor,
    *,
    window: int,
    scale: float,
    valid_BS: Tensor | None = None,
    segment_BS: Tensor | None = None,
    sink_k_BMGD: Tensor | None = None,
    sink_v_BMGV: Tensor | None = None,
    sink_visible_BTM: Tensor | None = None,
    memory_BTHV: Tensor | None = None,
    mass_BTH: Tensor | None = None,
    log_weight_BTH: Tensor | None = None,
    share_H: Tensor | None = None,
) -> tuple[Tensor, Tensor] | None:
    """What `chunk.window` returns for the same arguments; None on a CPU, and with a warning once for what the kernels
    cannot do."""
    if not (q_BTHD.is_cuda or INTERPRETED.value):
        return None
    valid_BS, sink_visible_BTM = (None if x is None else x.bool() for x in (valid_BS, sink_visible_BTM))
    tensors = (q_BTHD, k_BSGD, v_BSGV, valid_BS, segment_BS, sink_k_BMGD, sink_v_BMGV, sink_visible_BTM)
    beside = memory_BTHV, *(None if x is None else x.float() for x in (mass_BTH, log_weight_BTH, share_H))
    why = _unsupported(*tensors, *beside)
    if why is None:
        return _forward(*tensors, *beside, window, scale)
    if not torch.compiler.is_compiling():
        _warn(why)
    return None


def _unsupported(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor | None,
    segment: Tensor | None,
    sink_k: Tensor | None,
    sink_v: Tensor | None,
    visible: Tensor | None,
    memory: Tensor | None,
    mass: Tensor | None,
    log_weight: Tensor | None,
    share: Tensor | None,
) -> str | None:
    (B, T, H, D), (S, G), V = q.shape, k.shape[1:3], v.shape[3]
    M = 0 if sink_k is None else sink_k.shape[1]
    for x, like in ((q, q), (v, v), (k, q), (sink_k, q), (sink_v, v), (memory, memory)):
        if (
            x is not None
            and like is not None
            and (x.dtype != like.dtype or x.dtype not in (torch.float32, torch.bfloat16, torch.float16))
        ):
            return f"{x.dtype} beside {like.dtype}" if x.dtype != like.dtype else f"{x.dtype}"
    if _size(q, v) not in BLOCKS:
        return f"heads of {D} and {V} channels in {q.dtype}"
    tensors = k, v, valid, segment, sink_k, sink_v, visible, memory, mass, log_weight, share
    shapes = ((B, S, G, D), (B, S, G, V), (B, S), (B, S), (B, M, G, D), (B, M, G, V), (B, T, M))
    for x, shape in zip(tensors, (*shapes, (B, T, H, V), (B, T, H), (B, T, H), (H,))):
        if x is not None and (x.shape != shape or x.device != q.device):  # a kernel would read where nothing is
            return f"tensor of shape {tuple(x.shape)} on {x.device} for one of {shape} on {q.device}"
    return None


@cache
def _warn(why: str) -> None:
    warnings.warn(f"gated_kernels: the Triton window takes no {why}; the torch op runs instead", stacklevel=4)
