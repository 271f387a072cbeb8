"""A codebook's feature map in Triton kernels: the op, and how its kernels are launched.

A program handles some of the rows of one head, block by block. It projects them, adds the bias, normalizes them to
length 1, multiplies them by the codes and takes the softmax. If one block holds all codes, their logits stay in
registers. Otherwise the program loops over the codes twice, first for the softmax's sum and then for its weights. It
recomputes the logits rather than storing them.

The backward pass recomputes all of this, so that only the inputs are saved. `rows_kernel` propagates the gradient
through the softmax and the normalization. It loops over the codes twice, or once if each row's sum and mean are given.
From its results, `projections_kernel` computes the gradients of the vectors and of their projections and biases.
`codes_kernel` computes that of the codes, with a program for every block of codes and some of the rows. No two programs
write to the same element: each writes its own part of a parameter's gradient, and the parts are then summed. So all
gradients are deterministic.

Products that lead to the logits take fp16 operands, because bf16 would cost the map half of its digits. All others take
bf16. All accumulate in fp32, and everything else is in fp32: u, its length, the temperature and the softmax. Tiles that
may be the second operand of a product have at least 64 columns (see simple_gla/launch.py). For heads of 64, E fills 32
of them.

Shapes: B batch, T tokens, N heads, G heads with codes of their own, D head size, E size of a code, F codes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from gated_kernels.codebook.kernels import codes_kernel, forward_kernel, projections_kernel, rows_kernel
from gated_kernels.common.gated_inputs import unfit, warn_once
from gated_kernels.common.integers import cdiv, next_power_of_2
from gated_kernels.common.interpreter import INTERPRETED

PROGRAMS = 528  # enough to fill a GPU: four for each of the 132 SMs of an H200
# M, BF, num_warps and num_stages of each kernel: for heads of up to 64 with up to 256 codes, for these with more codes,
# for heads of up to 128 with up to 256 codes, and for all others. The first three are the fastest on an H200 of those
# that fit into 99 KB of shared memory. At heads of 64 and 128 none spills registers with Triton 3.6; with 3.9 one
# spills 24 bytes.
BLOCKS = {
    "forward": ((64, 256, 4, 3), (64, 256, 4, 2), (64, 256, 4, 3), (128, 128, 8, 2)),
    "rows": ((64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 2)),
    "projections": ((64, 0, 4, 3),) * 4,
    "codes": ((128, 64, 4, 2), (64, 64, 4, 2), (128, 64, 4, 2), (64, 128, 8, 2)),
}
LARGEST = 256  # head size, and twice the size of a code, up to which tiles fit into shared memory
CODES = torch.float16  # the dtype that kernels read codes in
KERNELS = {"forward": forward_kernel, "rows": rows_kernel, "projections": projections_kernel, "codes": codes_kernel}


@functools.cache
def constants(kernel: str, N: int, G: int, D: int, E: int, F: int) -> dict[str, Any]:
    """A kernel's constexprs and launch options. They follow from the sizes; there is no autotuning."""
    M, BF, warps, stages = BLOCKS[kernel][2 * (D > 64) + (F > 256 or D > 128)]
    BD, BE = (max(64, next_power_of_2(size)) for size in (D, E))
    if BD > 128:  # these need twice the registers, and must still fit into shared memory
        BF, warps, stages = min(BF, 64), 8, 1
    BF = min(BF, max(64, next_power_of_2(F)))
    found = {"N": N, "G": G, "D": D, "E": E, "F": F, "M": M, "BD": BD, "BE": BE, "BF": BF}
    return {x: found[x] for x in KERNELS[kernel].arg_names if x in found} | {"num_warps": warps, "num_stages": stages}


