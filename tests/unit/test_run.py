"""A whole run on a tiny model: what it leaves, and that killing it at any point changes nothing of the result."""

import importlib.metadata
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from deaths import exit_code_of
from safetensors.torch import load_file, save_file
from tiny import save_tiny_base

from liger_convert.cli import main
from liger_convert.config.recipe import Recipe, build
from liger_convert.data import teacher
from liger_convert.io import checkpoint
from liger_convert.io.checksums import sha256_file
from liger_convert.model.loading import load_linearized
from liger_convert.pipeline import gate_selection, layer_selection, runner, steps
from liger_convert.pipeline.manifest import first_difference, input_files
from liger_convert.pipeline.steps import RunSteps, Step

STAGE = {"data": "text", "tokens": 6 * 64, "seq_len": 32, "batch_size": 2, "save_every": 2}
RECIPE = {
    "version": 1,
    "name": "tiny",
    "mixer": {"type": "gla", "window": 8, "sinks": 2},
    "layers": "LNL",
    "device": "cpu",
    "precision": "float32",
    "data": {"text": {"source": "file", "path": "text.jsonl", "held_out": 0.3}},
    "stages": [
        STAGE | {"kind": "align", "learning_rates": {"mixer": 1e-2}},
        STAGE | {"kind": "distill", "learning_rates": {"mixer": 1e-3, "attention": 1e-3, "body": 1e-4}},
        STAGE
        | {
            "kind": "finetune",
            "loss_on": "all",
            "learning_rates": {"mixer": 1e-3, "lora": 1e-2},
            "lora": {"dropout": 0.1},
        },
    ],
    "eval": {"suite": "suite.yaml", "text": "text"},
}
STEPS = ["base", "plan", "convert", "check", "1-align", "2-distill", "3-finetune", "merge", "export", "eval", "report"]
SUITE = "description: tiny\ntext: [{window: 32, windows: 4}]\ncopying: [{length: 8, draws: 4}]\n"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory):
    """A folder with a base, a text, a suite and a recipe, as the working directory."""
    folder = tmp_path_factory.mktemp("home")
    save_tiny_base("llama", folder / "base")
    rows = [
        {"text": f"{i} bottles of beer on the wall, {i} bottles of beer. Take one down, pass it on. "}
        for i in range(60)
    ]
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "suite.yaml").write_text(SUITE)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE | {"base": "base"}))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@pytest.fixture(scope="module")
def finished(home: Path) -> Path:
    assert main.main(["run", "recipe.yaml", "--out", "finished"]) == 0
    return home / "finished"


