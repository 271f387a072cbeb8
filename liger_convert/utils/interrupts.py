"""Handles Ctrl-C (SIGINT), SIGTERM and a closed terminal (SIGHUP).

The first two end a command within GRACE seconds, during which training saves a checkpoint. SIGHUP is ignored.
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

GRACE = 8.0  # seconds from a signal until the process ends, whatever it is doing
SAVING = 6.0  # of these, the seconds that `deferred` gives the work to save
STOPPING = (signal.SIGINT, signal.SIGTERM)

_received: int | None = None  # the first signal to stop
_deferring = False
_finishing = 0  # how many `finishing` blocks the main thread is in
_owed = False  # a signal came in such a block


class Stopped(KeyboardInterrupt):
    """SIGINT or SIGTERM asked the command to stop."""


def received() -> int | None:
    """The first signal that asked the command to stop, None if there was none."""
    return _received


@contextlib.contextmanager
def handled(last_words: str) -> Iterator[None]:
    """Context in which SIGINT and SIGTERM raise Stopped, and SIGHUP is ignored.

    If the block has not ended GRACE seconds later, for example in a long matmul or waiting for a disk, the process
    writes `last_words` to stderr, unless they are empty, and exits at once. Python delivers signals only to the main
    thread; in another thread this does nothing.
    """
    global _received
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _received = None
    # a signal that the parent process made us ignore, as in a background job of a shell, stays ignored
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
        waker.close()  # this also ends the thread
        for number, handler in before.items():
            signal.signal(number, handler)
        _received = None


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Context in which the first signal to stop does not raise Stopped at once.

    The work should call `received()` regularly, save, and raise Stopped. Stopped is raised anyway after SAVING seconds,
    on a second signal, or at the end of the block.
    """
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


@contextlib.contextmanager
def finishing() -> Iterator[None]:
    """Context for a short clean-up, which a signal to stop, such as a second Ctrl-C, does not leave half done.

    It raises Stopped at the end of the block. A signal long before it can still end the process, see `handled`.
    """
    global _finishing, _owed
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _finishing += 1
    try:
        yield
    finally:
        _finishing -= 1
        if _owed and not _finishing:
            _owed = False
            raise Stopped


def _stop(number: int, frame: FrameType | None) -> None:
    global _received, _owed
    first, _received = _received is None, _received or number
    if _finishing:
        _owed = True
        return
    if not (first and _deferring):
        raise Stopped
    signal.setitimer(signal.ITIMER_REAL, SAVING)


def _late(number: int, frame: FrameType | None) -> None:
    raise Stopped


def _end_late(watched: socket.socket, ended: threading.Event, last_words: str) -> None:
    """Ends the process GRACE seconds after a signal to stop. The bytes received from `watched` are signal numbers."""
    with watched:
        while numbers := watched.recv(64):
            stopping = [number for number in numbers if number in STOPPING]
            if stopping and not ended.wait(GRACE):
                with contextlib.suppress(OSError, ValueError):
                    if last_words:
                        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"error: {last_words}\n".encode())
                os._exit(128 + stopping[0])
