"""Robust standard output and error: either may be closed, or fail to be written, at any time."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator
from typing import Any


class SafeStream:
    """A text stream that can still be written to after its reader is gone. Such output is dropped.

    error: the last write error with another cause than a missing reader, such as a full disk; None if there was none.
    """

    def __init__(self, stream: Any):
        self._stream = stream
        self.error: OSError | None = None
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # tables have characters that a terminal may lack

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._kept():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._kept():
            self._stream.flush()

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        try:
            yield
        except ValueError:
            if not self._stream.closed:  # a library's log handler may use this stream after it was closed
                raise
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):  # not because the reader ended or the terminal was closed
                self.error = error
            # also drops buffered output, which would fail again when the interpreter exits
            with contextlib.suppress(OSError, ValueError):
                devnull = os.open(os.devnull, os.O_WRONLY)
                os.dup2(devnull, self._stream.fileno())
                os.close(devnull)


@contextlib.contextmanager
def safe_streams() -> Iterator[tuple[SafeStream, SafeStream]]:
    """Context in which `sys.stdout` and `sys.stderr` are SafeStreams; yields both."""
    # opens missing descriptors: otherwise the next opened file would get the number of a closed stream, and its output
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    before = sys.stdout, sys.stderr
    out, err = (SafeStream(stream if stream is not None else open(os.devnull, "w")) for stream in before)  # noqa: SIM115
    sys.stdout, sys.stderr = out, err
    try:
        yield out, err
    finally:
        out.flush()
        err.flush()
        sys.stdout, sys.stderr = before
