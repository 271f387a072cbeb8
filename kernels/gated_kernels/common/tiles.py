"""Code shared by the Triton kernels: loading and storing tiles, and matrix products."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gated_kernels.common.interpreter import INTERPRETED, rounded

# By the inputs' dtype: the dtype of the operands of matrix products, and the precision for fp32 operands.
PRODUCTS = {
    torch.bfloat16: (torch.bfloat16, "tf32"),
    torch.float16: (torch.float32, "tf32"),
    torch.float32: (torch.float32, "tf32x3"),
}


def contiguous(*tensors: Tensor | None) -> list[Any]:
    """The tensors, contiguous. None stays None."""
    return [None if x is None else x.contiguous() for x in tensors]


@triton.jit
def load(x, i, rows, step, column, columns):
    """Rows i and columns `column` of x, whose rows are `step` elements apart. Zeros out of bounds."""
    mask = (i < rows)[:, None] & (column < columns)[None, :]
    return tl.load(x + i[:, None] * step + column[None, :], mask=mask, other=0.0)


@triton.jit
def load_again(x, i, rows, step, column, columns):
    """Same as `load`, but volatile: the compiler does not reuse an earlier load by keeping it in registers."""
    mask = (i < rows)[:, None] & (column < columns)[None, :]
    return tl.load(x + i[:, None] * step + column[None, :], mask=mask, other=0.0, volatile=True)


@triton.jit
def store(x, value, i, rows, step, column, columns):
    mask = (i < rows)[:, None] & (column < columns)[None, :]
    tl.store(x + i[:, None] * step + column[None, :], rounded(value, x.dtype.element_ty), mask=mask)


@triton.jit
def load_vector(x, i, size, step):
    """Elements i of x, which are `step` apart, in fp32. Zeros out of bounds."""
    return tl.load(x + i * step, mask=i < size, other=0.0).to(tl.float32)


@triton.jit
def store_vector(x, value, i, size, step):
    tl.store(x + i * step, value, mask=i < size)


@triton.jit
def dot(a, b, c, D: tl.constexpr, PRECISION: tl.constexpr):
    """a b + c (None: a b) in fp32, with operands rounded to D. Kernels multiply matrices only here."""
    a = rounded(a, D)
    b = rounded(b, D)
    if INTERPRETED:  # Triton's interpreter multiplies the bits of bf16 as integers
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, c, input_precision=PRECISION)
