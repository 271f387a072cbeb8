"""Decoding equals prefill for every family and mixer, however the text is split and however generation is called."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from promises import assert_a_cache_changes_no_generation, assert_chunks_equal_one_pass
from tiny_models import (
    GREEDY,
    MASK,
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
from transformers import AutoModelForCausalLM, DynamicCache

from liger_convert.model import LinearizedCacheLayer, modeling
from liger_convert.model.decoding import Decoder


def test_greedy_decoding_with_a_cache_equals_without(model: Any) -> None:
    cached = model.generate(PROMPT, attention_mask=MASK, use_cache=True, **GREEDY)
    assert torch.equal(cached, model.generate(PROMPT, attention_mask=MASK, use_cache=False, **GREEDY))


def test_prefill_in_chunks_equals_one_pass(every_model: Any) -> None:
    assert_chunks_equal_one_pass(every_model, (4, 5, 12, 13, 29))


@pytest.mark.parametrize("cuts", [tuple(range(1, 30)), (1, 29), (28, 29)], ids=["each", "first", "last"])
def test_single_tokens_equal_one_pass(model: Any, cuts: tuple[int, ...]) -> None:
    assert_chunks_equal_one_pass(model, cuts)


def test_a_bare_dynamic_cache_is_adopted(model: Any) -> None:
    cache = DynamicCache()
    assert_same_logits(logits(model, TOKENS, past_key_values=cache, use_cache=True), logits(model, TOKENS))
    assert [isinstance(layer, LinearizedCacheLayer) for layer in cache.layers] == [True, False, True]


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_is_taken_by_its_name_in_any_version_of_transformers(name: str) -> None:
    model, cache = shared_model("llama", "gla"), DynamicCache()
    parts = [logits(model, part, **{name: cache}, use_cache=True) for part in TOKENS.split(11, 1)]
    assert_same_logits(torch.cat(parts, 1), logits(model, TOKENS))
    assert cache.get_seq_length() == TOKENS.shape[1]
    with pytest.raises(ValueError, match="two caches were given; pass one"):
        logits(model, TOKENS, cache=cache, past_key_values=DynamicCache())


def test_the_cache_of_a_linearized_layer_stops_growing(model: Any) -> None:
    if not model.model.layers[0].self_attn.spec.window:
        pytest.skip("a window of all tokens keeps them all")
    cache = DynamicCache(config=model.config)
    sizes = []
    for start in range(0, 28, 7):
        logits(model, TOKENS[:, start : start + 7], past_key_values=cache, use_cache=True)
        sizes.append(cache.layers[0].nbytes())
        held = {id(t.untyped_storage()): t.untyped_storage().nbytes() for t in cache.layers[0].ring.values()}
        assert sum(held.values()) <= sizes[-1], "a view keeps more than the ring alive"
    assert sizes[0] == sizes[-1]
    assert cache.layers[0].ring["k"].shape[1] == WINDOW - 1


def test_beam_search_with_a_cache_equals_without(model: Any) -> None:
    assert_a_cache_changes_no_generation(model, num_beams=3)


def test_sampling_several_sequences_with_a_cache_equals_without(model: Any) -> None:
    found = []
    for cached in (True, False):
        torch.manual_seed(1)
        options = GREEDY | {"do_sample": True, "num_return_sequences": 2, "use_cache": cached}
        found.append(model.generate(PADDED, attention_mask=PADDED_MASK, **options))
    assert torch.equal(*found)


def test_a_generation_continued_from_its_cache_equals_one_without(model: Any) -> None:
    first = model.generate(PROMPT, attention_mask=MASK, return_dict_in_generate=True, **GREEDY)
    text = torch.cat((first.sequences, TOKENS[:, 9:15]), 1)
    mask = torch.ones_like(text)
    continued = model.generate(text, attention_mask=mask, past_key_values=first.past_key_values, **GREEDY)
    assert torch.equal(continued, model.generate(text, attention_mask=mask, use_cache=False, **GREEDY))


@pytest.mark.parametrize("in_place", [False, True])
def test_steps_of_fixed_shape_equal_plain_ones(model: Any, in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling, "Decoder", functools.partial(Decoder, in_place=in_place))
    options = GREEDY | {"return_dict_in_generate": True, "output_logits": True}
    fixed = model.generate(PADDED, attention_mask=PADDED_MASK, **options)
    bounded = all(mixer["window"] for mixer in model.config.linearization["mixers"].values())
    said = model.decoding.removesuffix(", fused")  # on a CPU, if all linear layers have the fused step
    assert said == "fixed steps" if bounded else said.startswith("plain steps: an unlimited window")
    plain = model.generate(PADDED, attention_mask=PADDED_MASK, disable_compile=True, **options)
    assert model.decoding.startswith("plain steps")
    assert torch.equal(fixed.sequences, plain.sequences)
    # both are fp32 sums over the same tokens, at most in another order
    assert_same_logits(torch.stack(fixed.logits), torch.stack(plain.logits), 1e-5)


def test_a_reset_cache_is_a_fresh_one(model: Any) -> None:
    # without kept layers, whose own cache 5.17 of transformers does not empty
    family, mixer = model.config.model_type.removeprefix("linearized_"), model.model.layers[0].self_attn.mixer.name
    every = build(family, ["main"] * 3, type=mixer, window=WINDOW, sinks=SINKS)
    cache = DynamicCache(config=every.config)
    first = logits(every, TOKENS, past_key_values=cache, use_cache=True)
    cache.reset()
    assert torch.equal(logits(every, TOKENS, past_key_values=cache, use_cache=True), first)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"cache_implementation": "static"}, "cache_implementation 'static'"),
        ({"cache_implementation": "offloaded"}, "cache_implementation 'offloaded'"),
        ({"cache_implementation": "quantized"}, "cache_implementation 'quantized'"),
        ({"cache_implementation": "paged"}, "cache_implementation 'paged'"),
    ],
)
def test_a_cache_of_another_kind_is_refused_in_a_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        shared_model("llama", "gla").generate(PROMPT, **GREEDY, **options)


def test_continuous_batching_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"generate_batch.* is not supported for a linearized model"):
        shared_model("llama", "gla").generate_batch([[5, 6, 7]])


def test_a_linearized_model_as_an_assistant_is_refused_in_a_sentence() -> None:
    base = AutoModelForCausalLM.from_pretrained(base_folder("llama"))
    with pytest.raises(RuntimeError, match="It cannot be the assistant_model of assisted generation"):
        base.generate(PROMPT[:1], **GREEDY, assistant_model=build("llama", type="gla", window=5))


def test_a_cache_filled_by_the_base_is_refused() -> None:
    base = AutoModelForCausalLM.from_pretrained(base_folder("llama"))
    cache = base(PROMPT, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="already holds keys and values, which linearized layer"):
        shared_model("llama", "gla")(PROMPT, past_key_values=cache, use_cache=True)


def test_a_cache_that_gradient_checkpointing_would_leave_empty_is_refused() -> None:
    model = build("llama", type="gla", window=5).train()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="leaves a cache empty in training mode"):
        model.generate(PROMPT, **GREEDY)
    assert torch.equal(model.generate(PROMPT, **GREEDY, use_cache=False), model.eval().generate(PROMPT, **GREEDY))


def test_tokens_and_embeddings_together_are_refused() -> None:
    model = shared_model("llama", "gla")
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model(PROMPT, inputs_embeds=model.get_input_embeddings()(PROMPT))
