"""Reads rows from data files: .txt, .jsonl, .json, .csv and .parquet, compressed or not, a single file or a folder.

Files are read lazily. Only the current row and a bounded buffer around it are held in memory.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import gzip
import io
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from liger_convert.io import inputs
from liger_convert.io.json_list import JsonList
from liger_convert.utils.errors import BadInput, first_line

PARQUET = ".parquet"  # compresses its columns itself

ROW_BYTES = 64 << 20  # maximum size of a row; a context of ten million tokens is about 45 MB of text
BLOCK = 1 << 20
# A .txt is split into documents of at most this many characters, if possible at a blank line. That is several thousand
# tokens, like the rows of most recipes, and lets part of a single file be held out.
DOCUMENT_CHARS = 32 << 10
# Maximum compression ratio. Text compresses by a factor of 4 to 10, repeated sentences by 100 and more, zeros by 7,000.
# A file may always unpack to PACKED_BYTES, so that small files of repeated sentences can be read.
PACKED_RATIO = 100
PACKED_BYTES = 32 << 20
NUL = "it contains a NUL, as UTF-16 does"
PARQUET_ROWS = 16  # rows of a .parquet file in memory at a time


@dataclass(frozen=True, slots=True)
class DataRow:
    """One row. value: its JSON value. where: its name in error messages ("x.jsonl line 3"). key: rows with the same key
    are held out together; None makes the row's text its key."""

    where: str
    value: Any
    key: str | None = None


def file_rows(path: Path) -> Iterator[DataRow]:
    """Yields the rows of a data file, or of all data files below a folder, sorted by name.

    A .txt longer than DOCUMENT_CHARS gives one row for each piece. Raises BadInput, naming the file and the line or row
    if there is one, for a file that cannot be read and for a text row of more than ROW_BYTES.
    """
    if path.is_dir():
        files = _data_files(path)
        if not files:
            raise BadInput(f"{path}: is a folder without a data file; {_known()}")
        for file in files:
            yield from file_rows(file)
        return
    reader = _reader(path)
    if reader is None:
        raise BadInput(f"{path}: {_known()}")
    found = reader(path)
    first = next(found, None)
    if first is None:
        raise BadInput(f"{path}: is empty")
    yield first
    yield from found


def _data_files(folder: Path) -> list[Path]:
    """The paths below a folder that have the name of a data file, sorted. One that cannot be read is refused later.
    Hidden folders, as notebooks and version control leave them, are skipped like hidden files. Raises BadInput for
    other folders whose files would silently be missing, and for data in a format that is not supported."""

    def refuse(error: OSError) -> None:
        raise BadInput(f"{error.filename}: cannot be read ({error.strerror})")

    found = []
    for place, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if links := [name for name in sorted(folders) if os.path.islink(Path(place, name))]:
            what = "is a link to a folder, and links to folders are not followed"
            raise BadInput(f"{Path(place, links[0])}: {what}; name that folder as a source of its own, or move it here")
        for name in sorted(names):
            if is_data_file(Path(name)):
                found.append(Path(place, name))
            elif not name.startswith(".") and Path(name).suffix.lower() in DATA:
                raise BadInput(f"{Path(place, name)}: cannot be read; {_known()}; convert it, or move it elsewhere")
    return sorted(found)


def is_data_file(path: Path) -> bool:
    """Whether a file in a folder of data would be read, by its name."""
    return _reader(path) is not None and not path.name.startswith(".")


def _reader(path: Path) -> Callable[[Path], Iterator[DataRow]] | None:
    packed = path.suffix in OPENERS
    kind = Path(path.stem if packed else path.name).suffix
    return None if packed and kind == PARQUET else READERS.get(kind)


def _known() -> str:
    *plain, _ = READERS
    *some, last = OPENERS
    return f"a data file ends in {', '.join(plain)}, each also with {', '.join(some)} or {last}, or in {PARQUET}"


