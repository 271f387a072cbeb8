"""Nothing outside of a run's folder is ever written, deleted or copied into it."""

import shutil
from pathlib import Path

import pytest
import yaml
from tiny import save_tiny_base

from liger_convert.cli import main
from liger_convert.config.recipe import load
from liger_convert.config.resources import chosen_recipe
from liger_convert.io.run_folder import RunFolder
from liger_convert.pipeline import steps
from liger_convert.utils.errors import BadInput

RECIPE = {
    "version": 1,
    "name": "tiny",
    "base": "base",
    "mixer": {"type": "gla", "window": 8, "sinks": 2},
    "device": "cpu",
    "precision": "float32",
    "eval": {"suite": "suite.yaml", "text": None},
}
SUITE = "description: tiny\ncopying: [{length: 8, draws: 2, tokens: uniform}]\n"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A working directory with a suite, and a folder that belongs to somebody else."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "suite.yaml").write_text(SUITE)
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim/file").write_text("precious")
    return tmp_path


@pytest.fixture
def base(home):
    return save_tiny_base("llama", home / "base")


def write_recipe(home: Path, **changes: object) -> str:
    (home / "recipe.yaml").write_text(yaml.safe_dump(RECIPE | changes))
    return "recipe.yaml"


BAD_NAMES = ["x/../../../victim", "..", "../victim", "/victim", "a/b", ".hidden", "a b", "a\nb", "x" * 61, "", "-x"]


@pytest.mark.parametrize("name", BAD_NAMES)
@pytest.mark.parametrize("where", ["name", "data", "mixers"])
def test_a_name_that_is_not_a_plain_word_is_refused(home, capsys, where, name):
    own = {"source": "teacher", "tokens": 64, "document_tokens": 16}
    changes = {"name": name, "data": {name: own}, "mixers": {name: {"type": "gla"}}}
    recipe = write_recipe(home, **{where: changes[where]})
    assert main.main(["run", recipe, "--out", "out"]) == 2
    (complaint,) = capsys.readouterr().err.splitlines()
    assert complaint.startswith(f"error: recipe.yaml: {where}")
    assert "cannot be a name" in complaint
    assert (home / "victim/file").read_text() == "precious"
    assert not (home / "out").exists()


def test_a_base_whose_folder_has_an_odd_name_needs_no_recipe(home):
    (home / "My Base (v2)").mkdir()
    assert load(*chosen_recipe(None, "My Base (v2)", ())).name == "My-Base-v2"


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "/etc", "a\0b"])
def test_a_path_of_a_run_has_plain_names_only(tmp_path, name):
    with pytest.raises(BadInput, match="is not the name of a file or folder in a run"):
        RunFolder(tmp_path / "run").path("steps", name)


def test_nothing_outside_of_a_run_is_removed(home):
    runner = home / "run"
    (runner / "steps").mkdir(parents=True)
    folder = RunFolder(runner)
    (runner / "steps/1-align").symlink_to(home / "victim")
    for call in (
        lambda: folder.step("1-align"),
        lambda: folder.remove(runner / "steps/1-align"),
        lambda: folder.remove(home / "victim"),
        lambda: folder.remove(runner / "../victim"),
        lambda: folder.remove(runner),
    ):
        with pytest.raises(BadInput, match=r"is not in the run's folder|is a link out of the run's folder"):
            call()
    assert (home / "victim/file").read_text() == "precious"
    (runner / "link").symlink_to(home / "victim/file")
    folder.remove(runner / "link", runner / "not-there")
    assert not (runner / "link").is_symlink()
    assert (home / "victim/file").read_text() == "precious"


def interrupt(*args: object, **options: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["steps", "export"])
def test_a_link_that_leads_out_of_a_run_is_refused_before_the_work(home, base, capsys, monkeypatch, name):
    recipe = write_recipe(home)
    with monkeypatch.context() as patch:
        patch.setattr(steps.convert, "convert_checkpoint", interrupt)
        assert main.main(["run", recipe, "--out", "out"]) == 130
    shutil.rmtree(home / "out" / name, ignore_errors=True)
    (home / "out" / name).symlink_to(home / "victim")
    capsys.readouterr()
    monkeypatch.setattr(steps.convert, "convert_checkpoint", None)
    assert main.main(["run", recipe, "--out", "out", "--resume"]) == 2
    assert "the run's folder out" in capsys.readouterr().err
    assert [path.name for path in (home / "victim").iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("out", "changes"),
    [
        ("base/out", {}),
        ("base", {}),
        ("rows/runs/out", {"eval": RECIPE["eval"] | {"data": "rows"}}),
        ("rows/out", {"data": {"text": {"source": "file", "path": "rows"}}}),
        ("rows/out", {"data": {"text": {"source": "file", "path": "suite.yaml", "validation": "rows"}}}),
    ],
)
def test_a_run_inside_a_folder_that_it_reads_is_refused(home, base, capsys, out, changes):
    (home / "rows").mkdir()
    recipe = write_recipe(home, **changes)
    before = sorted(home.rglob("*"))
    assert main.main(["run", recipe, "--out", out]) == 2
    (complaint,) = capsys.readouterr().err.splitlines()
    assert complaint.startswith(f"error: --out {out}: is inside")
    assert sorted(home.rglob("*")) == before


# --- what is copied from a base


def test_a_companion_that_is_a_link_to_elsewhere_is_not_copied(home, base, capsys):
    (home / "secret").write_text("secret")
    (home / "base/LICENSE").symlink_to("../secret")
    (home / "base/NOTICE").write_text("notice")
    assert main.main(["convert", "base", "out"]) == 0
    assert "base/LICENSE: is a link to a file outside of the model's folder" in capsys.readouterr().err
    assert not (home / "out/LICENSE").exists()
    assert (home / "out/NOTICE").read_text() == "notice"
    assert all("secret" not in path.read_text(errors="replace") for path in (home / "out").glob("*") if path.is_file())


def test_a_tokenizer_that_is_a_link_to_elsewhere_is_refused(home, base, capsys):
    (home / "base/tokenizer.json").rename(home / "tokenizer.json")
    (home / "base/tokenizer.json").symlink_to("../tokenizer.json")
    assert main.main(["convert", "base", "out"]) == 2
    assert "put a copy of that file in its place" in capsys.readouterr().err
    assert not (home / "out").exists()


def test_a_snapshot_of_the_hub_whose_files_are_links_to_blobs_is_copied_whole(home, base):
    cache = home / "models--someone--model"
    (cache / "blobs").mkdir(parents=True)
    snapshot = cache / "snapshots/c0ffee"
    snapshot.mkdir(parents=True)
    (home / "base/LICENSE").write_text("license")
    for number, path in enumerate((home / "base").iterdir()):
        path.rename(cache / "blobs" / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert main.main(["convert", str(snapshot), "out"]) == 0
    assert (home / "out/LICENSE").read_text() == "license"
    assert (home / "out/tokenizer.json").exists()
