"""What the kernels of a decoding step's linear layers take as weights.

Shapes: N output channels, K input channels.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class ScaledWeight(NamedTuple):
    """A weight in 8 bits: numbers (int8 or float8_e4m3fn) and a float32 factor for each output channel."""

    numbers_NK: Tensor
    scale_N: Tensor


Weight = Tensor | ScaledWeight


def numbers_of(weight: Weight) -> Tensor:
    """[N,K]: the weight, or its numbers before they are scaled."""
    return weight.numbers_NK if isinstance(weight, ScaledWeight) else weight
