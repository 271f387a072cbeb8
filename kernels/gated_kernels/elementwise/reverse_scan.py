"""The kernels of `launch.py` that pass over the tokens of a chunk from its end.

With m_t = 0 where token t starts a segment, else 1, and P_t = m_t S_{t-1} what a token finds:

    dS_t = m_{t+1} dP_{t+1} + q_t^T do_t,   dP_t = A_t * dS_t          (an exclusive read adds its term to dP_t instead)

The gradient of the exponent dt log A is dS_t * A_t * P_t: it takes the states themselves, as quotients of later ones
would be noise after a strong decay. They are made again, INNER at a time. Shapes and blocks: `scan.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gated_kernels.common.interpreter import rounded
from gated_kernels.elementwise.scan import after, here, inside_program, number, place, rates, restarted, tile


@triton.jit
def sent(
    q, do, q_h, of_k, of_v, R: tl.constexpr, V: tl.constexpr, BF: tl.constexpr, BG: tl.constexpr, BV: tl.constexpr
):
    """[BF, BG, BV] what a token's outputs send to the state that its queries read."""
    total = tl.zeros((BF, BG, BV), tl.float32)
    for r in range(R):
        total += number(q + r * q_h, of_k)[:, :, None] * number(do + r * V, of_v)[None, :, :]
    return total


