"""report.json and report.md, against files in golden/ that a person has read; run this file to write them anew."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from liger_convert.config.resources import recipe_path
from liger_convert.eval.verdict import verdict
from liger_convert.pipeline.pages.common import describe_layers, describe_sources
from liger_convert.pipeline.report import build, cell, page, render, write_report

GOLDEN = Path(__file__).parent / "golden"


def measured(value: float | None, stderr: float | None = None, n: int = 10) -> dict[str, Any]:
    return {"value": value, "stderr": stderr, "n": n}


def results() -> dict[str, Any]:
    values = {
        "base": (22.98, 1.2, 0.231, 0.008, 0.65),
        "window_only_untrained": (28.89, 1.5, 3.42, 0.02, 0.65),
        "linearized": (26.1, 1.3, 1.75, 0.03, 0.66),
        "memory_ablated": (30.2, 1.6, 3.6, 0.02, 0.64),
        "window_ablated": (3.9e6, 2e5, None, None, 0.51),
    }
    models = {
        name: {
            "text_ppl": measured(ppl, se),
            "text_byte_ppl": measured(2.1, 0.05),
            "copy_nll_256": measured(copy, copy_se, 12),
            "piqa/acc": measured(acc, 0.0478, 100),
            "lambada_openai/perplexity": measured(48.2),
        }
        for name, (ppl, se, copy, copy_se, acc) in values.items()
    }
    return {
        "suite": {"name": "quick", "description": "a first look"},
        "models": models,
        "verdict": verdict(models),
        "continuations": [
            {"prompt": "Once upon a time", "base": "there was\n\na king.", "linearized": "there was a cat."}
        ],
    }


def manifest(**steps: Any) -> dict[str, Any]:
    spec = {"type": "gla", "window": 64, "sinks": 4}
    plan = {
        "linearization": {"format": 1, "mixers": {"main": spec}, "layers": ["main", "main", "main", "softmax"]},
        "new_parameters": {"model.layers.0.self_attn.mixer.log_share_H": [9]},
        "state_bytes": 1_536_000,
        "cache_bytes": {"4096": {"base": 94_371_840, "linearized": 24_000_000}},
    }
    stage = {"kind": "align", "steps": 20, "tokens": 40_960, "trained_parameters": 1234, "seconds": 60.5, "outputs": {}}
    return {
        "recipe": {
            "text": "version: 1",
            "overrides": ["seed=1", "eval={suite: quick}"],
            "resolved": {"name": "demo", "base": "org/model"},
        },
        "machine": {
            "device": "CPU: one",
            "threads": 2,
            "kernels": "torch",
            "platform": "Linux",
            "versions": {"python": "3.11", "torch": "2.13.0"},
        },
        "seed": 1,
        "steps": {"plan": {"plan": plan}, "1-align": stage | {"loss": [[10, 0.9], [20, 0.25]]}, **steps},
    }


def files() -> dict[str, str]:
    report = build(results(), manifest())
    return {"report.json": json.dumps(report, indent=2, ensure_ascii=False) + "\n", "report.md": page(report)}


def test_the_report_is_the_golden_one(tmp_path: Path) -> None:
    write_report(tmp_path, results(), manifest())
    for name, text in files().items():
        assert (tmp_path / name).read_text() == text == (GOLDEN / name).read_text(), name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.json", "report.md"]


def test_report_json_has_value_stderr_and_n_of_every_metric_of_every_model(tmp_path: Path) -> None:
    write_report(tmp_path, results(), manifest())
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["models"] == results()["models"]
    assert all(set(m) == {"value", "stderr", "n"} for measures in found["models"].values() for m in measures.values())


def test_the_command_names_the_recipe_whatever_the_run_was_called() -> None:
    renamed = manifest()
    renamed["recipe"] |= {"text": "version: 1\nname: default", "overrides": ["name=demo"]}
    report = build(results(), renamed)
    assert report["name"] == "demo"
    assert report["reproduce"]["command"] == "linearize run default.yaml --set name=demo"


def test_the_command_of_a_shipped_recipe_is_its_name() -> None:
    """A reader of the report may not have the recipe's file."""
    shipped = manifest()
    shipped["recipe"] |= {"text": recipe_path("default").read_text(), "overrides": ["base=mine"]}
    assert build(results(), shipped)["reproduce"]["command"] == "linearize run default --set base=mine"


