"""mLSTM: a forget and an input gate per head, and a normalizer that never enlarges the read (2405.04517, eq. 19 to 27).

S_t = f_t S_{t-1} + i_t k_t^T [v_t, 1] / sqrt(D),   [n_t, m_t] = q_t S_t,   o_t = norm(n_t / max(|m_t|, 1))
f_t = sigmoid(pool(k_t) + b_f),   i_t = exp(c tanh((pool(k_t) + b_i) / c)),   c = 15

The paper's exponential input gate is unbounded, and a running maximum keeps it within float32. Here, the soft cap c of
xLSTM 7B (2503.13427) keeps i_t below e^15. Sums of any length stay finite, so no maximum is needed, and chunks give the
same result as single tokens. `output_gate` is the paper's, except for a factor of 2. `short_conv: 4` is its
convolution, here applied to values as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from liger_convert.mixers.base import HeadDims, MemoryOutput, MixerSpec
from liger_convert.mixers.gates import log_sigmoid_gate, log_soft_cap
from liger_convert.mixers.linear.base import GatedMixer, GatedSpec
from liger_convert.mixers.registry import register_mixer
from liger_convert.mixers.spec import ReadGateSpec


@dataclass(frozen=True)
class MLSTMSpec(GatedSpec):
    """Options of the two gates and the normalizer.

    gate_bias: where the learned bias b_f of the forget gate starts. A larger value makes the memory last longer; 7
        makes it last about 1,100 tokens.
    input_bias: where the learned bias b_i of the input gate starts. With a larger value, tokens are written with more
        weight.
    cap: c, the soft cap of the input gate's logits, above 0 and at most 15. The gate stays below e^c. A larger cap
        could exceed float32.
    normalize: whether the read is divided by max(|m|, 1). As m may be negative, `combine: shared` is not possible.
    """

    normalize: bool = True
    gate: Literal["head", "learned", "constant"] = "head"
    input_bias: float = 0.0
    cap: float = 15.0

    def problem(self) -> str | None:
        if self.combine == "shared":
            return "combine: shared needs a normalizer above 0, but mlstm's can have either sign; use combine: learned"
        if not 0 < self.cap <= 15:
            return f"cap: {self.cap} must be above 0, and no more than 15 to stay inside float32"
        return ReadGateSpec.problem(self)


@register_mixer("mlstm")
class MLSTM(GatedMixer):
    summary = "linear attention with a forget gate and an exponential input gate per head"
    gate_rule = "sigmoid(pool(k) + bias), per head"
    left_out = (
        "the skip connection of its block, an unbounded input gate; off by default: `gate_proj`, `short_conv` with "
        "`conv_activation: silu` (of values, too), `output_gate`"
    )
    Spec = MLSTMSpec
    spec: MLSTMSpec
    scalar = True
    rescales = True

    @classmethod
    def gate_sizes(cls, spec: MixerSpec, dims: HeadDims) -> dict[str, int]:
        return super().gate_sizes(spec, dims) | {"input": 1}

    def first_bias(self, name: str) -> float:
        return self.spec.input_bias if name == "input" else super().first_bias(name)

    def key_features(self, inputs: tuple[Tensor, ...]) -> Tensor:
        log_i = log_soft_cap(self.gate_logits(inputs, "input"), self.spec.cap)
        return super().key_features(inputs) * log_i.exp() / math.sqrt(self.dims.dim)

    def decay(self, logits: Tensor) -> Tensor:
        return log_sigmoid_gate(logits, 1.0)

    def read(self, o_BTHV: Tensor, normalizer_BTH: Tensor | None) -> MemoryOutput:
        if normalizer_BTH is not None:
            o_BTHV = o_BTHV / normalizer_BTH[..., None].abs().clamp_min(1)
        return MemoryOutput(self.rescale(o_BTHV), None)
