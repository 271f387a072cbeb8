"""The processes of one run: how many there are, which of them reports, and how they wait for each other.

A launcher (`torchrun`, `accelerate launch`, or our own, see `launch.py`) tells each process through its environment how
many there are, which of them it is, and where their store of keys is. The first does what is done once. The others wait
for what it announces, and train with it. They wait at the store and not in a collective, which has a time limit.

The first process to fail prints why and leaves its exit code in the store. The others then end with the same code and
print nothing. Imports torch only where there are several processes.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from liger_convert.utils import interrupts
from liger_convert.utils.errors import BadInput, LinearizeError

POLL = 0.05  # seconds between two looks at the store
GRACE = 5.0  # seconds in which a process ends by itself once another has failed
CONNECT = timedelta(seconds=5)  # in which the store answers
SIGNAL_WAIT = 3.0  # seconds in which a launcher notices that a process was killed, and signals the others
LAUNCHED = "LINEARIZE_LAUNCHED"  # set by our own launcher, which itself reports that a signal ended the run
_NEEDED = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_BY_ACCELERATE = "ACCELERATE_MIXED_PRECISION"  # which `accelerate launch` always sets

_barriers, _announced = itertools.count(), itertools.count()
_left = threading.Event()


class Ended(LinearizeError):
    """Another process of this run has failed, and has said why."""

    def __init__(self, code: int):
        super().__init__("another process of this run has failed")
        self.exit_code = code


def count() -> int:
    """How many processes work on this run."""
    size = os.environ.get("WORLD_SIZE", "1")
    return int(size) if size.isdecimal() else 1


def rank() -> int:
    """Which of them this is, from 0."""
    return int(os.environ.get("RANK", "0")) if count() > 1 else 0


def is_first() -> bool:
    """Whether this is the process that writes files and prints."""
    return rank() == 0


def check_launch(gpus: int | None) -> bool:
    """Whether `--gpus` asks for processes that are still to be started. Raises BadInput where a launcher started fewer
    than it was asked for, or did not tell them of each other."""
    size = os.environ.get("WORLD_SIZE")
    if size is not None:
        if not size.isdecimal() or not int(size):
            raise BadInput(f"WORLD_SIZE is {size!r} and should be a number of processes; unset it")
        missing = [name for name in _NEEDED if not os.environ.get(name)]
        if count() > 1 and missing:
            lost = f"WORLD_SIZE is {size}, but {missing[0]} is not set, so the processes cannot find each other"
            raise BadInput(f"{lost}; start them with torchrun, or unset it and give --gpus {size}")
        if gpus is not None and gpus != count():
            raise BadInput(f"--gpus {gpus}: the launcher started {size} processes; leave out --gpus")
        return False
    if _BY_ACCELERATE in os.environ and ("MASTER_ADDR" in os.environ or (gpus or 1) > 1):
        how = "give it --multi_gpu, or leave it out and give --gpus alone"
        raise BadInput(f"accelerate launch started one process where several are asked for; {how}")
    return (gpus or 1) > 1


def join(cpu: bool) -> None:
    """Makes this process one of the group that exchanges gradients, over gloo with `cpu`, else over NCCL; all call it.
    Nothing where there is one process. Raises BadInput where processes would have to share a GPU."""
    if count() == 1:
        return
    import torch
    from accelerate import PartialState

    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not cpu and here > torch.cuda.device_count():
        seen = torch.cuda.device_count()
        raise BadInput(f"{here} processes were started on a machine with {seen} GPUs; start one for each GPU at most")
    PartialState(cpu=cpu)
    threading.Thread(target=_end_with_others, daemon=True).start()


def leave() -> None:
    """Ends the group, which all processes do at the end of a run that did not fail."""
    if count() == 1:
        return
    import torch

    _store().add("left", 1)
    if is_first():  # which may keep the store
        _wait(lambda: _store().add("left", 0) >= count())
    _left.set()
    torch.distributed.destroy_process_group()


def announce(task: dict[str, Any] | None) -> None:
    """Has the other processes do `task`, plain JSON, see `tasks`; None ends them."""
    if count() > 1:
        _store().set(f"task/{next(_announced)}", json.dumps(task))


def tasks() -> Iterator[dict[str, Any]]:
    """What the first process announces, one after the other, until the run ends. Raises Ended when it fails."""
    for number in itertools.count():
        key = f"task/{number}"
        _wait(lambda key=key: _store().check([key]))  # type: ignore[misc]
        if (task := json.loads(_store().get(key))) is None:
            return
        yield task


def barrier() -> None:
    """Waits for all processes, however long that takes. Raises Ended when one fails."""
    if count() > 1:
        key = f"barrier/{next(_barriers)}"
        _store().add(key, 1)
        _wait(lambda: _store().add(key, 0) >= count())


def agree_on_exit_code(code: int, *, unexpected: bool = False) -> tuple[int, bool]:
    """After this process failed with `code`: the exit code with which all processes end, and whether this is the one
    that prints the error.

    unexpected: another process that was killed may have caused the failure, so the launcher's signal is waited for.
    """
    if count() == 1:
        return code, True
    try:
        if unexpected:
            code = _wait_for_signal(code)
        mine = f"{rank()} {code}"
        first = _store().compare_set("failed", "", mine).decode()
    except (RuntimeError, OSError, KeyError, ValueError):  # the launcher is gone, or has told of no store
        return code, is_first()
    return int(first.split()[1]), first == mine and not (code > 128 and LAUNCHED in os.environ)


def _wait_for_signal(code: int) -> int:
    """`code`, or that of the signal that the launcher sends to all when one process was killed."""
    until = time.monotonic() + SIGNAL_WAIT
    while time.monotonic() < until and interrupts.received() is None and _failed() is None:
        try:
            time.sleep(POLL)
        except KeyboardInterrupt:
            break
    received = interrupts.received()
    return code if received is None else 128 + received


def _wait(is_ready: Callable[[], bool]) -> None:
    while not is_ready():
        if (code := _failed()) is not None:
            raise Ended(code)
        time.sleep(POLL)  # in Python, so that a signal is not kept waiting


def _failed() -> int | None:
    """The exit code of the process that failed first; None while none has."""
    return int(_store().get("failed").split()[1]) if _store().check(["failed"]) else None


@functools.cache
def _store() -> Any:
    return _connect()


def _connect() -> Any:
    """A connection to the store that torch.distributed uses as well, with keys of our own."""
    from torch.distributed import PrefixStore, TCPStore

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    client = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=CONNECT)
    return PrefixStore(f"linearize/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", client)


def _end_with_others() -> None:
    """Ends this process some seconds after another one has failed, as it may wait for that one in a collective."""
    store, code = _connect(), 1  # its own connection: one at a time is served
    try:
        while not store.check(["failed"]):
            if _left.wait(1.0):
                return
        code = int(store.get("failed").split()[1])
    except (RuntimeError, OSError):  # the store has ended with its process
        pass
    if not _left.wait(GRACE):
        os._exit(code)
