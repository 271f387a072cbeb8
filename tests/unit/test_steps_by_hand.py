"""Commands that do one step of a run: which models and bases they take, and which text they read as held out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from runs import STAGE, write_home
from tiny_models import save_tiny_base
from transformers import AutoTokenizer

from liger_convert.cli import main, measuring
from liger_convert.config.recipe import load
from liger_convert.config.sources import PydocSource
from liger_convert.data.documents import load_source
from liger_convert.io.checkpoint import load_tokenizer
from liger_convert.io.checksums import sha256_file
from liger_convert.model.loading import load_linearized
from liger_convert.pipeline.manifest import Manifest, input_files

ALIGN: dict[str, Any] = {"kind": "align", "learning_rates": {"mixer": 1e-3}}
TEXT = ["--base", "base", "--text", "text.jsonl", "--tokens", "256", "--seq-len", "64"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory: what `write_home` writes, and the model `converted`."""
    folder = tmp_path_factory.mktemp("home")
    write_home(folder, [ALIGN])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "text.jsonl").write_text(
            "".join(json.dumps({"text": f"{i} bottles of beer on the wall " * 9}) + "\n" for i in range(40))
        )
        assert main.main(["convert", "base", "converted", "--window", "8"]) == 0
        yield folder


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main.main(words) == 2
    return capsys.readouterr().err.strip()


def test_calibrate_fits_a_learned_mix_as_a_run_does(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["convert", "base", "mixed", "--mixer", "gated-deltanet", "--window", "8"]) == 0
    capsys.readouterr()
    assert main.main(["calibrate", "mixed", "fitted", *TEXT, "--json"]) == 0
    errors = json.loads(capsys.readouterr().out)["layers"]
    assert all(layer["after"] < layer["before"] for layer in errors)
    start, end = (load_linearized(home / name).state_dict() for name in ("mixed", "fitted"))
    assert {name.split(".")[-1] for name in start if not torch.equal(start[name], end[name])} == {"mix_H"}


def test_a_calibrated_export_has_no_checksums_of_the_export(home: Path) -> None:
    assert main.main(["export", "converted", "exported"]) == 0
    assert main.main(["verify", "exported"]) == 0
    assert main.main(["calibrate", "exported", "exported-fitted", *TEXT]) == 0
    assert (home / "exported/SHA256SUMS").exists()
    assert not (home / "exported-fitted/SHA256SUMS").exists()
    shutil.copy("exported/SHA256SUMS", "exported-fitted")
    assert main.main(["verify", "exported-fitted"]) != 0, "the checksums of the export do not fit"


def test_train_refuses_a_base_of_other_sizes_and_warns_of_another_base(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "recipe.yaml", "--stage", "1", "--model", "converted", "--out"]
    save_tiny_base("llama", home / "deep", num_hidden_layers=4)
    said = "error: --base deep: its num_hidden_layers is 4, but converted was made from a base with 3"
    assert refusal(capsys, *words, "deep-out", "--base", "deep") == said
    assert not (home / "deep-out").exists()
    save_tiny_base("llama", home / "other", seed=1)
    for base, warnings in (("base", 0), ("other", 1)):
        capsys.readouterr()
        assert main.main([*words, f"{base}-out", "--base", base]) == 0
        assert capsys.readouterr().err.count("warning: --base other: the token embeddings of converted") == warnings


