"""A saved model keeps every tensor of its base and loads as the same model in any dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from promises import stepwise_logits
from tiny import save_tiny_base, tiny_config
from tiny_models import TOKENS, base_folder, build, linearization, logits
from transformers import AutoConfig, AutoModelForCausalLM

from liger_convert.io.checkpoint import Checkpoint
from liger_convert.model.families import FAMILIES
from liger_convert.model.loading import linearize_base, load_linearized
from liger_convert.model.modeling import CLASSES
from liger_convert.pipeline.convert import convert_checkpoint


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


@pytest.mark.parametrize("family", FAMILIES)
def test_an_output_head_is_tied_or_not_as_that_of_the_base(family: str, tmp_path: Path) -> None:
    tied = not tiny_config(family).tie_word_embeddings  # the other tests run on what is the family's default
    base = save_tiny_base(family, tmp_path / "base", tie_word_embeddings=tied)
    assert ("lm_head.weight" in Checkpoint.open(base).tensors) == (not tied)
    plan = linearization(type="gla", window=5, sinks=2)
    expected = logits(linearize_base(base, plan).eval(), TOKENS)
    convert_checkpoint(base, tmp_path / "converted", plan)
    load_linearized(tmp_path / "converted").save_pretrained(tmp_path / "saved")
    for folder in ("converted", "saved"):
        model = load_linearized(tmp_path / folder).eval()
        assert torch.equal(logits(model, TOKENS), expected)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        assert ("lm_head.weight" in Checkpoint.open(tmp_path / folder).tensors) == (not tied)


def test_a_device_map_changes_nothing(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    mapped = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cpu", attn_implementation="eager").eval()
    assert torch.equal(logits(mapped, TOKENS), logits(model, TOKENS))


def test_bfloat16_decodes_as_it_prefills(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    low = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager").eval()
    assert {p.dtype for name, p in low.named_parameters() if ".mixer." in name} <= {torch.float32}
    stepwise, whole = stepwise_logits(low).float(), logits(low, TOKENS).float()
    full = logits(model, TOKENS)
    rounding = (whole - full).abs().mean()
    assert (stepwise - whole).abs().mean() <= 2 * rounding


def test_a_config_of_another_format_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"linearization\.format is 3, but this code reads 2"):
        linearize_base(base_folder("llama"), linearization() | {"format": 3})


def test_a_model_of_fewer_layers_names_its_mixers_anew(tmp_path: Path) -> None:
    build("llama", type="gla", window=5).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"num_hidden_layers is 2, but linearization\.layers names 3 layers"):
        AutoModelForCausalLM.from_pretrained(tmp_path, num_hidden_layers=2)
    config = AutoConfig.from_pretrained(tmp_path)
    config.num_hidden_layers, config.linearization["layers"] = 2, config.linearization["layers"][:2]
    assert logits(AutoModelForCausalLM.from_pretrained(tmp_path, config=config), TOKENS).isfinite().all()


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe"])
def test_a_saved_model_runs_its_experts_as_its_base_does(family: str, tmp_path: Path) -> None:
    """Whichever of the two classes is asked first: transformers keeps what it found for a class and those below it."""
    found = "_can_set_experts_implementation_cached_value"
    base = AutoModelForCausalLM.from_pretrained(base_folder(family))
    linearize_base(base_folder(family), linearization(type="gla", window=5, sinks=2)).save_pretrained(tmp_path)
    for cls in {cls for kind in CLASSES[family][1:] for cls in kind.__mro__} - {object}:
        if found in vars(cls):
            delattr(cls, found)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config._experts_implementation == base.config._experts_implementation == "grouped_mm"
