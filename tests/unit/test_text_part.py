"""The text model inside a model of text and images is taken as a base of its own, with every tensor accounted for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_config, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from liger_convert.io import checkpoint
from liger_convert.io.checkpoint import base_config, resolve_base
from liger_convert.io.text_part import text_name
from liger_convert.model.loading import linearize_base, load_pretrained
from liger_convert.utils.errors import BadInput

PAIRS = [("mistral3", "mistral"), ("mistral3", "ministral3"), ("gemma3", "gemma3_text")]
IMAGES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TOKENS = torch.randint(3, 99, (2, 20), generator=torch.Generator().manual_seed(0))


def save_composite(kind: str, text: str, folder: Path, **changes: Any) -> Any:
    torch.manual_seed(0)
    vision = {**IMAGES, "image_size": 16, "patch_size": 8}
    vision |= {"head_dim": 8} if kind == "mistral3" else {"vision_use_head": False}
    config = CONFIG_MAPPING[kind](text_config=tiny_config(text), vision_config=vision, image_token_index=100, **changes)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(folder, max_shard_size="20KB")
    tiny_tokenizer().save_pretrained(folder)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS, use_cache=False).logits


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("kind", "text"), PAIRS)
def test_the_text_model_reads_text_as_the_whole_does(
    kind: str, text: str, tied: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = save_composite(kind, text, tmp_path / "whole", tie_word_embeddings=tied)
    assert len(list((tmp_path / "whole").glob("*.safetensors"))) > 1
    made = resolve_base(str(tmp_path / "whole"), tmp_path / "work")
    others = sum(text_name(name) is None for name in checkpoint.Checkpoint.open(tmp_path / "whole").tensors)
    assert f"is used; {others} tensors of its other parts are left out" in capfd.readouterr().err
    model = load_pretrained(made, attn_implementation="eager").eval()
    assert (model.config.model_type, model.config.tie_word_embeddings) == (text, tied)
    assert base_config(str(tmp_path / "whole")).to_dict().keys() >= {"sliding_window", "rope_parameters"}
    torch.testing.assert_close(logits(model), logits(whole))
    checkpoint.load_tokenizer(made)
    plan = {"format": 2, "mixers": {"main": {"type": "window", "window": 32, "sinks": 0}}, "layers": ["main"] * 3}
    torch.testing.assert_close(logits(linearize_base(made, plan).eval()), logits(whole), atol=1e-3, rtol=1e-3)


def test_an_output_head_that_is_stored_counts_whatever_a_default_says(tmp_path: Path) -> None:
    whole = save_composite("mistral3", "mistral", tmp_path / "whole", tie_word_embeddings=False)
    path = tmp_path / "whole/config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "tie_word_embeddings"}))
    model = load_pretrained(resolve_base(str(tmp_path / "whole"), tmp_path / "work")).eval()
    torch.testing.assert_close(logits(model), logits(whole))


def test_both_namings_are_read(tmp_path: Path) -> None:
    whole = save_composite("gemma3", "gemma3_text", tmp_path / "whole")
    own = {name: tensor.clone() for name, tensor in whole.state_dict().items() if name != "lm_head.weight"}
    assert any(name.startswith("model.language_model.layers.") for name in own)
    for path in (tmp_path / "whole").glob("model*"):
        path.unlink()
    save_file(own, tmp_path / "whole/model.safetensors", metadata={"format": "pt"})
    made = resolve_base(str(tmp_path / "whole"), tmp_path / "work")
    assert sorted(load_file(made / "model.safetensors")) == sorted(
        name for name in AutoModelForCausalLM.from_pretrained(made).state_dict() if name != "lm_head.weight"
    )
    torch.testing.assert_close(logits(load_pretrained(made).eval()), logits(whole))


def test_a_text_model_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    whole = save_composite("mistral3", "mistral", tmp_path / "whole")
    own = {name: t.clone() for name, t in whole.state_dict().items() if not name.endswith("language_model.norm.weight")}
    for path in (tmp_path / "whole").glob("model*"):
        path.unlink()
    save_file(own, tmp_path / "whole/model.safetensors", metadata={"format": "pt"})
    made = resolve_base(str(tmp_path / "whole"), tmp_path / "work")
    with pytest.raises(BadInput, match=r"tensor model\.norm\.weight is missing"):
        load_pretrained(made)


def test_a_quantized_one_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    save_composite("mistral3", "ministral3", tmp_path / "whole")
    path = tmp_path / "whole/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(BadInput, match="says it is quantized"):
        resolve_base(str(tmp_path / "whole"), tmp_path / "work")
    assert not (tmp_path / "work").exists()
