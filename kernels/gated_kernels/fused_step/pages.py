"""Where the kernels of a step find a batch row's cache: in row b of contiguous tensors, or in a page elsewhere."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def page_of(rows, b, inside):
    """int64: the index of batch row b in the cache's tensors; `rows` holds it for every batch row, or is None."""
    return b.to(tl.int64) if rows is None else tl.load(rows + b, mask=inside, other=0)


@triton.jit
def offset_of(page, step, SIZE: tl.constexpr):
    """The offset of a page's first element in a tensor; `step` is None where pages of SIZE elements are contiguous."""
    return page * SIZE if step is None else page * step


@triton.jit
def slot_of(ring_position, b, inside, position_step, P: tl.constexpr):
    """The slot of the oldest token in the ring of batch row b. All rows share it where `position_step` is None."""
    if position_step is None:
        position = tl.load(ring_position)
    else:
        position = tl.load(ring_position + b * position_step, mask=inside, other=0)
    return position.to(tl.int32) % P
