"""Launches of several processes, and what they have learned."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from stages import folders
from torch import Tensor

from liger_convert.training.merge import load_chain

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]
SECONDS = 60  # that a launch may take once its processes have begun; a hung one fails its test


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """As in a process that was launched, see `given_jobs`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def environment(**changes: str) -> dict[str, str]:
    path = os.pathsep.join(map(str, [ROOT, ROOT / "kernels", SUPPORT]))
    without = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    kept = {name: value for name, value in os.environ.items() if name not in without}
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | changes


def torchrun(processes: int, *words: str | Path) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [*launcher, *map(str, words)]


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return int(server.getsockname()[1])


def workers(out: str) -> dict[int, int]:
    """The processes of the run `out`, by rank."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (folder / "environ").read_bytes().split(b"\0")
            words = (folder / "cmdline").read_bytes().split(b"\0")
            ranks = [int(v[5:]) for v in variables if v.startswith(b"RANK=")]
            if ranks and out.encode() in words:
                found[ranks[0]] = int(folder.name)
    return found


def alive(pid: int) -> bool:
    """Whether a process runs, and is not one that has ended and waits to be noticed."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def stopped_when(command: list[str], home: Path, out: str, written: str, number: int) -> tuple[int, str, list[int]]:
    """Runs `command`, which starts several processes, in `home`. As soon as the run's folder `out` has a file like
    `written`, sends it a signal: SIGKILL to one of the processes, another one to the launcher.

    Returns the exit code, what was said on stderr, and which processes are still alive.
    """
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=home, env=environment(), **pipes) as process:
        until = time.monotonic() + SECONDS
        while not list((home / out).glob(written)) and time.monotonic() < until:
            time.sleep(0.1)
        ranks = workers(out)
        os.kill(ranks[1] if number == signal.SIGKILL else process.pid, number)
        _, errors = process.communicate(timeout=SECONDS)
    return process.returncode, errors, [pid for pid in ranks.values() if alive(pid)]


def spread(
    processes: int, folder: Path, jobs: list[dict[str, Any]], script: str = "ranks.py", seconds: int = 2 * SECONDS
) -> subprocess.CompletedProcess[str]:
    """Does `jobs` of a script of this folder in so many processes."""
    file = folder / f"jobs-{len(list(folder.glob('jobs-*')))}.json"
    file.write_text(json.dumps(jobs))
    command = torchrun(processes, SUPPORT / script, file)
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=seconds)


def said(ended: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """What the first process said of each job, of which none has failed."""
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]


def told(processes: int, folder: Path, jobs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Does `jobs`, of which none fails: what the first process said of each, by the name of its folder."""
    found = said(spread(processes, folder, jobs))
    return dict(zip((Path(job["out"]).name for job in jobs), found, strict=True))


def learned(out: Path | str, **changes: Any) -> dict[str, Tensor]:
    """By how much a stage changed each weight. changes: of the base's config."""
    model = folders(**changes)[1]
    before, after = (load_chain(model, results).state_dict() for results in ([], [Path(out) / "result"]))
    return {name: after[name] - value for name, value in before.items() if value.is_floating_point()}


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Between two changes, as a fraction of the second."""
    size = sum(float(value.double().square().sum()) for value in theirs.values())
    return (sum(float((ours[name] - theirs[name]).double().square().sum()) for name in theirs) / size) ** 0.5
