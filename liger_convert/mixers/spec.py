"""Options that all mixers have, and options that many share."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

Combine = Literal["shared", "learned", "fixed", "memory"]
Scope = Literal["evicted", "all"]

MOST_TAPS = 16


@dataclass(frozen=True)
class MixerSpec:
    """Options every mixer has.

    window: tokens a query sees exactly, itself included (at least 1; 0, for all tokens, where there is no memory).
    sinks: first tokens of a document that stay visible for ever. scope: the memory holds `all` tokens, or only
    those `evicted` from the window (sinks, which are never forgotten, are then never written). combine: one `shared`
    denominator over the window's logits and the memory's normalizer, a `learned` or `fixed` (half and half) mix of the
    two outputs, or only the `memory`'s. In the shared denominator a memory of normalizer m weighs w = m^gamma e^(c q /
    sqrt(D) + beta) against the sum of the window's e^s; every head learns its gamma, c and beta. forget: the
    window's weights fade by a learned gate of every token since (Forgetting Transformer, 2503.02130), one a
    key-value head; the sinks' beyond the window do not.
    """

    window: int = 64
    sinks: int = 4
    scope: Scope = "evicted"
    combine: Combine = "shared"
    forget: bool = False

    @property
    def is_calibrated(self) -> bool:
        """Whether `training.calibrate` fits the mixer: only if its `combine` has parameters to fit."""
        return self.combine in ("shared", "learned")

    @property
    def cache_window(self) -> int:
        """How many tokens the ring keeps between two calls; no limit if the window is unbounded."""
        return self.window - 1 if self.window else sys.maxsize

    @property
    def conv_taps(self) -> int:
        """Taps of the short convolution before the memory; 0 for none."""
        return 0

    @property
    def read_pieces(self) -> tuple[bool, bool]:
        """Whether the memory's read is followed by a norm, and whether by a gate."""
        return False, False

    @property
    def shift(self) -> Literal["none", "key_value", "token"]:
        """Which shift mixes the previous token into queries, keys and values, before rotary."""
        return "none"

    @property
    def normalizes_qk(self) -> bool:
        """Whether the mixer normalizes queries and keys before rotary."""
        return False

    @property
    def rotates(self) -> bool:
        """Whether the window's queries and keys are rotated, if the base's are."""
        return True

    @property
    def forget_gate(self) -> Literal["input", "learned", "fixed"]:
        """With `forget`, the window's gates: computed from the layer's input, learned constants, or fixed."""
        return "input"

    def inner_types(self) -> tuple[str, ...]:
        """The names of the mixers that this one contains."""
        return ()

    def problem(self) -> str | None:
        """What is wrong with these values, as `field: sentence`, or None."""
        if self.window < 1:
            return f"window: {self.window} is too small; a query sees at least itself, so 1 or more"
        if self.sinks < 0:
            return f"sinks: {self.sinks} is negative; use 0 for none"
        return None


@dataclass(frozen=True)
class ShortConvSpec(MixerSpec):
    """short_conv: taps of a causal convolution of each channel of the memory's queries, keys and values, which starts
    as the identity; 4 as published, 0 for none. There is no SiLU behind it, which no start makes the identity.
    """

    short_conv: int = 0

    @property
    def conv_taps(self) -> int:
        return self.short_conv

    def problem(self) -> str | None:
        if self.short_conv != 0 and not 2 <= self.short_conv <= MOST_TAPS:
            return f"short_conv: {self.short_conv} is not from 2 to {MOST_TAPS}; use 0 for none, or 4 as published"
        if self.short_conv and getattr(self, "rope", False):
            return "short_conv: works on queries and keys before rotary; use rope: false, or short_conv: 0"
        return super().problem()


@dataclass(frozen=True)
class ReadGateSpec(ShortConvSpec):
    """output_gate: the memory's read is multiplied by 2 sigmoid(W x) of the layer's input x; W is learned from 0 on,
    where that is 1.
    """

    output_gate: bool = False

    @property
    def read_pieces(self) -> tuple[bool, bool]:
        return False, self.output_gate


@dataclass(frozen=True)
class ReadSpec(ReadGateSpec):
    """output_norm: `rms` brings each head's read to one size, learned per channel from 0.1 on. No size makes it the
    identity: it changes the memory that a conversion starts with.
    """

    output_norm: Literal["none", "rms"] = "none"

    @property
    def read_pieces(self) -> tuple[bool, bool]:
        return self.output_norm == "rms", self.output_gate
