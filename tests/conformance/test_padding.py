"""A padded batch equals single rows, and packed rows equal separate documents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import GREEDY, PADDED, PADDED_MASK, PROMPT, TOKENS, assert_same_logits, logits, shared_model


def test_a_left_padded_batch_equals_each_row_alone(model: Any) -> None:
    both = model.generate(PADDED, attention_mask=PADDED_MASK, **GREEDY)
    assert torch.equal(both[0, 9:], model.generate(PROMPT[:1, :5], **GREEDY)[0, 5:])
    assert torch.equal(both[1], model.generate(PROMPT[1:], **GREEDY)[0])


def test_right_padding_changes_nothing_before_it(model: Any) -> None:
    padded = torch.cat((PROMPT[:1, :5], torch.zeros(1, 4, dtype=torch.long)), 1)
    mask = torch.tensor([[1] * 5 + [0] * 4])
    assert_same_logits(logits(model, padded, attention_mask=mask)[:, :5], logits(model, PROMPT[:1, :5]))


def test_packed_documents_never_see_each_other(model: Any) -> None:
    rows = [(9, 7, 13), (1, 20, 8)]
    packed = TOKENS
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    together = logits(model, packed, position_ids=positions)
    for b, row in enumerate(rows):
        start = 0
        for n in row:
            alone = logits(model, packed[b : b + 1, start : start + n])
            assert_same_logits(together[b : b + 1, start : start + n], alone)
            start += n


def test_a_mask_of_pairs_and_a_packed_cached_row_are_refused() -> None:
    model = shared_model("llama", "gla")
    with pytest.raises(ValueError, match="2-D padding mask"):
        model(PROMPT, attention_mask=torch.ones(2, 1, 9, 9))
    with pytest.raises(ValueError, match="use_cache=False"):
        model(PROMPT, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5]]), use_cache=True)
