"""What Triton kernels need so that they also run in Triton's interpreter."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # then kernels run in Python and take CPU tensors


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """x in another dtype, rounded to nearest."""
    if INTERPRETED and dtype == tl.bfloat16 and x.dtype == tl.float32:  # the interpreter would truncate
        bits = x.to(tl.uint32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).to(tl.float32, bitcast=True)
    return x.to(dtype)
