"""Gated linear attention with a normalized memory that shares the window's denominator: the default mixer.

S_t = diag(a_t) S_{t-1} + phi(k_t)^T [v_t, 1],   a_t = sigmoid(pool(k_t) + b)^(1/tau),   [n_t, m_t] = phi(q_t) S
o_t = (sum_window e^{s_tj} v_j + w_t n_t / m_t) / (sum_window e^{s_tj} + w_t)    (combine: shared, see base.py for w_t)

With a codebook, the state has one channel for each code f. The `pooled` gate is then a weighted mean of the key's
channels d: pool(k)_f = sum_d w_fd k_d, where w_fd = (P c_f)_d^2 / |P c_f|^2 says how much channel d counts in the code.
With equal weights this would be the gate `head`, the mean over all channels.

The recurrence is GLA's (2312.06635) and the pooled gate Liger's (2503.01496, table 1); the map is a codebook (see
feature_maps.py) or Hedgehog's (2402.04347); the shared denominator is LoLCATs' (2410.10254, eq. 6).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gated_kernels.codebook_gla.chunk import chunk_codebook_gla
from gated_kernels.common.registry import kernel_for
from gated_kernels.fused_step.arguments import Codes, Gate, MemoryWeight, StepConfig
from torch import Tensor

from liger_convert.mixers.base import QKV, Combine
from liger_convert.mixers.feature_maps import FeatureMapName
from liger_convert.mixers.gates import GateName, log_sigmoid_gate
from liger_convert.mixers.linear.base import GatedMixer, GatedSpec
from liger_convert.mixers.precision import factors
from liger_convert.mixers.registry import register_mixer


@dataclass(frozen=True)
class GLASpec(GatedSpec):
    """Options of the gate and the normalizer.

    gate: as in GatedSpec. With a codebook, `pooled` gives each code a gate of its own, and `learned` is not possible.
    gate_bias: where the gate's learned bias b starts.
    gate_normalizer: tau, which divides the log of the gate; flash-linear-attention calls it `gate_logit_normalizer`. A
        larger value makes the memory last longer, about tau e^b tokens: the defaults make that 6,500 tokens.
    normalize: as in LinearSpec, but with false the read is used as it is, without a norm.
    """

    combine: Combine = "shared"
    feature_map: FeatureMapName = "codebook"
    normalize: bool = True
    gate: GateName = "head"
    gate_bias: float = 6.0
    gate_normalizer: float = 16.0

    @property
    def pools_to_codes(self) -> bool:
        return True

    def problem(self) -> str | None:
        if self.gate == "learned" and self.feature_map == "codebook":
            return "gate: learned starts from channels of keys, which codes are not; use pooled, head or constant"
        if self.gate_normalizer <= 0:
            return f"gate_normalizer: {self.gate_normalizer} must be above 0"
        return super().problem()


@register_mixer("gla")
class GLA(GatedMixer):
    summary = "normalized gated linear attention over a codebook, with one softmax denominator for window and memory"
    gate_rule = "sigmoid(pool(k) + bias)^(1/tau)"
    left_out = (
        "GLA's output norm; off by default: `gate_proj` (of full rank instead of low rank), `output_gate` with "
        "`output_gate_activation: silu`"
    )
    Spec = GLASpec
    spec: GLASpec
    gate_bias_GF: Tensor
    rescales = False

    def query_features(self, qkv: QKV) -> Tensor:
        """With a codebook, the raw queries: `attend` maps queries and keys, so that no features need to be stored."""
        if self.codebook is None:
            return super().query_features(qkv)
        return qkv.q_rot_BTHD if self.spec.rope else qkv.q_BTHD

    def key_features(self, inputs: tuple[Tensor, ...]) -> Tensor:
        return super().key_features(inputs) if self.codebook is None else inputs[-1]

    def map_once(self, qkv: QKV, entries: tuple[Tensor, ...]) -> tuple[QKV, tuple[Tensor, ...]]:
        """The codebook's features, unless the kernels compute them on the fly."""
        q_BTHD, (k_BTGD, *others) = self.query_features(qkv), entries
        in_kernels = kernel_for("codebook_gla") is not None and q_BTHD.shape[1] > 1
        if self.codebook is None or self.features == self.dims.dim or in_kernels:
            return qkv, entries
        q_BTHF, k_BTGF = self.codebook(lambda codes: (codes.queries(q_BTHD), codes.keys(k_BTGD)))
        none = q_BTHF[:, :0], k_BTGF[:, :0]
        read = (*none, q_BTHF, none[1]) if self.spec.rope else (q_BTHF, none[1], *none)
        qkv = QKV(*read, qkv.v_BSGD[:, :0], qkv.position_BS, qkv.x_BTC)  # only the dtype of the values is used
        return qkv, (k_BTGF, *others)

    def attend(
        self, q_BTHF: Tensor, entries: tuple[Tensor, ...], **options: Any
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        if self.codebook is None or q_BTHF.shape[-1] != self.dims.dim:  # no codebook, or features from `map_once`
            return super().attend(q_BTHF, entries, **options)
        q_BTHD, (k_BTGD, v_BTGV, log_a, *written) = q_BTHF, entries
        q_BTHD, k_BTGD, v_BTGV = factors(q_BTHD, k_BTGD, v_BTGV)
        # a zero key has nonzero features: a masked token leaves the state alone because its value and log gate are 0
        options["write_mask_BTG"] = written[0][..., 0] if written else None
        found: tuple[Tensor, Tensor | None, Tensor]
        found = self.codebook(lambda _: chunk_codebook_gla(q_BTHD, k_BTGD, v_BTGV, log_a, *self.codes(), **options))
        return found

    def codes(self) -> Codes:
        book = self.codebook
        assert book is not None
        of_queries = book.q_turn_HDE, book.q_shift_HE, book.q_log_tau_H
        return Codes(*of_queries, book.k_turn_GDE, book.k_shift_GE, book.k_log_tau_G, book.codes_GFE)

    def step_config(self) -> StepConfig | None:
        spec = self.spec
        usual = (
            spec.combine == "shared"
            and spec.scope == "evicted"
            and not (spec.rope or spec.forget or spec.conv_taps or spec.output_gate or spec.gate_proj)
        )
        if self.codebook is None or not usual:
            return None
        codes = self.codes()
        weight = MemoryWeight(self.share_power_H, self.share_query_HD, self.log_share_H)
        match spec.gate:
            case "none":
                return StepConfig(codes, None, weight)
            case "head" | "constant":
                return StepConfig(codes, Gate(spec.gate, self.gate_bias_GF, spec.gate_normalizer), weight)
        return None

    def pooled_logits(self, k_BTGD: Tensor, name: str) -> Tensor:
        if self.codebook is None or self.spec.gate != "pooled":
            return super().pooled_logits(k_BTGD, name)
        pooled_BTGF: Tensor = self.codebook(lambda codes: codes.pooled_keys(k_BTGD))
        return pooled_BTGF

    def decay(self, logits: Tensor) -> Tensor:
        return log_sigmoid_gate(logits, self.spec.gate_normalizer)
