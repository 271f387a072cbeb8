"""Calibration brings every layer's output closer to the base's and never further away."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny import save_tiny_base
from transformers import AutoModelForCausalLM

from liger_convert.calibrate import calibrate
from liger_convert.mixers import resolve_spec
from liger_convert.model import collect_align_targets, linearize_base

TOKENS = torch.randint(3, 101, (2, 40), generator=torch.Generator().manual_seed(0))
POSITIONS = torch.cat((torch.arange(25), torch.arange(15))).expand(2, 40)


def layer_errors(model: object, base: object) -> torch.Tensor:
    targets = collect_align_targets(base, {"input_ids": TOKENS, "position_ids": POSITIONS}, [0, 1, 2])
    return model(align=targets, position_ids=POSITIONS).layer_losses_L


def test_calibration_lowers_the_error_of_every_layer(tmp_path: Path) -> None:
    folder = save_tiny_base("llama", tmp_path / "base", tokenizer=False)
    base = AutoModelForCausalLM.from_pretrained(folder).eval()
    plan = {"format": 1, "mixers": {"main": resolve_spec({"window": 5, "sinks": 2})}, "layers": ["main"] * 3}
    model = linearize_base(folder, plan).eval()
    for layer in model.model.layers:  # a start from which the search can only go down
        layer.self_attn.mixer.log_share_H.data.fill_(12)
    before = layer_errors(model, base)
    calibrate(model, base, TOKENS, POSITIONS)
    assert (layer_errors(model, base) < before).all()


def test_a_mixer_without_a_shared_denominator_is_left_alone(tmp_path: Path) -> None:
    folder = save_tiny_base("llama", tmp_path / "base", tokenizer=False)
    base = AutoModelForCausalLM.from_pretrained(folder).eval()
    plan = {"format": 1, "mixers": {"main": resolve_spec({"type": "liger-paper"})}, "layers": ["main"] * 3}
    model = linearize_base(folder, plan).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    calibrate(model, base, TOKENS, POSITIONS)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
