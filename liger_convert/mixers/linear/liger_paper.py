"""The Liger layer exactly as published, as a baseline (arXiv 2503.01496, eq. 6 to 9, and its released code).

S_t = diag(a_t) S_{t-1} + softmax(k_t)^T v_t,   a_t = sigmoid(k_t)^(1/16)   (the released "pooling" is the identity)
o_t = 0.5 softmax(q_t) S_t + 0.5 window_64(q, k, v)_t

The memory is neither normalized nor scaled, so it grows with the sequence. There are no new parameters. The options are
the ablations of the paper's table 6: gates with new random weights, a learned feature map, and no window
(`combine: memory`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from gated_kernels.fused_step.arguments import Gate, StepConfig
from torch import Tensor, nn
from transformers import initialization as init

from liger_convert.mixers.base import QKV, Combine, HeadDims, MixerSpec, Scope
from liger_convert.mixers.feature_maps import FeatureMap, feature_size
from liger_convert.mixers.gates import log_sigmoid_gate
from liger_convert.mixers.linear.diagonal import DiagonalMixer
from liger_convert.mixers.precision import multiplies_in_bf16
from liger_convert.mixers.registry import register_mixer


@dataclass(frozen=True)
class LigerPaperSpec(MixerSpec):
    """The defaults are the published values. Each can be changed to see its effect.

    window: 64 as published; the paper also tries sizes from 16 to 256.
    gate: what the gate's logits are: the `keys` themselves, or a new projection of the layer's input with `random`
        initial weights.
    feature_map: `softmax` as published, or the learned `hedgehog`.
    """

    window: int = 64
    sinks: int = 0
    scope: Scope = "all"
    combine: Combine = "fixed"
    gate: Literal["keys", "random"] = "keys"
    feature_map: Literal["softmax", "hedgehog"] = "softmax"

    def problem(self) -> str | None:
        if self.combine == "shared":
            return "combine: shared needs a normalized memory, which liger-paper does not have; use gla"
        return super().problem()


@register_mixer("liger-paper")
class LigerPaper(DiagonalMixer):
    summary = "Liger-GLA as published: an unnormalized memory of all tokens, averaged with the window"
    gate_rule = "sigmoid(k)^(1/16)"
    left_out = "nothing of Liger's layer; of GLA's, everything but the recurrence"
    Spec = LigerPaperSpec
    spec: LigerPaperSpec
    normalize = False

    def __init__(self, spec: LigerPaperSpec, dims: HeadDims):
        super().__init__(spec, dims)
        self.features = feature_size(spec.feature_map, dims.dim)
        self.q_map = FeatureMap(spec.feature_map, dims.heads, dims.dim)
        self.k_map = FeatureMap(spec.feature_map, dims.kv_heads, dims.dim)
        if spec.gate == "random":
            self.gate_proj = nn.Linear(dims.hidden, dims.kv_heads * dims.dim, bias=False)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.q_map.reset_parameters()
        self.k_map.reset_parameters()
        if self.spec.gate == "random":
            init.normal_(self.gate_proj.weight, std=0.02)

    @classmethod
    def state_shape(cls, spec: MixerSpec, dims: HeadDims) -> dict[str, tuple[int, ...]]:
        assert isinstance(spec, LigerPaperSpec)
        return {"state": (dims.kv_heads, feature_size(spec.feature_map, dims.dim), dims.dim)}

    @classmethod
    def deferred_input_sizes(cls, spec: MixerSpec, dims: HeadDims) -> tuple[int, ...]:
        assert isinstance(spec, LigerPaperSpec)
        return (dims.dim,) if spec.gate == "keys" else (dims.dim, dims.dim)

    def deferred_inputs(self, qkv: QKV) -> tuple[Tensor, ...]:
        if self.spec.gate == "keys":
            return (qkv.k_BTGD,)
        logits_BTGD = self.gate_proj(qkv.x_BTC.to(self.gate_proj.weight.dtype)).unflatten(-1, (-1, self.dims.dim))
        return qkv.k_BTGD, logits_BTGD.to(qkv.k_BTGD.dtype)

    def query_features(self, qkv: QKV) -> Tensor:
        """The raw queries if the map is the softmax: `attend` computes it from them and their log-sum-exp."""
        return qkv.q_BTHD if self.spec.feature_map == "softmax" else self.q_map(qkv.q_BTHD)

    def key_features(self, inputs: tuple[Tensor, ...]) -> Tensor:
        phi_BTGF: Tensor = self.k_map(inputs[0])
        return phi_BTGF

    def attend(
        self, q_BTHF: Tensor, entries: tuple[Tensor, ...], **options: Any
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        if self.spec.feature_map == "softmax":
            v_BTGV = entries[1]
            if multiplies_in_bf16(v_BTGV):
                q_BTHF = q_BTHF.to(v_BTGV.dtype)  # the log-sum-exp must be of the rounded queries
            options["q_lse_BTH"] = q_BTHF.float().logsumexp(-1)
        return super().attend(q_BTHF, entries, **options)

    def step_config(self) -> StepConfig | None:
        published = LigerPaperSpec(window=self.spec.window, sinks=self.spec.sinks)
        return StepConfig(None, Gate("keys", None, 16.0), None) if self.spec == published else None

    def log_gate(self, inputs: tuple[Tensor, ...]) -> Tensor:
        gate = log_sigmoid_gate(inputs[-1], 16.0)
        return gate.repeat(1, 1, 1, self.features // self.dims.dim)
