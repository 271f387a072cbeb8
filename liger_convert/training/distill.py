"""Distillation: the model learns the base's next-token distribution."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_convert.config.stages import DistillStage
from liger_convert.training.losses import cross_entropy, kl_divergence, next_tokens, summed


class DistillObjective:
    """kl_weight * KL(base || model) + ce_weight * cross-entropy on the text, summed over tokens."""

    summed = True

    def __init__(self, base: Any | None, stage: DistillStage):
        self.base, self.stage = base, stage

    def __call__(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        inputs = {name: batch.get(name) for name in ("input_ids", "position_ids")}
        next_N = next_tokens(batch["labels"], batch["input_ids"].shape[1])
        logits_NV = model(**inputs, metadata=batch.get("metadata"), use_cache=False).logits.flatten(0, 1)
        teacher_NV = None
        if self.base is not None:
            with torch.no_grad():
                teacher_NV = self.base(**inputs, use_cache=False).logits.flatten(0, 1)

        def loss(piece_NV: Tensor, chunk: slice) -> Tensor:
            total = piece_NV.new_zeros((), dtype=torch.float32)
            if teacher_NV is not None:
                kl = kl_divergence(piece_NV, teacher_NV[chunk], next_N[chunk], self.stage.temperature)
                total = total + self.stage.kl_weight * kl
            if self.stage.ce_weight:
                total = total + self.stage.ce_weight * cross_entropy(piece_NV, next_N[chunk])
            return total

        return summed(logits_NV, loss)
