"""output_attentions returns the weights of the softmax layers in order, as transformers' own hybrid models do."""

from __future__ import annotations

import pytest
import torch
from tiny_models import PROMPT, TOKENS, base_folder, build
from transformers import AutoModelForCausalLM

from liger_convert.model.families import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layers", [["softmax", "main", "softmax"], ["main"] * 3], ids=["hybrid", "linear"])
def test_a_model_returns_the_attentions_of_its_softmax_layers(family: str, layers: list[str]) -> None:
    model = build(family, layers, type="gla", window=5)
    base = AutoModelForCausalLM.from_pretrained(base_folder(family), attn_implementation="eager").eval()
    with torch.no_grad():
        found = model(TOKENS, output_attentions=True, use_cache=False).attentions
        expected = base(TOKENS, output_attentions=True, use_cache=False).attentions
    assert len(found) == layers.count("softmax")
    assert all(weights.shape == expected[0].shape for weights in found)
    if found:  # the first layer sees what the base's does
        torch.testing.assert_close(found[0], expected[0])


def test_generation_returns_them_at_every_step() -> None:
    model = build("llama", ["main", "softmax", "main"], type="gla", window=5)
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    found = model.generate(PROMPT, output_attentions=True, return_dict_in_generate=True, **options).attentions
    assert [[tuple(weights.shape) for weights in step] for step in found] == [
        [(2, 4, 9, 9)],
        [(2, 4, 1, 10)],
        [(2, 4, 1, 11)],
    ]
