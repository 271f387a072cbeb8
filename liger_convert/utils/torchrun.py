"""Starts a command in several processes on this machine, as torchrun does, and reports in one sentence how they
ended."""

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


class EndedBySignal(LinearizeError):
    """A signal ended the processes. number: of the signal."""

    def __init__(self, sentence: str, number: int):
        super().__init__(sentence)
        self.exit_code = 128 + number


def launch(processes: int, words: Sequence[str], resumed: str) -> None:
    """Runs `linearize` with the arguments `words` in `processes` processes, and returns when all have succeeded.

    resumed: how to resume after a signal, for the error message. Raises Ended if a process failed and has printed why,
    and EndedBySignal if a signal ended one or all.
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
        local_addr="localhost",  # a host may not be able to resolve its own name
        max_restarts=0,
        signals_to_handle="SIGINT,SIGTERM",  # not SIGHUP: closing the terminal does not end the run
    )
    # the processes import the package from where this one did, not from their working directory
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // processes)))
    os.environ[LAUNCHED] = "1"
    logging.disable(logging.CRITICAL)  # torch would also log the failures
    try:
        elastic_launch(config, sys.executable)("-P", "-m", "liger_convert.cli", *words)
    except SignalException as error:
        raise EndedBySignal(f"interrupted; {resumed}", error.sigval) from None
    except ChildFailedError as error:
        raise _told(error.failures, resumed) from None
    finally:
        logging.disable(logging.NOTSET)


def _told(failures: dict[int, Any], resumed: str) -> LinearizeError:
    """The error that reports these failures, by rank. A killed process is the cause; if there is none, the process that
    failed first determines the exit code."""
    killed = {rank: -failure.exitcode for rank, failure in failures.items() if failure.exitcode < 0}
    if killed:
        rank, number = min(killed.items())
        what = f"process {rank} of this run was killed by {signal.Signals(number).name}"
        hint = ", perhaps for lack of memory" if number == signal.SIGKILL else ""
        return EndedBySignal(f"{what}{hint}; {resumed}", number)
    rank, first = min(failures.items(), key=lambda failed: failed[1].timestamp)
    if first.exitcode > 128:
        number = first.exitcode - 128
        return EndedBySignal(
            f"process {rank} of this run was stopped by {signal.Signals(number).name}; {resumed}", number
        )
    return Ended(first.exitcode)
