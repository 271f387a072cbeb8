"""Checks and times training on 2 GPUs, compared with one: `python kernels/bench_scale.py --json scale.json`.

The parts, on models with random weights whose layers are all linear, and on random tokens:

- equality: losses and weights after a few steps, for every kind of parallelism, compared with one GPU's in float32. An
  error may be twice that of one GPU in bfloat16. Trainings with a deliberate mistake must exceed this.
- ddp: SmolLM2-135M distilled, all weights, with data parallelism.
- fsdp-lora: Llama-3-8B distilled with LoRA, with the weights sharded as well (FSDP2). One GPU could hold all of them.
- fsdp-full: Llama-3-8B distilled, all weights but the embeddings, which does not fit on one GPU.
- sequence: rows split across GPUs, for layers alone and for SmolLM2-135M, compared with one row per GPU.

Each part is measured in separate processes with a time limit, from TIMEOUTS or --timeout. So a part that fails or
hangs does not cost other parts their numbers. It gets a row that says why. A GPU processes the same rows alone and with
others. A training is not timed if its loss at the first step differs from the others of its part, or if its processes
end with different weights. With --profile, a table shows where the time of a step of ddp goes, in the first process.
The --json file is complete after every row. The exit code is 1 if something is wrong. A missed target, or a case that
does not fit into memory, is only reported.
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
from rich.console import Console
from rich.table import Table

PARTS = ["equality", "ddp", "fsdp-lora", "fsdp-full", "sequence"]
ALONE = {"fsdp-lora": 0, "ddp": 1, "equality": 1}  # parts that also run on one GPU, in this order, and which GPU
GPUS = 2
# In seconds. Compiling layers takes a minute, and may take longer with sharded weights.
TIMEOUTS = {"equality": 240, "ddp": 240, "fsdp-lora": 300, "fsdp-full": 300, "sequence": 300}
SCRIPT = Path(__file__).with_name("scale_parts.py")
POLL = 0.1  # seconds
GRACE = 5.0  # seconds that the other processes have to end after one has failed
AHEAD = 2  # tasks whose processes are started early, so that their imports overlap with other tasks
CLOSE = 0.05  # allowed relative difference of two losses of random weights on random tokens
TIMES = "step_ms", "tokens_per_s", "profile", "sending_ms"  # fields removed from a row with wrong results
TAIL = 30  # last log lines that are kept of a failed process


@dataclass
class Task:
    """A part run by a number of processes, each on its own GPU."""

    part: str
    places: list[int]  # indices of its GPUs
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


class Bench:
    """Schedules the tasks of all parts so that no GPU runs two at once."""

    def __init__(self, a: argparse.Namespace, folder: Path):
        self.a, self.folder = a, folder
        self.rows: list[dict[str, Any]] = []
        self.failures: list[dict[str, Any]] = []
        self.started = time.monotonic()
        alone = [Task(part, [place]) for part, place in ALONE.items() if part in a.parts]
        self.queue = alone + [Task(part, list(range(GPUS))) for part in PARTS if part in a.parts]
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        self.devices = seen.split(",") if seen else [str(i) for i in range(GPUS)]

    def run(self) -> None:
        free, working = set(range(GPUS)), list[Task]()
        try:
            while self.queue or working:
                while self.queue and free.issuperset(self.queue[0].places):
                    task = self.queue.pop(0)
                    if not task.running:
                        self.start(task)
                    free.difference_update(task.places)
                    self.begin(task)
                    working.append(task)
                for task in self.queue[:AHEAD]:
                    if not task.running:
                        self.start(task)
                time.sleep(POLL)
                for task in list(working):
                    self.collect(task)
                    if self.ended(task):
                        self.collect(task, last=True)
                        working.remove(task)
                        free.update(task.places)
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
        file = self.folder / f"{task.name}.json"
        file.write_text(json.dumps(facts))
        for rank in range(task.gpus):
            place = {"WORLD_SIZE": str(task.gpus), "LOCAL_WORLD_SIZE": str(task.gpus)}
            place |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
            environment |= {"HF_HUB_OFFLINE": "1", "PYTHONFAULTHANDLER": "1"} | (place if task.gpus > 1 else {})
            environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // GPUS)))
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
        limit = self.a.timeout or TIMEOUTS[task.part]
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
            if not abs(first - other) <= CLOSE * abs(other):
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
        row |= {"step_ms": slow["step_ms"], "tokens_per_s": slow["tokens_per_s"]}
    for name in ("peak_bytes", "reserved_bytes"):
        if name in row:
            row[name] = max(other[name] for other in rows)
    for other in rows:
        row |= {name: other[name] for name in ("wrong", "missing") if name in other}
    return row


def findings(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The speedups and memory ratios that follow from the rows, with their targets."""
    speeds = {(row["part"], row["case"], row["gpus"]): row["tokens_per_s"] for row in rows if "tokens_per_s" in row}
    peaks = {(row["part"], row["case"], row["gpus"]): row["peak_bytes"] for row in rows if "peak_bytes" in row}
    found: list[dict[str, Any]] = []

    def compare(what: str, ours: tuple[Any, ...], theirs: tuple[Any, ...], target: float, share: float = 1) -> None:
        if ours in speeds and theirs in speeds:
            value = speeds[ours] / speeds[theirs] * share
            found.append({"what": what, "value": value, "target": target, "met": value >= target})

    for case in ("rows shared", "rows shared, not captured"):
        compare(f"ddp: 2 GPUs beside one, {case}", ("ddp", case, 2), ("ddp", case, 1), 1.8)
    one = ("fsdp-lora", "LoRA", 1)
    for case in ("LoRA", "LoRA, layers stay gathered"):
        two, how = ("fsdp-lora", case, 2), case.removeprefix("LoRA")
        compare(f"fsdp-lora: a GPU of 2 beside one{how}", two, one, 0.92, 1 / GPUS)
        if two in speeds:
            value, what = speeds[two] / GPUS, f"fsdp-lora: tokens/s of a GPU{how}"
            found.append({"what": what, "value": value, "target": 7000, "met": value >= 7000})
    for stage in ("finetune", "distill"):
        shared, own = (("sequence", f"{stage}, a row {how}", 2) for how in ("shared", "each"))
        eager = (*own[:1], f"{own[1]}, not compiled", 2)
        compare(f"sequence: {stage}, a row shared beside a row each", shared, own, 0.9)
        compare(f"sequence: {stage}, a row shared beside a row each, not compiled", shared, eager, 0.9)
        if shared in peaks and eager in peaks:
            value = peaks[shared] / peaks[eager]
            what = f"sequence: {stage}, peak of a row shared beside that of a row of half its length"
            found.append({"what": what, "value": value, "target": None, "met": None})
    layers = [row for row in rows if "layers" in row and "tokens_per_s" in row]
    for row in layers:
        peers = [other for other in layers if other["gpus"] == 1 and other["layers"] == row["layers"]]
        for peer in peers:
            if row["gpus"] > 1 and peer["tokens_a_row"] == row["tokens_a_row"]:
                target = 0.92 if row["tokens_a_row"] > 100_000 else 0.8
                what = f"sequence: {row['layers']} layers of {row['tokens_a_row']:,} tokens, part of twice the speed"
                value = row["tokens_per_s"] / peer["tokens_per_s"] / GPUS
                found.append({"what": what, "value": value, "target": target, "met": value >= target})
    return found


