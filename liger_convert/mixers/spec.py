"""Options that all mixers have, and options that many share."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

Combine = Literal["shared", "learned", "fixed", "memory", "gate", "context"]
Scope = Literal["evicted", "all"]
Activation = Literal["none", "silu"]
GateFunction = Literal["sigmoid", "silu"]

MOST_TAPS = 16


@dataclass(frozen=True)
class MixerSpec:
    """Options that every mixer has.

    window: how many of the most recent tokens softmax attention sees, the query's own included; at least 1. In a mixer
        without a memory, 0 means all tokens.
    sinks: how many of a document's first tokens softmax attention still sees after they have left the window; 0 for
        none.
    scope: which tokens are written to the memory: only those `evicted` from the window, or `all`. With `evicted`, sinks
        are never written.
    combine: how the outputs of window and memory become one. `shared` uses one softmax denominator over the window's
        logits and the memory's normalizer. `learned` is a weighted mean of both outputs, with a learned weight per
        head. `fixed` is their mean. `memory` is the memory's output alone. `gate` and `context` are forms of `titans`.
    forget: whether the window's attention weights fade with distance, by a learned gate for each token and key-value
        head (Forgetting Transformer, 2503.02130). Sinks outside the window do not fade.

    With `combine: shared`, a memory with normalizer m has the weight w = m^gamma e^(c q / sqrt(D) + beta), and a token
    in the window with logit s has the weight e^s. Every head learns its own gamma, c and beta.
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
    def conv_has_bias(self) -> bool:
        """Whether the short convolution has a bias per channel."""
        return False

    @property
    def conv_function(self) -> Activation:
        """What is applied to the result of the short convolution."""
        return "none"

    @property
    def projects_gates(self) -> bool:
        """Whether a projection of the layer's input is added to the logits of the memory's gates."""
        return False

    @property
    def read_pieces(self) -> tuple[bool, bool]:
        """Whether the memory's read is followed by a norm, and whether by a gate."""
        return False, False

    @property
    def read_gate_function(self) -> GateFunction:
        """The function of the gate on the memory's read."""
        return "sigmoid"

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

    @property
    def pairs(self) -> int:
        """How many learned key-value pairs every query sees beside the window; 0 for none."""
        return 0

    @property
    def combines_itself(self) -> bool:
        """Whether the mixer combines its outputs itself with `combine: gate` and `combine: context`."""
        return False

    def inner_types(self) -> tuple[str, ...]:
        """The names of the mixers that this one contains."""
        return ()

    def problem(self) -> str | None:
        """What is wrong with these values, as `field: sentence`, or None."""
        if self.combine in ("gate", "context") and not self.combines_itself:
            return f"combine: {self.combine} is a form of the mixer titans alone; use shared, learned, fixed or memory"
        if self.window < 1:
            return f"window: {self.window} is too small; a query sees at least itself, so 1 or more"
        if self.sinks < 0:
            return f"sinks: {self.sinks} is negative; use 0 for none"
        return None


@dataclass(frozen=True)
class ShortConvSpec(MixerSpec):
    """Adds a short causal convolution of the memory's queries, keys and values.

    short_conv: how many tokens the convolution of each channel covers, from 2 to 16. The papers use 4; 0 turns it off.
        It starts as the identity. It works before rotary, so it needs `rope: false`.
    conv_bias: whether the convolution has a bias per channel, as Mamba's. It starts at 0.
    conv_activation: `silu` applies a SiLU to the convolved queries, keys and values, as the papers do. With it the
        convolution does not start as the identity.
    """

    short_conv: int = 0
    conv_bias: bool = False
    conv_activation: Activation = "none"

    @property
    def conv_taps(self) -> int:
        return self.short_conv

    @property
    def conv_has_bias(self) -> bool:
        return self.conv_bias

    @property
    def conv_function(self) -> Activation:
        return self.conv_activation

    def problem(self) -> str | None:
        if self.short_conv != 0 and not 2 <= self.short_conv <= MOST_TAPS:
            return f"short_conv: {self.short_conv} is not from 2 to {MOST_TAPS}; use 0 for none, or 4 as published"
        if self.short_conv and getattr(self, "rope", False):
            return "short_conv: works on queries and keys before rotary; use rope: false, or short_conv: 0"
        if self.conv_bias and not self.short_conv:
            return "conv_bias: is the short convolution's; set short_conv"
        if self.conv_activation != "none" and not self.short_conv:
            return f"conv_activation: {self.conv_activation} is applied to the short convolution; set short_conv"
        return super().problem()


@dataclass(frozen=True)
class ReadGateSpec(ShortConvSpec):
    """Adds a gate on what is read from the memory.

    output_gate: whether the read is multiplied by 2 sigmoid(W x), where x is the layer's input. W is learned and starts
        at 0, where the factor is 1.
    output_gate_activation: `silu` multiplies the read by silu(W x) instead, as most papers do. W then starts at random,
        as a factor of 0 would give the memory no gradient.
    """

    output_gate: bool = False
    output_gate_activation: GateFunction = "sigmoid"

    @property
    def read_pieces(self) -> tuple[bool, bool]:
        return False, self.output_gate

    @property
    def read_gate_function(self) -> GateFunction:
        return self.output_gate_activation

    def problem(self) -> str | None:
        if self.output_gate_activation != "sigmoid" and not self.output_gate:
            return f"output_gate_activation: {self.output_gate_activation} needs the gate; set output_gate: true"
        return super().problem()


@dataclass(frozen=True)
class GateProjSpec(MixerSpec):
    """Adds a projection from the layer's input to the memory's gates.

    gate_proj: whether W x is added to the logits of every gate, strength and step size, where x is the layer's input.
        W is learned and starts at 0.
    """

    gate_proj: bool = False

    @property
    def projects_gates(self) -> bool:
        return self.gate_proj


@dataclass(frozen=True)
class ReadSpec(ReadGateSpec):
    """Adds a norm of what is read from the memory.

    output_norm: `rms` applies an RMS norm to each head's read, with a learned scale per channel that starts at 0.1.
        No scale makes a norm the identity, so `rms` changes the model even before training. `none` turns it off.
    """

    output_norm: Literal["none", "rms"] = "none"

    @property
    def read_pieces(self) -> tuple[bool, bool]:
        return self.output_norm == "rms", self.output_gate