def test_a_second_alignment_that_would_fit_trained_mixers_again_is_refused(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = yaml.safe_load((home / "recipe.yaml").read_text())
    frozen: dict[str, Any] = {"attention": 1e-3}
    cases: list[tuple[list[dict[str, Any]], bool]] = [
        ([{}, {}], True),
        ([{}, {"calibrate": False}], False),
        ([{"learning_rates": frozen}, {}], False),
        ([{}, {"learning_rates": frozen}], False),
    ]
    for stages, refused in cases:
        (home / "twice.yaml").write_text(
            yaml.safe_dump(recipe | {"stages": [STAGE | ALIGN | stage for stage in stages]})
        )
        if refused:
            said = "stages[1].calibrate: would overwrite the mixers that earlier stages trained; use false"
            assert said in refusal(capsys, "plan", "twice.yaml")
        else:
            assert main.main(["plan", "twice.yaml"]) == 0


def test_a_model_is_not_its_own_baseline(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", "converted", "--baseline", "converted", "--suite", "suite.yaml", "--text", "text.jsonl"]
    assert refusal(capsys, *words).startswith("error: --baseline converted: is the model itself")


def test_what_only_the_baseline_is_not_measured_on_is_told(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny_base("llama", home / "short", max_position_embeddings=24)
    (home / "long.yaml").write_text(
        "description: tiny\ntext: [{window: 32, windows: 2}]\ncopying: [{lengths: [8, 16]}]\n"
    )

    def notes(model: str, baseline: str) -> list[str]:
        words = ["eval", model, "--baseline", baseline, "--suite", "long.yaml", "--text", "text.jsonl", "--json"]
        capsys.readouterr()
        assert main.main(words) == 0
        return json.loads(capsys.readouterr().out).get("notes", [])

    said = [
        "text_ppl, text_byte_ppl: measured in windows of 24 tokens, the most that the base supports",
        "copy_nll_16: left out because repeated once, they are longer than the 24 tokens that the base supports",
    ]
    assert notes("base", "short") == [f"--baseline short: {note}" for note in said]
    assert notes("short", "base") == said
    assert notes("base", "converted") == []


def test_a_baseline_whose_tokens_are_others_is_told(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its perplexity counts other tokens. A token that no text has makes no difference."""
    (home / "reads.yaml").write_text("description: tiny\ntext: [{window: 32, windows: 2}]\n")
    said = []
    for added in ("never there", "bottles of"):
        tokenizer = AutoTokenizer.from_pretrained(save_tiny_base("llama", home / "other"))
        tokenizer.add_tokens([added])
        tokenizer.save_pretrained(home / "other")
        words = ["eval", "base", "--baseline", "other", "--suite", "reads.yaml", "--text", "text.jsonl", "--json"]
        capsys.readouterr()
        assert main.main(words) == 0
        said.append([note for note in json.loads(capsys.readouterr().out).get("notes", []) if "other tokens" in note])
        shutil.rmtree(home / "other")
    assert said[0] == []
    assert len(said[1]) == 1
    assert said[1][0].startswith("--baseline other: splits text into other tokens than the model")


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class Own(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_a_trusted_model_with_its_own_code_is_measured(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree("base", "own")
    config = json.loads((home / "own/config.json").read_text())
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    (home / "own/config.json").write_text(json.dumps(config | {"model_type": "own", "auto_map": names}))
    (home / "own/own.py").write_text(OWN_CODE)
    words = ["eval", "own", "--baseline", "base", "--suite", "suite.yaml", "--text", "text.jsonl"]
    assert "brings its own code" in refusal(capsys, *words)
    assert main.main([*words, "--trust-remote-code", "--json"]) == 0
    models = json.loads(capsys.readouterr().out)["models"]
    assert models["model"] == models["base"]


def held_out(model: Path) -> list[list[int]]:
    return [list(document.ids) for document in measuring._held_out("pydoc", load_tokenizer(model), model)]


def test_pydoc_is_held_out_as_the_run_of_the_model_did(home: Path) -> None:
    tokenizer = load_tokenizer(home / "converted")
    run = home / "run"
    shutil.copytree("converted", run / "export")
    resolved = {"data": {"text": {"source": "pydoc", "held_out": 0.2}}}
    Manifest({"resolved": resolved}, {}, 7).write(run)
    documents = load_source(PydocSource(held_out=0.2), tokenizer, seed=7)
    trained = [list(document.ids) for document in documents.train]
    assert held_out(run / "export") == [list(document.ids) for document in documents.held_out]
    assert any(ids in trained for ids in held_out(home / "converted")), "what another seed holds out was trained on"


def test_a_model_without_its_run_is_told_which_part_of_pydoc_it_reads(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "little.yaml").write_text("description: tiny\ntext: [{window: 16, windows: 2}]\n")
    words = ["eval", "--suite", "little.yaml", "--json"]

    def notes(model: str, *more: str) -> Any:
        capsys.readouterr()
        assert main.main([*words, model, *more]) == 0
        return json.loads(capsys.readouterr().out).get("notes", [])

    assert [note for note in notes("converted") if "the model is not in the folder of a run" in note]
    assert notes("converted", "--text", "text.jsonl") == []
    assert not [note for note in notes("base") if "in the folder of a run" in note]
    shutil.copytree("converted", home / "of-a-run/export")
    Manifest({}, {}, 0).write(home / "of-a-run")
    assert not [note for note in notes("of-a-run/export") if "in the folder of a run" in note]


def test_text_that_the_run_of_a_model_trained_on_is_told(home: Path) -> None:
    (home / "both.yaml").write_text(
        "description: tiny\ntext: [{window: 16, windows: 2}, {source: other, window: 16}]\n"
    )
    model = Path(shutil.copytree("converted", "trained/export"))
    (home / "unseen.jsonl").write_text((home / "text.jsonl").read_text())
    recipe = yaml.safe_load((home / "recipe.yaml").read_text())

    def told(data: dict[str, Any], stage: str, text: str = "pydoc", inputs: dict[str, Path] | None = None) -> list[str]:
        (home / "trained.yaml").write_text(
            yaml.safe_dump(recipe | {"data": data, "stages": [STAGE | ALIGN | {"data": stage}]})
        )
        manifest = Manifest.new(load(home / "trained.yaml"), "", [], {})
        manifest.inputs = {name: sha256_file(file) for name, file in input_files(inputs or {}).items()}
        manifest.write(home / "trained")
        notes = measuring._cautions(model, model, measuring.EvalInputs("both.yaml", text=text))
        return [note.partition(":")[0] for note in notes if "the run of the model trained on this text" in note]

    text, docs = {"source": "file", "path": "text.jsonl"}, {"source": "pydoc"}
    assert told({"text": text}, "text", "text.jsonl") == ["--text text.jsonl"]
    assert told({"text": text | {"held_out": 0.1}}, "text", "text.jsonl") == ["--text text.jsonl"]
    assert told({"text": text}, "text", "unseen.jsonl") == []
    assert told({"text": text | {"validation": "unseen.jsonl"}}, "text", "unseen.jsonl") == []
    assert told({"docs": docs}, "docs") == ["--text pydoc"]
    assert told({"docs": docs | {"held_out": 0.1}}, "docs") == []
    assert told({"docs": docs | {"held_out": 0.1}}, "docs", "unseen.jsonl") == ["--other-text pydoc"]
    assert told({"docs": docs, "text": text}, "text", "unseen.jsonl") == [], "no stage reads it"
    written = {"source": "teacher", "tokens": 512, "document_tokens": 64, "prompts": "text", "prompt_tokens": 8}
    assert told({"text": text, "own": written}, "own", "text.jsonl") == ["--text text.jsonl"]

    # copies, whose paths say nothing
    read = {"data.text.path": home / "text.jsonl", "data.docs.path": home / "suite.yaml"}
    (home / "copies/deep").mkdir(parents=True)
    shutil.copy(home / "text.jsonl", home / "copies/deep/part.jsonl")
    (home / "copies/other.jsonl").write_text('{"text": "all new"}\n')
    for place in ("unseen.jsonl", "copies", "copies/deep/part.jsonl"):
        assert told({"text": text}, "text", place, read) == [f"--text {place}"]
    assert told({"text": text}, "text", "copies/other.jsonl", read) == []
    assert told({"docs": docs | {"held_out": 0.1}, "text": text}, "docs", "unseen.jsonl", read) == [
        "--other-text pydoc"
    ], "no stage reads it"
    given = {"data.text.validation": home / "text.jsonl"}
    assert told({"text": text | {"validation": "held.jsonl"}}, "text", "unseen.jsonl", given) == [], "it is held out"


def merge_said(capsys: pytest.CaptureFixture[str], out: str, *words: str) -> str:
    capsys.readouterr()
    assert main.main(["merge", *words, "--out", out]) == 0
    return capsys.readouterr().err


def test_merged_stages_have_to_build_upon_each_other(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = ["train", "recipe.yaml", "--stage", "1"]
    assert main.main([*train, "--model", "converted", "--out", "first"]) == 0
    assert merge_said(capsys, "merged-first", "converted", "first") == ""
    for model, out in (("converted", "beside"), ("merged-first", "behind")):
        assert main.main([*train, "--model", model, "--out", out, "--set", "stages[0].calibrate=false"]) == 0
    assert merge_said(capsys, "merged-behind", "converted", "first", "behind") == ""
    said = "warning: beside: was trained on converted without first; merge that first and train on the result"
    assert merge_said(capsys, "merged-beside", "converted", "first", "beside").strip() == said
    refused = refusal(capsys, "merge", "converted", "first", "behind", str(home / "first"), "--out", "twice")
    assert refused.startswith(f"error: {home / 'first'}: is given twice")
    assert not (home / "twice").exists()


def test_templates_with_a_name_are_kept_by_every_step(home: Path) -> None:
    shutil.copytree("base", "named")
    folder = home / "named/additional_chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").write_text("TOOLS {{ tools }}")
    (folder / "notes.txt").write_text("not copied")
    steps = (
        ["convert", "named", "n1", "--window", "8"],
        ["calibrate", "n1", "n2", *TEXT],
        ["train", "recipe.yaml", "--stage", "1", "--model", "n2", "--out", "nt", "--set", "stages[0].calibrate=false"],
        ["merge", "n2", "nt", "--out", "n3"],
        ["export", "n3", "n4"],
        ["verify", "n4"],
    )
    for words in steps:
        assert main.main(words) == 0, words
    for made in ("n1", "n2", "n3", "n4"):
        assert [path.name for path in (home / made / folder.name).iterdir()] == ["tool_use.jinja"], made
        assert AutoTokenizer.from_pretrained(home / made).chat_template["tool_use"] == "TOOLS {{ tools }}"
