"""GateLoop: linear attention with a gate per channel that the token chooses (2311.01927), real-valued.

S_t = diag(a_t) S_{t-1} + k_t^T v_t,   a_t = sigmoid(pool(k_t) + b),   o_t = norm(q_t S_t)

The paper's a_t is complex: sigmoid(.) e^{i theta_t}. Its phases turn queries and keys by angles summed over the tokens;
`rope: true` is that turn with constant angles, those of the base. Angles that the token chooses are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from liger_convert.mixers.gates import log_sigmoid_gate
from liger_convert.mixers.linear import GatedMixer, GatedSpec


@dataclass(frozen=True)
class GateLoopSpec(GatedSpec):
    """A bias of 7 keeps a memory for about a thousand tokens."""

    gate: Literal["pooled", "head", "learned", "constant"] = "pooled"


class GateLoop(GatedMixer):
    name = "gateloop"
    summary = "linear attention with a real gate per channel"
    gate_rule = "sigmoid(pool(k) + b)"
    Spec = GateLoopSpec

    def decay(self, logits: Tensor) -> Tensor:
        return log_sigmoid_gate(logits, 1.0)
