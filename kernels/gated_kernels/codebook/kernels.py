"""The Triton kernels of a codebook's feature map (see triton.py).

Shapes: B batch, T tokens, N heads, G heads with codes of their own, D head size, E size of a code, F codes. In a
kernel: M rows in a block, BD and BE the powers of two that hold D and E (at least 64), BF codes in a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gated_kernels.common.interpreter import rounded
from gated_kernels.common.tiles import dot, load, load_vector, store, store_vector

TO_BASE_2 = tl.constexpr(1.4426950408889634)
SHARPEST = tl.constexpr(2.0**14)


@triton.jit
def inv_temperature_of(log_inv_temperature, n):
    """The inverse temperature, at most SHARPEST. With u in fp16, a larger one would not tell more codes apart. Besides,
    rounding a logit in one place and not in another would then cost more accuracy than the weights may lose."""
    return tl.minimum(tl.exp(tl.load(log_inv_temperature + n)), SHARPEST)


@triton.jit
def unit_projection(x, proj, bias):
    """[M, BE] u, and the inverse of its length before normalization. As in torch, lengths are at least 1e-12."""
    x = tl.clamp(x.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
    y = dot(x, proj, None, tl.float16, "tf32") + bias[None, :]
    inverse = 1.0 / tl.maximum(tl.sqrt(tl.sum(y * y, 1)), 1e-12)
    return y * inverse[:, None], inverse


@triton.jit
def logits_by(u, codes, scale, f, F: tl.constexpr, BF: tl.constexpr):
    """[M, BF] logits to base 2. Very low beyond the last code, but not -inf, because they are multiplied by zeros."""
    logits = dot(u, tl.trans(codes), None, tl.float16, "tf32") * scale
    if F % BF:
        logits = tl.where((f < F)[None, :], logits, -1e30)
    return logits


@triton.jit(do_not_specialize=["rows"])
def forward_kernel(
    x, proj, bias, log_inv_temperature, codes, phi, sums, rows, part,
    N: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, F: tl.constexpr,
    M: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """The map, and the log-sum-exp of each row's softmax."""
    if ALIGNED:  # tells the compiler what it is not told by specialization; it then spills no registers
        rows = rows // 16 * 16
    n = tl.program_id(0) % N
    start = (tl.program_id(0) // N * part).to(tl.int64)
    codes += n // (N // G) * F * E
    i = tl.arange(0, M)
    d = tl.arange(0, BD)
    e = tl.arange(0, BE)
    f = tl.arange(0, BF)
    proj_DE = load(proj + n * D * E, d, D, E, e, E)
    bias_E = tl.load(bias + n * E + e, mask=e < E, other=0.0)
    scale = inv_temperature_of(log_inv_temperature, n) * TO_BASE_2
    if F <= BF:
        codes_FE = load(codes, f, F, E, e, E)
    for first in range(start, tl.minimum(start + part, rows), M):
        left = (rows - first).to(tl.int32)
        x_MD = load(x + (first * N + n) * D, i, left, N * D, d, D)
        u, _ = unit_projection(x_MD, proj_DE, bias_E)
        u = u.to(tl.float16)
        to = phi + (first * N + n) * F
        if F <= BF:
            logits = logits_by(u, codes_FE, scale, f, F, BF)
            top = tl.max(logits, 1)
            weights = tl.exp2(logits - top[:, None])
            normalizer = tl.sum(weights, 1)
            weights *= (1.0 / normalizer)[:, None]
            total = top + tl.log2(normalizer)
            store(to, rounded(weights, tl.bfloat16), i, left, N * F, f, F)
        else:
            top = tl.full((M,), float("-inf"), tl.float32)
            normalizer = tl.zeros((M,), tl.float32)
            for f0 in range(0, F, BF):
                logits = logits_by(u, load(codes, f0 + f, F, E, e, E), scale, f0 + f, F, BF)
                higher = tl.maximum(top, tl.max(logits, 1))
                normalizer = normalizer * tl.exp2(top - higher) + tl.sum(tl.exp2(logits - higher[:, None]), 1)
                top = higher
            total = top + tl.log2(normalizer)
            for f0 in range(0, F, BF):
                logits = logits_by(u, load(codes, f0 + f, F, E, e, E), scale, f0 + f, F, BF)
                weights = tl.exp2(logits - total[:, None])
                store(to, rounded(weights, tl.bfloat16), i, left, N * F, f0 + f, F)
        store_vector(sums + n.to(tl.int64) * rows + first, total, i, left, 1)


@triton.jit
def sums_and_means(sums, means, at, i, left):
    """Rows i from `at` on. Rows out of bounds get a sum of inf, and so weights of 0."""
    return tl.load(sums + at + i, mask=i < left, other=float("inf")), load_vector(means + at, i, left, 1)


@triton.jit
def dlogits_by(logits, dweights, total, mean, HAS_STATISTICS: tl.constexpr):
    """w (dw - mean) of weights w.

    A given mean (HAS_STATISTICS) was computed with weights rounded to bf16, so dw is multiplied by rounded weights too.
    Then a row's dlogits still cancel, however sharp its softmax is.
    """
    weights = tl.exp2(logits - total)
    dweights = dweights.to(tl.float32)
    if HAS_STATISTICS:
        return rounded(weights, tl.bfloat16).to(tl.float32) * dweights - weights * mean
    return weights * (dweights - mean)


@triton.jit
def row_statistics(
    u, inv_temperature, codes, dphi, ahead, i, left,
    N: tl.constexpr, E: tl.constexpr, F: tl.constexpr, M: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """[M] the log-sum-exp and the mean gradient of each row's softmax. `ahead` is the first block of dphi."""
    e = tl.arange(0, BE)
    f = tl.arange(0, BF)
    top = tl.full((M,), float("-inf"), tl.float32)
    normalizer = tl.zeros((M,), tl.float32)
    means = tl.zeros((M, BF), tl.float32)  # reduced at the end: a row sum changes the layout of a tile
    for f0 in range(0, F, BF):
        logits = logits_by(u, load(codes, f0 + f, F, E, e, E), inv_temperature * TO_BASE_2, f0 + f, F, BF)
        dweights = ahead.to(tl.float32)
        ahead = load(dphi, i, left, N * F, f0 + BF + f, F)  # prefetched while this block is computed
        higher = tl.maximum(top, tl.max(logits, 1))
        keep = tl.exp2(top - higher)
        weights = tl.exp2(logits - higher[:, None])
        normalizer = normalizer * keep + tl.sum(weights, 1)
        means = means * keep[:, None] + weights * dweights
        top = higher
    mean = tl.sum(means, 1) / normalizer
    return top + tl.log2(normalizer), mean


@triton.jit
def rows_kernel(
    x, proj, bias, log_inv_temperature, codes, dphi, us, dys, sums, means, dlog_inv_temperature, rows, part,
    N: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, F: tl.constexpr, HAS_STATISTICS: tl.constexpr,
    M: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """u, the gradient of P x + b (u before normalization), and partial sums of the temperature's gradient.

    Also the log-sum-exp and the mean gradient of each row's softmax, unless they are given (HAS_STATISTICS).
    """
    n = tl.program_id(0) % N
    start = (tl.program_id(0) // N * part).to(tl.int64)
    codes += n // (N // G) * F * E
    i = tl.arange(0, M)
    d = tl.arange(0, BD)
    e = tl.arange(0, BE)
    f = tl.arange(0, BF)
    proj_DE = load(proj + n * D * E, d, D, E, e, E)
    bias_E = tl.load(bias + n * E + e, mask=e < E, other=0.0)
    inv_temperature = inv_temperature_of(log_inv_temperature, n)
    dlog_inv_temperature_M = tl.zeros((M,), tl.float32)
    for first in range(start, tl.minimum(start + part, rows), M):
        left = (rows - first).to(tl.int32)
        back = dphi + (first * N + n) * F
        at_rows = n.to(tl.int64) * rows + first
        if not HAS_STATISTICS:
            ahead = load(back, i, left, N * F, f, F)
        x_MD = load(x + (first * N + n) * D, i, left, N * D, d, D)
        u_ME, inverse = unit_projection(x_MD, proj_DE, bias_E)
        u_ME = u_ME.to(tl.float16)
        store(us + (first * N + n) * E, u_ME, i, left, N * E, e, E)
        if HAS_STATISTICS:
            total, mean = sums_and_means(sums, means, at_rows, i, left)
        else:
            total, mean = row_statistics(u_ME, inv_temperature, codes, back, ahead, i, left, N, E, F, M, BE, BF)
            store_vector(sums + at_rows, total, i, left, 1)
            store_vector(means + at_rows, mean, i, left, 1)
        du = tl.zeros((M, BE), tl.float32)
        last: tl.constexpr = (F - 1) // BF * BF  # the loop runs backward: the blocks read last may still be cached
        for f0 in range(0, F, BF):
            at = last - f0 + f
            codes_FE = load(codes, at, F, E, e, E)
            logits = logits_by(u_ME, codes_FE, inv_temperature * TO_BASE_2, at, F, BF)
            dweights = load(back, i, left, N * F, at, F)
            dlogits = dlogits_by(logits, dweights, total[:, None], mean[:, None], HAS_STATISTICS)
            dlog_inv_temperature_M += tl.sum(dlogits * logits, 1)
            du = dot(rounded(dlogits, tl.bfloat16), rounded(codes_FE, tl.bfloat16), du, tl.bfloat16, "tf32")
        du *= inv_temperature
        u = u_ME.to(tl.float32)  # from fp16 rather than kept in fp32: saves registers
        along = tl.where(inverse < 1e12, tl.sum(u * du, 1), 0.0)
        dy = (du - u * along[:, None]) * inverse[:, None]
        store(dys + (first * N + n) * E, rounded(dy, tl.bfloat16), i, left, N * E, e, E)
    tl.store(dlog_inv_temperature + tl.program_id(0), tl.sum(dlog_inv_temperature_M, 0) / TO_BASE_2)


@triton.jit
def projections_kernel(
    x, proj, dys, dx, dproj, dbias, rows, part,
    N: tl.constexpr, D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """The gradients of the vectors, and partial sums of those of their projections and biases."""
    n = tl.program_id(0) % N
    start = (tl.program_id(0) // N * part).to(tl.int64)
    i = tl.arange(0, M)
    d = tl.arange(0, BD)
    e = tl.arange(0, BE)
    proj_DE = rounded(load(proj + n * D * E, d, D, E, e, E).to(tl.float32), tl.bfloat16)
    dproj_DE = tl.zeros((BD, BE), tl.float32)
    dbias_E = tl.zeros((BE,), tl.float32)
    for first in range(start, tl.minimum(start + part, rows), M):
        left = (rows - first).to(tl.int32)
        x_MD = load(x + (first * N + n) * D, i, left, N * D, d, D)
        dy_ME = load(dys + (first * N + n) * E, i, left, N * E, e, E)
        dbias_E += tl.sum(dy_ME.to(tl.float32), 0)
        dproj_DE = dot(tl.trans(x_MD), dy_ME, dproj_DE, tl.bfloat16, "tf32")
        dx_MD = dot(dy_ME, tl.trans(proj_DE), None, tl.bfloat16, "tf32")
        store(dx + (first * N + n) * D, rounded(dx_MD, tl.bfloat16), i, left, N * D, d, D)
    program = tl.program_id(0).to(tl.int64)
    store(dproj + program * D * E, dproj_DE, d, D, E, e, E)
    tl.store(dbias + program * E + e, dbias_E, mask=e < E)


@triton.jit
def codes_kernel(
    us, log_inv_temperature, codes, dphi, sums, means, dcodes, rows, part,
    N: tl.constexpr, G: tl.constexpr, E: tl.constexpr, F: tl.constexpr, HAS_STATISTICS: tl.constexpr,
    M: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of codes from some rows of a head. Logits are computed transposed, as they are needed."""
    blocks: tl.constexpr = (F + BF - 1) // BF
    program = tl.program_id(0) // blocks  # programs that load the same data have consecutive indices
    n = program % N
    start = (program // N * part).to(tl.int64)
    f = tl.program_id(0) % blocks * BF + tl.arange(0, BF)
    i = tl.arange(0, M)
    e = tl.arange(0, BE)
    codes_FE = load(codes + n // (N // G) * F * E, f, F, E, e, E)
    inv_temperature = inv_temperature_of(log_inv_temperature, n)
    dcodes_FE = tl.zeros((BF, BE), tl.float32)
    for first in range(start, tl.minimum(start + part, rows), M):
        left = (rows - first).to(tl.int32)
        u_ME = load(us + (first * N + n) * E, i, left, N * E, e, E)
        dweights = tl.trans(load(dphi + (first * N + n) * F, i, left, N * F, f, F))
        total, mean = sums_and_means(sums, means, n.to(tl.int64) * rows + first, i, left)
        logits = dot(codes_FE, tl.trans(u_ME), None, tl.float16, "tf32") * (inv_temperature * TO_BASE_2)
        dlogits = dlogits_by(logits, dweights, total[None, :], mean[None, :], HAS_STATISTICS)
        dcodes_FE = dot(rounded(dlogits, tl.bfloat16), rounded(u_ME, tl.bfloat16), dcodes_FE, tl.bfloat16, "tf32")
    store(dcodes + program.to(tl.int64) * F * E, dcodes_FE * inv_temperature, f, F, E, e, E)
