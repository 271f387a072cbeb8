"""The kernel of `bf16.py` for transposed reads, o_t = S_t q_t. `bf16.py` has the legend of shapes."""

from __future__ import annotations

import triton
import triton.language as tl

from gated_kernels.common.interpreter import rounded
from gated_kernels.common.tiles import dot, load, load_again, store
from gated_kernels.gla.fp32_kernels import is_pair
from gated_kernels.gla.intra_chunk import decay_to_middle, decay_to_read, is_readable, level_decay, state_at_middle
from gated_kernels.gla.state_scan import starts


@triton.jit(do_not_specialize=["T"])
def transposed_kernel(
    q, k, v, sums, strong, bounds, states, o, T,
    G: tl.constexpr, R: tl.constexpr, F: tl.constexpr, V: tl.constexpr, EXCLUSIVE: tl.constexpr, C: tl.constexpr,
    D: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
    STRONG: tl.constexpr,
):  # fmt: skip
    """A chunk's transposed reads, BF features per program, for all R query heads of a key-value head.

    Compiled twice, for STRONG chunks and for the others, and returns at once for chunks of the other kind. The score of
    t and s is q_t v_s, which no gate changes. It weighs k_s, decayed for each feature from s to t.
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
    q += (row * G * R + g * R) * V
    k += (row * G + g) * F
    v += (row * G + g) * V
    o += (row * G * R + g * R) * F
    states += chunk * F * V
    readable = is_readable(bounds, chunk, i, EXCLUSIVE, False, C)
    read = decay_to_read(sums, chunk, i, f, F, EXCLUSIVE, C)
    if not STRONG:
        right = rounded(load(k, i, rows, G * F, f, F) * decay_to_middle(sums, chunk, i, f, F, C), D)
    if V <= BV:
        x = tl.arange(0, BV)
        values = load(v, i, rows, G * V, x, V)
        before = state_at_middle(states, sums, chunk, f, x, F, V, C, D)
    for r in tl.range(R, disable_licm=True):
        if V <= BV:
            queries = load(q + r * V, i, rows, G * R * V, x, V)
            scores = dot(queries, tl.trans(values), None, D, PRECISION)
            outputs = dot(queries, tl.trans(before), None, D, PRECISION)
        else:
            scores = tl.zeros((C, C), tl.float32)
            outputs = tl.zeros((C, BF), tl.float32)
            for v0 in range(0, V, BV):
                x = v0 + tl.arange(0, BV)
                queries = load(q + r * V, i, rows, G * R * V, x, V)
                values = load(v, i, rows, G * V, x, V)
                before = state_at_middle(states, sums, chunk, f, x, F, V, C, D)
                scores = dot(queries, tl.trans(values), scores, D, PRECISION)
                outputs = dot(queries, tl.trans(before), outputs, D, PRECISION)
        if bounds is not None:
            outputs = tl.where((starts(bounds, chunk, i, C) < 0)[:, None], outputs, 0.0)
        scores = tl.where(readable, scores, 0.0)
        if STRONG:
            outputs *= read
            # a token reads itself without decay
            own = tl.sum(tl.where(row_ == column, scores, 0.0), 1)[:, None]
            outputs += own * load_again(k, i, rows, G * F, f, F)
            for level in tl.range(LEVELS, disable_licm=True):
                decay = level_decay(sums, chunk, i, f, level, F, EXCLUSIVE, C)
                pair = tl.where(is_pair(row_, column, level), scores, 0.0)
                keys = load_again(k, i, rows, G * F, f, F)
                outputs += dot(pair, keys * decay, None, D, PRECISION) * decay
        else:
            outputs = dot(scores, right, outputs, D, PRECISION) * read
        store(o + r * F, outputs, i, rows, G * R * F, f, F)
