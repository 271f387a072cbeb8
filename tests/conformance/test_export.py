"""An export gives the same logits as the model, both with the code it carries and with the installed package."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import save_tiny_base, tiny_config
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from liger_convert.mixers import MIXERS, resolve_spec
from liger_convert.model.loading import load_linearized
from liger_convert.pipeline.convert import convert_checkpoint
from liger_convert.pipeline.export import export_model
from liger_convert.pipeline.shipped_code import code_files, used_mixers, write_code
from liger_convert.utils.errors import BadInput

TOKENS = torch.randint(3, 101, (2, 29), generator=torch.Generator().manual_seed(0))
LINEARIZATION = {
    "format": 2,
    "mixers": {
        "main": resolve_spec({"window": 5, "sinks": 2}),
        "routed": resolve_spec({"type": "mom", "combine": "fixed", "inner": {"type": "liger-paper"}}),
    },
    "layers": ["main", "softmax", "routed"],
}
# pieces that replace a part of the layer shared by all mixers
OF_PAPERS = {
    "format": 2,
    "mixers": {
        name: resolve_spec({"type": "titans", "window": 5, "persistent": 3, "combine": name})
        for name in ("gate", "context")
    },
    "layers": ["gate", "softmax", "context"],
}
STRANGER = """
import importlib.abc, sys

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in ("liger_convert", "gated_kernels"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refuse())
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

folder, out = sys.argv[1:]
try:
    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
except Exception:
    pass
else:
    raise SystemExit("loaded code without being trusted")
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
assert type(model).__module__.startswith("transformers_modules"), type(model)
tokens = torch.load(out + "/tokens.pt")
with torch.no_grad():
    logits = model(tokens).logits
model.prefill_chunk = 8
text = model.generate(tokens, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
torch.manual_seed(0)
try:
    head = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True).eval()
except ValueError as error:
    classes = str(error)
else:
    assert type(head).__module__.startswith("transformers_modules"), type(head)
    with torch.no_grad():
        classes = head(tokens[:1]).logits
torch.save({"logits": logits, "text": text, "classes": classes}, out + "/found.pt")
model.save_pretrained(out + "/again")
if not isinstance(classes, str):
    head.save_pretrained(out + "/head")
AutoTokenizer.from_pretrained(folder)
"""
SAVED = (
    STRANGER.partition("import torch")[0]
    + """
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

out, name = sys.argv[1:]
found = torch.load(out + "/found.pt")
with torch.no_grad():
    model = AutoModelForCausalLM.from_pretrained(out + name, trust_remote_code=True).eval()
    assert torch.equal(found["logits"], model(torch.load(out + "/tokens.pt")).logits)
    head = AutoModelForSequenceClassification.from_pretrained(out + "/head", trust_remote_code=True).eval()
    assert torch.equal(found["classes"], head(torch.load(out + "/tokens.pt")[:1]).logits)
