"""Checks and times training on several GPUs, compared with one: `python kernels/bench_scale.py --json scale.json`.

`--gpus 2 4 8` measures on 2, on 4 and on 8 GPUs of a machine; without it, on 2. The parts, on models with random
weights whose layers are all linear, and on random tokens:

- equality: losses and weights after a few steps, for every kind of parallelism, compared with one GPU's in float32. An
  error may be twice that of one GPU in bfloat16. Trainings with a deliberate mistake must exceed this. Only for the
  first number of GPUs.
- ddp: SmolLM2-135M distilled, all weights, with data parallelism.
- fsdp-lora: Llama-3-8B distilled with LoRA, with the weights sharded as well (FSDP2). One GPU could hold all of them.
- fsdp-full: Llama-3-8B distilled, all weights but the embeddings, which does not fit on one GPU.
- sequence: rows split across GPUs, for SmolLM2-135M, compared with a row per GPU, and for layers alone, compared with
  the same row on one GPU.

Each part is measured for each number of GPUs in processes of its own, with a time limit, from TIMEOUTS or --timeout.
So a part that fails or hangs does not cost other parts their numbers. It gets a row that says why. Measurements run at
the same time on different GPUs, so that the whole takes less time; those of fewer GPUs should be named first, because
nothing runs beside one that takes all. A GPU processes the same rows alone and with others. A training is not timed if
its loss at the first step differs from the others of its part, or if its processes end with different weights. With
--profile, tables show where the time of a step goes in the first process: for ddp by its parts, and for fsdp-lora and
fsdp-full by kernels. The --json file is complete after every row. The exit code is 1 if something is wrong. A missed
target, or a case that does not fit into memory, is only reported.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from scale_report import findings, show

PARTS = ["equality", "ddp", "fsdp-lora", "fsdp-full", "sequence"]
ALONE = ["fsdp-lora", "ddp", "equality"]  # parts that also run on one GPU, in this order
COUNTS = [2, 4, 8]  # numbers of GPUs among which the rows of all parts divide
# In seconds. Compiling layers takes a minute, and may take longer with sharded weights.
TIMEOUTS = {"equality": 240, "ddp": 240, "fsdp-lora": 300, "fsdp-full": 300, "sequence": 240}
SCRIPT = Path(__file__).with_name("scale_parts.py")
POLL = 0.1  # seconds
GRACE = 5.0  # seconds that the other processes have to end after one has failed
AHEAD = 2  # tasks whose processes are started early, so that their imports overlap with other tasks
# Allowed relative difference of two losses of random weights on random tokens. On a CPU these are few.
CLOSE, CLOSE_ON_CPU = 0.05, 0.1
TIMES = "step_ms", "tokens_per_s", "profile", "sending_ms", "kernel_ms"  # fields removed from a row with wrong results
TAIL = 30  # last log lines that are kept of a failed process


@dataclass
class Task:
    """A part run by a number of processes, each on its own GPU."""

    part: str
    places: list[int]  # indices of its GPUs
    after: Task | None = None  # a task whose results it needs
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)
    begun: float = 0.0  # by the monotonic clock
    told: int = 0  # rows collected so far
    failed: tuple[float, int] | None = None  # when the first process failed, and its rank
    why: str = ""  # why the task failed

    @property
    def gpus(self) -> int:
        return len(self.places)

    @property
    def name(self) -> str:
        return f"{self.part}-{self.gpus}"

    @property
    def title(self) -> str:
        return f"{self.part} by {self.gpus} GPU{'s' * (self.gpus > 1)}"


def planned(parts: list[str], counts: list[int], limits: dict[str, float]) -> list[Task]:
    """The tasks that measure `parts`, in order, with the GPUs of each.

    First parts run on one GPU, then with each of `counts`, in that order. Each gets the neighboring GPUs that would be
    free first if all tasks took as long as `limits` allow.
    """
    counted = [(part, n) for n in counts for part in PARTS if part != "equality" or n == counts[0]]
    free = [0.0] * max(counts)  # when each GPU is free
    tasks: dict[tuple[str, int], Task] = {}
    for part, count in [*((part, 1) for part in ALONE), *counted]:
        if part not in parts:
            continue
        after = tasks.get((part, 1)) if part == "equality" else None
        ready = 0.0 if after is None else free[after.places[0]]
        blocks = [list(range(at, at + count)) for at in range(0, len(free) - count + 1, count)]
        begins = [max(ready, *(free[place] for place in block)) for block in blocks]
        # of those that are free first, the one whose GPUs idle least until then
        _, _, block = min((begin, -sum(free[i] for i in block), block) for begin, block in zip(begins, blocks))
        for place in block:
            free[place] = begins[blocks.index(block)] + limits[part]
        tasks[part, count] = Task(part, block, after)
    return list(tasks.values())


class Bench:
    """Runs the tasks of all parts so that no GPU runs two at once."""

    def __init__(self, a: argparse.Namespace, folder: Path):
        self.a, self.folder = a, folder
        self.rows: list[dict[str, Any]] = []
        self.failures: list[dict[str, Any]] = []
        self.started = time.monotonic()
        self.limits = TIMEOUTS | a.timeout
        self.queue = planned(a.parts, a.gpus, self.limits)
        self.all = max(a.gpus)
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        self.devices = seen.split(",") if seen else [str(i) for i in range(self.all)]

    def run(self) -> None:
        working = list[Task]()
        try:
            while self.queue or working:
                taken = {place for task in working for place in task.places}
                for task in list(self.queue):
                    waits = task.after is not None and (task.after in self.queue or task.after in working)
                    if not waits and taken.isdisjoint(task.places):
                        self.queue.remove(task)
                        if not task.running:
                            self.start(task)
                        self.begin(task)
                        working.append(task)
                    taken.update(task.places)  # also if it waits: later tasks do not overtake it on its GPUs
                for task in self.queue[:AHEAD]:
                    if not task.running:
                        self.start(task)
                time.sleep(POLL)
                for task in list(working):
                    self.collect(task)
                    if self.ended(task):
                        self.collect(task, last=True)
                        working.remove(task)
        finally:
            for task in [*working, *self.queue]:
                self.kill(task)

    def start(self, task: Task) -> None:
        """Starts the processes of `task`, which import their modules and wait for `begin`."""
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        facts = {"part": task.part, "name": task.name, "folder": str(self.folder), "cpu": self.a.cpu}
        facts |= {"compile": not self.a.no_compile, "steps": self.a.steps, "profile": self.a.profile}
        facts |= {"first": self.a.gpus[0]}
        file = self.folder / f"{task.name}.json"
        file.write_text(json.dumps(facts))
        for rank in range(task.gpus):
            place = {"WORLD_SIZE": str(task.gpus), "LOCAL_WORLD_SIZE": str(task.gpus)}
            place |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
            environment |= {"HF_HUB_OFFLINE": "1", "PYTHONFAULTHANDLER": "1"} | (place if task.gpus > 1 else {})
            environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // self.all)))
            environment.setdefault("NCCL_NVLS_ENABLE", "0")
            if not self.a.cpu:
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(self.devices[place] for place in task.places)
            with self.log(task, rank).open("wb") as log:
                command = [sys.executable, str(SCRIPT), str(file)]
                process = subprocess.Popen(
                    command, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
                )
            task.running.append(process)

    def begin(self, task: Task) -> None:
        """Tells the processes of `task` to begin."""
        task.begun = time.monotonic()
        for process in task.running:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has failed already, and its log says why
                process.stdin.write(b"\n")
                process.stdin.close()

    def ended(self, task: Task) -> bool:
        """Whether all processes of `task` have ended. Kills them if one failed or the time is up, and records why."""
        codes, now = [process.poll() for process in task.running], time.monotonic()
        if all(code == 0 for code in codes):
            return True
        bad = [rank for rank, code in enumerate(codes) if code]
        if task.failed is None and bad:
            task.failed = now, bad[0]
        limit = self.limits[task.part]
        if task.failed is None and now - task.begun <= limit:
            return False
        if task.failed is not None and None in codes and now - task.failed[0] < GRACE:
            return False
        self.kill(task)
        rank = codes.index(None) if task.failed is None else task.failed[1]
        lines = self.log(task, rank).read_text(errors="replace").splitlines()
        if task.failed is None:
            why = f"not done after {limit:g} seconds; process {rank} {where(lines)}"
        elif any("missing" in row for row in self.read(task, last=True)):
            return True  # a row says what did not fit
        else:
            why = f"process {rank} failed: {reason(lines) or f'exit code {codes[rank]}'}"
        task.why = why
        self.failures.append({"task": task.title, "why": why, "tail": lines[-TAIL:]})
        return True

    def kill(self, task: Task) -> None:
        """Kills the processes of `task`. First they print their stack traces, which show where they hang."""
        left = [process for process in task.running if process.poll() is None]
        for process in left:
            process.send_signal(signal.SIGUSR1)
        if left:
            time.sleep(5 * POLL)
        for process in left:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def log(self, task: Task, rank: int) -> Path:
        return self.folder / f"{task.name}-{rank}.log"

    def read(self, task: Task, last: bool) -> list[dict[str, Any]]:
        """The rows that all processes of `task` have written. `last`: also the row of a case that did not fit in one
        process, and a row that says why the task failed."""
        told = []
        for rank in range(task.gpus):
            file = self.folder / f"{task.name}-{rank}.jsonl"
            lines = file.read_text().split("\n")[:-1] if file.exists() else []
            told.append([json.loads(line) for line in lines])
        rows = [joined(list(row)) for row in zip(*told)]
        if last:
            rows += [row for own in told for row in own[len(rows) :] if "missing" in row][:1]
            rows += [{"case": "the rest", "gpus": task.gpus, "failed": task.why}] if task.why else []
        return [{"part": task.part} | row for row in rows]

    def collect(self, task: Task, last: bool = False) -> None:
        """Checks and stores the new rows of `task`."""
        rows = self.read(task, last)
        for row in rows[task.told :]:
            self.rows.append(self.checked(row) | {"at_s": round(time.monotonic() - self.started, 1)})
            shown = {name: value for name, value in self.rows[-1].items() if name not in ("machine", "losses")}
            print(json.dumps(shown), flush=True)
        if len(rows) > task.told:
            task.told = len(rows)
            self.write()

    def checked(self, row: dict[str, Any]) -> dict[str, Any]:
        """`row`, but without times if its first loss differs from that of an earlier row of the same part and stage."""
        same = [other for other in self.rows if (other["part"], other.get("stage")) == (row["part"], row.get("stage"))]
        if row.get("losses") and same and same[0].get("losses"):
            first, other = row["losses"][0], same[0]["losses"][0]
            if not abs(first - other) <= (CLOSE_ON_CPU if self.a.cpu else CLOSE) * abs(other):
                row["wrong"] = f"its first loss is {first:.4f}, and {other:.4f} in {same[0]['case']!r}: it is not timed"
                row = {name: value for name, value in row.items() if name not in TIMES}
        return row

    def write(self) -> None:
        if self.a.json:
            told = {"options": {name: value for name, value in vars(self.a).items() if name != "json"}}
            told |= {"seconds": round(time.monotonic() - self.started, 1), "rows": self.rows}
            told |= {"findings": findings(self.rows), "failures": self.failures}
            self.a.json.write_text(json.dumps(told, indent=1) + "\n")


def reason(lines: list[str]) -> str:
    """The error of a failed process, given its log: the last exception, or else the last line."""
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)]
    return (errors or lines or [""])[-1]


def where(lines: list[str]) -> str:
    """Where a process hung, given its log with stack traces: its place in the code, and the last line before these."""
    places = [at for at, line in enumerate(lines) if re.match(r"(Current t|T)hread 0x", line)]
    current = [at for at in places if lines[at].startswith("Current")]
    said = lines[places[0] - 1] if places and places[0] else ""
    place = lines[current[-1] + 1].strip() if current and current[-1] + 1 < len(lines) else "a place it did not tell"
    return f"was at {place}" + (f", and said last: {said}" if said else "")


def joined(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Merges the rows of all processes for a case: the first one's, with the times of the slowest process, the largest
    memory peaks, and anything that is wrong or missing in any of them."""
    row = rows[0]
    if all("step_ms" in other for other in rows):
        slow = max(rows, key=lambda other: other["step_ms"]["median"])
        row |= {name: slow[name] for name in ("step_ms", "tokens_per_s", "profile") if name in slow}
    for name in ("peak_bytes", "reserved_bytes"):
        if name in row:
            row[name] = max(other[name] for other in rows)
    for other in rows:
        row |= {name: other[name] for name in ("wrong", "missing") if name in other}
    return row


