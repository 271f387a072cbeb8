"""The bench of several GPUs, here by processes on a CPU: every part has its rows, and one that fails or hangs costs no
other part its numbers."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, environment

KERNELS = Path(__file__).parents[2] / "kernels"
# A process that imports nothing: a file beside it says what it tells and does.
PROCESS = """
import faulthandler, json, os, signal, sys, time
task, given = (json.load(open(name)) for name in (sys.argv[1], __file__ + ".json"))
sys.stdin.readline()
rank = int(os.environ.get("RANK", "0"))
for row in given["rows"].get(task["name"], []):
    with open(f"{task['folder']}/{task['name']}-{rank}.jsonl", "a") as file:
        file.write(json.dumps(row | {"gpus": int(os.environ.get("WORLD_SIZE", "1"))}) + "\\n")
does = given["does"].get(f"{task['name']}-{rank}")
if does == "hangs":
    faulthandler.register(signal.SIGUSR1)
    print("waiting for the others", file=sys.stderr, flush=True)
    time.sleep(100)
if does:
    raise ValueError(does)
"""


def row(case: str, speed: float, loss: float = 2.0) -> dict[str, Any]:
    times = {"step_ms": {"median": 1e3 / speed}, "tokens_per_s": speed, "fwd_bwd": "captured"}
    return {"case": case, "stage": "distill", "rows": 1, "tokens_a_row": 8, "losses": [loss]} | times


def bench(
    monkeypatch: pytest.MonkeyPatch, folder: Path, parts: list[str], rows: Any, does: Any, gpus: tuple[int, ...] = (2,)
) -> Any:
    """A benchmark whose processes only write given rows, or fail or hang as told."""
    monkeypatch.syspath_prepend(str(KERNELS))
    module = import_module("bench_scale")
    (folder / "process.py").write_text(PROCESS)
    monkeypatch.setattr(module, "SCRIPT", folder / "process.py")
    monkeypatch.setattr(module, "GRACE", 0.3)
    (folder / "process.py.json").write_text(json.dumps({"rows": rows, "does": does}))
    options = {"parts": parts, "gpus": list(gpus), "steps": 1, "timeout": dict.fromkeys(module.PARTS, 3.0)}
    options |= {"no_compile": False, "cpu": True, "profile": False}
    made = module.Bench(argparse.Namespace(**options, json=folder / "rows.json"), folder)
    made.run()
    made.write()
    module.show(made.rows)
    return made, module


def test_a_part_that_fails_or_hangs_costs_no_other_its_numbers(monkeypatch, tmp_path: Path, capsys) -> None:
    rows = {
        "ddp-1": [row("rows shared", 100)],
        "ddp-2": [row("rows shared", 190)],
        "fsdp-full-2": [{"case": "all weights", "missing": "does not fit"}],
        "sequence-2": [row("finetune, a row shared", 100)],
    }
    does = {"equality-1-0": "hangs", "fsdp-full-2-1": "hangs", "fsdp-full-2-0": "full", "sequence-2-1": "lost"}
    parts = ["equality", "ddp", "fsdp-full", "sequence"]
    made, module = bench(monkeypatch, tmp_path, parts, rows, does)
    told = json.loads((tmp_path / "rows.json").read_text())
    assert told["rows"] == made.rows
    assert [(found["part"], found["case"]) for found in made.rows] == [
        ("ddp", "rows shared"),
        ("equality", "the rest"),
        ("ddp", "rows shared"),
        ("fsdp-full", "all weights"),
        ("sequence", "finetune, a row shared"),
        ("sequence", "the rest"),
    ]
    hung, lost = (row["failed"] for row in made.rows if "failed" in row)
    assert hung.startswith("not done after 3 seconds; process 0 was at File ")
    assert hung.endswith("in <module>, and said last: waiting for the others")
    assert lost == "process 1 failed: ValueError: lost"
    assert [failure["task"] for failure in told["failures"]] == ["equality by 1 GPU", "sequence by 2 GPUs"]
    assert [failure["why"] for failure in told["failures"]] == [hung, lost]
    assert "Traceback" in told["failures"][1]["tail"][0]
    assert module.findings(made.rows) == [
        {"what": "ddp: 2 GPUs beside one, rows shared", "value": 1.9, "target": 1.8, "met": True},
        {"what": "fsdp-full: all weights fit 2 GPUs", "value": 0, "target": 1, "met": False},
    ]
    shown = capsys.readouterr().out
    assert "does not fit" in shown
    assert "ValueError: lost" in shown


@pytest.mark.parametrize("loss", [2.0, 2.5])
def test_a_training_with_a_different_first_loss_is_not_timed(monkeypatch, tmp_path: Path, capsys, loss: float) -> None:
    """The control has the same loss and is timed."""
    parts = {"profile": {"host": {"averaging": 3.25}, "gpu": {}}, "sending_ms": 1.75}
    rows = {"ddp-1": [row("rows shared", 100)], "ddp-2": [row("rows shared", 190, loss=loss) | parts]}
    made, module = bench(monkeypatch, tmp_path, ["ddp"], rows, {})
    right, shown = loss == 2.0, capsys.readouterr().out
    assert ("its first loss is 2.5" in made.rows[1].get("wrong", "")) != right
    assert ("tokens_per_s" in made.rows[1]) == right
    assert ("3.25" in shown) == ("1.75" in shown) == right
    assert bool(module.findings(made.rows)) == right


def test_every_part_has_seconds_of_its_own(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(KERNELS))
    module = import_module("bench_scale")
    assert set(module.TIMEOUTS) == set(module.PARTS)
    assert module.limit("ddp=90") == {"ddp": 90.0}
    assert module.limit("90") == dict.fromkeys(module.PARTS, 90.0)
    with pytest.raises(ValueError, match="dpp"):
        module.limit("dpp=90")


@pytest.mark.parametrize(("counts", "rounds"), [([2], 7), ([2, 4, 8], 8), ([8, 4, 2], 9)])
def test_tasks_of_few_gpus_stand_side_by_side_and_none_is_left_out(monkeypatch, counts: list[int], rounds: int) -> None:
    """rounds: how many times as long as one task the plan takes, if all tasks take equally long."""
    monkeypatch.syspath_prepend(str(KERNELS))
    module = import_module("bench_scale")
    tasks = module.planned(module.PARTS, counts, dict.fromkeys(module.PARTS, 1.0))
    counted = [(part, n) for n in counts for part in module.PARTS if part != "equality" or n == counts[0]]
    assert [(task.part, task.gpus) for task in tasks] == [*((part, 1) for part in module.ALONE), *counted]
    free, ends = [0] * max(counts), {}
    for task in tasks:
        assert task.places == list(range(task.places[0], task.places[0] + task.gpus))
        end = 1 + max([free[place] for place in task.places] + ([ends[task.after.name]] if task.after else []))
        ends |= {task.name: end}
        for place in task.places:
            free[place] = end
    assert [task.name for task in tasks if task.after] == [f"equality-{counts[0]}"]
    assert max(free) == rounds


def test_tasks_run_at_once_where_they_share_no_gpu_and_their_rows_are_told_apart(monkeypatch, tmp_path: Path) -> None:
    """ddp of 4 GPUs hangs meanwhile, and costs those of 2 and of 8 nothing."""
    speeds = {1: 100, 2: 190, 8: 700}
    rows = {f"ddp-{n}": [row("rows shared", speed)] for n, speed in speeds.items()}
    made, module = bench(monkeypatch, tmp_path, ["ddp"], rows, {"ddp-4-3": "hangs"}, (2, 4, 8))
    assert [(found["gpus"], found["case"]) for found in made.rows] == [
        (1, "rows shared"),
        (2, "rows shared"),
        (4, "the rest"),
        (8, "rows shared"),
    ]
    assert [(found["what"], found["target"], found["met"]) for found in module.findings(made.rows)] == [
        ("ddp: 2 GPUs beside one, rows shared", 1.8, True),
        ("ddp: 8 GPUs beside one, rows shared", 7.2, False),
    ]


def test_every_number_of_gpus_has_its_findings(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(KERNELS))
    module = import_module("scale_report")

    def told(part: str, case: str, n: int, speed: float, **more: Any) -> dict[str, Any]:
        return row(case, speed) | {"part": part, "gpus": n} | more

    kept, layers = "LoRA, layers stay gathered", {"layers": 4, "tokens_a_row": 131072}
    rows = [
        told("fsdp-lora", "LoRA", 1, 8000),
        told("fsdp-lora", kept, 2, 15200),
        told("fsdp-lora", kept, 4, 28000),
        {"part": "fsdp-full", "case": "all weights", "gpus": 2, "missing": "does not fit"},
        told("fsdp-full", "all weights", 4, 1000),
        told("fsdp-full", "all weights", 8, 1800),
        told("sequence", "distill, a row shared", 4, 95, peak_bytes=30),
        told("sequence", "distill, a row each, not compiled", 4, 100, peak_bytes=20),
        told("sequence", "layers, by one GPU", 1, 100, **layers),
        told("sequence", "layers, a row shared", 2, 190, **layers),
        told("sequence", "layers, a row shared", 8, 640, **layers),
    ]
    found = {
        finding["what"]: tuple(finding[name] for name in ("value", "target", "met"))
        for finding in module.findings(rows)
    }
    shared = "sequence: distill, a row shared by 4 GPUs beside a row each, not compiled"
    peak = "sequence: distill, peak of a row shared by 4 GPUs beside that of a row 4 times shorter"
    part = "sequence: 4 layers of 131,072 tokens, part of {} times the speed"
    assert found == {
        "fsdp-lora: a GPU of 2 beside one, layers stay gathered": (0.95, 0.92, True),
        "fsdp-lora: tokens/s of a GPU of 2, layers stay gathered": (7600, 7000, True),
        "fsdp-lora: a GPU of 4 beside one, layers stay gathered": (0.875, 0.92, False),
        "fsdp-lora: tokens/s of a GPU of 4, layers stay gathered": (7000, 7000, True),
        "fsdp-full: all weights fit 2 GPUs": (0, 1, False),
        "fsdp-full: all weights fit 4 GPUs": (1, 1, True),
        "fsdp-full: all weights fit 8 GPUs": (1, 1, True),
        "fsdp-full: a GPU of 8 beside one of 4": (0.9, 0.85, True),
        shared: (0.95, 0.9, True),
        peak: (1.5, None, None),
        part.format(2): (0.95, 0.92, True),
        part.format(8): (0.8, 0.92, False),
    }
    apart = [told("fsdp-full", "all weights", n, 1000 * n) for n in (2, 8)]  # neither is twice the other
    assert not any("beside" in finding["what"] for finding in module.findings(apart))


class Event:
    """An event of a GPU, at a time in seconds."""

    def __init__(self, at: float):
        self.at = at

    def elapsed_time(self, later: Event) -> float:
        return 1e3 * (later.at - self.at)


def test_the_parts_of_a_step_add_up_by_either_clock(monkeypatch) -> None:
    """Only the timed steps count; those of the warm-up and those that are profiled are slower. The passes of a step's
    two micro-batches are one part."""
    monkeypatch.syspath_prepend(str(KERNELS))
    module = import_module("scale_timing")
    monkeypatch.setattr(module.StageTrainer, "_average", lambda _: None)
    trainer = object.__new__(module.Clocked)
    trainer.args = argparse.Namespace(device=argparse.Namespace(type="cpu"))
    trainer.notes, now = [], 0.0
    host, gpu = (0.003, 0.001, 0.002, 0.004, 0.005, 0.2), (0.003, 0.1, 0.1, 0.007, 0.004, 0.001)
    parts = ("rows ready", *["forward, backward"] * 2, "averaging", "clipping, optimizer", module.STEP_ENDS)
    behind = 0.0
    for step in range(module.WARM + 5):
        for part, took, late in zip(parts, host, gpu, strict=True):
            slow = 1 if step in (module.WARM, module.WARM + 1) else 10
            now, behind = now + slow * took, behind + slow * late
            trainer.notes.append((part, now, Event(behind)))
    profile = trainer.profile(module.WARM + 2)
    assert profile["host"] == pytest.approx(dict(zip(dict.fromkeys(parts), (3, 3, 4, 5, 200))))
    assert profile["gpu"] == pytest.approx(dict(zip(dict.fromkeys(parts), (3, 200, 7, 4, 1))))
    trainer._average()
    assert trainer.notes[-1][0] == "averaging"


def test_times_and_parts_are_those_of_the_slowest_process(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(KERNELS))
    module = import_module("bench_scale")
    fast, slow = (
        {"step_ms": {"median": ms}, "tokens_per_s": 1 / ms, "profile": {"host": {"loss, flags": ms}}} for ms in (1, 2)
    )
    assert module.joined([dict(fast), dict(slow)]) == slow
    untimed = {name: value for name, value in slow.items() if name != "profile"}
    assert module.joined([dict(untimed), dict(untimed)]) == untimed


def run(folder: Path, *words: str, seconds: int = 120) -> dict[str, Any]:
    file = folder / "rows.json"
    command = [sys.executable, str(KERNELS / "bench_scale.py"), "--cpu", "--steps", "1", "--json", str(file), *words]
    ended = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads(file.read_text())


def test_processes_that_share_rows_are_timed_beside_one(tmp_path: Path) -> None:
    told = run(tmp_path, "--parts", "ddp", "--profile", "--gpus", "4")
    assert [(row["case"], row["gpus"], row["rows"]) for row in told["rows"]] == [
        ("rows shared", n, 2 * n) for n in (1, 4)
    ]
    assert [finding["what"] for finding in told["findings"]] == ["ddp: 4 GPUs beside one, rows shared"]
    for row in told["rows"]:  # of one measured step each
        parts = row["profile"]["host"]
        assert set(parts) == {"rows ready", "forward, backward", "clipping, optimizer", "loss, flags"}
        assert sum(parts.values()) == pytest.approx(row["step_ms"]["median"])
        assert ("sending_ms" in row) == (row["gpus"] > 1)


@pytest.mark.slow
def test_every_part_has_its_rows_and_mistakes_are_noticed(tmp_path: Path) -> None:
    told = run(tmp_path, "--profile", seconds=400)
    assert told["failures"] == []
    assert {row["part"] for row in told["rows"]} == {"equality", "ddp", "fsdp-lora", "fsdp-full", "sequence"}
    mistakes = [row["mistake"] for row in told["rows"] if "mistake" in row]
    assert mistakes.count(True) == 3
    assert mistakes.count(False) == 5
    trained = [row for row in told["rows"] if row["part"] != "equality"]
    assert all("step_ms" in row for row in trained)
    for row in trained:
        assert row["step_ms"]["n"] == 1
        assert ("kernel_ms" in row) == row["part"].startswith("fsdp")
        if "kernel_ms" in row:  # a CPU has no kernels, so the whole step is without
            assert row["kernel_ms"]["no kernel"] == row["kernel_ms"]["a step, profiled"] > 0


@pytest.mark.slow
def test_rows_are_shared_by_each_number_of_processes_and_whole_models_come_first(tmp_path: Path) -> None:
    told = run(tmp_path, "--parts", "sequence", "--gpus", "4", "2", seconds=400)
    models = [f"{stage}, a row {how}" for stage in ("finetune", "distill") for how in ("shared", "each, not compiled")]
    layers = "layers, by one GPU", "layers, a row shared"
    several = [*models, layers[1], layers[1]]
    assert [(row["case"], row["gpus"]) for row in told["rows"]] == [
        *((case, 4) for case in models),
        *((case, n) for _ in range(2) for case, n in zip(layers, (1, 4))),
        *((case, 2) for case in several),
    ]
    of_models = {(row["case"], row["gpus"]): row for row in told["rows"] if row["case"] in models}
    for n in (2, 4):
        shared, each = (of_models[case, n] for case in models[:2])
        assert (shared["tokens_a_row"], each["tokens_a_row"]) == (160 * n, 160)
        assert shared["rows"] * shared["tokens_a_row"] == each["rows"] * each["tokens_a_row"]
        assert shared["compared"] == f"2 x {160 * n} tokens, shared by {n} GPUs"
    parts = [found["what"] for found in told["findings"] if "layers" in found["what"]]
    assert len(parts) == 4
    assert sum("part of 4 times the speed" in what for what in parts) == 2
