"""The outputs of the recurrence over a codebook, for one gate per head or none, without materializing the queries' map.

That map would be the largest tensor of a layer. Here a program computes it one block of codes at a time, and multiplies
each block with the keys and the states before the chunk right away. As in an online softmax, weights are relative to
the largest logit so far, and accumulators are rescaled when a larger one is found.

Products that lead to the logits take fp16 operands and later ones bf16, as in codebook/triton.py. Chunks, decays and
the normalizer are as in simple_gla/launch.py. The rule there for tiles in pipelined loops is kept, too: weights are not
loaded, and z is not an operand.

Shapes: B batch, T tokens, H query heads, G key-value heads, R = H / G, D head size, E size of a code, F codes, V value
size, N chunks, C chunk length. A tile has BF codes and BV values. BD and BE are the powers of two that hold D and E, at
least 64.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gated_kernels.codebook import triton as codebook
from gated_kernels.codebook.kernels import TO_BASE_2, inv_temperature_of, logits_by, unit_projection
from gated_kernels.common.gated_inputs import Sizes, is_per_head
from gated_kernels.common.integers import cdiv, next_power_of_2
from gated_kernels.common.interpreter import rounded
from gated_kernels.common.tiles import contiguous, dot, load, load_vector, store, store_vector
from gated_kernels.simple_gla import launch as simple_gla
from gated_kernels.simple_gla.intra_chunk import decays_between, read_by

# BF, num_warps and num_stages: the fastest on an H200. With Triton 3.6 no registers spill at heads of 64 and 128.
BLOCK = (64, 4, 3)
VALUES = 128  # BV at most
LARGEST = 128  # head size, and twice the size of a code, up to which tiles fit into 99 KB of shared memory


@triton.jit(do_not_specialize=["T"])
def read_kernel(
    q, proj, bias, log_inv_temperature, codes, k, v, write_mask, read, write, states, z, o, normalizer, T,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, F: tl.constexpr, V: tl.constexpr,
    EXCLUSIVE: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The outputs of a chunk. One program per query head. k is the keys' map."""
    N = tl.cdiv(T, C)
    program = tl.program_id(0).to(tl.int64)
    chunk = program // R
    n, b, g = chunk % N, chunk // N // G, chunk // N % G
    row = b * T + n * C
    tokens = tl.minimum(T - n * C, C).to(tl.int32)
    at = chunk * 2 * C
    codes += g * F * E
    x = tl.program_id(1) * BV + tl.arange(0, BV)
    d = tl.arange(0, BD)
    e = tl.arange(0, BE)
    f = tl.arange(0, BF)
    i = tl.arange(0, C)
    h = g * R + program % R
    first = row * G * R + h  # index among the rows of all heads, as a smaller stride takes fewer registers
    rows, left = i * G * R, tokens * G * R
    proj_DE = load(proj + h * D * E, d, D, E, e, E)
    bias_E = tl.load(bias + h * E + e, mask=e < E, other=0.0)
    u, _ = unit_projection(load(q + first * D, rows, left, D, d, D), proj_DE, bias_E)
    u = u.to(tl.float16)
    scale = inv_temperature_of(log_inv_temperature, h) * TO_BASE_2
    top = tl.full((C,), -1e30, tl.float32)
    total = tl.zeros((C,), tl.float32)
    normalizers = tl.zeros((C,), tl.float32)
    scores = tl.zeros((C, C), tl.float32)
    outputs = tl.zeros((C, BV), tl.float32)
    if write_mask is not None:
        mine = tl.program_id(1) == 0  # of the programs with the same queries, one computes the normalizer
        features = tl.where(mine, F, 0)
    for f0 in range(0, F, BF):
        if write_mask is not None:  # loaded while the logits are computed
            z_before = load_vector(z + chunk * F, f0 + f, features, 1)
        logits = logits_by(u, load(codes, f0 + f, F, E, e, E), 1.0, f0 + f, F, BF)
        higher = tl.maximum(top, tl.max(logits, 1))
        keep = tl.exp2((top - higher) * scale)
        weights = tl.exp2(logits * scale - (higher * scale)[:, None])
        total = total * keep + tl.sum(weights, 1)
        if write_mask is not None:
            normalizers = normalizers * keep + tl.sum(weights * z_before[None, :], 1)
        weights = rounded(weights, tl.bfloat16)
        keys = load(k + (row * G + g) * F, i, tokens, G * F, f0 + f, F)
        before = load(states + chunk * F * V, f0 + f, F, V, x, V)
        scores = dot(weights, tl.trans(keys), scores * keep[:, None], tl.bfloat16, "tf32")
        outputs = dot(weights, before, outputs * keep[:, None], tl.bfloat16, "tf32")
        top = higher
    total = 1.0 / total
    scores *= total[:, None]
    outputs *= total[:, None]
    normalizers *= total
    values = load(v + (row * G + g) * V, i, tokens, G * V, x, V)
    ones = None
    if write_mask is not None:
        ones = load_vector(write_mask + row * G + g, i, tl.where(mine, tokens, 0), G)
    decays = decays_between(read, write, at, i[:, None], i[None, :], EXCLUSIVE, C, tl.bfloat16)
    outputs, normalizers = read_by(scores, outputs, normalizers, decays, values, ones, read, at, i, tl.bfloat16, "tf32")
    store(o + first * V, outputs, rows, left, V, x, V)
    if write_mask is not None:
        store_vector(normalizer + first, normalizers, i, tl.where(mine, tokens, 0), G * R)


