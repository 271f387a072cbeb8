"""The kernels of `launch.py` that pass over a sequence's states. The letters are there."""

from __future__ import annotations

import triton
import triton.language as tl

from gated_kernels.common.tiles import dot, load, load_vector, store
from gated_kernels.simple_gla.state_scan import decay_from_start, decay_of_chunk, decay_to_end


@triton.jit(do_not_specialize=["T"])
def states_kernel(
    k, held, written, write, total, state, states, last, T,
    G: tl.constexpr, F: tl.constexpr, V: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BF: tl.constexpr,
    BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state before every chunk and the last one; a program per BV columns of a head's state.

    What the tokens write is less what the state holds under their keys; it takes the place of what was solved for.
    With a gate per feature keys are decayed already, and `total` has the decays of the chunks.
    """
    N = tl.cdiv(T, C)
    columns: tl.constexpr = (V + BV - 1) // BV
    block = tl.program_id(0) % columns  # those that share what they load run side by side
    head = (tl.program_id(0) // columns).to(tl.int64)
    b, g = head // G, head % G
    f = tl.arange(0, BF)
    x = block * BV + tl.arange(0, BV)
    i = tl.arange(0, C)
    now = load(state + head * F * V, f, F, V, x, V)
    for n in range(N):
        chunk = head * N + n
        store(states + chunk * F * V, now, f, F, V, x, V)
        rows = T - n * C
        row = (b * T + n * C) * G + g
        looks = load(held + row * F, i, rows, G * F, f, F)
        keys = load(k + row * F, i, rows, G * F, f, F)
        values = load(written + row * V, i, rows, G * V, x, V)
        values = values - dot(looks, now, None, D, PRECISION)
        store(written + row * V, values, i, rows, G * V, x, V)
        if write is not None:
            values *= decay_to_end(write, chunk * 2 * C, i, C)[:, None]
            now *= decay_of_chunk(write, chunk * 2 * C, C)
        elif total is not None:
            now *= load_vector(total + chunk * F, f, F, 1)[:, None]
        now = dot(tl.trans(keys.to(D)), values, now, D, PRECISION)
    store(last + head * F * V, now, f, F, V, x, V)


@triton.jit(do_not_specialize=["T"])
def dstates_kernel(
    r, sent, dv, dread, write, total, dlast, dstates, dstate, T,
    G: tl.constexpr, F: tl.constexpr, V: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BF: tl.constexpr,
    BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of the state after every chunk, and of the first one; as `states_kernel`, from the end.

    The values' gradient has what the outputs of their chunk send, and gets what the state after the chunk does.
    """
    N = tl.cdiv(T, C)
    columns: tl.constexpr = (V + BV - 1) // BV
    block = tl.program_id(0) % columns  # those that share what they load run side by side
    head = (tl.program_id(0) // columns).to(tl.int64)
    b, g = head // G, head % G
    f = tl.arange(0, BF)
    x = block * BV + tl.arange(0, BV)
    i = tl.arange(0, C)
    dnow = load(dlast + head * F * V, f, F, V, x, V)
    for step in range(N):
        n = N - 1 - step
        chunk = head * N + n
        store(dstates + chunk * F * V, dnow, f, F, V, x, V)
        rows = T - n * C
        row = (b * T + n * C) * G + g
        keys = load(sent + row * F, i, rows, G * F, f, F)
        looks = load(r + row * F, i, rows, G * F, f, F)
        dvalues = load(dv + row * V, i, rows, G * V, x, V)
        of_outputs = load(dread + chunk * F * V, f, F, V, x, V)
        dvalues = dvalues + dot(keys, dnow, None, D, PRECISION)
        store(dv + row * V, dvalues, i, rows, G * V, x, V)
        if write is not None:
            dvalues *= decay_from_start(write, chunk * 2 * C, i)[:, None]
            dnow *= decay_of_chunk(write, chunk * 2 * C, C)
        elif total is not None:
            dnow *= load_vector(total + chunk * F, f, F, 1)[:, None]
        dnow = dot(tl.trans(looks.to(D)), -dvalues, dnow + of_outputs, D, PRECISION)
    store(dstate + head * F * V, dnow, f, F, V, x, V)
