"""A model is loaded whole or not at all: every command refuses a checkpoint whose tensors do not add up."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tiny import save_tiny_base, tiny_config, tiny_tokenizer
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from liger_convert.cli import main
from liger_convert.config.stages import Lora
from liger_convert.io.checkpoint import ADAPTER_CONFIG, ADAPTER_PICKLE, ADAPTER_WEIGHTS, INDEX, WEIGHTS
from liger_convert.mixers import resolve_spec
from liger_convert.model.loading import check_folder, linearize_base, load_linearized, load_pretrained
from liger_convert.training.student import add_lora
from liger_convert.utils.errors import BadInput

STAGE = {"data": "text", "tokens": 128, "seq_len": 32, "batch_size": 2}
RECIPE = {
    "version": 1,
    "name": "tiny",
    "base": "base",
    "mixer": {"type": "gla", "window": 8, "sinks": 2},
    "device": "cpu",
    "precision": "float32",
    "data": {"text": {"source": "file", "path": "text.jsonl", "held_out": 0.2}},
    "stages": [STAGE | {"kind": "align", "learning_rates": {"mixer": 1e-2}}],
    "eval": {"suite": "suite.yaml", "text": "text"},
}
SUITE = "description: tiny\ntext: [{window: 32, windows: 4}]\n"
LINEARIZATION = {
    "format": 2,
    "mixers": {"main": resolve_spec({"type": "gla", "window": 8, "sinks": 2})},
    "layers": ["main", "softmax", "main"],
}
TEXT, MEASURED = ["--text", "text.jsonl"], ["--suite", "suite.yaml", "--text", "text.jsonl", "--device", "cpu"]
TIMED = ["--lengths", "16", "--decode-steps", "2", "--repeats", "1", "--device", "cpu", "--out", "out"]
FITTED = [*TEXT, "--tokens", "64", "--seq-len", "32"]

# what `bad` is to each command, a base or a linearized model, and its words
COMMANDS: dict[str, tuple[str, list[str]]] = {
    "eval": ("linearized", ["eval", "bad", *MEASURED]),
    "eval a base": ("base", ["eval", "bad", *MEASURED]),
    "eval --baseline": ("base", ["eval", "linearized", "--baseline", "bad", *MEASURED]),
    "generate": ("linearized", ["generate", "bad", "--prompt", "hi", "--max-new-tokens", "2"]),
    "generate from a base": ("base", ["generate", "bad", "--prompt", "hi", "--max-new-tokens", "2"]),
    "diagnose": ("linearized", ["diagnose", "bad", "--base", "base", *MEASURED]),
    "diagnose --base": ("base", ["diagnose", "linearized", "--base", "bad", *MEASURED]),
    "train": ("linearized", ["train", "recipe.yaml", "--stage", "1", "--model", "bad", "--out", "out"]),
    "train --base": (
        "base",
        ["train", "recipe.yaml", "--stage", "1", "--model", "linearized", "--base", "./bad", "--out", "out"],
    ),
    "calibrate": ("linearized", ["calibrate", "bad", "out", "--base", "base", *FITTED]),
    "calibrate --base": ("base", ["calibrate", "linearized", "out", "--base", "bad", *FITTED]),
    "merge": ("linearized", ["merge", "bad", "learned", "--out", "out"]),
    "merge a result": ("linearized", ["merge", "linearized", "trained", "--out", "out"]),
    "export": ("linearized", ["export", "bad", "out"]),
    "select-layers": ("base", ["select-layers", "recipe.yaml", "--base", "./bad", "--softmax-layers", "1"]),
    "bench": ("linearized", ["bench", "bad", *TIMED]),
    "bench --baseline": ("base", ["bench", "linearized", "--baseline", "bad", *TIMED]),
    "convert": ("base", ["convert", "bad", "out"]),
    "run": ("base", ["run", "recipe.yaml", "--base", "./bad", "--out", "out"]),
}

Edit = Callable[[dict[str, torch.Tensor]], object]
Q = "model.layers.1.self_attn.q_proj.weight"


def weight_map(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX).read_text())["weight_map"]


def write_index(folder: Path, names: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))


def edit(folder: Path, change: Edit) -> None:
    """Changes the tensors of a folder, shard by shard; new ones come into the shard of Q. The index is kept right."""
    names = weight_map(folder)
    tensors = {name: tensor for file in set(names.values()) for name, tensor in load_file(folder / file).items()}
    change(tensors)
    names = {name: names.get(name, names[Q]) for name in tensors}
    for file in set(names.values()):
        save_file({name: tensor for name, tensor in tensors.items() if names[name] == file}, folder / file)
    write_index(folder, names)


def shard_of_q(folder: Path) -> Path:
    return folder / weight_map(folder)[Q]


def point_elsewhere(folder: Path) -> None:
    names = weight_map(folder)
    write_index(folder, names | {Q: next(file for file in names.values() if file != names[Q])})


def remove_thirteen(tensors: dict[str, torch.Tensor]) -> None:
    for name in sorted(tensors)[5:18]:
        del tensors[name]


# what is done to a sharded folder, and what the sentence says
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a tensor removed": (lambda f: edit(f, lambda t: t.pop(Q)), f"tensor {Q} is missing, which config.json implies"),
    "13 tensors removed": (lambda f: edit(f, remove_thirteen), ": 13 tensors (model.layers.0."),
    "an extra tensor": (
        lambda f: edit(f, lambda t: t.update({"model.extra.weight": torch.ones(2)})),
        ".safetensors: tensor model.extra.weight is not part of the ",
    ),
    "another shape": (
        lambda f: edit(f, lambda t: t.update({Q: torch.ones(2, 32)})),
        f".safetensors: tensor {Q} is [2, 32], but config.json implies [32, 32]",
    ),
    "a shard gone": (lambda f: shard_of_q(f).unlink(), ".safetensors: this shard is missing"),
    "a shard cut": (lambda f: os.truncate(shard_of_q(f), shard_of_q(f).stat().st_size - 64), ": is truncated"),
    "an empty shard": (lambda f: os.truncate(shard_of_q(f), 0), ": is truncated or not a safetensors file"),
    "an index that is wrong": (point_elsewhere, f"{INDEX}: lists {Q} in "),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that the commands read: models in several shards, results of training, texts, a recipe."""
    folder = tmp_path_factory.mktemp("sound")
    save_tiny_base("llama", folder / "whole")
    model = AutoModelForCausalLM.from_pretrained(folder / "whole")
    model.save_pretrained(folder / "base", max_shard_size="30KB")
    linearized = linearize_base(folder / "whole", LINEARIZATION)
    linearized.save_pretrained(folder / "linearized", max_shard_size="30KB")
    for name in ("base", "linearized"):
        tiny_tokenizer().save_pretrained(folder / name)
        assert len(set(weight_map(folder / name).values())) > 2
    shutil.copytree(folder / "linearized", folder / "trained/result/model")
    tuned = add_lora(load_linearized(folder / "linearized", dtype=torch.float32), Lora(rank=4), train_mixer=True)
    tuned.save_pretrained(folder / "learned/result/adapter", save_embedding_layers=False)
    (folder / "text.jsonl").write_text(
        "".join(json.dumps({"text": f"{i} green bottles " * 9}) + "\n" for i in range(30))
    )
    (folder / "suite.yaml").write_text(SUITE)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    return folder


