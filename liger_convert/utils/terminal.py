"""Standard output and error of a command, which may be closed, full or gone at any moment."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator
from typing import Any


class SafeStream:
    """A text stream that a command can go on writing to after its reader is gone: the rest is dropped.

    `error` is what was lost to something else than a reader that left, such as a full disk; None when nothing was.
    """

    def __init__(self, stream: Any):
        self._stream = stream
        self.error: OSError | None = None
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a table's lines and signs must not fail where there is only ASCII

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
            if not self._stream.closed:  # a library's log handler may hold this stream longer than it lives
                raise
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):  # the reader ended, the terminal was closed
                self.error = error
            # also for what is buffered, which would fail again when the interpreter ends
            with contextlib.suppress(OSError, ValueError):
                devnull = os.open(os.devnull, os.O_WRONLY)
                os.dup2(devnull, self._stream.fileno())
                os.close(devnull)


@contextlib.contextmanager
def safe_streams() -> Iterator[tuple[SafeStream, SafeStream]]:
    """While the block runs, `sys.stdout` and `sys.stderr` are SafeStreams; gives both."""
    # else the next file that is opened would take the place of a closed stream and get what is written to it
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
