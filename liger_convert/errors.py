"""The two ways a command ends early; the command line turns them into one sentence and an exit code."""


class LinearizeError(Exception):
    """Something foreseeable went wrong while working (a full disk, a diverged loss): exit code 1, no traceback."""

    exit_code = 1


class BadInput(LinearizeError):
    """What the user gave cannot be used; the message says what is wrong, where, and what is right. Exit code 2."""

    exit_code = 2


def first_line(error: BaseException) -> str:
    """The first line of a library's error, for a sentence of ours."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
