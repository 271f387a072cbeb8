"""Ctrl-C, SIGTERM and a terminal that is closed.

The first two end a command within GRACE seconds, in which training saves where it is. The third ends nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from types import FrameType

GRACE = 8.0  # seconds from a signal to the end of the process, whatever it is doing
SAVING = 6.0  # of these, for what `deferred` lets end first
STOPPING = (signal.SIGINT, signal.SIGTERM)

_received: int | None = None  # the first signal to stop
_deferring = False


class Stopped(KeyboardInterrupt):
    """SIGINT or SIGTERM asked the command to stop."""


def received() -> int | None:
    """The signal that asked the command to stop, None so far."""
    return _received


@contextlib.contextmanager
def handled(last_words: str) -> Iterator[None]:
    """While the block runs, SIGINT and SIGTERM raise Stopped in it, and SIGHUP is ignored.

    A process that is not out of the block GRACE seconds later, because it waits for a long product or a disk, writes
    `last_words`, unless they are empty, to stderr and ends at once. Only the main thread gets signals; on another, the
    block is just run.
    """
    global _received
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _received = None
    # a signal that our parent has us ignore, as nohup does, stays ignored
    ours = [number for number in STOPPING if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, _stop) for number in ours}
    before[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    waker, watched = socket.socketpair()
    waker.setblocking(False)
    old_waker = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    ended = threading.Event()
    threading.Thread(target=_end_late, args=(watched, ended, last_words), daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        signal.set_wakeup_fd(old_waker)
        waker.close()  # ends the thread, too
        for number, handler in before.items():
            signal.signal(number, handler)
        _received = None


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """In this block the first signal to stop waits: the work asks for `received()` now and then, saves, and raises
    Stopped. After SAVING seconds, and at a second signal, Stopped is raised all the same; at the latest at the end."""
    global _deferring
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, _late)
    _deferring = True
    try:
        yield
    finally:
        _deferring = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    if _received is not None:
        raise Stopped


def _stop(number: int, frame: FrameType | None) -> None:
    global _received
    first, _received = _received is None, _received or number
    if not (first and _deferring):
        raise Stopped
    signal.setitimer(signal.ITIMER_REAL, SAVING)


def _late(number: int, frame: FrameType | None) -> None:
    raise Stopped


def _end_late(watched: socket.socket, ended: threading.Event, last_words: str) -> None:
    """Ends the process GRACE seconds after a signal to stop. The bytes that arrive are the numbers of signals."""
    with watched:
        while numbers := watched.recv(64):
            stopping = [number for number in numbers if number in STOPPING]
            if stopping and not ended.wait(GRACE):
                with contextlib.suppress(OSError, ValueError):
                    if last_words:
                        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"error: {last_words}\n".encode())
                os._exit(128 + stopping[0])
