"""Norms run in a kernel only if it gives what their module gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gated_kernels.common import registry
from tiny_models import build
from torch import Tensor, nn

from liger_convert.model.families import FAMILIES
from liger_convert.model.fused_modules import with_forwards
from liger_convert.model.fused_norms import fused_norms

LIKE_LLAMA = {"llama", "mistral", "qwen2", "qwen3", "phi3"}
OTHERWISE = {"gemma", "gemma2", "gemma3_text", "olmo2", "olmo3", "starcoder2", "stablelm"}


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A stand-in for the kernel, which adds up in another order. Returns the sizes that it was called with."""
    calls: list[int] = []

    def norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        calls.append(x.shape[-1])
        square = x.flip(-1).double().square().mean(-1, keepdim=True).float()
        return weight_D * (x.float() * torch.rsqrt(square + eps)).to(x.dtype)

    monkeypatch.setitem(registry._KERNELS, "rms_norm", (norm,))
    monkeypatch.setitem(registry._ASKED, "rms_norm", norm)
    return calls


def with_weights(family: str, dtype: torch.dtype) -> Any:
    model = build(family, type="gla").to(dtype)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = 1 + torch.randn_like(parameter) / 4
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_norms_that_multiply_or_round_otherwise_stay(family: str, dtype: torch.dtype, kernel: list[int]) -> None:
    model = with_weights(family, dtype)
    norms = fused_norms([model])
    if family in LIKE_LLAMA:
        assert {*model.model.layers[0].modules()} & {*norms}
        assert model.model.norm in norms
    if family in OTHERWISE and not (family.startswith("olmo") and dtype == torch.float32):
        assert not norms
    for norm in norms:
        x = torch.randn(3, norm.weight.shape[-1]).to(dtype)  # type: ignore[index]
        wanted, before = norm(x), len(kernel)
        with with_forwards(norms):
            found = norm(x)
        assert len(kernel) == before + 1
        torch.testing.assert_close(found, wanted, rtol=8 * torch.finfo(dtype).eps, atol=0)
        assert "forward" not in vars(norm)


def test_without_a_kernel_no_norm_is_replaced() -> None:
    assert not fused_norms([build("llama", type="gla")])


def test_a_kernel_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch, kernel: list[int]) -> None:
    def wrong(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        return weight_D * x

    monkeypatch.setitem(registry._ASKED, "rms_norm", wrong)
    assert not fused_norms([with_weights("llama", torch.float32)])


def test_a_norm_that_was_replaced_stays(kernel: list[int]) -> None:
    model = with_weights("llama", torch.float32)
    model.model.norm.forward = lambda x: x
    assert model.model.norm not in fused_norms([model])
    assert isinstance(model.model.norm, nn.Module)
