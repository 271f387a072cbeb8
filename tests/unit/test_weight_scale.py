"""The scale of a base's weights is read from any checkpoint, and a run, a plan and a single stage use the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import write_home
from safetensors.torch import load_file, save_file
from tiny import tiny_config
from transformers import AutoModelForCausalLM

from liger_convert.cli import main
from liger_convert.io import weight_scale as module
from liger_convert.io.checkpoint import WEIGHTS
from liger_convert.io.weight_scale import weight_scale
from liger_convert.pipeline import single_steps

STAGES = [{"kind": "distill", "learning_rates": {"mixer": 1e-3, "body": 1e-4}}]


def save(folder: Path, scale: float, family: str = "llama", **options: Any) -> Path:
    """A base whose projections have random weights of this scale."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family, hidden_size=64))
    for name, weights in model.named_parameters():
        if ".layers." in name and weights.dim() == 2:
            torch.nn.init.normal_(weights, std=scale * weights.shape[1] ** -0.5)
    model.save_pretrained(folder, **options)
    return folder


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2", "qwen3_moe"])
@pytest.mark.parametrize("scale", [0.7, 4.6])
def test_the_scale_is_that_of_the_projections(tmp_path: Path, family: str, scale: float) -> None:
    assert weight_scale(save(tmp_path / "base", scale, family)) == pytest.approx(scale, rel=0.05)


def test_it_does_not_depend_on_dtype_or_shards_or_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = weight_scale(save(tmp_path / "one", 1.3))
    assert found == weight_scale(save(tmp_path / "shards", 1.3, max_shard_size="100KB"))
    state = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(tmp_path / "one" / WEIGHTS).items()}
    save_file(state, tmp_path / "one" / WEIGHTS)
    assert weight_scale(tmp_path / "one") == pytest.approx(found, rel=0.01)
    monkeypatch.setattr(module, "ROWS", 8)
    assert weight_scale(tmp_path / "one") == pytest.approx(found, rel=0.1)


def test_only_what_gets_adapters_counts(tmp_path: Path) -> None:
    found = weight_scale(save(tmp_path / "base", 1.3))
    state = load_file(tmp_path / "base" / WEIGHTS)
    for part in ("vision_tower.vision_model.encoder.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts.0.up_proj"):
        state |= {f"{part}{i}.weight": torch.full((64, 64), 9.0) for i in "abcdefghijklmnopqrstuvwxyz"}
    for name in ("model.", "model.language_model.", "language_model.model."):  # as published, and in transformers
        (tmp_path / name).mkdir()
        renamed = {key.replace("model.layers.", f"{name}layers."): tensor for key, tensor in state.items()}
        save_file(renamed, tmp_path / name / WEIGHTS)
        assert weight_scale(tmp_path / name) == pytest.approx(found)


def test_what_has_no_such_weights_has_no_scale(tmp_path: Path) -> None:
    folder = save(tmp_path / "base", 1.0)
    state = load_file(folder / WEIGHTS)
    projections = [name for name in state if "_proj" in name]
    for value in (0.0, float("nan"), float("inf")):
        save_file(state | {name: torch.full_like(state[name], value) for name in projections}, folder / WEIGHTS)
        assert weight_scale(folder) is None
    quantized = {name: state[name].to(torch.float8_e4m3fn) for name in projections}
    save_file(state | quantized, folder / WEIGHTS)
    assert weight_scale(folder) is None
    save_file({name: tensor for name, tensor in state.items() if name not in projections}, folder / WEIGHTS)
    assert weight_scale(folder) is None
    (folder / WEIGHTS).unlink()
    assert weight_scale(folder) is None


@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_a_run_a_plan_and_a_single_stage_have_the_same_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, factor: float
) -> None:
    monkeypatch.chdir(tmp_path)
    write_home(tmp_path, STAGES)
    file = tmp_path / "base" / WEIGHTS
    state = load_file(file)
    save_file({name: tensor * factor for name, tensor in state.items()}, file, {"format": "pt"})
    scale = weight_scale(tmp_path / "base")
    assert scale is not None
    expected = pytest.approx(1.07e-4 * scale, rel=5e-3)

    trained = []
    train = single_steps.train_stage
    monkeypatch.setattr(
        single_steps,
        "train_stage",
        lambda recipe, index, *more, **options: (
            trained.append(recipe.stages[index].learning_rates.lora) or train(recipe, index, *more, **options)
        ),
    )
    adapt = ["--set", "adapt={hidden_size: 16}"]
    assert main.main(["plan", "recipe.yaml", *adapt, "--json"]) == 0
    assert f"have a scale of {scale:.2f}" in json.loads(capsys.readouterr().out)["adapted"][0]
    assert main.main(["run", "recipe.yaml", "--out", "out", *adapt, "--set", "when_worse=ignore"]) == 0
    assert main.main(["convert", "base", "converted", "--layers", "all"]) == 0
    assert main.main(["train", "recipe.yaml", "--stage", "1", "--model", "converted", "--out", "alone", *adapt]) == 0
    assert trained == [expected, expected]
