"""A mixer of another package is found by its entry point and exported like our own, or refused in a sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import yaml
from tiny import save_tiny_base

from liger_convert.cli.main import main
from liger_convert.mixers import MIXERS, find_mixer, register_mixer, registry, resolve_spec
from liger_convert.mixers.base import Mixer
from liger_convert.mixers.control.window import Window
from liger_convert.pipeline.shipped_code import code_files
from liger_convert.utils.errors import BadInput

MODULE = '''"""A mixer whose memory fades at one rate."""

from dataclasses import dataclass

from liger_convert.mixers.base import HeadDims
from liger_convert.mixers.linear.lightning import Lightning, LightningSpec


@dataclass(frozen=True)
class FadingSpec(LightningSpec):
    rate: float = 0.5


class Fading(Lightning):
    summary = "one rate for all heads"
    gate_rule = "constant"
    Spec = FadingSpec
    spec: FadingSpec

    def __init__(self, spec: FadingSpec, dims: HeadDims):
        super().__init__(spec, dims)
        self.log_a_G = [-spec.rate] * dims.kv_heads
'''
STRANGER = """
import importlib.abc, sys

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in ("liger_convert", "gated_kernels", "fading_mixer"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refuse())
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
mixer = model.model.layers[0].self_attn.mixer
assert type(mixer).__name__ == "Fading" and mixer.log_a_G == [-0.25, -0.25], mixer
with torch.no_grad():
    assert model(torch.arange(3, 30)[None]).logits.isfinite().all()
"""


def install(folder: Path, module: str = MODULE, entry: str = "fading = fading_mixer:Fading") -> Path:
    """A folder as pip leaves one: the module, and the metadata of its package."""
    info = folder / "fading_mixer-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "fading_mixer.py").write_text(module)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fading-mixer\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[liger_convert.mixers]\n{entry}\n")
    return folder


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers is forgotten after it."""
    assert len(list(MIXERS.values())) == len(MIXERS)  # ours are imported, and stay registered after the test
    monkeypatch.setattr(registry, "_classes", dict(registry._classes))
    registry._plugins.cache_clear()
    yield
    monkeypatch.undo()
    registry._plugins.cache_clear()


