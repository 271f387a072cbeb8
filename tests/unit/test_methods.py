"""eval/reports/methods.md is what eval/methods.py makes of the committed reports, and nothing else."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

EVAL = Path(__file__).parents[2] / "eval"


sys.path.append(str(EVAL))
methods: Any = importlib.import_module("methods")


def test_the_page_is_up_to_date() -> None:
    assert methods.main(["--check"]) == 0


def test_a_report_that_changes_makes_the_page_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in (EVAL / "reports").glob("*/report.json"):
        shutil.copytree(file.parent, tmp_path / "eval" / "reports" / file.parent.name)
    page = tmp_path / "eval" / "reports" / "methods.md"
    monkeypatch.setattr(methods, "PAGE", page)
    assert methods.main([]) == 0
    assert page.read_text() == (EVAL / "reports" / "methods.md").read_text()
    file = page.parent / "smollm2-135m-gla" / "report.json"
    report = json.loads(file.read_text())
    report["models"]["linearized"]["copy_nll_256"]["value"] = 0.123
    file.write_text(json.dumps(report))
    assert methods.main(["--check"]) == 1
    assert "methods.md is out of date" in capsys.readouterr().err


def test_every_report_is_on_the_page_under_its_kind() -> None:
    found = methods.methods(EVAL / "reports")
    text = methods.page(found)
    for method in found:
        lines = [line for line in text.splitlines() if f"({method.folder.name}/report.md)" in line]
        assert len(lines) == 2, method.folder.name
        assert f"| {method.kind} |" in lines[0]
    kinds = {method.folder.name: method.kind for method in found}
    assert kinds["smollm2-135m-gla"] == "ours"
    assert kinds["smollm2-135m-liger-paper"] == "Liger's layer"
    assert kinds["smollm2-135m-liger-gla"] == "Liger as published"


def test_what_was_measured_later_replaces_the_same_metrics_of_the_run_in_all_columns(tmp_path: Path) -> None:
    folder = tmp_path / "smollm2-135m-gla"
    shutil.copytree(EVAL / "reports" / folder.name, folder)
    (before,) = methods.methods(tmp_path)
    later = {"value": 20.5, "stderr": 0.1, "n": 128}
    later_measures = {"models": {"linearized": {"text_ppl": later, "mmlu/acc": later}}}
    (folder / "measures.json").write_text(json.dumps(later_measures))
    (after,) = methods.methods(tmp_path)
    assert after.report["models"]["linearized"] == before.report["models"]["linearized"] | {
        "text_ppl": later,
        "mmlu/acc": later,
    }
    for name in ("base", "window_only_untrained", "memory_ablated"):
        old = dict(before.report["models"][name])
        del old["text_ppl"]
        assert after.report["models"][name] == old


def test_adapters_are_told_whether_the_recipe_or_the_plan_asked_for_them() -> None:
    training = {method.folder.name: method.training for method in methods.methods(EVAL / "reports")}
    assert training["smollm2-135m-liger-gla"].startswith("finetune 11.14M (LoRA); ")
    assert training["smollm2-135m-default-seed1"].startswith("align 1.00M (LoRA), distill 2.00M (LoRA), ")
    assert training["smollm2-135m-gla"].startswith("align 1.00M, distill 2.00M, ")


def test_reports_on_other_text_of_the_same_base_have_a_table_of_their_own() -> None:
    text = methods.page(methods.methods(EVAL / "reports"))
    tables = [part for part in text.split("\n## ") if "(smollm2-135m-default-seed1/report.md)" in part]
    assert len(tables) == 1
    assert "(smollm2-135m-default-seed2/report.md)" in tables[0]
    assert "(smollm2-135m-gla/report.md)" not in tables[0]  # only a copy loss agrees


def test_no_committed_report_names_a_path_of_a_machine() -> None:
    path = re.compile(r"""["'`=\s(](/(?:root|home|tmp|work|mnt|data|opt|Users)/[^"'`\s)]*)""")
    files = [file for file in (EVAL / "reports").rglob("*") if file.suffix in (".json", ".md")]
    assert {str(file): path.findall(file.read_text()) for file in files} == {str(file): [] for file in files}
