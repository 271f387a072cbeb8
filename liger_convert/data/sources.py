"""Where rows come from: the documentation that every Python carries, a file, or a data set of the hub.

A row is a JSON value with a name for error messages. What its columns mean (text, Alpaca, messages) is `data.py`'s.
"""

from __future__ import annotations

import ast
import codecs
import contextlib
import gzip
import io
import json
import lzma
import re
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from liger_convert.config.sources import FileSource, HubSource, PydocSource
from liger_convert.io import inputs
from liger_convert.io.json_list import JsonList
from liger_convert.utils.errors import BadInput, first_line

SUFFIXES = (".jsonl", ".json", ".txt")
OPENERS: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open}

ROW_BYTES = 64 << 20  # the text of a context of ten million tokens has 45 MB
BLOCK = 1 << 20
# Text packs to a quarter or a tenth, sentences over and over to a hundredth and less; zeros to a seven-thousandth.
# A file may unpack to PACKED_BYTES in any case, so that small sets of such sentences are read.
PACKED_RATIO = 100
PACKED_BYTES = 32 << 20

# An answer about a long topic ends at a paragraph before this length, so that a question and its answer fit in a row.
ANSWER_CHARS = 2000
# What is left of a shorter text after its repetitions are dropped says nothing.
MIN_CHARS = 200


@dataclass(frozen=True, slots=True)
class Row:
    """One row. where: what an error message names ("x.jsonl line 3"). key: rows of one key are held out together."""

    where: str
    value: Any
    key: str | None = None


def rows(source: PydocSource | FileSource | HubSource, *, validation: bool = False) -> Iterator[Row]:
    """The rows of `source`, or of the file or split that its `validation` names. Raises BadInput."""
    if isinstance(source, PydocSource):
        return pydoc_rows(questions=source.format == "messages")
    if isinstance(source, FileSource):
        return file_rows(Path(source.validation if validation and source.validation else source.path))
    return hub_rows(source, source.validation if validation and source.validation else source.split)


def file_rows(path: Path) -> Iterator[Row]:
    """The rows of a .jsonl, .json or .txt file (a .txt is one row), plain or compressed with .xz or .gz.

    Read as they are asked for; no row has more than ROW_BYTES. Raises BadInput naming the file, and the line where
    there is one.
    """
    kind = Path(path.stem if path.suffix in OPENERS else path.name).suffix
    if kind not in SUFFIXES:
        raise BadInput(f"{path}: a data file ends in {', '.join(SUFFIXES)}, each also with .xz or .gz")
    found = {".jsonl": _json_lines, ".json": _json_items, ".txt": _whole}[kind](path)
    first = next(found, None)
    if first is None:
        raise BadInput(f"{path}: is empty")
    yield first
    yield from found


def _json_lines(path: Path) -> Iterator[Row]:
    for number, line in _lines(path):
        if text := line.strip():
            where = f"{path} line {number}"
            try:
                yield Row(where, inputs.parse_json(text))
            except json.JSONDecodeError as error:
                raise BadInput(f"{where}: is not JSON ({error.msg} at column {error.colno})") from None
            except ValueError as error:
                raise BadInput(f"{where}: cannot be used: {error}") from None


def _json_items(path: Path) -> Iterator[Row]:
    with _opened(path) as stream:
        decode = codecs.getincrementaldecoder("utf-8-sig")().decode

        def read(count: int) -> str:
            try:
                with _readable(path):
                    while data := stream.read(max(count, BLOCK)):
                        if text := decode(data):  # none where all there is is a part of a character
                            return text
                return decode(b"", final=True)
            except UnicodeDecodeError as error:
                raise BadInput(f"{path}: is not UTF-8 text ({error.reason})") from None

        for number, value in enumerate(JsonList(path, read, ROW_BYTES).items(), 1):
            yield Row(f"{path} row {number}", value)


