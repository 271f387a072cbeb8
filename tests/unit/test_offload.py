"""Offloaded weights are present only while the module that owns them is called. The model's output does not change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from tiny_models import GREEDY, PADDED, PADDED_MASK, TOKENS, build, logits
from transformers import AutoModelForCausalLM

from liger_convert.mixers import MIXERS

DEVICE = torch.device("cpu")
# the mixers at their defaults, and options that bring parameters of their own
SPECS: list[dict[str, Any]] = [
    *({"type": name} for name in MIXERS),
    {"type": "gla", "feature_map": "hedgehog"},
    {"type": "gla", "forget": True, "gate": "constant"},
    {"type": "linear-attention", "feature_map": "codebook", "codes": 8},
    {"type": "liger-paper", "gate": "random", "feature_map": "hedgehog"},
    {"type": "gateloop", "feature_map": "codebook", "codes": 8, "gate": "head"},
    {"type": "rwkv6", "scope": "all"},
    {"type": "mom", "inner": {"type": "gla", "gate": "none"}},
    {"type": "mom", "combine": "learned", "inner": {"type": "ttt"}},
    {"type": "mom", "short_conv": 4, "output_norm": "rms", "output_gate": True},
    {"type": "titans", "persistent": 3, "combine": "gate"},
    {"type": "titans", "combine": "context"},
]


# those whose mixer has another module that owns parameters
FAST: list[dict[str, Any]] = [{"type": "gla"}, {"type": "mom"}, {"type": "linear-attention", "feature_map": "codebook"}]


def small(spec: dict[str, Any]) -> Any:
    bounded = {} if spec["type"] == "forgetting" else {"window": 5}
    return build("llama", ["main", "softmax", "main"], **{**bounded, **spec})


def on_cpu(model: Any, _: Path) -> Any:
    return accelerate.cpu_offload(model, DEVICE)


def on_disk(model: Any, folder: Path) -> Any:
    return accelerate.disk_offload(model, str(folder), DEVICE)


@pytest.mark.parametrize("spec", FAST, ids=str)
def test_an_offloaded_model_prefills_and_decodes_as_ever(spec: dict[str, Any], tmp_path: Path) -> None:
    check(spec, on_cpu, tmp_path, new_tokens=2)


@pytest.mark.slow
@pytest.mark.parametrize("offload", [on_cpu, on_disk])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_mixer_can_be_offloaded(spec: dict[str, Any], offload: Callable[..., Any], tmp_path: Path) -> None:
    check(spec, offload, tmp_path, new_tokens=20)


def check(spec: dict[str, Any], offload: Callable[..., Any], folder: Path, new_tokens: int) -> None:
    model = small(spec)
    options = GREEDY | {"attention_mask": PADDED_MASK, "max_new_tokens": new_tokens}
    expected, text = logits(model, TOKENS), model.generate(PADDED, **options)
    model = offload(model, folder)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert torch.equal(logits(model, TOKENS), expected)
    assert torch.equal(model.generate(PADDED, **options), text)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


@pytest.mark.parametrize("mixer", ["gla", "mom"])
def test_a_device_map_can_put_layers_on_disk(mixer: str, tmp_path: Path) -> None:
    model = small({"type": mixer})
    model.save_pretrained(tmp_path / "model")
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "disk"}
    places |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    mapped = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offload", attn_implementation="eager"
    )
    assert {parameter.device.type for parameter in mapped.model.layers[2].parameters()} == {"meta"}
    assert torch.equal(logits(mapped.eval(), TOKENS), logits(model, TOKENS))
