"""The first kernel of a step: pieces of the features of every head, and the window (see triton.py)."""

from __future__ import annotations

import triton
import triton.language as tl

from gated_kernels.common.interpreter import INTERPRETED
from gated_kernels.common.tiles import dot
from gated_kernels.fused_step.pages import offset_of, page_of, slot_of
from gated_kernels.fused_step.rotary import rotated


@triton.jit
def _ahead(x, i, count):
    """Prefetches elements i, of `count`, at x into the L2 cache. It is a hint that waits for nothing, and may come
    before the data is written."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0", "=r,l", [x + tl.minimum(i, count - 1)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _split(x):
    """x as the sum of two numbers that TF32 holds, to within 22 bits: it rounded to TF32, and the rest."""
    high = ((x.to(tl.uint32, bitcast=True) + 0x1000) & 0xFFFFE000).to(tl.float32, bitcast=True)
    low = x - high
    if not INTERPRETED:  # a product reads the upper 19 bits: half of the last one rounds to nearest
        low = (low.to(tl.uint32, bitcast=True) + 0x1000).to(tl.float32, bitcast=True)
    return high, low


@triton.jit
def _product(high, low, b, c):
    """(high + low) b + c in TF32 products that lose only the smallest one; low: None if it is zero."""
    b_high, b_low = _split(b)
    c = dot(high, b_low, c, tl.float32, "tf32")
    if low is not None:
        c = dot(low, b_high, c, tl.float32, "tf32")
    return dot(high, b_high, c, tl.float32, "tf32")


@triton.jit
def _of_z(z, f, inside, F: tl.constexpr):
    """Elements f of the normalizers at z, of every row; zeros without them."""
    found = tl.zeros([inside.shape[0], f.shape[0]], tl.float32)
    if z is not None:
        found = tl.load(z[:, None] + f[None, :], mask=inside[:, None] & (f < F)[None, :], other=0.0)
    return found


@triton.jit
def _of_codes(codes, f, e, F: tl.constexpr, E: tl.constexpr):
    """Codes f."""
    return tl.load(codes + f[:, None] * E + e, mask=(f < F)[:, None] & (e < E), other=0.0)


@triton.jit
def _piece(
    found, z, z_rows, f, c, inside, row, logits, tops, sums, normalizers, F: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Writes the logits `found` of piece c, the largest one, the sum of exponentials relative to it and, with z, that
    sum weighted by `z_rows`, elements f of z."""
    tl.store(logits + row[:, None] * F + f[None, :], found, mask=inside[:, None] & (f < F)[None, :])
    found = tl.where((f < F)[None, :], found, float("-inf"))
    top = tl.max(found, 1)
    weights = tl.exp(found - top[:, None])
    tl.store(tops + row * S + c, top, mask=inside)
    tl.store(sums + row * S + c, tl.sum(weights, 1), mask=inside)
    if z is not None:
        tl.store(normalizers + row * S + c, tl.sum(weights * z_rows, 1), mask=inside)


