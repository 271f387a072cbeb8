"""Feature maps phi: what queries and keys become before they meet in the memory.

A map is made for a number of heads and a head size; positive maps give weights that can be normalised.
Shapes: N heads (query or key-value), D head size, F feature size.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from transformers import initialization as init

FeatureMapName = Literal["hedgehog", "softmax2", "softmax", "exp", "elu1", "relu", "identity"]

POSITIVE: tuple[FeatureMapName, ...] = ("hedgehog", "softmax2", "softmax", "exp", "elu1", "relu")


def feature_size(name: FeatureMapName, dim: int) -> int:
    """F for a head of size `dim`: the two-sided maps double it."""
    return 2 * dim if name in ("hedgehog", "softmax2", "exp") else dim


def two_sided_softmax(x: Tensor) -> Tensor:
    """[softmax(x), softmax(-x)]: positive, bounded and spiky on both sides of zero (Hedgehog, 2402.04347)."""
    return torch.cat((x.softmax(-1), (-x).softmax(-1)), -1)


class FeatureMap(nn.Module):
    """phi: [B,T,N,D] -> [B,T,N,F] in float32. `hedgehog` turns each head by a learned matrix first."""

    def __init__(self, name: FeatureMapName, heads: int, dim: int):
        super().__init__()
        self.name = name
        if name == "hedgehog":
            self.turn_NDD = nn.Parameter(torch.empty(heads, dim, dim))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.name == "hedgehog":
            heads, dim, _ = self.turn_NDD.shape
            eye = torch.eye(dim, dtype=self.turn_NDD.dtype, device=self.turn_NDD.device)
            init.copy_(self.turn_NDD, eye.expand(heads, dim, dim))

    def forward(self, x_BTND: Tensor) -> Tensor:
        x = x_BTND.float()
        match self.name:
            case "hedgehog":
                return two_sided_softmax(torch.einsum("btnd,nde->btne", x, self.turn_NDD.float()))
            case "softmax2":
                return two_sided_softmax(x)
            case "softmax":
                return x.softmax(-1)
            case "exp":
                # the clamp bounds one weight at e^30, so that sums over any length stay far inside float32
                return torch.cat((x.clamp(-15, 15).exp(), (-x).clamp(-15, 15).exp()), -1)
            case "elu1":
                return nn.functional.elu(x) + 1
            case "relu":
                return x.relu()
            case _:
                return x
