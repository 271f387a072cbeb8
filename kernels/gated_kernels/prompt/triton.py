"""Rotary embedding, the memory's logit and the RMS norm in one Triton kernel each, for inference.

A prompt's time is that of the operations which the host starts. In torch these are 16, 7 and 8.

Shapes: B batch, T tokens, H query heads, G key-value heads, D head size or size of what is normalized, C rotated
channels. In a kernel: M vectors in a block, BD the power of two that holds D.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gated_kernels.common.integers import cdiv, next_power_of_2
from gated_kernels.common.interpreter import INTERPRETED, rounded
from gated_kernels.common.tiles import contiguous
from gated_kernels.common.tracing import launches_at_once
from gated_kernels.fused_step.arguments import EMPTY

BLOCK = 32  # vectors
LARGEST = 256  # head size
LARGEST_NORM = 16384  # size of what is normalized
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NO_WEIGHT, EMPTY_LOG = tl.constexpr(-1e4), tl.constexpr(EMPTY)


@triton.jit
def _rotate(x, cos, sin, to, rows, i, T, step, N: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):
    """Rows i of x [B,T,N,D], computed in fp32 and rounded once, as in the fused step of decoding."""
    d = tl.arange(0, BD)
    token = i // N
    angle = token // T * step + token % T * C
    turned = (i < rows)[:, None] & (d < C)[None, :]
    inside = (i < rows)[:, None] & (d < D)[None, :]
    at = i[:, None] * D
    own = tl.load(x + at + d[None, :], mask=inside, other=0.0)
    other = tl.where(d < C // 2, d + C // 2, d - C // 2)
    pair = tl.load(x + at + other[None, :], mask=turned, other=0.0).to(tl.float32)
    pair = tl.where((d < C // 2)[None, :], -pair, pair)
    c = tl.load(cos + angle[:, None] + d[None, :], mask=turned, other=1.0)
    s = tl.load(sin + angle[:, None] + d[None, :], mask=turned, other=0.0)
    turned_own = own.to(tl.float32) * c.to(tl.float32) + pair * s.to(tl.float32)
    tl.store(to + at + d[None, :], rounded(turned_own, own.dtype), mask=inside)


@triton.jit(do_not_specialize=["tokens", "T", "step", "of_q"])
def rotary_kernel(
    q, k, cos, sin, q_to, k_to, tokens, T, step, of_q,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, C: tl.constexpr, M: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Queries in the first `of_q` programs, keys in the others. `step`: of the angles from one sequence to the next."""
    program = tl.program_id(0)
    i = tl.arange(0, M)
    if program < of_q:
        _rotate(q, cos, sin, q_to, tokens.to(tl.int64) * H, program.to(tl.int64) * M + i, T, step, H, D, C, BD)
    else:
        first = (program - of_q).to(tl.int64) * M
        _rotate(k, cos, sin, k_to, tokens.to(tl.int64) * G, first + i, T, step, G, D, C, BD)


