"""The parameters of a mixer that calibration fits to the base before any training."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn


class Calibration(NamedTuple):
    """Parameters that `training.calibrate` fits, besides those that combine memory and window.

    codebooks: modules `feature_maps.Codebook`. Their projections and codes are computed from the base's queries and
        keys. Of several inverse temperatures, the best is kept.
    gate_biases: tensors [G,*]. Several shifts of each are tried, and the best is kept.
    read_size: the learned scale [H,V] of the memory's read, fitted together with a learned mix; None if there is none.
    """

    codebooks: tuple[nn.Module, ...] = ()
    gate_biases: tuple[Tensor, ...] = ()
    read_size: Tensor | None = None
