"""Alignment: every linearized layer learns to reproduce the base's attention output on the base's own activations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_convert.model import AlignTargets, collect_align_targets, linear_layers
from liger_convert.training.calibrate import calibrate


class AlignObjective:
    """The relative squared error of the attention outputs, averaged over the linearized layers.

    All layers are trained in the same pass. base: the frozen teacher. config: that of the linearized model.
    """

    summed = False

    def __init__(self, base: Any, config: Any):
        self.base, self.layers = base, linear_layers(config)

    def __call__(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        return self._run(model, batch).loss

    @torch.no_grad()
    def layer_errors(self, model: Any, batch: dict[str, Tensor]) -> list[float]:
        """The relative error of each linearized layer on one batch. Computes no gradients."""
        return self._run(model, batch).layer_losses_L.tolist()

    def calibrate(self, model: Any, batch: dict[str, Tensor]) -> None:
        """Initializes the mixers from the base in closed form, in place, before the first step. See `calibrate.py`."""
        calibrate(model, self.base, batch["input_ids"], batch["position_ids"])

    def _run(self, model: Any, batch: dict[str, Any]) -> Any:
        given = {name: batch.get(name) for name in ("position_ids", "metadata")}
        return model(align=self._targets(batch), **given)

    def _targets(self, batch: dict[str, Any]) -> AlignTargets:
        inputs = {name: x for name, x in batch.items() if name in ("input_ids", "position_ids")}
        return collect_align_targets(self.base, inputs, self.layers)
