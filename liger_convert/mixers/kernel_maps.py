"""Feature maps of kernels: phi(q) phi(k) equals or estimates a similarity that is never negative.

Shapes: B batch, T tokens, N heads (query or key-value), D head size, F feature size.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from liger_convert.mixers.feature_maps import POSITIVE, FeatureMap, FeatureMapName, feature_size

KernelName = Literal["parabola", "products", "arccos", "gaussian"]
MapName = Literal[FeatureMapName, KernelName]
WEIGHTS: tuple[MapName, ...] = (*POSITIVE, *get_args(KernelName))  # maps whose phi(q) phi(k) can be normalized
RANDOM: tuple[MapName, ...] = ("arccos", "gaussian")


def map_size(name: MapName, dim: int, codes: int = 0) -> int:
    """F for a head of size `dim`, or for a codebook with `codes` entries."""
    match name:
        case "parabola":
            return dim
        case "products":
            return dim * (dim + 1) // 2
        case "arccos" | "gaussian":
            return 2 * dim
        case _:
            return feature_size(name, dim, codes)


def make_map(name: MapName, heads: int, dim: int) -> FeatureMap | Parabola | RandomFeatures:
    """A module [B,T,N,D] -> [B,T,N,F] in float32, initialized by its `reset_parameters`."""
    match name:
        case "parabola" | "products":
            return Parabola(name, heads, dim)
        case "arccos" | "gaussian":
            return RandomFeatures(name, dim)
        case _:
            return FeatureMap(name, heads, dim)


class Parabola(nn.Module):
    """Of y = gamma norm(x) + beta: y^2 / sqrt(D) for `parabola`, all y_i y_j / D for `products` (ReBased).

    Pairs with i < j are counted once and weighted by sqrt(2), so that phi(q) phi(k) = (y_q y_k / D)^2.
    """

    def __init__(self, name: MapName, heads: int, dim: int):
        super().__init__()
        self.products = name == "products"
        self.gamma_ND, self.beta_ND = (nn.Parameter(torch.empty(heads, dim)) for _ in range(2))

    def reset_parameters(self) -> None:
        init.constant_(self.gamma_ND, 1.0)
        init.constant_(self.beta_ND, 0.0)

    def forward(self, x_BTND: Tensor) -> Tensor:
        dim = x_BTND.shape[-1]
        y = F.layer_norm(x_BTND.float(), (dim,)) * self.gamma_ND.float() + self.beta_ND.float()
        if not self.products:
            return y.square() / math.sqrt(dim)
        i, j = torch.triu_indices(dim, dim, device=y.device)
        return y[..., i] * y[..., j] * torch.where(i == j, 1.0, math.sqrt(2)) / dim


class RandomFeatures(nn.Module):
    """F = 2 D random directions w, which are trained; one set for all heads, queries and keys.

    x is normalized to length 1. `arccos`: relu(w x) sqrt(2 / F), the arc-cosine kernel of random feature attention.
    `gaussian`: exp(w x - 1) / sqrt(F), a nonnegative estimate of exp(-|q - k|^2 / 2) (2009.14794).
    """

    def __init__(self, name: MapName, dim: int):
        super().__init__()
        self.name = name
        self.directions_FD = nn.Parameter(torch.empty(map_size(name, dim), dim))

    def reset_parameters(self) -> None:
        init.normal_(self.directions_FD)

    def forward(self, x_BTND: Tensor) -> Tensor:
        wx = F.normalize(x_BTND.float(), dim=-1) @ self.directions_FD.float().mT
        if self.name == "arccos":
            return wx.relu() * math.sqrt(2 / wx.shape[-1])
        # |q|^2 = |k|^2 = 1; as in `exp`, the clamp keeps sums of any length within float32
        return (wx - 1).clamp(max=15).exp() / math.sqrt(wx.shape[-1])
