"""The fused decoding step of a linearized layer: its arguments, and for which layers it is supported.

Only Triton implements it. Where it is not supported, a layer runs its step op by op.

Shapes: B batch, P tokens of the ring (window - 1), S = P + 1, M sinks, H query heads, G key-value heads, D head size,
C rotated channels, E size of a code, F feature size. States are [B,G,F,D], so that rows allow vectorized loads.
"""

from __future__ import annotations

import os
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gated_kernels.common.registry import kernel_for

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
    """A layer's cache tensors, which a step updates in place, except `ring_position`.

    k_BPGD, v_BPGD: the ring of the window's keys, after rotary embedding, and values.
    deferred_inputs_BPGD: the ring's keys before rotary embedding, for layers whose tokens are written to the state only
        when they leave the window.
    z_BGF: the decayed sum of key features, with which queries read the normalizer; None without normalization.
    ring_position: number of steps. Slot `ring_position` mod P of the ring is the oldest, and takes the new token.
    """

    k_BPGD: Tensor
    v_BPGD: Tensor
    deferred_inputs_BPGD: Tensor | None
    sink_k_BMGD: Tensor | None
    sink_v_BMGD: Tensor | None
    state_BGFD: Tensor
    z_BGF: Tensor | None
    ring_position: Tensor


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


def is_supported(cache: StepCache, config: StepConfig, heads: int) -> bool:
    """Whether there is a fused step for a layer with this cache and configuration. `heads`: number of query heads."""
    state, (_, P, G, D) = cache.state_BGFD, cache.k_BPGD.shape
    if kernel_for("fused_step") is None or not (state.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        return False
    normalised, summed = config.memory_weight is not None, cache.z_BGF is not None
    evicted = cache.deferred_inputs_BPGD is not None
    if P == 0 or D > 256 or heads > 64 * G or not normalised == evicted == summed or state.shape[3] != D:
        return False
    bias = None if config.gate is None else config.gate.bias_GF
    wide = [*(config.codes or ()), *(config.memory_weight or ()), state, cache.z_BGF, bias]
    given = [x for x in (*cache, *wide) if x is not None]
    dtype = cache.k_BPGD.dtype
    return (
        dtype in (torch.float32, torch.bfloat16, torch.float16)
        and all(x is None or x.dtype == dtype for x in cache[:5])
        and all(x is None or x.dtype == torch.float32 for x in wide)
        and all(x.is_contiguous() and x.device == state.device for x in given)
    )


def fused_step(token: StepInputs, cache: StepCache, config: StepConfig) -> Tensor:
    """The layer's output [B,H,D] in the dtype of the values. Updates `cache` in place. Requires `is_supported`."""
    kernel = kernel_for("fused_step")
    assert kernel is not None
    return kernel(token, cache, config)
