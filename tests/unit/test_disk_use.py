"""The disk space that a run takes is what the plan says."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest
import yaml
from tiny import save_tiny_base

from liger_convert.cli import main
from liger_convert.config.recipe import load
from liger_convert.io import checkpoint
from liger_convert.pipeline.plan import make_plan

RECIPE = """
version: 1
name: tiny
base: base
mixer: {type: gla, window: 8, sinks: 2}
device: cpu
precision: float32
data: {text: {source: file, path: text.jsonl, held_out: 0.3}}
eval: {suite: suite.yaml, text: text}
"""


def size(path: Path) -> int:
    """The size of a file, or 0 if it has just been removed."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


class Sampler(threading.Thread):
    """The largest number of bytes below a folder at any time, found by checking repeatedly."""

    def __init__(self, folder: Path):
        super().__init__(daemon=True)
        self.folder, self.most, self.over = folder, 0, False

    def run(self) -> None:
        while not self.over:
            files = (Path(where, name) for where, _, names in os.walk(self.folder) for name in names)
            self.most = max(self.most, sum(map(size, files)))
            time.sleep(0.002)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "LoRA"])
def test_the_disk_that_a_run_takes_is_what_the_plan_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "head_dim": 64, "vocab_size": 2000}
    save_tiny_base("llama", tmp_path / "base", **sizes)
    rows = [{"text": f"{i} bottles of beer on the wall. Take one down, pass it on."} for i in range(60)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "suite.yaml").write_text("description: tiny\ntext: [{window: 32, windows: 2}]\n")
    rates = (
        {"mixer": 1e-3, "lora": 1e-3} if lora else {"mixer": 1e-3, "attention": 1e-4, "body": 1e-4, "embeddings": 1e-5}
    )
    stage = {"data": "text", "tokens": 256, "seq_len": 32, "batch_size": 2, "learning_rates": {"mixer": 1e-3}}
    stages = [
        stage | {"kind": "align", "save_every": 2},
        stage
        | {"kind": "finetune", "loss_on": "all", "save_every": 2, "learning_rates": rates}
        | ({"lora": {}} if lora else {}),
    ]
    (tmp_path / "recipe.yaml").write_text(RECIPE + yaml.safe_dump({"stages": stages}))
    planned = make_plan(load("recipe.yaml"), checkpoint.load_config(tmp_path / "base")).disk_peak
    sampler = Sampler(tmp_path / "out")
    sampler.start()
    assert main.main(["run", "recipe.yaml", "--out", "out"]) == 0
    sampler.over = True
    sampler.join()
    print(f"planned {planned:,}, seen {sampler.most:,}")
    assert sampler.most == pytest.approx(planned, rel=0.05)
