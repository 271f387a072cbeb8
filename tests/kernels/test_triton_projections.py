"""The kernel for linear layers of a few rows computes what torch computes in its place.

Shapes: M rows, K input channels, N output channels.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("triton", reason="Triton is not installed")

from gated_kernels.common.interpreter import INTERPRETED
from gated_kernels.projections.arguments import ScaledWeight
from gated_kernels.projections.triton import MANY_CHANNELS, triton_projections, triton_swiglu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16 = torch.bfloat16
EIGHT_BITS = [torch.int8, torch.float8_e4m3fn]
DTYPES = pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
ROWS = pytest.mark.parametrize("M", [1, 3, 16, 17, 33, 64])
pytestmark = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED.value, reason="neither a GPU nor the interpreter")


def normal(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(DEVICE, dtype)


def assert_as_exact_as_torch(found: Tensor, torchs: Tensor, exact: Tensor) -> None:
    """At most twice the error of torch's computation in the same dtype; and rows of their own."""
    assert found.dtype == torchs.dtype
    assert found.shape == exact.shape
    assert (found - exact).abs().max() <= 2 * (torchs - exact).abs().max()


@DTYPES
@ROWS
@pytest.mark.parametrize(("K", "sizes"), [(64, (48, 16, 16)), (80, (37, 20)), (576, (24, 5, 5)), (1040, (18, 33, 70))])
@pytest.mark.parametrize("with_bias", [False, True])
@torch.no_grad()
def test_layers_with_one_input(M: int, K: int, sizes: tuple[int, ...], with_bias: bool, dtype: torch.dtype) -> None:
    x = normal(M, 1, K, dtype=dtype) * K**0.5
    weights = [normal(N, K, dtype=dtype) for N in sizes]
    biases = [normal(1, N, dtype=dtype)[0] for N in sizes] if with_bias else [None] * len(sizes)
    found = triton_projections(x, weights, biases)
    assert found is not None
    assert len(found) == len(sizes)
    for o, weight, bias in zip(found, weights, biases):
        exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        assert_as_exact_as_torch(o, F.linear(x, weight, bias), exact)


@DTYPES
@ROWS
@pytest.mark.parametrize(("K", "N"), [(64, 48), (80, 37), (576, 24), (1040, 70)])
@torch.no_grad()
def test_swiglu(M: int, K: int, N: int, dtype: torch.dtype) -> None:
    x, gate, up = 2 * normal(M, 1, K, dtype=dtype) * K**0.5, normal(N, K, dtype=dtype), normal(N + 1, K, dtype=dtype)
    up = up[1:]
    found = triton_swiglu(x, gate, up)
    assert found is not None
    exact = F.silu(x.double() @ gate.double().T) * (x.double() @ up.double().T)
    assert_as_exact_as_torch(found, F.silu(F.linear(x, gate)) * F.linear(x, up), exact)


def in_8_bits(weight_NK: Tensor, dtype: torch.dtype) -> ScaledWeight:
    largest = 127.0 if dtype == torch.int8 else 448.0
    scale_N1 = weight_NK.float().abs().amax(1, keepdim=True) / largest
    numbers = weight_NK.float() / scale_N1
    return ScaledWeight((numbers.round() if dtype == torch.int8 else numbers).to(dtype), scale_N1[:, 0])


@pytest.mark.parametrize("stored", EIGHT_BITS, ids=str)
@ROWS
@pytest.mark.parametrize(("K", "sizes"), [(64, (16, 16, 16)), (80, (37,)), (1040, (18, 33))])
@torch.no_grad()
def test_weights_in_8_bits(M: int, K: int, sizes: tuple[int, ...], stored: torch.dtype) -> None:
    x, weights = normal(M, 1, K) * K**0.5, [in_8_bits(normal(N, K), stored) for N in sizes]
    biases = [normal(1, N)[0] for N in sizes]
    found = triton_projections(x, weights, biases)
    assert found is not None
    for o, (numbers, scale), bias in zip(found, weights, biases):
        wide = numbers.double() * scale.double()[:, None]
        exact = F.linear(x.double(), wide, bias.double())
        assert_as_exact_as_torch(o, F.linear(x, wide.to(BF16), bias), exact)


