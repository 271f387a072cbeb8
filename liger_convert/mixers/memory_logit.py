"""The memory's logit in the softmax denominator that it shares with the window.

Shapes: B batch, T tokens, N = B T, H query heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_convert.mixers.precision import multiplies_in_bf16


class MemoryLogit(torch.autograd.Function):
    """The logit gamma log m + c q / sqrt(D) + beta (see MixerSpec), float32 [B,T,H].

    Its inputs are q [B,T,H,D], log m [B,T,H], c [H,D], and gamma and beta [H].

    The gradients of the parameters are sums over all tokens, computed here as matrix products. The code that
    torch.compile generated for these sums took a third of an alignment step on an H200. The gradient of c uses bf16
    queries without a cast: torch.compile would store a float32 copy of them, the largest tensor of a layer, from the
    forward pass on.
    """

    @staticmethod
    def forward(
        ctx: Any, q_BTHD: Tensor, log_normalizer_BTH: Tensor, query_HD: Tensor, power_H: Tensor, beta_H: Tensor
    ) -> Tensor:
        ctx.save_for_backward(q_BTHD, log_normalizer_BTH, query_HD, power_H, beta_H)
        asked_BTH = (q_BTHD * query_HD.float()).sum(-1, dtype=torch.float32)  # the product is in float32
        asked_BTH *= q_BTHD.shape[-1] ** -0.5
        logit_BTH: Tensor = power_H.float() * log_normalizer_BTH.float() + asked_BTH + beta_H.float()
        return logit_BTH

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, ...]:
        q_BTHD, log_normalizer_BTH, query_HD, power_H, beta_H = ctx.saved_tensors
        (d_BTH,) = grads
        with torch.autocast(d_BTH.device.type, enabled=False):
            d_NH = d_BTH.flatten(0, 1)
            ones_1N = d_NH.new_ones(1, d_NH.shape[0])
            asked_BTH = d_BTH * q_BTHD.shape[-1] ** -0.5
            dtype = q_BTHD.dtype if multiplies_in_bf16(q_BTHD) else torch.float32
            q_HND = q_BTHD.to(dtype).flatten(0, 1).transpose(0, 1)
            return (
                (asked_BTH[..., None] * query_HD.float()).to(q_BTHD.dtype),
                (d_BTH * power_H.float()).to(log_normalizer_BTH.dtype),
                (asked_BTH.to(dtype).flatten(0, 1).T[:, None] @ q_HND)[:, 0].to(query_HD.dtype),
                (ones_1N @ (d_NH * log_normalizer_BTH.float().flatten(0, 1)))[0].to(power_H.dtype),
                (ones_1N @ d_NH)[0].to(beta_H.dtype),
            )