@pytest.fixture
def home(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of `sound` to damage, as the working directory."""
    folder = Path(shutil.copytree(sound, tmp_path / "home"))
    monkeypatch.chdir(folder)
    return folder


def refused(home: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one sentence that a command ends in, having left nothing."""
    before = set(home.rglob("*"))
    capsys.readouterr()
    assert main.main(words) == 2
    output = capsys.readouterr()
    (complaint,) = [line for line in output.err.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in output.err + output.out
    assert set(home.rglob("*")) == before
    return complaint


def give(home: Path, command: str) -> Path:
    """The folder that `command` is to find damaged."""
    if command == "merge a result":
        return home / "trained/result/model"
    return Path(shutil.copytree(home / COMMANDS[command][0], home / "bad"))


def pairs() -> Iterator[Any]:
    """Each command with one damage, and each damage with one command; the others together are slow."""
    for command in COMMANDS:
        for damage in DAMAGES:
            quick = command == "eval" or damage == "13 tensors removed"
            yield pytest.param(command, damage, marks=[] if quick else pytest.mark.slow, id=f"{command}, {damage}")


@pytest.mark.parametrize(("command", "damage"), pairs())
def test_a_damaged_checkpoint_is_refused_by_every_command_in_one_sentence(home, capsys, command, damage):
    do, says = DAMAGES[damage]
    do(bad := give(home, command))
    complaint = refused(home, COMMANDS[command][1], capsys)
    assert says in complaint
    assert bad.name in complaint


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_the_same_commands_take_the_checkpoint_when_it_is_sound(home, command):
    give(home, command)
    assert main.main(COMMANDS[command][1]) == 0


@pytest.mark.parametrize("damage", DAMAGES)
def test_nothing_is_loaded_of_what_headers_refuse(home, monkeypatch, damage):
    def loads(*_: object, **__: object) -> None:
        raise AssertionError("loaded")

    DAMAGES[damage][0](home / "base")
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", loads)
    for load in (load_pretrained, check_folder, lambda folder: linearize_base(folder, LINEARIZATION)):
        with pytest.raises(BadInput):
            load(home / "base")


# --- what loads, and that it is what was saved


def same_weights(model: Any, other: Any) -> bool:
    ours, theirs = model.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(
        ours[name].dtype == theirs[name].dtype and ours[name].equal(theirs[name]) for name in ours
    )


@pytest.mark.parametrize("dtype", ["auto", torch.float32])
@pytest.mark.parametrize("family", ["llama", "phi3", "qwen3_moe"])
def test_a_sound_model_loads_with_the_weights_that_transformers_gives_it(tmp_path, family, dtype):
    base = save_tiny_base(family, tmp_path / "base", tokenizer=False, dtype=torch.bfloat16)
    linearize_base(base, LINEARIZATION, dtype=torch.bfloat16).save_pretrained(tmp_path / "linearized")
    for folder in (base, tmp_path / "linearized"):
        assert same_weights(
            load_pretrained(folder, dtype=dtype), AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        )


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["base", "linearized"])
def test_experts_are_accounted_for_in_both_ways_that_they_are_stored(tmp_path, kind, fused):
    base = save_tiny_base("mixtral", tmp_path / "base", tokenizer=False)
    linearize_base(base, LINEARIZATION).save_pretrained(tmp_path / "linearized")
    folder = tmp_path / kind
    model = AutoModelForCausalLM.from_pretrained(folder)
    if fused:
        save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, folder / WEIGHTS)
    assert same_weights(load_pretrained(folder), model)
    tensors = load_file(folder / WEIGHTS)
    gone = next(name for name in tensors if "experts" in name)
    assert ("experts.gate_up_proj" in gone or "experts.down_proj" in gone) == fused
    save_file({name: tensor for name, tensor in tensors.items() if name != gone}, folder / WEIGHTS)
    with pytest.raises(BadInput, match=f"tensor {gone} is missing"):
        load_pretrained(folder)


