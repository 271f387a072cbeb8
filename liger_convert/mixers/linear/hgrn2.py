"""HGRN2: each channel writes as much as it forgets (k = 1 - a), so the state is a running mean (2404.07904).

S_t = diag(a_t) S_{t-1} + (1 - a_t)^T v_t,   a_t = gamma + (1 - gamma) sigmoid(pool(k_t) + b)
o_t = norm(phi(q_t) S_t)

phi(q) takes the place of the paper's output gate. The paper's lower bounds gamma are learned and rise from layer to
layer; here gamma is an option, which a recipe can set per layer. With `normalize` the read is a weighted mean of
values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from liger_convert.mixers.base import HeadDims
from liger_convert.mixers.kernel_maps import MapName
from liger_convert.mixers.linear.base import GatedMixer, GatedSpec
from liger_convert.mixers.registry import register_mixer


@dataclass(frozen=True)
class HGRN2Spec(GatedSpec):
    """Options of the gate, which also makes the keys.

    feature_map: the map of the queries. Keys are 1 - a and need none.
    gate_bias: where the gate's learned bias b starts. A larger value makes the memory last longer.
    lower_bound: gamma, the smallest possible gate, from 0 to below 1. A larger value makes the memory last longer; the
        defaults make it last about 4,000 tokens.
    rope: has to be false, because the keys are made from the gates.
    """

    feature_map: MapName = "softmax"
    gate: Literal["pooled", "learned"] = "pooled"
    gate_bias: float = 6.0
    lower_bound: float = 0.9

    def problem(self) -> str | None:
        if not 0 <= self.lower_bound < 1:
            return f"lower_bound: {self.lower_bound} is out of range; use 0 or more, and less than 1"
        if self.rope:
            return "rope: the keys of hgrn2 are its gates, which cannot be rotated; use false"
        if self.gate_proj:
            return "gate_proj: the gates of hgrn2 are its keys, which the base projects from the input; use false"
        return super().problem()


@register_mixer("hgrn2")
class HGRN2(GatedMixer):
    summary = "a running mean per key channel: each channel writes as much as it forgets"
    gate_rule = "gamma + (1 - gamma) sigmoid(pool(k) + bias)"
    left_out = (
        "lower bounds that are learned and rise from layer to layer, the projection from the layer's input to the gate "
        "(the base's projection of keys takes its place), swish of queries"
    )
    Spec = HGRN2Spec
    spec: HGRN2Spec

    def __init__(self, spec: HGRN2Spec, dims: HeadDims):
        super().__init__(spec, dims)
        self.k_map = None

    def gate_logits(self, inputs: tuple[Tensor, ...], name: str = "gate") -> Tensor:
        return super().gate_logits(inputs[-1:], name)  # the gate makes the key, so it is convolved as keys are

    def key_features(self, inputs: tuple[Tensor, ...]) -> Tensor:
        return self.forgotten(self.gate_logits(inputs))

    def decay(self, logits: Tensor) -> Tensor:
        # with gamma = 0 a gate can close completely, and its log would be -inf
        return torch.log1p(-self.forgotten(logits).clamp(max=1 - 1e-6))

    def forgotten(self, logits: Tensor) -> Tensor:
        """1 - a, precise even if a is nearly 1."""
        return (1 - self.spec.lower_bound) * (-logits).sigmoid()
