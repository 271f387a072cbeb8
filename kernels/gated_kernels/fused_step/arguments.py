"""The arguments of the fused decoding step of a linearized layer.

Shapes: B batch, N rows of the cache, P tokens of the ring (window - 1), S = P + 1, M sinks, H query heads, G key-value
heads, D head size, C rotated channels, E size of a code, F feature size. States are [N,G,F,D], so that rows allow
vectorized loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from torch import Tensor

MIN_NORMALIZER = 1e-30  # normalizers are clamped to it; a memory with less counts as empty
EMPTY = -60.0  # log normalizer up to which a memory is empty: above log(MIN_NORMALIZER), also for a sum of several


class StepInputs(NamedTuple):
    """The new token of every row: its projections before rotary embedding, and its position.

    cos_BC, sin_BC: [B or 1, C], rotate the first C channels, whose halves are paired; None: no rotary embedding.
    position_BS: the positions of the ring's tokens, oldest first, and of the new token; -1: padding.
    sink_visible_BM: whether each sink is visible (sinks that are still in the window are not).
    scale: factor of the window's logits.
    """

    q_BHD: Tensor
    k_BGD: Tensor
    v_BGD: Tensor
    cos_BC: Tensor | None
    sin_BC: Tensor | None
    position_BS: Tensor
    sink_visible_BM: Tensor | None
    scale: float


class StepCache(NamedTuple):
    """A layer's cache tensors, which a step updates in place, except `ring_position` and `row_B`.

    Batch row b has row `row_B[b]` of them, int64; None: row b, and N = B. Two batch rows may have the same row only if
    what becomes of it does not matter. Within a row, a tensor is contiguous. The rows may be pages of several fields:
    then the tensors of one dtype have the same stride between rows.

    k_NPGD, v_NPGD: the ring of the window's keys, after rotary embedding, and values.
    deferred_inputs_NPGD: the ring's keys before rotary embedding, for layers whose tokens are written to the state only
        when they leave the window.
    sink_k_NMGD, sink_v_NMGD: the keys, after rotary embedding, and values of the sinks.
    z_NGF: the decayed sum of key features, with which queries read the normalizer; None without normalization.
    ring_position: number of steps, one for all rows or [B] of each, not negative. Slot `ring_position` mod P of the
        ring is the oldest, and takes the new token.
    """

    k_NPGD: Tensor
    v_NPGD: Tensor
    deferred_inputs_NPGD: Tensor | None
    sink_k_NMGD: Tensor | None
    sink_v_NMGD: Tensor | None
    state_NGFD: Tensor
    z_NGF: Tensor | None
    ring_position: Tensor
    row_B: Tensor | None = None

    @property
    def strides(self) -> tuple[int | None, int | None]:
        """The strides between rows of the tensors in the keys' dtype, and of the states; None where contiguous."""
        of_heads, of_states = [x for x in self[:5] if x is not None], [x for x in self[5:7] if x is not None]
        return row_stride(of_heads), row_stride(of_states)


class Codes(NamedTuple):
    """A codebook's feature map softmax(u C / temperature), where u is P x + b normalized to length 1. Each head has its
    own P, b and temperature."""

    q_proj_HDE: Tensor
    q_bias_HE: Tensor
    q_log_inv_temperature_H: Tensor
    k_proj_GDE: Tensor
    k_bias_GE: Tensor
    k_log_inv_temperature_G: Tensor
    codes_GFE: Tensor


class Gate(NamedTuple):
    """sigmoid(x)^(1/normalizer), where x is the mean of the key plus a bias ("head"), a bias ("constant"), or the key
    itself ("keys")."""

    of: Literal["head", "constant", "keys"]
    bias_GF: Tensor | None
    normalizer: float


class MemoryWeight(NamedTuple):
    """The memory's weight is m^power exp(query q / sqrt(D) + log), where m is its normalizer. The window's weight is
    the sum of the exponentials of its logits.

    The memory has no weight where log m is at most EMPTY.
    """

    power_H: Tensor
    query_HD: Tensor
    log_H: Tensor


class StepConfig(NamedTuple):
    """A mixer's feature map (None: softmax), gate (None: 1) and memory weight (None: the memory is not normalized, and
    the output is the mean of window and memory)."""

    codes: Codes | None
    gate: Gate | None
    memory_weight: MemoryWeight | None


def row_stride(tensors: Sequence[Tensor]) -> int | None:
    """The stride between rows of these tensors; None where all are contiguous."""
    return None if all(x.is_contiguous() for x in tensors) else tensors[0].stride(0)