@triton.jit
def _features(
    x, b, B, n, g, c, along, rows, z, state_step, proj, bias, log_inv_temperature, codes,
    logits, totals, tops, sums, normalizers,
    COUNT: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, F: tl.constexpr, S: tl.constexpr,
    T: tl.constexpr, CE: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """T pieces, from piece c, of the features of head n of COUNT, which uses the codes of group g, for the vectors at x
    of rows b. With codes, also writes the vectors' dot product with `along`, or the sum of their channels without it.
    """
    inside = b < B
    f = c * BF + tl.arange(0, BF)
    row = b.to(tl.int64) * COUNT + n
    # where a program takes one piece, all loads are issued before the first result is used
    if z is not None:
        z += offset_of(page_of(rows, b, inside), state_step, G * F) + g * F
    if codes is None:
        z_rows = _of_z(z, f, inside, F)
        block = inside[:, None] & (f < F)[None, :]
        found = tl.load(x[:, None] + f[None, :], mask=block, other=0.0).to(tl.float32)
        _piece(found, z, z_rows, f, c, inside, row, logits, tops, sums, normalizers, F, S)
    else:
        e = tl.arange(0, CE)[None, :]
        codes += g * (F * E)
        if T == 1:
            z_rows = _of_z(z, f, inside, F)
            code = _of_codes(codes, f, e, F, E)
        shifted = tl.load(bias + e, mask=e < E, other=0.0)
        inv_temperature = tl.load(log_inv_temperature)
        u = tl.zeros([b.shape[0], CE], tl.float32)
        total = tl.zeros([b.shape[0]], tl.float32)
        for first in range(0, D, BD):
            d = first + tl.arange(0, BD)
            matrix = tl.load(proj + d[:, None] * E + e, mask=(d < D)[:, None] & (e < E), other=0.0)
            part = tl.load(x[:, None] + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)
            if part.dtype == tl.float32:
                high, low = _split(part)
                u = _product(high, low, matrix, u)
            else:
                part = part.to(tl.float32)  # which TF32 holds
                u = _product(part, None, matrix, u)
            if along is not None:
                part *= tl.load(along + d, mask=d < D, other=0.0)[None, :]
            total += tl.sum(part, 1)
        u += shifted
        u *= (tl.exp(inv_temperature) / tl.maximum(tl.sqrt(tl.sum(u * u, 1)), 1e-12))[:, None]
        tl.store(totals + row, total, mask=b < tl.where(c == 0, B, 0))
        high, low = _split(u)
        if T == 1:
            found = _product(high, low, tl.trans(code), None)
            _piece(found, z, z_rows, f, c, inside, row, logits, tops, sums, normalizers, F, S)
        else:
            for p in range(c, min(c + T, S)):
                f = p * BF + tl.arange(0, BF)
                found = _product(high, low, tl.trans(_of_codes(codes, f, e, F, E)), None)
                z_rows = _of_z(z, f, inside, F)
                _piece(found, z, z_rows, f, p, inside, row, logits, tops, sums, normalizers, F, S)


@triton.jit
def _add(q, k, v, seen, scale, o, top, normalizer):
    """Adds keys to an online softmax."""
    logits = tl.where(seen[None, :], dot(q, tl.trans(k), None, k.dtype, "tf32x3") * scale, float("-inf"))
    higher = tl.maximum(top, tl.max(logits, 1))
    finite = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp(logits - finite[:, None])
    keep = tl.exp(top - finite)
    o = o * keep[:, None] + dot(weights, v, None, v.dtype, "tf32x3")
    return o, higher, normalizer * keep + tl.sum(weights, 1)


@triton.jit
def _slots(ring_k, ring_v, p, column, P: tl.constexpr, G: tl.constexpr, D: tl.constexpr):
    """The keys and values in slots p of the ring."""
    at = p[:, None] * (G * D) + column
    inside = (p < P)[:, None] & (column < D)
    values = tl.load(ring_v + at, mask=inside, other=0.0)
    return tl.load(ring_k + at, mask=inside, other=0.0), values


@triton.jit
def _seen(position, p, slot, P: tl.constexpr):
    """Whether slots p hold tokens that are not padding. `slot` is the oldest."""
    return tl.load(position + tl.where(p < slot, p - slot + P, p - slot), mask=p < P, other=-1) >= 0


@triton.jit
def _sinks(sink_k, sink_v, visible, m, column, M: tl.constexpr, G: tl.constexpr, D: tl.constexpr):
    """The keys and values of sinks m, and whether they are visible."""
    shown = tl.load(visible + m, mask=m < M, other=0) != 0
    keys, values = _slots(sink_k, sink_v, m, column, M, G, D)
    return keys, values, shown


@triton.jit
def _window(
    b, g, rows, head_step, ring_position, position_step, q, k, v, q_step, k_step, v_step,
    cos, sin, cos_step, ring_k, ring_v, position, sink_k, sink_v, visible, o, lse, scale,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, C: tl.constexpr, P: tl.constexpr, M: tl.constexpr,
    CD: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SINKS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Attention of the R queries of a row's key-value head over the ring, the sinks and their own key."""
    n = tl.arange(0, N)
    column = tl.arange(0, CD)[None, :]
    head = g * R + n
    slot = slot_of(ring_position, b, True, position_step, P)
    page = page_of(rows, b, True)
    if C > 0:
        cos += b * cos_step
        sin += b * cos_step
    queries = rotated(q + b * q_step + head[:, None] * D, column, (n < R)[:, None], cos, sin, D, C)
    new_k = rotated(k + b * k_step + g * D, column, column < D, cos, sin, D, C)
    new_v = tl.load(v + b * v_step + g * D + column, mask=column < D, other=0.0)
    position += b * (P + 1)
    is_token = tl.load(position + P) >= 0
    of_ring = offset_of(page, head_step, P * G * D) + g * D
    ring_k += of_ring
    ring_v += of_ring
    if sink_k is not None:
        of_sinks = offset_of(page, head_step, M * G * D) + g * D
        sink_k += of_sinks
        sink_v += of_sinks
        visible += b * M
        if EARLY:
            sinks, values_of_sinks, shown = _sinks(sink_k, sink_v, visible, tl.arange(0, SINKS), column, M, G, D)
    top = tl.full([N], float("-inf"), tl.float32)
    normalizer = tl.zeros([N], tl.float32)
    mean = tl.zeros([N, CD], tl.float32)
    for start in range(0, P, K):
        p = start + tl.arange(0, K)
        seen = _seen(position, p, slot, P)
        keys, values = _slots(ring_k, ring_v, p, column, P, G, D)
        mean, top, normalizer = _add(queries, keys, values, seen, scale, mean, top, normalizer)
    if sink_k is not None:
        for start in tl.static_range(0, M, SINKS):
            if start > 0 or not EARLY:
                m = start + tl.arange(0, SINKS)
                sinks, values_of_sinks, shown = _sinks(sink_k, sink_v, visible, m, column, M, G, D)
            mean, top, normalizer = _add(queries, sinks, values_of_sinks, shown, scale, mean, top, normalizer)
    own = tl.sum(queries.to(tl.float32) * new_k.to(tl.float32), 1) * scale
    own = tl.where(is_token, own, float("-inf"))
    higher = tl.maximum(top, own)
    finite = tl.where(higher == float("-inf"), 0.0, higher)
    keep, weight = tl.exp(top - finite), tl.exp(own - finite)
    normalizer = normalizer * keep + weight
    mean = mean * keep[:, None] + weight[:, None] * new_v.to(tl.float32)
    nothing = normalizer == 0.0
    mean = mean / tl.where(nothing, 1.0, normalizer)[:, None]
    row = b * (G * R) + head
    tl.store(o + row[:, None] * D + column, mean, mask=(n < R)[:, None] & (column < D))
    tl.store(lse + row, tl.where(nothing, float("-inf"), higher + tl.log(normalizer)), mask=n < R)


@triton.jit
def read_kernel(
    q, k, v, q_step, k_step, v_step, cos, sin, cos_step, position, visible,
    ring_k, ring_v, deferred, sink_k, sink_v, z, rows, head_step, state_step, ring_position, position_step,
    q_proj, q_bias, q_log_inv_temperature, k_proj, k_bias, k_log_inv_temperature, codes, asked,
    logits, totals, tops, sums, normalizers, o, lse, scale, B,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, C: tl.constexpr, E: tl.constexpr, F: tl.constexpr,
    P: tl.constexpr, M: tl.constexpr, S: tl.constexpr, T: tl.constexpr, CD: tl.constexpr, CE: tl.constexpr,
    BD: tl.constexpr, BF: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SINKS: tl.constexpr, ROWS: tl.constexpr,
    PP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(B, ROWS)
    i = tl.program_id(0)
    runs = tl.cdiv(S, T)
    of_features = (G * R + G) * tiles * runs
    c = i % runs * T
    n = i // runs // tiles
    b = i // runs % tiles * ROWS + tl.arange(0, ROWS)
    if OVERLAP:
        if n >= G * R + G:
            if rows is None:  # which page a row has may still be written
                bg = (i - of_features).to(tl.int64)
                at = tl.arange(0, PP)[:, None] * (G * D) + tl.arange(0, CD // 16)[None, :] * 16
                first = offset_of(bg // G, head_step, P * G * D) + bg % G * D
                last = (P - 1) * G * D + D
                _ahead(ring_k + first, at, last)
                _ahead(ring_v + first, at, last)
        elif codes is not None:
            lines = tl.arange(0, CD * CE // 32) * 32
            g = tl.where(n < G * R, n // R, n - G * R)
            last = tl.minimum(T * BF, F - c * BF) * E
            _ahead(codes + (g * F + c * BF) * E, tl.arange(0, T * BF * CE // 32) * 32, last)
            if n < G * R:
                _ahead(q_proj + n * D * E, lines, D * E)
            else:
                _ahead(k_proj + g * D * E, lines, D * E)
        tl.extra.cuda.gdc_wait()  # before anything is read by this kernel, or by the next one, which loads early
        tl.extra.cuda.gdc_launch_dependents()
    if n < G * R:
        x = q + b.to(tl.int64) * q_step + n * D
        if codes is not None:
            q_proj += n * D * E
            q_bias += n * E
            q_log_inv_temperature += n
        _features(
            x, b, B, n, n // R, c, None if asked is None else asked + n * D, rows, z, state_step,
            q_proj, q_bias, q_log_inv_temperature, codes, logits, totals, tops, sums, normalizers,
            G * R + G, G, D, E, F, S, T, CE, BD, BF,
        )  # fmt: skip
    elif n < G * R + G:
        g = n - G * R
        x = k + b.to(tl.int64) * k_step + g * D
        if deferred is not None:
            slot = slot_of(ring_position, b, b < B, position_step, P)
            x = deferred + offset_of(page_of(rows, b, b < B), head_step, P * G * D) + (slot * G + g) * D
        if codes is not None:
            k_proj += g * D * E
            k_bias += g * E
            k_log_inv_temperature += g
        _features(
            x, b, B, n, g, c, None, None, None, None,
            k_proj, k_bias, k_log_inv_temperature, codes, logits, totals, tops, sums, normalizers,
            G * R + G, G, D, E, F, S, T, CE, BD, BF,
        )  # fmt: skip
    else:
        i -= of_features
        _window(
            (i // G).to(tl.int64), i % G, rows, head_step, ring_position, position_step,
            q, k, v, q_step, k_step, v_step, cos, sin, cos_step,
            ring_k, ring_v, position, sink_k, sink_v, visible, o, lse, scale,
            G, R, D, C, P, M, CD, N, K, SINKS, K == 64,
        )  # fmt: skip
