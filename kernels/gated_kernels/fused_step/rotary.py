"""Rotary position embedding in the kernels of a step."""

from __future__ import annotations

import triton
import triton.language as tl

from gated_kernels.common.interpreter import rounded


@triton.jit
def rotated(x, d, inside, cos, sin, D: tl.constexpr, C: tl.constexpr):
    """Channels d of the vectors at x after rotary embedding, in the dtype of x."""
    own = tl.load(x + d, mask=inside & (d < D), other=0.0)
    if C > 0:
        turned = d < C
        other = tl.where(d < C // 2, d + C // 2, d - C // 2)
        pair = tl.load(x + other, mask=inside & turned, other=0.0).to(tl.float32)
        pair = tl.where(d < C // 2, -pair, pair)
        c = tl.load(cos + d, mask=turned, other=1.0).to(tl.float32)
        s = tl.load(sin + d, mask=turned, other=0.0).to(tl.float32)
        own = rounded(own.to(tl.float32) * c + pair * s, own.dtype)
    return own
