"""Forgetting attention (Forgetting Transformer, 2503.02130): softmax attention whose weights fade with distance.

o_t = sum_s p_ts v_s,   p_t = softmax_s(q_t k_s scale + sum_{s < l <= t} log f_l),   f_t = sigmoid(x_t W + b)

This is for a layer that should stay softmax. It starts as the base's attention over all tokens, except for a gate per
key-value head that is nearly 1: at a distance of 4,096 tokens, a weight is multiplied by e^-0.02. Its cache grows like
the base's, unless `window` limits it. Every other mixer can have this gate on its window (`forget`).

The paper's ablations have two other gates: `gate: learned`, where W stays 0, and `gate: fixed`, where b is not learned
either. The paper's Pro block is `kv_shift`, `qk_norm` (projection_pieces.py), `output_norm` and `output_gate`
(read_pieces.py). The paper does not use rotary, which is `rope: false` here. The norms and `rope: false` change the
attention even before training.

Shapes: G key-value heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from liger_convert.mixers.control.window import Window, WindowSpec
from liger_convert.mixers.registry import register_mixer

FARTHEST = 100_000_000  # tokens


@dataclass(frozen=True)
class ForgettingSpec(WindowSpec):
    """Options of the forget gate and of the pieces around attention.

    window: 0 for all tokens.
    sinks: 0 by default, because sinks outside the window never fade. They need a window other than 0.
    gate: what the forget gate is computed from: the layer's `input` at each token, or a `learned` bias per head alone.
        `fixed` keeps that bias as it starts.
    shortest, longest: the range of n, a number of tokens. A head's gate starts at e^(-1/n), so a weight falls to 1/e
        after n tokens. n is spaced geometrically, from `shortest` in the first head to `longest` in the last. If both
        are 0, every gate starts at nearly 1.
    kv_shift: whether keys and values are mixed with those of the previous token. The learned share starts at 0.
    qk_norm: whether queries and keys get an RMS norm per head, with a learned scale per channel.
    rope: whether queries and keys are rotated.
    output_norm, output_gate: a norm and a gate on the output of each head, as in ReadSpec.
    """

    window: int = 0
    sinks: int = 0
    forget: bool = True
    gate: Literal["input", "learned", "fixed"] = "input"
    shortest: int = 0
    longest: int = 0
    kv_shift: bool = False
    qk_norm: bool = False
    rope: bool = True
    output_norm: Literal["none", "rms"] = "none"
    output_gate: bool = False

    @property
    def shift(self) -> Literal["none", "key_value", "token"]:
        return "key_value" if self.kv_shift else "none"

    @property
    def normalizes_qk(self) -> bool:
        return self.qk_norm

    @property
    def rotates(self) -> bool:
        return self.rope

    @property
    def forget_gate(self) -> Literal["input", "learned", "fixed"]:
        return self.gate

    @property
    def read_pieces(self) -> tuple[bool, bool]:
        return self.output_norm == "rms", self.output_gate

    def problem(self) -> str | None:
        if not self.forget:
            return "forget: this mixer always forgets; use window for one that does not"
        if (self.shortest, self.longest) != (0, 0) and not 1 <= self.shortest <= self.longest <= FARTHEST:
            range_of = f"{self.shortest} to longest: {self.longest}"
            return f"shortest: {range_of} is not a range of tokens from 1 to {FARTHEST:,}; leave both at 0 for none"
        return super().problem()


@register_mixer("forgetting")
class Forgetting(Window):
    summary = "softmax attention over all tokens, or a long window, with a learned forget gate; no memory"
    gate_rule = "sigmoid(x W + bias)"
    left_out = (
        "a gate for every query head (here one per key-value head), the sigmoid of the shift (here a tanh); off by "
        "default: `kv_shift`, `qk_norm`, `output_norm`, `output_gate`, `rope: false`"
    )
    Spec = ForgettingSpec
    spec: ForgettingSpec

    def first_forget_bias(self, device: torch.device) -> Tensor:
        if not self.spec.longest:
            return super().first_forget_bias(device)
        ends = math.log(self.spec.shortest), math.log(self.spec.longest)
        rate_G = torch.linspace(*ends, self.dims.kv_heads, device=device).neg().exp()
        return -torch.expm1(rate_G).log()  # sigmoid(b) = e^-rate
