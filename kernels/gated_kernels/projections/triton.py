"""Linear layers of a few rows in one Triton kernel, for decoding.

A decoding step multiplies one row of each sequence by every weight of the model, so its time is that of reading the
weights. A program takes all rows and some output channels, and reads its part of a weight once, from one end to the
other. Layers with the same input, such as those of queries, keys and values, share a kernel. In a SwiGLU, a program
computes the same channels of the gate and of the up projection, and multiplies them at once.

If the GPU supports it (programmatic dependent launch), a kernel is launched while the one before it still runs, and
waits before it reads its input.

Weights may be 8-bit numbers with a scale for each output channel, which are multiplied as they are and scaled at the
end. Products are summed in fp32 and rounded once.

Shapes: M rows, K input channels, N output channels of a layer. In a kernel: BM, BN and BK of them in a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gated_kernels.common import chips
from gated_kernels.common.integers import cdiv
from gated_kernels.common.interpreter import INTERPRETED, rounded
from gated_kernels.common.tiles import dot
from gated_kernels.common.tracing import launches_at_once
from gated_kernels.projections.arguments import ScaledWeight, Weight, numbers_of

ROWS = (16, 32, 64)  # of a block
MOST_LAYERS = 3  # with the same input
DTYPES = (torch.bfloat16, torch.float16)
PLAIN = (Tensor, torch.nn.Parameter)
ALIGNED = 16  # input channels are a multiple of it, so that rows are read in whole vectors
MANY_CHANNELS = 16384


class LaunchConfig(NamedTuple):
    """The block of a program: output channels (of each of two weights in a SwiGLU) and input channels at a time."""

    channels: int
    depth: int
    stages: int
    warps: int


@triton.jit
def _add_product(total, rows, weight, n, N, k, K: tl.constexpr, BK: tl.constexpr, WEIGHT_FIRST: tl.constexpr):
    """Adds rows W^T, or its transpose, for channels k of rows n of a weight."""
    inside = (n < N)[:, None]
    if K % BK != 0:
        inside &= (k < K)[None, :]
    weights = tl.load(weight + n[:, None].to(tl.int64) * K + k[None, :], mask=inside, other=0.0)
    weights = rounded(weights.to(tl.float32), rows.dtype)  # bf16 and fp16 hold all numbers of 8 bits
    if WEIGHT_FIRST:
        total = dot(weights, tl.trans(rows), total, rows.dtype, "tf32")
    else:
        total = dot(rows, tl.trans(weights), total, rows.dtype, "tf32")
    return total


@triton.jit
def _scaled(total, scale, n, N):
    if scale is not None:
        total *= tl.load(scale + n, mask=n < N, other=0.0)[None, :]
    return total


@triton.jit(do_not_specialize=["M"])
def linear_kernel(
    x, weight_0, weight_1, weight_2, scale_0, scale_1, scale_2, bias_0, bias_1, bias_2, o_0, o_1, o_2, x_step, M,
    N_0: tl.constexpr, N_1: tl.constexpr, N_2: tl.constexpr, K: tl.constexpr, SWIGLU: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """x W_i^T + bias_i of up to three layers (N_i = 0: no such layer), or silu(x W_0^T) * (x W_1^T)."""
    i = tl.program_id(0)
    weight, scale, bias, o, N = weight_0, scale_0, bias_0, o_0, N_0
    if N_1 > 0 and not SWIGLU:
        before = tl.cdiv(N_0, BN)
        if i >= before:
            weight, scale, bias, o, N = weight_1, scale_1, bias_1, o_1, N_1
            i -= before
            if N_2 > 0:
                before = tl.cdiv(N_1, BN)
                if i >= before:
                    weight, scale, bias, o, N = weight_2, scale_2, bias_2, o_2, N_2
                    i -= before
    n = i * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # the larger block is the first operand, and so are 8-bit weights, which are converted in registers
    weight_first: tl.constexpr = BM < BN or scale_0 is not None
    total = tl.zeros([BN, BM], tl.float32) if weight_first else tl.zeros([BM, BN], tl.float32)
    of_up = total
    for start in tl.range(0, K, BK, num_stages=STAGES):
        k = start + tl.arange(0, BK)
        inside = (m < M)[:, None]
        if K % BK != 0:
            inside &= (k < K)[None, :]
        rows = tl.load(x + m[:, None] * x_step + k[None, :], mask=inside, other=0.0)
        total = _add_product(total, rows, weight, n, N, k, K, BK, weight_first)
        if SWIGLU:
            of_up = _add_product(of_up, rows, weight_1, n, N, k, K, BK, weight_first)
    if weight_first:
        total = tl.trans(total)
    total = _scaled(total, scale, n, N)
    if SWIGLU:
        if weight_first:
            of_up = tl.trans(of_up)
        total = total / (1.0 + tl.exp(-total)) * _scaled(of_up, scale_1, n, N)
    if bias is not None:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    at = m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(o + at, rounded(total, o.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def launch_config(rows: int, inputs: int, swiglu: bool, in_8_bits: bool, device: torch.device) -> LaunchConfig:
    """Measured on an H200 (kernels/results/step-h200.md)."""
    small = chips.multiplies_in_registers(device)  # these chips have less shared memory
    if in_8_bits and rows > ROWS[0]:
        return LaunchConfig(128, 64, 3 if small else 6, 8) if swiglu else LaunchConfig(32, 256, 3 if small else 4, 4)
    if in_8_bits:
        return LaunchConfig(32, 1024, 2 if small else 3, 4) if inputs >= 8192 else LaunchConfig(32, 512, 3, 2)
    if swiglu or rows > ROWS[0]:
        return LaunchConfig(64, 128, 3 if small else 4, 4)
    return LaunchConfig(16, 512, 4, 2) if inputs >= 1024 else LaunchConfig(16, 64, 8, 2)


def linear(x_MK: Tensor, weights: Sequence[Weight], biases: Sequence[Tensor], swiglu: bool) -> list[Tensor]:
    """The outputs [M,N] of layers with the weights [N,K] and `biases` (empty if they have none), or of their SwiGLU."""
    (M, K), numbers = x_MK.shape, [numbers_of(weight) for weight in weights]
    scales = [weight.scale_N for weight in weights if isinstance(weight, ScaledWeight)]
    sizes = [len(x) for x in numbers]
    of_outputs = sizes[:1] if swiglu else sizes
    outputs = [x_MK.new_empty(M, N) for N in of_outputs]
    config = launch_config(M, K, swiglu, bool(scales), x_MK.device)
    overlap = chips.overlaps_launches(x_MK.device)
    with torch.cuda.device_of(x_MK):
        linear_kernel[(sum(cdiv(N, config.channels) for N in of_outputs),)](
            x_MK, *_three(numbers), *_three(scales), *_three(biases), *_three(outputs), x_MK.stride(0), M,
            **{f"N_{i}": N or 0 for i, N in enumerate(_three(sizes))}, K=K, SWIGLU=swiglu,
            BM=next(size for size in ROWS if size >= M), BN=config.channels, BK=config.depth,
            STAGES=config.stages, OVERLAP=overlap, num_warps=config.warps, launch_pdl=overlap,
        )  # fmt: skip
    return outputs


def _three(given: Sequence[Any]) -> list[Any]:
    return [*given, *[None] * (MOST_LAYERS - len(given))]


def triton_projections(
    x: Tensor, weights: Sequence[Weight], biases: Sequence[Tensor | None]
) -> tuple[Tensor, ...] | None:
    """x W^T + b of up to three linear layers with the same input x [...,K], one output [...,N] each.

    weights: [N,K]. biases: [N], or None for all layers. All of one half-precision dtype, that of the outputs, but for
    weights in 8 bits: all of them or none are.

    None on a CPU, where gradients are on, in graphs of torch.compile, for more than 64 rows, and for what the kernel
    does not support. Also for what torch was found to do faster: one layer alone with more than 16 rows, unless it has
    as many channels as an output head.
    """
    found = [bias for bias in biases if bias is not None]
    if not 1 <= len(weights) <= MOST_LAYERS or len(found) not in (0, len(weights)):
        return None
    shapes = [numbers_of(weight).shape for weight in weights]
    if any(bias.shape != shape[:1] or not bias.is_contiguous() for bias, shape in zip(found, shapes)):
        return None
    if (x_MK := _rows(x, weights, found)) is None:
        return None
    alone = len(weights) == 1 and not isinstance(weights[0], ScaledWeight) and shapes[0][0] < MANY_CHANNELS
    if alone and len(x_MK) > ROWS[0]:
        return None
    return tuple(o.view(*x.shape[:-1], -1) for o in linear(x_MK, weights, found, False))


def triton_swiglu(x: Tensor, gate_NK: Weight, up_NK: Weight) -> Tensor | None:
    """silu(x gate^T) * (x up^T), [...,N], for x [...,K]: the first half of Llama's feed-forward (arXiv 2002.05202,
    eq. 6). None as with `triton_projections`, for more than 64 rows."""
    if numbers_of(gate_NK).shape != numbers_of(up_NK).shape or (x_MK := _rows(x, (gate_NK, up_NK), ())) is None:
        return None
    (o_MN,) = linear(x_MK, (gate_NK, up_NK), (), True)
    return o_MN.view(*x.shape[:-1], -1)


def _rows(x: Tensor, weights: Sequence[Weight], biases: Sequence[Tensor]) -> Tensor | None:
    """x as [M,K], or None if the kernel does not take it or one of the weights."""
    if not (launches_at_once(x) and (x.is_cuda or INTERPRETED.value)) or x.dtype not in DTYPES:
        return None
    K = x.shape[-1]
    if not 0 < x.numel() <= ROWS[-1] * K or K % ALIGNED:
        return None
    dtypes = {numbers_of(weight).dtype for weight in weights}
    in_8_bits = isinstance(weights[0], ScaledWeight)
    if len(dtypes) > 1 or not dtypes <= (chips.eight_bit_dtypes(x.device) if in_8_bits else {x.dtype}):
        return None
    for weight in weights:
        numbers = numbers_of(weight)
        if numbers.dim() != 2 or numbers.shape[1] != K or not numbers.is_contiguous() or numbers.device != x.device:
            return None
        if isinstance(weight, ScaledWeight) != in_8_bits or type(numbers) not in PLAIN:
            return None  # a subclass may hold something else than numbers of its dtype
        if isinstance(weight, ScaledWeight) and not _are_scales(weight.scale_N, numbers):
            return None
    if any(type(bias) not in PLAIN or bias.dtype != x.dtype or bias.device != x.device for bias in biases):
        return None
    return x.reshape(-1, K).contiguous()


def _are_scales(scale_N: Tensor, numbers_NK: Tensor) -> bool:
    same = scale_N.shape == numbers_NK.shape[:1] and scale_N.device == numbers_NK.device
    return same and scale_N.dtype == torch.float32 and scale_N.is_contiguous()