def _whole(path: Path) -> Iterator[Row]:
    parts, total = [], 0
    for _, line in _lines(path):
        parts.append(line)
        total += len(line)
        if total > ROW_BYTES:
            what = f"is longer than {inputs.size(ROW_BYTES)}, the most that one text may have"
            raise BadInput(f'{path}: {what}; make it a .jsonl with one {{"text": …}} a line')
    if text := "".join(parts).strip():
        yield Row(str(path), {"text": text})


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number, text) of each line."""
    number = 0
    with _opened(path) as stream, _readable(path):
        while line := stream.readline(ROW_BYTES + 1):
            number += 1
            where = f"{path} line {number}"
            if len(line) > ROW_BYTES:
                raise BadInput(
                    f"{where}: is longer than {inputs.size(ROW_BYTES)}, the most that one row may have; split it"
                )
            if b"\0" in line:
                raise BadInput(f"{where}: is not UTF-8 text (it holds a NUL, as UTF-16 does)")
            try:
                text = line.decode("utf-8-sig")
            except UnicodeDecodeError as error:
                raise BadInput(f"{where}: is not UTF-8 text ({error.reason})") from None
            yield number, text


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    with inputs.open_input(path) as raw:
        if path.suffix not in OPENERS:
            yield raw
            return
        # a packed file's beginning is unpacked once before anything is done with it: to parse what a small file unpacks
        # to can take hours
        with _readable(path), _Unpacked(path, raw) as stream:
            while stream.tell() <= PACKED_BYTES and stream.read(BLOCK):
                pass
        raw.seek(0)
        with io.BufferedReader(_Unpacked(path, raw), BLOCK) as buffered:
            yield buffered


class _Unpacked(io.RawIOBase):
    """What a compressed file unpacks to, as long as that is not too much for its size."""

    def __init__(self, path: Path, raw: BinaryIO):
        self.path, self.raw, self.stream = path, raw, OPENERS[path.suffix](raw)

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.stream.tell()

    def readinto(self, buffer: Any) -> int:
        data = self.stream.read1(len(buffer))
        buffer[: len(data)] = data
        if self.tell() > max(PACKED_BYTES, PACKED_RATIO * self.raw.tell()):
            times = f"more than {PACKED_RATIO} times its size, which text hardly does"
            raise BadInput(f"{self.path}: unpacks to {times}; unpack it yourself if you trust it, and give that file")
        return len(data)


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise BadInput(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None


def hub_rows(source: HubSource, split: str) -> Iterator[Row]:
    """The rows of one split of a data set of the hub. Raises BadInput when it cannot be had."""
    import datasets

    where = f"hub data set {source.id}"
    try:
        dataset = datasets.load_dataset(source.id, source.name, split=split, revision=source.revision)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise BadInput(f"{where}, split {split}: cannot be loaded ({first_line(error)})") from None
    for number, value in enumerate(dataset):
        yield Row(f"{where}, split {split}, row {number}", value)


def pydoc_rows(*, questions: bool) -> Iterator[Row]:
    """The language reference (`pydoc_data.topics`) and the docstrings of the standard library, in a fixed order.

    One text a topic and a module, or, with `questions`, one question and answer a section and a docstring; the rows of
    one topic or module share their key. Nothing is imported or run: docstrings are read off the source files.
    """
    for key, text in _topics().items():
        entries = _sections(text) if questions else [("", text)]
        for title, body in entries:
            yield _documentation(f"topic {key}", f"Explain the Python topic: {title}" if questions else None, body)
    for module, docstrings in _standard_library():
        if questions:
            for kind, name, text in docstrings:
                yield _documentation(f"module {module}", f"What does the Python {kind} {name} do?", text)
        else:
            text = "\n\n".join(f"{name}\n\n{text}" for _, name, text in docstrings)
            yield _documentation(f"module {module}", None, text)


def reference_rows() -> Iterator[Row]:
    """Only the language reference, one text per topic: text that every Python has at hand."""
    for key, text in _topics().items():
        yield _documentation(f"topic {key}", None, text)


def _documentation(key: str, question: str | None, text: str) -> Row:
    where = f"documentation of {key}"
    if question is None:
        return Row(where, {"text": text}, key)
    answer = _cut(text, ANSWER_CHARS)
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Row(where, {"messages": messages}, key)


def _topics() -> dict[str, str]:
    """Topic -> text. Topics contain one another (`compound` has all of `for`), so a paragraph stays only in the longest
    one that has it: otherwise a held-out topic would have been trained on."""
    from pydoc_data.topics import topics

    seen: set[str] = set()
    kept = {}
    for name, text in sorted(topics.items(), key=lambda item: (-len(item[1]), item[0])):
        # only letters and digits: the underline of a title depends on the topic that contains it
        paragraphs = {paragraph: re.sub(r"\W+", "", paragraph) for paragraph in text.strip("\n").split("\n\n")}
        new = "\n\n".join(paragraph for paragraph, letters in paragraphs.items() if letters not in seen)
        seen.update(paragraphs.values())
        if len(new) >= MIN_CHARS:
            kept[name] = new
    return dict(sorted(kept.items()))


def _sections(topic: str) -> Iterator[tuple[str, str]]:
    """(title, body) of each titled section of a topic, in order."""
    _, *parts = re.split(r"^(\S.*)\n([*=\-~^])\2{2,}$", topic, flags=re.MULTILINE)
    for title, body in zip(parts[::3], parts[2::3]):
        if len(body.strip()) >= MIN_CHARS:
            yield title, body.strip("\n")


def _cut(text: str, size: int) -> str:
    """`text` up to the last paragraph that ends within `size` characters, or up to the first one's end."""
    if len(text) <= size:
        return text
    end = text.rfind("\n\n", 0, size)
    if end < 0:
        end = text.find("\n\n", size)
    return text if end < 0 else text[:end]


def _standard_library() -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """(module, [(kind, qualified name, docstring)]) of every public module of the standard library that has some."""
    library = Path(sysconfig.get_path("stdlib"))
    seen: set[str] = set()  # posixpath and ntpath, say, share docstrings
    for top in sorted(sys.stdlib_module_names):
        single = library / f"{top}.py"
        for path in [single] if single.is_file() else sorted((library / top).rglob("*.py")):
            parts = [part for part in path.relative_to(library).with_suffix("").parts if part != "__init__"]
            if any(part.startswith("_") or part in ("test", "tests") for part in parts):
                continue
            module = ".".join(parts)
            found = _docstrings(ast.parse(path.read_bytes()), "module", module)
            new = [entry for entry in found if entry[2] not in seen]
            seen.update(text for _, _, text in new)
            if new:
                yield module, new


def _docstrings(node: Any, kind: str, name: str) -> Iterator[tuple[str, str, str]]:
    text = ast.get_docstring(node)
    if text is not None and len(text) >= MIN_CHARS:
        yield kind, name, text
    if kind not in ("module", "class"):
        return
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not child.name.startswith("_"):
            function = "method" if kind == "class" else "function"
            child_kind = "class" if isinstance(child, ast.ClassDef) else function
            yield from _docstrings(child, child_kind, f"{name}.{child.name}")
