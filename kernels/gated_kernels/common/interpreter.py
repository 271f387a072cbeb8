"""What all Triton kernels need to run in Triton's interpreter, too."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # then the kernels are Python and take tensors of a CPU


@triton.jit
def rounded(x, dtype: tl.constexpr):
    if INTERPRETED and dtype == tl.bfloat16 and x.dtype == tl.float32:  # the interpreter would cut digits off
        bits = x.to(tl.uint32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).to(tl.float32, bitcast=True)
    return x.to(dtype)
