"""Reads a JSON list item by item, from a file of any size. Only one item and part of the next are held in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from liger_convert.io import inputs
from liger_convert.utils.errors import BadInput

# An error this close to the end of the text read so far may be due to a literal or an escape that is cut off there.
UNSURE = 16


class JsonList:
    """The list in the file `path`, which is used only in error messages.

    read: returns the next characters of the file, about as many as its argument says; empty at the end. limit: maximum
    number of characters of an item.
    """

    def __init__(self, path: Path, read: Callable[[int], str], limit: int):
        self.path, self.read, self.limit = path, read, limit
        self.text, self.at, self.ended = "", 0, False
        self.line, self.column = 1, 0  # where self.text begins in the file

    def items(self) -> Iterator[Any]:
        """Yields the values of the list. Raises BadInput, usually with the line, for a file that holds anything
        else."""
        if not (first := self._next()):
            return
        if first != "[":
            raise self._no_list()
        self.at += 1
        if self._next() != "]":
            yield self._value()
            while self._next() == ",":
                self.at += 1
                self._next()
                yield self._value()
        if self._next() != "]":
            raise self._not_json(json.JSONDecodeError("Expecting ',' delimiter", self.text, self.at))
        self.at += 1
        if self._next():
            raise self._not_json(json.JSONDecodeError("Extra data", self.text, self.at))

    def _next(self) -> str:
        """Moves `at` to the next character that is not white space, and returns it; empty at the end of the file."""
        self.at = inputs.skip_blanks(self.text, self.at)
        while self.at == len(self.text) and not self.ended:
            self._fill()
            self.at = inputs.skip_blanks(self.text, self.at)
        return self.text[self.at : self.at + 1]

    def _value(self) -> Any:
        while True:
            try:
                value, end = inputs.decode_json(self.text, self.at)
                if end < len(self.text) or self.ended:  # a number at the end of the text may continue
                    self.at = end
                    return value
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated") or error.pos > len(self.text) - UNSURE
                if self.ended or not cut:
                    raise self._not_json(error) from None
            except ValueError as error:
                raise BadInput(f"{self.path} line {self._line(self.at)}: cannot be used: {error}") from None
            if len(self.text) - self.at > self.limit:
                what = (
                    f"contains an item longer than {inputs.size(self.limit)}, the most that one row may have; split it"
                )
                raise BadInput(f"{self.path} line {self._line(self.at)}: {what}")
            self._fill()

    def _fill(self) -> None:
        """Drops the text that has been processed and reads more, as much as is left. Doubling the text each time bounds
        how often a long item is parsed again."""
        done = self.text[: self.at]
        self.column = len(done) - done.rfind("\n") - 1 if "\n" in done else self.column + len(done)
        self.line += done.count("\n")
        rest = self.text[self.at :]
        more = self.read(len(rest))
        self.text, self.at, self.ended = rest + more, 0, not more

    def _line(self, at: int) -> int:
        return self.line + self.text.count("\n", 0, at)

    def _no_list(self) -> BadInput:
        while not self.ended and len(self.text) <= self.limit:
            self._fill()
        if not self.ended:
            return BadInput(f"{self.path}: does not contain a list; a .json data file is a list of objects")
        try:
            value = inputs.parse_json(self.text)
        except json.JSONDecodeError as error:
            return self._not_json(error)
        except ValueError as error:
            return BadInput(f"{self.path}: cannot be used: {error}")
        return BadInput(
            f"{self.path}: contains a single JSON {type(value).__name__}; a .json data file is a list of objects"
        )

    def _not_json(self, error: json.JSONDecodeError) -> BadInput:
        hint = "; a file with one object per line is named .jsonl" if error.msg == "Extra data" else ""
        column = error.colno + (self.column if error.lineno == 1 else 0)
        where = f"{self.path} line {self.line + error.lineno - 1}"
        return BadInput(f"{where}: is not JSON ({error.msg} at column {column}){hint}")
