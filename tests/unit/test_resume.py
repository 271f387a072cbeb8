"""A resumed run checks what it continues from. Damage is found, and a bad checkpoint costs only some steps."""

import json
import shutil
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from runs import SUITE, write_home
from safetensors.torch import load_file
from stages import make_stage, train

from liger_convert.cli import main
from liger_convert.io import checksums
from liger_convert.io.checksums import sha256_file
from liger_convert.pipeline import single_steps, steps
from liger_convert.pipeline.recorded_inputs import InputFiles
from liger_convert.utils import interrupts

STAGES: list[dict[str, Any]] = [
    {"kind": "align", "learning_rates": {"mixer": 1e-2}, "save_every": 2},
    {"kind": "finetune", "data": "late", "loss_on": "all", "learning_rates": {"mixer": 1e-3}, "save_every": 2},
]


def flip_bit(path: Path) -> None:
    """Flips a bit in the middle of the file, which is not part of a header."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    write_home(folder, STAGES)
    return folder


def stop_at(patch: pytest.MonkeyPatch, label: str, done: float) -> None:
    """Interrupts a run when the work with this label has made this much progress."""
    real = steps.show_progress

    @contextmanager
    def progress(name):
        with real(name) as report:

            def watched(so_far, total, note=""):
                if name == label and so_far >= done:
                    raise KeyboardInterrupt
                report(so_far, total, note)

            yield watched

    for module in (steps, single_steps):
        patch.setattr(module, "show_progress", progress)


@pytest.fixture(scope="module")
def interrupted(home):
    """A run that was stopped in its second stage, after two checkpoints."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        stop_at(patch, "2-finetune", 5)
        assert main.main(["run", "recipe.yaml", "--out", "interrupted"]) == 130
    return home / "interrupted"


@pytest.fixture
def broken(home, interrupted, monkeypatch):
    """A copy of the interrupted run, and of all that it reads, to be damaged."""
    place = Path(shutil.copytree(home, home.parent / "copy"))
    monkeypatch.chdir(place)
    yield place
    shutil.rmtree(place)


def resume(capsys: pytest.CaptureFixture, *words: str) -> tuple[int, str]:
    capsys.readouterr()
    code = main.main(["run", "recipe.yaml", "--out", "interrupted", "--resume", *words])
    return code, capsys.readouterr().err


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a flipped bit in a finished stage": ("1-align/result/model/model-00001-of-00001.safetensors", flip_bit),
    "a finished stage without its weights": ("1-align/result/model/model-00001-of-00001.safetensors", Path.unlink),
    "an empty config in a finished stage": ("1-align/result/model/config.json", lambda path: path.write_text("")),
    "a flipped bit in the converted model": ("convert/model/model-00001-of-00002.safetensors", flip_bit),
    "a converted model without its tokenizer": ("convert/model/tokenizer.json", Path.unlink),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_finished_step_is_refused_by_name(broken, capsys, damage):
    name, harm = DAMAGES[damage]
    harm(broken / "interrupted/steps" / name)
    code, said = resume(capsys)
    assert code == 2
    assert f"interrupted/steps/{name}: " in said
    assert "is missing" in said or "has changed since it was written" in said


def test_a_changed_base_is_refused_on_resume(broken, capsys):
    flip_bit(broken / "base/model.safetensors")
    code, said = resume(capsys)
    assert code == 2
    assert "base/model.safetensors: has changed since the run began" in said


def test_a_file_added_to_the_base_is_refused_on_resume_if_it_would_be_read(broken, capsys):
    (broken / "base/notes.txt").write_text("mine")
    (broken / "base/added_tokens.json").write_text("{}")
    code, said = resume(capsys)
    assert code == 2
    assert "base/added_tokens.json: was added since the run began; remove it" in said
    (broken / "base/added_tokens.json").unlink()
    assert resume(capsys)[0] == 0


def test_a_file_added_to_a_folder_of_data_is_a_change(tmp_path):
    inputs = {"data.text.path": tmp_path}
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    files = InputFiles({})
    files.record(inputs)
    for name in ("README", ".b.jsonl"):
        (tmp_path / name).write_text("not data")
    assert files.changes(inputs) == []
    (tmp_path / "c.jsonl").write_text('{"text": "c"}\n')
    (change,) = files.changes(inputs)
    assert change.field == "data.text.path"
    assert str(change) == f"{tmp_path / 'c.jsonl'}: was added since the run began; remove it"


def test_data_that_a_stage_has_read_is_refused_on_resume(broken, capsys):
    for name in ("text.jsonl", "late.jsonl"):
        path = broken / name
        before = path.read_text()
        path.write_text(before + '{"text": "one more"}\n')
        code, said = resume(capsys)
        assert code == 2
        assert f"{name}: has changed since the run began" in said
        path.write_text(before)


