"""`linearize train --resume` continues what was begun, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hostile import check_refusal
from tiny import save_tiny_base
from worlds import World, edited, wrote

from liger_convert.cli import main
from liger_convert.pipeline import begun_stage
from liger_convert.utils.errors import LinearizeError


def train(world: World, *words: str, out: str = "out") -> list[str]:
    recipe = str(world.folder / "recipe.yaml")
    return ["train", recipe, "--stage", "1", "--model", "linearized", "--out", out, *words]


@pytest.fixture
def begun(world: World) -> World:
    """A world with a stage that was trained to its end."""
    world.linearized()
    assert main.main(train(world)) == 0
    return world


def other_model(world: World) -> None:
    path = world.folder / "linearized/config.json"
    path.write_text(path.read_text() + "\n")


CHANGES: dict[str, tuple[Callable[[World], object], list[str], str]] = {
    "a field of the stage": (lambda w: None, ["--set", "stages[0].tokens=96"], "(stage.tokens was 64, is 96)"),
    "the kind of the stage": (
        lambda w: None,
        ["--set", "stages[0].kind=distill"],
        '(stage.kind was "align", is "distill")',
    ),
    "the seed": (lambda w: None, ["--set", "seed=1"], "(seed was 0, is 1)"),
    "the model": (other_model, [], "linearized/config.json: has changed since the run began"),
    "the base": (
        edited(lambda tensors: tensors["lm_head.weight"].add_(1)),
        [],
        "model.safetensors: has changed since the run began",
    ),
    "the text": (
        wrote("text.jsonl", json.dumps({"text": "another text " * 99}) + "\n"),
        [],
        "text.jsonl: has changed since the run began",
    ),
}


@pytest.mark.parametrize(("change", "words", "says"), CHANGES.values(), ids=CHANGES)
def test_a_stage_is_not_resumed_with_anything_else(
    begun: World,
    change: Callable[[World], object],
    words: list[str],
    says: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    change(begun)
    check_refusal(begun, lambda w: train(w, "--resume", *words), says, 2, capfd)


def test_what_does_not_change_the_training_may_change(begun: World) -> None:
    assert main.main(train(begun, "--resume", "--set", "name=other", "--set", "eval.limit=3")) == 0


@pytest.mark.parametrize("out", ["linearized", "base"])
def test_a_folder_without_a_stage_is_not_resumed(world: World, out: str, capfd: pytest.CaptureFixture[str]) -> None:
    world.linearized()
    check_refusal(world, lambda w: train(w, "--resume", out=out), f"{out}: has no stage to resume", 2, capfd)


def test_merging_into_another_model_than_the_stage_was_trained_on_is_said(begun: World, capfd) -> None:
    for folder, other in (("same", False), ("twin", True)):
        assert main.main(["convert", str(begun.base), folder, "--window", "8", *["--seed", "9"] * other]) == 0
        capfd.readouterr()
        assert main.main(["merge", folder, "out", "--out", f"merged-{folder}"]) == 0
        warned = "warning: out: was trained on other weights than those of twin" in capfd.readouterr().err
        assert warned == other


def test_another_model_is_said_before_the_merge_begins(begun: World, monkeypatch, capfd) -> None:
    assert main.main(["convert", str(begun.base), "twin", "--window", "8", "--seed", "9"]) == 0

    def fail(*_: object, **__: object) -> None:
        raise LinearizeError("the merge has begun")

    monkeypatch.setattr("liger_convert.training.merge.merge_results", fail)
    capfd.readouterr()
    assert main.main(["merge", "twin", "out", "--out", "merged"]) == 1
    said = capfd.readouterr().err
    assert 0 <= said.find("warning: out: was trained on other weights") < said.find("the merge has begun")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["linearized", "base", "--out", "merged"], "base/result: is not the result of a training stage"),
        (["linearized", "out", "--out", "base"], "base: already exists"),
    ],
)
def test_what_is_refused_at_a_glance_is_refused_before_weights_are_read(
    begun: World, words: list[str], says: str, monkeypatch, capfd
) -> None:
    monkeypatch.setattr(begun_stage, "sha256_input", None)
    check_refusal(begun, lambda w: ["merge", *words], says, 2, capfd)


def test_weights_are_read_up_to_the_first_file_that_differs(tmp_path: Path, monkeypatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(begun_stage, "sha256_input", lambda file: read.append(file.name) or file.read_text())
    (tmp_path / "model").mkdir()
    for name in "abc":
        (tmp_path / f"model/{name}.safetensors").write_text(name)
    for recorded, reads, same in (("abc", "abc", True), ("bca", "abc", True), ("axc", "ab", False), ("ab", "", False)):
        inputs = {f"model/{i}.safetensors": sha256 for i, sha256 in enumerate(recorded)}
        (tmp_path / begun_stage.FILE).write_text(json.dumps({"inputs": inputs}))
        assert (begun_stage.odd_merge(tmp_path / "model", [tmp_path]) is None) == same
        assert read == [f"{name}.safetensors" for name in reads]
        read.clear()


def test_what_was_learned_by_a_model_of_other_sizes_is_not_merged(begun: World, capfd) -> None:
    for folder, words, name in (
        ("deep", ["--window", "8"], "num_hidden_layers"),
        ("wide", ["--window", "9"], "linearization"),
    ):
        base = save_tiny_base("llama", begun.folder / f"base-{folder}", num_hidden_layers=4 if folder == "deep" else 3)
        assert main.main(["convert", str(base), folder, *words]) == 0
        check_refusal(
            begun,
            lambda w, folder=folder: ["merge", folder, "out", "--out", "merged"],
            f"out/result/model: its {name} is not that of {folder}; merge it into the model that it was trained from",
            2,
            capfd,
        )