def _json_lines(path: Path) -> Iterator[DataRow]:
    for number, line in _lines(path):
        if text := line.strip():
            where = f"{path} line {number}"
            try:
                yield DataRow(where, inputs.parse_json(text))
            except json.JSONDecodeError as error:
                raise BadInput(f"{where}: is not JSON ({error.msg} at column {error.colno})") from None
            except ValueError as error:
                raise BadInput(f"{where}: cannot be used: {error}") from None


def _json(path: Path) -> Iterator[DataRow]:
    """Yields the items of a JSON list. A file that begins with an object is read as JSON lines, since many datasets use
    .json for these."""
    with _opened(path) as stream:
        read = _Decoded(path, stream).read
        begin = read(BLOCK)
        if not begin.lstrip().startswith("{"):
            parts = iter([begin])
            values = JsonList(path, lambda count: next(parts, None) or read(count), ROW_BYTES).items()
            yield from (DataRow(f"{path} row {number}", value) for number, value in enumerate(values, 1))
            return
    yield from _json_lines(path)


def _documents(path: Path) -> Iterator[DataRow]:
    with _opened(path) as stream:
        read = _Decoded(path, stream).read
        text, line, where = read(BLOCK), 1, str(path)
        while text:
            while len(text) <= DOCUMENT_CHARS and (more := read(BLOCK)):
                text += more
            end = document_end(text, DOCUMENT_CHARS // 2, DOCUMENT_CHARS)
            if end < len(text) or line > 1:
                where = f"{path} line {line}"
            if document := text[:end].strip():
                yield DataRow(where, {"text": document})
            line += text.count("\n", 0, end)
            text = text[end:]


def document_end(text: str, least: int, most: int) -> int:
    """The end of a first document of at most `most` characters in `text`: the end of the text, or else the last blank
    line, line end or space after the first `least` characters, in this order of preference."""
    if len(text) <= most:
        return len(text)
    for mark in ("\n\n", "\n", " "):
        if (found := text.rfind(mark, max(least, 0), most)) >= 0:
            return found + len(mark)
    return most


def _csv(path: Path) -> Iterator[DataRow]:
    limit = csv.field_size_limit(ROW_BYTES)
    lines = _lines(path)
    blank, header = next(((number - 1, line) for number, line in lines if not line.isspace()), (0, ""))
    try:
        reader = csv.DictReader(chain([header], (line for _, line in lines)), strict=True)
        _refuse_twice(f"{path} line {blank + 1}", [name for name in reader.fieldnames or [] if name])
        for value in reader:
            where = f"{path} line {blank + reader.line_num}"
            if None in value:
                raise BadInput(f"{where}: has more fields than the first line, which names the columns")
            yield DataRow(where, value)
    except csv.Error as error:
        raise BadInput(f"{path} line {blank + reader.reader.line_num}: is not CSV ({error})") from None
    finally:
        csv.field_size_limit(limit)


def _refuse_twice(where: str, columns: list[str]) -> None:
    """Of columns of one name, a row would hold only the last."""
    if twice := [name for name in columns if columns.count(name) > 1]:
        raise BadInput(f"{where}: names the column {twice[0]!r} twice; give each column a name of its own")


def _parquet(path: Path) -> Iterator[DataRow]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    with inputs.open_input(path) as raw:
        try:
            file = ParquetFile(raw)
            _refuse_twice(str(path), file.schema_arrow.names)
            groups = [file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups)]
            if sum(groups) > max(PACKED_BYTES, PACKED_RATIO * path.stat().st_size):
                raise _bomb(path)
            number = 0
            for batch in file.iter_batches(PARQUET_ROWS):
                for value in batch.to_pylist():
                    number += 1
                    yield DataRow(f"{path} row {number}", without_nulls(value))
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise BadInput(f"{path}: cannot be read as a parquet file ({first_line(error)})") from None


