"""A projection from the layer's input to the logits of a mixer's gates.

logits_t = pool(k_t) + W x_t + b                                                           (gate_proj)

x is the layer's input, W is learned. Most papers compute their gates from such a projection alone. Here it is added to
Liger's pooled key and starts at W = 0, so that a conversion starts without it.

Shapes: B batch, T tokens, C hidden size, G key-value heads, X logits of one gate, Y logits of all gates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

if TYPE_CHECKING:
    from liger_convert.mixers.base import HeadDims


class GateProjection(nn.Module):
    """W x for all gates of a layer, one weight [G,X,C] for each. sizes: X of each gate, by name."""

    def __init__(self, sizes: Mapping[str, int], dims: HeadDims):
        super().__init__()
        self.sizes = dict(sizes)
        for name, size in sizes.items():
            self.register_parameter(f"{name}_GXC", nn.Parameter(torch.empty(dims.kv_heads, size, dims.hidden)))

    def reset_parameters(self) -> None:
        for weight_GXC in self.parameters():
            init.zeros_(weight_GXC)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """[B,T,G,Y]: the projections to all gates, one after the other, in the dtype of the weights or of autocast."""
        weight_GYC = torch.cat([getattr(self, f"{name}_GXC") for name in self.sizes], 1)
        projected_BTY = F.linear(x_BTC.to(weight_GYC.dtype), weight_GYC.flatten(0, 1))
        return projected_BTY.view(*x_BTC.shape[:2], *weight_GYC.shape[:2])

    def of_gate(self, projected_BTGY: Tensor, name: str) -> Tensor:
        """[B,T,G,X]: the projection to one gate, in float32."""
        parts: list[Tensor] = list(projected_BTGY.split(list(self.sizes.values()), -1))
        return parts[list(self.sizes).index(name)].float()