"""
)


def converted(family: str, folder: Path, linearization: dict[str, Any] = LINEARIZATION) -> Path:
    convert_checkpoint(save_tiny_base(family, folder / "base"), folder / "model", linearization)
    return folder / "model"


@pytest.mark.parametrize(
    ("family", "linearization"),
    [
        pytest.param("llama", LINEARIZATION, id="llama"),
        *(pytest.param(name, LINEARIZATION, marks=pytest.mark.slow, id=name) for name in ("phi3", "mixtral")),
        pytest.param("qwen3_moe", LINEARIZATION, marks=pytest.mark.slow, id="qwen3_moe"),
        pytest.param("olmoe", LINEARIZATION, id="olmoe"),
        pytest.param("llama", OF_PAPERS, id="llama, pieces of papers"),
    ],
)
def test_an_export_gives_the_same_logits_where_our_packages_cannot_be_imported(
    family: str, linearization: dict[str, Any], tmp_path: Path
) -> None:
    model_dir = converted(family, tmp_path, linearization)
    export_model(model_dir, tmp_path / "export")
    torch.save(TOKENS, tmp_path / "tokens.pt")
    AutoModelForCausalLM.from_pretrained(tmp_path / "export").save_pretrained(tmp_path / "ours")
    # what a stranger saves, and what we do, the next one loads; OLMoE has no head to be saved
    commands = [["stranger.py", str(tmp_path / "export"), str(tmp_path)]]
    if family != "olmoe":
        commands += [["saved.py", str(tmp_path), name] for name in ("/again", "/ours")]
    (tmp_path / "stranger.py").write_text(STRANGER)
    (tmp_path / "saved.py").write_text(SAVED)
    threads = str(torch.get_num_threads())  # the order of sums, and so the last bit, depends on them
    environment = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "PATH": "", "OMP_NUM_THREADS": threads}
    for command in commands:
        ran = subprocess.run([sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr[-2000:]
    found = torch.load(tmp_path / "found.pt")
    model = load_linearized(model_dir).eval()
    with torch.no_grad():
        assert torch.equal(found["logits"], model(TOKENS).logits)
    expected = model.generate(TOKENS, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert torch.equal(found["text"], expected)
    auto_map = json.loads((tmp_path / "export/config.json").read_text())["auto_map"]
    assert ("AutoModelForSequenceClassification" in auto_map) == (family != "olmoe")
    if family == "olmoe":
        assert found["classes"].startswith("transformers has no SequenceClassification head for olmoe")
    else:
        torch.manual_seed(0)
        head = AutoModelForSequenceClassification.from_pretrained(model_dir).eval()
        with torch.no_grad():
            assert torch.equal(found["classes"], head(TOKENS[:1]).logits)


def test_with_the_package_an_export_needs_no_code_of_its_own(tmp_path: Path) -> None:
    export_model(converted("llama", tmp_path), tmp_path / "export")
    for trusting in (False, True):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "export", trust_remote_code=trusting)
        assert type(model).__module__ == "liger_convert.model.modeling"
    assert AutoTokenizer.from_pretrained(tmp_path / "export").chat_template


def test_transformers_does_not_replace_lost_mixers_by_random_ones(tmp_path: Path) -> None:
    model_dir = converted("llama", tmp_path)
    whole = {name: x for file in model_dir.glob("*.safetensors") for name, x in load_file(file).items()}
    kept = {name: x for name, x in whole.items() if ".2.self_attn.mixer." not in name}
    for file in model_dir.glob("model*"):
        file.unlink()
    save_file(kept, model_dir / "model.safetensors", metadata={"format": "pt"})
    for auto in (AutoModelForCausalLM, AutoModelForSequenceClassification):
        with pytest.raises(ValueError, match=rf"{len(whole) - len(kept)} tensors of its mixers are missing, such as"):
            auto.from_pretrained(model_dir)
    info = AutoModelForCausalLM.from_pretrained(model_dir, output_loading_info=True)[1]
    assert set(info["missing_keys"]) == whole.keys() - kept.keys()


def test_an_export_can_change_the_weights_dtype_but_not_the_mixers(tmp_path: Path) -> None:
    export_model(converted("llama", tmp_path), tmp_path / "export", dtype="bfloat16")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype="auto")
    dtypes = {(".mixer." in name, parameter.dtype) for name, parameter in model.named_parameters()}
    assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}


def test_an_exports_config_caches_and_says_what_it_is(tmp_path: Path) -> None:
    model_dir = converted("llama", tmp_path)
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(config | {"use_cache": False}))  # as Trainer leaves it
    export_model(model_dir, tmp_path / "export", name="tiny")
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["use_cache"] is True
    assert config["linearization"] == LINEARIZATION
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_linearized.LinearizedLlamaForCausalLM"
    assert "# tiny, linearized" in (tmp_path / "export" / "README.md").read_text()


def test_shipped_code_imports_only_itself_torch_and_transformers() -> None:
    files = code_files(list(MIXERS))
    assert "modeling_linearized.py" in files
    for name, text in files.items():
        for node in ast.walk(ast.parse(text)):
            found = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                found = [node.module or ""]
            for module in found:
                assert module.split(".")[0] in sys.stdlib_module_names | {"torch", "transformers"}, (name, module)


@pytest.mark.parametrize(
    ("mixers", "layers", "own", "more"),
    [
        (
            {"main": {"type": "gla"}},
            ["main", "main", "main"],
            {"linear_gla", "linear_base", "linear_diagonal", "feature_maps", "kernel_maps", "gates"},
            12,
        ),
        (
            {"main": {"type": "mom", "combine": "learned", "inner": {"type": "gated-deltanet"}}},
            ["main", "softmax", "main"],
            {"routed_mom", "routed_memory_rows", "delta_gated_deltanet", "delta_base", "gates"},
            6,
        ),
        (
            {"main": {"type": "forgetting"}},
            ["main", "softmax", "main"],
            {"control_forgetting", "control_window"},
            1,
        ),
    ],
    ids=["gla", "mom with an inner mixer", "forgetting and softmax"],
)
def test_an_export_carries_what_its_mixers_need(
    mixers: dict[str, Any], layers: list[str], own: set[str], more: int, tmp_path: Path
) -> None:
    linearization = {"format": 2, "mixers": {k: resolve_spec(v) for k, v in mixers.items()}, "layers": layers}
    convert_checkpoint(save_tiny_base("llama", tmp_path / "base"), tmp_path / "model", linearization)
    export_model(tmp_path / "model", tmp_path / "export")
    code = {path.stem for path in (tmp_path / "export").glob("*.py")}
    basic = {file.removesuffix(".py") for file in code_files(["window"])}
    assert len(code) == len(basic) + more  # also the ops of its recurrence
    shared = {name.removeprefix("mixers_") for name in basic if name.startswith("mixers_")} - {"control_window"}
    assert {name.removeprefix("mixers_") for name in code if name.startswith("mixers_")} == own | shared


EACH = (
    STRANGER.split("import torch")[0]
    + """