@triton.jit
def dends_kernel(
    q, dt, log_A, segment, do, dends, T, FIRST, CHUNKS, q_b, q_t, q_h, q_f, dt_b, dt_t, dt_g, dt_v,
    G: tl.constexpr, R: tl.constexpr, F: tl.constexpr, V: tl.constexpr, EXCLUSIVE: tl.constexpr, C: tl.constexpr,
    BF: tl.constexpr, BG: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """What every chunk's outputs send to the state before it."""
    b, n, rows, _, f, g, x = place(T, FIRST, CHUNKS, G, V, C, BF, BG, BV)
    at, mask = tile(f, g, x, G, F, V)
    rate = rates(log_A, at, mask)
    of_k, of_v = (f < F)[:, None] & (g < G)[None, :], (g < G)[:, None] & (x < V)[None, :]
    q += b * q_b + n * C * q_t + g[None, :] * (R * q_h) + f[:, None] * q_f
    do += (b * T + n * C) * (G * R * V) + g[:, None] * (R * V) + x[None, :]
    dt += b * dt_b + n * C * dt_t + g[:, None] * dt_g + x[None, :] * dt_v
    if segment is not None:
        segment += b * T
    dstate = tl.zeros((BF, BG, BV), tl.float32)
    for step in range(rows):
        i = rows - 1 - step
        read = sent(q + i * q_t, do + i * (G * R * V), q_h, of_k, of_v, R, V, BF, BG, BV)
        decay = tl.exp2(number(dt + i * dt_t, of_v)[None, :, :] * rate)
        if not EXCLUSIVE:
            dstate += read
        dstate *= decay
        if EXCLUSIVE:
            dstate += read
        dstate = restarted(dstate, segment, n * C + i, T)
    tl.store(dends + (b * tl.cdiv(T, C) + n) * (G * F * V) + at, dstate, mask=mask)


@triton.jit
def before_token(
    dstate, drate, past, i, rows, q, k, v, dt, segment, do, dk, dv, ddt, rate, t, T, q_t, q_h, k_t, dt_t, of_k, of_v,
    G: tl.constexpr, R: tl.constexpr, F: tl.constexpr, V: tl.constexpr, EXCLUSIVE: tl.constexpr, BF: tl.constexpr,
    BG: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """From the gradient of the state after token i of a chunk that of the state before it, and that of the rates.

    `past` is what the token found. A token that is not there has zeros for everything and leaves both as they are.
    """
    of_k = here(of_k, i < rows)
    of_v = here(of_v, i < rows)
    read = sent(q + i * q_t, do + i * (G * R * V), q_h, of_k, of_v, R, V, BF, BG, BV)
    if not EXCLUSIVE:
        dstate += read
    keys, values, steps = number(k + i * k_t, of_k), number(v + i * (G * V), of_v), number(dt + i * dt_t, of_v)
    if dk is not None:
        dkeys = tl.sum(dstate * values[None, :, :], 2)
        tl.store(dk + i * (G * F), rounded(dkeys, dk.dtype.element_ty), mask=of_k)
    if dv is not None:
        dvalues = tl.sum(dstate * keys[:, :, None], 0)
        tl.store(dv + i * (G * V), rounded(dvalues, dv.dtype.element_ty), mask=of_v)
    dstate *= tl.exp2(steps[None, :, :] * rate)
    dexponent = dstate * past
    drate += dexponent * steps[None, :, :]
    if ddt is not None:
        dsteps = tl.sum(dexponent * rate, 0) * 0.6931471805599453
        tl.store(ddt + i * (G * V), rounded(dsteps, ddt.dtype.element_ty), mask=of_v)
    if EXCLUSIVE:
        dstate += read
    return restarted(dstate, segment, t + i, T), drate


@triton.jit
def found_next(past, i, rows, k, v, dt, segment, rate, t, T, k_t, dt_t, of_k, of_v, GV: tl.constexpr):
    """What token i + 1 of a chunk finds, from what token i found."""
    of_k = here(of_k, i < rows)
    of_v = here(of_v, i < rows)
    keys, values, steps = number(k + i * k_t, of_k), number(v + i * GV, of_v), number(dt + i * dt_t, of_v)
    return restarted(after(past, keys, values, steps, rate), segment, t + i + 1, T)


@triton.jit
def dinputs_kernel(
    q, k, v, dt, log_A, segment, do, inner, dstates, dk, dv, ddt, drates, dfirst, T, FIRST, CHUNKS, SEQUENCES, q_b, q_t,
    q_h, q_f, k_b, k_t, k_g, k_f, dt_b, dt_t, dt_g, dt_v,
    G: tl.constexpr, R: tl.constexpr, F: tl.constexpr, V: tl.constexpr, EXCLUSIVE: tl.constexpr, C: tl.constexpr,
    INNER: tl.constexpr, BF: tl.constexpr, BG: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The gradients of k (a part for each block of values), v and dt (None: not wanted), of log A by chunk, and of the
    first state, from those of the states after the chunks (None: zeros)."""
    b, n, rows, part, f, g, x = place(T, FIRST, CHUNKS, G, V, C, BF, BG, BV)
    at, mask = tile(f, g, x, G, F, V)
    rate = rates(log_A, at, mask)
    of_k, of_v = (f < F)[:, None] & (g < G)[None, :], (g < G)[:, None] & (x < V)[None, :]
    row = b * T + n * C
    q += b * q_b + n * C * q_t + g[None, :] * (R * q_h) + f[:, None] * q_f
    k += b * k_b + n * C * k_t + g[None, :] * k_g + f[:, None] * k_f
    dt += b * dt_b + n * C * dt_t + g[:, None] * dt_g + x[None, :] * dt_v
    do += row * (G * R * V) + g[:, None] * (R * V) + x[None, :]
    of_row = row * (G * V) + g[:, None] * V + x[None, :]
    v += of_row
    if dk is not None:
        dk += (part.to(tl.int64) * SEQUENCES * T + row) * (G * F) + g[None, :] * F + f[:, None]
    if dv is not None:
        dv += of_row
    if ddt is not None:
        ddt += of_row
    if segment is not None:
        segment += b * T
    inner += inside_program(C, INNER, BF, BG, BV)
    chunk = b * tl.cdiv(T, C) + n
    t = n * C
    dstate = tl.zeros((BF, BG, BV), tl.float32)
    if dstates is not None:
        dstate = number(dstates + chunk * (G * F * V) + at, mask)
    drate = tl.zeros((BF, BG, BV), tl.float32)
    turns = tl.cdiv(rows, INNER)
    tl.static_assert(INNER == 4, "as many states as are named below")
    for turn in range(turns):
        i = (turns - 1 - turn) * INNER
        past0 = restarted(tl.load(inner + i // INNER * (BF * BG * BV)), segment, t + i, T)
        past1 = found_next(past0, i, rows, k, v, dt, segment, rate, t, T, k_t, dt_t, of_k, of_v, G * V)
        past2 = found_next(past1, i + 1, rows, k, v, dt, segment, rate, t, T, k_t, dt_t, of_k, of_v, G * V)
        past3 = found_next(past2, i + 2, rows, k, v, dt, segment, rate, t, T, k_t, dt_t, of_k, of_v, G * V)
        dstate, drate = before_token(
            dstate, drate, past3, i + 3, rows, q, k, v, dt, segment, do, dk, dv, ddt, rate, t, T, q_t, q_h, k_t, dt_t,
            of_k, of_v, G, R, F, V, EXCLUSIVE, BF, BG, BV,
        )  # fmt: skip
        dstate, drate = before_token(
            dstate, drate, past2, i + 2, rows, q, k, v, dt, segment, do, dk, dv, ddt, rate, t, T, q_t, q_h, k_t, dt_t,
            of_k, of_v, G, R, F, V, EXCLUSIVE, BF, BG, BV,
        )  # fmt: skip
        dstate, drate = before_token(
            dstate, drate, past1, i + 1, rows, q, k, v, dt, segment, do, dk, dv, ddt, rate, t, T, q_t, q_h, k_t, dt_t,
            of_k, of_v, G, R, F, V, EXCLUSIVE, BF, BG, BV,
        )  # fmt: skip
        dstate, drate = before_token(
            dstate, drate, past0, i, rows, q, k, v, dt, segment, do, dk, dv, ddt, rate, t, T, q_t, q_h, k_t, dt_t,
            of_k, of_v, G, R, F, V, EXCLUSIVE, BF, BG, BV,
        )  # fmt: skip
    tl.store(drates + chunk * (G * F * V) + at, drate, mask=mask)
    if n == 0:
        tl.store(dfirst + b * (G * F * V) + at, dstate, mask=mask)
