"""Linear attention: softmax weights are replaced by phi(q) phi(k), without decay (2006.16236, eq. 16 to 20).

S_t = S_{t-1} + phi(k_t)^T [v_t, 1],   o_t = phi(q_t) S,   divided by its last column   (normalize: true)

phi is elu + 1 as published, or any other map. The keys' features are divided by F, so that a token adds about 1 to the
normalizer instead of F; the read does not change, because the division cancels. Without the normalizer, the memory
grows with the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from liger_convert.mixers.base import Combine
from liger_convert.mixers.kernel_maps import MapName
from liger_convert.mixers.linear.base import LinearMixer, LinearSpec
from liger_convert.mixers.registry import register_mixer


@dataclass(frozen=True)
class LinearAttentionSpec(LinearSpec):
    """The defaults are the published values: the feature map elu + 1, and a normalizer."""

    combine: Combine = "shared"
    feature_map: MapName = "elu1"
    normalize: bool = True


@register_mixer("linear-attention")
class LinearAttention(LinearMixer):
    summary = "linear attention without decay"
    left_out = "nothing"
    Spec = LinearAttentionSpec
    initial_log_share = -8.0  # nothing decays: the normalizer counts every token ever written

    def key_features(self, inputs: tuple[Tensor, ...]) -> Tensor:
        return super().key_features(inputs) / self.features
