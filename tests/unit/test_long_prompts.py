"""Task prompts and answers that are longer than the base's context."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tasks import run, write_rows
from tiny import save_tiny_base

from liger_convert.cli import main
from liger_convert.eval.generation import load_model
from liger_convert.eval.narrow import cut_prompts
from liger_convert.utils.errors import BadInput

# 256 tokens are the context of the tiny models, and each character is a token
SQUAD = {"context": "Bob is 7.", "question": "How old?", "answers": ["7"]}
PIQA = {"goal": "open it", "sol1": "lift", "sol2": "sit", "label": 0}
TASKS = {"squad_1k": ("squad_ctx", "contains"), "piqa": ("piqa", "acc")}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_tiny_base("llama", tmp_path / "base")


def measured(base: Path, stem: str, *rows: dict[str, Any]) -> dict[str, Any]:
    folder = write_rows(base.parent / "rows")
    (folder / f"{stem}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    name, metric = TASKS[stem]
    return run(load_model(base, torch.device("cpu"), "float32"), folder, [{"name": name, "metrics": [metric]}])


@pytest.mark.parametrize(
    ("stem", "row", "field"), [("squad_1k", SQUAD, "context"), ("piqa", PIQA, "goal")], ids=["generated", "chosen"]
)
def test_prompts_that_lose_their_beginnings_are_counted(base: Path, stem: str, row: dict[str, Any], field: str) -> None:
    found = measured(base, stem, row, row | {field: "x" * 400}, row | {field: "y" * 500})
    (note,) = cut_prompts({"base": found})
    assert note.startswith(f"{TASKS[stem][0]}: prompts that are longer than the base supports were read without")
    assert note.endswith("(2 different ones)")


@pytest.mark.parametrize(("stem", "row"), [("squad_1k", SQUAD), ("piqa", PIQA)])
def test_prompts_that_have_room_are_not(base: Path, stem: str, row: dict[str, Any]) -> None:
    assert cut_prompts({"base": measured(base, stem, row, row)}) == []


def test_eval_says_which_prompts_lose_their_beginnings(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write_rows(base.parent / "rows")
    (rows / "piqa.jsonl").write_text(json.dumps(PIQA | {"goal": "x" * 400}) + "\n")
    suite = base.parent / "suite.yaml"
    suite.write_text("description: a test\ntasks: [{name: piqa, metrics: [acc]}]\n")
    words = ["eval", str(base), "--suite", str(suite), "--data", str(rows), "--device", "cpu", "--json"]
    assert main.main(words) == 0
    assert json.loads(capsys.readouterr().out)["notes"][0].startswith("piqa: prompts that are longer")


@pytest.mark.parametrize("size", [257, 600])
def test_an_answer_longer_than_the_context_is_refused(base: Path, size: int) -> None:
    with pytest.raises(BadInput, match=f"task piqa: an answer has {size} tokens, more than the 256"):
        measured(base, "piqa", PIQA | {"sol1": "x" * (size - 1)})  # and a space before it


def test_prompts_of_a_base_with_scaled_rope_are_cut_at_its_extended_context(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    base = save_tiny_base("llama", tmp_path / "base", rope_parameters=rope)
    assert cut_prompts({"base": measured(base, "squad_1k", SQUAD | {"context": "x" * 400})}) == []
