"""A conversion loses no tensor, adds what the config says, needs little memory, and refuses damaged checkpoints."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import save_tiny_base
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from liger_convert.cli import main
from liger_convert.io.checkpoint import INDEX, WEIGHTS, Checkpoint, load_tokenizer
from liger_convert.mixers import resolve_spec
from liger_convert.model import new_state
from liger_convert.model.families import FAMILIES
from liger_convert.model.loading import linearize_base, load_linearized
from liger_convert.model.shards import all_finite
from liger_convert.pipeline.convert import convert_checkpoint
from liger_convert.utils.errors import BadInput, LinearizeError

LINEARIZATION = {
    "format": 2,
    "mixers": {"main": resolve_spec({"type": "gla", "window": 8, "sinks": 2})},
    "layers": ["main", "softmax", "main"],
}
LINEARIZATION_PAPER = LINEARIZATION | {"mixers": {"main": resolve_spec({"type": "liger-paper"})}}
TOKENS = torch.arange(3, 60)[None]


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The tiny base of a family, made once."""
    root = tmp_path_factory.mktemp("bases")
    return lambda family: root / family if (root / family).exists() else save_tiny_base(family, root / family)


@pytest.fixture
def base(bases: Callable[[str], Path], tmp_path: Path) -> Path:
    """A tiny llama to damage."""
    return Path(shutil.copytree(bases("llama"), tmp_path / "base"))


def change(base: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(base / WEIGHTS)
    edit(tensors)
    save_file(tensors, base / WEIGHTS)


def change_config(base: Path, **values: Any) -> None:
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | values))


def shard(base: Path) -> None:
    """Splits the weights into shards of three tensors with an index."""
    tensors = load_file(base / WEIGHTS)
    (base / WEIGHTS).unlink()
    weight_map = {name: f"part-{i // 3:02}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name, where in weight_map.items() if where == file}, base / file)
    (base / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def same(out: Path, tensors: dict[str, torch.Tensor]) -> bool:
    found = Checkpoint.open(out)
    return all(torch.equal(found.read(name), tensor) for name, tensor in tensors.items())


# --- what comes out


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_the_folder_loads_as_the_model_made_in_memory(bases, tmp_path, family):
    base = bases(family)
    report = convert_checkpoint(base, tmp_path / "out", LINEARIZATION, seed=3)
    model, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading.values())
    expected = linearize_base(base, LINEARIZATION, seed=3)
    assert torch.equal(model.eval()(TOKENS).logits, expected.eval()(TOKENS).logits)
    original = load_file(base / WEIGHTS)
    assert same(tmp_path / "out", original)
    assert report["tensors"] == {"copied": len(original), "new": len(new_state(model.config)), "dropped": []}


def test_the_new_config_names_its_class_and_keeps_no_trace_of_the_base_folder(base, tmp_path):
    convert_checkpoint(base, tmp_path / "out", LINEARIZATION)
    text = (tmp_path / "out/config.json").read_text()
    config = json.loads(text)
    assert config["architectures"] == ["LinearizedLlamaForCausalLM"]
    assert config["linearization"] == LINEARIZATION
    assert config["dtype"] == "float32"
    assert str(tmp_path) not in text


def test_tokenizer_generation_config_and_license_come_along(base, tmp_path):
    (base / "LICENSE.txt").write_text("yes")
    (base / "README.md").write_text("the base")
    convert_checkpoint(base, tmp_path / "out", LINEARIZATION)
    assert {path.name for path in base.iterdir()} - {path.name for path in (tmp_path / "out").iterdir()} == {
        "README.md",
        WEIGHTS,
    }
    assert (tmp_path / "out/LICENSE.txt").read_text() == "yes"
    ours, theirs = load_tokenizer(tmp_path / "out"), load_tokenizer(base)
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.chat_template == theirs.chat_template


def test_what_generate_would_refuse_is_left_out_of_the_generation_config(base, tmp_path, capsys):
    refused = {"cache_implementation": "static", "prompt_lookup_num_tokens": 3, "assistant_early_exit": 1}
    kept = {"eos_token_id": 2, "do_sample": True, "temperature": 0.6, "use_mtp": False}
    (base / "generation_config.json").write_text(json.dumps(kept | refused))
    convert_checkpoint(base, tmp_path / "out", LINEARIZATION)
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "left out" in line]
    assert all(f"{name}: {json.dumps(value)}" in said for name, value in refused.items())
    assert json.loads((tmp_path / "out/generation_config.json").read_text()) == kept
    load_linearized(tmp_path / "out").generate(TOKENS, max_new_tokens=2)