def show(bench: Bench) -> None:
    console = Console(width=150, highlight=False)
    times = Table("part", "case", "GPUs", "rows", "step", "tokens/s", "of a GPU", "peak", "first step", "passes")
    equal = Table("equality: case", "GPUs", "losses err by", "allowed", "weights err by", "allowed", "")
    for row in bench.rows:
        if "errors" in row:
            of = row["errors"], row.get("allowed", {})
            pairs = [f"{x[name]:.1e}" if x else "" for name in ("losses", "weights") for x in of]
            said = {True: "noticed", False: "equal", None: ""}[row.get("mistake")]
            equal.add_row(row["case"], str(row["gpus"]), *pairs, row.get("wrong", said))
        elif "step_ms" in row:
            rows = f"{row['rows']} x {row['tokens_a_row']:,}" + (f", {row['layers']} layers" if "layers" in row else "")
            cells = [rows, f"{row['step_ms']['median']:.1f} ms", f"{row['tokens_per_s']:,.0f}"]
            cells += [f"{row['tokens_per_s'] / row['gpus']:,.0f}"]
            cells += [f"{row['peak_bytes'] / 1e9:.1f} GB" if "peak_bytes" in row else ""]
            cells += [f"{row['first_step_s']:.1f} s" if "first_step_s" in row else "", row["fwd_bwd"].partition(":")[0]]
            times.add_row(row["part"], row["case"], str(row["gpus"]), *cells)
    marks = Table("what", "measured", "target", "")
    for finding in findings(bench.rows):
        target = "" if finding["target"] is None else f"{finding['target']:,}"
        met = {True: "met", False: "missed", None: ""}[finding["met"]]
        value = finding["value"]
        marks.add_row(finding["what"], f"{value:,.0f}" if value > 100 else f"{value:.3f}", target, met)
    profiles = [profile_of(rows) for rows in cases(bench.rows).values()]
    for table in (equal, times, *profiles, marks):
        if table.row_count:
            console.print(table)
    for row in bench.rows:
        if why := row.get("wrong") or row.get("missing") or row.get("failed"):
            console.print(f"{row['part']}, {row['case']}, {row['gpus']} GPUs: {why}", markup=False)


