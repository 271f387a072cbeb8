"""The second kernel of a step: it updates and reads the state, and computes the output (see triton.py)."""

from __future__ import annotations

import triton
import triton.language as tl

from gated_kernels.common.interpreter import rounded
from gated_kernels.common.tiles import dot
from gated_kernels.fused_step import arguments
from gated_kernels.fused_step.pages import offset_of, page_of, slot_of
from gated_kernels.fused_step.rotary import rotated

# The axis of a tile that holds the state's rows. It is the one that Triton distributes over warps: of the axes before
# the last one, 3.6 takes the first and 3.9 the last.
ROWS_AXIS = tl.constexpr(1 if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7) else 2)
MIN_NORMALIZER, EMPTY = tl.constexpr(arguments.MIN_NORMALIZER), tl.constexpr(arguments.EMPTY)


@triton.jit
def _log_sigmoid(x):
    return tl.minimum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _down(x):
    """Values per row of a tile, [N or 1,BF], reshaped to broadcast along ROWS_AXIS of the tile."""
    return x[:, :, None, None] if ROWS_AXIS == 1 else x[:, None, :, None]


@triton.jit
def _of_state(state, z, f, column, z_too, D: tl.constexpr, F: tl.constexpr):
    """Rows f of the state, and elements f of the normalizer z (zeros unless `z_too`)."""
    f_in_tile = _down(f[None, :])
    block = (f_in_tile < F) & (column < D)
    rows = tl.load(state + f_in_tile * D + column, mask=block, other=0.0)
    of_z = tl.zeros([f.shape[0]], tl.float32)
    if z is not None:
        of_z = tl.load(z + f, mask=f < tl.where(z_too, F, 0), other=0.0)
    return rows, of_z


@triton.jit
def _of_features(logits, f, n, g, G: tl.constexpr, R: tl.constexpr, F: tl.constexpr):
    """Feature logits f of the key [BF] and of the queries [N,BF]."""
    of_key = tl.load(logits + (G * R + g) * F + f, mask=f < F, other=float("-inf"))
    block = (n < R)[:, None] & (f < F)[None, :]
    return of_key, tl.load(logits + (g * R + n)[:, None] * F + f[None, :], mask=block, other=float("-inf"))


@triton.jit
def _softmax(top_of, sum_of):
    """Combines the pieces of each row, given their largest logits and sums [rows, pieces]. Returns the largest logit,
    the factor by which each piece's sum enters the total, and the total."""
    top = tl.max(top_of, 1)
    top = tl.where(top == float("-inf"), 0.0, top)  # rows out of bounds
    weight = tl.exp(top_of - top[:, None])
    total = tl.sum(weight * sum_of, 1)
    return top, weight, tl.where(total == 0.0, 1.0, total)