@functools.cache
def constants(G: int, R: int, D: int, E: int, F: int, V: int, exclusive: bool) -> dict[str, Any]:
    """The kernel's constexprs and launch options. They follow from the sizes; there is no autotuning."""
    BD, BE, BV = (max(64, next_power_of_2(size)) for size in (D, E, V))
    BF, warps, stages = BLOCK
    return {
        "G": G,
        "R": R,
        "D": D,
        "E": E,
        "F": F,
        "V": V,
        "EXCLUSIVE": int(exclusive),
        "C": simple_gla.CHUNK[torch.bfloat16],
        "BD": BD,
        "BE": BE,
        "BF": min(BF, max(64, next_power_of_2(F))),
        "BV": min(BV, VALUES),
        "num_warps": warps,
        "num_stages": stages,
    }


def is_supported(q: Tensor, codes: Tensor, log_a: Tensor | None) -> bool:
    """Whether there is one gate per head, or none, and the heads are not too large."""
    return is_per_head(log_a) and max(q.shape[-1], 2 * codes.shape[-1]) <= LARGEST


def forward(
    of_q: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    k: Tensor,
    v: Tensor,
    log_a: Tensor | None,
    write_mask: Tensor | None,
    state: Tensor,
    segment: Tensor | None,
    exclusive: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The outputs, the normalizer (empty without `write_mask`) and the last state. k is the keys' map.

    of_q: the queries and the parameters of their map.
    """
    q, proj, bias, log_inv_temperature, codes = codebook.plain(*of_q)
    v, log_a, write_mask, state, segment = contiguous(v, log_a, write_mask, state, segment)
    (B, T, H, D), (G, F, E), V = q.shape, codes.shape, v.shape[-1]
    o = v.new_empty(B, T, H, V)
    normalizer = v.new_empty(0 if write_mask is None else (B, T, H), dtype=torch.float32)
    compiled_for = constants(G, H // G, D, E, F, V, exclusive)
    with torch.cuda.device_of(v):
        sizes = Sizes(B, T, H, G, F, V)
        call = simple_gla.Call(sizes, v.dtype, v.device, log_a, write_mask is not None, segment, exclusive)
        last = call.scan("states", state, call.states, call.z, k, v, write_mask, call.write)
        read_kernel[call.chunks * (H // G), cdiv(V, compiled_for["BV"])](
            q, proj, bias, log_inv_temperature, codes, k, v, write_mask, call.read, call.write, call.states, call.z,
            o, normalizer, T, **compiled_for,
        )  # fmt: skip
    return o, normalizer, last
