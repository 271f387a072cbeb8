"""The processes of one run: how many there are, which one reports, and how they wait for each other.

A launcher (`torchrun`, `accelerate launch`, or our own, see `torchrun.py`) gives each process its rank, the number of
processes, and the address of their key-value store, through environment variables. The first process does all work that
is done once. The others wait for the tasks that it announces, and train with it. They wait on the store, not in a
collective, because collectives have a timeout.

torchrun restarts the processes after a failure, on each host for a reason and a number of times of its own. Its store
outlives them, with the keys of those that ended. So each start has a name, which the first process makes up and gives
to each of the others that asks for it, and all keys begin with that name.

The first process to fail prints why and puts its exit code into the store. The others then exit with the same code and
print nothing. torch is imported only if there are several processes.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from liger_convert.utils import interrupts
from liger_convert.utils.errors import BadInput, LinearizeError, counted

POLL = 0.05  # seconds between polls of the store
GRACE = 5.0  # seconds that a process has to end by itself after another one has failed
CONNECT = timedelta(seconds=5)  # timeout of the store
JOINING = 600.0  # seconds within which all processes have started
JOINING_TO_FAIL = 20.0  # the same, for a process that has nothing left to do but to say why it failed
SIGNAL_WAIT = 3.0  # seconds within which a launcher notices that a process was killed, and signals the others
LAUNCHED = "LINEARIZE_LAUNCHED"  # set by our own launcher, which reports by itself that a signal ended the run
_NEEDED = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_BY_ACCELERATE = "ACCELERATE_MIXED_PRECISION"  # always set by `accelerate launch`
_LOST = ("by peer", "remote process exited")  # gloo: closed or reset by peer; NCCL

_barriers, _announced, _claims, _given = (itertools.count() for _ in range(4))
_left = threading.Event()
_name: str | None = None  # of this start


class Ended(LinearizeError):
    """Another process of this run has failed, and has printed why. code: its exit code."""

    def __init__(self, code: int):
        super().__init__("another process of this run has failed")
        self.exit_code = code


def count() -> int:
    """The number of processes of this run."""
    size = os.environ.get("WORLD_SIZE", "1")
    return int(size) if size.isdecimal() else 1


def rank() -> int:
    """The rank of this process, from 0."""
    return int(os.environ.get("RANK", "0")) if count() > 1 else 0


def launch_name() -> str:
    """The name of the launch that this process belongs to, the same after torchrun has restarted it. Empty if the
    launcher restarts nothing."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    # torchrun's default, which is that of every launch; its own process is not
    return f"{name} {os.getppid()}" if name == "none" else name


def is_first() -> bool:
    """Whether this is the process that writes files and prints."""
    return rank() == 0


def check_launch(gpus: int | None) -> bool:
    """Whether processes must still be started for `--gpus`, whose value is `gpus`.

    Raises BadInput if a launcher started another number than `--gpus` says, or did not set the environment variables
    by which the processes find each other.
    """
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
    """Joins the process group, over gloo with `cpu` and over NCCL otherwise. All processes call it.

    Does nothing if there is only one process. Raises BadInput if processes would have to share a GPU, and
    LinearizeError if not all of them start.
    """
    if count() == 1:
        return
    import torch
    from accelerate import PartialState
    from torch.distributed import default_pg_timeout, init_process_group

    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not cpu and here > torch.cuda.device_count():
        seen = counted(torch.cuda.device_count(), "GPU")
        raise BadInput(f"{here} processes were started on a machine with {seen}; start one for each GPU at most")
    try:
        store = _connect(f"torch/{_name_of_start(JOINING)}", default_pg_timeout)
    except TimeoutError as error:
        raise LinearizeError(str(error)) from None
    init_process_group("gloo" if cpu else "nccl", store=store, rank=rank(), world_size=count())
    PartialState(cpu=cpu)
    threading.Thread(target=_end_with_others, daemon=True).start()


def leave() -> None:
    """Leaves the process group. All processes call it at the end of a run that did not fail."""
    if count() == 1:
        return
    import torch

    _store().add("left", 1)
    if is_first():  # this process may host the store, so it leaves last
        _wait(lambda: _store().add("left", 0) >= count())
    _left.set()
    torch.distributed.destroy_process_group()


def announce(task: dict[str, Any] | None) -> None:
    """Sends `task`, plain JSON data, to the other processes, see `tasks`. None ends them."""
    if count() > 1:
        _store().set(f"task/{next(_announced)}", json.dumps(task))


def tasks() -> Iterator[dict[str, Any]]:
    """Yields the tasks that the first process announces, until the run ends. Raises Ended if a process fails."""
    for number in itertools.count():
        key = f"task/{number}"
        _wait(lambda key=key: _store().check([key]))  # type: ignore[misc]
        if (task := json.loads(_store().get(key))) is None:
            return
        yield task


