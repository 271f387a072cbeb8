"""A padded batch equals single rows, and packed rows equal separate documents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from promises import assert_left_padding_changes_nothing, assert_packed_documents_are_separate
from tiny_models import PROMPT, assert_same_logits, logits, shared_model


def test_a_left_padded_batch_equals_each_row_alone(model: Any) -> None:
    assert_left_padding_changes_nothing(model)


def test_right_padding_changes_nothing_before_it(model: Any) -> None:
    padded = torch.cat((PROMPT[:1, :5], torch.zeros(1, 4, dtype=torch.long)), 1)
    mask = torch.tensor([[1] * 5 + [0] * 4])
    assert_same_logits(logits(model, padded, attention_mask=mask)[:, :5], logits(model, PROMPT[:1, :5]))


def test_packed_documents_never_see_each_other(model: Any) -> None:
    assert_packed_documents_are_separate(model)


def test_a_mask_of_pairs_and_a_packed_cached_row_are_refused() -> None:
    model = shared_model("llama", "gla")
    with pytest.raises(ValueError, match="2-D padding mask"):
        model(PROMPT, attention_mask=torch.ones(2, 1, 9, 9))
    with pytest.raises(ValueError, match="use_cache=False"):
        model(PROMPT, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5]]), use_cache=True)
