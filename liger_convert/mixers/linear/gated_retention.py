"""Gated retention: RetNet with a data-dependent decay per head (2405.05254).

S_t = a_t S_{t-1} + k_t^T v_t,   a_t = sigmoid(pool(k_t) + b)^(1/tau),   o_t = norm(q_t S_t)

Rotary is the base's own. The gate is computed from pooled keys (2503.01496, table 1); `gate_proj` adds the paper's
projection. The paper's output gate is a swish; `output_gate` is by default a sigmoid instead, which can start at 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from liger_convert.mixers.gates import log_sigmoid_gate
from liger_convert.mixers.linear.base import GatedMixer, GatedSpec
from liger_convert.mixers.registry import register_mixer


@dataclass(frozen=True)
class GatedRetentionSpec(GatedSpec):
    """Options of the gate, which has one value per key-value head.

    gate_bias: where the gate's learned bias b starts.
    gate_normalizer: tau, which divides the log of the gate. A larger value makes the memory last longer, about tau e^b
        tokens: the defaults make that 6,500 tokens.
    """

    rope: bool = True
    gate: Literal["head", "learned", "constant"] = "head"
    gate_bias: float = 6.0
    gate_normalizer: float = 16.0

    def problem(self) -> str | None:
        if self.gate_normalizer <= 0:
            return f"gate_normalizer: {self.gate_normalizer} must be above 0"
        return super().problem()


@register_mixer("gated-retention")
class GatedRetention(GatedMixer):
    summary = "retention with a token-dependent decay per head"
    gate_rule = "sigmoid(pool(k) + bias)^(1/tau), per head"
    left_out = "nothing; off by default: `gate_proj`, `output_gate` with `output_gate_activation: silu`"
    Spec = GatedRetentionSpec
    spec: GatedRetentionSpec
    scalar = True

    def decay(self, logits: Tensor) -> Tensor:
        return log_sigmoid_gate(logits, self.spec.gate_normalizer)
