"""What the fused step of one token takes. Only Triton has it: without `fast`, a layer takes its step op by op.

Shapes: B batch, P tokens of the ring (window - 1), S = P + 1, M sinks, H query heads, G key-value heads, D head size,
C rotated channels, E size of a code, F feature size. States are [B,G,F,D], whose rows can be read in whole vectors.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

LEAST_MASS = 1e-30  # of a memory that holds something; less counts as nothing
EMPTY = -60.0  # a log mass at or below it: log(LEAST_MASS), also of several such memories together


class Token(NamedTuple):
    """The new token of every row: its projections before rotary, and where it stands.

    `cos_BC` and `sin_BC`, [B or 1, C], turn the first C channels by halves (None: rotary is not used). `rank_BS` are
    the ranks of the ring's tokens, oldest first, and the new one (-1: padding), `sink_visible_BM` whether a sink is
    seen beyond the window, `scale` that of the window's logits.
    """

    q_BHD: Tensor
    k_BGD: Tensor
    v_BGD: Tensor
    cos_BC: Tensor | None
    sin_BC: Tensor | None
    rank_BS: Tensor
    sink_visible_BM: Tensor | None
    scale: float


class Kept(NamedTuple):
    """A layer's tensors, which a step writes in place.

    `taken` counts the steps: slot `taken` mod P of the ring is the oldest, and the one that the new token takes.
    `pending_BPGD`, the keys before rotary, says that only what leaves the window is written to the state. `z_BGF` is
    there where the memory is normalised: the sum of keys by which a query's mass is read.
    """

    k_BPGD: Tensor
    v_BPGD: Tensor
    pending_BPGD: Tensor | None
    sink_k_BMGD: Tensor | None
    sink_v_BMGD: Tensor | None
    state_BGFD: Tensor
    z_BGF: Tensor | None
    taken: Tensor


class Codes(NamedTuple):
    """softmax(tau C u), u = P x + b brought to length 1, each head with its own P, b and tau."""

    q_turn_HDE: Tensor
    q_shift_HE: Tensor
    q_log_tau_H: Tensor
    k_turn_GDE: Tensor
    k_shift_GE: Tensor
    k_log_tau_G: Tensor
    codes_GFE: Tensor


class Gate(NamedTuple):
    """sigmoid(x)^(1/normalizer): x is a key's mean plus a bias for a `head`, a `constant` bias, or the `keys`."""

    of: Literal["head", "constant", "keys"]
    bias_GF: Tensor | None
    normalizer: float


class Share(NamedTuple):
    """The memory, of mass m, weighs m^power e^(query q / sqrt(D) + log) beside the window's sum of e^s; nothing where
    log m is at most EMPTY."""

    power_H: Tensor
    query_HD: Tensor
    log_H: Tensor


class Rules(NamedTuple):
    """A mixer's own: its map (None: softmax), its gate (None: 1), its join (None: not normalised, half and half)."""

    codes: Codes | None
    gate: Gate | None
    share: Share | None


# What `gated_kernels.use` puts here.
fast: Callable[[Token, Kept, Rules], Tensor] | None = None


def takes(kept: Kept, rules: Rules, heads: int) -> bool:
    """Whether there is a fused step for a layer that keeps this, of so many query heads."""
    state, (_, P, G, D) = kept.state_BGFD, kept.k_BPGD.shape
    if fast is None or not (state.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        return False
    normalised, evicted, summed = rules.share is not None, kept.pending_BPGD is not None, kept.z_BGF is not None
    if P == 0 or D > 256 or heads > 64 * G or not normalised == evicted == summed or state.shape[3] != D:
        return False
    bias = None if rules.gate is None else rules.gate.bias_GF
    wide = [*(rules.codes or ()), *(rules.share or ()), state, kept.z_BGF, bias]
    given = [x for x in (*kept, *wide) if x is not None]
    dtype = kept.k_BPGD.dtype
    return (
        dtype in (torch.float32, torch.bfloat16, torch.float16)
        and all(x is None or x.dtype == dtype for x in kept[:5])
        and all(x is None or x.dtype == torch.float32 for x in wide)
        and all(x.is_contiguous() and x.device == state.device for x in given)
    )


def step(token: Token, kept: Kept, rules: Rules) -> Tensor:
    """The layer's output [B,H,D] in the dtype of the values; writes to `kept`. For what `takes` says yes to."""
    assert fast is not None
    return fast(token, kept, rules)
