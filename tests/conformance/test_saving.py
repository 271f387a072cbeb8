"""A saved model is the model: it keeps every tensor of its base, and loads as itself in any dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import TOKENS, base_folder, linearization, logits
from transformers import AutoModelForCausalLM, DynamicCache

from liger_convert.model.loading import linearize_base


def test_every_tensor_of_the_base_is_kept_and_every_new_one_is_the_mixers(model: Any) -> None:
    base = AutoModelForCausalLM.from_pretrained(base_folder(model.config.model_type.removeprefix("linearized_")))
    kept, made = base.state_dict(), model.state_dict()
    assert all(torch.equal(kept[name], made[name]) for name in kept)
    assert all(".self_attn.mixer." in name for name in made.keys() - kept.keys())


def test_a_saved_model_loads_and_saves_as_itself(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "one")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "one", attn_implementation="eager").eval()
    assert type(loaded) is type(model)
    assert torch.equal(logits(loaded, TOKENS), logits(model, TOKENS))
    loaded.save_pretrained(tmp_path / "two")
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()


def test_a_device_map_changes_nothing(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    mapped = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cpu", attn_implementation="eager").eval()
    assert torch.equal(logits(mapped, TOKENS), logits(model, TOKENS))


def test_bfloat16_decodes_as_it_prefills(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    low = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager").eval()
    assert {p.dtype for name, p in low.named_parameters() if ".mixer." in name} <= {torch.float32}
    cache = DynamicCache(config=low.config)
    parts = [logits(low, TOKENS[:, i : i + 1], past_key_values=cache, use_cache=True) for i in range(TOKENS.shape[1])]
    stepwise, whole = torch.cat(parts, 1).float(), logits(low, TOKENS).float()
    full = logits(model, TOKENS)
    rounding = (whole - full).abs().mean()
    assert (stepwise - whole).abs().mean() <= 2 * rounding


def test_a_config_of_another_format_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"linearization\.format is 3, but this code reads 2"):
        linearize_base(base_folder("llama"), linearization() | {"format": 3})
