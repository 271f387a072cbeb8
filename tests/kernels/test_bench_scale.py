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


def bench(monkeypatch: pytest.MonkeyPatch, folder: Path, parts: list[str], rows: Any, does: Any) -> Any:
    """A benchmark whose processes only write given rows, or fail or hang as told."""
    monkeypatch.syspath_prepend(str(KERNELS))
    module = import_module("bench_scale")
    (folder / "process.py").write_text(PROCESS)
    monkeypatch.setattr(module, "SCRIPT", folder / "process.py")
    monkeypatch.setattr(module, "GRACE", 0.3)
    (folder / "process.py.json").write_text(json.dumps({"rows": rows, "does": does}))
    options = {"parts": parts, "steps": 1, "timeout": 3.0, "no_compile": False, "cpu": True, "profile": False}
    made = module.Bench(argparse.Namespace(**options, json=folder / "rows.json"), folder)
    made.run()
    made.write()
    module.show(made)
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
    (found,) = module.findings(made.rows)
    assert found == {"what": "ddp: 2 GPUs beside one, rows shared", "value": 1.9, "target": 1.8, "met": True}
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


class Event:
    """An event of a GPU, at a time in seconds."""

    def __init__(self, at: float):
        self.at = at

    def elapsed_time(self, later: Event) -> float:
        return 1e3 * (later.at - self.at)


def test_the_parts_of_a_step_add_up_by_either_clock(monkeypatch) -> None:
    """Only steps after the warm-up count; those before are slower. The passes of a step's two micro-batches are one
    part."""
    monkeypatch.syspath_prepend(str(KERNELS))
    module = import_module("scale_timing")
    monkeypatch.setattr(module.StageTrainer, "_average", lambda _: None)
    trainer = object.__new__(module.Clocked)
    trainer.args = argparse.Namespace(device=argparse.Namespace(type="cpu"))
    trainer.notes, now = [], 0.0
    host, gpu = (0.003, 0.001, 0.002, 0.004, 0.005, 0.2), (0.003, 0.1, 0.1, 0.007, 0.004, 0.001)
    parts = ("rows ready", *["forward, backward"] * 2, "averaging", "clipping, optimizer", module.STEP_ENDS)
    behind = 0.0
    for step in range(module.WARM + 2):
        for part, took, late in zip(parts, host, gpu, strict=True):
            slow = 10 if step < module.WARM else 1
            now, behind = now + slow * took, behind + slow * late
            trainer.notes.append((part, now, Event(behind)))
    profile = trainer.profile()
    assert profile["host"] == pytest.approx(dict(zip(dict.fromkeys(parts), (3, 3, 4, 5, 200))))
    assert profile["gpu"] == pytest.approx(dict(zip(dict.fromkeys(parts), (3, 200, 7, 4, 1))))
    trainer._average()
    assert trainer.notes[-1][0] == "averaging"


def run(folder: Path, *words: str, seconds: int = 120) -> dict[str, Any]:
    file = folder / "rows.json"
    command = [sys.executable, str(KERNELS / "bench_scale.py"), "--cpu", "--steps", "1", "--json", str(file), *words]
    ended = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads(file.read_text())


def test_processes_that_share_rows_are_timed_beside_one(tmp_path: Path) -> None:
    told = run(tmp_path, "--parts", "ddp", "--profile")
    assert [(row["case"], row["gpus"], row["rows"]) for row in told["rows"]] == [
        ("rows shared", n, 2 * n) for n in (1, 2)
    ]
    assert [finding["what"] for finding in told["findings"]] == ["ddp: 2 GPUs beside one, rows shared"]
    for row in told["rows"]:  # of one measured step each
        parts = row["profile"]["host"]
        assert set(parts) == {"rows ready", "forward, backward", "clipping, optimizer", "loss, flags"}
        assert sum(parts.values()) == pytest.approx(row["step_ms"]["median"], rel=0.05)
        assert ("sending_ms" in row) == (row["gpus"] > 1)


@pytest.mark.slow
def test_every_part_has_its_rows_and_mistakes_are_noticed(tmp_path: Path) -> None:
    told = run(tmp_path, seconds=400)
    assert told["failures"] == []
    assert {row["part"] for row in told["rows"]} == {"equality", "ddp", "fsdp-lora", "fsdp-full", "sequence"}
    mistakes = [row["mistake"] for row in told["rows"] if "mistake" in row]
    assert mistakes.count(True) == 3
    assert mistakes.count(False) == 4
    assert all("step_ms" in row for row in told["rows"] if row["part"] != "equality")
