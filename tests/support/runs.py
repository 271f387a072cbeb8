"""A run small enough for a test: its recipe, its base and its data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from tiny import save_tiny_base

from liger_convert.io.checksums import sha256_file

STAGE = {"data": "text", "tokens": 6 * 64, "seq_len": 32, "batch_size": 2}
RECIPE: dict[str, Any] = {
    "version": 1,
    "name": "tiny",
    "base": "base",
    "mixer": {"type": "gla", "window": 8, "sinks": 2},
    "layers": "LNL",
    "device": "cpu",
    "precision": "float32",
    "data": {"text": {"source": "file", "path": "text.jsonl"}, "late": {"source": "file", "path": "late.jsonl"}},
    "eval": {"suite": "suite.yaml"},
}
SUITE = "description: tiny\ncopying: [{length: 8, draws: 2, tokens: uniform}]\n"


def write_home(folder: Path, stages: list[dict[str, Any]]) -> None:
    """Fills `folder` with recipe.yaml, whose stages differ from STAGE as given, and all that it names."""
    save_tiny_base("llama", folder / "base")
    rows = [{"text": f"{i} bottles of beer on the wall, {i} bottles of beer."} for i in range(40)]
    for name in ("text.jsonl", "late.jsonl"):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "suite.yaml").write_text(SUITE)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE | {"stages": [STAGE | stage for stage in stages]}))


def weights(run: Path) -> dict[str, str]:
    """sha256 of the exported weights by file."""
    return {path.name: sha256_file(path) for path in (run / "export").glob("*.safetensors")}