import importlib, json, torch

folder = sys.argv[1]
sys.path.insert(0, folder)
for name, linearization in json.load(open(folder + "/linearizations.json")).items():
    module = importlib.import_module(name + ".modeling_linearized")
    config, _, model = module.CLASSES["llama"]
    made = model(config.from_pretrained(folder, linearization=linearization)).eval()
    used = {type(layer.self_attn.mixer).__module__.partition(".")[0] for layer in made.model.layers}
    assert used == {name}, used
    with torch.no_grad():
        assert made(torch.arange(3, 30)[None]).logits.isfinite().all(), name
    print(name)
"""
)


def test_the_code_of_every_mixers_export_runs_where_our_packages_cannot_be_imported(tmp_path: Path) -> None:
    made = {}
    for i, name in enumerate(MIXERS):
        spec = resolve_spec({"type": name} | ({"slots": 8} if name == "gsa" else {}))
        made[f"code_{i}"] = {"format": 2, "mixers": {"main": spec}, "layers": ["main"] * 3}
        (tmp_path / f"code_{i}").mkdir()
        write_code(tmp_path / f"code_{i}", code_files(used_mixers(made[f"code_{i}"])))
    (tmp_path / "linearizations.json").write_text(json.dumps(made))
    tiny_config("llama").save_pretrained(tmp_path)
    (tmp_path / "each.py").write_text(EACH)
    ran = subprocess.run([sys.executable, "each.py", str(tmp_path)], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.split() == list(made)


def test_a_model_with_options_by_their_old_names_is_read(tmp_path: Path) -> None:
    model_dir = converted("llama", tmp_path)
    text = (model_dir / "config.json").read_text()
    assert text.count('"combine"') == 2
    new = load_linearized(model_dir)
    (model_dir / "config.json").write_text(text.replace('"combine"', '"join"').replace('"format": 2', '"format": 1'))
    old = load_linearized(model_dir)
    assert old.config.linearization == new.config.linearization == LINEARIZATION
    with torch.no_grad():
        assert torch.equal(old.eval()(TOKENS).logits, new.eval()(TOKENS).logits)
    export_model(model_dir, tmp_path / "export")
    assert json.loads((tmp_path / "export/config.json").read_text())["linearization"] == LINEARIZATION


def test_a_base_is_not_exported(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is not a linearized model but a llama; export takes what"):
        export_model(save_tiny_base("llama", tmp_path / "base"), tmp_path / "export")
    assert not (tmp_path / "export").exists()
