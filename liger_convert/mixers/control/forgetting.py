"""The attention of the Forgetting Transformer (2503.02130): softmax whose weights fade.

o_t = sum_s p_ts v_s,   p_t = softmax_s(q_t k_s scale + sum_{s < l <= t} log f_l),   f_t = sigmoid(x_t W + b)

For a layer that should stay softmax: it starts as the base's attention over all tokens, but for a gate of nearly 1
(a token 4,096 back keeps e^-0.02 of its weight), one per key-value head. Its cache grows as the base's does, unless
`window` bounds it. Every mixer can have the gate on its own window (`forget`).
"""

from __future__ import annotations

from dataclasses import dataclass

from liger_convert.mixers.control.window import Window, WindowSpec
from liger_convert.mixers.registry import register_mixer


@dataclass(frozen=True)
class ForgettingSpec(WindowSpec):
    """window: 0 for all tokens. Without sinks, which would never fade."""

    window: int = 0
    sinks: int = 0
    forget: bool = True

    def problem(self) -> str | None:
        if not self.forget:
            return "forget: is what this mixer is; use window for one that does not"
        return super().problem()


@register_mixer("forgetting")
class Forgetting(Window):
    summary = "softmax attention over all tokens, or a long window, fading by a learned gate; no memory"
    gate_rule = "sigmoid(x W + b)"
    left_out = (
        "of its Pro layer the norm of queries and keys, the shift of keys and values, the output norm and gate; "
        "the base's rotary stays, which the paper drops"
    )
    Spec = ForgettingSpec