def barrier() -> None:
    """Waits for all processes, without a timeout. Raises Ended if one fails."""
    if count() > 1:
        key = f"barrier/{next(_barriers)}"
        _store().add(key, 1)
        _wait(lambda: _store().add(key, 0) >= count())


def from_first(make: Callable[[], Any]) -> Any:
    """What `make` returns in the first process, plain JSON data, in all processes. Only the first one calls it; the
    others wait, without a timeout. Raises Ended if one fails."""
    if count() == 1:
        return make()
    key = f"given/{next(_given)}"
    if is_first():
        _store().set(key, json.dumps(make()))
    _wait(lambda: _store().check([key]))
    return json.loads(_store().get(key))


def claim(name: str) -> bool:
    """Whether this process is the first of this start to claim the piece of work `name`, so that it is the one to do
    it."""
    if count() == 1:
        return True
    token = f"{rank()} {next(_claims)}"  # of this claim, since this process may have claimed it before
    return bool(_store().compare_set(f"claim/{name}", "", token).decode() == token)


def agree_on_exit_code(code: int, *, unexpected: bool = False) -> tuple[int, bool]:
    """For a process that failed with exit code `code`. Returns the exit code that all processes use, and whether this
    process should print its error.

    unexpected: whether the failure may be due to another process having been killed. Then this waits for the signal
    that the launcher sends in that case.
    """
    if count() == 1:
        return code, True
    try:
        if unexpected:
            code = _wait_for_signal(code)
        mine = f"{rank()} {code}"
        first = _store().compare_set("failed", "", mine).decode()
    except TimeoutError:  # not all processes have started
        return code, True
    except (RuntimeError, OSError, KeyError, ValueError):  # the launcher is gone, or gave no store
        return code, is_first()
    return int(first.split()[1]), first == mine and not (code > 128 and LAUNCHED in os.environ)


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error of torch.distributed says that another process does not answer any more. If its machine has
    failed, the launcher of this process does not report that."""
    said = str(error)
    return count() > 1 and isinstance(error, RuntimeError) and any(words in said for words in _LOST)


def _wait_for_signal(code: int) -> int:
    """`code`, or the exit code for the signal that the launcher sends to all when a process was killed."""
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
        time.sleep(POLL)  # waits in Python, so that signals are handled promptly


def _failed() -> int | None:
    """The exit code of the process that failed first, None if none has."""
    return int(_store().get("failed").split()[1]) if _store().check(["failed"]) else None


@functools.cache
def _store() -> Any:
    return _connect(f"linearize/{_name_of_start(JOINING_TO_FAIL)}")


def _connect(prefix: str, timeout: timedelta = CONNECT) -> Any:
    """A connection to torch.distributed's store, with a key prefix."""
    from torch.distributed import PrefixStore, TCPStore

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return PrefixStore(prefix, TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout))


@functools.cache
def _host() -> Any:
    """The server of the store, where the launcher has none."""
    from torch.distributed import TCPStore

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(host, port, is_master=True, wait_for_workers=False, multi_tenant=True)


def _name_of_start(seconds: float) -> str:
    """The name of this start of the processes, the same in all of them. Raises TimeoutError if not all processes ask
    for it within so many `seconds`."""
    global _name
    if _name is None:
        _name = _give_name(seconds) if is_first() else _ask_for_name(seconds)
    return _name


def _give_name(seconds: float) -> str:
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        _host()
    store, name, missing = _connect("linearize"), uuid.uuid4().hex, set(range(1, count()))

    def all_know() -> bool:
        for other in sorted(missing):
            if store.check([f"asks/{other}"]):
                store.set(f"answer/{store.get(f'asks/{other}').decode()}", name)
            if store.check([f"{name}/{other}"]):
                missing.discard(other)
        return not missing

    _wait_at_most(seconds, all_know)
    return name


def _ask_for_name(seconds: float) -> str:
    store, own = _connect("linearize", timedelta(seconds=seconds)), uuid.uuid4().hex
    store.set(f"asks/{rank()}", own)
    _wait_at_most(seconds, lambda: store.check([f"answer/{own}"]))
    name: str = store.get(f"answer/{own}").decode()
    store.set(f"{name}/{rank()}", "")
    return name


def _wait_at_most(seconds: float, is_ready: Callable[[], bool]) -> None:
    until = time.monotonic() + seconds
    while not is_ready():
        if time.monotonic() > until:
            raise TimeoutError(f"not all of {count()} processes have started within {seconds:.0f} seconds")
        time.sleep(POLL)


def _end_with_others() -> None:
    """Ends this process GRACE seconds after another one has failed, since it may be waiting for it in a collective."""
    # its own connection, because a connection serves one request at a time
    store, code = _connect(f"linearize/{_name}"), 1
    try:
        while not store.check(["failed"]):
            if _left.wait(1.0):
                return
        code = int(store.get("failed").split()[1])
    except (RuntimeError, OSError):  # the process that hosts the store has ended
        pass
    if not _left.wait(GRACE):
        os._exit(code)
