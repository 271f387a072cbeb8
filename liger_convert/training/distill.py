"""Distillation: the model learns the base's next-token distribution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_convert.config.stages import DistillStage
from liger_convert.model.output_head import OutputHead
from liger_convert.training.losses import cross_entropy, kl_divergence, next_tokens, summed


class DistillObjective:
    """kl_weight * KL(base || model) + ce_weight * cross-entropy on the text, summed over tokens.

    base: the frozen teacher; None leaves out the KL term.
    """

    summed = True

    def __init__(self, base: Any | None, stage: DistillStage):
        self.base, self.stage = base, stage

    def __call__(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        inputs = {name: batch.get(name) for name in ("input_ids", "position_ids")}
        next_N = next_tokens(batch["labels"], batch["input_ids"].shape[1])
        teacher_logits = None if self.base is None else _teacher(self.base, inputs)

        def loss(piece_NV: Tensor, chunk: slice) -> Tensor:
            total = piece_NV.new_zeros((), dtype=torch.float32)
            if teacher_logits is not None:
                kl = kl_divergence(piece_NV, teacher_logits(chunk), next_N[chunk], self.stage.temperature)
                total = total + self.stage.kl_weight * kl
            if self.stage.ce_weight:
                total = total + self.stage.ce_weight * cross_entropy(piece_NV, next_N[chunk])
            return total

        def head_loss(states_NX: Tensor, head: OutputHead | None) -> Tensor:
            return summed(states_NX, loss, head)

        total: Tensor = model(**inputs, metadata=batch.get("metadata"), use_cache=False, head_loss=head_loss).loss
        return total


@torch.no_grad()
def _teacher(base: Any, inputs: dict[str, Tensor | None]) -> Callable[[slice], Tensor]:
    """Runs the base and returns a function from a slice of the tokens to the base's logits for them, [N,V].

    The logits are computed on demand from the hidden states. If the base's output head cannot be used by itself, as in
    a sharded base, all logits are computed at once.
    """
    head = OutputHead.of(base)
    if head is None:
        logits_NV: Tensor = base(**inputs, use_cache=False).logits.flatten(0, 1)
        return lambda chunk: logits_NV[chunk]
    hidden_NC: Tensor = base.model(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)
    return lambda chunk: head.logits(hidden_NC[chunk])
