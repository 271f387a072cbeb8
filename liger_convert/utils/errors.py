"""The two kinds of expected errors, which the command line turns into one sentence and an exit code; and words for
that sentence."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator


class LinearizeError(Exception):
    """A foreseeable failure at run time, such as a full disk or a diverged loss. Exit code 1, no traceback."""

    exit_code = 1


class BadInput(LinearizeError):
    """The user's input cannot be used. The message says what is wrong, where, and what would be right. Exit code 2."""

    exit_code = 2


@contextlib.contextmanager
def refusing(what: str) -> Iterator[None]:
    """Context that turns any error of a library into BadInput, with the message `what` and the error's first line.

    This includes panics of Rust libraries, which do not derive from Exception. A LinearizeError passes unchanged.
    """
    try:
        yield
    except LinearizeError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise BadInput(f"{what}: {first_line(error)}") from error


def is_panic(error: BaseException) -> bool:
    """Whether this is a panic of a Rust library. pyo3 raises it as a BaseException that cannot be imported."""
    return type(error).__name__ == "PanicException"


def first_line(error: BaseException) -> str:
    """The first line of a library's error, for use in a message; the first two if the first one ends with a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def counted(number: int, noun: str) -> str:
    """`1 layer` or `3,000 layers`: the number with the noun, which is given in the singular and takes an s."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def nearest(name: object, known: Iterable[str]) -> str | None:
    """The known name that `name` was probably meant to be, or None."""
    return next(iter(difflib.get_close_matches(str(name), list(known), n=1)), None)


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """A suggestion such as ` (did you mean gla?)`, to append to a message; empty if no known name is close."""
    near = nearest(name, known)
    return f" (did you mean {near}?)" if near else ""
