"""The readings that tests take of a compiled kernel are right: found if present, and only then."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from compiled import compile_instead_of_launching, told_by  # noqa: E402


@triton.jit
def sums_kernel(x, y, o, N, IN_REGISTERS: tl.constexpr):
    """The sum of products of tiles, and of the tiles themselves: of those as they are taken, or of others."""
    i = tl.arange(0, 64)
    at = i[:, None] * 64 + i[None, :]
    product = tl.zeros((64, 64), tl.float32)
    total = tl.zeros((64,), tl.float32)
    for n in range(N):
        a = tl.load(x + n * 4096 + at)
        product = tl.dot(a, tl.load(y + n * 4096 + at), product)
        if IN_REGISTERS:
            total += tl.sum(a.to(tl.float32), 1)
    tl.store(o + at, (product + total[:, None]).to(tl.bfloat16))


def test_a_tile_that_is_loaded_over_one_in_use_is_found(tmp_path: Path) -> None:
    assert told_by(__file__, tmp_path) == [["compiled", "sums_kernel"], ["sums_kernel", "loads", "over"]]


def compile_all() -> None:
    compile_instead_of_launching(lambda name, _: print("compiled", name))
    x = torch.empty(8, 64, 64, dtype=torch.bfloat16, device="meta")
    for in_registers in (False, True):
        try:
            sums_kernel[(1,)](x, x, x, 7, IN_REGISTERS=in_registers, num_warps=4, num_stages=2)
        except AssertionError as refused:
            print(*str(refused).split()[:3])


if __name__ == "__main__":
    compile_all()
