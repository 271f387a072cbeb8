"""RetNet's retention: Lightning's recurrence with rotary and with other decay rates (2307.08621, eq. 5 to 8).

S_t = a_g S_{t-1} + k_t^T v_t,   a_g = 1 - 2^{-5-g} of head g = 0 to G - 1,   o_t = norm(q_t S_t)

Rotary is the base's own instead of xPos, and the heads are the key-value heads. The paper's output gate is a swish;
`output_gate` is by default a sigmoid instead, which can start at 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from liger_convert.mixers.linear.lightning import Lightning, LightningSpec
from liger_convert.mixers.registry import register_mixer


@dataclass(frozen=True)
class RetNetSpec(LightningSpec):
    """The defaults are the published values: retention uses rotated queries and keys."""

    rope: bool = True


@register_mixer("retnet")
class RetNet(Lightning):
    summary = "retention: linear attention with rotary and a constant decay per head"
    gate_rule = "(1 - 2^(-5 - g))^slope, constant"
    left_out = (
        "xPos (the base's rotary is used instead); off by default: `output_gate` with `output_gate_activation: silu`"
    )
    Spec = RetNetSpec

    @staticmethod
    def rates(heads: int, device: torch.device | None = None) -> Tensor:
        return -torch.log1p(-torch.exp2(-5.0 - torch.arange(heads, dtype=torch.float64, device=device)))