def test_a_tied_head_may_be_stored_or_not_but_the_embeddings_may_not_be_missing(tmp_path):
    folder = save_tiny_base("llama", tmp_path / "base", tokenizer=False, tie_word_embeddings=True)
    tensors = load_file(folder / WEIGHTS)
    assert "lm_head.weight" not in tensors
    linearize_base(folder, LINEARIZATION).save_pretrained(tmp_path / "linearized")
    for head in ({}, {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}):
        save_file(tensors | head, folder / WEIGHTS)
        for made in (load_pretrained(folder), load_pretrained(tmp_path / "linearized")):
            assert made.lm_head.weight.equal(tensors["model.embed_tokens.weight"])
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(BadInput, match=r"tensor model\.embed_tokens\.weight is missing"):
        load_pretrained(folder)


def test_a_head_that_is_not_tied_may_not_be_missing(home):
    edit(home / "base", lambda t: t.pop("lm_head.weight"))
    with pytest.raises(BadInput, match=r"tensor lm_head\.weight is missing"):
        load_pretrained(home / "base")


def test_buffers_that_models_compute_may_be_stored(home):
    edit(home / "base", lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    assert same_weights(load_pretrained(home / "base"), AutoModelForCausalLM.from_pretrained(home / "whole"))


@pytest.mark.parametrize("which", ["base", "linearized"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_is_refused(home, which, value):
    edit(home / which, lambda t: t[Q].view(-1)[5:6].fill_(value))
    with pytest.raises(BadInput, match=rf"{shard_of_q(home / which).name}: tensor {Q} contains NaN or infinity"):
        load_pretrained(home / which)


def test_large_weights_whose_sum_overflows_are_taken(home):
    largest = torch.finfo(torch.float32).max
    edit(home / "base", lambda t: t[Q].fill_(largest))
    assert load_pretrained(home / "base").model.layers[1].self_attn.q_proj.weight.max() == largest


# --- what transformers would read beside or in place of the weights


def test_a_config_that_names_other_weights_is_refused(home):
    config = json.loads((home / "base/config.json").read_text())
    (home / "base/config.json").write_text(json.dumps(config | {"transformers_weights": "other.safetensors"}))
    with pytest.raises(BadInput, match=r"config\.json: transformers_weights names other weights, other\.safetensors"):
        load_pretrained(home / "base")


def test_an_adapter_beside_the_weights_is_refused(home, capsys):
    shutil.copytree(home / "learned/result/adapter", home / "base", dirs_exist_ok=True)
    said = refused(home, ["generate", "base", "--prompt", "hi"], capsys)
    assert f"base/{ADAPTER_CONFIG}: transformers would add this adapter" in said


# --- models that are no family of ours


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A tiny GPT-2, its weights split in two files."""
    folder = tmp_path / "gpt2"
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=101, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
    GPT2LMHeadModel(config).save_pretrained(folder, max_shard_size="50KB")
    tiny_tokenizer().save_pretrained(folder)
    return folder


C = "transformer.h.1.mlp.c_fc.weight"


def edit_foreign(folder: Path, change: Edit) -> None:
    file = weight_map(folder)[C]
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file)
    kept = {name: where for name, where in weight_map(folder).items() if where != file}
    write_index(folder, kept | dict.fromkeys(tensors, file))


FOREIGN: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (
        lambda f: edit_foreign(f, lambda t: t.pop(C)),
        f"gpt2: tensor {C} is missing, which config.json implies",
    ),
    "extra": (
        lambda f: edit_foreign(f, lambda t: t.update({"transformer.extra": torch.ones(2)})),
        "tensor transformer.extra is not part of the gpt2 that config.json describes",
    ),
    "misshapen": (
        lambda f: edit_foreign(f, lambda t: t.update({C: torch.ones(2, 2)})),
        f"tensor {C} is [2, 2], but config.json implies [32, 128]",
    ),
    "not finite": (lambda f: edit_foreign(f, lambda t: t[C].fill_(torch.nan)), f"tensor {C} contains NaN or infinity"),
    "shard gone": (lambda f: (f / weight_map(f)[C]).unlink(), "this shard is missing"),
    "shard cut": (lambda f: os.truncate(f / weight_map(f)[C], 5000), "is truncated"),
}


@pytest.mark.parametrize("damage", FOREIGN)
def test_a_damaged_model_of_another_family_is_refused(foreign, tmp_path, capsys, damage):
    do, says = FOREIGN[damage]
    do(foreign)
    assert says in refused(tmp_path, ["generate", str(foreign), "--prompt", "hi"], capsys)


def test_a_sound_model_of_another_family_loads_with_buffers_that_only_old_versions_saved(foreign):
    edit_foreign(foreign, lambda t: t.update({"transformer.h.1.attn.bias": torch.ones(1, 1, 64, 64, dtype=torch.bool)}))
    model = load_pretrained(foreign)
    assert same_weights(model, AutoModelForCausalLM.from_pretrained(foreign))
    assert model.transformer.h[1].mlp.c_fc.weight.equal(load_file(foreign / weight_map(foreign)[C])[C])


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class MineConfig(LlamaConfig):
    model_type = "mine"

class Mine(LlamaForCausalLM):
    config_class = MineConfig
"""


def test_a_model_that_brings_its_own_code_is_accounted_for_too(home):
    folder = home / "base"
    config = json.loads((folder / "config.json").read_text())
    own = {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.Mine"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mine", "auto_map": own}))
    (folder / "mine.py").write_text(CODE)
    made = load_pretrained(folder, trust_remote_code=True)
    assert type(made).__name__ == "Mine"
    assert same_weights(made, AutoModelForCausalLM.from_pretrained(home / "whole"))
    edit(folder, lambda t: t.pop(Q))
    with pytest.raises(BadInput, match=f"tensor {Q} is missing"):
        load_pretrained(folder, trust_remote_code=True)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_a_load_holds_the_weights_once(tmp_path, dtype):
    config = tiny_config("llama", hidden_size=1024, intermediate_size=8192, num_hidden_layers=2, head_dim=256)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    script = """
        import sys
        from liger_convert.model.loading import load_pretrained
        def peak():  # not that of getrusage, which a process inherits from the one that starts it
            return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))
        before = peak()
        model = load_pretrained(sys.argv[1], dtype=sys.argv[2])
        print(peak() - before, sum(p.nbytes for p in model.parameters()))
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path), dtype]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    increase, weights = map(int, printed.split())
    mapped = 0 if dtype == "auto" else weights // 2  # the file's pages, of which a cast is made
    assert weights > 100e6
    assert increase < weights + mapped + 40e6


# --- adapters


def change_adapter(folder: Path, change: Edit) -> None:
    tensors = load_file(folder / ADAPTER_WEIGHTS)
    change(tensors)
    save_file(tensors, folder / ADAPTER_WEIGHTS)


def change_adapter_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config | values))


class Touch:
    """What makes a file when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("opened",)


def pickle_adapter(folder: Path) -> None:
    (folder / ADAPTER_WEIGHTS).unlink()
    torch.save({"x": Touch()}, folder / ADAPTER_PICKLE)


A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
M = "base_model.model.model.layers.2.self_attn.mixer.log_share_H"
ADAPTERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "matches nothing": (
        lambda f: change_adapter_config(f, target_modules=["nothing"], modules_to_save=None),
        f"{ADAPTER_CONFIG}: does not fit the model: Target modules",
    ),
    "tensor missing": (
        lambda f: change_adapter(f, lambda t: t.pop(A)),
        f"tensor {A} is missing, which {ADAPTER_CONFIG}",
    ),
    "mixer's tensor missing": (lambda f: change_adapter(f, lambda t: t.pop(M)), f"tensor {M} is missing"),
    "no tensor at all": (lambda f: change_adapter(f, dict.clear), "38 tensors (base_model."),
    "tensor without a module": (
        lambda f: change_adapter(f, lambda t: t.update({A.replace("q_proj", "x_proj"): t[A].clone()})),
        f"{ADAPTER_WEIGHTS}: tensor {A.replace('q_proj', 'x_proj')} is not part of the adapter",
    ),
    "layers that it does not target": (
        lambda f: change_adapter_config(f, layers_to_transform=[0]),
        "8 tensors (base_model.model.model.layers.2.",
    ),
    "another rank": (lambda f: change_adapter_config(f, r=8), f"is [4, 32], but {ADAPTER_CONFIG} implies [8, 32]"),
    "another width": (
        lambda f: change_adapter(f, lambda t: t.update({A: torch.ones(4, 48)})),
        f"{ADAPTER_WEIGHTS}: tensor {A} is [4, 48], but {ADAPTER_CONFIG} implies [4, 32]",
    ),
    "not finite": (
        lambda f: change_adapter(f, lambda t: t[A].fill_(torch.nan)),
        f"tensor {A} contains NaN or infinity",
    ),
    "cut": (lambda f: os.truncate(f / ADAPTER_WEIGHTS, 5000), f"{ADAPTER_WEIGHTS}: is truncated"),
    "a pickle": (pickle_adapter, "its weights are pickles, which can run code when read"),
    "no weights": (lambda f: (f / ADAPTER_WEIGHTS).unlink(), f"adapter: has no {ADAPTER_WEIGHTS}"),
    "no config": (lambda f: (f / ADAPTER_CONFIG).unlink(), f"{ADAPTER_CONFIG}: there is no such file"),
    "a broken config": (lambda f: (f / ADAPTER_CONFIG).write_text("{"), f"{ADAPTER_CONFIG}: cannot be read as JSON"),
    "an unknown kind": (lambda f: change_adapter_config(f, peft_type="NEW"), f"{ADAPTER_CONFIG}: does not fit"),
    "a prompt": (
        lambda f: (f / ADAPTER_CONFIG).write_text(
            json.dumps({"peft_type": "PREFIX_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": 3})
        ),
        "PREFIX_TUNING",
    ),
}


@pytest.mark.parametrize("damage", ADAPTERS)
def test_an_adapter_that_does_not_fit_the_model_in_every_tensor_is_refused(home, capsys, damage):
    do, says = ADAPTERS[damage]
    do(home / "learned/result/adapter")
    said = refused(home, ["merge", "linearized", "learned", "--out", "out"], capsys)
    assert says in said
    assert "learned/result/adapter" in said
