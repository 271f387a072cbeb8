"""Fine-tuning: cross-entropy on the text. The labels determine which tokens count; see `responses_only` of `pack`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from liger_convert.model.output_head import OutputHead
from liger_convert.training.losses import cross_entropy, next_tokens, summed


class FinetuneObjective:
    """Cross-entropy on the text, summed over the labeled tokens."""

    summed = True

    def __call__(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        next_N = next_tokens(batch["labels"], batch["input_ids"].shape[1])
        inputs = {name: batch.get(name) for name in ("input_ids", "position_ids", "metadata")}

        def head_loss(states_NX: Tensor, head: OutputHead | None) -> Tensor:
            return summed(states_NX, lambda piece_NV, chunk: cross_entropy(piece_NV, next_N[chunk]), head)

        loss: Tensor = model(**inputs, use_cache=False, head_loss=head_loss).loss
        return loss
