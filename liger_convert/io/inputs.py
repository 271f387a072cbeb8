"""Safe reading of files that a user names: only regular files, only up to a size limit, and with safe parsing.

Reading a pipe or a device might never end, a huge file would fill the memory, and parsers report their limits in their
own ways. The readers of files here raise BadInput instead.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from io import BufferedReader
from pathlib import Path
from typing import Any

from liger_convert.utils.errors import BadInput

# Maximum size of a config or a shard index; the largest index of a published model has about 15 MB.
JSON_BYTES = 32 << 20

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_BLANKS = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


def require_file(path: Path | str) -> os.stat_result:
    """The stat result of a regular file. Raises BadInput for anything else, and if it does not exist."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        what = "is a link to a file that is not there" if os.path.islink(path) else "there is no such file"
        raise BadInput(f"{path}: {what}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise BadInput(f"{path}: cannot be read ({_reason(error)})") from None
    if not stat.S_ISREG(found.st_mode):
        raise BadInput(f"{path}: is {_KINDS.get(stat.S_IFMT(found.st_mode), 'something else')}, not a file")
    return found


def open_input(path: Path | str) -> BufferedReader:
    """Opens the file at `path` in binary mode. Raises BadInput if it is not a regular file or cannot be read."""
    require_file(path)  # before opening: opening a pipe waits for a writer, and opening a device may do anything
    try:
        return open(path, "rb")
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({_reason(error)})") from None


def read_text(path: Path | str, limit: int) -> str:
    """Reads a file of UTF-8 text, with or without a byte order mark. Raises BadInput if it cannot be read, has more
    than `limit` bytes, or is not UTF-8."""
    with open_input(path) as file:
        try:
            data = file.read(limit + 1)
        except OSError as error:
            raise BadInput(f"{path}: cannot be read ({_reason(error)})") from None
    if len(data) > limit:
        raise BadInput(f"{path}: is too large; a file of this kind has at most {size(limit)}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{path}: cannot be read as text: {error.reason} at byte {error.start}; save it as UTF-8"
        ) from None


def decode_json(text: str, start: int) -> tuple[Any, int]:
    """Parses the JSON value that begins at `start`. Returns the value and its end.

    Raises json.JSONDecodeError for text that is not JSON. Raises ValueError, whose message says what is wrong, for JSON
    that Python or a tokenizer cannot handle.
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
        if _ESCAPED_SURROGATE.search(text, start, end):
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(
            f"it contains \\u{ord(half):04x}, half of a surrogate pair, which is not a character"
        ) from None
    except ValueError:
        raise ValueError("it contains an integer with thousands of digits") from None
    return value, end


def parse_json(text: str) -> Any:
    """Parses `text` as a single JSON value. Raises as `decode_json` does."""
    value, end = decode_json(text, skip_blanks(text, 0))
    if (end := skip_blanks(text, end)) < len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    return value


def skip_blanks(text: str, start: int) -> int:
    """The index of the first character from `start` on that is not JSON white space, or the end of the text."""
    found = _BLANKS.match(text, start)
    assert found is not None
    return found.end()


def is_text(text: str) -> bool:
    """Whether a string can be encoded as UTF-8. Undecodable bytes of command-line arguments, and some YAML escapes,
    become lone surrogates, which cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_text(text: str, what: str) -> None:
    """Raises BadInput, with a message that begins with `what`, if a word of the command line is not UTF-8 text."""
    if not is_text(text):
        encoding = sys.getfilesystemencoding()
        way = "" if encoding == "utf-8" else f"; the encoding of this locale is {encoding}: set PYTHONUTF8=1"
        raise BadInput(f"{what}: contains bytes that are not UTF-8 text{way}")


def size(count: int) -> str:
    """Formats a limit in bytes, such as 64 MiB."""
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
