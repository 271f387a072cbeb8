"""A run notices when a stage makes the model worse, goes back, and exports nothing worse than no training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import weights, write_home
from tiny import tiny_config, tiny_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM

from liger_convert.cli import main
from liger_convert.data.documents import Document
from liger_convert.eval import measures as eval_measures
from liger_convert.pipeline import stage_check
from liger_convert.pipeline.stage_check import BASE, COPY, MODEL, TEXT, UNTRAINED, is_worse
from liger_convert.utils.errors import BadInput, LinearizeError

STAGES = [
    {"kind": "align", "learning_rates": {"mixer": 1e-3}},
    {"kind": "distill", "learning_rates": {"mixer": 1e-3, "body": 1e-4}},
]


def measures(text: float | None, copying: float | None) -> dict[str, Any]:
    return {name: {"value": value, "stderr": 0.1, "n": 8} for name, value in ((TEXT, text), (COPY, copying))}


@pytest.mark.parametrize(
    ("measured", "worse"),
    [
        ((18.0, 1.0), False),  # no different
        ((17.0, 0.5), False),
        ((19.0, 1.0), True),
        ((18.0, 1.3), True),
        ((18.1, 1.05), False),  # less than what counts
        ((19.0, 0.5), False),  # one for the other
        ((None, 1.0), True),  # not finite
    ],
)
def test_worse_is_what_loses_and_wins_nothing(measured, worse):
    assert is_worse(measures(*measured), measures(18.0, 1.0), base=measures(16.0, 0.2)) is worse


def test_figures_after_a_stage_are_told_from_those_before_it():
    before = {BASE: measures(16.0, 0.2), UNTRAINED: measures(18.0, 3.0), MODEL: measures(17.0, 1.0)}
    said = stage_check.sentence(measures(16.5, 0.9), before)
    assert said.startswith(
        "perplexity of text of another kind 16.5 (base 16, untrained window 18, before this stage 17)"
    )


def test_what_is_as_good_as_the_base_is_never_worse():
    window, base = measures(18.0, 1.0), measures(20.0, 1.5)
    assert not is_worse(measures(20.0, 1.5), window, base)
    assert is_worse(measures(21.0, 1.7), window, base)


def test_text_that_is_not_of_another_kind_is_not_called_so() -> None:
    before = {BASE: measures(16.0, 0.2), UNTRAINED: measures(18.0, 3.0)}
    said = stage_check.sentence(measures(16.5, 0.9), before, "held-out text")
    assert said.startswith("perplexity of held-out text 16.5 (base 16, untrained window 18); loss on")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_home(tmp_path, STAGES)
    return tmp_path


def told(monkeypatch: pytest.MonkeyPatch, trained: list[tuple[float, float]]) -> None:
    """Whatever is measured, the models after training are said to be these, in turn."""
    said = iter(trained)
    untrained = {BASE: measures(16.0, 0.2), UNTRAINED: measures(18.0, 1.0)}
    monkeypatch.setattr(stage_check.StageCheck, "untrained", lambda self, linearization: untrained)
    monkeypatch.setattr(stage_check.StageCheck, "trained", lambda self, model, results: measures(*next(said)))


def run(*words: str) -> int:
    return main.main(["run", "recipe.yaml", "--out", "out", *words])


def steps(home: Path) -> dict[str, Any]:
    return json.loads((home / "out/manifest.json").read_text())["steps"]


def test_a_real_run_measures_the_base_the_window_and_each_stage(home: Path, capsys) -> None:
    assert run() == 0
    said = "warning: the base's perplexity on text of another kind is "  # its weights are random
    assert said in " ".join(capsys.readouterr().err.split())
    done = steps(home)
    assert set(done["check"]["check"]) == {BASE, UNTRAINED}
    assert done["check"]["check"][BASE] != done["check"]["check"][UNTRAINED]
    for name in ("1-align", "2-distill"):
        assert done[name]["check"].keys() == {TEXT, COPY}
        assert done[name]["kept"]
    assert done["1-align"]["check"] != done["2-distill"]["check"]


def test_a_run_on_pythons_documentation_is_checked_on_what_it_holds_out_and_says_so(home: Path, capsys) -> None:
    """Its check would otherwise be on text that it trains on."""
    pydoc = "data.text={source: pydoc, held_out: 0.1}"
    assert run("--set", pydoc, "--set", "when_worse=warn") == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "after 1-align: perplexity of held-out text " in said
    assert "text of another kind is" not in said
    assert steps(home)["check"]["checked_on"] == "held-out text"
    for page in ("report.md", "report.html"):
        text = " ".join((home / "out" / page).read_text().split())
        assert "The model after each stage, on a little held-out text and on a repetition of it" in text


@pytest.mark.parametrize(
    ("window", "windows", "length", "rows"),
    [
        (0, 64, 1024, 16),
        (512, 64, 1024, 16),
        (513, 63, 1026, 15),
        (1024, 32, 2048, 8),
        (4096, 8, 8192, 2),
        (4097, 64, 1024, 16),
    ],
)
def test_about_as_much_text_is_read_in_pieces_that_leave_the_window(
    window: int, windows: int, length: int, rows: int
) -> None:
    size = stage_check.Size(64, 1024, 32, 256, 16).leaving(window)
    assert size == stage_check.Size(windows, length, 32, 256, rows)


def test_a_runs_check_leaves_the_window_of_its_linear_layers(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    monkeypatch.setitem(stage_check.SIZES, "cpu", stage_check.Size(8, 20, 8, 10, 2))
    monkeypatch.setattr(
        stage_check.StageCheck, "_measure", lambda self, model: found.append(self.size) or measures(1.0, 1.0)
    )
    for window, length in ((10, 20), (20, 40)):
        assert run("--set", f"mixer.window={window}", "--out", f"out-{window}") == 0
        assert {size.window for size in found} == {length}
        found.clear()


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("context", [40, 41])
def test_a_measurement_stays_within_the_bases_context(context: int, begins: bool, monkeypatch) -> None:
    tokenizer = tiny_tokenizer()
    if begins:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    read: list[int] = []
    losses = eval_measures.token_losses
    monkeypatch.setattr(
        eval_measures, "token_losses", lambda model, ids_BT: read.append(ids_BT.shape[1]) or losses(model, ids_BT)
    )
    model = AutoModelForCausalLM.from_config(tiny_config("llama", max_position_embeddings=context)).eval()
    ids = np.array(tokenizer("a bottle of beer on the wall, " * 40)["input_ids"], np.int32)
    text = Document(ids, np.ones(len(ids), bool), 0)
    device, size = torch.device("cpu"), stage_check.SIZES["cpu"]
    stage_check.measure(model, tokenizer, [text], size, device, "float32", lambda *_: None)
    assert set(read) == {context, begins + 2 * ((context - begins) // 2)}


def train(tmp_path: Path, trained: list[tuple[float, float]], when_worse: str = "go_back", **options: Any) -> Any:
    """`train_checked` where nothing is trained and the models of its attempts are said to be these, in turn."""
    said, attempts = iter(trained), []
    before = {BASE: measures(16.0, 0.2), UNTRAINED: measures(18.0, 1.0), MODEL: measures(17.5, 0.9)}
    facts = stage_check.train_checked(
        "2-distill",
        when_worse,
        tmp_path,
        **{"aligns": False, "before": before} | options,
        train=lambda factor, out: attempts.append((factor, out.name)) or {"steps": 6},
        check=lambda out: measures(*next(said)),
    )
    return facts, attempts


def test_a_stage_that_helps_is_trained_once(tmp_path: Path) -> None:
    facts, attempts = train(tmp_path, [(17.0, 0.8)])
    assert attempts == [(1.0, tmp_path.name)]
    assert facts == {"steps": 6, "check": measures(17.0, 0.8), "rates": 1.0, "result": "result", "kept": True}


def test_a_stage_that_did_harm_is_trained_again_at_lower_rates(tmp_path: Path, capsys) -> None:
    facts, attempts = train(tmp_path, [(19.0, 1.2), (17.0, 0.8)])
    assert attempts == [(1.0, tmp_path.name), (0.25, "attempt-2")]
    assert (facts["kept"], facts["rates"], facts["result"]) == (True, 0.25, "attempt-2/result")
    assert "WORSE after 2-distill" in capsys.readouterr().err


def test_a_stage_after_one_that_did_harm_is_lowered_once_more(tmp_path: Path) -> None:
    _, attempts = train(tmp_path, [(19.0, 1.2), (17.0, 0.8)], first=0.25)
    assert attempts == [(0.25, tmp_path.name), (0.0625, "attempt-2")]


def test_a_stage_is_compared_with_the_model_before_it_and_not_with_the_window(tmp_path: Path) -> None:
    assert train(tmp_path, [(17.9, 0.95), (17.9, 0.95)])[0]["kept"] is False


def test_alignment_is_measured_and_never_undone(tmp_path: Path) -> None:
    facts, attempts = train(tmp_path, [(25.0, 3.0)], aligns=True)
    assert facts["kept"]
    assert len(attempts) == 1


def test_stop_ends_the_run_where_the_harm_was_done(tmp_path: Path) -> None:
    with pytest.raises(LinearizeError, match="2-distill made the model worse: "):
        train(tmp_path, [(19.0, 1.2)], "stop")


def test_warn_goes_on_and_says_so(tmp_path: Path, capsys) -> None:
    facts, attempts = train(tmp_path, [(30.0, 3.0)], "warn")
    assert facts["kept"]
    assert len(attempts) == 1
    assert "WORSE after 2-distill" in capsys.readouterr().err


def test_an_attempt_that_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    train(tmp_path, [(19.0, 1.2), (17.0, 0.8)])
    facts, _ = train(tmp_path, [])  # as a run that was killed before its manifest was written
    assert facts["result"] == "attempt-2/result"


def test_the_second_attempt_is_what_is_exported(home, monkeypatch) -> None:
    told(monkeypatch, [(17.5, 0.9), (19.0, 1.2), (17.0, 0.8)])
    assert run() == 0
    again = weights(home / "out")
    rates = "stages[1].learning_rates={mixer: 2.5e-4, body: 2.5e-5}"
    assert main.main(["run", "recipe.yaml", "--out", "low", "--set", rates, "--set", "when_worse=ignore"]) == 0
    assert weights(home / "low") == again
    assert main.main(["run", "recipe.yaml", "--out", "high", "--set", "when_worse=ignore"]) == 0
    assert weights(home / "high") != again


def test_a_stage_after_one_that_did_harm_begins_at_its_lower_rates(home, monkeypatch, capsys) -> None:
    write_home(home, [*STAGES, STAGES[1]])
    told(monkeypatch, [(17.5, 0.9), (19.0, 1.2), (17.0, 0.8), (16.8, 0.8)])
    assert run() == 0
    assert "3-distill begins at 0.25 times its learning rates" in capsys.readouterr().err
    assert [steps(home)[name]["rates"] for name in ("1-align", "2-distill", "3-distill")] == [1.0, 0.25, 0.25]
    lowered = [f"stages[{i}].learning_rates={{mixer: 2.5e-4, body: 2.5e-5}}" for i in (1, 2)]
    words = [word for rates in lowered for word in ("--set", rates)]
    assert main.main(["run", "recipe.yaml", "--out", "low", *words, "--set", "when_worse=ignore"]) == 0
    assert weights(home / "low") == weights(home / "out")


def test_a_stage_that_does_harm_twice_is_left_out(home, monkeypatch) -> None:
    told(monkeypatch, [(17.5, 0.9), (19.0, 1.2), (18.5, 1.0)])
    assert run() == 0
    assert steps(home)["2-distill"]["kept"] is False
    left_out = weights(home / "out")
    write_home(home, STAGES[:1])
    assert main.main(["run", "recipe.yaml", "--out", "aligned", "--set", "when_worse=ignore"]) == 0
    assert weights(home / "aligned") == left_out


def test_nothing_worse_than_no_training_is_exported(home, monkeypatch, capsys) -> None:
    told(monkeypatch, [(25.0, 3.0), (19.0, 1.2)])
    assert run() == 1
    said = capsys.readouterr().err
    assert "error: the model is worse than its untrained window" in said
    assert "when_worse: warn" in said
    assert not (home / "out/export").exists()
    assert "merge" not in steps(home)


def test_what_was_trained_is_exported_after_all_when_the_run_goes_on_with_warn(home, monkeypatch, capsys) -> None:
    told(monkeypatch, [(25.0, 3.0), (19.0, 1.2)])
    assert run() == 1
    assert run("--resume", "--set", "when_worse=warn") == 0  # nothing is trained or measured again
    assert "when_worse was" in capsys.readouterr().err
    exported = weights(home / "out")
    assert main.main(["run", "recipe.yaml", "--out", "ignored", "--set", "when_worse=ignore"]) == 0
    assert weights(home / "ignored") == exported


def test_a_run_that_left_a_stage_out_does_not_go_on_with_warn(home, monkeypatch, capsys) -> None:
    told(monkeypatch, [(25.0, 3.0), (26.0, 3.2), (26.0, 3.2)])
    assert run() == 1
    assert steps(home)["2-distill"]["kept"] is False
    assert run("--resume", "--set", "when_worse=warn") == 2
    assert "is a run of a different recipe (when_worse was" in capsys.readouterr().err


def test_a_model_that_no_stage_helped_is_not_exported() -> None:
    untrained = {BASE: measures(16.0, 0.2), UNTRAINED: measures(18.0, 1.0)}
    with pytest.raises(LinearizeError, match="no stage made the model better"):
        stage_check.require_better(untrained)
    stage_check.require_better(untrained | {MODEL: measures(18.0, 1.0)})


def test_a_text_that_cannot_be_read_is_no_reason_not_to_train(home, monkeypatch, capsys) -> None:
    def refuses(self: Any, linearization: Any) -> Any:
        raise BadInput("the tokenizer fails on this text")

    monkeypatch.setattr(stage_check.StageCheck, "untrained", refuses)
    assert run() == 0
    assert "warning: the stages are not checked: the tokenizer fails on this text" in capsys.readouterr().err
    assert "check" not in steps(home)["2-distill"]
    assert not (home / "out/steps").exists()


def test_ignore_measures_nothing(home, monkeypatch) -> None:
    told(monkeypatch, [])
    assert run("--set", "when_worse=ignore") == 0
    assert "check" not in steps(home)
    assert MODEL not in str(steps(home)["1-align"])