@pytest.mark.usefixtures("forgotten")
def test_a_mixer_of_another_package_is_planned_converted_and_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(install(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "fading_mixer", raising=False)
    base = save_tiny_base("llama", tmp_path / "base")
    recipe = {
        "version": 1,
        "name": "tiny",
        "base": str(base),
        "mixer": {"type": "fading", "window": 5, "rate": 0.25},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    commands = [
        ["plan", str(tmp_path / "recipe.yaml")],
        ["convert", str(base), str(tmp_path / "model"), "--mixer", "fading", "--set", "rate=0.25"],
        ["export", str(tmp_path / "model"), str(tmp_path / "export")],
    ]
    assert [main(words) for words in commands] == [0, 0, 0]
    assert "fading" in capsys.readouterr().out
    spec = json.loads((tmp_path / "export/config.json").read_text())["linearization"]["mixers"]["main"]
    assert (spec["type"], spec["rate"]) == ("fading", 0.25)
    assert (tmp_path / "export/plugin_fading_mixer.py").exists()
    (tmp_path / "stranger.py").write_text(STRANGER)
    monkeypatch.undo()  # the stranger has no such package
    # without the modules that transformers has copied for tests before this one: it would look for its own among them
    paths = os.pathsep.join(path for path in sys.path if path and not Path(path, "transformers_modules").exists())
    environment = os.environ | {"PYTHONPATH": paths, "HF_HOME": str(tmp_path / "hf"), "TERM": "dumb"}
    command = [sys.executable, "stranger.py", str(tmp_path / "export")]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr[-2000:]


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, forgotten: None):
    """Takes modules by name and text, and the entry points that name them; forgets them after the test."""

    def add(modules: dict[str, str], *points: tuple[str, str]) -> None:
        site = tmp_path / "site"
        site.mkdir(exist_ok=True)
        for name, text in modules.items():
            (site / f"{name}.py").write_text(text)
            monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.syspath_prepend(site)
        found = [EntryPoint(name, value, registry.GROUP) for name, value in points]
        monkeypatch.setattr(registry, "entry_points", lambda group: found)
        registry._plugins.cache_clear()

    return add


def test_an_entry_point_may_name_a_class_or_a_module(entries) -> None:
    decorated = MODULE.replace("class Fading(", '@register_mixer("other")\nclass Fading(')
    decorated = decorated.replace("@dataclass", "from liger_convert.mixers import register_mixer\n\n@dataclass", 1)
    entries(
        {"plain_fading": MODULE, "other_fading": decorated}, ("plain", "plain_fading:Fading"), ("other", "other_fading")
    )
    assert list(MIXERS)[-2:] == ["plain", "other"]
    assert [MIXERS[name].name for name in ("plain", "other")] == ["plain", "other"]
    assert resolve_spec({"type": "other"})["rate"] == 0.5
    with pytest.raises(BadInput, match=r"^mixer\.type: mixer 'othr' is unknown \(did you mean other\?\); known: gla, "):
        resolve_spec({"type": "othr"})


def test_a_plugin_that_cannot_be_imported_is_told(entries) -> None:
    entries({"broken_mixer": "import nothing_like_it"}, ("broken", "broken_mixer"), ("missing", "no_such_module:A"))
    with pytest.raises(
        BadInput, match=r"^mixers\.a\.type: mixer 'broken' of the package .*: broken_mixer cannot be imp"
    ):
        find_mixer("broken", "mixers.a")
    with pytest.raises(BadInput, match="no_such_module:A cannot be imported: No module named 'no_such_module'"):
        resolve_spec({"type": "missing"})
    assert resolve_spec({"type": "gla"})["type"] == "gla"


def test_a_plugin_without_such_a_mixer_is_told(entries) -> None:
    entries({"empty_mixer": "THERE = 1"}, ("empty", "empty_mixer"), ("number", "empty_mixer:THERE"))
    for name in ("empty", "number"):
        with pytest.raises(BadInput, match=f'is not a mixer of that name; put @register_mixer."{name}"'):
            MIXERS[name]


def test_a_mixer_that_does_not_say_what_it_is_is_told() -> None:
    with pytest.raises(BadInput, match=r"mixer 'mute': .*Mute lacks Spec and summary and gate_rule and recurrence"):
        register_mixer("mute")(type("Mute", (Mixer,), {}))


def test_a_name_that_is_taken_twice_is_told(entries) -> None:
    entries({"one": MODULE, "two": MODULE}, ("gla", "one:Fading"), ("twice", "one:Fading"), ("twice", "two:Fading"))
    with pytest.raises(BadInput, match=r"mixer 'gla': liger_convert\.mixers\.linear\.gla and one:Fading .* rename or"):
        resolve_spec({})
    with pytest.raises(BadInput, match=r"mixer 'twice': one:Fading .* and two:Fading .* all have this name"):
        MIXERS["twice"]
    register_mixer("fresh")(type("A", (Window,), {}))
    with pytest.raises(BadInput, match=r"mixer 'fresh': both .*\.A and .*\.B have this name; rename one"):
        register_mixer("fresh")(type("B", (Window,), {}))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("import numpy", "it imports numpy; it may only import from"),
        ("from . import helpers", r"it imports \.; it may"),
        ("import liger_convert.mixers.base", "it imports liger_convert.mixers.base; it may"),
        ("from liger_convert.mixers import gates", "it imports liger_convert.mixers.gates; it may"),
    ],
)
def test_an_export_refuses_a_plugin_that_it_cannot_carry(entries, line: str, says: str) -> None:
    text = MODULE + f"\n\ndef later():\n    {line}\n"
    entries({"heavy_mixer": text}, ("heavy", "heavy_mixer:Fading"))
    with pytest.raises(
        BadInput, match=f"^mixer 'heavy': its module heavy_mixer cannot be copied into an export, because {says}"
    ):
        code_files(["heavy"])


def test_an_export_carries_a_plugin_of_one_file(entries) -> None:
    entries({"light_mixer": MODULE}, ("light", "light_mixer:Fading"))
    files = code_files(["light", "gla"])
    assert "from .mixers_linear_lightning import Lightning, LightningSpec" in files["plugin_light_mixer.py"]
    assert "register_mixer('light')(Fading)" in files["modeling_linearized.py"]
