"""A folder with a recipe, a base and a text, and what breaks one of them: for tests of bad input."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from liger_convert.cli import main
from liger_convert.config.recipe import load
from liger_convert.io.checksums import sha256_file
from liger_convert.pipeline.manifest import FORMAT, Manifest, input_files

RECIPE = {
    "version": 1,
    "name": "tiny",
    "mixer": {"type": "gla", "window": 8, "sinks": 2},
    "device": "cpu",
    "data": {"text": {"source": "file", "path": "text.jsonl", "held_out": 0.2}},
    "stages": [
        {
            "kind": "align",
            "data": "text",
            "tokens": 64,
            "seq_len": 16,
            "batch_size": 2,
            "learning_rates": {"mixer": 1e-2},
        }
    ],
    "eval": {"suite": "quick", "text": "text"},
}


class World:
    """A folder with a recipe, a base and a text file, all sound until a case breaks one."""

    def __init__(self, folder: Path, base: Path):
        self.folder, self.base, self.out = folder, folder / "base", folder / "out"
        shutil.copytree(base, self.base)
        (folder / "text.jsonl").write_text("".join(json.dumps({"text": f"line {i} " * 9}) + "\n" for i in range(20)))
        (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE | {"base": str(self.base)}))

    def run(self, *overrides: str) -> list[str]:
        sets = [word for override in overrides for word in ("--set", override)]
        return ["run", str(self.folder / "recipe.yaml"), "--out", str(self.out), *sets]

    def plan(self, *overrides: str) -> list[str]:
        return ["plan", *self.run(*overrides)[1:2], *self.run(*overrides)[4:]]

    def convert(self, *options: str) -> list[str]:
        return ["convert", str(self.base), str(self.out), *options]

    def config(self, **changes: object) -> None:
        path = self.base / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    def tensors(self, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
        tensors = load_file(self.base / "model.safetensors")
        change(tensors)
        save_file(tensors, self.base / "model.safetensors")

    def start(self) -> None:
        """A run of the recipe that was killed after its first step."""
        path = self.folder / "recipe.yaml"
        record = Manifest.new(load(path), path.read_text(), [], {"threads": 1})
        inputs = {"base": self.base, "data.text.path": self.folder / "text.jsonl"}
        record.inputs = {name: sha256_file(file) for name, file in input_files(inputs).items()}
        record.steps = {"base": {}}
        self.out.mkdir()
        (self.out / ".lock").touch()
        record.write(self.out)

    def older(self) -> None:
        """The run was begun when manifests had the format before this one."""
        path = self.out / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"format": FORMAT - 1}))

    def stopped_in_training(self) -> None:
        """A stage has begun to read the data."""
        (self.out / "steps/1-align").mkdir(parents=True)

    def resume(self, *overrides: str) -> list[str]:
        return [*self.run(*overrides), "--resume"]

    def lock(self) -> None:
        self.locked = open(self.out / ".lock")  # noqa: SIM115 (for as long as this world exists)
        fcntl.flock(self.locked, fcntl.LOCK_EX)

    def linearized(self, *options: str) -> Path:
        words = ["convert", str(self.base), str(self.folder / "linearized"), "--window", "8", *options]
        assert main.main(words) == 0
        return self.folder / "linearized"

    def calibrate(self, *options: str, model: Path | None = None) -> list[str]:
        """A later option counts instead of the same one before."""
        sound = ["--base", str(self.base), "--text", "text.jsonl", "--tokens", "64", "--seq-len", "32"]
        return ["calibrate", str(model or self.linearized()), str(self.out), *sound, *options]


def files(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def case(name: str, says: str, words: Callable[[World], list[str]], code: int = 2):
    return pytest.param(words, says, code, id=name)


def after(*actions: Callable[[World], object]) -> Callable[[World], list[str]]:
    """Does all actions; the last one gives the command."""

    def words(world: World) -> list[str]:
        for action in actions[:-1]:
            action(world)
        result = actions[-1](world)
        assert isinstance(result, list)
        return result

    return words


def wrote(name: str, text: str | bytes) -> Callable[[World], object]:
    return lambda w: (w.folder / name).write_bytes(text.encode() if isinstance(text, str) else text)


def remove(name: str) -> Callable[[World], object]:
    return lambda w: (w.folder / name).unlink()


def edited(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[World], object]:
    return lambda w: w.tensors(change)
