"""torchrun starts all processes anew when one of them has ended: they find each other again."""

from __future__ import annotations

import multiprocessing
import os
import time
from typing import Any

import pytest
import torch
from launching import SECONDS, free_port
from torch.distributed import TCPStore

from liger_convert.utils import processes

def begin(rank: int, port: int, restarts: int, fails: bool, told: Any) -> None:
    """Begins as process `rank` of two under torchrun, the second one later. Tells its rank, a sum over both, and the
    task that it got."""
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "TORCHELASTIC_RESTART_COUNT": restarts}
    os.environ.update(address | {name: str(value) for name, value in numbers.items()})
    time.sleep(rank)
    processes.join(cpu=True)
    total = torch.tensor(float(rank + restarts))
    torch.distributed.all_reduce(total)
    task = None
    if rank == 0:
        processes.announce({"restarts": restarts})
    else:
        task = next(processes.tasks())
    processes.barrier()
    if fails:
        processes.agree_on_exit_code(1)
    told.put((rank, float(total), task))


def test_processes_find_each_other_again_in_the_store_of_those_that_ended() -> None:
    """torchrun's store outlives the processes. Each host counts restarts by itself, so the counts may differ."""
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    fork = multiprocessing.get_context("fork")
    for counts, fails in (((0, 0), True), ((1, 0), True), ((1, 1), False)):
        told = fork.Queue()
        begun = [fork.Process(target=begin, args=(i, server.port, n, fails, told)) for i, n in enumerate(counts)]
        for process in begun:
            process.start()
        try:
            found = sorted(told.get(timeout=SECONDS / 2) for _ in begun)
        finally:
            for process in begun:
                process.kill()
                process.join()
        assert found == [(0, sum(counts) + 1, None), (1, sum(counts) + 1, {"restarts": counts[0]})]


def test_a_process_does_not_wait_forever_for_one_that_never_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(TimeoutError, match="not all of 2 processes have started within 1 seconds"):
        processes._name_of_start(1.0)
