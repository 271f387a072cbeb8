"""A prompt that is read by CUDA graphs is continued like one that is read without. On a CPU, a graph is a list of
recorded operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import quick_pairs
from recorded_ops import graphs_on_a_cpu
from tiny_models import GREEDY, TOKENS, assert_same_logits, shared_model

from liger_convert.model import prompt_graphs

OPTIONS = GREEDY | {"max_new_tokens": 2, "return_dict_in_generate": True, "output_logits": True}


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(prompt_graphs, "STEP", 3)
    return graphs_on_a_cpu(monkeypatch)


def prompts(count: int, tokens: int) -> list[torch.Tensor]:
    """Different prompts of the same length."""
    return [TOKENS.roll(number, 1)[:, :tokens] for number in range(count)]


def assert_same(graphs: Any, plain: Any) -> None:
    assert torch.equal(graphs.sequences, plain.sequences)
    assert_same_logits(torch.stack(graphs.logits), torch.stack(plain.logits))


@pytest.mark.parametrize(("family", "mixer"), quick_pairs("prompts by graphs"))
def test_prompts_read_by_graphs_are_continued_as_without(
    family: str, mixer: str, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shared_model(family, mixer)
    monkeypatch.setattr(model, "prefill_chunk", 8)
    for number, prompt in enumerate(prompts(3, 21)):  # 5 tokens, and two chunks of 8
        plain = model.generate(prompt, disable_compile=True, **OPTIONS)
        assert model.prefilling == "plain chunks: disable_compile asks for it"
        done.clear()
        assert_same(model.generate(prompt, **OPTIONS), plain)
        if mixer == "forgetting":
            assert model.prefilling == "plain chunks: an unlimited window grows with the prompt"
        else:
            assert model.prefilling == "captured chunks"
            assert number < 2 or set(done) == {"replayed"}, "the second prompt has recorded both kinds of chunks"
    model.model.prompts.forget()
