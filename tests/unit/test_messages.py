"""Messages of a chat whose content is in parts, and chats for a tokenizer that cannot end them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import CHAT_TEMPLATE, tiny_tokenizer

from liger_convert.config.sources import FileSource
from liger_convert.data.documents import Document, load_source
from liger_convert.utils.errors import BadInput


def load(path: Path, *contents: Any) -> Document:
    """The document of a chat, which is written to `path`, with these contents of the messages of user and assistant."""
    messages = [{"role": role, "content": content} for role, content in zip(("user", "assistant"), contents)]
    path.write_text(json.dumps({"messages": messages}) + "\n")
    (document,) = load_source(FileSource(path=str(path), format="messages"), tiny_tokenizer()).train
    return document


def test_a_content_of_several_texts_is_read_as_one(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "Wh"}, {"type": "text", "text": "o?", "image": None}]
    found = load(tmp_path / "a.jsonl", parts, [{"type": "text", "text": "I."}])
    plain = load(tmp_path / "b.jsonl", "Who?", "I.")
    assert (found.ids.tolist(), found.loss.tolist()) == (plain.ids.tolist(), plain.loss.tolist())


@pytest.mark.parametrize("part", [{"type": "image", "url": "x.png"}, {"type": "text", "text": None}, "Who?", None])
def test_a_content_that_is_not_only_text_is_refused(tmp_path: Path, part: object) -> None:
    with pytest.raises(BadInput, match=r"a\.jsonl line 1: message 1 of 'messages' should have a role and a content"):
        load(tmp_path / "a.jsonl", [{"type": "text", "text": "Who?"}, part], "I.")


def test_responses_for_a_tokenizer_without_a_token_that_ends_them_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"instruction": "Who?", "output": "I."}) + "\n")
    tokenizer, source = tiny_tokenizer(), FileSource(path=str(tmp_path / "a.jsonl"), format="alpaca")
    tokenizer.eos_token = tokenizer.chat_template = None
    with pytest.raises(BadInput, match="the tokenizer has no token that ends one; give it an eos_token or a chat"):
        load_source(source, tokenizer)
    tokenizer.chat_template = CHAT_TEMPLATE
    assert load_source(source, tokenizer).train
