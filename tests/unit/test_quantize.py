"""`linearize export --quantize`: linear maps of the layers get 8-bit weights, nothing else changes, and the loss is
measured.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from clients import folder
from folders import shared_folder
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from tiny import save_tiny_base
from tiny_models import GREEDY, PROMPT, TOKENS, linearization, logits, moved_off_start
from transformers import AutoModel, AutoModelForCausalLM

from liger_convert.cli import main
from liger_convert.io.checkpoint import INDEX, Checkpoint, load_config, load_tokenizer
from liger_convert.model import quantization
from liger_convert.model.loading import check_folder, linearize_base, load_linearized
from liger_convert.model.quantization import SCALE, SCHEMES
from liger_convert.pipeline.convert import convert_checkpoint
from liger_convert.pipeline.export import export_model
from liger_convert.pipeline.verify import verify_files
from liger_convert.utils.errors import BadInput

pytest.importorskip("compressed_tensors")

MAPS = [*(f"self_attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down"))]
WEIGHTS = {f"model.layers.{i}.{name}.weight" for i in range(3) for name in MAPS}
STEP = {"int8": 1.0, "fp8": 32.0}  # between numbers next to each other where they are largest, in scales
LARGEST = {"int8": 127.5, "fp8": 448.0}


@functools.cache
def model_dir() -> Path:
    """A tiny model whose memory matters, as after merging: in float32, with its tokenizer."""
    home = shared_folder("liger-test")
    base = save_tiny_base("llama", home / "base", initializer_range=0.1)
    plan = linearization(["main", "softmax", "main"], type="gla", window=6, sinks=2)
    moved_off_start(linearize_base(base, plan, dtype=torch.float32)).save_pretrained(home / "model")
    for file in (home / "base").glob("tokenizer*"):
        shutil.copyfile(file, home / "model" / file.name)
    return home / "model"


def quantized(scheme: str, dtype: str = "auto") -> Path:
    """That model quantized; tests must not write to it."""
    out = model_dir().parent / f"{scheme}-{dtype}"
    if not out.exists():
        export_model(model_dir(), out, quantize=scheme, dtype=dtype)
    return out


def stored(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def changed(source: Path, out: Path, change: Any) -> Path:
    """A copy of `source` whose tensors `change` has changed in place."""
    shutil.copytree(source, out)
    (file,) = out.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, file.name)}
    (out / INDEX).write_text(json.dumps(index))
    return out


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_the_linear_maps_of_layers_are_quantized_and_nothing_else(scheme: str, dtype: str) -> None:
    export_model(model_dir(), plain := model_dir().parent / f"plain-{scheme}-{dtype}", dtype=dtype)
    before, cast, after = stored(model_dir()), stored(plain), stored(quantized(scheme, dtype))
    assert {name for name, x in after.items() if x.dtype == SCHEMES[scheme].dtype} == WEIGHTS
    assert after.keys() - before.keys() == {name + SCALE for name in WEIGHTS}
    assert any(".mixer." in name for name in after)
    for name in before.keys() - WEIGHTS:
        assert after[name].dtype == cast[name].dtype
        assert torch.equal(after[name], cast[name]), name
    for name in WEIGHTS:
        scale = after[name + SCALE].float()
        assert scale.shape == (len(before[name]), 1)
        assert after[name + SCALE].dtype == cast[name].dtype
        assert torch.equal(scale, scale.bfloat16().float())  # loading in bfloat16 changes no scale
        assert torch.allclose(scale[:, 0] * LARGEST[scheme], before[name].abs().amax(1), rtol=2**-8)
        error = (after[name].float() * scale - before[name]).abs()
        # rounded to the nearest, but that the largest may be cut by what its scale was rounded
        assert bool((error <= (0.51 * STEP[scheme] + 0.004 * LARGEST[scheme]) * scale).all())
        assert error.mean() < 0.3 * STEP[scheme] * scale.mean()


def test_quantized_weights_take_half_the_bytes_of_bfloat16() -> None:
    found = stored(quantized("fp8", "bfloat16"))
    body = sum(x.nbytes for name, x in found.items() if name in WEIGHTS or name.removesuffix(SCALE) in WEIGHTS)
    in_bfloat16 = sum(2 * found[name].numel() for name in WEIGHTS)
    rows = sum(len(found[name]) for name in WEIGHTS)
    assert body == in_bfloat16 // 2 + 2 * rows


def test_quantizing_reads_a_few_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    read = quantization.checked_pieces

    def watched(info: Any, size: int) -> Any:
        for piece in read(info, size):
            held.append(piece.numel())
            yield piece

    monkeypatch.setattr(quantization, "checked_pieces", watched)
    monkeypatch.setattr(quantization, "CHUNK", 4 * 32 * 5)
    export_model(model_dir(), tmp_path / "out", quantize="int8")
    assert max(held) <= 32 * 5
    whole = stored(quantized("int8"))
    assert all(torch.equal(x, whole[name]) for name, x in stored(tmp_path / "out").items())


def swapped(tensors: dict[str, torch.Tensor]) -> None:
    """Gives two rows of a weight each other's scales."""
    scale = tensors["model.layers.0.self_attn.q_proj.weight" + SCALE]
    low, high = int(scale.argmin()), int(scale.argmax())
    scale[[low, high]] = scale[[high, low]]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_transformers_loads_it_as_the_quantized_model(scheme: str, tmp_path: Path) -> None:
    """Its weights are the stored numbers times their scales, and what goes into them is quantized."""
    model = AutoModelForCausalLM.from_pretrained(quantized(scheme)).eval()
    tensors, plain = stored(quantized(scheme)), load_linearized(model_dir()).eval()
    for name in WEIGHTS:
        wide = tensors[name].float() * tensors[name + SCALE]
        assert torch.equal(model.get_parameter(name), wide)
        plain.get_parameter(name).data.copy_(wide)
    x = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    name = "model.layers.0.mlp.up_proj"
    inputs = (model.get_submodule(name)(x) - plain.get_submodule(name)(x)).detach().abs()
    assert 0 < inputs.mean() < 0.05 * plain.get_submodule(name)(x).abs().mean()
    exact = logits(plain, TOKENS)
    loss = (logits(model, TOKENS) - exact).abs().mean()
    assert 0 < loss < 0.1 * exact.abs().mean()
    broken = load_linearized(changed(quantized(scheme), tmp_path / "swapped", swapped)).eval()
    assert (logits(broken, TOKENS) - exact).abs().mean() > 1.5 * loss
    # the same by our own loading, and by the backbone that measures call by itself
    ours = load_linearized(quantized(scheme)).eval()
    assert torch.equal(logits(ours, TOKENS), logits(model, TOKENS))
    backbone = AutoModel.from_pretrained(quantized(scheme)).eval()
    with torch.no_grad():
        hidden = backbone(TOKENS, use_cache=False).last_hidden_state
        assert torch.equal(hidden, ours.get_decoder()(TOKENS, use_cache=False).last_hidden_state)


