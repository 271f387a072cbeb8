"""Every command does what its help says, on a tiny model."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
import yaml
from gguf_models import write_gguf
from safetensors.torch import load_file, save_file
from tiny import save_tiny_base
from transformers import AutoModelForCausalLM

from liger_convert.benchmark.shapes import SHAPES
from liger_convert.cli import completion, main
from liger_convert.config.recipe import load
from liger_convert.config.resources import chosen_recipe, names
from liger_convert.io.checksums import sha256_file
from liger_convert.mixers import MIXERS
from liger_convert.model.families import FAMILIES
from liger_convert.model.loading import load_linearized
from liger_convert.pipeline import gate_selection, layer_selection
from liger_convert.pipeline.manifest import Manifest

COMMANDS = [
    "run",
    "plan",
    "select-layers",
    "convert",
    "calibrate",
    "train",
    "merge",
    "export",
    "eval",
    "diagnose",
    "compare",
    "generate",
    "bench",
    "mixers",
    "families",
]
STAGE = {"data": "text", "tokens": 4 * 64, "seq_len": 32, "batch_size": 2}
RECIPE = {
    "version": 1,
    "name": "tiny",
    "base": "base",
    "mixer": {"type": "gla", "window": 8, "sinks": 2},
    "device": "cpu",
    "precision": "float32",
    "data": {"text": {"source": "file", "path": "text.jsonl"}},
    "stages": [
        STAGE | {"kind": "align", "learning_rates": {"mixer": 1e-2}},
        STAGE | {"kind": "finetune", "loss_on": "all", "learning_rates": {"lora": 1e-2}, "lora": {}},
    ],
}
SUITE = "description: tiny\ntext: [{window: 32, windows: 4}]\ncopying: [{length: 8, draws: 4}]\n"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory):
    """A folder with a base, a converted model, a text, a suite and a recipe, as the working directory."""
    folder = tmp_path_factory.mktemp("home")
    save_tiny_base("llama", folder / "base")
    (folder / "text.jsonl").write_text(
        "".join(json.dumps({"text": f"{i} green bottles " * 9}) + "\n" for i in range(30))
    )
    (folder / "suite.yaml").write_text(SUITE)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert (
            main.main(["convert", "base", "converted", "--window", "8", "--layers", "LNL", "--set", "gate=head"]) == 0
        )
        yield folder


def output(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main.main(words) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command, capsys):
    said = output(capsys, command, "--help")
    assert f"linearize {command}" in " ".join(said.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_every_option_whole_and_no_type_of_a_flag(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    said = output(capsys, command, "--help")
    params = typer.main.get_command(main.app).commands[command].params
    options = [name for param in params for name in (*param.opts, *param.secondary_opts) if name.startswith("--")]
    assert [name for name in options if f" {name} " not in said] == []
    assert "bool" not in said


def test_lines_of_help_break_at_the_width_of_the_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    assert "With --out, finished rows are kept in OUT.partial.json until all are done." in output(
        capsys, "bench", "--help"
    )


def test_no_words_at_all_show_every_command(capsys):
    said = output(capsys)
    assert all(command in said for command in COMMANDS)


def test_the_version_is_that_of_the_package(capsys):
    assert output(capsys, "--version") == f"liger-convert {importlib.metadata.version('liger-convert')}\n"


def test_the_module_runs_as_the_command_does():
    wrong = subprocess.run([sys.executable, "-m", "liger_convert.cli", "nothing"], capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "No such command 'nothing'" in wrong.stderr


def test_help_does_not_import_torch():
    code = (
        "from linearize_command import main; main(['--help']); import sys;"
        "sys.exit(bool({'torch', 'transformers', 'pydantic'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_the_package_registers_its_models_unless_the_program_imports_it():
    for first, registered in (("", True), ("import linearize_command; ", False)):
        code = f"{first}import liger_convert, sys; sys.exit('liger_convert.model' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code]).returncode == registered


def completed(*words: str) -> list[str]:
    """What bash is offered for the last of `words`."""
    code = "import linearize_command, sys; sys.exit('torch' in sys.modules or linearize_command.main())"
    asked = {"_LINEARIZE_COMPLETE": "complete_bash", "COMP_CWORD": str(len(words))}
    asked["COMP_WORDS"] = " ".join(("linearize", *words))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | asked)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_a_shell_completes_commands_recipes_mixers_and_shapes():
    assert completed("sel") == ["select-layers"]
    assert completed("run", "smollm2-135m-q") == ["smollm2-135m-quick"]
    assert completed("convert", "base", "out", "--mixer", "gated-d") == ["gated-deltanet", "gated-deltanet-2"]
    assert completed("bench", "mis") == ["mistral-7b"]
    assert completed("eval", "model", "--suite", "rec") == ["recall"]


def test_what_is_completed_is_what_is_registered():
    assert completion.mixers("") == sorted(MIXERS)
    assert completion.shapes("") == list(SHAPES)
    assert completion.recipes("") == names("recipes")


def test_a_slip_in_a_recipe_is_told_without_importing_torch(tmp_path):
    (tmp_path / "recipe.yaml").write_text("version: 1\n")
    code = (
        "from linearize_command import main; import sys;"
        "code = main(['run', 'recipe.yaml']); sys.exit(code if 'torch' not in sys.modules else 99)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=tmp_path).returncode == 2


def test_plan_tells_layers_and_sizes_and_writes_nothing(home, capsys):
    before = sorted(home.rglob("*"))
    planned = json.loads(output(capsys, "plan", "recipe.yaml", "--set", "layers=LLN", "--json"))
    assert planned["linearization"]["layers"] == ["main", "main", "softmax"]
    assert [stage["tokens"] for stage in planned["stages"]] == [256, 256]
    assert "softmax attention" in output(capsys, "plan", "recipe.yaml", "--set", "layers=LLN")
    assert sorted(home.rglob("*")) == before


def test_a_base_alone_is_planned_by_the_default_recipe_and_named_after_it(home, capsys):
    planned = json.loads(output(capsys, "plan", "--base", "base", "--json"))
    assert planned["name"] == "base"
    assert planned["linearization"]["layers"] == {"softmax_auto": 1}
    changed = json.loads(
        output(capsys, "plan", "--base", "base", "--set", "name=mine", "--set", "layers=all", "--json")
    )
    assert changed["name"] == "mine"
    assert changed["linearization"]["layers"] == ["main"] * 3


@pytest.mark.parametrize("base", ["org/model", "12", "a: b", "{x", "C:\\models\\one.gguf", "true", "it's"])
def test_the_name_of_a_base_is_not_changed(base):
    recipe, changes = chosen_recipe(None, base, ())
    assert load(recipe, changes).base == base


def test_the_base_of_a_recipe_can_be_another_one(home, capsys):
    planned = [json.loads(output(capsys, "plan", "recipe.yaml", *more, "--json")) for more in ([], ["--base", "base"])]
    assert planned[0] == planned[1]
    assert main.main(["plan", "recipe.yaml", "--base", "nowhere/at/all.gguf"]) == 2


def test_select_layers_ends_with_the_line_for_the_recipe(home, capsys, monkeypatch):
    monkeypatch.setattr(layer_selection, "CALIBRATION_TOKENS", 1024)
    *_, line = output(capsys, "select-layers", "recipe.yaml", "--softmax-layers", "2").splitlines()
    found = json.loads(output(capsys, "select-layers", "recipe.yaml", "--set", "layers={softmax_auto: 2}", "--json"))
    assert yaml.safe_load(line) == {"layers": {"softmax": found["softmax_layers"]}}
    planned = json.loads(output(capsys, "plan", "recipe.yaml", "--set", line.replace(": ", "=", 1), "--json"))
    names = planned["linearization"]["layers"]
    assert [i for i, name in enumerate(names) if name == "softmax"] == found["softmax_layers"]


def test_select_layers_chooses_another_number_in_the_way_of_the_recipe(home, capsys, monkeypatch):
    monkeypatch.setattr(layer_selection, "CALIBRATION_TOKENS", 1024)
    monkeypatch.setattr(gate_selection, "ROWS", 2)
    how = ["--set", "layers={softmax_auto: 2, select: gates, select_tokens: 600}"]
    found = json.loads(output(capsys, "select-layers", "recipe.yaml", *how, "--softmax-layers", "1", "--json"))
    (chosen,) = found["softmax_layers"]
    gates = [row["gate"] for row in found["layers"]]
    assert len(gates) == 3
    assert chosen == gates.index(max(gates))


def test_convert_makes_a_model_with_the_options_given(home):
    config = load_linearized(home / "converted").config
    assert config.linearization["layers"] == ["main", "softmax", "main"]
    assert (
        config.linearization["mixers"]["main"] | {"window": 8, "gate": "head"} == config.linearization["mixers"]["main"]
    )


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_convert_counts_the_bytes_that_it_writes(home, tmp_path, dtype):
    from liger_convert.cli.commands import convert_base

    options = {"mixer": "gla", "window": 6, "sinks": 2, "layers": "all", "options": (), "dtype": dtype, "seed": 0}
    made = convert_base("base", tmp_path / "out", **options)
    files = (tmp_path / "out").glob("*.safetensors")
    written = sum(tensor.nbytes for file in files for tensor in load_file(file).values())
    assert (made.disk_bytes, made.disk_peak) == ({"convert": written}, written)


def test_convert_warns_of_a_window_longer_than_the_bases_own(tmp_path, capsys):
    base = save_tiny_base("mistral", tmp_path / "base")
    for window, warnings in (("24", 0), ("25", 1)):
        assert main.main(["convert", str(base), str(tmp_path / window), "--window", window]) == 0
        assert capsys.readouterr().err.count("warning: mixer.window: ") == warnings


def test_calibrate_fits_the_mixers_and_leaves_all_else_as_it_was(home, capsys):
    output(capsys, "convert", "base", "narrow", "--window", "8", "--layers", "LNL", "--dtype", "bfloat16")
    words = ["--base", "base", "--text", "text.jsonl", "--tokens", "256", "--seq-len", "64"]
    found = json.loads(output(capsys, "calibrate", "narrow", "calibrated", *words, "--json"))
    assert found["tokens"] == 256
    assert [row["layer"] for row in found["layers"]] == [0, 2]
    assert all(row["after"] < row["before"] for row in found["layers"])
    start, end = load_linearized(home / "narrow").state_dict(), load_linearized(home / "calibrated").state_dict()
    assert {name: t.dtype for name, t in start.items()} == {name: t.dtype for name, t in end.items()}
    changed = {name for name in start if not torch.equal(start[name], end[name])}
    assert "model.layers.2.self_attn.mixer.codebook.codes_GFE" in changed
    assert all(".mixer." in name for name in changed)
    for file in ("config.json", "tokenizer.json"):
        assert (home / "narrow" / file).read_bytes() == (home / "calibrated" / file).read_bytes()
    told = output(capsys, "calibrate", "calibrated", "calibrated-again", *words)
    assert f"{found['layers'][1]['after']:.4f}" in told  # where the first one ended, the second begins


def test_train_merge_and_export_make_a_trained_model(home, capsys):
    for stage, model in ((1, "converted"), (2, "merged-1")):
        words = ["train", "recipe.yaml", "--stage", str(stage), "--model", model, "--out", f"trained-{stage}", "--json"]
        assert json.loads(output(capsys, *words))["steps"] == 4
        told = output(capsys, "merge", model, f"trained-{stage}", "--out", f"merged-{stage}")
        assert told.startswith(f"merged-{stage}: {model} with 1 stage merged")
    assert re.match(r"exported: exported, [\d.]+ kB in float32", output(capsys, "export", "merged-2", "exported"))
    start, end = load_linearized(home / "converted").state_dict(), load_linearized(home / "exported").state_dict()
    changed = {name.split("self_attn.")[-1] for name in start if not torch.equal(start[name], end[name])}
    assert {"q_proj.weight", "mixer.log_share_H"} <= changed
    assert not any("norm" in name for name in changed)
    # both stages merged at once are one after the other
    output(capsys, "merge", "converted", "trained-1", "trained-2", "--out", "merged-both")
    one, other = load_linearized(home / "merged-2").state_dict(), load_linearized(home / "merged-both").state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_train_writes_the_text_of_the_base_into_its_folder(home, capsys):
    own = "data.text={source: teacher, tokens: 600, document_tokens: 32}"
    words = ["train", "recipe.yaml", "--stage", "1", "--model", "converted", "--out", "own", "--set", own]
    stats = json.loads(output(capsys, *words, "--json"))
    assert stats["epochs"] == round(256 / (18 * 32), 3)
    assert (home / "own/data-text/tokens.u32").stat().st_size == 4 * 18 * 32
    assert json.loads(output(capsys, *words, "--resume", "--json"))["loss"] == stats["loss"]
    output(capsys, "merge", "converted", "own", "--out", "merged-own")


def test_a_base_or_baseline_that_does_not_match_the_model_is_refused(home, capsys):
    """A base of another shape is refused, and so is a baseline whose text has tokens that the model has no embedding
    for."""
    save_tiny_base("llama", home / "deep", num_hidden_layers=4)
    assert main.main(["diagnose", "converted", "--base", "deep", "--suite", "suite.yaml", "--text", "text.jsonl"]) == 2
    said = "error: --base deep: its num_hidden_layers is 4, but converted was made from a base with 3"
    assert capsys.readouterr().err.strip() == said
    save_tiny_base("llama", home / "padded", vocab_size=160)
    (home / "agree.yaml").write_text("description: a test\nagreement: {prompts: 2, prompt_tokens: 8, tokens: 4}\n")
    assert (
        main.main(["eval", "converted", "--baseline", "padded", "--suite", "agree.yaml", "--text", "text.jsonl"]) == 2
    )
    assert "--baseline padded: has a different vocabulary from the model" in capsys.readouterr().err


def test_eval_measures_a_model_beside_its_baseline(home, capsys):
    words = ["eval", "converted", "--baseline", "base", "--suite", "suite.yaml", "--text", "text.jsonl"]
    models = json.loads(output(capsys, *words, "--json"))["models"]
    assert list(models) == ["base", "linearized"]
    assert set(models["base"]) == {"text_ppl", "text_byte_ppl", "copy_nll_8"}
    assert models["base"] != models["linearized"]
    assert "copy_nll_8" in output(capsys, *words)


def test_eval_measures_a_gguf_file(home, capsys):
    write_gguf(Path("base.gguf"), AutoModelForCausalLM.from_pretrained("base"))
    words = ["eval", "base.gguf", "--suite", "suite.yaml", "--text", "text.jsonl", "--json"]
    assert set(json.loads(output(capsys, *words))["models"]["model"]) == {"text_ppl", "text_byte_ppl", "copy_nll_8"}


def test_diagnose_measures_each_branch_and_the_controls(home, capsys):
    words = ["diagnose", "converted", "--suite", "suite.yaml", "--text", "text.jsonl", "--json"]
    alone = ["linearized", "memory_ablated", "window_ablated"]
    assert list(json.loads(output(capsys, *words))["models"]) == alone
    beside = json.loads(output(capsys, *words, "--base", "base"))
    assert list(beside["models"]) == ["base", "window_only_untrained", *alone]


def test_eval_and_diagnose_take_text_of_another_kind_and_a_folder_of_tasks(home, capsys, tmp_path):
    rows = [{"q": f"count {i}", "a": ["one", "two"], "right": i % 2} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kwargs = {"data_files": {"test": str(tmp_path / "rows.jsonl")}, "cache_dir": str(tmp_path / "cache")}
    task = {"task": "counts", "dataset_path": "json", "dataset_kwargs": kwargs, "test_split": "test"}
    task |= {"output_type": "multiple_choice", "doc_to_text": "q", "doc_to_target": "right", "doc_to_choice": "a"}
    (tmp_path / "counts.yaml").write_text(yaml.safe_dump(task | {"metric_list": [{"metric": "acc"}]}))
    (tmp_path / "far.txt").write_text("A lighthouse has two hundred steps. " * 9)
    suite = {"description": "x", "text": [{"source": "other", "window": 32}]}
    suite |= {
        "agreement": {"prompts": 2, "prompt_tokens": 16, "tokens": 4},
        "tasks": [{"name": "counts", "metrics": ["acc"]}],
    }
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(suite))
    options = ["--suite", str(tmp_path / "suite.yaml"), "--include-path", str(tmp_path), "--json"]
    far = ["--other-text", str(tmp_path / "far.txt")]
    ours = {"other_ppl", "other_byte_ppl", "agreement/greedy_match", "agreement/common_prefix", "counts/acc"}
    found = json.loads(output(capsys, "eval", "converted", "--baseline", "base", *options, *far))
    assert ours <= set(found["models"]["linearized"])
    assert found["models"]["base"]["agreement/greedy_match"]["value"] == 1
    assert "notes" not in found
    beside = json.loads(output(capsys, "diagnose", "converted", "--base", "base", *options, *far))["models"]
    assert beside["linearized"] == found["models"]["linearized"]
    assert beside["base"] == found["models"]["base"]
    alone = json.loads(output(capsys, "eval", "converted", *options, "--text", str(tmp_path / "far.txt")))
    assert "agreement/greedy_match" not in alone["models"]["linearized"]
    assert alone["models"]["linearized"]["other_ppl"] != found["models"]["linearized"]["other_ppl"]  # of pydoc
    assert alone["notes"] == [
        "agreement: left out because there is no base to agree with; name one with --base or --baseline"
    ]
    same = ["--text", str(tmp_path / "far.txt"), *far]
    assert main.main(["eval", "converted", *options, *same]) == 2
    assert "is the same text as --text" in capsys.readouterr().err


def test_a_base_that_the_model_was_not_made_from_is_noticed(home, capsys, tmp_path):
    save_tiny_base("llama", tmp_path / "other", seed=1)
    other = ["--base", str(tmp_path / "other")]
    options = ["--suite", "suite.yaml", "--text", "text.jsonl", "--json"]
    noticed = "the token embeddings of converted are not those of its base"
    assert noticed in str(json.loads(output(capsys, "diagnose", "converted", *other, *options))["notes"])
    assert noticed not in output(capsys, "diagnose", "converted", "--base", "base", *options)
    words = ["calibrate", "converted", str(tmp_path / "out"), *other, "--text", "text.jsonl", "--tokens", "64"]
    assert main.main([*words, "--seq-len", "32"]) == 0
    assert "warning: --base" in capsys.readouterr().err


def test_a_base_with_the_embeddings_of_the_models_own_is_noticed_by_the_runs_manifest(home, capsys, tmp_path):
    shutil.copytree("converted", tmp_path / "run/export")
    shutil.copytree("base", tmp_path / "other")
    tensors = load_file("base/model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] *= 1.01
    save_file(tensors, tmp_path / "other/model.safetensors", {"format": "pt"})
    inputs = {"base/model.safetensors": sha256_file("base/model.safetensors")}
    Manifest({}, {}, 0, inputs).write(tmp_path / "run")
    options = ["--suite", "suite.yaml", "--text", "text.jsonl", "--json"]
    words = ["diagnose", str(tmp_path / "run/export"), "--base"]
    noticed = "model.safetensors is not the file that the run of this model has read"
    assert noticed in str(json.loads(output(capsys, *words, str(tmp_path / "other"), *options))["notes"])
    assert noticed not in output(capsys, *words, "base", *options)


def test_generate_prints_text_and_repeats_it_exactly(home, capsys):
    words = ["generate", "converted", "--prompt", "green", "--max-new-tokens", "12"]
    first = output(capsys, *words)
    assert first.strip()
    assert output(capsys, *words) == first
    assert output(capsys, *words, "--raw") != first


def test_mixers_and_families_list_the_registries(capsys):
    assert json.loads(output(capsys, "mixers", "--json")).keys() == MIXERS.keys()
    assert json.loads(output(capsys, "families", "--json")).keys() == FAMILIES.keys()
    assert all(name in output(capsys, "mixers") for name in MIXERS)
    assert all(name in output(capsys, "families") for name in FAMILIES)


def test_mixers_say_the_state_of_a_layer_of_the_shape_asked_for(capsys, monkeypatch):
    words = ["mixers", "--heads", "9", "--kv-heads", "3", "--head-size", "64"]
    listed = json.loads(output(capsys, *words, "--json"))
    assert all(mixer["summary"] and mixer["gate"] for mixer in listed.values())
    assert listed["lightning"]["state"] == {"state": [3, 64, 64]}
    assert listed["lightning"]["state_bytes"] == 4 * 3 * 64 * 64
    assert listed["lightning"]["fast_paths"] == ["chunk", "triton"]
    assert listed["deltanet"]["fast_paths"] == ["chunk", "fla", "triton"]
    assert (listed["window"]["state_bytes"], listed["window"]["fast_paths"]) == (0, [])
    assert "49.2 kB" in output(capsys, *words)
    assert "…" not in output(capsys, *words), "cut off"
    assert main.main(["mixers", "--heads", "9", "--kv-heads", "2"]) == 2
    assert "are not a multiple of 2 key-value heads" in capsys.readouterr().err


def test_running_out_of_gpu_memory_is_not_reported_as_a_bug(monkeypatch, capsys):
    def full(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr("liger_convert.cli.reference_commands.show", full)
    assert main.main(["families"]) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("error: CUDA out of memory. Tried to allocate 2.00 GiB.; `linearize plan` shows what")


def test_a_current_folder_that_is_gone_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main.main(["families"]) == 2
    assert capsys.readouterr().err == "error: the current folder has been removed; change to another one\n"


def test_another_process_that_is_gone_is_not_reported_as_a_bug(monkeypatch, capsys, tmp_path):
    """As where its machine is, of which the launcher of this one says nothing. The control is one process."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # for the log
    error = RuntimeError("[pair.cc:537] Read error [127.0.0.1]:16295: Connection reset by peer")
    monkeypatch.setattr("liger_convert.utils.processes.agree_on_exit_code", lambda code, unexpected=False: (code, True))
    for count, says in ((2, "another process of this run has ended"), (1, "unexpected RuntimeError")):
        monkeypatch.setattr("liger_convert.utils.processes.count", lambda count=count: count)
        assert main._bug(error, debug=False) == 1
        assert capsys.readouterr().err.startswith(f"error: {says}")


def test_an_unexpected_error_leaves_its_traceback_in_a_file_or_shows_it(monkeypatch, capsys):
    def surprise(*args: object) -> None:
        raise RuntimeError("surprise")

    monkeypatch.setattr("liger_convert.cli.reference_commands.show", surprise)
    assert main.main(["families"]) == 1
    (complaint,) = capsys.readouterr().err.splitlines()
    log = Path(complaint.partition("traceback in ")[2].partition(";")[0])
    assert "RuntimeError: surprise" in log.read_text()
    log.unlink()
    with pytest.raises(RuntimeError, match="surprise"):
        main.main(["families", "--debug"])
