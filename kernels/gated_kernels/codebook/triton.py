"""The codebook's map in Triton kernels.

A program takes some of the rows of one head, block by block: turned, shifted, brought to length 1, times the codes, and
the softmax over these. Where a block of codes holds them all, their logits stay in registers; more codes are gone over
twice, first for the softmax's sum and then for its weights, whose logits are computed again rather than stored.

The backward pass computes all of this again, so that only the inputs are kept. `rows_kernel` takes a gradient back
through the softmax and the length, in two passes over it or, where its mean under the map is known already, in one;
from what it leaves, `projections_kernel` makes the gradients of the vectors and of what turns them, and `codes_kernel`, with
a program for every block of codes and some of the rows, that of the codes. No program adds to what another one writes:
each has its own part of a parameter's gradient, and the parts are added up, so that all gradients are deterministic.

Products take fp16 on the way to the logits, where bf16 would cost the map half of its digits, and bf16 in all others;
they accumulate in fp32, and all else is in fp32: u, its length, tau and the softmax. Tiles that may come second in a
product have 64 columns at least (see simple_gla/launch.py), of which E fills 32 for heads of 64.

Shapes: B batch, T tokens, N heads, G heads with codes of their own, D head size, E size of a code, F codes. In a
kernel: M rows in a block, BD and BE the powers of two that hold D and E, BF codes in a block.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gated_kernels.common.gated_inputs import unfit, warn_once
from gated_kernels.common.interpreter import INTERPRETED, rounded
from gated_kernels.common.tiles import load, load_vector, product, store, store_vector

PROGRAMS = 528  # that fill a GPU: four on each of the 132 processors of an H200
# M, BF, num_warps and num_stages of each kernel: for heads of up to 64 with up to 256 codes and with more, of up to 128
# with up to 256 codes, and for all others; the first three are the fastest on an H200 of those that fit into 99
# KB. At heads of 64 and 128 none spills by Triton 3.6, and by 3.9 one 24 bytes.
BLOCKS = {
    "forward": ((64, 256, 4, 3), (64, 256, 4, 2), (64, 256, 4, 3), (128, 128, 8, 2)),
    "rows": ((64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 2)),
    "projections": ((64, 0, 4, 3),) * 4,
    "codes": ((128, 64, 4, 2), (64, 64, 4, 2), (128, 64, 4, 2), (64, 128, 8, 2)),
}
LARGEST = 256  # head, the largest whose tiles fit into shared memory
TO_BASE_2 = tl.constexpr(1.4426950408889634)
SHARPEST = tl.constexpr(2.0**14)


@triton.jit
def inv_temperature_of(log_inv_temperature, n):
    """At most SHARPEST, by which u, in fp16, tells no more codes apart than by a larger one: a logit that is rounded in
    one place and not in another would then differ from itself by more than the weights may err."""
    return tl.minimum(tl.exp(tl.load(log_inv_temperature + n)), SHARPEST)


@triton.jit
def unit_projection(x, proj, bias):
    """[M, BE] u and the inverse of the length it had; as in torch, a length counts as 1e-12 at least."""
    x = tl.clamp(x.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
    y = product(x, proj, None, tl.float16, "tf32") + bias[None, :]
    inverse = 1.0 / tl.maximum(tl.sqrt(tl.sum(y * y, 1)), 1e-12)
    return y * inverse[:, None], inverse


@triton.jit
def logits_by(u, codes, scale, f, F: tl.constexpr, BF: tl.constexpr):
    """[M, BF] to base 2, very low beyond the last code; not -inf, as they are multiplied with zeros."""
    logits = product(u, tl.trans(codes), None, tl.float16, "tf32") * scale
    if F % BF:
        logits = tl.where((f < F)[None, :], logits, -1e30)
    return logits


@triton.jit
def forward_kernel(
    x, proj, bias, log_inv_temperature, codes, phi, sums, rows, part,
    N: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, F: tl.constexpr,
    M: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """The map, and the log sums of each row's softmax."""
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
    """Rows i from `at` on; a row that is not there has weights of 0."""
    return tl.load(sums + at + i, mask=i < left, other=float("inf")), load_vector(means + at, i, left, 1)


@triton.jit
def dlogits_by(logits, dweights, total, mean, KNOWN: tl.constexpr):
    """w (dw - mean) of weights w. A mean that is KNOWN was taken under weights as bf16 has them, and so dw counts here:
    then a row's dlogits still cancel, however sharp it is."""
    weights = tl.exp2(logits - total)
    dweights = dweights.to(tl.float32)
    if KNOWN:
        return rounded(weights, tl.bfloat16).to(tl.float32) * dweights - weights * mean
    return weights * (dweights - mean)