def cases(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """By case, the rows that have a profile: one for each number of GPUs."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if "profile" in row:
            found.setdefault(row["case"], []).append(row)
    return found


def profile_of(rows: list[dict[str, Any]]) -> Table:
    """A table of where the time of a step goes, for the rows of a case. The GPU clock includes time in which the GPU
    waits."""
    clocks = [(row, clock) for row in rows for clock in ("gpu", "host") if row["profile"][clock]]
    heads = [f"{row['gpus']} GPU{'s' * (row['gpus'] > 1)}, {clock}" for row, clock in clocks]
    table = Table(f"ms of a step, {rows[0]['case']}", *heads)
    columns = [row["profile"][clock] for row, clock in clocks]
    parts = dict.fromkeys(part for column in reversed(columns) for part in column)
    for part in parts:
        table.add_row(part, *(f"{column[part]:.2f}" if part in column else "" for column in columns))
    table.add_row("together", *(f"{sum(column.values()):.2f}" for column in columns))
    sent = [row.get("sending_ms") for row, _ in clocks]
    table.add_row("sending as much, by itself", *("" if ms is None else f"{ms:.2f}" for ms in sent))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=f"({' '.join(PARTS)})")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps that are measured (6)")
    limits = ", ".join(f"{part} {seconds}" for part, seconds in TIMEOUTS.items())
    parser.add_argument("--timeout", type=float, help=f"seconds that the processes of each part have ({limits})")
    parser.add_argument("--profile", action="store_true", help="say where the time of a step of ddp goes")
    parser.add_argument("--no-compile", action="store_true", help="compile and capture nothing")
    parser.add_argument("--cpu", action="store_true", help="2 processes on the CPU, tiny shapes: tests the script")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    a = parser.parse_args()
    if not a.cpu and torch.cuda.device_count() < GPUS:
        parser.error(f"needs {GPUS} GPUs, and sees {torch.cuda.device_count()}; --cpu runs tiny shapes without one")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(a, Path(folder))
        bench.run()
        bench.write()
    show(bench)
    sys.exit(bool(bench.failures) or any("wrong" in row for row in bench.rows))


if __name__ == "__main__":
    main()
