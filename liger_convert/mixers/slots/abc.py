"""Attention with bounded-memory control (2110.02488): each slot attends over all tokens written so far.

w_t = e^(k_t W),   a_t = 1,   so K_t / z_t = sum_j softmax_j(k_j W) k_j, and V alike     (base.py has the recurrence)

The softmax over tokens is stored as its numerators and their sum z. The logits are clamped to [-15, 15], so that sums
over any length stay within float32. Unlike with a running maximum, the zero weight of a masked token stays zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import initialization as init

from liger_convert.mixers.base import HeadDims
from liger_convert.mixers.registry import register_mixer
from liger_convert.mixers.slots.base import SlotMixer, SlotSpec


@dataclass(frozen=True)
class ABCSpec(SlotSpec):
    """The options of all slot mixers."""


@register_mixer("abc")
class ABC(SlotMixer):
    summary = (
        "attention with bounded-memory control: softmax over slots that never forget; learned weights choose their "
        "tokens"
    )
    gate_rule = "none"
    left_out = "the projection from the layer's input to the slots (the keys are projected instead)"
    Spec = ABCSpec
    spec: ABCSpec

    def __init__(self, spec: ABCSpec, dims: HeadDims):
        super().__init__(spec, dims)
        self.choice_GDM = nn.Parameter(torch.empty(dims.kv_heads, dims.dim, spec.slots))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        init.normal_(self.choice_GDM, std=self.dims.dim**-0.5)

    def weights(self, k_BTGD: Tensor) -> tuple[Tensor, Tensor]:
        logits_BTGM = torch.einsum("btgd,gdm->btgm", k_BTGD, self.choice_GDM.float()).float()
        return logits_BTGM.clamp(-15, 15).exp(), k_BTGD.new_zeros(*k_BTGD.shape[:-1], 1)