def test_the_memory_that_a_stage_took_on_a_gpu_is_said_where_it_was_measured(tmp_path: Path) -> None:
    stages = manifest()
    stages["steps"]["1-align"]["gpu_memory"] = 13_760_000_000
    for name, given in (("gpu", stages), ("cpu", manifest())):
        (tmp_path / name).mkdir()
        write_report(tmp_path / name, results(), given)
    for name in ("report.md", "report.html"):
        assert "1-align took up to 13.8 GB of GPU memory." in (tmp_path / "gpu" / name).read_text()
        assert "GPU memory" not in (tmp_path / "cpu" / name).read_text()


def test_the_model_after_each_stage_what_was_left_out_and_what_was_adapted_are_shown() -> None:
    def measures(text: float, copying: float) -> dict[str, Any]:
        return {
            "other_ppl": {"value": text, "stderr": 0.1, "n": 8},
            "copy_nll": {"value": copying, "stderr": 0.1, "n": 8},
        }

    checked = manifest()
    checked["steps"]["check"] = {"check": {"base": measures(16.1, 0.2), "window_only_untrained": measures(18.2, 1.3)}}
    checked["steps"]["1-align"] |= {"check": measures(19.4, 1.4), "kept": False, "rates": 0.25}
    checked["steps"]["plan"]["plan"]["adapted"] = ["stages[0].seq_len: 2,048 in place of 4,096"]
    text = page(build(results(), checked))
    assert "| base | 16.10 ± 0.10 | 0.200 ± 0.100 |" in text
    assert "| window only, untrained | 18.20 ± 0.10 | 1.300 ± 0.100 |" in text
    assert "| 1-align | 19.40 ± 0.10 | 1.400 ± 0.100 |" in text
    assert "| 1-align (left out: it made the model worse) |" in text
    assert "- Adapted to this base and machine: stages[0].seq_len: 2,048 in place of 4,096." in text
    assert "after each stage" not in page(build(results(), manifest()))


def test_a_report_without_training_or_continuations_has_no_such_sections() -> None:
    bare = manifest()
    del bare["steps"]["1-align"]
    text = page(build(results() | {"continuations": []}, bare))
    assert "## Training" not in text
    assert "## Continuations" not in text
    assert "## How to reproduce it" in text


def test_layers_of_a_named_mixer_are_told_from_those_of_the_main_one() -> None:
    named = manifest()
    linearization = named["steps"]["plan"]["plan"]["linearization"]
    linearization["mixers"]["recall"] = linearization["mixers"]["main"]
    linearization["layers"] = ["main", "recall", "main", "softmax"]
    text = page(build(results(), named))
    assert "2 became `gla` (window 64, 4 sinks), 1 became `recall`: `gla` (window 64, 4 sinks) and 1 stayed" in text


def test_a_report_of_a_run_that_chose_its_layers_shows_the_choice() -> None:
    losses = {"copy_nll": 3.2, "text_nll": 3.5}
    path = [{"layer": 18, "copy_nll": 2.5, "text_nll": None}, {"layer": 3, "copy_nll": 1.5, "text_nll": 3.4}]
    selection = {"softmax_layers": [3, 18], "base": losses, "linear": losses, "layers": [], "path": path}
    report = build(results(), manifest(**{"select-layers": {"selection": selection, "outputs": {}}}))
    assert report["selection"] == selection
    text = page(report)
    assert "## Why these layers stayed softmax" in text
    assert "| + 18 | 2.500 | not finite |\n| + 3 | 1.500 | 3.400 |\n| all: the base | 3.200 | 3.500 |\n" in text
    assert "## Why th" not in page(build(results(), manifest()))


def test_a_choice_by_kl_is_shown_with_its_divergences() -> None:
    selection = {"softmax_layers": [3], "base": {"kl": 0.0}, "linear": {"kl": 0.9}, "layers": []}
    selection["path"] = [{"layer": 3, "kl": 0.25}]
    text = page(build(results(), manifest(**{"select-layers": {"selection": selection, "outputs": {}}})))
    assert "| softmax layers | KL |\n|---|---:|\n| none | 0.900 |\n| + 3 | 0.250 |\n" in text