def test_inputs_that_only_the_evaluation_reads_may_be_mended(broken, capsys):
    (broken / "suite.yaml").write_text(SUITE.replace("draws: 2", "draws: 3"))
    code, said = resume(capsys, "--set", "eval.limit=7", "--set", "eval.batch_size=2")
    assert code == 0
    assert "suite.yaml: has changed, and is used as it is now" in said
    assert "eval.limit was null, is 7" in said
    report = json.loads((broken / "interrupted/report.json").read_text())
    assert report["suite"]["copying"][0]["draws"] == 3
    assert "eval.limit=7" in report["reproduce"]["command"]
    code, said = resume(capsys, "--set", "eval.limit=8", "--set", "eval.batch_size=2")
    assert code == 2
    assert "is a run of a different recipe (eval.limit was 7, is 8)" in said


def test_any_other_field_of_the_recipe_may_not_change(broken, capsys):
    code, said = resume(capsys, "--set", "seed=1")
    assert code == 2
    assert "is a run of a different recipe (seed was 0, is 1)" in said


@pytest.mark.parametrize("name", ["base/model.safetensors", "text.jsonl", "suite.yaml"])
def test_an_input_that_changes_during_a_run_is_noticed_at_the_next_step(broken, capsys, monkeypatch, name):
    real = single_steps.training.run_stage

    def run_stage(*args, **options):
        (broken / name).write_bytes((broken / name).read_bytes() + b"\n")
        return real(*args, **options)

    monkeypatch.setattr(single_steps.training, "run_stage", run_stage)
    code, said = resume(capsys)
    assert code == 2
    assert f"{name}: has changed since the run began" in said
    assert "[7/" not in said  # the step after


@pytest.mark.parametrize("after", ["add_figures", "renew_sum"])
def test_a_run_stopped_while_its_report_writes_the_card_goes_on(broken, capsys, monkeypatch, after):
    module = {"add_figures": steps.card, "renew_sum": checksums}[after]
    real = getattr(module, after)

    def stopped(*arguments):
        real(*arguments)
        (broken / "interrupted/export/.README.md.partial-1").touch()  # as if it was killed a little earlier
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, after, stopped)
        assert resume(capsys)[0] == 130
    code, said = resume(capsys)
    assert code == 0, said
    assert not (broken / "interrupted/export/.README.md.partial-1").exists()
    assert main.main(["verify", "interrupted"]) == 0
    assert main.main(["verify", "interrupted/export"]) == 0


