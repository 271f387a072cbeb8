"""What every process of a pool does first. Imports nothing large: a process that is still importing must end, too."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable
from typing import Any


def pickled(work: Callable[..., None]) -> bytes:
    """`work` for `begin`, whose modules are imported only when it is called."""
    return pickle.dumps(work)


def begin(work: bytes, *shared: Any) -> None:
    """The initializer of a process: it ends with its parent, however that ends, and leaves Ctrl-C to it. Then it does
    `work`, see `pickled`, with what the processes share."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    pickle.loads(work)(*shared)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