@pytest.mark.parametrize(
    ("value", "stderr", "text"),
    [
        (23.154, 1.239, "23.15 ± 1.24"),
        (0.405, 0.0049, "0.405 ± 0.005"),
        (0.405, None, "0.405"),
        (2021.4, 12.3, "2021 ± 12"),
        (3.9e6, 2e5, "3.9e+06 ± 2e+05"),
        (None, None, "not finite"),
    ],
)
def test_a_cell_shows_no_more_digits_than_it_knows(value: float | None, stderr: float | None, text: str) -> None:
    assert cell(measured(value, stderr)) == text


def test_the_terminal_table_has_a_column_for_every_model_and_the_verdict_below() -> None:
    console = Console(file=io.StringIO(), width=160)
    console.print(render(results()))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for text in (
        "window only, untrained",
        "window ablated",
        "copy_nll_256",
        "1.750 ± 0.030",
        "not finite",
        "The memory is used",
    ):
        assert text in shown


def test_names_of_metrics_are_whole_on_a_terminal_of_80_columns() -> None:
    found = {"lambada_openai/perplexity": measured(48.29, 1.89)}
    console = Console(file=io.StringIO(), width=80)
    console.print(render({"models": dict.fromkeys(results()["models"], found)}))
    assert "lambada_openai/perplexity" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_model_worse_than_the_untrained_window_is_told_first_and_above_all_else() -> None:
    poor = results()
    poor["models"]["linearized"] = poor["models"]["linearized"] | {"text_ppl": measured(40.0, 1.0)}
    poor["verdict"] = verdict(poor["models"])
    first = poor["verdict"]["sentences"][0]
    assert first.startswith("THE MODEL IS WORSE IN PART than the untrained base")
    assert page(build(poor, manifest())).splitlines()[2] == f"> **{first}**"
    console = Console(file=io.StringIO(), width=160)
    console.print(render(poor))
    assert console.file.getvalue().startswith("THE MODEL IS WORSE IN PART")  # type: ignore[attr-defined]
    assert "> **" not in page(build(results(), manifest()))


def test_a_model_that_was_measured_on_less_leaves_its_cells_empty() -> None:
    console = Console(file=io.StringIO(), width=160)
    console.print(render({"models": {"base": {}, "mine": {"text_ppl": measured(9.0)}}}))
    assert "9.000" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("windows", "says"),
    [
        (
            [None, 8, 8, None],
            "1 became `gla` (window 64, 4 sinks), 1 stayed softmax and 2 kept the base's own sliding window.",
        ),
        ([8, 8, 8, 8], "1 became `gla` (window 64, 4 sinks) and 3 stayed softmax."),
    ],
)
def test_the_report_tells_the_bases_own_windows_from_layers_that_stayed_softmax(
    windows: list[int | None], says: str
) -> None:
    layers = ["main", "softmax", "softmax", "softmax"]
    spec = {"type": "gla", "window": 64, "sinks": 4}
    plan = {"linearization": {"mixers": {"main": spec}, "layers": layers}, "sliding_windows": windows}
    assert says in describe_layers({"plan": plan, "base": "b"})


def test_a_report_says_so_if_all_layers_became_the_same() -> None:
    linearization = {"mixers": {"main": {"type": "gla", "window": 64, "sinks": 4}}, "layers": ["main", "main"]}
    said = describe_layers({"plan": {"linearization": linearization}, "base": "b"})
    assert said == "All 2 attention layers of `b` became `gla` (window 64, 4 sinks)."


def test_of_one_layer_and_one_sink_a_report_speaks_in_the_singular() -> None:
    linearization = {"mixers": {"main": {"type": "gla", "window": 64, "sinks": 1}}, "layers": ["main"]}
    said = describe_layers({"plan": {"linearization": linearization}, "base": "b"})
    assert said == "The only attention layer of `b` became `gla` (window 64, 1 sink)."
    assert describe_sources({"text": {"fraction": 1, "epochs": 1}}) == "100 % text (read 1 time)"


if __name__ == "__main__":
    for name, text in files().items():
        (GOLDEN / name).write_text(text)
