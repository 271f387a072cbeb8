"""Gated slot attention (2409.07146): every slot has a gate of its own and writes as much as it forgets.

a_t = sigmoid(pool(k_t) + b)^(1/tau),   w_t = 1 - a_t                                  (base.py has the recurrence)

The gate is computed from pooled keys (Liger, 2503.01496, table 1), without a new projection. A slot is divided by its
normalizer z_t = 1 - prod a, which the paper does not have. z_t tends to 1, but without it, a slot with a slow decay
would be nearly zero for a long time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import initialization as init

from liger_convert.mixers.base import HeadDims
from liger_convert.mixers.gates import log_sigmoid_gate, pool_to
from liger_convert.mixers.registry import register_mixer
from liger_convert.mixers.slots.base import SlotMixer, SlotSpec
from liger_convert.utils.errors import BadInput


@dataclass(frozen=True)
class GSASpec(SlotSpec):
    """Options of the gates, one per slot.

    slots: as in SlotSpec; it has to divide the head size or be a multiple of it.
    gate_bias: where the learned bias b of the last slot starts. The biases of the slots are evenly spaced from 0 to
        this value. By default, the first slot keeps a token for about 20 tokens, and the last one for about 6,500.
    gate_normalizer: tau, which divides the log of every gate. A larger value makes all slots last longer.
    """

    gate_bias: float = 6.0
    gate_normalizer: float = 16.0

    def problem(self) -> str | None:
        if self.gate_normalizer <= 0:
            return f"gate_normalizer: {self.gate_normalizer} must be above 0"
        return super().problem()


@register_mixer("gsa")
class GSA(SlotMixer):
    summary = "gated slot attention: softmax over slots, each with a decay of its own"
    gate_rule = "sigmoid(pool(k) + bias)^(1/tau)"
    left_out = (
        "the projection from the layer's input to the gate, swish of queries, keys, values and the output, the output "
        "norm; a normalizer is added"
    )
    Spec = GSASpec
    spec: GSASpec

    def __init__(self, spec: GSASpec, dims: HeadDims):
        super().__init__(spec, dims)
        if dims.dim % spec.slots and spec.slots % dims.dim:
            raise BadInput(f"slots: keys of size {dims.dim} cannot be pooled to {spec.slots}; use {dims.dim}")
        self.gate_bias_GM = nn.Parameter(torch.empty(dims.kv_heads, spec.slots))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        # evenly spaced: with equal biases, slots pooled from the same channels would stay identical
        bias_M = torch.linspace(0, self.spec.gate_bias, self.spec.slots, device=self.gate_bias_GM.device)
        init.copy_(self.gate_bias_GM, bias_M.expand_as(self.gate_bias_GM))

    def weights(self, k_BTGD: Tensor) -> tuple[Tensor, Tensor]:
        logits = pool_to(k_BTGD, self.spec.slots) + self.gate_bias_GM.float()
        log_a_BTGM = log_sigmoid_gate(logits, self.spec.gate_normalizer)
        return -log_a_BTGM.expm1(), log_a_BTGM