@triton.jit(do_not_specialize=["rows"])
def logit_kernel(
    q, normalizer, query, power, log_share, logit, rows, root,
    H: tl.constexpr, D: tl.constexpr, M: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """One row for each query of each token."""
    i = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    inside = i < rows
    head = i % H
    d = tl.arange(0, BD)
    block = inside[:, None] & (d < D)[None, :]
    queries = tl.load(q + i[:, None] * D + d[None, :], mask=block, other=0.0).to(tl.float32)
    asked = tl.load(query + head[:, None] * D + d[None, :], mask=block, other=0.0).to(tl.float32)
    log_normalizer = tl.log(tl.load(normalizer + i, mask=inside, other=1.0))
    found = tl.load(power + head).to(tl.float32) * log_normalizer + tl.load(log_share + head).to(tl.float32)
    found += tl.sum(queries * asked, 1) * root
    tl.store(logit + i, tl.where(log_normalizer <= EMPTY_LOG, NO_WEIGHT, found), mask=inside)


@triton.jit
def norm_kernel(x, weight, to, eps, D: tl.constexpr, BD: tl.constexpr):
    """One row. The normalized values are rounded before they are scaled, as in Llama's norm."""
    at = tl.program_id(0).to(tl.int64) * D
    d = tl.arange(0, BD)
    own = tl.load(x + at + d, mask=d < D, other=0.0)
    wide = own.to(tl.float32)
    normalized = rounded(wide * tl.rsqrt(tl.sum(wide * wide, 0) / D + eps), own.dtype).to(tl.float32)
    scale = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(to + at + d, rounded(scale * normalized, own.dtype), mask=d < D)


def rotary(*given: Tensor) -> tuple[Tensor, Tensor]:
    q, k, cos, sin = contiguous(*given)
    (B, T, H, D), G, C = q.shape, k.shape[2], cos.shape[-1]
    q_to, k_to = torch.empty_like(q), torch.empty_like(k)
    of_q, of_k = cdiv(B * T * H, BLOCK), cdiv(B * T * G, BLOCK)
    with torch.cuda.device_of(q):
        rotary_kernel[(of_q + of_k,)](
            q, k, cos, sin, q_to, k_to, B * T, T, 0 if len(cos) == 1 else T * C, of_q,
            H=H, G=G, D=D, C=C, M=BLOCK, BD=next_power_of_2(D),
        )  # fmt: skip
    return q_to, k_to


def memory_logit(q: Tensor, normalizer: Tensor, *parameters: Tensor) -> Tensor:
    (H, D), rows, logit = q.shape[2:], normalizer.numel(), normalizer.new_empty(normalizer.shape)
    with torch.cuda.device_of(q):
        logit_kernel[(cdiv(rows, BLOCK),)](
            *contiguous(q, normalizer, *parameters), logit, rows, D**-0.5, H=H, D=D, M=BLOCK, BD=next_power_of_2(D)
        )  # fmt: skip
    return logit


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x, D = x.contiguous(), x.shape[-1]
    to, BD = torch.empty_like(x), next_power_of_2(D)
    if x.numel():
        with torch.cuda.device_of(x):
            warps = min(max(BD // 512, 1), 16)
            norm_kernel[(x.numel() // D,)](x, weight.contiguous(), to, eps, D=D, BD=BD, num_warps=warps)
    return to


def triton_rotary(q_BTHD: Tensor, k_BTGD: Tensor, cos_BTC: Tensor, sin_BTC: Tensor) -> tuple[Tensor, Tensor] | None:
    """Queries and keys after rotary embedding, in their dtype; the halves of the first C channels are paired.

    cos_BTC, sin_BTC: [B or 1, T, C]. None on a CPU, where gradients are on, in graphs of torch.compile, for a single
    token, and for what the kernel does not support.
    """
    (B, T, _, D), C = q_BTHD.shape, cos_BTC.shape[-1]
    tensors = q_BTHD, k_BTGD, cos_BTC, sin_BTC
    if not _is_inference(*tensors) or D > LARGEST or C > D or C % 2 or k_BTGD.dtype != q_BTHD.dtype:
        return None
    if cos_BTC.dtype not in (q_BTHD.dtype, torch.float32) or sin_BTC.dtype != cos_BTC.dtype:
        return None
    if k_BTGD.shape[:2] != (B, T) or cos_BTC.shape[:-1] not in ((B, T), (1, T)) or sin_BTC.shape != cos_BTC.shape:
        return None
    return rotary(*tensors)


def triton_memory_logit(
    q_BTHD: Tensor, normalizer_BTH: Tensor, query_HD: Tensor, power_H: Tensor, log_share_H: Tensor
) -> Tensor | None:
    """gamma log m + c q / sqrt(D) + beta, float32 [B,T,H], and -1e4 where the memory is empty, of a float32 normalizer
    m > 0. None as with `triton_rotary`."""
    (B, T, H, D), parameters = q_BTHD.shape, (query_HD, power_H, log_share_H)
    if not _is_inference(q_BTHD, normalizer_BTH, *parameters) or D > LARGEST or normalizer_BTH.dtype != torch.float32:
        return None
    if normalizer_BTH.shape != (B, T, H) or [x.shape for x in parameters] != [(H, D), (H,), (H,)]:
        return None
    return memory_logit(q_BTHD, normalizer_BTH, *parameters)


def triton_rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor | None:
    """x / sqrt(mean(x^2) + eps), rounded to the dtype of x and then multiplied by the weight, over the last dimension.
    None as with `triton_rotary`."""
    if not _is_inference(x, weight_D, tokens=1) or weight_D.dtype != x.dtype or x.shape[-1] > LARGEST_NORM:
        return None
    return None if weight_D.shape != x.shape[-1:] else rms_norm(x, weight_D, eps)


def _is_inference(*tensors: Tensor, tokens: int = 2) -> bool:
    """Whether these are so many tokens or more on a GPU, of dtypes that the kernels read, and an operation is run,
    without gradients, as soon as it is called. torch.compile fuses the operations itself."""
    if not (launches_at_once(tensors[0]) and (tensors[0].is_cuda or INTERPRETED.value)):
        return False
    return tensors[0].shape[1] >= tokens and all(x.dtype in DTYPES and x.device == tensors[0].device for x in tensors)
