"""DeltaNet: the delta rule with unit keys (2406.06484).

S_t = S_{t-1} + b_t u_t^T (v_t - u_t S_{t-1}),   b_t = sigmoid(pool(k_t) + c),   o_t = q_t S_t

with u = k / |k| and q of length 1. The paper computes b with a new projection and applies SiLU before the norm. Here, b
is computed from pooled keys, and there is no SiLU. `short_conv: 4` is the paper's convolution, and `output_norm: rms`
its norm after the read.
"""

from __future__ import annotations

from liger_convert.mixers.delta.base import DeltaMixer
from liger_convert.mixers.registry import register_mixer


@register_mixer("deltanet")
class DeltaNet(DeltaMixer):
    summary = "delta rule: a new value replaces the old one under the same key"
    left_out = (
        "SiLU of queries, keys and values, the projection to the strength; off by default: `short_conv`, `output_norm`"
    )
