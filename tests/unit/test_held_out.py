"""What is held out of training, where the copies of a text are not written alike."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tiny import CHAT_TEMPLATE, tiny_tokenizer
from transformers.utils import chat_template_utils

from liger_convert.config.sources import FileSource
from liger_convert.data.documents import Document, Documents, load_source
from liger_convert.data.row_files import BLOCK, file_rows
from liger_convert.io import templates
from liger_convert.utils.errors import BadInput


def read(path: Path, texts: list[str], **fields: Any) -> Documents:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return load_source(FileSource(path=str(path), **fields), tiny_tokenizer())


def words(documents: list[Document]) -> set[str]:
    return {" ".join(tiny_tokenizer().decode(document.ids).split()) for document in documents}


COPIES = ["{}", "{}\n", " {}", "{}\r\n"]


def test_a_copy_with_other_spaces_of_what_is_held_out_is_not_trained_on(tmp_path: Path) -> None:
    texts = [copy.format(f"apple {i}\npear") for i in range(40) for copy in COPIES]
    found = read(tmp_path / "a.jsonl", texts, held_out=0.1)
    assert found.train, "or nothing is tested"
    assert found.held_out, "or nothing is tested"
    assert not words(found.train) & words(found.held_out)


def test_a_copy_with_other_spaces_of_the_validation_is_not_trained_on(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "apple 1"}) + "\n")
    names = {"validation": str(tmp_path / "b.jsonl")}
    assert words(read(tmp_path / "a.jsonl", ["apple 1 \n", "apple 2"], **names).train) == {"apple 2"}
    with pytest.raises(BadInput, match="all its texts are in its validation as well"):
        read(tmp_path / "a.jsonl", ["apple 1 \n"], **names)


def test_without_anything_held_out_copies_are_all_trained_on(tmp_path: Path) -> None:
    assert len(read(tmp_path / "a.jsonl", ["apple", "apple "]).train) == 2


def test_a_txt_with_the_line_ends_of_windows_is_read_as_any_other(tmp_path: Path) -> None:
    paragraphs = [f"paragraph {i}\nof some {'x' * (i % 97)}" for i in range(40_000)]  # ends of lines at ends of blocks
    plain, windows = tmp_path / "a.txt", tmp_path / "b.txt"
    plain.write_bytes("\n\n".join(paragraphs).encode())
    windows.write_bytes("\r\n\r\n".join(paragraphs).replace("\n", "\r\n").replace("\r\r", "\r").encode() + b"\r\n")
    assert windows.stat().st_size > 2 * BLOCK, "or nothing is tested"
    assert [row.value for row in file_rows(windows)] == [row.value for row in file_rows(plain)]
    windows.write_bytes(b"pear\r\n" * BLOCK + b"\xff")
    with pytest.raises(BadInput, match=rf"b\.txt line {BLOCK + 1}: is not UTF-8"):
        list(file_rows(windows))


def test_chats_do_not_depend_on_the_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama 3.2's templates name the day in every chat: on another one, a resumed run would hold out other chats, and
    measure on what it has trained on."""
    tokenizer, path = tiny_tokenizer(), tmp_path / "a.jsonl"
    tokenizer.chat_template = "\n  {% set day = strftime_now('%d %b %Y') %}\n{{ day }}" + CHAT_TEMPLATE
    pairs = [(f"Who is {i}?", f"{i} is I.") for i in range(40)]
    path.write_text("".join(json.dumps({"instruction": asked, "output": said}) + "\n" for asked, said in pairs))
    found = []
    for day in (1, 2):

        class Clock(datetime):
            @classmethod
            def now(cls, tz: Any = None, day: int = day) -> Any:
                return datetime(2026, 1, day)

        monkeypatch.setattr(chat_template_utils, "datetime", Clock)
        asked = [{"role": "user", "content": "Who?"}]
        assert templates.render(tokenizer, asked, tokenizer.chat_template).startswith(f"\n0{day} Jan 2026"), "the clock"
        read = load_source(FileSource(path=str(path), format="alpaca", held_out=0.2), tokenizer)
        found.append([[document.ids.tolist() for document in part] for part in (read.train, read.held_out)])
    assert found[0] == found[1]
    fixed = tokenizer.chat_template.replace("strftime_now('%d %b %Y')", "'26 Jul 2024'")
    assert tokenizer.decode(read.train[0].ids).startswith(templates.render(tokenizer, asked, fixed)[:12]), (
        "in its place"
    )
