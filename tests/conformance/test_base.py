"""A model without linearized layers equals its base, and the options of the base's own layers keep their meaning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import MODELS
from tiny_models import (
    GREEDY,
    PADDED,
    PADDED_MASK,
    PROMPT,
    SINKS,
    TOKENS,
    WINDOW,
    assert_same_logits,
    base_folder,
    build,
    logits,
    shared_model,
)
from transformers import AutoModelForCausalLM

from liger_convert.model.families import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mixer", ["gla", "window"])
def test_a_window_that_holds_everything_is_the_base(family: str, mixer: str) -> None:
    base = AutoModelForCausalLM.from_pretrained(base_folder(family), attn_implementation="eager").eval()
    tokens = TOKENS[:, :24]  # the bases' own sliding windows are 24
    linearized = build(family, type=mixer, window=32, sinks=0)
    assert_same_logits(logits(linearized, tokens), logits(base, tokens))
    ours, theirs = (model(tokens, output_hidden_states=True).hidden_states for model in (linearized, base))
    for of_ours, of_theirs in zip(ours, theirs, strict=True):
        assert_same_logits(of_ours, of_theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_without_kept_layers_and_one_without_linearized_ones_work(family: str) -> None:
    every = build(family, ["main"] * 3, type="gla", window=WINDOW, sinks=SINKS)
    assert torch.equal(
        *(every.generate(PADDED, attention_mask=PADDED_MASK, use_cache=c, **GREEDY) for c in (True, False))
    )
    base = AutoModelForCausalLM.from_pretrained(base_folder(family), attn_implementation="eager").eval()
    none = build(family, ["softmax"] * 3, type="gla")
    assert torch.equal(none.generate(PROMPT, **GREEDY), base.generate(PROMPT, **GREEDY))


def test_the_attention_of_kept_layers_can_be_chosen(model: Any) -> None:
    if model._supports_sdpa:
        assert_same_with_the_attention("sdpa", model)
    else:
        with pytest.raises(ValueError, match="scaled_dot_product"):  # whose logits have no bound, as Gemma 2's have
            model.set_attn_implementation("sdpa")


# the softmax layers know of no mixer: quick are plain heads, norms of heads and a refusal, and torch's flex_attention
# as it stands, which gives the same masks and heads; compiling it takes half a minute
FLEX = [("llama", "gla"), ("qwen3", "gla"), ("olmoe", "gla")]


@pytest.mark.parametrize(
    ("family", "mixer", "stance"),
    [
        *((*model, "force_eager") for model in FLEX),
        *(pytest.param(*model, "default", marks=pytest.mark.slow) for model in MODELS),
    ],
)
def test_the_attention_of_kept_layers_can_be_flex_attention(family: str, mixer: str, stance: str) -> None:
    model = shared_model(family, mixer)
    if model._supports_flex_attn:
        with torch.compiler.set_stance(stance):
            assert_same_with_the_attention("flex_attention", model)
    else:
        with pytest.raises(ValueError, match="flex_attention"):  # the family's own limit (OLMoE), said by the library
            model.set_attn_implementation("flex_attention")


def assert_same_with_the_attention(implementation: str, model: Any) -> None:
    plain, padded = logits(model, TOKENS), logits(model, PADDED, attention_mask=PADDED_MASK)
    model.set_attn_implementation(implementation)
    try:
        assert_same_logits(logits(model, TOKENS), plain)
        again = logits(model, PADDED, attention_mask=PADDED_MASK)
        assert_same_logits(again[PADDED_MASK.bool()], padded[PADDED_MASK.bool()])
    finally:
        model.set_attn_implementation("eager")


def test_embeddings_can_be_passed_instead_of_tokens(model: Any) -> None:
    embeddings = model.get_input_embeddings()(TOKENS)
    assert_same_logits(logits(model, inputs_embeds=embeddings), logits(model, TOKENS))