@pytest.mark.parametrize(
    ("family", "named"),
    [
        ("olmo2", "GPT2Tokenizer"),
        ("granite", "GPT2TokenizerFast"),
        ("phi3", "LlamaTokenizerFast"),
        ("mistral", "LlamaTokenizer"),
        ("stablelm", "GPTNeoXTokenizerFast"),
        ("qwen2", "LlamaTokenizerFast"),
        ("qwen3", None),
        ("llama", "PreTrainedTokenizerFast"),
    ],
)
def test_text_becomes_the_tokens_that_the_base_makes_of_it(bases, tmp_path, family, named):
    """The model type decides which class reads a tokenizer, and each class splits text by its own rules."""
    base = Path(shutil.copytree(bases(family), tmp_path / "base"))
    digits_apart_tokenizer().save_pretrained(base)
    path = base / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"tokenizer_class": named}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    convert_checkpoint(base, tmp_path / "out", LINEARIZATION_PAPER)
    theirs, ours = AutoTokenizer.from_pretrained(base), AutoTokenizer.from_pretrained(tmp_path / "out")
    text = " 1234 don't\n\n  ab 56"
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    if family == "olmo2":  # a control: by the class that it names, it would be read otherwise
        shutil.copyfile(path, tmp_path / "out/tokenizer_config.json")
        assert AutoTokenizer.from_pretrained(tmp_path / "out")(text)["input_ids"] != theirs(text)["input_ids"]


