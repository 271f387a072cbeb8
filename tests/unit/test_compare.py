"""`linearize compare` shows what runs have in common side by side, and says what cannot be compared."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from reports import HOSTILE, measured, report

from liger_convert.cli import main
from liger_convert.eval.verdict import verdict
from liger_convert.io.checksums import sha256_file
from liger_convert.pipeline.pages import compare_page
from liger_convert.pipeline.pages.compare import compare
from liger_convert.utils.errors import BadInput

REPORTS = Path(__file__).parents[2] / "eval" / "reports"


def saved(folder: Path, **changes: Any) -> Path:
    """The folder of a run with such a report."""
    folder.mkdir()
    (folder / "report.json").write_text(json.dumps(report(**{"name": folder.name} | changes)))
    return folder


def better(report: dict[str, Any], **values: float) -> dict[str, Any]:
    """The models of a report, the linearized one with other values."""
    models: dict[str, Any] = report["models"]
    models["linearized"] |= {metric: measured(value) for metric, value in values.items()}
    return models


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [saved(tmp_path / "one"), saved(tmp_path / "two", models=better(report(), copy_nll_512=0.2))]


def test_runs_of_one_base_have_it_once_and_share_one_zero(runs):
    found = compare(runs)
    assert list(found["bases"]) == ["model"]
    assert found["bases"]["model"]["cache_bytes"] == 23_040 * 32_768
    assert {name: run["cache_bytes"] for name, run in found["runs"].items()} == dict.fromkeys(
        ("one", "two"), 1_536_000 + 5000 * 32_768
    )
    assert found["notes"] == []
    one, two = (run["recovery"] for run in found["runs"].values())
    assert math.isclose(one["copy_nll_512"], 0.9)
    assert math.isclose(two["copy_nll_512"], 1.0)
    assert one.keys() == two.keys()
    assert not {"text_byte_ppl", "text_nll_at_256", "piqa/acc", "odd"} & one.keys()
    assert math.isclose(found["runs"]["one"]["mean_recovery"], sum(one.values()) / len(one))


def test_a_recipe_whose_untrained_window_is_weak_flatters_no_run(tmp_path, runs):
    weak = report()["models"]
    weak["window_only_untrained"] |= {"copy_nll_512": measured(9.0), "niah_s1_1024/contains": measured(0.0)}
    found = compare([saved(tmp_path / "no-sinks", models=weak), *runs])
    assert found["zero"]["model"]["copy_nll_512"]["value"] == 1.7
    assert found["zero"]["model"]["niah_s1_1024/contains"]["value"] == 0.05
    assert found["runs"]["no-sinks"]["recovery"] == found["runs"]["one"]["recovery"] == recovered(runs)
    # the control: from the weak window the same run would seem to recover more
    alone = compare([tmp_path / "no-sinks", saved(tmp_path / "again", models=weak)])
    assert alone["zero"]["model"]["copy_nll_512"]["value"] == 9.0
    assert alone["runs"]["no-sinks"]["recovery"]["copy_nll_512"] > recovered(runs)["copy_nll_512"] + 0.05


def test_the_window_of_a_hybrid_is_no_zero_for_runs_with_fewer_softmax_layers(tmp_path, runs):
    hybrid, layers = report()["models"], report()["plan"]["linearization"]["layers"]
    hybrid["window_only_untrained"] |= {"copy_nll_512": measured(0.8), "niah_s1_1024/contains": measured(0.4)}
    more = report()["plan"] | {"linearization": {"layers": ["softmax", *layers]}}
    found = compare([saved(tmp_path / "hybrid", models=hybrid, plan=more), *runs])
    assert found["zero"]["model"]["copy_nll_512"]["value"] == 1.7
    assert found["runs"]["one"]["recovery"] == recovered(runs)
    # the control: with as many softmax layers as the others have, its window is the zero
    same = compare([saved(tmp_path / "same", models=hybrid), *runs])
    assert same["zero"]["model"]["copy_nll_512"]["value"] == 0.8
    assert same["zero"]["model"]["niah_s1_1024/contains"]["value"] == 0.4
    assert same["runs"]["one"]["recovery"]["copy_nll_512"] < recovered(runs)["copy_nll_512"]


def recovered(runs: list[Path]) -> dict[str, float]:
    """What the first of these runs recovers when they are compared alone."""
    found: dict[str, float] = compare(runs)["runs"]["one"]["recovery"]
    return found


def test_runs_of_different_suites_show_what_they_share_and_say_what_is_missing(tmp_path, runs):
    models = report()["models"]
    for column in models.values():
        del column["copy_nll_64"], column["piqa/acc"]
        column["mine"] = measured(1.0)
    found = compare([*runs, saved(tmp_path / "short", models=models)])
    assert "copy_nll_64" not in found["metrics"]
    assert "copy_nll_256" in found["metrics"]
    assert found["runs"]["short"]["missing"] == ["copy_nll_64", "piqa/acc"]
    assert "short did not measure copy_nll_64, piqa/acc, which others did." in found["notes"]
    assert "one did not measure mine, which others did." in found["notes"]


def test_metrics_over_other_numbers_of_rows_are_named(tmp_path, runs):
    models = report()["models"]
    for column in models.values():
        column["piqa/acc"] = measured(0.64, n=10)
    found = compare([*runs, saved(tmp_path / "few", models=models)])
    assert found["notes"] == ["Measured over different numbers of rows: piqa/acc (64 in one, two; 10 in few)."]


def test_every_base_has_its_own_column_also_one_that_was_measured_differently(tmp_path, runs):
    other_text = report()["models"]
    for column in other_text.values():
        column["text_ppl"] = measured(3 * column["text_ppl"]["value"])
    paths = [*runs, saved(tmp_path / "other", base="another/base"), saved(tmp_path / "text", models=other_text)]
    found = compare(paths)
    assert {name: run["base"] for name, run in found["runs"].items()} == {
        "one": "model",
        "two": "model",
        "other": "base",
        "text": "model (2)",
    }
    assert found["notes"][0].startswith("text and one measured model differently (text_ppl: 60.00 against 20.00)")


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path):
    paths = [saved(tmp_path / folder, name="default") for folder in ("a", "b")]
    assert list(compare([*paths, tmp_path / "a" / "report.json"])["runs"]) == ["a", "b", "a (2)"]


def test_a_run_worse_than_its_untrained_window_is_named_first(tmp_path, runs, capsys):
    worse = saved(tmp_path / "poor", models=report(worse=True)["models"])
    out = tmp_path / "page.html"
    assert main.main(["compare", *map(str, [*runs, worse]), "--out", str(out)]) == 0
    assert capsys.readouterr().out.startswith("poor is worse than its untrained window.")
    html = out.read_text()
    assert html.index('<section class="verdict bad"') == html.index("<section")
    assert main.main(["compare", *map(str, runs), "--out", str(out)]) == 0
    assert "worse than" not in capsys.readouterr().out
    assert '<section class="verdict bad"' not in out.read_text()


def test_a_run_is_not_called_worse_by_what_its_own_verdict_leaves_out(tmp_path, runs):
    models = report()["models"]
    models["linearized"]["copy_nll_512"] = measured(9.0)
    within = {name: {m: value for m, value in column.items() if m != "copy_nll_512"} for name, column in models.items()}
    beyond = saved(tmp_path / "beyond", models=models, verdict=verdict(within))
    assert compare([*runs, beyond])["runs"]["beyond"]["worse_than_untrained"] is False
    counted = saved(tmp_path / "counted", models=models, verdict=verdict(models))
    assert compare([*runs, counted])["runs"]["counted"]["worse_than_untrained"] is True


def test_the_table_and_the_page_hold_every_number(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main.main(["compare", *map(str, runs)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    html = Path("compare.html").read_text()
    for text in ("model", "one", "two", "755.0 MB", "165.4 MB", "copy_nll_512", "0.350", "0.200"):
        assert text in shown
        assert text in html
    assert "0.350 ± 0.010" in shown
    assert "Recovery over cache size" in html
    for title in ("Copying text", "Needle niah_s1", "Loss by position, text"):
        assert f"<figcaption>{title}</figcaption>" in html
    assert "one: 0.219 at 64, 0.275 at 256, 0.350 at 512; two: 0.219 at 64, 0.275 at 256, 0.200 at 512; model:" in html


def test_json_is_what_was_compared(runs, tmp_path, capsys):
    assert main.main(["compare", *map(str, runs), "--json", "--out", str(tmp_path / "page.html")]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(compare(runs)))


def test_markup_in_names_is_text(tmp_path):
    found = compare([saved(tmp_path / "a", name=HOSTILE, base=HOSTILE), saved(tmp_path / "b", name="[red]b[/red]")])
    html = compare_page.page(found)
    assert "<script" not in html
    assert "<img" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html


def test_the_reports_of_before_are_compared():
    found = compare([REPORTS / f"smollm2-135m-{name}" for name in ("gla", "hybrid", "liger-paper-short")])
    assert found["metrics"] == ["text_ppl", "text_byte_ppl", "copy_nll_256"]
    assert list(found["bases"]) == ["SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct (2)"]
    assert found["runs"]["smollm2-135m-gla"]["measures"]["text_ppl"]["value"] == 27.30054275965002
    assert found["runs"]["smollm2-135m-hybrid"]["cache_bytes"] == 360406496


def test_an_older_page_is_replaced_and_nothing_else(runs, tmp_path):
    found, out = compare(runs), tmp_path / "page.html"
    compare_page.write(found, out)
    compare_page.write(found, out)
    out.write_text("mine")
    with pytest.raises(BadInput, match="already exists and is not a page that compare wrote"):
        compare_page.write(found, out)
    assert out.read_text() == "mine"
    with pytest.raises(BadInput, match="there is no folder"):
        compare_page.write(found, tmp_path / "nowhere" / "page.html")
    with pytest.raises(BadInput, match="is a folder, not a file"):
        compare_page.write(found, tmp_path)


def broken(change: str, value: Any) -> dict[str, Any]:
    """A report with something else at the path `change`, or with nothing there."""
    made = report()
    *path, last = change.split(".")
    inside: Any = made
    for name in path:
        inside = inside[name]
    if value is None:
        del inside[last]
    else:
        inside[last] = value
    return made


@pytest.mark.parametrize(
    ("change", "value", "says"),
    [
        ("models", None, "models: this field is required and missing"),
        ("models.window_only_untrained", None, "models.window_only_untrained: this field is required and missing"),
        ("models.base", [], "models.base: should be a mapping"),
        ("models.linearized.text_ppl.value", "9", "models.linearized.text_ppl.value: should be a number"),
        ("models.linearized.text_ppl.value", 10**400, "models.linearized.text_ppl.value"),
        ("models.linearized.text_ppl.value", math.nan, "models.linearized.text_ppl.value: should be a finite number"),
        ("models.window_ablated.text_ppl.stderr", -1.0, "models.window_ablated.text_ppl.stderr"),
        ("name", 3, "name: should be a string"),
        ("plan", None, "plan: this field is required and missing"),
        ("plan.cache_bytes.32768", None, "plan.cache_bytes: has no size at 32768 tokens"),
        ("plan.cache_bytes.4096", {"base": 0, "linearized": 1}, "plan.cache_bytes.4096.base"),
    ],
)
def test_what_is_no_report_is_refused_by_the_name_of_its_field(runs, tmp_path, change, value, says, capsys):
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(broken(change, value)))
    assert main.main(["compare", str(runs[0]), str(path), "--out", str(tmp_path / "page.html")]) == 2
    said = capsys.readouterr().err
    assert f"error: {path}: {says}" in said
    assert said.count("\n") == 1
    assert not (tmp_path / "page.html").exists()


def test_runs_without_a_common_metric_are_refused(runs, tmp_path):
    models = {name: {"mine": measured(1.0)} for name in report()["models"]}
    with pytest.raises(BadInput, match="has no metric in common"):
        compare([runs[0], saved(tmp_path / "other", models=models)])


def test_a_report_that_is_not_what_its_run_wrote_is_named(runs):
    for run in runs:
        outputs = {"report.json": sha256_file(run / "report.json")}
        (run / "manifest.json").write_text(json.dumps({"steps": {"report": {"outputs": outputs}}}))
    assert compare(runs)["notes"] == []
    changed = json.loads((runs[0] / "report.json").read_text())
    changed["models"]["linearized"]["copy_nll_512"]["value"] = 0.1
    (runs[0] / "report.json").write_text(json.dumps(changed))
    (note,) = compare([runs[0], runs[1] / "report.json"])["notes"]
    assert note.startswith(f"{runs[0] / 'report.json'}: has changed since it was written")


def test_torch_is_not_imported(runs, tmp_path):
    code = (
        "import sys; from linearize_command import main; code = main(sys.argv[1:]);"
        "sys.exit(code if 'torch' not in sys.modules else 99)"
    )
    words = ["compare", *map(str, runs), "--out", str(tmp_path / "page.html")]
    assert subprocess.run([sys.executable, "-c", code, *words], env=os.environ, capture_output=True).returncode == 0