STRANGER = """
import sys
sys.modules["liger_convert"] = sys.modules["gated_kernels"] = None
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
assert type(model).__module__.startswith("transformers_modules"), type(model)
with torch.no_grad():
    torch.save(model(torch.load("tokens.pt"), use_cache=False).logits, "logits.pt")
"""


def test_an_export_gives_the_same_logits_where_our_packages_cannot_be_imported(tmp_path: Path) -> None:
    torch.save(TOKENS, tmp_path / "tokens.pt")
    (tmp_path / "stranger.py").write_text(STRANGER)
    command = [sys.executable, "stranger.py", str(quantized("int8"))]
    threads = str(torch.get_num_threads())  # the order of sums, and so the last bit, depends on them
    environment = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "PATH": "", "OMP_NUM_THREADS": threads}
    environment["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = torch.load(tmp_path / "logits.pt")
    assert torch.equal(found, logits(load_linearized(quantized("int8")).eval(), TOKENS))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_decoding_equals_prefill(scheme: str) -> None:
    """A token is quantized by its own numbers alone. So the two differ only if a number is so close to the middle of
    two steps that it is rounded to the other one. That also changes the rest of the row. When it happens depends on the
    machine's last bits."""
    model = load_linearized(quantized(scheme)).eval()
    said = model.generate(PROMPT, **GREEDY, return_dict_in_generate=True, output_logits=True)
    scores = torch.stack(said.logits, 1)
    at_once = logits(model, said.sequences)[:, PROMPT.shape[1] - 1 : -1]
    exact = logits(load_linearized(model_dir()).eval(), said.sequences)[:, PROMPT.shape[1] - 1 : -1]
    apart, rounding = (scores - at_once).abs(), (at_once - exact).abs().mean()
    assert apart.quantile(0.25) < 1e-4 * rounding
    assert apart.mean() < 0.5 * rounding


def test_it_is_verified_and_a_flipped_bit_is_found(tmp_path: Path) -> None:
    shutil.copytree(quantized("int8"), tmp_path / "export")
    assert verify_files(tmp_path / "export").problems == []
    (file,) = (tmp_path / "export").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert [file.name in problem for problem in verify_files(tmp_path / "export").problems] == [True]


DAMAGES = {
    "no scale": (lambda t: t.pop(f"model.layers.1.mlp.up_proj.weight{SCALE}"), r"up_proj\.weight_scale is missing"),
    "one scale too many": (
        lambda t: t.update({f"model.norm.weight{SCALE}": torch.ones(1, 1)}),
        r"model\.norm\.weight_scale is not part of",
    ),
    "wide weight": (
        lambda t: t.update({"model.layers.1.mlp.up_proj.weight": torch.zeros(48, 32)}),
        r"up_proj\.weight is float32, but config\.json implies int8",
    ),
    "narrow norm": (
        lambda t: t.update({"model.norm.weight": torch.zeros(32, dtype=torch.int8)}),
        r"norm\.weight is int8, but config\.json implies a floating",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_tensor_is_accounted_for(damage: str, tmp_path: Path) -> None:
    change, said = DAMAGES[damage]
    with pytest.raises(BadInput, match=said):
        check_folder(changed(quantized("int8"), tmp_path / "bad", change))


def test_a_scale_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"model.layers.1.mlp.up_proj.weight{SCALE}"][3] = torch.nan

    with pytest.raises(BadInput, match="contains NaN"):
        load_linearized(changed(quantized("fp8"), tmp_path / "bad", spoil))


def test_export_says_what_quantizing_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog again and again. " * 20)
    words = ["export", str(model_dir()), str(tmp_path / "out"), "--quantize", "int8", "--json"]
    assert main.main([*words, "--text", str(tmp_path / "text.txt")]) == 0, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out)
    loss, n = found["loss"], 4  # of 256 tokens, the model's context
    assert found["scheme"] == "int8"
    assert found["weights"] == len(WEIGHTS)
    assert found["bytes"] < 0.55 * found["unquantized_bytes"]  # from float32, with embeddings and memories
    assert all(measured["n"] == n for measured in loss.values())
    assert 0 < loss["kl"]["value"] < 0.1
    assert loss["ppl"]["value"] / loss["ppl_before"]["value"] == pytest.approx(
        float(torch.tensor(loss["loss_added"]["value"]).exp()), rel=1e-6
    )
    ids = windows(tmp_path / "text.txt", n)
    with torch.no_grad():  # by the models' own forward
        was, now = (
            load_linearized(path).eval()(ids).logits.log_softmax(-1) for path in (model_dir(), tmp_path / "out")
        )
    kl = (was.exp() * (was - now)).sum(-1)[:, :-1].mean()
    assert loss["kl"]["value"] == pytest.approx(float(kl), rel=1e-3)
    card = ModelCard.load(tmp_path / "out/README.md")
    assert "compressed-tensors" in card.data.tags
    assert "KL from the unquantized model" in card.text
    assert verify_files(tmp_path / "out").problems == []
    assert main.main(["export", str(model_dir()), str(tmp_path / "b"), "--quantize", "fp8", "--text", "none"]) == 0
    assert "all tensors, fp8" in capsys.readouterr().out
    assert "KL" not in (tmp_path / "b/README.md").read_text()


def windows(text: Path, n: int) -> torch.Tensor:
    ids = load_tokenizer(model_dir())(text.read_text())["input_ids"]
    return torch.tensor(ids[: n * 256]).view(n, 256)


def test_eval_measures_a_quantized_export(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog again and again. " * 40)
    (tmp_path / "suite.yaml").write_text(
        "name: tiny\ndescription: text\ntext: [{name: text, window: 64, windows: 4}]\ncopying: []\ntasks: []\n"
    )
    words = ["eval", str(quantized("int8")), "--suite", str(tmp_path / "suite.yaml"), "--text"]
    assert main.main([*words, str(tmp_path / "text.txt"), "--json"]) == 0, capsys.readouterr().err
    assert json.loads(capsys.readouterr().out)["models"]["linearized"]["text_ppl"]["value"] > 1


REFUSED = {
    "an export again": ["export", "MODEL", "out"],
    "quantized again": ["export", "MODEL", "out", "--quantize", "fp8"],
    "merge": ["merge", "MODEL", "stage", "--out", "out"],
    "calibrate": ["calibrate", "MODEL", "out", "--base", "MODEL", "--text", "pydoc"],
    "train": ["train", "smollm2-135m-quick", "--stage", "1", "--model", "MODEL", "--out", "out"],
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_change_quantized_weights_says_so(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [str(quantized("int8")) if word == "MODEL" else word for word in REFUSED[case]]
    assert main.main(words) == 2
    said = capsys.readouterr().err
    assert "is quantized" in said
    assert "give the model that it was made from" in " ".join(said.split())
    assert not (tmp_path / "out").exists()


def test_a_quantized_base_is_not_converted(tmp_path: Path) -> None:
    base = save_tiny_base("llama", tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    stated = json.loads((quantized("int8") / "config.json").read_text())["quantization_config"]
    (base / "config.json").write_text(json.dumps(config | {"quantization_config": stated}))
    with pytest.raises(BadInput, match="says it is quantized"):
        convert_checkpoint(base, tmp_path / "out", linearization())


def test_what_cannot_be_quantized_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"'int4' is unknown .*; use int8 or fp8"):
        export_model(model_dir(), tmp_path / "out", quantize="int4")
    with pytest.raises(BadInput, match="has experts"):
        export_model(folder("hybrid", "olmoe"), tmp_path / "out", quantize="int8")
    assert not (tmp_path / "out").exists()


def test_without_the_package_a_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = quantized("int8")
    monkeypatch.setitem(sys.modules, "compressed_tensors", None)
    with pytest.raises(
        BadInput, match=r"compressed-tensors, which is not installed; pip install 'liger-convert\[quantize\]'"
    ):
        load_linearized(made)
    with pytest.raises(BadInput, match="--quantize int8: needs the package compressed-tensors"):
        export_model(model_dir(), tmp_path / "out", quantize="int8")
    check_folder(made)  # needs no package


def test_a_model_that_was_loaded_is_not_saved_half_quantized(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="copy the folder that it came from"):
        load_linearized(quantized("int8")).save_pretrained(tmp_path / "again")


def test_the_config_names_what_is_left_alone() -> None:
    config = load_config(quantized("fp8"))
    assert config.quantization_config["ignore"][:2] == ["lm_head", "model.embed_tokens"]
    assert quantization.scheme_of(config) == "fp8"
    assert quantization.scheme_of(load_config(model_dir())) is None
    assert Checkpoint.open(quantized("fp8"), any_dtype=True).tensors.keys() >= WEIGHTS
