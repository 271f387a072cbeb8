"""The two ways a command ends early; the command line turns them into one sentence and an exit code."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator


class LinearizeError(Exception):
    """Something foreseeable went wrong while working (a full disk, a diverged loss): exit code 1, no traceback."""

    exit_code = 1


class BadInput(LinearizeError):
    """What the user gave cannot be used; the message says what is wrong, where, and what is right. Exit code 2."""

    exit_code = 2


@contextlib.contextmanager
def refusing(what: str) -> Iterator[None]:
    """Whatever a library raises over what a user gave becomes BadInput: `what`, and the library's first line. That is
    also a panic of a Rust library, which is no Exception."""
    try:
        yield
    except LinearizeError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise BadInput(f"{what}: {first_line(error)}") from error


def is_panic(error: BaseException) -> bool:
    """Whether a Rust library has panicked, which pyo3 tells by a BaseException of its own that cannot be imported."""
    return type(error).__name__ == "PanicException"


def first_line(error: BaseException) -> str:
    """The first line of a library's error, and the second where the first only announces it, for a sentence of ours."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def nearest(name: object, known: Iterable[str]) -> str | None:
    """The known name that `name` was probably meant to be, or None."""
    return next(iter(difflib.get_close_matches(str(name), list(known), n=1)), None)


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """` (did you mean gla?)`, to stand behind what was wrong; empty where nothing known is near."""
    near = nearest(name, known)
    return f" (did you mean {near}?)" if near else ""
