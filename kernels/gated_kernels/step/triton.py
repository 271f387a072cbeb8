"""A linearized layer's step of one token in two Triton kernels, which take nothing from the host and can be captured.

`read_kernel` writes nothing that the layer keeps, and its programs are of two kinds: one takes the features of a head
for 16 rows, which meet the codebook's matrices together, and one the window of a row and key-value head. `write_kernel`
goes through the state once, a program for some of its columns: it reads them with all query heads, mixes that with what
the window gave, and writes the columns and the ring's slot. Only the first kernel reads the normaliser's column, which
every column's program would need, and only the second one writes it. Sums are in fp32, as are features and the state;
products of fp32 are three TF32 ones.

Shapes: see chunk.py; R = H / G. In a kernel: N rows of a product, K block of keys, BF and BV block of the state, and
the powers of two that hold them: CD channels, CE of a code.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gated_kernels.step.chunk import Memory, Rules, Token

ROWS = 16  # the fewest that a product takes
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # then the kernels are Python and take tensors of a CPU
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _round(x, dtype: tl.constexpr):
    if INTERPRETED and dtype == tl.bfloat16 and x.dtype == tl.float32:  # the interpreter would cut digits off
        bits = x.to(tl.uint32, bitcast=True)
        x = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def _dot(x, y):
    """x y, of the dtype of y and summed in fp32."""
    x = _round(x, y.dtype)
    if INTERPRETED:  # it would multiply the bits of bfloat16
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, y, input_precision="tf32x3")


@triton.jit
def _rotated(x, d, inside, cos, sin, D: tl.constexpr, C: tl.constexpr):
    """Channels d of what stands at x, after rotary, in the dtype of x."""
    own = tl.load(x + d, mask=inside & (d < D), other=0.0)
    if C > 0:
        turned = d < C
        other = tl.where(d < C // 2, d + C // 2, d - C // 2)
        pair = tl.load(x + other, mask=inside & turned, other=0.0).to(tl.float32)
        pair = tl.where(d < C // 2, -pair, pair)
        c = tl.load(cos + d, mask=turned, other=1.0).to(tl.float32)
        s = tl.load(sin + d, mask=turned, other=0.0).to(tl.float32)
        own = _round(own.to(tl.float32) * c + pair * s, own.dtype)
    return own


@triton.jit
def _log_sigmoid(x):
    return tl.minimum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _feature_logits(
    x, b, B, n, g, z, turn, shift, log_tau, codes, logits, tops, sums,
    COUNT: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, F: tl.constexpr, V: tl.constexpr,
    CD: tl.constexpr, CE: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Keeps the logits of head n of COUNT for rows b of x, their maximum and their sum of exponentials; returns the
    mean of z under their softmax, [N], which is a memory's mass."""
    inside = b < B
    row = b.to(tl.int64) * COUNT + n
    top = tl.full([b.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([b.shape[0]], tl.float32)
    mass = tl.zeros([b.shape[0]], tl.float32)
    u = x
    if codes is not None:
        d = tl.arange(0, CD)[:, None]
        e = tl.arange(0, CE)[None, :]
        matrix = tl.load(turn + d * E + e, mask=(d < D) & (e < E), other=0.0)
        u = _dot(x, matrix.to(tl.float32)) + tl.load(shift + e, mask=e < E, other=0.0)
        size = tl.sqrt(tl.sum(u * u, 1))
        u = u * (tl.exp(tl.load(log_tau)) / tl.maximum(size, 1e-12))[:, None]
    for start in range(0, F, BF):
        f = start + tl.arange(0, BF)
        if codes is not None:
            at = (g * F + f)[:, None] * E + e
            code = tl.load(codes + at, mask=(f < F)[:, None] & (e < E), other=0.0)
            part = _dot(u, tl.trans(code.to(tl.float32)))
        else:
            part = u
        stored = inside[:, None] & (f < F)[None, :]
        tl.store(logits + row[:, None] * F + f[None, :], part, mask=stored)
        part = tl.where((f < F)[None, :], part, float("-inf"))
        higher = tl.maximum(top, tl.max(part, 1))
        weights = tl.exp(part - higher[:, None])
        keep = tl.exp(top - higher)
        total = total * keep + tl.sum(weights, 1)
        if z is not None:
            at = (b.to(tl.int64) * G + g)[:, None] * F + f[None, :]
            mass = mass * keep + tl.sum(weights * tl.load(z + at * V + D, mask=stored, other=0.0), 1)
        top = higher
    tl.store(tops + row, top, mask=inside)
    tl.store(sums + row, total, mask=inside)
    return mass / total


@triton.jit
def _query(
    b, B, n, q, q_step, z, turn, shift, log_tau, codes, power, asked, log_share,
    logits, tops, sums, masses, weights, root,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, F: tl.constexpr, V: tl.constexpr,
    CD: tl.constexpr, CE: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """The features of query head n for rows b, and what the memory weighs beside the window."""
    d = tl.arange(0, CD)
    inside = (b < B)[:, None] & (d < D)[None, :]
    x = tl.load(q + b.to(tl.int64)[:, None] * q_step + n * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
    if codes is not None:
        turn += n * D * E
        shift += n * E
        log_tau += n
    mass = _feature_logits(
        x, b, B, n, n // R, z, turn, shift, log_tau, codes, logits, tops, sums, G * R + G, G, D, E, F, V, CD, CE, BF
    )
    if z is not None:
        mass = tl.maximum(mass, 1e-30)
        log_mass = tl.log(mass)
        by_query = tl.sum(x * tl.load(asked + n * D + d, mask=d < D, other=0.0)[None, :], 1) * root
        weight = tl.load(power + n) * log_mass + by_query + tl.load(log_share + n)
        row = b.to(tl.int64) * (G * R) + n
        tl.store(masses + row, mass, mask=b < B)
        tl.store(weights + row, tl.where(log_mass <= -60.0, -1e4, weight), mask=b < B)


@triton.jit
def _key(
    b, B, g, k, k_step, turn, shift, log_tau, codes, logits, tops, sums, pooled,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, F: tl.constexpr, V: tl.constexpr,
    CD: tl.constexpr, CE: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """The features and the mean of the key that is due at key-value head g for rows b."""
    d = tl.arange(0, CD)
    inside = (b < B)[:, None] & (d < D)[None, :]
    x = tl.load(k + b.to(tl.int64)[:, None] * k_step + g * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
    if codes is not None:
        turn += g * D * E
        shift += g * E
        log_tau += g
    _feature_logits(
        x, b, B, G * R + g, g, None, turn, shift, log_tau, codes, logits, tops, sums, G * R + G, G, D, E, F, V,
        CD, CE, BF,
    )  # fmt: skip
    tl.store(pooled + b.to(tl.int64) * G + g, tl.sum(x, 1) / D, mask=b < B)


@triton.jit
def _add(q, k, v, seen, scale, o, top, mass):
    """Takes more keys into a running softmax."""
    logits = tl.where(seen[None, :], _dot(q, tl.trans(k)) * scale, float("-inf"))
    higher = tl.maximum(top, tl.max(logits, 1))
    finite = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp(logits - finite[:, None])
    keep = tl.exp(top - finite)
    o = o * keep[:, None] + _dot(weights, v)
    return o, higher, mass * keep + tl.sum(weights, 1)


@triton.jit
def _window(
    b, g, slot, q, k, v, q_step, k_step, v_step, cos, sin, turns, ring_k, ring_v, rank, sink_k, sink_v, visible,
    o, lse, scale, M,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, C: tl.constexpr, P: tl.constexpr, CD: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """What the R queries of a row's key-value head see: the ring in the order of its slots, their own key, the sinks."""
    n = tl.arange(0, N)
    d = tl.arange(0, CD)
    column = d[None, :]
    head = g * R + n
    if C > 0:
        cos += b * turns
        sin += b * turns
    row = q + b * q_step + head[:, None] * D
    queries = _rotated(row, column, (n < R)[:, None], cos, sin, D, C)
    new_k = _rotated(k + b * k_step + g * D, column, column < D, cos, sin, D, C)
    new_v = tl.load(v + b * v_step + g * D + column, mask=column < D, other=0.0)
    mean = tl.zeros([N, CD], tl.float32)
    top = tl.full([N], float("-inf"), tl.float32)
    mass = tl.zeros([N], tl.float32)
    for start in range(0, P + 1, K):
        p = start + tl.arange(0, K)
        age = tl.where(p < P, tl.where(p < slot, p - slot + P, p - slot), P)
        seen = tl.load(rank + b * (P + 1) + age, mask=p <= P, other=-1) >= 0
        at = ((b * P + p)[:, None] * G + g) * D + column
        inside = (p < P)[:, None] & (column < D)
        keys = tl.load(ring_k + at, mask=inside, other=0.0)
        values = tl.load(ring_v + at, mask=inside, other=0.0)
        keys = tl.where((p == P)[:, None], new_k, keys)
        values = tl.where((p == P)[:, None], new_v, values)
        mean, top, mass = _add(queries, keys, values, seen, scale, mean, top, mass)
    if sink_k is not None:
        for start in range(0, M, SINKS):
            m = start + tl.arange(0, SINKS)
            seen = tl.load(visible + b * M + m, mask=m < M, other=0) != 0
            at = ((b * M + m)[:, None] * G + g) * D + column
            inside = (m < M)[:, None] & (column < D)
            keys = tl.load(sink_k + at, mask=inside, other=0.0)
            values = tl.load(sink_v + at, mask=inside, other=0.0)
            mean, top, mass = _add(queries, keys, values, seen, scale, mean, top, mass)
    nothing = mass == 0.0
    mean = mean / tl.where(nothing, 1.0, mass)[:, None]
    row = b * (G * R) + head
    tl.store(o + row[:, None] * D + column, mean, mask=(n < R)[:, None] & (column < D))
    tl.store(lse + row, tl.where(nothing, float("-inf"), top + tl.log(mass)), mask=n < R)


@triton.jit
def read_kernel(
    q, k, v, q_step, k_step, v_step, cos, sin, turns, rank, visible,
    ring_k, ring_v, pending, sink_k, sink_v, state, turn,
    q_turn, q_shift, q_log_tau, k_turn, k_shift, k_log_tau, codes, power, asked, log_share,
    logits, tops, sums, pooled, masses, weights, o, lse, scale, root, B, M,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, C: tl.constexpr, E: tl.constexpr, F: tl.constexpr,
    V: tl.constexpr, P: tl.constexpr, CD: tl.constexpr, CE: tl.constexpr, BF: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, SINKS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    slot = tl.load(turn) % P
    tiles = tl.cdiv(B, ROWS)
    i = tl.program_id(0)
    if i < G * R * tiles:
        b = i % tiles * ROWS + tl.arange(0, ROWS)
        _query(
            b, B, i // tiles, q, q_step, state if power is not None else None, q_turn, q_shift, q_log_tau, codes,
            power, asked, log_share, logits, tops, sums, masses, weights, root, G, R, D, E, F, V, CD, CE, BF,
        )  # fmt: skip
    elif i < (G * R + G) * tiles:
        i -= G * R * tiles
        b = i % tiles * ROWS + tl.arange(0, ROWS)
        if pending is not None:
            _key(
                b, B, i // tiles, pending + slot * G * D, P * G * D, k_turn, k_shift, k_log_tau, codes,
                logits, tops, sums, pooled, G, R, D, E, F, V, CD, CE, BF,
            )  # fmt: skip
        else:
            _key(
                b, B, i // tiles, k, k_step, k_turn, k_shift, k_log_tau, codes,
                logits, tops, sums, pooled, G, R, D, E, F, V, CD, CE, BF,
            )  # fmt: skip
    else:
        i -= (G * R + G) * tiles
        _window(
            (i // G).to(tl.int64), i % G, slot, q, k, v, q_step, k_step, v_step, cos, sin, turns, ring_k, ring_v, rank,
            sink_k, sink_v, visible, o, lse, scale, M, G, R, D, C, P, CD, N, K, SINKS,
        )  # fmt: skip


@triton.jit
def write_kernel(
    k, v, k_step, v_step, cos, sin, turns, rank, ring_k, ring_v, pending, sink_k, sink_v, state, turn,
    bias, logits, tops, sums, pooled, masses, weights, window, lse, o, tau, M,
    GATE: tl.constexpr, SHARED: tl.constexpr, G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
    F: tl.constexpr, FG: tl.constexpr, V: tl.constexpr, P: tl.constexpr, CD: tl.constexpr, N: tl.constexpr,
    BF: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    bg = tl.program_id(0).to(tl.int64)
    b, g = bg // G, bg % G
    is_first = tl.program_id(1) == 0
    column = tl.program_id(1) * BV + tl.arange(0, BV)
    inside = column < D
    slot = tl.load(turn) % P
    new_rank = tl.load(rank + b * (P + 1) + P)
    new_v = tl.load(v + b * v_step + g * D + column, mask=inside, other=0.0)
    at_slot = ((b * P + slot) * G + g) * D
    if pending is not None:
        written = tl.load(rank + b * (P + 1)) >= M
        value = tl.load(ring_v + at_slot + column, mask=inside, other=0.0).to(tl.float32)
    else:
        written = new_rank >= 0
        value = new_v.to(tl.float32)
    n = tl.arange(0, N)
    key_row = b * (G * R + G) + G * R + g
    k_top = tl.load(tops + key_row)
    k_sum = tl.load(sums + key_row)
    read = tl.zeros([N, BV], tl.float32)
    for start in range(0, F, BF):
        f = start + tl.arange(0, BF)
        at = (bg * F + f) * V
        block = (f < F)[:, None] & inside[None, :]
        old = tl.load(state + at[:, None] + column[None, :], mask=block, other=0.0)
        k_logits = tl.load(logits + key_row * F + f, mask=f < F, other=float("-inf"))
        feature = tl.where(written, tl.exp(k_logits - k_top) / k_sum, 0.0)
        if GATE is None:
            decay = tl.full([BF], 1.0, tl.float32)
        else:
            if GATE == "keys":
                gate = tl.where(f < F, k_logits, 0.0)
            else:
                gate = tl.load(bias + g * FG + f % FG, mask=f < F, other=0.0)
                if GATE == "head":
                    gate += tl.load(pooled + bg)
            decay = tl.where(written, tl.exp(_log_sigmoid(gate) / tau), 1.0)
        new = old * decay[:, None] + feature[:, None] * value[None, :]
        tl.store(state + at[:, None] + column[None, :], new, mask=block)
        for r in tl.static_range(R):
            row = b * (G * R + G) + g * R + r
            q_logits = tl.load(logits + row * F + f, mask=f < F, other=float("-inf"))
            asked = tl.exp(q_logits - tl.load(tops + row)) / tl.load(sums + row)
            part = tl.sum(asked[:, None] * (old if pending is not None else new), 0)
            read += tl.where((n == r)[:, None], part[None, :], 0.0)
        if SHARED and is_first:
            mass = tl.load(state + at + D, mask=f < F, other=0.0)
            tl.store(state + at + D, mass * decay + feature, mask=f < F)
    row = b * (G * R) + g * R + n
    out = row[:, None] * D + column[None, :]
    block = (n < R)[:, None] & inside[None, :]
    seen = tl.load(window + out, mask=block, other=0.0)
    if SHARED:
        read = read / tl.load(masses + row, mask=n < R, other=1.0)[:, None]
        weight = tl.load(weights + row, mask=n < R, other=0.0) - tl.load(lse + row, mask=n < R, other=0.0)
        share = (1.0 / (1.0 + tl.exp(-weight)))[:, None]
        mixed = seen + share * (read - seen)
    else:
        mixed = 0.5 * (seen + read)
    tl.store(o + out, _round(mixed, o.dtype.element_ty), mask=block)
    tl.debug_barrier()  # the value that leaves the ring has been read
    tl.store(ring_v + at_slot + column, new_v, mask=inside)
    at_sink = ((b * M + new_rank) * G + g) * D
    if sink_v is not None:
        if (new_rank >= 0) & (new_rank < M):
            tl.store(sink_v + at_sink + column, new_v, mask=inside)
    if is_first:
        d = tl.arange(0, CD)
        if C > 0:
            cos += b * turns
            sin += b * turns
        new_k = _rotated(k + b * k_step + g * D, d, d < D, cos, sin, D, C)
        tl.store(ring_k + at_slot + d, new_k, mask=d < D)
        if sink_k is not None:
            if (new_rank >= 0) & (new_rank < M):
                tl.store(sink_k + at_sink + d, new_k, mask=d < D)
        if pending is not None:
            key = tl.load(k + b * k_step + g * D + d, mask=d < D, other=0.0)
            tl.store(pending + at_slot + d, key, mask=d < D)


def step(token: Token, memory: Memory, rules: Rules, scale: float) -> Tensor:
    """A layer's output [B,H,D] for one token of every row, in the dtype of the values; moves `memory` on in place.

    Takes what `why_not` finds nothing against; see chunk.py.
    """
    (B, H, D), (_, P, G, _), (F, V) = token.q_BHD.shape, memory.k_BPGD.shape, memory.state_BGFV.shape[2:]
    R, M = H // G, 0 if memory.sink_k_BMGD is None else memory.sink_k_BMGD.shape[1]
    cos, sin = token.cos_BC, token.sin_BC
    C, turns = (0, 0) if cos is None else (cos.shape[1], cos.stride(0) if len(cos) > 1 else 0)
    q, k, v = (x if x.stride()[1:] == (D, 1) else x.contiguous() for x in (token.q_BHD, token.k_BGD, token.v_BGD))
    codes, gate, share = rules.codes or (None,) * 7, rules.gate, rules.share or (None,) * 3
    new, CD = memory.state_BGFV.new_empty, max(16, triton.next_power_of_2(D))
    E = 1 if rules.codes is None else rules.codes.codes_GFE.shape[2]
    logits, tops, sums, pooled = new(B, H + G, F), new(B, H + G), new(B, H + G), new(B, G)
    masses, weights, window, lse = new(B, H), new(B, H), new(B, H, D), new(B, H)
    kept = (memory.k_BPGD, memory.v_BPGD, memory.pending_BPGD, memory.sink_k_BMGD, memory.sink_v_BMGD)
    visible = None if token.sink_visible_BM is None else token.sink_visible_BM.contiguous()
    o = v.new_empty(B, H, D)
    sizes = {"G": G, "R": R, "D": D, "C": C, "F": F, "V": V, "P": P, "CD": CD}
    with torch.cuda.device_of(o):
        read_kernel[((H + G) * triton.cdiv(B, ROWS) + B * G,)](
            q, k, v, q.stride(0), k.stride(0), v.stride(0), cos, sin, turns, token.rank_BS, visible,
            *kept, memory.state_BGFV, memory.turn, *codes, *share,
            logits, tops, sums, pooled, masses, weights, window, lse, scale, D**-0.5, B, M,
            **sizes, N=max(ROWS, triton.next_power_of_2(R)), E=E, CE=max(16, triton.next_power_of_2(E)), BF=_features(F, rules), K=_keys(CD, v),
            SINKS=16, ROWS=ROWS, num_warps=4,
        )  # fmt: skip
        BF, BV = _blocks(F, D, B * G)
        write_kernel[(B * G, triton.cdiv(D, BV))](
            k, v, k.stride(0), v.stride(0), cos, sin, turns, token.rank_BS, *kept, memory.state_BGFV, memory.turn,
            None if gate is None else gate.bias_GF, logits, tops, sums, pooled, masses, weights, window, lse, o,
            1.0 if gate is None else gate.normalizer, M,
            GATE=None if gate is None else gate.of, SHARED=rules.share is not None, **sizes, N=triton.next_power_of_2(R),
            FG=1 if gate is None or gate.bias_GF is None else gate.bias_GF.shape[1], BF=BF, BV=BV, num_warps=4,
        )  # fmt: skip
    return o


def _features(F: int, rules: Rules) -> int:
    """How many features a program takes at a time; all of them where they are a softmax of the channels."""
    held = max(16, triton.next_power_of_2(F))
    return held if rules.codes is None else min(held, 128)


def _keys(channels: int, v: Tensor) -> int:
    """Keys at a time: what a program's registers hold."""
    return max(16, min(64, 16384 // (channels * v.element_size())))


def _blocks(F: int, D: int, heads: int) -> tuple[int, int]:
    """Rows and columns of the state that a program takes at a time."""
    BV = max(16, min(64 if heads * D >= 128 * 128 else 32, triton.next_power_of_2(D)))
    return max(16, min(triton.next_power_of_2(F), 8192 // BV)), BV


def why_not(token: Token, memory: Memory, rules: Rules) -> str | None:
    """What the kernels do not take, in words, or None."""
    state, tensors = memory.state_BGFV, (token.v_BGD, *memory[:5])
    (B, P, G, D), H = memory.k_BPGD.shape, token.q_BHD.shape[1]
    if not (state.is_cuda or INTERPRETED.value):
        return f"tensors on the {state.device.type}"
    if any(x is not None and x.dtype != token.q_BHD.dtype for x in tensors) or token.q_BHD.dtype not in DTYPES:
        return "queries, keys and values of several dtypes, or of another than float32, bfloat16 and float16"
    if P == 0:
        return "a window of one token"
    if D > 256 or H // G > 64:
        return f"heads of {D} channels in groups of {H // G}"
    if state.shape[3] != D + (rules.share is not None) or (rules.share is None) != (memory.pending_BPGD is None):
        return "a memory that is normalised but not of what leaves the window, or the other way round"
    given = (*(rules.codes or ()), *(rules.share or ()), None if rules.gate is None else rules.gate.bias_GF)
    if any(x is not None and (x.dtype != torch.float32 or not x.is_contiguous()) for x in (state, *given)):
        return "parameters or states of another dtype than float32, or not contiguous"
    return None
