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
import json, os, sys, time
task, given = (json.load(open(name)) for name in (sys.argv[1], __file__ + ".json"))
sys.stdin.readline()
rank = int(os.environ.get("RANK", "0"))
for row in given["rows"].get(task["name"], []):
    with open(f"{task['folder']}/{task['name']}-{rank}.jsonl", "a") as file:
        file.write(json.dumps(row | {"gpus": int(os.environ.get("WORLD_SIZE", "1"))}) + "\\n")
does = given["does"].get(f"{task['name']}-{rank}")
if does == "hangs":
    time.sleep(100)
if does:
    raise ValueError(does)
"""


def row(case: str, speed: float, loss: float = 2.0) -> dict[str, Any]:
    times = {"step_ms": {"median": 1e3 / speed}, "tokens_per_s": speed, "fwd_bwd": "captured"}
    return {"case": case, "stage": "distill", "rows": 1, "tokens_a_row": 8, "losses": [loss]} | times


def bench(monkeypatch: pytest.MonkeyPatch, folder: Path, parts: list[str], rows: Any, does: Any) -> Any:
    """A bench of processes that only say that they have done so."""
    monkeypatch.syspath_prepend(str(KERNELS))
    module = import_module("bench_scale")
    (folder / "process.py").write_text(PROCESS)
    monkeypatch.setattr(module, "SCRIPT", folder / "process.py")
    monkeypatch.setattr(module, "GRACE", 0.3)
    (folder / "process.py.json").write_text(json.dumps({"rows": rows, "does": does}))
    options = {"parts": parts, "steps": 1, "timeout": 3.0, "no_compile": False, "cpu": True}
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
        ("ddp", "rows shared"),
        ("fsdp-full", "all weights"),
        ("sequence", "finetune, a row shared"),
    ]
    assert [(failure["task"], failure["why"]) for failure in told["failures"]] == [
        ("equality by 1 GPU", "not done after 3 seconds; see where process 0 was"),
        ("sequence by 2 GPUs", "process 1 failed: ValueError: lost"),
    ]
    assert "Traceback" in told["failures"][1]["tail"][0]
    (found,) = module.findings(made.rows)
    assert found == {"what": "ddp: 2 GPUs beside one, rows shared", "value": 1.9, "target": 1.8, "met": True}
    assert "does not fit" in capsys.readouterr().out


def test_what_has_another_loss_is_not_timed(monkeypatch, tmp_path: Path) -> None:
    rows = {"ddp-1": [row("rows shared", 100)], "ddp-2": [row("rows shared", 190, loss=2.5)]}
    made, module = bench(monkeypatch, tmp_path, ["ddp"], rows, {})
    assert "its first loss is 2.5" in made.rows[1]["wrong"]
    assert "tokens_per_s" not in made.rows[1]
    assert module.findings(made.rows) == []


def run(folder: Path, *words: str, seconds: int = 120) -> dict[str, Any]:
    file = folder / "rows.json"
    command = [sys.executable, str(KERNELS / "bench_scale.py"), "--cpu", "--steps", "1", "--json", str(file), *words]
    ended = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads(file.read_text())


def test_processes_that_share_rows_are_timed_beside_one(tmp_path: Path) -> None:
    told = run(tmp_path, "--parts", "ddp")
    assert [(row["case"], row["gpus"], row["rows"]) for row in told["rows"]] == [
        ("rows shared", n, 2 * n) for n in (1, 2)
    ]
    assert [finding["what"] for finding in told["findings"]] == ["ddp: 2 GPUs beside one, rows shared"]


@pytest.mark.slow
def test_every_part_has_its_rows_and_mistakes_are_noticed(tmp_path: Path) -> None:
    told = run(tmp_path, seconds=400)
    assert told["failures"] == []
    assert {row["part"] for row in told["rows"]} == {"equality", "ddp", "fsdp-lora", "fsdp-full", "sequence"}
    mistakes = [row["mistake"] for row in told["rows"] if "mistake" in row]
    assert mistakes.count(True) == 3
    assert mistakes.count(False) == 4
    assert all("step_ms" in row for row in told["rows"] if row["part"] != "equality")
