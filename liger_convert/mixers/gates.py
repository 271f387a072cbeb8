"""Gates: the factor a by which the memory decays at a token, as log a <= 0.

Shapes: B batch, T tokens, G key-value heads, D head size, F feature size.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

GateName = Literal["pooled", "head", "learned", "constant", "none"]


def pool_to(x_BTGD: Tensor, size: int) -> Tensor:
    """Keys pooled in float32 to `size` channels without new weights: averaged to fewer channels, or repeated to more.

    Raises ValueError if neither size divides the other.
    """
    dim = x_BTGD.shape[-1]
    if dim % size == 0:
        pooled: Tensor = x_BTGD.float().unflatten(-1, (size, dim // size)).mean(-1)
        return pooled
    if size % dim == 0:
        return torch.cat([x_BTGD.float()] * (size // dim), -1)
    raise ValueError(f"keys of size {dim} cannot be pooled to {size} channels")


def log_sigmoid_gate(logits: Tensor, normalizer: float) -> Tensor:
    """The log of sigmoid(logits)^(1/normalizer), in float32 (GLA, 2312.06635; Liger, 2503.01496)."""
    return F.logsigmoid(logits.float()) / normalizer


def log_soft_cap(logits: Tensor, cap: float) -> Tensor:
    """The log of an exponential gate whose logits are softly capped to [-cap, cap] (xLSTM 7B, 2503.13427)."""
    return cap * torch.tanh(logits / cap)
