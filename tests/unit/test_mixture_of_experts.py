"""A base with a mixture of experts is trained on real text and converted by a pattern of mixers, in one script."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "eval" / "mixture_of_experts.py"


@pytest.mark.slow
def test_a_base_with_experts_is_made_converted_and_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "report.md"
    options = ["--out", str(out), "--minutes", "0.1", "--tokens", "8192", "--mixers", "gla", "forgetting"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    written = out.read_text()
    for row in (
        "| base |",
        "| window only untrained |",
        "| linearized |",
        "| `base` |",
        "| `gla` |",
        "| `forgetting` |",
    ):
        assert written.count(row) == 1, row
