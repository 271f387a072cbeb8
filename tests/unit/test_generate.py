"""Generation gives the model's own text, also when it is streamed, batched, or made with a chat template."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import closing_tokenizer, save_tiny_base, tiny_tokenizer
from transformers import GenerationConfig

from liger_convert.cli import main
from liger_convert.eval.generation import continuations, generate, load_model
from liger_convert.mixers import resolve_spec
from liger_convert.model.loading import linearize_base
from liger_convert.utils.errors import BadInput, LinearizeError

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["base", "linearized"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = save_tiny_base("llama", tmp_path_factory.mktemp("base"))
    if request.param == "base":
        return base
    plan = {"format": 2, "mixers": {"main": resolve_spec({"window": 6, "sinks": 2})}, "layers": ["main"] * 3}
    folder = tmp_path_factory.mktemp("linearized")
    linearize_base(base, plan).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load_model(folder, CPU, "float32")


def greedy(model: Any, ids: list[int], tokens: int) -> str:
    """One token at a time, with no cache."""
    made: list[int] = []
    while len(made) < tokens and made[-1:] != [2]:
        with torch.no_grad():
            made.append(int(model(torch.tensor([ids + made]), use_cache=False).logits[0, -1].argmax()))
    return tiny_tokenizer().decode(made, skip_special_tokens=True)


def test_streamed_text_is_that_of_greedy_decoding(model: Any) -> None:
    tokenizer, pieces = tiny_tokenizer(), []
    text = generate(model, tokenizer, "Tell me", max_new_tokens=30, chat=False, write=pieces.append)
    assert text == "".join(pieces) == greedy(model, tokenizer("Tell me")["input_ids"], 30)
    assert text == generate(model, tokenizer, "Tell me", max_new_tokens=30, chat=False)


def test_a_prompt_becomes_a_turn_of_the_chat_template_where_there_is_one(model: Any) -> None:
    tokenizer = tiny_tokenizer()
    prompt = tokenizer("<s>user: Tell me</s><s>assistant: ")["input_ids"]
    assert generate(model, tokenizer, "Tell me", max_new_tokens=9) == greedy(model, prompt, 9)
    tokenizer.chat_template = None
    assert generate(model, tokenizer, "Tell me", max_new_tokens=9) == greedy(
        model, tokenizer("Tell me")["input_ids"], 9
    )


def test_a_prompt_is_continued_where_the_tokenizer_puts_an_end_behind_every_text(model: Any) -> None:
    text = generate(model, tiny_tokenizer(), "Tell me", max_new_tokens=20, chat=False)
    assert generate(model, closing_tokenizer(), "Tell me", max_new_tokens=20, chat=False) == text


def test_continuations_of_a_batch_are_those_of_each_prompt(model: Any) -> None:
    tokenizer, prompts = tiny_tokenizer(), ["a", "a much longer prompt", "of words"]
    alone = [generate(model, tokenizer, prompt, max_new_tokens=20) for prompt in prompts]
    assert continuations(model, tokenizer, prompts, max_new_tokens=20) == alone


def test_sampling_follows_its_seed_and_not_the_models_own_settings(model: Any) -> None:
    tokenizer = tiny_tokenizer()
    first, again, other = (
        generate(model, tokenizer, "Tell me", max_new_tokens=20, temperature=2.0, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again != other
    model.generation_config.update(do_sample=True, temperature=5.0)
    assert generate(model, tokenizer, "Tell me", max_new_tokens=20) == greedy(
        model, tokenizer("<s>user: Tell me</s><s>assistant: ")["input_ids"], 20
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2},
        {"no_repeat_ngram_size": 1},
        {"min_new_tokens": 15},
        {"suppress_tokens": list(range(3, 60))},
        {"max_time": 1e-9},
        {"stop_strings": ["a"]},
        {"return_dict_in_generate": True},
        {"cache_implementation": "quantized"},
        {"prompt_lookup_num_tokens": 3},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_text_is_greedy_whatever_the_models_own_settings_are(model: Any, settings: dict[str, Any]) -> None:
    tokenizer, own = tiny_tokenizer(), model.generation_config
    expected = greedy(model, tokenizer("<s>user: Tell me</s><s>assistant: ")["input_ids"], 20)
    model.generation_config = given = GenerationConfig(eos_token_id=2, **settings)
    try:
        assert generate(model, tokenizer, "Tell me", max_new_tokens=20, write=lambda piece: None) == expected
        assert continuations(model, tokenizer, ["Tell me", "Tell me more"], 20)[0] == expected
        assert model.generation_config is given
    finally:
        model.generation_config = own


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_end_in_a_sentence(folder: Path, temperature: float) -> None:
    damaged = load_model(folder, CPU, "float32")
    damaged.model.norm.weight.data[0] = float("nan")
    with pytest.raises(LinearizeError, match="the logits of the model are not finite"):
        generate(damaged, tiny_tokenizer(), "once upon a time", temperature=temperature, max_new_tokens=3)


def test_an_empty_prompt_is_bad_input(model: Any) -> None:
    with pytest.raises(BadInput, match="the prompt is empty"):
        generate(model, tiny_tokenizer(), " \n")


def test_a_prompt_beyond_the_context_of_the_base_is_told(folder: Path, tmp_path: Path, capsys: Any) -> None:
    model = shutil.copytree(folder, tmp_path / "model", dirs_exist_ok=True)
    tiny_tokenizer().save_pretrained(model)
    for size, told in ((256, False), (257, True)):  # the context of the tiny models is 256
        words = ["generate", str(model), "--raw", "--prompt", "a" * size, "--max-new-tokens", "1", "--device", "cpu"]
        capsys.readouterr()
        assert main.main(words) == 0
        assert ("note: the prompt has 257 tokens, more than the 256 that" in capsys.readouterr().err) == told