@pytest.mark.parametrize("stored", EIGHT_BITS, ids=str)
@ROWS
@torch.no_grad()
def test_swiglu_in_8_bits(M: int, stored: torch.dtype) -> None:
    x = 2 * normal(M, 1, 80) * 80**0.5
    gate, up = (in_8_bits(normal(N, 80)[:37], stored) for N in (37, 38))
    found = triton_swiglu(x, gate, up)
    assert found is not None
    wide = [numbers.double() * scale.double()[:, None] for numbers, scale in (gate, up)]
    exact = F.silu(x.double() @ wide[0].T) * (x.double() @ wide[1].T)
    torchs = F.silu(F.linear(x, wide[0].to(BF16))) * F.linear(x, wide[1].to(BF16))
    assert_as_exact_as_torch(found, torchs, exact)


@torch.no_grad()
def test_rows_are_independent_and_may_lie_apart() -> None:
    weights = [normal(48, 64), normal(16, 64)]
    wide = normal(5, 128)
    wide[:, 64:] = float("nan")
    wide[3] = float("inf")
    found = triton_projections(wide[:, :64], weights, [None, None])
    assert found is not None
    for o, weight in zip(found, weights):
        assert o[[0, 1, 2, 4]].isfinite().all()
        torch.testing.assert_close(o[4], F.linear(wide[4, :64], weight), rtol=1e-2, atol=1e-2)


@torch.no_grad()
def test_one_layer_of_many_rows_is_left_to_torch() -> None:
    few, many, head = normal(16, 64), normal(17, 64), normal(MANY_CHANNELS, 64)
    weight = normal(48, 64)
    assert triton_projections(few, [weight], [None]) is not None
    assert triton_projections(many, [weight], [None]) is None
    assert triton_projections(many, [weight, weight], [None, None]) is not None
    (found,) = triton_projections(many, [head], [None]) or ()
    torch.testing.assert_close(found, F.linear(many, head), rtol=2e-2, atol=1e-2)


def test_what_the_kernel_does_not_take_is_left_to_torch() -> None:
    class Packed(Tensor):
        """Stands in for quantized weights, which say that they are of the dtype that they stand for."""

    x, weight, bias = normal(3, 64), normal(48, 64), normal(48, 1)[:, 0]
    packed = weight.as_subclass(Packed)
    scaled = in_8_bits(weight, torch.int8)
    assert triton_projections(x, [weight], [None]) is None, "gradients may be asked for"
    calls: list[Callable[[], object]] = [
        lambda: triton_projections(x.float(), [weight.float()], [None]),
        lambda: triton_projections(x, [weight.float()], [None]),
        lambda: triton_projections(x, [packed], [None]),
        lambda: triton_projections(x, [scaled, weight], [None, None]),
        lambda: triton_projections(x, [scaled, in_8_bits(weight, torch.float8_e4m3fn)], [None, None]),
        lambda: triton_projections(x, [scaled._replace(scale_N=scaled.scale_N[:1])], [None]),
        lambda: triton_projections(x, [scaled._replace(scale_N=scaled.scale_N.bfloat16())], [None]),
        lambda: triton_projections(x, [scaled._replace(numbers_NK=scaled.numbers_NK.short())], [None]),
        lambda: triton_projections(x, [weight, weight], [None, bias]),
        lambda: triton_projections(x, [weight] * 4, [None] * 4),
        lambda: triton_projections(x, [weight[:, ::2]], [None]),
        lambda: triton_projections(x[:, :40], [weight[:, :40].contiguous()], [None]),
        lambda: triton_projections(x[:0], [weight], [None]),
        lambda: triton_projections(normal(65, 64), [weight, weight], [None, None]),
        lambda: triton_swiglu(x, weight, weight[:47]),
        lambda: triton_swiglu(normal(65, 64), weight, weight),
    ]
    with torch.no_grad():
        assert [call() for call in calls] == [None] * len(calls)
        assert triton_projections(x, [nn.Parameter(weight)], [nn.Parameter(bias)]) is not None
