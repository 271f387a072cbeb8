"""The kernels of a prompt compute what torch computes in their place.

Shapes: B batch, T tokens, H query heads, G key-value heads, D head size, C rotated channels.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from gated_kernels.common.interpreter import INTERPRETED
from gated_kernels.prompt.triton import triton_memory_logit, triton_rms_norm, triton_rotary
from gated_kernels.swa import triton as swa
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from liger_convert.mixers.memory_logit import MemoryLogit

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, FP32 = torch.bfloat16, torch.float32
pytestmark = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED.value, reason="neither a GPU nor the interpreter")
B, T, H, G, D = 2, 37, 6, 2, 24


def normal(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + shape[-1])).to(DEVICE, dtype)


def of_torch(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    C = cos.shape[-1]
    turned = apply_rotary_pos_emb(q[..., :C], k[..., :C], cos, sin, unsqueeze_dim=2)
    q_rot, k_rot = (torch.cat((x, own[..., C:]), -1).to(own.dtype) for x, own in zip(turned, (q, k)))
    return q_rot, k_rot


@pytest.mark.parametrize(("dtype", "of_angles"), [(BF16, BF16), (BF16, FP32), (FP32, FP32)])
@pytest.mark.parametrize(("rows", "C"), [(1, D), (B, D), (1, D - 4)])
@torch.no_grad()
def test_rotary_is_that_of_torch(dtype: torch.dtype, of_angles: torch.dtype, rows: int, C: int) -> None:
    q, k = normal(B, T, H, D, dtype=dtype), normal(B, T, G, D, dtype=dtype)
    angle = normal(rows, T, C // 2).repeat(1, 1, 2)
    given = q, k, angle.cos().to(of_angles), angle.sin().to(of_angles)
    found = triton_rotary(*given)
    assert found is not None
    exact = of_torch(*(x.double() for x in given))
    for x, torchs, wanted in zip(found, of_torch(*given), exact):
        assert x.dtype == dtype
        assert (x - wanted).abs().max() <= 2 * (torchs - wanted).abs().max()


@pytest.mark.parametrize("dtype", [BF16, FP32])
@torch.no_grad()
def test_the_memory_logit_is_that_of_torch(dtype: torch.dtype) -> None:
    q, parameters = normal(B, T, H, D, dtype=dtype), (normal(H, D), normal(H), normal(H) + 1)
    normalizer = (8 * normal(B, T, H)).exp()
    normalizer[0, :5] = 1e-30  # an empty memory
    found = triton_memory_logit(q, normalizer, *parameters)
    assert found is not None
    wanted = MemoryLogit.apply(q, normalizer.log(), *parameters)  # type: ignore[no-untyped-call]
    assert bool((found[0, :5] == -1e4).all())
    wanted[0, :5] = -1e4
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)


def test_what_the_kernels_do_not_take_is_left_to_torch() -> None:
    q, k, angle, normalizer = normal(B, T, H, D), normal(B, T, G, D), normal(B, T, D), normal(B, T, H).exp()
    calls: list[Callable[[], object]] = [
        lambda: triton_rotary(q, k, angle, angle),
        lambda: triton_memory_logit(q, normalizer, q[0, 0], q[0, 0, :, 0], q[0, 0, :, 0]),
    ]
    assert [call() for call in calls] == [None, None]  # gradients may be asked for
    with torch.no_grad():
        assert all(call() is not None for call in calls)
        assert triton_rotary(q[:, :1], k[:, :1], angle[:, :1], angle[:, :1]) is None
        assert triton_rotary(q, k.bfloat16(), angle, angle) is None
        assert triton_rotary(q, k, angle[:, 1:], angle[:, 1:]) is None
        assert triton_rotary(q.double(), k.double(), angle, angle) is None
        assert triton_memory_logit(q, normalizer.double(), q[0, 0], q[0, 0, :, 0], q[0, 0, :, 0]) is None
        assert triton_memory_logit(q, normalizer, q[0, 0], q[0, 0, :, 0], q[0, 0, :1, 0]) is None


def test_only_with_gradients_an_op_goes_through_an_operator_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    operator, called = swa._forward, []
    monkeypatch.setattr(swa, "_forward", lambda *given: called.append(given) or operator(*given))
    q, k = normal(B, T, H, D), normal(B, T, G, D)
    with torch.no_grad():
        found = swa.triton_swa(q, k, k, window_size=4, scale=0.2)
    assert not called
    wanted = swa.triton_swa(q, k, k, window_size=4, scale=0.2)
    assert called
    assert found is not None
    assert wanted is not None
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32])
@pytest.mark.parametrize("size", [1, 24, 576, 1000])
@torch.no_grad()
def test_the_norm_is_that_of_llama(dtype: torch.dtype, size: int) -> None:
    norm = LlamaRMSNorm(size, 1e-5).to(DEVICE, dtype)
    norm.weight.copy_(1 + normal(size, dtype=dtype) / 4)
    x = 3 * normal(5, 7, size, dtype=dtype)
    x[0, 0] = 0
    found, wanted = triton_rms_norm(x, norm.weight, 1e-5), norm(x)
    assert found is not None
    exact = norm.weight.double() * F.rms_norm(x.double(), (size,), eps=1e-5)
    error = (wanted - exact).abs().max()
    assert (found - exact).abs().max() <= 2 * error
    assert dtype == FP32 or (found != wanted).float().mean() <= 0.02, "it rounds where Llama's does"
