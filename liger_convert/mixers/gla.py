"""Gated linear attention with sinks, a normalised memory and a share that follows its mass: the toolkit's default.

S_t = diag(a_t) S_{t-1} + phi(k_t)^T [v_t, 1],   a_t = sigmoid(pool(k_t) + b)^(1/tau),   [n_t, m_t] = phi(q_t) S
o_t = (sum_window e^{s_tj} v_j + w_t n_t / m_t) / (sum_window e^{s_tj} + w_t)      (join: shared, see base.py for w_t)

The recurrence and pooled gate are GLA's and Liger's (2312.06635; 2503.01496, table 1), the map a codebook (see
feature_maps.py) or Hedgehog's (2402.04347); the one denominator over window and memory is LoLCATs' (2410.10254, eq. 6).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import initialization as init

from liger_convert.mixers.base import DiagonalMixer, HeadDims, Heads, MixerSpec
from liger_convert.mixers.feature_maps import POSITIVE, Codebook, FeatureMap, FeatureMapName, feature_size
from liger_convert.mixers.gates import GateName, log_sigmoid_gate, pool_to


@dataclass(frozen=True)
class GLASpec(MixerSpec):
    """gate: `pooled` keys per channel, one value a `head`, a learned `constant` per channel, or `none`.

    gate_bias: added to the gate's logits, learned from there; 6 keeps a memory for thousands of tokens at the start.
    gate_normalizer: tau. rope: whether the memory's queries and keys are rotated like the window's. codes: how many a
    codebook has, which is its feature size.
    """

    feature_map: FeatureMapName = "codebook"
    codes: int = 256
    normalize: bool = True
    rope: bool = False
    gate: GateName = "head"
    gate_bias: float = 6.0
    gate_normalizer: float = 16.0

    def problem(self) -> str | None:
        if self.normalize and self.feature_map not in POSITIVE:
            allowed = ", ".join(POSITIVE)
            return f"feature_map: {self.feature_map} gives negative weights, which normalize cannot use; use {allowed}"
        if self.join == "shared" and not self.normalize:
            return "join: shared needs the memory's mass, so normalize: true; or use join: learned"
        if self.codes < 1:
            return f"codes: {self.codes} is too few; a codebook has at least 1"
        if self.gate_normalizer <= 0:
            return f"gate_normalizer: {self.gate_normalizer} must be above 0"
        return super().problem()


class GLA(DiagonalMixer):
    name = "gla"
    summary = "normalised gated linear attention, one denominator with the window"
    gate_rule = "sigmoid(pool(k) + b)^(1/tau)"
    Spec = GLASpec
    spec: GLASpec

    def __init__(self, spec: GLASpec, dims: HeadDims):
        super().__init__(spec, dims)
        self.normalize = spec.normalize
        self.features = feature_size(spec.feature_map, dims.dim, spec.codes)
        if spec.feature_map == "codebook":
            self.codebook = Codebook(spec.codes, dims.heads, dims.kv_heads, dims.dim)
        else:
            self.q_map = FeatureMap(spec.feature_map, dims.heads, dims.dim)
            self.k_map = FeatureMap(spec.feature_map, dims.kv_heads, dims.dim)
        if spec.gate != "none":
            self.gate_bias_GF = nn.Parameter(torch.empty(dims.kv_heads, 1 if spec.gate == "head" else self.features))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.spec.feature_map == "codebook":
            self.codebook.reset_parameters()
        else:
            self.q_map.reset_parameters()
            self.k_map.reset_parameters()
        if self.spec.gate != "none":
            init.constant_(self.gate_bias_GF, self.spec.gate_bias)

    @classmethod
    def state_shape(cls, spec: MixerSpec, dims: HeadDims) -> dict[str, tuple[int, ...]]:
        assert isinstance(spec, GLASpec)
        return {
            "state": (dims.kv_heads, feature_size(spec.feature_map, dims.dim, spec.codes), dims.dim + spec.normalize)
        }

    @classmethod
    def pending_sizes(cls, spec: MixerSpec, dims: HeadDims) -> tuple[int, ...]:
        assert isinstance(spec, GLASpec)
        return (dims.dim, dims.dim) if spec.rope else (dims.dim,)

    def inputs(self, heads: Heads) -> tuple[Tensor, ...]:
        # the gate is pooled from keys before rotary, whose channels keep their meaning at every position
        return (heads.k_BTGD, heads.k_rot_BTGD) if self.spec.rope else (heads.k_BTGD,)

    def query_features(self, heads: Heads) -> Tensor:
        q_BTHD = heads.q_rot_BTHD if self.spec.rope else heads.q_BTHD
        return self.codebook.queries(q_BTHD) if self.spec.feature_map == "codebook" else self.q_map(q_BTHD)

    def key_features(self, inputs: tuple[Tensor, ...]) -> Tensor:
        return self.codebook.keys(inputs[-1]) if self.spec.feature_map == "codebook" else self.k_map(inputs[-1])

    def log_gate(self, inputs: tuple[Tensor, ...]) -> Tensor:
        k_BTGD = inputs[0].float()
        if self.spec.gate == "none":
            return k_BTGD.new_zeros(*k_BTGD.shape[:-1], 1)
        bias = self.gate_bias_GF.float()
        if self.spec.gate == "constant":
            logits = bias.expand(*k_BTGD.shape[:2], *bias.shape)
        else:
            logits = pool_to(k_BTGD, bias.shape[-1]) + bias
        return log_sigmoid_gate(logits, self.spec.gate_normalizer)
