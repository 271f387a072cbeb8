"""What a mixer can take from the base in closed form, before any training: seconds on a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_convert.model import collect_align_targets, linear_layers
from liger_convert.model.layout import SequenceLayout


def calibrate(model: Any, base: Any, input_ids: Tensor, position_ids: Tensor) -> None:
    """Fits every mixer of `model`, in place, to the base's own attention over a packed batch (both [B,T])."""
    batch = {"input_ids": input_ids, "position_ids": position_ids}
    targets = collect_align_targets(base, batch, linear_layers(model.config))
    layout = SequenceLayout.build(len(input_ids), input_ids.shape[1], position_ids, None, None)
    with torch.no_grad():
        for i, x_BTC, embeddings in zip(targets.layers, targets.hidden, targets.position_embeddings):
            model.model.layers[i].self_attn.calibrate(x_BTC, embeddings, layout)
