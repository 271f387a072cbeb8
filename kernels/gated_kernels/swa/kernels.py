"""The kernels of sliding-window attention with sinks and a memory. `triton.py` has the legend of the shapes."""

from __future__ import annotations

import triton
import triton.language as tl

from gated_kernels.common.interpreter import rounded
from gated_kernels.common.tiles import dot

PRECISION = tl.constexpr("ieee")  # of products: tf32 would round away the forget gate's cumulative sums


@triton.jit
def _row(n, g, G: tl.constexpr, R: tl.constexpr):
    """The row of [T, H] that is row n of key-value head g."""
    return (n // R * G + g) * R + n % R


@triton.jit
def _load(x, row, inside, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """[rows, PADDED] of a matrix with SIZE columns; 0 beyond them and where not `inside`."""
    column = tl.arange(0, PADDED)
    at = row.to(tl.int64)[:, None] * SIZE + column[None, :]
    return tl.load(x + at, mask=inside[:, None] & (column < SIZE)[None, :], other=0.0)


@triton.jit
def _store(x, row, inside, value, SIZE: tl.constexpr, PADDED: tl.constexpr):
    column = tl.arange(0, PADDED)
    at = row.to(tl.int64)[:, None] * SIZE + column[None, :]
    tl.store(x + at, rounded(value, x.dtype.element_ty), mask=inside[:, None] & (column < SIZE)[None, :])


@triton.jit
def _in_window(query, key, real, T, S, b, window_size, valid, segment):
    """Whether queries, [N, 1] or [1, N], see keys, [1, K] or [K, 1]. Keys that are not `real` are never seen."""
    own = query + (S - T)
    seen = real & (own - key >= 0) & (own - key < window_size) & (own < S)
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
    """[N, K] which of the K sinks from `start` on the queries see; there are at most SINKS. Computed from a bit mask
    per row, because a tile of N x K addresses would occupy half of all registers throughout."""
    m = tl.arange(0, SINKS)
    sees = _sink_seen(query[:, None], start + m[None, :], T, M, b, visible).to(tl.int64)
    bits = tl.sum(sees << m[None, :], 1)
    return (bits[:, None] >> tl.arange(0, K)[None, :]) & 1 != 0


@triton.jit
def _keys(
    k, v, sink_k, sink_v, valid, segment, visible, start, first, end, query, T, S, M, b, g, window_size,
    G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, C: tl.constexpr, E: tl.constexpr, K: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """K entries from `start` on of all that a block of rows may see: the M sinks, then keys `first` to `end`.

    Returns which of them each row sees, and their k and v. Without `visible` there are no sinks among them. Otherwise
    the sinks are among the first SINKS.
    """
    index = start + tl.arange(0, K)
    key = first + index - M
    real = key < end
    if visible is not None:
        real = real & (index >= M)
    seen = _in_window(query[:, None], key[None, :], real[None, :], T, S, b, window_size, valid, segment)
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
    """[rows, PADDED] of x or, where `sink` holds, of another matrix with as many columns."""
    column = tl.arange(0, PADDED)
    at = row.to(tl.int64) * SIZE
    source = x + at
    if of_sinks is not None:
        source = tl.where(sink, of_sinks + at, source)
    return tl.load(source[:, None] + column[None, :], mask=inside[:, None] & (column < SIZE)[None, :], other=0.0)


@triton.jit
def _load_memory(memory, normalizer, row, inside, V: tl.constexpr, E: tl.constexpr):
    """[N, E] a memory's output for each row, divided by its normalizer, in fp32."""
    value = _load(memory, row, inside, V, E).to(tl.float32)
    if normalizer is not None:
        value *= (1.0 / tl.load(normalizer + row, mask=inside, other=1.0))[:, None]
    return value


@triton.jit
def _logits(x, y, scale, seen):
    """scale x y^T, -inf where not seen."""
    return tl.where(seen, dot(x, tl.trans(y), None, y.dtype, PRECISION) * scale, float("-inf"))


@triton.jit
def _rest(mix_weight):
    """The window's share, 1 - mix_weight. Never 0, because callers take its log and divide by it."""
    return tl.maximum(1.0 - mix_weight, 1e-30)


@triton.jit
def _finite(top):
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _add(logits, v, o, top, normalizer):
    """Adds keys to an online softmax."""
    higher = tl.maximum(top, tl.max(logits, 1))
    keep = tl.exp(top - _finite(higher))
    weights = tl.exp(logits - _finite(higher)[:, None])
    return dot(weights, v, o * keep[:, None], v.dtype, PRECISION), higher, normalizer * keep + tl.sum(weights, 1)


@triton.jit(do_not_specialize=["T", "S"])
def forward_kernel(
    q, k, v, valid, segment, sink_k, sink_v, visible, memory, normalizer, memory_logit, mix_weight, o, lse,
    scale, T, S, M, window_size, G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, E: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SINKS: tl.constexpr, BLOCKS: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    if ALIGNED:  # tells the compiler what it is not told by specialization; it then takes fewer registers
        T = T // 16 * 16
        S = S // 16 * 16
    n = tl.program_id(0) * N + tl.arange(0, N)
    g, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    query, inside = n // R, n < T * R
    row = b * T * G * R + _row(n, g, G, R)
    q_NC = _load(q, row, inside, D, C)
    o_NE = tl.zeros([N, E], tl.float32)
    top_N = tl.full([N], float("-inf"), tl.float32)
    normalizer_N = tl.zeros([N], tl.float32)
    first = tl.maximum(S - T + tl.program_id(0) * N // R - window_size + 1, 0)
    end = tl.minimum(S - T + (tl.program_id(0) * N + N - 1) // R + 1, S)
    if BLOCKS:
        each = ()  # type: tuple
        highest = tl.full([N, K], float("-inf"), tl.float32)
        for i in tl.static_range(BLOCKS):
            visible_here = visible if i == 0 else None  # only the first block holds sinks
            seen, k_KC, v_KE = _keys(
                k, v, sink_k, sink_v, valid, segment, visible_here, i * K, first, end, query, T, S, M, b, g,
                window_size, G, D, V, C, E, K, SINKS,
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
            o_NE = dot(weights, v_KE, o_NE, v_KE.dtype, PRECISION)
        normalizer_N = tl.sum(total, 1)
    else:
        for start in range(M, M + end - first, K):
            seen, k_KC, v_KE = _keys(
                k, v, sink_k, sink_v, valid, segment, None, start, first, end, query, T, S, M, b, g, window_size,
                G, D, V, C, E, K, SINKS,
            )  # fmt: skip
            o_NE, top_N, normalizer_N = _add(_logits(q_NC, k_KC, scale, seen), v_KE, o_NE, top_N, normalizer_N)
        if visible is not None:
            for start in range(0, M, SINKS):
                sink = start + tl.arange(0, SINKS)
                seen = _sink_seen(query[:, None], sink[None, :], T, M, b, visible)
                if tl.max(seen.to(tl.int32)) > 0:  # with packed documents, most sinks belong to others
                    at, real = (b * M + sink) * G + g, sink < M
                    k_KC, v_KE = _load(sink_k, at, real, D, C), _load(sink_v, at, real, V, E)
                    o_NE, top_N, normalizer_N = _add(_logits(q_NC, k_KC, scale, seen), v_KE, o_NE, top_N, normalizer_N)
    some = normalizer_N > 0
    normalizer_N = tl.where(some, normalizer_N, 1.0)
    o_NE *= (1.0 / normalizer_N)[:, None]
    lse_N = tl.where(some, top_N + tl.log(normalizer_N), float("-inf"))
    if memory_logit is not None:
        logit_N = tl.load(memory_logit + row, mask=inside, other=float("-inf"))
        top_N = _finite(tl.maximum(lse_N, logit_N))
        lse_N = top_N + tl.log(tl.exp(lse_N - top_N) + tl.exp(logit_N - top_N))
        mix_weight_N = tl.exp(logit_N - _finite(lse_N))
    elif mix_weight is not None:
        mix_weight_N = tl.load(mix_weight + g * R + n % R)
        lse_N -= tl.log(_rest(mix_weight_N))
    if memory is not None:
        o_NE += mix_weight_N[:, None] * (_load_memory(memory, normalizer, row, inside, V, E) - o_NE)
    _store(o, row, inside, o_NE, V, E)
    tl.store(lse + row, lse_N, mask=inside)


@triton.jit
def _weighed(q, k, v, do, lse, scale, seen):
    """The weights of the keys, and the gradients of these weights."""
    return tl.exp(_logits(q, k, scale, seen) - lse[:, None]), dot(do, tl.trans(v), None, v.dtype, PRECISION)


@triton.jit
def backward_q_kernel(
    q, k, v, valid, segment, sink_k, sink_v, visible, memory, normalizer, memory_logit, mix_weight, lse, do, dlse,
    dq, mean, dmemory, dnormalizer, dweight, dsink_k, dsink_v, scale, T, S, M, window_size,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, E: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SINKS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Writes dq, the memory's gradients and, for `backward_k_kernel`, each row's weighted mean of do.v, minus dlse.

    The means are computed from the same products that they will be subtracted from. do.o is equal in theory, but would
    not cancel as well. This takes two sweeps over the keys, unless all that a block of rows may see fits into BLOCKS
    blocks, which stay in registers. In that case this kernel also writes these rows' part of the sinks' gradients.
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
        if normalizer is not None:
            inverse = 1.0 / tl.load(normalizer + row, mask=inside, other=1.0)
            due *= inverse[:, None]
        of_memory_N = tl.sum(_load(memory, row, inside, V, E).to(tl.float32) * due, 1)
        if memory_logit is not None:
            weight_N = tl.exp(tl.load(memory_logit + row, mask=inside, other=float("-inf")) - lse_N)
        else:
            weight_N = tl.load(mix_weight + g * R + n % R)
        _store(dmemory, row, inside, due * weight_N[:, None], V, E)
        if normalizer is not None:
            tl.store(dnormalizer + row, -weight_N * of_memory_N * inverse, mask=inside)
    mean_N = tl.zeros([N], tl.float32)
    dq_NC = tl.zeros([N, C], tl.float32)
    first = tl.maximum(S - T + tl.program_id(0) * N // R - window_size + 1, 0)
    end = tl.minimum(S - T + (tl.program_id(0) * N + N - 1) // R + 1, S)
    if BLOCKS:
        each = ()  # type: tuple
        products = tl.zeros([N, K], tl.float32)
        for i in tl.static_range(BLOCKS):
            visible_here = visible if i == 0 else None  # only the first block holds sinks
            seen, k_KC, v_KE = _keys(
                k, v, sink_k, sink_v, valid, segment, visible_here, i * K, first, end, query, T, S, M, b, g,
                window_size, G, D, V, C, E, K, SINKS,
            )  # fmt: skip
            weights, dweights = _weighed(q_NC, k_KC, v_KE, do_NE, lse_N, scale, seen)
            products += weights * dweights
            each += ((weights, dweights, k_KC),)
        mean_N = tl.sum(products, 1)
    else:
        for start in range(M, M + end - first, K):
            seen, k_KC, v_KE = _keys(
                k, v, sink_k, sink_v, valid, segment, None, start, first, end, query, T, S, M, b, g, window_size,
                G, D, V, C, E, K, SINKS,
            )  # fmt: skip
            weights, dweights = _weighed(q_NC, k_KC, v_KE, do_NE, lse_N, scale, seen)
            mean_N += tl.sum(weights * dweights, 1)
        if visible is not None:
            for start in range(0, M, SINKS):
                sink = start + tl.arange(0, SINKS)
                seen = _sink_seen(query[:, None], sink[None, :], T, M, b, visible)
                if tl.max(seen.to(tl.int32)) > 0:  # with packed documents, most sinks belong to others
                    at, real = (b * M + sink) * G + g, sink < M
                    k_KC, v_KE = _load(sink_k, at, real, D, C), _load(sink_v, at, real, V, E)
                    weights, dweights = _weighed(q_NC, k_KC, v_KE, do_NE, lse_N, scale, seen)
                    mean_N += tl.sum(weights * dweights, 1)
    if memory is not None:
        if memory_logit is not None:
            mean_N += weight_N * of_memory_N
        else:
            mean_N /= _rest(weight_N)
            dlse_N /= _rest(weight_N)
        dweight_N = of_memory_N - mean_N + dlse_N
        if memory_logit is not None:
            dweight_N *= weight_N
        tl.store(dweight + row, dweight_N, mask=inside)
    mean_N -= dlse_N
    tl.store(mean + row, mean_N, mask=inside)
    if BLOCKS:
        for i in tl.static_range(BLOCKS):
            weights, dweights, k_KC = each[i]
            dlogits = rounded(weights * (dweights - mean_N[:, None]) * scale, k_KC.dtype)
            if i == 0 and dsink_k is not None:  # entries of this block that are not sinks are masked out
                index = tl.arange(0, K)
                at = ((tl.program_id(0).to(tl.int64) * tl.num_programs(2) + b) * M + index) * G + g
                _store(dsink_k, at, index < M, dot(tl.trans(dlogits), q_NC, None, q_NC.dtype, PRECISION), D, C)
                of_values = tl.trans(rounded(weights, do_NE.dtype))
                _store(dsink_v, at, index < M, dot(of_values, do_NE, None, do_NE.dtype, PRECISION), V, E)
            dq_NC = dot(dlogits, k_KC, dq_NC, k_KC.dtype, PRECISION)
    else:
        for start in range(M, M + end - first, K):
            seen, k_KC, v_KE = _keys(
                k, v, sink_k, sink_v, valid, segment, None, start, first, end, query, T, S, M, b, g, window_size,
                G, D, V, C, E, K, SINKS,
            )  # fmt: skip
            weights, dweights = _weighed(q_NC, k_KC, v_KE, do_NE, lse_N, scale, seen)
            dq_NC = dot(weights * (dweights - mean_N[:, None]) * scale, k_KC, dq_NC, k_KC.dtype, PRECISION)
        if visible is not None:
            for start in range(0, M, SINKS):
                sink = start + tl.arange(0, SINKS)
                seen = _sink_seen(query[:, None], sink[None, :], T, M, b, visible)
                if tl.max(seen.to(tl.int32)) > 0:  # with packed documents, most sinks belong to others
                    at, real = (b * M + sink) * G + g, sink < M
                    k_KC, v_KE = _load(sink_k, at, real, D, C), _load(sink_v, at, real, V, E)
                    weights, dweights = _weighed(q_NC, k_KC, v_KE, do_NE, lse_N, scale, seen)
                    dq_NC = dot(weights * (dweights - mean_N[:, None]) * scale, k_KC, dq_NC, k_KC.dtype, PRECISION)
    _store(dq, row, inside, dq_NC, D, C)


@triton.jit
def backward_k_kernel(
    q, k, v, valid, segment, visible, lse, do, mean, dk, dv, scale, T, S, window_size, part_size,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, E: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Writes dk and dv of a block of keys. With `visible` it does so for a block of sinks, S in all, and each program
    sums over only `part_size` rows."""
    key = tl.program_id(0) * K + tl.arange(0, K)
    B = tl.num_programs(2)
    g, b = tl.program_id(1) % G, tl.program_id(2).to(tl.int64)
    part = tl.program_id(1) // G
    if visible is None:
        first = tl.program_id(0) * K - (S - T)
        end = tl.minimum(first + K - 1 + window_size, T) * R
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
            seen = _in_window(query[None, :], key[:, None], real[:, None], T, S, b, window_size, valid, segment)
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
            dv_KE = dot(weights, do_NE, dv_KE, do_NE.dtype, PRECISION)
            dweights = dot(v_KE, tl.trans(do_NE), None, do_NE.dtype, PRECISION)
            dk_KC = dot(weights * (dweights - mean_N[None, :]) * scale, q_NC, dk_KC, q_NC.dtype, PRECISION)
    at += part.to(tl.int64) * B * S * G
    _store(dk, at, real, dk_KC, D, C)
    _store(dv, at, real, dv_KE, V, E)
