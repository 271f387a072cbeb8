"""The model card of an export: metadata that the hub reads, the base's license, and no local paths."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path
from typing import Any

import pytest
from clients import folder
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

from liger_convert.cli import main
from liger_convert.pipeline.card import add_figures

CARDS: dict[str, tuple[str, dict[str, Any]]] = {
    "named": ("license: apache-2.0\ntags: [a]\n", {"license": "apache-2.0"}),
    "several": ("license: [mit, apache-2.0]\n", {"license": ["mit", "apache-2.0"]}),
    "its own": (
        "license: other\nlicense_name: some-research\nlicense_link: https://example.org/license\n",
        {"license": "other", "license_name": "some-research", "license_link": "https://example.org/license"},
    ),
    "in a file": ("license: other\nlicense_link: LICENSE\n", {"license": "other", "license_link": "LICENSE"}),
    "in a file of a machine": ("license: other\nlicense_link: /somewhere/LICENSE\n", {"license": "other"}),
    "quoted": ('license: "c-uda: yes"\n', {"license": "c-uda: yes"}),
    "windows": ("license: mit\r\n", {"license": "mit"}),
    # what cannot be read says nothing
    "not named": ("tags: [a]\n", {}),
    "a number": ("license: 3\n", {}),
    "no mapping": ("- license\n", {}),
    "no YAML": ("license: [\n", {}),
    "nested deeply": ("license: " + "[" * 5000 + "\n", {}),
}


def exported(capsys: pytest.CaptureFixture[str], out: Path, *options: str, model: Path | None = None) -> ModelCard:
    """The card of an export by the command line, read as the hub does."""
    assert main.main(["export", str(model or folder("hybrid")), str(out), *options]) == 0, capsys.readouterr().err
    return ModelCard.load(out / "README.md")


def model_with(tmp_path: Path, *files: str) -> Path:
    """A model that came with files of its base's license."""
    shutil.copytree(folder("hybrid"), tmp_path / "model")
    for file in files:
        (tmp_path / "model" / file).write_text("all rights")
    return tmp_path / "model"


@pytest.mark.parametrize("case", CARDS)
def test_a_card_carries_the_license_of_the_base_as_far_as_it_is_known(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    front, expected = CARDS[case]
    (tmp_path / "base").mkdir()
    (tmp_path / "base/README.md").write_text(f"---\n{front}---\n# A base\n")
    model = model_with(tmp_path, *(["LICENSE"] if case == "in a file" else []))
    card = exported(capsys, tmp_path / "out", "--base", str(tmp_path / "base"), model=model)
    assert {key: value for key, value in card.data.to_dict().items() if key.startswith("license")} == expected
    assert "license applies to them" in card.text
    assert expected.get("license_name", "license") in card.text


@pytest.mark.parametrize("said", ["", "no front matter", "---\nlicense: mit\n", None])
def test_a_license_that_is_a_file_alone_is_another_one(
    said: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "base").mkdir()
    if said is not None:
        (tmp_path / "base/README.md").write_text(said)
    model = model_with(tmp_path, "LICENSE.txt", "NOTICE")
    card = exported(capsys, tmp_path / "out", "--base", str(tmp_path / "base"), model=model)
    assert (card.data.license, card.data.license_link) == ("other", "LICENSE.txt")
    assert "(see [LICENSE.txt](LICENSE.txt), [NOTICE](NOTICE))" in card.text


def test_a_card_names_a_base_of_the_hub(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = exported(capsys, tmp_path / "out", "--base", "org/base-1B", "--name", "me/mine")
    assert card.data.base_model == "org/base-1B"
    assert card.data.library_name == "transformers"
    assert "license" not in card.data.to_dict()
    assert "# mine, linearized" in card.text
    assert 'path = "me/mine"' in card.text
    assert "2 of the 3 attention layers of [org/base-1B]" in card.text
    assert "while the other layer keeps its softmax attention" in card.text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "All 3 attention layers are replaced by a recurrent memory and a sliding window: their cache has"),
        (["--layers", "[softmax, main, softmax]"], "1 of the 3 attention layers is replaced by a recurrent memory and"),
        (["--mixer", "window"], "are replaced by a sliding window: their cache has the same size at any length.\n"),
        (["--mixer", "forgetting"], "are replaced by other attention over all tokens.\n"),
    ],
)
def test_a_card_says_what_replaces_attention(
    options: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = folder().parent / "base"
    assert main.main(["convert", str(base), str(tmp_path / "model"), *options]) == 0
    assert says in exported(capsys, tmp_path / "out", model=tmp_path / "model").text


def test_a_card_names_no_place_of_a_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = exported(capsys, tmp_path / "out", "--base", str(folder("hybrid").parent / "base"))
    assert card.data.base_model is None
    assert str(tmp_path) not in card.content
    assert str(folder("hybrid").parent) not in card.content


def test_what_a_card_says_loads_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    card = exported(capsys, tmp_path / 'a "model"')
    monkeypatch.chdir(tmp_path)
    (line,) = [line for line in card.text.splitlines() if line.startswith("path = ")]
    path = ast.literal_eval(line.removeprefix("path = "))
    assert AutoModelForCausalLM.from_pretrained(path).config.num_hidden_layers == 3


def test_figures_take_the_place_of_older_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = exported(capsys, tmp_path / "out")
    page = "# tiny\n\nIt.\n\n## What it is worth\n\n- Good.\n\n| a | {} |\n\n## What it costs\n\nMuch.\n"
    for figure in ("1.00", "2.00"):
        add_figures(tmp_path / "out", page.format(figure))
    after = ModelCard.load(tmp_path / "out/README.md")
    assert after.data.to_dict() == before.data.to_dict()
    assert after.text.count("## What it is worth") == after.text.count("| a | 2.00 |") == 1
    assert "1.00" not in after.text
    assert "Much." not in after.text
    assert after.text.index("from_pretrained") < after.text.index("2.00") < after.text.index("## License")
    add_figures(tmp_path / "out", "# a report of something else\n")
    assert ModelCard.load(tmp_path / "out/README.md").content == after.content


def test_a_base_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["export", str(folder("hybrid")), str(tmp_path / "out"), "--base", "./no/such"]) == 2
    assert "./no/such: there is no such file or folder" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()
