"""Calibration: the mixer parameters that are fitted to the base before any training."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn


class Calibration(NamedTuple):
    """Parameters that `training.calibrate` fits, besides those that combine memory and window.

    codebooks: modules `feature_maps.Codebook`; their maps and codes are taken from the base, and several inverse
    temperatures are tried.
    gate_biases: several shifts are tried of each, a tensor [G,*]. read_size: a size [H,V] of the memory's output, which
    is fitted together with a learned mix; None where it has none.
    """

    codebooks: tuple[nn.Module, ...] = ()
    gate_biases: tuple[Tensor, ...] = ()
    read_size: Tensor | None = None
