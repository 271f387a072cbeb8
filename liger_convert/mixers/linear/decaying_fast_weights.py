"""Decaying fast weights: the rows and the columns of the state each have a decay (2210.04243).

S_t = diag(a_t) S_{t-1} diag(b_t) + k_t^T v_t,   a_t, b_t = sigmoid(pool(k_t) + bias),   o_t = norm(q_t S_t)

Columns with the same b form a head of the diagonal recurrence, whose gate is a b. The paper has one b per value
channel. Here, the value channels are divided into `value_gates` groups with one b each. Every group is computed as a
head of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from liger_convert.mixers.base import HeadDims, MixerSpec
from liger_convert.mixers.gates import log_sigmoid_gate
from liger_convert.mixers.kernel_maps import map_size
from liger_convert.mixers.linear.base import GatedMixer, GatedSpec
from liger_convert.mixers.registry import register_mixer


@dataclass(frozen=True)
class DecayingFastWeightsSpec(GatedSpec):
    """Options of the two decays.

    value_gates: into how many groups a head's value channels are divided: 1, 2, 4 or 8, which must divide the head
        size. Each group has its own decay b.
    gate_bias: where the biases of both decays start. An entry of the state decays by a b, so with 7 it lasts about 550
        tokens.
    normalize: has to be false. The paper has no normalizer, and each group of value channels would need its own.
    """

    gate: Literal["pooled", "head", "learned", "constant"] = "pooled"
    value_gates: int = 4

    def problem(self) -> str | None:
        if self.normalize:
            return "normalize: true is not possible here, where each channel of values is forgotten on its own; use gla"
        if self.value_gates not in (1, 2, 4, 8):
            return f"value_gates: {self.value_gates} is not 1, 2, 4 or 8"
        return super().problem()


@register_mixer("decaying-fast-weights")
class DecayingFastWeights(GatedMixer):
    summary = "linear attention with two decays, one for key channels and one for value channels"
    gate_rule = "sigmoid(pool(k) + bias), for keys and for values"
    left_out = "a decay for every value channel (here groups of channels share one); off by default: `gate_proj`"
    Spec = DecayingFastWeightsSpec
    spec: DecayingFastWeightsSpec

    @classmethod
    def gate_sizes(cls, spec: MixerSpec, dims: HeadDims) -> dict[str, int]:
        assert isinstance(spec, DecayingFastWeightsSpec)
        return super().gate_sizes(spec, dims) | {"value": spec.value_gates}

    @classmethod
    def state_shape(cls, spec: MixerSpec, dims: HeadDims) -> dict[str, tuple[int, ...]]:
        assert isinstance(spec, DecayingFastWeightsSpec)
        groups = spec.value_gates
        return {"state": (dims.kv_heads * groups, map_size(spec.feature_map, dims.dim, spec.codes), dims.dim // groups)}

    def write(self, inputs: tuple[Tensor, ...], v_BTGV: Tensor) -> tuple[Tensor, ...]:
        return *super().write(inputs, v_BTGV), self.decay(self.gate_logits(inputs, "value"))

    def decay(self, logits: Tensor) -> Tensor:
        return log_sigmoid_gate(logits, 1.0)

    def attend(
        self, q_BTHF: Tensor, entries: tuple[Tensor, ...], **options: Any
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        k_BTGF, v_BTGV, log_a, log_b_BTGN = entries
        groups, kv_heads = self.spec.value_gates, self.dims.kv_heads
        each = (k_BTGF.repeat_interleave(groups, 2), v_BTGV.unflatten(-1, (groups, -1)).flatten(2, 3))
        gate = (log_a[:, :, :, None] + log_b_BTGN[..., None]).flatten(2, 3)
        q = q_BTHF.unflatten(2, (kv_heads, 1, -1)).expand(-1, -1, -1, groups, -1, -1).flatten(2, 4)
        o, _, state = super().attend(q, (*each, gate), **options)
        # [B,T,G,N,R,V/N] -> [B,T,H,V]
        return o.unflatten(2, (kv_heads, groups, -1)).transpose(3, 4).flatten(4).flatten(2, 3), None, state
