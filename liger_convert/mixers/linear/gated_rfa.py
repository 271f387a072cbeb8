"""Gated random feature attention: a gate per head weighs the old state against the new token (2103.02143).

S_t = g_t S_{t-1} + (1 - g_t) phi(k_t)^T [v_t, 1],   g_t = sigmoid(pool(k_t) + b),   o_t = phi(q_t) S / its last column

phi is a random feature map of unit queries and keys, for the paper's arc-cosine or Gaussian kernel. The paper estimates
the Gaussian kernel with sines and cosines, which can give negative weights. Here, exponentials are used, which cannot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from liger_convert.mixers.base import Combine
from liger_convert.mixers.gates import log_sigmoid_gate
from liger_convert.mixers.kernel_maps import MapName
from liger_convert.mixers.linear.base import GatedMixer, GatedSpec
from liger_convert.mixers.registry import register_mixer


@dataclass(frozen=True)
class GatedRFASpec(GatedSpec):
    """Options of the random features and the gate.

    feature_map: `arccos` and `gaussian` are the published random features; any other map that gives nonnegative weights
        is possible, too.
    gate_bias: where the gate's learned bias b starts. A larger value makes the memory last longer; 7 makes it last
        about 1,100 tokens.
    """

    combine: Combine = "shared"
    feature_map: MapName = "arccos"
    normalize: bool = True
    gate: Literal["head", "learned", "constant"] = "head"


@register_mixer("gated-rfa")
class GatedRFA(GatedMixer):
    summary = "linear attention over random features; a gate per head weighs the old state against the new token"
    gate_rule = "sigmoid(pool(k) + bias), per head"
    left_out = "the sines and cosines that estimate the Gaussian kernel; off by default: `gate_proj`"
    Spec = GatedRFASpec
    scalar = True

    def key_features(self, inputs: tuple[Tensor, ...]) -> Tensor:
        return super().key_features(inputs) * (-self.gate_logits(inputs)).sigmoid()

    def decay(self, logits: Tensor) -> Tensor:
        return log_sigmoid_gate(logits, 1.0)
