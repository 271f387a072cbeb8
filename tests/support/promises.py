"""What every model that is linearized promises, as assertions that several test files make of their own models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tiny_models import GREEDY, PADDED, PADDED_MASK, TOKENS, assert_same_logits, logits
from transformers import DynamicCache

LENGTH = TOKENS.shape[1]


def chunked_logits(model: Any, ends: Iterable[int], cache: Any = None) -> torch.Tensor:
    """The logits of TOKENS, read in chunks that end behind so many tokens, through a cache."""
    cache, start, parts = DynamicCache(config=model.config) if cache is None else cache, 0, []
    for end in ends:
        parts.append(logits(model, TOKENS[:, start:end], past_key_values=cache, use_cache=True))
        start = end
    return torch.cat(parts, 1)


def stepwise_logits(model: Any, cache: Any = None) -> torch.Tensor:
    """The logits of TOKENS, read one by one."""
    return chunked_logits(model, range(1, LENGTH + 1), cache)


def assert_chunks_equal_one_pass(model: Any, ends: Iterable[int]) -> None:
    assert_same_logits(chunked_logits(model, ends), logits(model, TOKENS))


def assert_packed_documents_are_separate(model: Any) -> None:
    rows = [(9, 7, 13), (1, 20, 8)]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    together = logits(model, TOKENS, position_ids=positions)
    for b, row in enumerate(rows):
        start = 0
        for n in row:
            single = logits(model, TOKENS[b : b + 1, start : start + n])
            assert_same_logits(together[b : b + 1, start : start + n], single)
            start += n


def assert_left_padding_changes_nothing(model: Any) -> None:
    both = model.generate(PADDED, attention_mask=PADDED_MASK, **GREEDY)
    assert torch.equal(both[0, 9:], model.generate(PADDED[:1, 4:], **GREEDY)[0, 5:])
    assert torch.equal(both[1], model.generate(PADDED[1:], **GREEDY)[0])


def assert_a_cache_changes_no_generation(model: Any, **options: Any) -> None:
    """Of padded prompts, greedy unless `options` say otherwise."""
    options = {"attention_mask": PADDED_MASK, **GREEDY, **options}
    assert torch.equal(*(model.generate(PADDED, use_cache=cached, **options) for cached in (True, False)))