def digits_apart_tokenizer() -> PreTrainedTokenizerFast:
    """Has numbers as tokens but splits them into digits first, as many tokenizers do."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    symbols = ["<pad>", "<s>", "</s>", "<unk>", "Ġ", "Ċ"] + [chr(c) for c in range(33, 123)] + ["12", "34"]
    merges = [("1", "2"), ("3", "4")]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=merges))
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def test_a_mixer_without_parameters_adds_no_shard(base, tmp_path):
    report = convert_checkpoint(base, tmp_path / "out", LINEARIZATION_PAPER)
    assert report["tensors"]["new"] == 0
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 1
    assert not any(AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)[1].values())


def test_shards_stay_shards(base, tmp_path):
    original = load_file(base / WEIGHTS)
    shard(base)
    convert_checkpoint(base, tmp_path / "out", LINEARIZATION)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == len(list(base.glob("*.safetensors"))) + 1
    assert same(tmp_path / "out", original)
    assert not any(AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)[1].values())


def test_fused_experts_are_recognised_too(bases, tmp_path):
    base = Path(shutil.copytree(bases("mixtral"), tmp_path / "base"))
    model = AutoModelForCausalLM.from_pretrained(base)
    fused = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert fused.keys() != load_file(base / WEIGHTS).keys()
    save_file(fused, base / WEIGHTS)
    convert_checkpoint(base, tmp_path / "out", LINEARIZATION)
    converted, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading.values())
    assert all(torch.equal(converted.state_dict()[name], tensor) for name, tensor in fused.items())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_dtype_is_cast_while_streaming(base, tmp_path, dtype):
    target = getattr(torch, dtype)
    original = load_file(base / WEIGHTS)
    convert_checkpoint(base, tmp_path / "out", LINEARIZATION, dtype=dtype)
    assert same(tmp_path / "out", {name: tensor.to(target) for name, tensor in original.items()})
    for name, parameter in load_linearized(tmp_path / "out").named_parameters():
        assert parameter.dtype == (torch.float32 if ".mixer." in name else target)


def test_without_a_dtype_every_tensor_keeps_its_own(base, tmp_path):
    def mix(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if "norm" not in name:
                tensors[name] = tensors[name].bfloat16()

    change(base, mix)
    original = load_file(base / WEIGHTS)
    convert_checkpoint(base, tmp_path / "out", LINEARIZATION)
    assert same(tmp_path / "out", original)
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"


def test_a_tied_head_may_be_stored_or_not(base, tmp_path):
    change_config(base, tie_word_embeddings=True)
    for name, edit in {
        "stored": lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}),
        "absent": lambda tensors: tensors.pop("lm_head.weight"),
    }.items():
        change(base, edit)
        convert_checkpoint(base, tmp_path / name, LINEARIZATION)
        model, loading = AutoModelForCausalLM.from_pretrained(tmp_path / name, output_loading_info=True)
        assert not any(loading.values())
        assert torch.equal(model.lm_head.weight, load_file(base / WEIGHTS)["model.embed_tokens.weight"])


def test_a_head_unlike_the_embeddings_that_a_config_ties_it_to_is_kept_and_untied(base, tmp_path):
    change_config(base, tie_word_embeddings=True)
    convert_checkpoint(base, tmp_path / "out", LINEARIZATION)
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False
    assert same(tmp_path / "out", load_file(base / WEIGHTS))
    change(base, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    convert_checkpoint(base, tmp_path / "tied", LINEARIZATION)
    assert json.loads((tmp_path / "tied/config.json").read_text())["tie_word_embeddings"] is True


def test_buffers_that_models_compute_are_dropped_and_named(base, tmp_path):
    original = load_file(base / WEIGHTS)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change(base, lambda tensors: tensors.update({name: torch.ones(4)}))
    report = convert_checkpoint(base, tmp_path / "out", LINEARIZATION)
    assert report["tensors"]["dropped"] == [name]
    assert name not in Checkpoint.open(tmp_path / "out").tensors
    assert same(tmp_path / "out", original)


def test_progress_ends_at_the_total(base, tmp_path):
    seen = []
    report = convert_checkpoint(
        base, tmp_path / "out", LINEARIZATION, progress=lambda done, total, note="": seen.append((done, total))
    )
    assert seen == sorted(seen)
    assert seen[-1] == (report["bytes"], report["bytes"])


# --- what is refused


def poison(name: str, value: float) -> Callable[[Path], None]:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][-1] = value

    return lambda base: change(base, edit)


Q = "model.layers.1.self_attn.q_proj.weight"
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda b: change(b, lambda t: t.pop(Q)), rf"base: tensor {Q} is missing"),
    "several missing": (
        lambda b: change(b, lambda t: [t.pop(name) for name in list(t) if ".1." in name]),
        r"base: 9 tensors \(model\.layers\.1\..*\) are missing",
    ),
    "head missing": (lambda b: change(b, lambda t: t.pop("lm_head.weight")), "tensor lm_head.weight is missing"),
    "extra": (
        lambda b: change(b, lambda t: t.update({"model.extra.bias": torch.ones(2)})),
        rf"{WEIGHTS}: tensor model\.extra\.bias is not part of the llama",
    ),
    "transposed": (
        lambda b: change(b, lambda t: t.update({"lm_head.weight": t["lm_head.weight"].T.contiguous()})),
        r"tensor lm_head\.weight is \[32, 101\], but config\.json implies \[101, 32\]",
    ),
    "NaN": (poison(Q, float("nan")), rf"{WEIGHTS}: tensor {Q} contains NaN or infinity"),
    "infinity": (poison("model.norm.weight", float("inf")), r"tensor model\.norm\.weight contains NaN or infinity"),
    "minus infinity": (poison("lm_head.weight", -float("inf")), r"tensor lm_head\.weight contains NaN or infinity"),
    "truncated": (lambda b: (b / WEIGHTS).write_bytes((b / WEIGHTS).read_bytes()[:-8]), rf"{WEIGHTS}: is truncated"),
    "pickled": (lambda b: (b / WEIGHTS).rename(b / "pytorch_model.bin"), "its weights are pickles"),
    "fewer layers": (
        lambda b: change_config(b, num_hidden_layers=2),
        r"model\.layers\.2\..* are not part of the llama",
    ),
    "more layers": (lambda b: change_config(b, num_hidden_layers=4), r"model\.layers\.3\..* are missing"),
    "other vocabulary": (lambda b: change_config(b, vocab_size=102), r"is \[101, 32\], but config\.json implies \[102"),
    "other width": (lambda b: change_config(b, hidden_size=16), "but config.json implies"),
    "other heads": (
        lambda b: change_config(b, num_key_value_heads=4),
        r"k_proj\.weight is \[16, 32\], but .* \[32, 32\]",
    ),
    "biases": (lambda b: change_config(b, attention_bias=True), r"q_proj\.bias.* are missing"),
    "other family": (lambda b: change_config(b, model_type="qwen3"), r"q_norm\.weight.* are missing"),
    "foreign family": (lambda b: change_config(b, model_type="gpt2"), "model_type 'gpt2' is not supported"),
    "impossible config": (lambda b: change_config(b, pad_token_id=500), "no llama can be built from it"),
    "quantized": (lambda b: change_config(b, quantization_config={"quant_method": "gptq"}), "says it is quantized"),
    "no config": (lambda b: (b / "config.json").unlink(), r"config\.json: there is no such file"),
    "no tokenizer": (lambda b: (b / "tokenizer.json").unlink(), "base: has no tokenizer"),
    "no weights": (lambda b: (b / WEIGHTS).unlink(), "base: has no weights"),
}


@pytest.mark.parametrize(("damage", "says"), BROKEN.values(), ids=BROKEN.keys())
def test_a_base_that_does_not_add_up_is_refused_and_nothing_is_left(base, tmp_path, damage, says):
    damage(base)
    with pytest.raises(BadInput, match=says) as caught:
        convert_checkpoint(base, tmp_path / "out", LINEARIZATION)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_a_linearized_base_is_refused(base, tmp_path):
    convert_checkpoint(base, tmp_path / "out", LINEARIZATION)
    with pytest.raises(BadInput, match="is linearized already"):
        convert_checkpoint(tmp_path / "out", tmp_path / "again", LINEARIZATION)


def test_an_output_that_exists_is_refused_and_kept(base, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").touch()
    with pytest.raises(BadInput, match="out: already exists"):
        convert_checkpoint(base, tmp_path / "out", LINEARIZATION)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_values_that_the_dtype_cannot_hold_are_refused(base, tmp_path):
    poison(Q, 1e6)(base)
    with pytest.raises(BadInput, match=rf"tensor {Q} is too large for float16; use bfloat16"):
        convert_checkpoint(base, tmp_path / "out", LINEARIZATION, dtype="float16")
    convert_checkpoint(base, tmp_path / "out", LINEARIZATION, dtype="bfloat16")


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_a_full_disk_is_a_sentence_and_leaves_nothing(base, tmp_path, monkeypatch, dtype):
    shard(base)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("shutil.copyfile" if dtype == "auto" else "liger_convert.model.shards.safetensors_header", full)
    with pytest.raises(LinearizeError, match="out: the disk is full"):
        convert_checkpoint(base, tmp_path / "out", LINEARIZATION, dtype=dtype)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


# --- the check and the stream


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_check_finds_every_kind_of_value_that_is_not_finite(dtype):
    largest = torch.finfo(dtype).max
    sound = torch.tensor([0.0, -0.0, 1.0, -1.0, largest, -largest, torch.finfo(dtype).tiny / 2], dtype=dtype)
    assert all_finite(sound)
    for value in (float("inf"), -float("inf"), float("nan"), -float("nan")):
        assert not all_finite(torch.cat((sound, torch.tensor([value], dtype=dtype))))


def test_a_path_that_does_not_exist_is_not_looked_up_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("./nofolder", "../nofolder", "./a/b"):
        assert main.main(["convert", path, "out"]) == 2
        assert capfd.readouterr().err.strip() == f"error: base: {path}: there is no such file or folder"


def test_a_tokenizer_that_no_later_command_takes_is_refused_by_convert(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base = save_tiny_base("llama", tmp_path / "base")
    vocabulary = json.loads((base / "tokenizer.json").read_text())["model"]["vocab"]
    (base / "tokenizer.json").unlink()
    (base / "vocab.json").write_text(json.dumps(vocabulary))
    (base / "merges.txt").write_text("#version: 0.2\nh e\n")
    (base / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    assert main.main(["convert", str(base), str(tmp_path / "out"), "--window", "8"]) == 2
    assert "its tokenizer has no usable vocabulary" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()