@triton.jit
def write_kernel(
    k, v, k_step, v_step, cos, sin, cos_step, position, ring_k, ring_v, deferred, sink_k, sink_v, state, z,
    rows, head_step, state_step, ring_position, position_step, bias, power, memory_log,
    logits, totals, tops, sums, normalizers, window, lse, o, gate_normalizer, root,
    GATE: tl.constexpr, SHARED: tl.constexpr, G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
    F: tl.constexpr, FG: tl.constexpr, P: tl.constexpr, M: tl.constexpr, S: tl.constexpr,
    CD: tl.constexpr, CS: tl.constexpr, N: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    bg = tl.program_id(1).to(tl.int64)  # the programs of a state's columns run together
    b, g = bg // G, (bg % G).to(tl.int32)
    is_first = tl.program_id(0) == 0
    column = tl.program_id(0) * BV + tl.arange(0, BV)
    inside = column < D
    n = tl.arange(0, N)
    d = tl.arange(0, CD)
    # a tile of the state is [1,BF,BV/BC,BC] or [1,BV/BC,BF,BC], so that a thread has several columns of the same rows
    group = tl.arange(0, BV // BC)
    group = group[None, None, :, None] if ROWS_AXIS == 1 else group[None, :, None, None]
    in_tile = tl.program_id(0) * BV + group * BC + tl.arange(0, BC)
    # All loads are issued before the first result is used, beginning with those that do not depend on the other kernel.
    page = page_of(rows, b, True)
    state += offset_of(page, state_step, G * F * D) + g * (F * D)  # offsets within it fit into 32 bits
    if z is not None:
        z += offset_of(page, state_step, G * F) + g * F
    next_rows, next_z = _of_state(state, z, tl.arange(0, BF), in_tile, is_first, D, F)
    new_position = tl.load(position + b * (P + 1) + P)
    new_v = tl.load(v + b * v_step + g * D + column, mask=inside, other=0.0)
    if C > 0:
        cos += b * cos_step
        sin += b * cos_step
    key = k + b * k_step + g * D
    new_k = rotated(key, d, d < D, cos, sin, D, C)
    slot = slot_of(ring_position, b, True, position_step, P)
    at_slot = offset_of(page, head_step, P * G * D) + (slot * G + g) * D
    if deferred is not None:
        new_key = tl.load(key + d, mask=d < D, other=0.0)
        written = tl.load(position + b * (P + 1)) >= M
        value = tl.load(ring_v + at_slot + in_tile, mask=in_tile < D, other=0.0).to(tl.float32)
    else:
        written = new_position >= 0
        value = tl.load(v + b * v_step + g * D + in_tile, mask=in_tile < D, other=0.0).to(tl.float32)
    if GATE == "head":
        head_bias = tl.load(bias + g)
    if SHARED:
        gamma = tl.load(power + g * R + n, mask=n < R, other=0.0)
        beta = tl.load(memory_log + g * R + n, mask=n < R, other=0.0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    logits += b * (G * R + G) * F
    next_key, next_queries = _of_features(logits, tl.arange(0, BF), n, g, G, R, F)
    row = b * (G * R) + g * R + n
    out = row[:, None] * D + column[None, :]
    block = (n < R)[:, None] & inside[None, :]
    seen = tl.load(window + out, mask=block, other=0.0)
    heads = b * (G * R + G) + g * R + n
    key_head = b * (G * R + G) + G * R + g
    s = tl.arange(0, CS)[None, :]
    pieces = heads[:, None] * S + s
    is_piece = (n < R)[:, None] & (s < S)
    q_top_of = tl.load(tops + pieces, mask=is_piece, other=float("-inf"))
    k_top_of = tl.load(tops + key_head * S + s, mask=s < S, other=float("-inf"))
    q_sum_of = tl.load(sums + pieces, mask=is_piece, other=0.0)
    k_sum_of = tl.load(sums + key_head * S + s, mask=s < S, other=0.0)
    if SHARED:
        normalizer_of = tl.load(normalizers + pieces, mask=is_piece, other=0.0)
        window_lse = tl.load(lse + row, mask=n < R, other=0.0)
        by_query = tl.load(totals + heads, mask=n < R, other=0.0)
    if GATE == "head":
        gate = head_bias + tl.load(totals + key_head) / D
        head_decay = tl.where(written, tl.exp(_log_sigmoid(gate) / gate_normalizer), 1.0)
    q_top, q_weight, q_sum = _softmax(q_top_of, q_sum_of)
    k_top, _, k_sum = _softmax(k_top_of, k_sum_of)
    if SHARED:
        normalizer = tl.maximum(tl.sum(normalizer_of * q_weight, 1) / q_sum, MIN_NORMALIZER)
        log_normalizer = tl.log(normalizer)
        weight = gamma * log_normalizer + by_query * root + beta
        weight = tl.where(log_normalizer <= EMPTY, -1e4, weight) - window_lse
    read = tl.zeros([N, BV], tl.float32)
    for start in range(0, F, BF):
        f = start + tl.arange(0, BF)
        old, old_z, k_logits, q_logits = next_rows, next_z, next_key, next_queries
        if BF < F:
            next_rows, next_z = _of_state(state, z, f + BF, in_tile, is_first, D, F)
            next_key, next_queries = _of_features(logits, f + BF, n, g, G, R, F)
        feature = tl.where(written, tl.exp(k_logits - k_top) / k_sum, 0.0)
        if GATE is None:
            decay = tl.full([BF], 1.0, tl.float32)
        elif GATE == "head":
            decay = tl.full([BF], 1.0, tl.float32) * head_decay
        else:
            if GATE == "keys":
                gate = tl.where(f < F, k_logits, 0.0)
            else:
                gate = tl.load(bias + g * FG + f % FG, mask=f < F, other=0.0)
            decay = tl.where(written, tl.exp(_log_sigmoid(gate) / gate_normalizer), 1.0)
        new = old * _down(decay[None, :]) + _down(feature[None, :]) * value
        f_in_tile = _down(f[None, :])
        at = state + f_in_tile * D + in_tile
        if F % BF == 0 and D % BV == 0:
            tl.store(at, new, cache_modifier=".cs")  # read in the next step only; a mask would add a branch per element
        else:
            tl.store(at, new, mask=(f_in_tile < F) & (in_tile < D))
        if z is not None:
            tl.store(z + f, old_z * decay + feature, mask=f < tl.where(is_first, F, 0))
        asked = tl.exp(q_logits - q_top[:, None]) / q_sum[:, None]
        asked_of = old if deferred is not None else new
        if N < 16:
            read += tl.reshape(tl.sum(_down(asked) * asked_of, ROWS_AXIS), [N, BV])
        else:
            if ROWS_AXIS == 2:
                asked_of = tl.permute(asked_of, (0, 2, 1, 3))
            read += dot(asked, tl.reshape(asked_of, [BF, BV]), None, asked_of.dtype, "tf32x3")
    if SHARED:
        mix_weight = (1.0 / (1.0 + tl.exp(-weight)))[:, None]
        mixed = seen + mix_weight * (read / normalizer[:, None] - seen)
    else:
        mixed = 0.5 * (seen + read)
    tl.store(o + out, rounded(mixed, o.dtype.element_ty), mask=block)
    sink_columns = tl.where(new_position < 0, 0, tl.where(new_position < M, D, 0))  # 0 if the new token is not a sink
    at_sink = offset_of(page, head_step, M * G * D) + (new_position * G + g) * D
    if is_first:
        tl.store(ring_k + at_slot + d, new_k, mask=d < D)
        if sink_k is not None:
            tl.store(sink_k + at_sink + d, new_k, mask=d < sink_columns)
        if deferred is not None:
            tl.store(deferred + at_slot + d, new_key, mask=d < D)
    tl.debug_barrier()  # all threads have read the value that leaves the ring
    tl.store(ring_v + at_slot + column, new_v, mask=inside)
    if sink_v is not None:
        tl.store(sink_v + at_sink + column, new_v, mask=column < sink_columns)
