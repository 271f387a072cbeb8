"""Messages of a chat whose content is in parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_tokenizer

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
