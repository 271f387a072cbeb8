"""The attention of the Forgetting Transformer (2503.02130): softmax over a long window whose weights fade.

o_t = sum_s p_ts v_s,   p_t = softmax_s(q_t k_s scale + sum_{s < l <= t} log f_l),   f_t = sigmoid(x_t W + b)

For a layer that should stay softmax: a window as long as the context is that attention whole, a shorter one bounds its
cache. f is one gate a key-value head, and starts at nearly 1. Every mixer can have it on its own window (`forget`).
"""

from __future__ import annotations

from dataclasses import dataclass

from liger_convert.mixers.window import Window, WindowSpec


@dataclass(frozen=True)
class ForgettingSpec(WindowSpec):
    """Without sinks, which would never fade."""

    window: int = 4096
    sinks: int = 0
    forget: bool = True

    def problem(self) -> str | None:
        if not self.forget:
            return "forget: is what this mixer is; use window for one that does not"
        return super().problem()


class Forgetting(Window):
    name = "forgetting"
    summary = "softmax attention over a long window, fading by a learned gate; no memory"
    gate_rule = "sigmoid(x W + b)"
    Spec = ForgettingSpec
