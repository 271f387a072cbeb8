"""A padded batch equals single rows, and packed rows equal separate documents."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from promises import assert_left_padding_changes_nothing, assert_packed_documents_are_separate
from tiny_models import LAYERS, PROMPT, TOKENS, assert_same_logits, logits, shared_model
from transformers import DynamicCache

from liger_convert.model.families import own_windows


def test_a_left_padded_batch_equals_each_row_alone(model: Any) -> None:
    assert_left_padding_changes_nothing(model)


def test_right_padding_changes_nothing_before_it(model: Any) -> None:
    padded = torch.cat((PROMPT[:1, :5], torch.zeros(1, 4, dtype=torch.long)), 1)
    mask = torch.tensor([[1] * 5 + [0] * 4])
    assert_same_logits(logits(model, padded, attention_mask=mask)[:, :5], logits(model, PROMPT[:1, :5]))


def test_padding_between_tokens_does_not_shorten_the_window(model: Any) -> None:
    """More padding than the window is long, as in a batch of conversations that is continued from its cache."""
    if own_windows(model.config)[LAYERS.index("softmax")] is not None:
        pytest.skip("transformers counts padding in the sliding windows of softmax layers")
    alone = logits(model, TOKENS[:1])
    padded, mask = TOKENS.new_zeros(1, 9), TOKENS.new_zeros(1, 9)
    first, second, third = TOKENS[:1].split((12, 2, 15), 1)
    row = torch.cat((first, padded, second, padded, third, padded), 1)
    seen = torch.cat([mask if part is padded else torch.ones_like(part) for part in (first, padded, second, padded)], 1)
    seen = torch.cat((seen, torch.ones_like(third), mask), 1)
    positions = (seen.cumsum(1) - 1).clamp_min(0)
    real = seen.bool()
    given = {"attention_mask": seen, "position_ids": positions}
    assert_same_logits(logits(model, row, **given, use_cache=False)[real][None], alone)
    cache, parts = DynamicCache(config=model.config), []
    for start, end in pairwise((0, 14, 21, 22, 34, 56)):
        now = {"attention_mask": seen[:, :end], "position_ids": positions[:, start:end]}
        parts.append(logits(model, row[:, start:end], **now, past_key_values=cache, use_cache=True))
    assert_same_logits(torch.cat(parts, 1)[real][None], alone)


@pytest.mark.parametrize("seen", [5, 16], ids="after {} tokens".format)
def test_a_step_that_is_padding_leaves_its_row_as_it_was(model: Any, seen: int) -> None:
    """As in a batch in which a row is finished while the others go on."""
    cache, mask = DynamicCache(config=model.config), torch.ones_like(TOKENS)
    mask[0, seen : seen + 3] = mask[1, seen + 2] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    linear = [i for i, layer in enumerate(LAYERS) if layer != "softmax"]

    def read(start: int, end: int) -> torch.Tensor:
        now = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end]}
        return logits(model, TOKENS[:, start:end], **now, past_key_values=cache, use_cache=True)

    def held() -> list[torch.Tensor]:
        """What the first row's linear layers keep."""
        kept = []
        for layer in (cache.layers[i] for i in linear):
            real = layer.positions.position_BP[0] >= 0
            kept += [ring[0, -len(real) :][real] for ring in layer.ring.values()]
            kept += [x[0] for x in (*layer.sinks.values(), *layer.states.values())]
        return kept

    parts, before = [read(0, seen)], held()
    for i in range(seen, seen + 3):
        parts.append(read(i, i + 1))
        assert all(torch.equal(*pair) for pair in zip(held(), before, strict=True))
    parts += [read(i, i + 1) for i in range(seen + 3, TOKENS.shape[1])]
    for row, real in enumerate(mask.bool()):
        if own_windows(model.config)[LAYERS.index("softmax")] is not None:
            continue  # transformers counts padding in the sliding windows of softmax layers
        assert_same_logits(torch.cat(parts, 1)[row, real], logits(model, TOKENS[row : row + 1, real])[0])


def test_packed_documents_never_see_each_other(model: Any) -> None:
    assert_packed_documents_are_separate(model)


def test_a_mask_of_pairs_and_a_packed_cached_row_are_refused() -> None:
    model = shared_model("llama", "gla")
    with pytest.raises(ValueError, match="2-D padding mask"):
        model(PROMPT, attention_mask=torch.ones(2, 1, 9, 9))
    with pytest.raises(ValueError, match="use_cache=False"):
        model(PROMPT, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5]]), use_cache=True)
