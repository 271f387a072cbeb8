"""What tests need that compare a mixer with transformers' own layer of another architecture.

Shapes: B batch, T tokens, C hidden size, H heads, D head size.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from liger_convert.mixers.base import HeadDims, Mixer
from liger_convert.model.sequence import SequenceMetadata

B, T, H, D = 2, 37, 4, 8
C = H * D
DIMS = HeadDims(hidden=C, heads=H, kv_heads=H, dim=D)


def metadata() -> SequenceMetadata:
    return SequenceMetadata.build(torch.empty(B, T), torch.arange(T).expand(B, T), None)


def layer_inputs() -> Tensor:
    """[B,T,C]"""
    return torch.randn(B, T, C, generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def with_random_weights(layer: nn.Module) -> None:
    """The layer's output is then the concatenation of its heads."""
    for name, parameter in layer.named_parameters():
        if name == "out_proj.weight":
            parameter.copy_(torch.eye(C))
        else:
            parameter.copy_(0.5 * torch.randn_like(parameter) + (name == "norm.weight"))


def difference(found: Tensor, expected: Tensor) -> float:
    """Relative to `expected`, [B,T,C]."""
    return float((found.flatten(2) - expected).norm() / expected.norm())


def zero_before_reading(piece: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixers read their memory with zeros in place of every parameter whose name ends with `piece`."""
    remember = Mixer.remember

    def without(mixer: Mixer, *inputs: Any) -> Any:
        for name, parameter in mixer.named_parameters():
            if name.endswith(piece):
                parameter.zero_()
        return remember(mixer, *inputs)

    monkeypatch.setattr(Mixer, "remember", without)
