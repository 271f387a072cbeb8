"""What is held out of training, where the copies of a text are not written alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_tokenizer

from liger_convert.config.sources import FileSource
from liger_convert.data.documents import Document, Documents, load_source
from liger_convert.data.row_files import BLOCK, file_rows
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
