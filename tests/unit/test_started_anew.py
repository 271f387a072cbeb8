"""torchrun starts all processes anew when one of them has ended: they find each other again, and go on with the run."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import SECONDS, alive, environment, free_port, torchrun, workers
from runs import weights, write_home
from torch.distributed import TCPStore

from liger_convert.utils import processes

KILLS, LATEST = 10, 20.0  # how often a process is killed, and how many seconds after it began at most
RUN = ["-m", "liger_convert.cli", "run", "recipe.yaml", "--out"]
TRAINED: list[dict[str, Any]] = [
    {"kind": "align", "learning_rates": {"mixer": 1e-2}},
    {"kind": "distill", "learning_rates": {"mixer": 1e-3, "body": 1e-4}, "tokens": 100 * 64, "save_every": 2},
]


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


# --- whole runs


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    write_home(folder, TRAINED)
    return folder


def kill(home: Path, out: str, rank: int, saved: int, before: set[int]) -> set[int]:
    """Kills a process of the run once it has a checkpoint of so many steps. Returns all that were there; before: those
    that have been killed."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        ranks = workers(out)
        done = [int(path.name.split("-")[1]) for path in (home / out).glob("steps/2-distill/checkpoints/checkpoint-*")]
        if len(ranks) == 2 and not before & set(ranks.values()) and max(done, default=0) >= saved:
            os.kill(ranks[rank], signal.SIGKILL)
            return set(ranks.values())
        time.sleep(0.05)
    raise TimeoutError(out)


@pytest.mark.slow
@pytest.mark.parametrize("agents", [1, 2])
def test_a_run_goes_on_when_torchrun_starts_its_processes_anew(home: Path, agents: int) -> None:
    """Also those of two hosts, each with a torchrun of its own. Both processes are killed once."""
    through, out = f"through-{agents}", f"killed-{agents}"
    options: dict[str, Any] = {"cwd": home, "env": environment(), "stdout": subprocess.DEVNULL}

    def start(out: str) -> list[subprocess.Popen[str]]:
        commands = [torchrun(2, "--max-restarts", "4", *RUN, out)]
        if agents == 2:
            where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-id", out]
            words = ["--nnodes", "2", "--nproc-per-node", "1", "--local-addr", "localhost", "--max-restarts", "4"]
            commands = [[sys.executable, "-m", "torch.distributed.run", *where, *words, *RUN, out]] * 2
        return [subprocess.Popen(c, stderr=subprocess.PIPE, text=True, **options) for c in commands]

    def end(started: list[subprocess.Popen[str]]) -> str:
        said = [process.communicate(timeout=2 * SECONDS)[1] for process in started]
        assert [process.returncode for process in started] == [0] * agents, said
        return "".join(said)

    with contextlib.ExitStack() as stack:
        for process in (started := start(out)):
            stack.callback(process.terminate)
        killed = kill(home, out, 1, 20, set())
        kill(home, out, 0, 40, killed)
        assert end(started).count(f"note: the processes were restarted and continue with {out}") == 2
    end(start(through))
    assert weights(home / out) == weights(home / through)
    curves = [json.loads((home / each / "manifest.json").read_text())["steps"]["2-distill"] for each in (out, through)]
    assert curves[0]["loss"] == curves[1]["loss"]


@pytest.mark.slow
def test_a_run_that_is_killed_ten_times_at_random_ends_with_the_same_losses(home: Path) -> None:
    """Whatever the killed process was doing, the other ends within a minute, and both begin again."""
    longer = ["--set", f"stages[1].tokens={1000 * 64}", "--set", "stages[1].save_every=20"]
    options: dict[str, Any] = {"cwd": home, "env": environment(), "stdout": subprocess.DEVNULL}
    draw, left = random.Random(0), []
    with subprocess.Popen(
        torchrun(2, "--max-restarts", str(KILLS + 2), *RUN, "often", *longer),
        stderr=subprocess.PIPE,
        text=True,
        **options,
    ) as process:
        try:
            before: set[int] = set()
            for _ in range(KILLS):
                ranks = wait_for(lambda before=before: begun("often", before))
                time.sleep(draw.uniform(0, LATEST))
                os.kill(ranks[draw.randrange(2)], signal.SIGKILL)
                killed_at = time.monotonic()
                before |= set(ranks.values())
                wait_for(lambda ranks=ranks: not any(alive(pid) for pid in ranks.values()))
                left.append(time.monotonic() - killed_at)
            _, said = process.communicate(timeout=5 * SECONDS)
        finally:
            process.terminate()
    assert process.returncode == 0, said
    assert max(left) < 60, left
    subprocess.run(torchrun(2, *RUN, "never", *longer), stderr=subprocess.DEVNULL, check=True, **options)
    assert weights(home / "often") == weights(home / "never")
    curves = [json.loads((home / out / "manifest.json").read_text())["steps"] for out in ("often", "never")]
    assert all(curves[0][step]["loss"] == curves[1][step]["loss"] for step in ("1-align", "2-distill"))
    print(f"the longest a process was left: {max(left):.1f} seconds; {said.count('were restarted')} times restarted")


def wait_for(found: Callable[[], Any]) -> Any:
    until = time.monotonic() + 2 * SECONDS
    while not (value := found()):
        assert time.monotonic() < until
        time.sleep(0.05)
    return value


def begun(out: str, before: set[int]) -> dict[int, int] | None:
    """The two processes of a run by rank, once both have begun; before: those that have ended."""
    ranks = workers(out)
    return ranks if len(ranks) == 2 and not before & set(ranks.values()) else None


def test_a_run_of_another_launch_is_not_taken_for_its_own(home: Path) -> None:
    """`none` is the name that torchrun gives if it is given none."""
    from liger_convert.pipeline import manifest

    run = home / "of-others"
    run.mkdir()
    assert not manifest.is_own(run)
    with pytest.MonkeyPatch.context() as patches:
        manifest.sign(run)
        assert not manifest.is_own(run), "without a launcher"
        for name in ("one", "none"):
            patches.setenv("TORCHELASTIC_RUN_ID", name)
            assert not manifest.is_own(run)
            manifest.sign(run)
            assert manifest.is_own(run)
        patches.setattr(os, "getppid", lambda: 1)
        assert not manifest.is_own(run)
