"""eval/reports/methods.md is what eval/methods.py makes of the committed reports, and nothing else."""

from __future__ import annotations

import importlib
import json
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
    for folder in (EVAL / "reports").glob("smollm2-*"):
        shutil.copytree(folder, tmp_path / "eval" / "reports" / folder.name)
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