def _split(rows: int, compiled_for: dict[str, Any], programs: int) -> tuple[int, int]:
    """How many parts the rows are split into, and the rows of a part, so that about PROGRAMS programs run in all.
    `programs`: how many each part takes."""
    blocks = cdiv(rows, compiled_for["M"])
    part = cdiv(blocks, max(1, PROGRAMS // programs)) * compiled_for["M"]
    return cdiv(rows, part), part


def plain(*tensors: Tensor) -> list[Tensor]:
    """Vectors, projections, biases, temperatures and codes, contiguous and in the dtypes that the kernels read."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float32, CODES)
    return [(x if x.dtype == dtype else x.to(dtype)).contiguous() for x, dtype in zip(tensors, dtypes)]


def _sizes(x: Tensor, codes: Tensor) -> tuple[int, tuple[int, int, int, int, int]]:
    """The number of rows, B T, and N, G, D, E and F."""
    B, T, N, D = x.shape
    G, F, E = codes.shape
    return B * T, (N, G, D, E, F)


def mapped(x: Tensor, proj: Tensor, bias: Tensor, log_inv_temperature: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """The map [B,T,N,F], and the log-sum-exp of its softmax to base 2, [N, B T]."""
    x, proj, bias, log_inv_temperature, codes = plain(x, proj, bias, log_inv_temperature, codes)
    rows, sizes = _sizes(x, codes)
    phi = x.new_empty(*x.shape[:3], codes.shape[1])
    sums = x.new_empty(sizes[0], rows, dtype=torch.float32)
    compiled_for = constants("forward", *sizes)
    parts, part = _split(rows, compiled_for, sizes[0])
    with torch.cuda.device_of(x):
        forward_kernel[(parts * sizes[0],)](
            x, proj, bias, log_inv_temperature, codes, phi, sums, rows, part, **compiled_for,
            ALIGNED=x.shape[1] % 16 == 0,
        )  # fmt: skip
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
    statistics: tuple[Tensor, Tensor] | None = None,
) -> list[Tensor]:
    """The gradients of x, proj, bias, log_inv_temperature and codes.

    `statistics` save a pass over dphi: the log-sum-exp of each row's softmax to base 2, and the dot product of each
    row's rounded map with dphi, both [N, B T].
    """
    given = proj, bias, log_inv_temperature, codes
    x, proj, bias, log_inv_temperature, codes = plain(x, *given)
    rows, (N, G, D, E, F) = _sizes(x, codes)
    dphi = dphi.contiguous()
    dx, dys = torch.empty_like(x), x.new_empty(rows, N, E)
    us = torch.empty_like(dys, dtype=torch.float16)
    sums, means = statistics or x.new_empty(2, N, rows, dtype=torch.float32)
    by_rows, by_projections, by_codes = (constants(name, N, G, D, E, F) for name in ("rows", "projections", "codes"))
    with torch.cuda.device_of(x):
        parts, part = _split(rows, by_rows, N)
        dlog_inv_temperature = x.new_empty(parts, N, dtype=torch.float32)
        rows_kernel[(parts * N,)](
            x, proj, bias, log_inv_temperature, codes, dphi, us, dys, sums, means, dlog_inv_temperature, rows, part,
            HAS_STATISTICS=statistics is not None, **by_rows,
        )  # fmt: skip
        parts, part = _split(rows, by_projections, N)
        dproj = x.new_empty(parts, N, D, E, dtype=torch.float32)
        dbias = x.new_empty(parts, N, E, dtype=torch.float32)
        projections_kernel[(parts * N,)](x, proj, dys, dx, dproj, dbias, rows, part, **by_projections)
        blocks = cdiv(F, by_codes["BF"])
        parts, part = _split(rows, by_codes, N * blocks)
        dcodes = x.new_empty(parts, G, N // G, F, E, dtype=torch.float32)
        codes_kernel[(parts * N * blocks,)](
            us, log_inv_temperature, codes, dphi, sums, means, dcodes, rows, part,
            HAS_STATISTICS=statistics is not None, **by_codes,
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
    """Same as `gated_kernels.chunk_codebook`. None on a CPU, and for what the kernels do not support, with a warning
    the first time."""
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
    """What the kernels do not support in these arguments, or None."""
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
