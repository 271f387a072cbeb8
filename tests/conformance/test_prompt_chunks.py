"""A long prompt is read in chunks: the text that follows is the same, and no layer sees more tokens at a time."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from pairs import MODELS, is_quick
from tiny_models import GREEDY, TOKENS, WINDOW, assert_same_logits, build, shared_model

from liger_convert.model import modeling

LONG = torch.cat((torch.cat((torch.zeros(1, 13, dtype=torch.long), TOKENS[:1, :16]), 1), TOKENS[1:]))
LONG_MASK = torch.ones_like(LONG).index_fill(1, torch.arange(13), 0) | torch.tensor([[0], [1]])


@pytest.mark.parametrize(("family", "mixer"), [model for model in MODELS if is_quick(*model, "a prompt in pieces")])
def test_a_prompt_read_in_pieces_is_continued_as_one_read_at_once(
    family: str, mixer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shared_model(family, mixer)
    options = GREEDY | {"return_dict_in_generate": True, "output_logits": True}
    text = torch.cat((LONG, torch.zeros(2, 20, dtype=torch.long), TOKENS[:, :11]), 1)
    mask = torch.cat((LONG_MASK, torch.ones(2, 31, dtype=torch.long)), 1)
    found = []
    for chunk in (None, 4):  # the padding of the first row fills three pieces
        monkeypatch.setattr(model, "prefill_chunk", chunk)
        first = model.generate(LONG, attention_mask=LONG_MASK, **options)
        text[:, 29:49] = first.sequences[:, 29:]
        second = model.generate(text, attention_mask=mask, past_key_values=first.past_key_values, **options)
        found.append((first, second))
    for whole, pieces in zip(*found):
        assert torch.equal(pieces.sequences, whole.sequences)
        assert_same_logits(torch.stack(pieces.logits), torch.stack(whole.logits))


def tokens_seen(module: torch.nn.Module, run: Any) -> list[int]:
    """How many tokens each call of `module` got while `run` ran."""
    seen: list[int] = []
    hook = module.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((*args, *kwargs.values())[0].shape[1]), with_kwargs=True
    )
    try:
        run()
    finally:
        hook.remove()
    return seen


def test_no_layer_sees_more_of_a_prompt_than_a_piece_and_the_head_no_more_than_its_last_token() -> None:
    model = build("llama", type="gla", window=WINDOW)
    generate = functools.partial(model.generate, TOKENS, **GREEDY | {"max_new_tokens": 2})
    assert tokens_seen(model.model.layers[0], generate) == [29, 1], "shorter than the chunk"
    assert tokens_seen(model.lm_head, generate) == [1, 1]
    model.prefill_chunk = 8
    assert tokens_seen(model.model.layers[0], generate) == [5, 8, 8, 8, 1]
    assert tokens_seen(model.lm_head, generate) == [1, 1]
    embedded = functools.partial(
        model.generate, inputs_embeds=model.get_input_embeddings()(TOKENS), **GREEDY | {"max_new_tokens": 2}
    )
    assert tokens_seen(model.model.layers[0], embedded) == [5, 8, 8, 8, 1]
    assert torch.equal(embedded(), generate()[:, 29:])
    # transformers' own pieces, where a caller asks for them
    assert tokens_seen(model.model.layers[0], functools.partial(generate, prefill_chunk_size=6)) == [6, 6, 6, 6, 5, 1]


def test_chunks_are_shorter_if_there_are_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama", type="gla", window=WINDOW)
    monkeypatch.setattr(modeling, "LEAST_CHUNK", 3)
    prompts = TOKENS[:1].repeat(12, 1)
    generate = functools.partial(model.generate, prompts, **GREEDY | {"max_new_tokens": 2})
    whole = generate()
    model.prefill_chunk = 8
    assert tokens_seen(model.model.layers[0], generate) == [4, 5, 5, 5, 5, 5, 1]
    assert torch.equal(generate(), whole)


@pytest.mark.parametrize("options", [{"output_hidden_states": True}, {"use_cache": False}], ids=str)
def test_what_needs_the_whole_prompt_at_once_gets_it(options: dict[str, Any]) -> None:
    model = build("llama", type="gla", window=WINDOW)
    model.prefill_chunk = 8
    generate = functools.partial(model.generate, TOKENS, **GREEDY | {"max_new_tokens": 1}, **options)
    assert tokens_seen(model.model.layers[0], generate) == [29]
    assert tokens_seen(model.model.layers[0], lambda: model(TOKENS, use_cache=True)) == [29], "the logits of all tokens"