def without_nulls(value: Any, depth: int = 0) -> Any:
    """A row of a table without the nulls that its format has added: a struct, such as a tool's parameters, has all the
    fields that it has in any row. The columns of the row itself stay, even if null."""
    if isinstance(value, dict):
        return {
            name: without_nulls(field, depth + 1) for name, field in value.items() if field is not None or not depth
        }
    return [without_nulls(item, depth + 1) for item in value] if isinstance(value, list) else value


def _zst(raw: BinaryIO) -> Any:
    import pyarrow

    return pyarrow.input_stream(raw, compression="zstd")


READERS: dict[str, Callable[[Path], Iterator[DataRow]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".txt": _documents,
    ".csv": _csv,
    PARQUET: _parquet,
}
OPENERS: dict[str, Callable[[BinaryIO], Any]] = {".xz": lzma.open, ".gz": gzip.open, ".zst": _zst}
# Endings of files with data, in small letters; a folder may have other files as well, such as a README.md.
DATA = {*READERS, *OPENERS, ".ndjson", ".tsv", ".arrow", ".feather", ".orc", ".avro", ".bz2", ".lz4", ".zip", ".tar"}


class _Decoded:
    """Decodes a stream of UTF-8 in blocks, with the line ends of Windows as those of anyone else."""

    def __init__(self, path: Path, stream: BinaryIO):
        self.path, self.stream, self.lines = path, stream, 1
        self.decode = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8-sig")(), translate=True).decode

    def read(self, count: int) -> str:
        """The text of the next max(count, BLOCK) bytes or less; empty only at the end. Raises BadInput, naming the
        line, if it is not UTF-8 text."""
        try:
            with _readable(self.path):
                while data := self.stream.read(max(count, BLOCK)):
                    if b"\0" in data:
                        line = self.lines + data.count(b"\n", 0, data.index(b"\0"))
                        raise _not_text(f"{self.path} line {line}", NUL)
                    text = self.decode(data)
                    self.lines += data.count(b"\n")
                    if text:  # empty if the data is only part of a character
                        return text
            return self.decode(b"", final=True)
        except UnicodeDecodeError as error:
            line = self.lines + error.object.count(b"\n", 0, error.start)
            raise _not_text(f"{self.path} line {line}", error.reason) from None


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (number, text) for each line. Raises BadInput for a line that is too long or not UTF-8 text."""
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
                raise _not_text(where, NUL)
            try:
                text = line.decode("utf-8-sig")
            except UnicodeDecodeError as error:
                raise _not_text(where, error.reason) from None
            yield number, text


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    if path.suffix not in OPENERS:
        with inputs.open_input(path) as raw:
            yield raw
        return
    # The first PACKED_BYTES are decompressed once before any parsing, to detect decompression bombs: parsing what a
    # small file unpacks to can take hours.
    with inputs.open_input(path) as raw, _readable(path):
        stream = _Unpacked(path, raw)
        while stream.count <= PACKED_BYTES and stream.read(BLOCK):
            pass
    with inputs.open_input(path) as raw, io.BufferedReader(_Unpacked(path, raw), BLOCK) as buffered:
        yield buffered


class _Unpacked(io.RawIOBase):
    """The decompressed content of a file. Raises BadInput when it becomes too large for the file's size."""

    def __init__(self, path: Path, raw: BinaryIO):
        self.path, self.raw, self.count = path, raw, 0
        self.stream = OPENERS[path.suffix](raw)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.stream.read1(len(buffer))
        buffer[: len(data)] = data
        self.count += len(data)
        if self.count > max(PACKED_BYTES, PACKED_RATIO * self.raw.tell()):
            raise _bomb(self.path)
        return len(data)


def _not_text(where: str, reason: str) -> BadInput:
    return BadInput(f"{where}: is not UTF-8 text ({reason}); save it as UTF-8")


def _bomb(path: Path) -> BadInput:
    times = f"more than {PACKED_RATIO} times its size, which text rarely does"
    return BadInput(f"{path}: unpacks to {times}; unpack it yourself if you trust it, and give that file")


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise BadInput(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
