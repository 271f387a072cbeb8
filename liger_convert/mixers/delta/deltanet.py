"""DeltaNet: the delta rule with unit keys (2406.06484).

S_t = S_{t-1} + b_t u_t^T (v_t - u_t S_{t-1}),   b_t = sigmoid(pool(k_t) + c),   o_t = q_t S_t

with u = k / |k| and q of length 1. b is computed from pooled keys; `gate_proj` adds the paper's projection.
`short_conv: 4` with `conv_activation: silu` is its convolution, and `output_norm: rms` its norm after the read.
"""

from __future__ import annotations

from liger_convert.mixers.delta.base import DeltaMixer
from liger_convert.mixers.registry import register_mixer


@register_mixer("deltanet")
class DeltaNet(DeltaMixer):
    summary = "delta rule: a new value replaces the old one under the same key"
    left_out = "nothing; off by default: `gate_proj`, `short_conv` with `conv_activation: silu`, `output_norm`"