@triton.jit
def rows_kernel(
    x, proj, bias, log_inv_temperature, codes, dphi, us, dys, sums, means, dlog_inv_temperature, rows, part,
    N: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, F: tl.constexpr, KNOWN: tl.constexpr,
    M: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """u and its gradient before it is brought to length 1, parts of the gradient of tau, and, where they are not KNOWN,
    the log sums and the mean gradients of each row's softmax."""
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
        if not KNOWN:
            ahead = load(back, i, left, N * F, f, F)
        x_MD = load(x + (first * N + n) * D, i, left, N * D, d, D)
        u_ME, inverse = unit_projection(x_MD, proj_DE, bias_E)
        u_ME = u_ME.to(tl.float16)
        store(us + (first * N + n) * E, u_ME, i, left, N * E, e, E)
        if KNOWN:
            total, mean = sums_and_means(sums, means, at_rows, i, left)
        else:
            top = tl.full((M,), float("-inf"), tl.float32)
            normalizer = tl.zeros((M,), tl.float32)
            means_MF = tl.zeros((M, BF), tl.float32)  # summed up in the end: a sum by rows changes how tiles lie
            for f0 in range(0, F, BF):
                logits = logits_by(u_ME, load(codes, f0 + f, F, E, e, E), inv_temperature * TO_BASE_2, f0 + f, F, BF)
                dweights = ahead.to(tl.float32)
                ahead = load(back, i, left, N * F, f0 + BF + f, F)  # under way while this block is worked on
                higher = tl.maximum(top, tl.max(logits, 1))
                keep = tl.exp2(top - higher)
                weights = tl.exp2(logits - higher[:, None])
                normalizer = normalizer * keep + tl.sum(weights, 1)
                means_MF = means_MF * keep[:, None] + weights * dweights
                top = higher
            mean = tl.sum(means_MF, 1) / normalizer
            total = top + tl.log2(normalizer)
            store_vector(sums + at_rows, total, i, left, 1)
            store_vector(means + at_rows, mean, i, left, 1)
        du = tl.zeros((M, BE), tl.float32)
        last: tl.constexpr = (F - 1) // BF * BF  # back from there, as what was read last may still be at hand
        for f0 in range(0, F, BF):
            at = last - f0 + f
            codes_FE = load(codes, at, F, E, e, E)
            logits = logits_by(u_ME, codes_FE, inv_temperature * TO_BASE_2, at, F, BF)
            dweights = load(back, i, left, N * F, at, F)
            dlogits = dlogits_by(logits, dweights, total[:, None], mean[:, None], KNOWN)
            dlog_inv_temperature_M += tl.sum(dlogits * logits, 1)
            du = product(rounded(dlogits, tl.bfloat16), rounded(codes_FE, tl.bfloat16), du, tl.bfloat16, "tf32")
        du *= inv_temperature
        u = u_ME.to(tl.float32)  # registers are few
        along = tl.where(inverse < 1e12, tl.sum(u * du, 1), 0.0)
        dy = (du - u * along[:, None]) * inverse[:, None]
        store(dys + (first * N + n) * E, rounded(dy, tl.bfloat16), i, left, N * E, e, E)
    tl.store(dlog_inv_temperature + tl.program_id(0), tl.sum(dlog_inv_temperature_M, 0) / TO_BASE_2)


@triton.jit
def projections_kernel(
    x, proj, dys, dx, dproj, dbias, rows, part,
    N: tl.constexpr, D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """The gradients of the vectors and, in parts, of what turns and shifts them."""
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
        dproj_DE = product(tl.trans(x_MD), dy_ME, dproj_DE, tl.bfloat16, "tf32")
        dx_MD = product(dy_ME, tl.trans(proj_DE), None, tl.bfloat16, "tf32")
        store(dx + (first * N + n) * D, rounded(dx_MD, tl.bfloat16), i, left, N * D, d, D)
    program = tl.program_id(0).to(tl.int64)
    store(dproj + program * D * E, dproj_DE, d, D, E, e, E)
    tl.store(dbias + program * E + e, dbias_E, mask=e < E)


@triton.jit
def codes_kernel(
    us, log_inv_temperature, codes, dphi, sums, means, dcodes, rows, part,
    N: tl.constexpr, G: tl.constexpr, E: tl.constexpr, F: tl.constexpr, KNOWN: tl.constexpr,
    M: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of codes by some rows of a head; logits are computed transposed, as they are used."""
    blocks: tl.constexpr = (F + BF - 1) // BF
    program = tl.program_id(0) // blocks  # those that share what they load run side by side
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
        logits = product(codes_FE, tl.trans(u_ME), None, tl.float16, "tf32") * (inv_temperature * TO_BASE_2)
        dlogits = dlogits_by(logits, dweights, total[None, :], mean[None, :], KNOWN)
        dcodes_FE = product(rounded(dlogits, tl.bfloat16), rounded(u_ME, tl.bfloat16), dcodes_FE, tl.bfloat16, "tf32")
    store(dcodes + program.to(tl.int64) * F * E, dcodes_FE * inv_temperature, f, F, E, e, E)


KERNELS = {"forward": forward_kernel, "rows": rows_kernel, "projections": projections_kernel, "codes": codes_kernel}


@functools.cache
def constants(kernel: str, N: int, G: int, D: int, E: int, F: int) -> dict[str, Any]:
    """What a kernel is compiled for and with; fixed by the sizes, never searched for."""
    M, BF, warps, stages = BLOCKS[kernel][2 * (D > 64) + (F > 256 or D > 128)]
    BD, BE = (max(64, triton.next_power_of_2(size)) for size in (D, E))
    if BD > 128:  # twice the registers, and no more shared memory than there is
        BF, warps, stages = min(BF, 64), 8, 1
    BF = min(BF, max(64, triton.next_power_of_2(F)))
    found = {"N": N, "G": G, "D": D, "E": E, "F": F, "M": M, "BD": BD, "BE": BE, "BF": BF}
    return {x: found[x] for x in KERNELS[kernel].arg_names if x in found} | {"num_warps": warps, "num_stages": stages}


def _split(rows: int, compiled_for: dict[str, Any], programs: int) -> tuple[int, int]:
    """Into how many parts rows go so that there are about PROGRAMS, when each takes so many, and the rows of a part."""
    blocks = triton.cdiv(rows, compiled_for["M"])
    part = triton.cdiv(blocks, max(1, PROGRAMS // programs)) * compiled_for["M"]
    return triton.cdiv(rows, part), part


def plain(*tensors: Tensor) -> list[Tensor]:
    """Vectors, turns, shifts, tau and codes as the kernels read them: dense."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float32, torch.float16)
    return [x.to(dtype).contiguous() for x, dtype in zip(tensors, dtypes)]


def _sizes(x: Tensor, codes: Tensor) -> tuple[int, tuple[int, int, int, int, int]]:
    """The rows, and N, G, D, E and F."""
    B, T, N, D = x.shape
    G, F, E = codes.shape
    return B * T, (N, G, D, E, F)


def mapped(x: Tensor, proj: Tensor, bias: Tensor, log_inv_temperature: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """The map [B,T,N,F], and the log sums of its softmax to base 2, [N, B T]."""
    x, proj, bias, log_inv_temperature, codes = plain(x, proj, bias, log_inv_temperature, codes)
    rows, sizes = _sizes(x, codes)
    phi = x.new_empty(*x.shape[:3], codes.shape[1])
    sums = x.new_empty(sizes[0], rows, dtype=torch.float32)
    compiled_for = constants("forward", *sizes)
    parts, part = _split(rows, compiled_for, sizes[0])
    with torch.cuda.device_of(x):
        forward_kernel[(parts * sizes[0],)](
            x, proj, bias, log_inv_temperature, codes, phi, sums, rows, part, **compiled_for
        )
    return phi, sums


@torch.library.custom_op("gated_kernels::codebook", mutates_args=())
def forward(x: Tensor, proj: Tensor, bias: Tensor, log_inv_temperature: Tensor, codes: Tensor) -> Tensor:
    return mapped(x, proj, bias, log_inv_temperature, codes)[0]


@forward.register_fake
def _(x: Tensor, proj: Tensor, bias: Tensor, log_inv_temperature: Tensor, codes: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:3], codes.shape[1])


def gradients(
    x: Tensor,
    proj: Tensor,
    bias: Tensor,
    log_inv_temperature: Tensor,
    codes: Tensor,
    dphi: Tensor,
    known: tuple[Tensor, Tensor] | None = None,
) -> list[Tensor]:
    """The gradients of what the map is made of. `known` spare a pass over dphi: the log sums, and the product of each
    row's map, as it was rounded, and dphi, [N, B T] both."""
    given = proj, bias, log_inv_temperature, codes
    x, proj, bias, log_inv_temperature, codes = plain(x, *given)
    rows, (N, G, D, E, F) = _sizes(x, codes)
    dphi = dphi.contiguous()
    dx, dys = torch.empty_like(x), x.new_empty(rows, N, E)
    us = torch.empty_like(dys, dtype=torch.float16)
    sums, means = known or x.new_empty(2, N, rows, dtype=torch.float32)
    by_rows, by_projections, by_codes = (constants(name, N, G, D, E, F) for name in ("rows", "projections", "codes"))
    with torch.cuda.device_of(x):
        parts, part = _split(rows, by_rows, N)
        dlog_inv_temperature = x.new_empty(parts, N, dtype=torch.float32)
        rows_kernel[(parts * N,)](
            x, proj, bias, log_inv_temperature, codes, dphi, us, dys, sums, means, dlog_inv_temperature, rows, part, KNOWN=known is not None,
            **by_rows,
        )  # fmt: skip
        parts, part = _split(rows, by_projections, N)
        dproj = x.new_empty(parts, N, D, E, dtype=torch.float32)
        dbias = x.new_empty(parts, N, E, dtype=torch.float32)
        projections_kernel[(parts * N,)](x, proj, dys, dx, dproj, dbias, rows, part, **by_projections)
        blocks = triton.cdiv(F, by_codes["BF"])
        parts, part = _split(rows, by_codes, N * blocks)
        dcodes = x.new_empty(parts, G, N // G, F, E, dtype=torch.float32)
        codes_kernel[(parts * N * blocks,)](
            us, log_inv_temperature, codes, dphi, sums, means, dcodes, rows, part, KNOWN=known is not None, **by_codes
        )  # fmt: skip
    found = dproj.sum(0), dbias.sum(0), dlog_inv_temperature.sum(0), dcodes.sum((0, 2))
    return [dx, *(gradient.to(of.dtype) for gradient, of in zip(found, given))]


@torch.library.custom_op("gated_kernels::codebook_backward", mutates_args=())
def backward(
    x: Tensor, proj: Tensor, bias: Tensor, log_inv_temperature: Tensor, codes: Tensor, dphi: Tensor
) -> list[Tensor]:
    return gradients(x, proj, bias, log_inv_temperature, codes, dphi)


@backward.register_fake
def _(x: Tensor, proj: Tensor, bias: Tensor, log_inv_temperature: Tensor, codes: Tensor, dphi: Tensor) -> list[Tensor]:
    return [of.new_empty(of.shape) for of in (x, proj, bias, log_inv_temperature, codes)]


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, dphi: Tensor) -> tuple[Tensor, ...]:
    return tuple(backward(*ctx.saved_tensors, dphi))


forward.register_autograd(_differentiate, setup_context=_save)


def triton_codebook(
    x_BTND: Tensor, proj_NDE: Tensor, bias_NE: Tensor, log_inv_temperature_N: Tensor, codes_GFE: Tensor
) -> Tensor | None:
    """As `gated_kernels.chunk_codebook`; None on a CPU, and with a warning once for what the kernels cannot do."""
    if not (x_BTND.is_cuda or INTERPRETED.value):
        return None
    if why := unsupported(x_BTND, proj_NDE, bias_NE, log_inv_temperature_N, codes_GFE):
        if not torch.compiler.is_compiling():
            warn_once("codebook", why)
        return None
    return forward(x_BTND, proj_NDE, bias_NE, log_inv_temperature_N, codes_GFE)


def unsupported(
    x_BTND: Tensor, proj_NDE: Tensor, bias_NE: Tensor, log_inv_temperature_N: Tensor, codes_GFE: Tensor
) -> str | None:
    """What the kernels do not support of this, or None."""
    (N, D), E = x_BTND.shape[2:], codes_GFE.shape[2]
    if x_BTND.dtype != torch.bfloat16:
        return f"vectors in {str(x_BTND.dtype).removeprefix('torch.')}"
    if max(D, 2 * E) > LARGEST:
        return f"heads of {D} channels and codes of {E}"
    parameters = (proj_NDE, bias_NE, log_inv_temperature_N, codes_GFE)
    for x, shape in zip(parameters, ((N, D, E), (N, E), (N,), codes_GFE.shape)):
        if why := unfit(x_BTND.device, (x, shape)):
            return why
        if x.dtype not in (torch.float32, torch.bfloat16):
            return f"parameters in {str(x.dtype).removeprefix('torch.')}"
    return None
