"""ReBased: linear attention whose feature map is a learned parabola of normalized queries and keys (2402.10644).

S_t = S_{t-1} + phi(k_t)^T [v_t, 1],   phi(x) = (gamma norm(x) + beta)^2,   o_t = phi(q_t) S, divided by its last column

`feature_map: parabola` squares each channel, so F = D. `products` takes the products of all pairs of channels, so
F = D (D + 1) / 2, and the kernel is (q k)^2. The released code does this after a projection to 16 channels. Without
that projection, the state is much larger.
"""

from __future__ import annotations

from dataclasses import dataclass

from liger_convert.mixers.base import Combine
from liger_convert.mixers.kernel_maps import MapName
from liger_convert.mixers.linear.base import LinearMixer, LinearSpec
from liger_convert.mixers.registry import register_mixer


@dataclass(frozen=True)
class RebasedSpec(LinearSpec):
    """The defaults are the published values: a learned parabola, and a normalizer."""

    combine: Combine = "shared"
    feature_map: MapName = "parabola"
    normalize: bool = True


@register_mixer("rebased")
class Rebased(LinearMixer):
    summary = "linear attention with a learned parabola as feature map"
    left_out = (
        "the projection of queries and keys to 16 channels; off by default: `short_conv`, `feature_map: products`"
    )
    Spec = RebasedSpec
    initial_log_share = -8.0  # nothing decays: the normalizer counts every token ever written
