"""Optional steps after a memory is read, as in several papers: a norm per head, and a gate from the layer's input.

o'_t = size * o_t / rms(o_t)                 (output_norm: rms)
o'_t = 2 sigmoid(W x_t) * o_t                (output_gate)
o'_t = silu(W x_t) * o_t                     (output_gate_activation: silu)

A norm changes the read even before training, whatever its scale. The gate does not: it starts at W = 0, where
2 sigmoid(0) is 1. The papers have no factor 2. Kimi delta attention (2510.26692) uses the sigmoid alone. RetNet
(2307.08621) uses a SiLU, which no W makes 1 for every input; W starts at random then.

Shapes: B batch, T tokens, C hidden size, H query heads, V value size, E = H V.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

if TYPE_CHECKING:
    from liger_convert.mixers.base import HeadDims
    from liger_convert.mixers.spec import GateFunction

START_SIZE = 0.1  # initial scale of a read: 1 adds 2.5 nats to an untrained SmolLM2-135M, 0.1 adds none


def normed(o: Tensor, size: Tensor) -> Tensor:
    """The read, RMS-normalized over its last dimension, times `size`: [B,T,H,V] and [H,V], or [B,T,E] and [E]."""
    return F.rms_norm(o, o.shape[-1:], eps=1e-6) * size.float()


class ReadNorm(nn.Module):
    """An RMS norm of every head, with a learned scale [H,V] per channel."""

    def __init__(self, dims: HeadDims):
        super().__init__()
        self.size_HV = nn.Parameter(torch.empty(dims.heads, dims.dim))

    def reset_parameters(self) -> None:
        init.constant_(self.size_HV, START_SIZE)

    def forward(self, o_BTHV: Tensor) -> Tensor:
        """The normalized read in the dtype of `o_BTHV`, computed in float32."""
        return normed(o_BTHV.float(), self.size_HV).to(o_BTHV.dtype)


class ReadGate(nn.Module):
    """A gate per channel, computed from the layer's input."""

    def __init__(self, dims: HeadDims, function: GateFunction = "sigmoid"):
        super().__init__()
        self.function = function
        self.weight_EC = nn.Parameter(torch.empty(dims.heads * dims.dim, dims.hidden))

    def reset_parameters(self) -> None:
        if self.function == "sigmoid":
            init.zeros_(self.weight_EC)
        else:
            init.normal_(self.weight_EC, std=self.weight_EC.shape[1] ** -0.5)

    def forward(self, o_BTHV: Tensor, x_BTC: Tensor) -> Tensor:
        """The gated read in the dtype of `o_BTHV`, computed in float32."""
        logits_BTHV = F.linear(x_BTC.to(self.weight_EC.dtype), self.weight_EC).float().view(o_BTHV.shape)
        gate_BTHV = 2 * logits_BTHV.sigmoid() if self.function == "sigmoid" else F.silu(logits_BTHV)
        return (gate_BTHV * o_BTHV.float()).to(o_BTHV.dtype)
