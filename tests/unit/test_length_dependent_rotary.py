"""Bases whose rotary frequencies depend on the length of a text: a long prompt has those of its whole length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import save_tiny_base
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from liger_convert.cli import main
from liger_convert.mixers import resolve_spec
from liger_convert.model import modeling
from liger_convert.model.loading import linearize_base
from liger_convert.model.rotary import length_limit

LIMIT = 24
KINDS: dict[str, dict[str, Any]] = {
    "longrope": {
        "max_position_embeddings": 256,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.0, 4.0, 8.0, 16.0],
            "original_max_position_embeddings": LIMIT,
        },
    },
    "dynamic": {
        "max_position_embeddings": LIMIT,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    },
}


def first_logits(model: Any, tokens: int) -> Tensor:
    ids = torch.randint(3, 101, (2, tokens), generator=torch.Generator().manual_seed(0))
    asked = {"max_new_tokens": 1, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **asked).logits[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [LIMIT - 4, LIMIT, LIMIT + 1, 3 * LIMIT])
@torch.no_grad()
def test_a_long_prompt_is_rotated_as_in_the_base(
    kind: str, tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny_base("llama", tmp_path, tokenizer=False, **KINDS[kind])
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    spec = resolve_spec({"type": "gla", "window": 128, "sinks": 0})  # holds every prompt
    plan = {"format": 2, "mixers": {"main": spec}, "layers": ["main"] * 3}

    def converted() -> Any:
        model = linearize_base(folder, plan, dtype=torch.float32, attn_implementation="eager").eval()
        model.prefill_chunk = 8
        return model

    expected = first_logits(base, tokens)
    torch.testing.assert_close(first_logits(converted(), tokens), expected, rtol=1e-4, atol=1e-5)
    if tokens == 3 * LIMIT:
        monkeypatch.setattr(modeling, "length_limit", lambda config: None)
        assert (first_logits(converted(), tokens) - expected).abs().max() > 0.1, "pieces are rotated otherwise"


@torch.no_grad()
def test_only_prompts_beyond_the_limit_are_read_in_one_piece(tmp_path: Path) -> None:
    folder = save_tiny_base("llama", tmp_path, tokenizer=False, **KINDS["longrope"])
    plan = {"format": 2, "mixers": {"main": resolve_spec({"type": "gla"})}, "layers": ["main"] * 3}
    model = linearize_base(folder, plan, dtype=torch.float32).eval()
    model.prefill_chunk = 8
    cache = DynamicCache(config=model.config)

    def chunk(tokens: int) -> int | None:
        inputs = {"input_ids": torch.zeros(1, tokens, dtype=torch.long), "inputs_embeds": None}
        return model._chunk(inputs, cache, 1)

    assert length_limit(model.config) == LIMIT
    assert [chunk(tokens) for tokens in (10, LIMIT, LIMIT + 1)] == [8, 8, None]
    model(torch.zeros(1, 10, dtype=torch.long), past_key_values=cache, use_cache=True)
    assert [chunk(tokens) for tokens in (LIMIT - 10, LIMIT - 9)] == [8, None]


@pytest.mark.parametrize("model_type", ["llama", "phi3", "gemma3_text"])
def test_other_rotary_embeddings_have_no_limit(model_type: str, tmp_path: Path) -> None:
    folder = save_tiny_base(model_type, tmp_path, tokenizer=False)
    plan = {"format": 2, "mixers": {"main": resolve_spec({"type": "gla"})}, "layers": ["main", "softmax", "softmax"]}
    config = linearize_base(folder, plan, dtype=torch.float32).config
    assert (length_limit(config) is None) == ("longrope" not in str(config.rope_parameters))


@pytest.mark.parametrize(("batch_size", "notes"), [("1", 0), ("2", 1)])
def test_eval_says_that_the_rows_of_a_batch_depend_on_each_other(
    batch_size: str, notes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = save_tiny_base("llama", tmp_path / "base", **KINDS["longrope"])
    (tmp_path / "text.txt").write_text("a text of some sixty tokens that is measured in windows of eight of them")
    (tmp_path / "suite.yaml").write_text("description: a test\ntext: [{window: 8, windows: 2}]\n")
    words = ["eval", str(base), "--suite", str(tmp_path / "suite.yaml"), "--text", str(tmp_path / "text.txt")]
    assert main.main([*words, "--device", "cpu", "--batch-size", batch_size, "--json"]) == 0
    said = json.loads(capsys.readouterr().out).get("notes", [])
    told = f"--batch-size {batch_size}: a row of more than {LIMIT} tokens changes the rotary embedding of shorter ones"
    assert [note.startswith(told) for note in said] == [True] * notes
