"""The tokenizer of a `.gguf` base gives the tokens that the model was trained on, as its vocabulary and header say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_models import write_gguf
from tiny import tiny_config
from transformers import AutoModelForCausalLM

from liger_convert.io.checkpoint import base_config, load_tokenizer, resolve_base
from liger_convert.io.tokenizer import text_prefix
from liger_convert.utils.errors import BadInput

TOKENS = 101  # those that every file has
BEGIN, USER = "<｜begin▁of▁text｜>", "<｜User｜>"
TURNS = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>\n{% endfor %}"

Make = Callable[..., tuple[Path, Any]]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Writes a file and converts it to a base. Returns its folder and tokenizer."""

    def made(vocabulary: str, **options: Any) -> tuple[Path, Any]:
        size = TOKENS + sum(len(options.get(name, ())) for name in ("words", "control"))
        model = AutoModelForCausalLM.from_config(tiny_config("llama", vocab_size=size), dtype=torch.float32)
        write_gguf(tmp_path / "model.gguf", model, vocabulary, **options)
        base = resolve_base(str(tmp_path / "model.gguf"), tmp_path / "work")
        return base, load_tokenizer(base)

    return made


@pytest.mark.parametrize(
    ("vocabulary", "pieces"),
    [
        ("default", ["12"]),
        ("olmo", ["12"]),
        ("llama-bpe", ["12"]),
        ("smollm", ["1", "2"]),
        ("qwen2", ["1", "2"]),
        ("stablelm2", ["1", "2"]),
        ("tekken", ["1", "2"]),
    ],
)
def test_digits_are_split_as_the_vocabulary_requires(make: Make, vocabulary: str, pieces: list[str]) -> None:
    assert make(vocabulary)[1].tokenize("12") == pieces


@pytest.mark.parametrize("use", [base_config, lambda source: resolve_base(source, Path(source).parent / "work")])
def test_a_vocabulary_that_is_split_in_an_unknown_way_is_refused(use: Any, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", AutoModelForCausalLM.from_config(tiny_config("llama")), "deepseek-coder")
    with pytest.raises(BadInput, match=r"m\.gguf: .* cannot split text as its vocabulary 'deepseek-coder'"):
        use(str(tmp_path / "m.gguf"))
    assert not list(tmp_path.glob("work/*"))


@pytest.mark.parametrize(
    ("vocabulary", "said", "begins"),
    [
        ("llama-bpe", None, True),
        ("tekken", None, True),
        ("llama-bpe", False, False),
        ("default", None, False),
        ("qwen2", True, True),
    ],
)
def test_a_text_begins_with_the_bos_token_if_the_header_or_the_vocabulary_says_so(
    make: Make, vocabulary: str, said: bool | None, begins: bool
) -> None:
    _, tokenizer = make(vocabulary, fields={} if said is None else {"tokenizer.ggml.add_bos_token": said})
    assert text_prefix(tokenizer) == [tokenizer.bos_token_id] * begins


@pytest.mark.parametrize(("vocabulary", "whole"), [("llama-bpe", True), ("default", False)])
def test_a_word_that_no_merge_makes_is_one_token_for_a_vocabulary_of_whole_words(
    make: Make, vocabulary: str, whole: bool
) -> None:
    assert (make(vocabulary, words=("hello",))[1].tokenize("hello") == ["hello"]) == whole


def test_control_tokens_outside_the_byte_alphabet_keep_their_ids(make: Make) -> None:
    fields = {"tokenizer.ggml.bos_token_id": TOKENS, "tokenizer.ggml.add_bos_token": True}
    _, tokenizer = make("deepseek-r1-qwen", control=(BEGIN, USER), fields=fields)
    hi = tokenizer.convert_tokens_to_ids(["h", "i"])
    assert tokenizer(f"{USER}hi")["input_ids"] == [TOKENS, TOKENS + 1, *hi]
    assert tokenizer.decode([TOKENS + 1, *hi]) == f"{USER}hi"
    assert max(tokenizer("<|endoftext|>")["input_ids"]) <= TOKENS  # pieces, as no such token is in the file


@pytest.mark.parametrize(
    ("options", "ends"),
    [
        ({}, ["</s>"]),
        ({"fields": {"tokenizer.ggml.eot_token_id": TOKENS}}, ["</s>", "<|end|>"]),
        ({"template": TURNS}, ["</s>", "<|end|>"]),
        ({"template": TURNS.replace("<|end|>", "")}, ["</s>"]),
        ({"template": "{{ nonsense() }}"}, ["</s>"]),
    ],
)
def test_a_text_ends_where_the_header_or_the_chat_template_ends_a_turn(
    make: Make, options: dict[str, Any], ends: list[str]
) -> None:
    base, tokenizer = make("default", control=("<|end|>",), **options)
    found = json.loads((base / "generation_config.json").read_text())["eos_token_id"]
    assert tokenizer.convert_ids_to_tokens(found if isinstance(found, list) else [found]) == ends
