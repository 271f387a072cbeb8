"""Bases are found, read lazily and refused in one sentence; folders and files appear whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from gguf_models import write_gguf
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tiny import CHAT_TEMPLATE, save_tiny_base
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from liger_convert.io import checkpoint, tokenizer
from liger_convert.io.checkpoint import Checkpoint, load_config, load_tokenizer, resolve_base
from liger_convert.io.files import atomic_dir, atomic_write
from liger_convert.model.shards import checked_pieces
from liger_convert.utils.errors import BadInput, LinearizeError

STATE = {
    "a": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "b": torch.tensor(1.5),
    "c": torch.zeros(0, 4, dtype=torch.float16),
    "d": torch.linspace(0, 1, 5, dtype=torch.float64),
}


def save_shards(folder: Path) -> Path:
    """STATE in two shards with their index."""
    folder.mkdir()
    shards = {
        "one.safetensors": {"a": STATE["a"], "b": STATE["b"]},
        "two.safetensors": {"c": STATE["c"], "d": STATE["d"]},
    }
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    write_index(folder, {key: name for name, tensors in shards.items() for key in tensors})
    return folder


def write_index(folder: Path, weight_map: object) -> None:
    (folder / checkpoint.INDEX).write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_base("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def folder(base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base, tmp_path / "copy"))


# --- reading


def test_read_gives_the_tensors_that_were_saved(tmp_path):
    found = Checkpoint.open(save_shards(tmp_path / "sharded"))
    assert found.tensors.keys() == STATE.keys()
    for name, tensor in STATE.items():
        read = found.read(name)
        assert read.dtype == tensor.dtype
        assert torch.equal(read, tensor)


def test_a_single_file_wins_over_a_stale_index_as_in_transformers(folder):
    write_index(folder, {"gone": "gone.safetensors"})
    assert Checkpoint.open(folder).tensors.keys() == load_file(folder / checkpoint.WEIGHTS).keys()


def truncate(path: Path, size: int) -> None:
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)


def save_twice(folder: Path) -> None:
    save_file({"c": STATE["c"], "d": STATE["d"], "a": STATE["a"]}, folder / "two.safetensors")


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda f: truncate(f / "two.safetensors", -3), r"two\.safetensors: is truncated"),
    "empty": (
        lambda f: truncate(f / "two.safetensors", 0),
        r"two\.safetensors: is truncated or not a safetensors file",
    ),
    "too long": (
        lambda f: (f / "two.safetensors").open("ab").write(b"more"),
        r"two\.safetensors: is truncated or not a",
    ),
    "garbled header": (
        lambda f: (f / "one.safetensors").write_bytes(b"\x10" + b"\0" * 7 + b"{" * 32),
        r"one\.safetensors: .*JSON",
    ),
    "a pointer": (
        lambda f: (f / "one.safetensors").write_text("version https://git-lfs"),
        r"one\.safetensors: .*download",
    ),
    "missing shard": (lambda f: (f / "one.safetensors").unlink(), r"one\.safetensors: this shard is missing"),
    "missing index": (
        lambda f: (f / checkpoint.INDEX).unlink(),
        "has safetensors files but neither model.safetensors nor",
    ),
    "index no JSON": (lambda f: (f / checkpoint.INDEX).write_text("{"), r"index\.json: cannot be read as JSON"),
    "index a list": (
        lambda f: (f / checkpoint.INDEX).write_text("[]"),
        r"index\.json: must hold a JSON object, not a list",
    ),
    "index without map": (lambda f: (f / checkpoint.INDEX).write_text("{}"), r"index\.json: has no weight_map"),
    "index points outside": (lambda f: write_index(f, {"a": "../a.safetensors"}), "not the name of a file beside it"),
    "index names too few": (
        lambda f: write_index(f, {"a": "one.safetensors", "c": "two.safetensors", "d": "two.safetensors"}),
        "lists b in no shard, but it is in one.safetensors",
    ),
    "index names too many": (
        lambda f: write_index(f, dict.fromkeys("ab", "one.safetensors") | dict.fromkeys("cde", "two.safetensors")),
        "lists e in two.safetensors, but it is in no shard",
    ),
    "index mixes shards up": (
        lambda f: write_index(f, dict.fromkeys("abc", "one.safetensors") | {"d": "two.safetensors"}),
        "lists c in one.safetensors, but it is in two.safetensors",
    ),
    "stored twice": (save_twice, r"two\.safetensors: tensor a is also in one\.safetensors"),
    "quantized": (
        lambda f: save_file({"a": STATE["a"].to(torch.int8), "b": STATE["b"]}, f / "one.safetensors"),
        r"one\.safetensors: tensor a is I8: quantized",
    ),
    "only pickles": (
        lambda f: [p.rename(p.with_suffix(".bin")) for p in f.glob("*")],
        "its weights are pickles.*allow_pickle",
    ),
    "no weights": (lambda f: [p.unlink() for p in f.glob("*")], "has no weights"),
}


@pytest.mark.parametrize(("damage", "says"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_checkpoint_is_refused_in_a_sentence_that_names_the_file(tmp_path, damage, says):
    damage(save_shards(tmp_path / "sharded"))
    with pytest.raises(BadInput, match=says) as caught:
        Checkpoint.open(tmp_path / "sharded")
    assert "\n" not in str(caught.value)


def test_a_file_that_shrinks_after_it_was_opened_is_noticed(tmp_path):
    found = Checkpoint.open(save_shards(tmp_path / "sharded"))
    truncate(tmp_path / "sharded/two.safetensors", -3)
    with pytest.raises(BadInput, match="ends inside tensor d"):
        found.read("d")


def test_a_file_that_is_removed_after_it_was_opened_is_named(tmp_path):
    found = Checkpoint.open(save_shards(tmp_path / "sharded"))
    (tmp_path / "sharded/two.safetensors").unlink()
    for read in (lambda: found.read("d"), lambda: list(checked_pieces(found.tensors["d"]))):
        with pytest.raises(BadInput, match=r"two\.safetensors: there is no such file"):
            read()


# --- config and tokenizer


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "there is no such file"),
        ("{", "cannot be read as JSON"),
        ("{}", "has no model_type"),
        ('{"model_type": "unheard_of"}', "transformers cannot use it.*unheard_of"),
        ('{"model_type": "unheard_of", "auto_map": {"AutoConfig": "x.X"}}', "brings its own code.*trust_remote_code"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "hidden_size should be a whole number"),
    ],
    ids=["missing", "no JSON", "no type", "unknown type", "own code", "wrong field"],
)
def test_a_config_that_cannot_be_used_is_refused(folder, text, says):
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_text(text)
    with pytest.raises(BadInput, match=says):
        load_config(folder)


def test_a_missing_or_broken_tokenizer_is_refused(folder):
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(BadInput, match="its tokenizer cannot be used"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(BadInput, match="has no tokenizer"):
        load_tokenizer(folder)


def test_a_tokenizer_that_lost_its_merges_is_refused(folder):
    """It reads every text back, but from single letters, which the model has never seen in their place."""
    model = Tokenizer(models.BPE())
    model.pre_tokenizer, model.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    words = [f"{a}{b}{c}er" for a in "bdgt" for b in "aio" for c in "kmn"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    model.train_from_iterator([" ".join(["a", *words, "a"])] * 9, trainer)
    PreTrainedTokenizerFast(tokenizer_object=model).save_pretrained(folder)
    assert len(tokenizer.load(folder, None)(f"a {words[0]}")["input_ids"]) == 2
    data = json.loads((folder / "tokenizer.json").read_text())
    data["model"]["merges"] = data["model"]["merges"][:9]
    (folder / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(BadInput, match=r"its tokenizer splits words of its own vocabulary, such as '\w+'; give it the"):
        tokenizer.load(folder, None)


# --- where a base comes from


def test_a_sentencepiece_file_alone_names_the_packages_that_read_it(folder, monkeypatch):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>")
    monkeypatch.setattr(tokenizer, "READERS", {"no-such-thing": "no_such_thing"})
    with pytest.raises(BadInput, match=r"is only a tokenizer\.model, .*pip install no-such-thing, or put its tok"):
        load_tokenizer(folder)


def test_a_folder_is_taken_as_it_is(base, tmp_path):
    assert resolve_base(str(base), tmp_path) == base
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_licenses_does_not_matter(folder, tmp_path):
    (folder / "LICENSES").mkdir()
    (folder / "LICENSES/MIT.txt").write_text("yes")
    assert resolve_base(str(folder), tmp_path / "work") == folder
    checkpoint.copy_companions(folder, tmp_path)
    assert not (tmp_path / "LICENSES").exists()


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("/nowhere/model", "there is no such file or folder"),
        ("nowhere.gguf", "there is no such file or folder"),
        ("package:no_such_package/model.gguf", "the package is not installed; pip install --no-deps no-such-package"),
        ("package:json/no_such_file", "package json does not contain 'no_such_file'"),
        ("package:json", "is neither a .gguf file nor a model folder"),
        ("nobody/nothing", "is not a local folder and cannot be fetched from the hub"),
        ("nobody/nothing/at-all", "there is no such file or folder"),
    ],
)
def test_a_base_that_is_nowhere_is_refused(source, says, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(BadInput, match=says) as caught:
        resolve_base(source, tmp_path)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_packaged_file_is_found_without_importing_the_package(base, tmp_path, monkeypatch):
    (tmp_path / "packaged_model").mkdir()
    (tmp_path / "packaged_model/__init__.py").write_text("raise RuntimeError('imported')")
    shutil.copytree(base, tmp_path / "packaged_model/base")
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve_base("package:packaged_model/base", tmp_path) == tmp_path / "packaged_model/base"


def test_a_hub_id_is_fetched_without_pickles_and_code_unless_asked_for(base, tmp_path, monkeypatch):
    asked: list[tuple[str, set[str], bool]] = []

    def snapshot_download(repo: str, revision: str | None, allow_patterns: list[str], ignore_patterns: Any = ()) -> str:
        asked.append((f"{repo}@{revision}", set(allow_patterns), "*/*" in ignore_patterns))
        return str(base)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_base("some/model", tmp_path) == base
    resolve_base("some/model", tmp_path, revision="v2", allow_pickle=True, trust_remote_code=True)
    (_, plain, plain_is_flat), templates, (_, all_, _), *_ = asked
    assert "*.safetensors" in plain
    assert plain_is_flat, "folders hold the same weights in other formats"
    assert templates == ("some/model@None", {"additional_chat_templates/*.jinja"}, False)
    assert all_ - plain == {"*.bin", "*.py"}
    assert [repo for repo, *_ in asked] == 2 * ["some/model@None"] + 2 * ["some/model@v2"]
    assert checkpoint.base_config("some/model").model_type == "llama"
    assert asked[4:] == [("some/model@None", {"config.json"}, True)]


@pytest.mark.parametrize("sharded", [False, True])
def test_pickled_weights_become_safetensors_only_when_asked(folder, tmp_path, sharded):
    state = load_file(folder / checkpoint.WEIGHTS)
    (folder / checkpoint.WEIGHTS).unlink()
    state["lm_head.weight"] = state["model.embed_tokens.weight"]  # shared memory, as tied embeddings are pickled
    torch.save(state, folder / checkpoint.PICKLE)
    if sharded:
        (folder / checkpoint.PICKLE).rename(folder / "pytorch_model-00001-of-00001.bin")
        weight_map = dict.fromkeys(state, "pytorch_model-00001-of-00001.bin")
        (folder / checkpoint.PICKLE_INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(BadInput, match=r"its weights are pickles.*allow_pickle"):
        resolve_base(str(folder), tmp_path / "work")
    made = resolve_base(str(folder), tmp_path / "work", allow_pickle=True)
    found = Checkpoint.open(made)
    assert found.tensors.keys() == state.keys()
    assert all(torch.equal(found.read(name), tensor) for name, tensor in state.items())
    load_tokenizer(made)


@pytest.mark.parametrize(
    "wrapped",
    [lambda state: {"state_dict": state}, lambda state: {**state, "step": 3}, lambda state: [*state.values()]],
    ids=["nested", "with a number", "a list"],
)
def test_a_pickle_of_more_than_tensors_by_name_is_refused(folder, tmp_path, wrapped):
    torch.save(wrapped(load_file(folder / checkpoint.WEIGHTS)), folder / checkpoint.PICKLE)
    (folder / checkpoint.WEIGHTS).unlink()
    with pytest.raises(BadInput, match=r"pytorch_model\.bin: holds no tensors by name; save model\."):
        resolve_base(str(folder), tmp_path / "work", allow_pickle=True)


def test_pickled_tensors_may_be_transposed(folder, tmp_path):
    state = load_file(folder / checkpoint.WEIGHTS)
    turned = {name: t.t().contiguous().t() if t.ndim == 2 else t for name, t in state.items()}
    torch.save(turned, folder / checkpoint.PICKLE)
    (folder / checkpoint.WEIGHTS).unlink()
    made = load_file(resolve_base(str(folder), tmp_path / "work", allow_pickle=True) / checkpoint.WEIGHTS)
    assert all(torch.equal(made[name], tensor) for name, tensor in state.items())


def test_a_pickle_that_would_run_code_is_refused(folder, tmp_path):
    (folder / checkpoint.WEIGHTS).unlink()
    torch.save({"evil": subprocess.run}, folder / checkpoint.PICKLE)
    with pytest.raises(BadInput, match="is not a PyTorch state dict"):
        resolve_base(str(folder), tmp_path / "work", allow_pickle=True)
    assert list((tmp_path / "work").iterdir()) == []


@pytest.mark.parametrize(("vocabulary", "pieces"), [("smollm", ["1", "2"]), ("default", ["12"])])
def test_a_gguf_file_becomes_the_model_it_was_made_from(tmp_path, vocabulary, pieces):
    model = AutoModelForCausalLM.from_pretrained(save_tiny_base("llama", tmp_path / "base", rms_norm_eps=1e-3)).eval()
    write_gguf(tmp_path / "model.gguf", model, vocabulary)
    made = resolve_base(str(tmp_path / "model.gguf"), tmp_path / "work")
    assert made == tmp_path / "work/base"
    tokens = torch.arange(3, 40)[None]
    torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(made)(tokens).logits, model(tokens).logits)
    tokenizer = load_tokenizer(made)
    assert tokenizer.tokenize("12") == pieces
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert checkpoint.base_config(str(tmp_path / "model.gguf")).hidden_size == model.config.hidden_size


def test_a_gguf_file_that_lacks_a_tensor_is_refused(base, tmp_path):
    write_gguf(tmp_path / "model.gguf", AutoModelForCausalLM.from_pretrained(base), without="model.norm.weight")
    with pytest.raises(BadInput, match=r"does not contain 1 of the model's tensors, such as model\.norm\.weight"):
        resolve_base(str(tmp_path / "model.gguf"), tmp_path / "work")
    assert not (tmp_path / "work").exists()


def test_a_gguf_file_with_a_tensor_of_another_shape_is_refused(base, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(base)
    model.model.norm.weight = torch.nn.Parameter(torch.ones(16))
    write_gguf(tmp_path / "model.gguf", model)
    with pytest.raises(BadInput, match=r"tensor model\.norm\.weight is \[16\], but its own header implies \[32\]"):
        resolve_base(str(tmp_path / "model.gguf"), tmp_path / "work")
    assert not (tmp_path / "work").exists()


def test_what_was_made_from_a_gguf_file_is_used_again(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF broken")
    (tmp_path / "work/base").mkdir(parents=True)
    assert resolve_base(str(tmp_path / "model.gguf"), tmp_path / "work") == tmp_path / "work/base"


def test_a_broken_gguf_file_is_refused_and_leaves_nothing(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF broken")
    for use in (lambda s: resolve_base(s, tmp_path), checkpoint.base_config):
        with pytest.raises(BadInput, match=r"model\.gguf: cannot be read as a GGUF model"):
            use(str(tmp_path / "model.gguf"))
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_gguf_without_its_package_names_the_install(tmp_path, monkeypatch):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr(checkpoint.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"pip install 'liger-convert\[gguf\]'"):
        resolve_base(str(tmp_path / "model.gguf"), tmp_path)


# --- writing


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    with atomic_dir(tmp_path / "deep/out") as partial:
        (partial / "file").write_text("x")
        assert not (tmp_path / "deep/out").exists()
    assert (tmp_path / "deep/out/file").read_text() == "x"

    def fails() -> None:
        with atomic_dir(tmp_path / "other") as partial:
            (partial / "file").write_text("x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fails()
    assert {path.name for path in tmp_path.iterdir()} == {"deep"}


def test_a_folder_that_another_process_makes_meanwhile_is_kept(tmp_path):
    out = tmp_path / "out"

    def both_write() -> None:
        with atomic_dir(out) as folder:
            (folder / "file").write_text("mine")
            out.mkdir()
            (out / "file").write_text("theirs")

    with pytest.raises(BadInput, match="out: was made by another process"):
        both_write()
    assert (out / "file").read_text() == "theirs"
    assert list(tmp_path.iterdir()) == [out]


def test_an_existing_folder_is_kept_unless_it_may_be_overwritten(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/old").touch()
    with pytest.raises(BadInput, match="out: already exists"), atomic_dir(tmp_path / "out"):
        pass
    assert (tmp_path / "out/old").exists()
    with atomic_dir(tmp_path / "out", overwrite=True) as partial:
        (partial / "new").touch()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["new"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_a_sentence_and_leaves_nothing(tmp_path, error):
    def fills() -> None:
        with atomic_dir(tmp_path / "out") as partial:
            (partial / "file").write_text("x")
            raise error

    with pytest.raises(LinearizeError, match="out: the disk is full") as caught:
        fills()
    assert not isinstance(caught.value, BadInput)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("out", ["file/out", "file/deep/er/out"])
def test_a_place_that_cannot_be_written_is_a_sentence(tmp_path, out):
    (tmp_path / "file").touch()
    with pytest.raises(LinearizeError) as caught, atomic_dir(tmp_path / out):
        pass
    assert str(caught.value) == f"{tmp_path / out}: cannot be written: {tmp_path / 'file'} is a file, not a folder"


@pytest.mark.parametrize("error", [OSError(errno.EFBIG, "File too large", "base"), RuntimeError("x (os error 27)")])
def test_a_file_larger_than_the_place_allows_is_a_sentence(tmp_path, error):
    what = "out: cannot be written: no file may be so large there"
    with pytest.raises(LinearizeError, match=what), atomic_dir(tmp_path / "out"):
        raise error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [250, 300])
def test_a_name_that_is_too_long_is_a_sentence(tmp_path, size):
    what = "a: cannot be written: the name [.]?a*… is too long; use a shorter one"
    with pytest.raises(LinearizeError, match=what), atomic_dir(tmp_path / ("a" * size)):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    atomic_write(tmp_path / "file", "old")

    def fails(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(LinearizeError, match="disk is full"):
        atomic_write(tmp_path / "file", b"new")
    monkeypatch.undo()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]
    atomic_write(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_text() == "new"