@pytest.mark.parametrize(
    ("device", "said"),
    [("auto", "computing on cpu (no GPU is visible to PyTorch)"), ("cpu", "computing on cpu")],
)
def test_a_run_says_once_on_which_device_it_computes(home: Path, monkeypatch, capsys, device: str, said: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(RunSteps, "all", lambda self: [Step("base", lambda folder: {})])
    recipe = build(RECIPE | {"base": "base", "device": device}, "recipe")
    runner.run(recipe, home / f"on-{device}")
    written = capsys.readouterr()
    assert [line for line in written.err.splitlines() if "computing" in line] == [said]
    assert written.err.index("computing") < written.err.index("[1/1] base")
    assert written.out == ""  # where --json goes
    runner.run(recipe, home / f"on-{device}", resume=True)
    assert "computing" not in capsys.readouterr().err, "nothing is left to do"


def test_a_run_names_its_gpu_and_its_processes(monkeypatch) -> None:
    monkeypatch.setattr(runner, "pick_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    recipe = build(RECIPE | {"base": "base", "device": "auto"}, "recipe")
    assert runner._computes_on(recipe) == "computing on NVIDIA H100 80GB HBM3"
    monkeypatch.setattr(runner.processes, "count", lambda: 8)
    assert runner._computes_on(recipe) == "computing on NVIDIA H100 80GB HBM3 in 8 processes"


def test_a_report_on_text_of_two_kinds_shows_what_the_base_would_have_written(home: Path) -> None:
    rows = [{"text": f"A lighthouse has {i} steps, and every one of them is worn. "} for i in range(20)]
    (home / "far.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    suite = {
        "description": "two kinds",
        "text": [{"window": 32, "windows": 4}, {"source": "other", "window": 32, "windows": 4}],
        "positions": [{"source": "other", "window": 512, "windows": 2}],
        "copying": [{"lengths": [8, 200], "draws": 2}],
        "agreement": {"prompts": 3, "prompt_tokens": 16, "tokens": 8},
    }
    (home / "honest.yaml").write_text(yaml.safe_dump(suite))
    changes = ["stages=[]", "data.far={source: file, path: far.jsonl}"]
    changes += ["eval={suite: honest.yaml, text: text, other_text: far}"]
    sets = [word for change in changes for word in ("--set", change)]
    assert main.main(["run", "recipe.yaml", "--out", "two-kinds", *sets]) == 0
    report = json.loads((home / "two-kinds/report.json").read_text())
    models = report["models"]
    ours = {"text_ppl", "text_byte_ppl", "other_ppl", "other_byte_ppl", "other_nll_at_256", "copy_nll_8"}
    match = {name: measured["agreement/greedy_match"]["value"] for name, measured in models.items()}
    assert ours < set(models["base"])
    assert match["base"] == 1
    assert match["linearized"] < 1
    *left_out, of_base, of_base_on_other = report["notes"]
    assert left_out == [
        "other_nll_at_512: left out because the base supports only 256 tokens",
        "copy_nll_200: left out because repeated once, they are longer than the 256 tokens that the base supports",
    ]
    assert of_base.startswith("the base's perplexity on held-out text is ")  # its weights are random
    assert of_base_on_other.startswith("the base's perplexity on text of another kind is ")
    page = (home / "two-kinds/report.md").read_text()
    assert all(f"- Note: {note}." in page for note in report["notes"])
    assert "Warning" not in page
    assert "other_ppl (" in report["verdict"]["sentences"][-1] or "text_ppl (" in report["verdict"]["sentences"][-1]


def manifest(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text())


def weights(folder: Path) -> dict[str, str]:
    return {path.name: sha256_file(path) for path in (folder / "export").glob("*.safetensors")}


def test_a_run_leaves_an_export_a_report_and_a_manifest(finished):
    assert sorted(p.name for p in finished.iterdir() if p.name != ".lock") == [
        "export",
        "manifest.json",
        "report.html",
        "report.json",
        "report.md",
    ]
    model = load_linearized(finished / "export")
    assert model.config.linearization["layers"] == ["main", "softmax", "main"]
    assert model(torch.arange(5, 15)[None]).logits.isfinite().all()
    models = json.loads((finished / "report.json").read_text())["models"]
    assert list(models) == [
        "base",
        "window_only_untrained",
        "linearized",
        "memory_ablated",
        "window_ablated",
    ]
    assert {"text_ppl", "text_byte_ppl", "copy_nll_8"} == set(models["base"])
    card = (finished / "export/README.md").read_text()
    rows = [line for line in (finished / "report.md").read_text().splitlines() if line.startswith("| `copy_nll_8`")]
    assert rows == [line for line in card.splitlines() if line.startswith("| `copy_nll_8`")]


def test_the_manifest_says_what_went_in_and_what_came_out(finished, home):
    record = manifest(finished)
    assert list(record["steps"]) == STEPS
    assert record["recipe"]["text"] == (home / "recipe.yaml").read_text()
    assert Recipe.model_validate(record["recipe"]["resolved"]).stages[0].schedule == "cosine"
    assert record["inputs"]["base/model.safetensors"] == sha256_file(home / "base/model.safetensors")
    assert record["inputs"]["data.text.path/text.jsonl"] == sha256_file(home / "text.jsonl")
    exported = record["steps"]["export"]["outputs"]
    assert set(exported) == {f"export/{p.name}" for p in (finished / "export").iterdir()}
    assert all(sha256_file(finished / path) == sha256 for path, sha256 in exported.items())
    assert set(record["steps"]["report"]["outputs"]) == {"report.md", "report.html", "report.json"}
    assert [record["steps"][name]["tokens"] for name in STEPS[4:7]] == [6 * 64] * 3
    assert record["steps"]["2-distill"]["inputs"] == ["base", "convert", "1-align"]
    assert all(step["wall_seconds"] >= 0 for step in record["steps"].values())
    assert record["machine"]["versions"]["torch"] == importlib.metadata.version("torch")


def test_a_manifest_and_its_reports_name_no_place_on_the_machine(finished, home):
    for name in ("manifest.json", "report.html", "report.json", "report.md", "export/README.md"):
        text = (finished / name).read_text()
        assert str(home) not in text
        assert sys.prefix not in text


def test_inputs_of_the_same_name_are_told_apart_by_the_field_that_names_them(tmp_path):
    files = {field: tmp_path / field / "text.jsonl" for field in ("path", "validation")}
    for file in files.values():
        file.parent.mkdir()
        file.touch()
    assert input_files(files) == {f"{field}/text.jsonl": file for field, file in files.items()}
    assert input_files({"eval.data": tmp_path}) == {f"eval.data/{field}/text.jsonl": files[field] for field in files}


def test_a_resumed_run_takes_the_commit_of_its_hub_base_that_it_began_with(home, monkeypatch):
    asked = []

    def download(repo, revision, wanted):
        asked.append(revision)
        return home / "hub/snapshots/c0ffee"

    shutil.copytree(home / "base", home / "hub/snapshots/c0ffee")
    monkeypatch.setattr(checkpoint, "_download", download)
    words = ["run", "recipe.yaml", "--out", "fetched", "--set", "base=someone/model", "--set", "stages=[]"]
    with monkeypatch.context() as patch:
        patch.setattr(steps.convert, "convert_checkpoint", None)
        assert main.main(words) == 1
    assert manifest(home / "fetched")["steps"]["base"]["commit"] == "c0ffee"
    assert "snapshots" not in (home / "fetched/manifest.json").read_text()
    assert main.main([*words, "--resume"]) == 0
    assert asked == [None, "c0ffee"]


def test_a_run_says_its_table_and_continuations(home, finished, capsys):
    assert main.main(["run", "recipe.yaml", "--out", "finished", "--resume"]) == 0
    output = capsys.readouterr()
    assert "copy_nll_8" in output.out
    assert all(" ".join(prompt.split()[:4]) in output.out for prompt in steps.PROMPTS)  # the table breaks longer lines
    assert main.main(["run", "recipe.yaml", "--out", "finished", "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((finished / "report.json").read_text())


DEATHS = [("convert", "1"), ("1-align", "3"), ("record", "2-distill"), ("3-finetune", "5"), ("export", "1")]


@pytest.mark.parametrize("deaths", [[DEATHS[1], DEATHS[-1]], pytest.param(DEATHS, marks=pytest.mark.slow)], ids=len)
def test_a_run_killed_anywhere_and_resumed_ends_with_the_same_weights(home, finished, deaths):
    shutil.rmtree(home / "killed", ignore_errors=True)
    command = ["run", "recipe.yaml", "--out", "killed"]
    for where, what in deaths:
        assert exit_code_of(home, where, what, command) == -9
        command = ["run", "recipe.yaml", "--out", "killed", "--resume"]
    assert list(manifest(home / "killed")["steps"]) == STEPS[:8]
    assert main.main(command) == 0
    assert weights(home / "killed") == weights(finished)
    assert sorted(p.name for p in (home / "killed").iterdir()) == sorted(p.name for p in finished.iterdir())


def test_a_run_chooses_its_softmax_layers_once_and_goes_by_them(home, capsys):
    choose = ["--set", "layers={softmax_auto: 1}", "--set", "stages=[]"]
    assert exit_code_of(home, "convert", "1", ["run", "recipe.yaml", "--out", "chosen", *choose]) == -9
    before = manifest(home / "chosen")["steps"]
    assert list(before) == ["base", "select-layers", "plan"]
    assert main.main(["run", "recipe.yaml", "--out", "chosen", *choose, "--resume"]) == 0
    steps = manifest(home / "chosen")["steps"]
    assert steps["select-layers"] == before["select-layers"]
    assert list(steps) == ["base", "select-layers", "plan", "convert", "merge", "export", "eval", "report"]
    (kept,) = steps["select-layers"]["selection"]["softmax_layers"]
    layers = ["softmax" if i == kept else "main" for i in range(3)]
    assert steps["plan"]["plan"]["linearization"]["layers"] == layers
    assert load_linearized(home / "chosen/export").config.linearization["layers"] == layers
    assert json.loads((home / "chosen/report.json").read_text())["selection"] == steps["select-layers"]["selection"]
    assert f"| + {kept} |" in (home / "chosen/report.md").read_text()


def test_a_run_chooses_the_layers_with_a_longer_window_and_says_why(home, monkeypatch):
    monkeypatch.setattr(layer_selection, "CALIBRATION_TOKENS", 1024)
    window = RECIPE["mixer"]["window"] + 3
    choose = ["--set", f"layers={{softmax: [0], long_windows: {{layers: 1, window: {window}}}}}", "--set", "stages=[]"]
    assert main.main(["run", "recipe.yaml", "--out", "long", *choose]) == 0
    (chosen,) = manifest(home / "long")["steps"]["select-layers"]["selection"]["long_windows"]
    linearization = load_linearized(home / "long/export").config.linearization
    assert linearization["layers"] == ["softmax", *("long" if i == chosen else "main" for i in (1, 2))]
    assert linearization["mixers"]["long"]["window"] == window
    for page in ("report.md", "report.html"):
        text = (home / "long" / page).read_text()
        assert "Why this layer has a longer window" in text
        assert not re.search(r"Why th\w+ layers? stayed softmax", text)


def test_a_run_keeps_the_layers_with_a_longer_window_that_its_recipe_names(home, monkeypatch, capsys):
    monkeypatch.setattr(layer_selection, "CALIBRATION_TOKENS", 1024)
    window = RECIPE["mixer"]["window"] + 3
    options = ["--set", f"layers={{softmax_auto: 1, long_windows: {{layers: [2], window: {window}}}}}"]
    assert main.main(["run", "recipe.yaml", "--out", "named", *options, "--set", "stages=[]"]) == 0
    (kept,) = manifest(home / "named")["steps"]["select-layers"]["selection"]["softmax_layers"]
    layers = ["softmax" if i == kept else "main" for i in (0, 1)] + ["long"]
    assert load_linearized(home / "named/export").config.linearization["layers"] == layers
    capsys.readouterr()
    assert main.main(["select-layers", "recipe.yaml", *options]) == 0
    *_, line = capsys.readouterr().out.splitlines()
    assert yaml.safe_load(line) == {"layers": {"softmax": [kept], "long_windows": {"layers": [2], "window": window}}}


def test_a_run_records_why_layers_were_chosen_in_another_way_than_the_recipe_says(home, monkeypatch):
    monkeypatch.setattr(layer_selection, "CALIBRATION_TOKENS", 1024)
    kinds = ["sliding_attention", "full_attention"] * 2
    save_tiny_base("gemma2", home / "sliding", num_hidden_layers=4, layer_types=kinds)
    choose = ["--set", "layers={softmax_auto: 1, select: kl}", "--set", "adapt={hidden_size: 16}"]
    command = ["run", "recipe.yaml", "--base", "sliding", "--out", "another", *choose, "--set", "stages=[]"]
    assert main.main(command) == 0
    said = "layers.select: copy in place of kl, because 2 of the base's 4 layers have windows of their own"
    steps = manifest(home / "another")["steps"]
    assert steps["plan"]["plan"]["adapted"] == [said]
    assert list(steps["select-layers"]["selection"]["base"]) == ["copy_nll", "text_nll"]


def test_a_run_keeps_the_window_that_its_layers_were_chosen_with(home, monkeypatch, capsys):
    """It is twice that of the recipe, as the base's context is four times `adapt.context`."""
    monkeypatch.setattr(layer_selection, "CALIBRATION_TOKENS", 1024)
    stage = RECIPE["stages"][0] | {"seq_len": 96, "tokens": 192}
    layers = "{softmax: [0], long_windows: {layers: 0.5, window: 24}}"
    changes = [f"layers={layers}", "adapt={hidden_size: 16, context: 64}", f"stages={json.dumps([stage])}"]
    options = [word for change in changes for word in ("--set", change)]
    assert main.main(["run", "recipe.yaml", "--out", "doubled", *options]) == 0
    steps = manifest(home / "doubled")["steps"]
    (chosen,) = steps["select-layers"]["selection"]["long_windows"]
    said = "layers.long_windows.window: 48 in place of 24, because the base was made for 256 tokens"
    assert steps["plan"]["plan"]["adapted"][0].startswith(said)
    linearization = load_linearized(home / "doubled/export").config.linearization
    assert linearization["layers"][chosen] == "long"
    assert linearization["mixers"]["long"]["window"] == 48
    assert json.loads((home / "doubled/report.json").read_text())["selection"]["long_window"] == 48
    capsys.readouterr()
    assert main.main(["select-layers", "recipe.yaml", *options]) == 0
    *_, line = capsys.readouterr().out.splitlines()
    assert yaml.safe_load(line) == {"layers": {"softmax": [0], "long_windows": {"layers": [chosen], "window": 48}}}


def test_a_report_says_that_gates_chose_the_layers(home, monkeypatch):
    monkeypatch.setattr(layer_selection, "CALIBRATION_TOKENS", 1024)
    monkeypatch.setattr(gate_selection, "ROWS", 2)
    choose = ["--set", "layers={softmax_auto: 1, select: gates, select_tokens: 600}", "--set", "stages=[]"]
    assert main.main(["run", "recipe.yaml", "--out", "gated", *choose]) == 0
    selection = manifest(home / "gated")["steps"]["select-layers"]["selection"]
    (kept,) = selection["softmax_layers"]
    assert load_linearized(home / "gated/export").config.linearization["layers"][kept] == "softmax"
    for page in ("report.md", "report.html"):
        text = (home / "gated" / page).read_text()
        assert "chosen by gates between softmax and linear attention" in text
        assert "chosen by measurement" not in text


@pytest.mark.parametrize(
    "deaths",
    [[("2-distill", "3")], pytest.param([("data-own", "500"), ("2-distill", "3")], marks=pytest.mark.slow)],
    ids=len,
)
def test_a_run_trains_on_what_its_base_writes_and_writes_it_once(home, monkeypatch, deaths):
    for out in ("own", "own-killed"):
        shutil.rmtree(home / out, ignore_errors=True)
    own = {"source": "teacher", "tokens": 1000, "document_tokens": 32, "batch_size": 4, "held_out": 0.2}
    stages = [stage | {"data": "own", "copy_fraction": 0.5} for stage in RECIPE["stages"][:2]]
    changes = {"base": "base", "data": {"own": own}, "stages": stages, "eval": {"suite": "suite.yaml", "text": "own"}}
    (home / "own.yaml").write_text(yaml.safe_dump(RECIPE | changes))
    assert main.main(["run", "own.yaml", "--out", "own"]) == 0
    steps = manifest(home / "own")["steps"]
    assert list(steps) == [*STEPS[:4], "data-own", *STEPS[4:6], *STEPS[7:]]
    assert steps["data-own"]["tokens"] == 31 * 32
    assert list(steps["data-own"]["outputs"]) == ["steps/data-own/tokens.u32"]
    assert all("data-own" in steps[name]["inputs"] for name in ("1-align", "2-distill", "eval"))
    assert not (home / "own/steps").exists()
    for where, what in deaths:
        words = ["run", "own.yaml", "--out", "own-killed", *["--resume"] * (home / "own-killed").exists()]
        assert exit_code_of(home, where, what, words) == -9
    monkeypatch.setattr(teacher, "write", None)
    assert main.main(["run", "own.yaml", "--out", "own-killed", "--resume"]) == 0
    assert manifest(home / "own-killed")["steps"]["data-own"]["outputs"] == steps["data-own"]["outputs"]
    assert weights(home / "own-killed") == weights(home / "own")


def test_a_stage_trains_on_a_mix_of_text_chat_and_what_the_base_writes_behind_the_text(home):
    shutil.rmtree(home / "mixed", ignore_errors=True)
    talk = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Seven bottles."}]
    rows = [{"messages": [*talk, *talk]}] * 4
    (home / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {
        "text": RECIPE["data"]["text"],
        "chat": {"source": "file", "path": "chat.jsonl", "format": "messages"},
        "own": {"source": "teacher", "tokens": 320, "document_tokens": 32, "prompts": "text", "prompt_tokens": 8},
    }
    fractions = {"text": 0.5, "chat": 0.25, "own": 0.25}
    stages = [stage | {"data": fractions} for stage in RECIPE["stages"][:2]]
    changes = {"base": "base", "data": data, "stages": stages}
    (home / "mixed.yaml").write_text(yaml.safe_dump(RECIPE | changes))
    assert main.main(["run", "mixed.yaml", "--out", "mixed"]) == 0
    steps = manifest(home / "mixed")["steps"]
    assert steps["data-own"]["tokens"] == 320
    assert steps["data-own"]["prompts"] == 10
    assert "data-own" in steps["2-distill"]["inputs"]
    read = steps["2-distill"]["sources"]
    assert {name: share["fraction"] for name, share in read.items()} == fractions
    assert steps["plan"]["plan"]["stages"][1]["sources"] == fractions
    told = f"2-distill read 25 % chat (read {read['chat']['epochs']:g} times), 25 % own"
    assert told in (home / "mixed/report.md").read_text()
    assert told in (home / "mixed/report.html").read_text()


@pytest.mark.parametrize(
    ("trouble", "code", "says"),
    [
        (KeyboardInterrupt(), 130, "interrupted; the same command with --resume continues troubled"),
        (OSError(28, "No space left on device"), 1, "troubled/steps/convert: the disk is full"),
        (RuntimeError("surprise\nand more"), 1, "unexpected RuntimeError: surprise; this is a bug in linearize"),
    ],
    ids=["Ctrl-C", "full disk", "bug"],
)
def test_an_error_inside_a_run_is_one_line_and_leaves_no_half_finished_step(
    home, monkeypatch, capsys, tmp_path, trouble, code, says
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # for the log of a bug

    def fail(*args, **kwargs):
        raise trouble

    monkeypatch.setattr(steps.convert, "convert_checkpoint", fail)
    resume = ["--resume"] if (home / "troubled").exists() else []
    assert main.main(["run", "recipe.yaml", "--out", "troubled", *resume]) == code
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {says}")
    assert list(manifest(home / "troubled")["steps"]) == ["base", "plan"]
    assert not (home / "troubled/steps/convert").exists()


def test_a_base_whose_config_asks_for_further_outputs_is_converted_and_measured_all_the_same(tmp_path, home):
    base = save_tiny_base("olmoe", tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    asked = dict.fromkeys(("output_router_logits", "output_attentions", "output_hidden_states"), True)
    asked["return_dict"] = False
    (base / "config.json").write_text(json.dumps(config | asked))
    out = str(tmp_path / "out")
    assert main.main(["run", "recipe.yaml", "--base", str(base), "--out", out, "--set", "when_worse=warn"]) == 0
    assert main.main(["generate", f"{out}/export", "--prompt", "green", "--max-new-tokens", "2"]) == 0
    exported = json.loads((tmp_path / "out/export/config.json").read_text())
    assert not any(exported.get(name) == value for name, value in asked.items())


@pytest.mark.parametrize(("stored", "said"), [("bfloat16", None), ("float32", "bfloat16"), ("bfloat16", "float32")])
def test_an_export_keeps_the_dtype_of_the_bases_weights_whatever_its_config_says(
    home: Path, tmp_path: Path, capsys, stored: str, said: str | None
) -> None:
    base = save_tiny_base("llama", tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    save_file({name: t.to(getattr(torch, stored)) for name, t in weights.items()}, base / "model.safetensors")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"dtype": said}))
    recipe = RECIPE | {"stages": [], "base": str(base), "eval": {"suite": str(home / "suite.yaml"), "text": "text"}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    words = [str(tmp_path / "recipe.yaml"), "--json"]
    assert main.main(["plan", *words]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["dtype"] == stored
    assert main.main(["run", words[0], "--out", str(tmp_path / "out")]) == 0
    files = (tmp_path / "out/export").glob("*.safetensors")
    written = {name: t.dtype for file in files for name, t in load_file(file).items() if ".mixer." not in name}
    assert set(written.values()) == {getattr(torch, stored)}


def test_a_run_keeps_its_steps_when_told_to(home, finished):
    resume = ["--resume"] if (home / "troubled").exists() else []
    assert main.main(["run", "recipe.yaml", "--out", "troubled", "--keep-steps", *resume]) == 0
    assert weights(home / "troubled") == weights(finished)
    assert (home / "troubled/steps/1-align/result").is_dir()


def test_the_first_difference_of_two_recipes_is_named():
    old = {"seed": 0, "stages": [{"tokens": 1}, {"tokens": 2}], "base": "a"}
    assert first_difference(old, old) is None
    assert first_difference(old, old | {"stages": [{"tokens": 1}, {"tokens": 3}]}) == "stages[1].tokens was 2, is 3"
    assert first_difference(old, old | {"stages": []}).startswith("stages was [")
    assert first_difference(old, old | {"more": "x"}) == 'more was null, is "x"'