# --- checkpoints of a stage


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed")
    train(make_stage("lora", save_every=2), out)
    return load_file(out / "result/adapter/adapter_model.safetensors")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A stage stopped in its seventh step, with its checkpoints of steps 4 and 6."""
    out = tmp_path_factory.mktemp("stopped") / "stage"

    def stop(done, total, note=""):
        if done == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(make_stage("lora", save_every=2), out, progress=stop)
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["checkpoint-4", "checkpoint-6"]
    return out


CHECKPOINT_DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "an empty optimizer": ("optimizer.pt", lambda path: path.write_bytes(b"")),
    "a flipped bit in the optimizer": ("optimizer.pt", flip_bit),
    "no optimizer": ("optimizer.pt", Path.unlink),
    "no scheduler": ("scheduler.pt", Path.unlink),
    "no random numbers": ("rng_state.pth", Path.unlink),
    "a flipped bit in the weights": ("trained.safetensors", flip_bit),
    "a flipped bit in the trainer's state": ("trainer_state.json", flip_bit),
    "no hashes": (checksums.SUMS, Path.unlink),
    "garbled hashes": (checksums.SUMS, lambda path: path.write_text("what\n")),
    "an empty file of hashes": (checksums.SUMS, lambda path: path.write_text("")),
}


@pytest.mark.parametrize("damage", [None, *CHECKPOINT_DAMAGES])
@pytest.mark.parametrize("steps", [[6], [4, 6]], ids=["the newest", "both"])
def test_a_stage_goes_on_from_its_last_good_checkpoint(stopped, undisturbed, tmp_path, capsys, damage, steps):
    out = Path(shutil.copytree(stopped, tmp_path / "stage"))
    first = []
    if damage is not None:
        name, harm = CHECKPOINT_DAMAGES[damage]
        for step in steps:
            harm(out / f"checkpoints/checkpoint-{step}/{name}")
    train(make_stage("lora", save_every=2), out, resume=True, progress=lambda done, total, note="": first.append(done))
    good = 6 if damage is None else 4 if steps == [6] else 0
    assert first[0] == good + 1
    said = capsys.readouterr().err.replace("\n", " ")
    for step in steps if damage is not None else []:
        assert f"checkpoint-{step}/{name}" in said
    found = load_file(out / "result/adapter/adapter_model.safetensors")
    assert found.keys() == undisturbed.keys()
    assert all(tensor.equal(undisturbed[name]) for name, tensor in found.items())


def test_a_checkpoint_is_not_there_until_it_is_whole(tmp_path, monkeypatch):
    def fails(folder):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("liger_convert.training.checkpoints.checksums.write_sums", fails)
        with pytest.raises(KeyboardInterrupt):
            train(make_stage("lora", save_every=2), tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["unfinished"]
    train(make_stage("lora", save_every=2), tmp_path, resume=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["result", "stats.json"]


@pytest.mark.parametrize("at", [3, 8], ids=["within", "at the last step"])
def test_a_signal_to_stop_saves_the_step_that_was_reached(tmp_path, undisturbed, monkeypatch, at):
    def stop(done, total, note=""):
        if done == at:
            monkeypatch.setattr(interrupts, "_received", 15)

    with pytest.raises(interrupts.Stopped):
        train(make_stage("lora", save_every=5), tmp_path, progress=stop)
    monkeypatch.setattr(interrupts, "_received", None)
    newest = max(int(path.name.split("-")[1]) for path in (tmp_path / "checkpoints").iterdir())
    assert newest in (at, at + 1)
    train(make_stage("lora", save_every=5), tmp_path, resume=True)
    found = load_file(tmp_path / "result/adapter/adapter_model.safetensors")
    assert all(tensor.equal(undisturbed[name]) for name, tensor in found.items())


# --- what an evaluation and a writing base leave


def test_a_damaged_measure_is_made_again(tmp_path, capsys):
    path = tmp_path / "base.json"
    checksums.write_checked(path, [{"text_ppl": {"value": 17.25, "stderr": None, "n": 3}}, ["words"]])
    assert checksums.read_checked(path) == [{"text_ppl": {"value": 17.25, "stderr": None, "n": 3}}, ["words"]]
    path.write_text(path.read_text().replace("17.25", "16.25"))
    assert checksums.read_checked(path) is None
    assert "is damaged; what it held is made again" in capsys.readouterr().err
    for text in ("", "[]", "{", '{"value": 1}'):
        path.write_text(text)
        assert checksums.read_checked(path) is None
    assert checksums.read_checked(tmp_path / "none.json") is None


# --- verify


@pytest.fixture(scope="module")
def finished(home):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        assert main.main(["run", "recipe.yaml", "--out", "finished", "--set", "stages=[]"]) == 0
    return home / "finished"


def test_verify_finds_nothing_wrong_with_a_finished_run_and_its_export(finished, tmp_path, capsys):
    copy = Path(shutil.copytree(finished / "export", tmp_path / "export"))
    for folder in (finished, finished / "export", copy):
        assert main.main(["verify", str(folder)]) == 0
        assert "files are unchanged" in capsys.readouterr().out.replace("\n", " ")
    assert sha256_file(copy / "config.json") == checksums.read_sums(copy)["config.json"]


def test_a_manifest_with_fields_of_other_types_is_refused(broken, capsys):
    path = broken / "interrupted/manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"recipe": 1}))
    code, said = resume(capsys)
    assert code == 2
    assert "manifest.json: was not written by this version of liger-convert" in said


@pytest.mark.parametrize("harm", [flip_bit, Path.unlink])
def test_a_finished_run_with_a_damaged_export_is_not_said_to_be_done(
    home, finished, tmp_path, capsys, monkeypatch, harm
):
    monkeypatch.chdir(home)
    copy = Path(shutil.copytree(finished, tmp_path / "run"))
    harm(copy / "export/model-00001-of-00002.safetensors")
    assert main.main(["run", "recipe.yaml", "--out", str(copy), "--set", "stages=[]", "--resume"]) == 2
    assert "run/export/model-00001-of-00002.safetensors: " in capsys.readouterr().err


def test_verify_takes_an_unfinished_run(interrupted, capsys):
    assert main.main(["verify", str(interrupted), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["checked"] > 0
    assert found["problems"] == []


@pytest.mark.parametrize("name", ["export/config.json", "export/model-00001-of-00002.safetensors", "report.md"])
@pytest.mark.parametrize("harm", [flip_bit, Path.unlink])
def test_verify_names_every_file_that_is_not_what_it_was(finished, tmp_path, capsys, name, harm):
    copy = Path(shutil.copytree(finished, tmp_path / "run"))
    harm(copy / name)
    assert main.main(["verify", str(copy)]) == 1
    said = capsys.readouterr().err.replace("\n", " ")
    assert f"run/{name}: " in said
    assert "1 of its files have changed or are missing" in said
    if name.startswith("export/"):
        assert main.main(["verify", str(copy / "export")]) == 1


def test_verify_refuses_what_is_neither_a_run_nor_an_export(home, capsys):
    assert main.main(["verify", str(home / "base")]) == 2
    assert "is neither a run" in capsys.readouterr().err


def test_hashes_that_name_a_file_outside_are_refused(tmp_path, capsys):
    for name in ("../secret", "/etc/passwd", ""):
        (tmp_path / checksums.SUMS).write_text(f"{'0' * 64}  {name}\n")
        assert main.main(["verify", str(tmp_path)]) == 2
        assert "line 1 is not a sha256 and the path of a file in this folder" in capsys.readouterr().err


def test_hashes_of_nothing_are_refused(tmp_path, capsys):
    (tmp_path / checksums.SUMS).touch()
    assert main.main(["verify", str(tmp_path)]) == 2
    assert f"{checksums.SUMS}: is empty" in capsys.readouterr().err
