"""Initializes the processes of a pool. Imports nothing large, so that a worker ends with its parent from early on."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable
from typing import Any


def pickled(work: Callable[..., None]) -> bytes:
    """Pickles `work` for `begin`, so that the modules it needs are imported only when `begin` unpickles it."""
    return pickle.dumps(work)


def begin(work: bytes, *shared: Any) -> None:
    """The initializer of a worker process.

    The worker exits when its parent ends, however that ends, and leaves Ctrl-C to the parent. Then it calls `work`, see
    `pickled`, with the arguments `shared`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    pickle.loads(work)(*shared)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
