"""Starts a command in several processes of this machine, as torchrun does, and tells in one sentence how they ended."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from typing import Any

from liger_convert.utils.errors import LinearizeError
from liger_convert.utils.processes import LAUNCHED, Ended


class Stopped(LinearizeError):
    """A signal ended the processes."""

    def __init__(self, sentence: str, number: int):
        super().__init__(sentence)
        self.exit_code = 128 + number


def launch(processes: int, words: Sequence[str], resumed: str) -> None:
    """Runs `linearize` with `words` in so many processes, and returns when all have ended well.

    resumed: what to do to go on after a signal, for the sentence. Raises Ended when a process failed, which has said
    why, and Stopped when a signal ended one or all.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",  # a host's own name may not be known to it
        max_restarts=0,
        signals_to_handle="SIGINT,SIGTERM",  # a terminal that is closed ends nothing
    )
    # the processes find the package where this one did, and not in the folder that they happen to start in
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // processes)))
    os.environ[LAUNCHED] = "1"
    logging.disable(logging.CRITICAL)  # torch's own account of the same failures
    try:
        elastic_launch(config, sys.executable)("-P", "-m", "liger_convert.cli", *words)
    except SignalException as error:
        raise Stopped(f"interrupted; {resumed}", error.sigval) from None
    except ChildFailedError as error:
        raise _told(error.failures, resumed) from None
    finally:
        logging.disable(logging.NOTSET)


def _told(failures: dict[int, Any], resumed: str) -> LinearizeError:
    """Of the processes that failed, one that was killed is the cause; else the first one's exit code counts."""
    killed = {rank: -failure.exitcode for rank, failure in failures.items() if failure.exitcode < 0}
    if killed:
        rank, number = min(killed.items())
        what = f"process {rank} of this run was killed by {signal.Signals(number).name}"
        hint = ", perhaps for lack of memory" if number == signal.SIGKILL else ""
        return Stopped(f"{what}{hint}; {resumed}", number)
    rank, first = min(failures.items(), key=lambda failed: failed[1].timestamp)
    if first.exitcode > 128:
        number = first.exitcode - 128
        return Stopped(f"process {rank} of this run was stopped by {signal.Signals(number).name}; {resumed}", number)
    return Ended(first.exitcode)
