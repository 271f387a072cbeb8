"""The fused step of one token through a linearized layer: its arguments, and where it is supported.

Only Triton has it. Where it is not supported, a layer takes its step op by op.

Shapes: B batch, P tokens of the ring (window - 1), S = P + 1, M sinks, H query heads, G key-value heads, D head size,
C rotated channels, E size of a code, F feature size. States are [B,G,F,D], whose rows can be read in whole vectors.
"""

from __future__ import annotations

import os
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gated_kernels.common.registry import kernel_for

MIN_NORMALIZER = 1e-30  # of a memory that holds something; less counts as nothing
EMPTY = -60.0  # a log normalizer at or below it: log(MIN_NORMALIZER), also of several such memories together


class StepInputs(NamedTuple):
    """The new token of every row: its projections before rotary, and where it stands.

    `cos_BC` and `sin_BC`, [B or 1, C], rotate the first C channels by halves (None: no rotary). `position_BS` are the
    positions of the ring's tokens, oldest first, and of the new one (-1: padding). `sink_visible_BM` says whether a
    sink is seen beyond the window. `scale` is that of the window's logits.
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
    """A layer's tensors, which a step writes in place.

    `ring_position` counts the steps: slot `ring_position` mod P of the ring is the oldest, and takes the new token.
    `deferred_inputs_BPGD` are the keys before rotary, where only what leaves the window is written to the state.
    `z_BGF` is there where the memory is normalised: the sum of keys by which a query's normalizer is read.
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
    """A codebook's map softmax(u C / temperature), u = P x + b brought to length 1. Each head has its own P, b and
    temperature."""

    q_proj_HDE: Tensor
    q_bias_HE: Tensor
    q_log_inv_temperature_H: Tensor
    k_proj_GDE: Tensor
    k_bias_GE: Tensor
    k_log_inv_temperature_G: Tensor
    codes_GFE: Tensor


class Gate(NamedTuple):
    """sigmoid(x)^(1/normalizer): x is a key's mean plus a bias for a `head`, a `constant` bias, or the `keys`."""

    of: Literal["head", "constant", "keys"]
    bias_GF: Tensor | None
    normalizer: float


class MemoryWeight(NamedTuple):
    """A memory of normalizer m weighs m^power e^(query q / sqrt(D) + log), where the window weighs the sum of its e^s.

    It weighs nothing where log m is at most EMPTY.
    """

    power_H: Tensor
    query_HD: Tensor
    log_H: Tensor


class StepConfig(NamedTuple):
    """A mixer's map (None: softmax), gate (None: 1) and memory weight (None: not normalised, half and half)."""

    codes: Codes | None
    gate: Gate | None
    memory_weight: MemoryWeight | None


def is_supported(cache: StepCache, config: StepConfig, heads: int) -> bool:
    """Whether there is a fused step for a layer with this cache, of so many query heads."""
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
    """The layer's output [B,H,D] in the dtype of the values; writes to `cache`. Only for what `is_supported`."""
    kernel = kernel_for("fused_step")
    assert kernel is not None
    return kernel(token, cache, config)