def limit(said: str) -> dict[str, float]:
    """The time limits of `PART=SECONDS`, or, of `SECONDS`, for all parts. Raises ValueError if it is neither."""
    part, _, seconds = said.rpartition("=")
    if part and part not in PARTS:
        raise ValueError(f"{part}: is not a part")
    return {name: float(seconds) for name in ([part] if part else PARTS)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=f"({' '.join(PARTS)})")
    known = ", ".join(map(str, COUNTS))
    counts = {"nargs": "+", "type": int, "choices": COUNTS, "default": COUNTS[:1], "metavar": "N"}
    parser.add_argument("--gpus", **counts, help=f"numbers of GPUs to measure with; of {known} (2)")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps that are measured (6)")
    limits = ", ".join(f"{part} {seconds}" for part, seconds in TIMEOUTS.items())
    seconds = {"nargs": "+", "type": limit, "default": [], "metavar": "[PART=]SECONDS"}
    parser.add_argument("--timeout", **seconds, help=f"seconds that each part has with each number of GPUs ({limits})")
    parser.add_argument("--profile", action="store_true", help="say where the time of a step of ddp and fsdp goes")
    parser.add_argument("--no-compile", action="store_true", help="compile and capture nothing")
    parser.add_argument("--cpu", action="store_true", help="processes on the CPU, tiny shapes: tests the script")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    a = parser.parse_args()
    a.gpus = list(dict.fromkeys(a.gpus))
    a.timeout = {part: seconds for said in a.timeout for part, seconds in said.items()}
    if not a.cpu and torch.cuda.device_count() < max(a.gpus):
        seen = torch.cuda.device_count()
        parser.error(f"needs {max(a.gpus)} GPUs, and sees {seen}; --cpu runs tiny shapes without one")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(a, Path(folder))
        bench.run()
        bench.write()
    show(bench.rows)
    sys.exit(bool(bench.failures) or any("wrong" in row for row in bench.rows))


if __name__ == "__main__":
    main()
