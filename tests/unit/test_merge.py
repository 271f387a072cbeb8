"""What stages learned, folded in, is what they learned; and the merged folder is like the one it began with."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tiny import save_tiny_base
from transformers import AutoTokenizer

from liger_convert.config.stages import FinetuneStage, LearningRates, Lora
from liger_convert.data.documents import Document
from liger_convert.data.packed_rows import pack
from liger_convert.mixers import resolve_spec
from liger_convert.model.loading import linearize_base, load_linearized
from liger_convert.training import run_stage
from liger_convert.training.merge import load_chain, merge_results
from liger_convert.utils.errors import BadInput

TOKENS = torch.randint(3, 101, (2, 24), generator=torch.Generator().manual_seed(0))
FAMILIES = ["llama", "phi3", "mixtral", "qwen3_moe", "olmoe"]


@functools.cache
def linearized(family: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="liger-test-"))
    base = save_tiny_base(family, folder / "base")
    spec = resolve_spec({"type": "gla", "window": 6, "sinks": 2}, "mixer")
    linearization = {"format": 2, "mixers": {"main": spec}, "layers": ["main", "softmax", "main"]}
    linearize_base(base, linearization).save_pretrained(folder / "linearized")
    AutoTokenizer.from_pretrained(base).save_pretrained(folder / "linearized")
    return folder / "linearized"


def trained(family: str, number: int, **fields: Any) -> Path:
    """The result of a few steps of a stage after the results before it."""
    return _trained(family, number, tuple(fields.items()))


@functools.cache
def _trained(family: str, number: int, fields: tuple[tuple[str, Any], ...]) -> Path:
    stage = FinetuneStage(data="text", tokens=4 * 2 * 16, seq_len=16, batch_size=2, warmup_ratio=0.0, **dict(fields))
    rng = np.random.default_rng(number)
    documents = [Document(rng.integers(3, 101, 40).astype(np.int32), np.ones(40, bool), 40) for _ in range(4)]
    out = Path(tempfile.mkdtemp(prefix="liger-test-"))
    model = linearized(family)
    dataset = pack(documents, 16, stage.tokens)
    device = torch.device("cpu")
    run_stage(
        stage, model_dir=model, results=[], base_dir=model, dataset=dataset, out=out, device=device, precision="float32"
    )
    return out / "result"


def lora(family: str, number: int = 0) -> Path:
    return trained(family, number, learning_rates=LearningRates(mixer=3e-2, lora=3e-2), lora=Lora(rank=4))


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=TOKENS, use_cache=False).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_weights_give_the_logits_of_the_trained_adapter(family: str, tmp_path: Path) -> None:
    plain = load_linearized(linearized(family), dtype=torch.float32)
    before = logits(plain)
    with_adapter = logits(PeftModel.from_pretrained(plain, lora(family) / "adapter"))
    assert (with_adapter - before).abs().max() > 0.05 * before.abs().max()
    merge_results(linearized(family), [lora(family)], tmp_path / "merged")
    merged = logits(load_linearized(tmp_path / "merged"))
    torch.testing.assert_close(merged, with_adapter, atol=1e-5 * float(before.abs().max()), rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_merged_folder_is_a_plain_linearized_checkpoint(family: str, tmp_path: Path) -> None:
    merge_results(linearized(family), [lora(family)], tmp_path / "merged")
    plain, merged = (load_file(folder / "model.safetensors") for folder in (linearized(family), tmp_path / "merged"))
    assert {name: tuple(t.shape) for name, t in merged.items()} == {name: tuple(t.shape) for name, t in plain.items()}
    assert {tensor.dtype for tensor in merged.values()} == {torch.float32}
    config = load_linearized(tmp_path / "merged").config
    assert config.use_cache
    assert config.linearization["layers"] == ["main", "softmax", "main"]
    text = "an apple"
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (linearized(family), tmp_path / "merged")]
    assert tokenizers[0](text)["input_ids"] == tokenizers[1](text)["input_ids"]


def test_results_are_folded_in_their_order() -> None:
    full = trained("llama", 1, learning_rates=LearningRates(attention=1e-2, body=1e-2))
    first, second = lora("llama", 2), lora("llama", 3)

    def weight(*results: Path) -> torch.Tensor:
        return load_chain(linearized("llama"), results).model.layers[0].self_attn.q_proj.weight

    plain = weight()
    deltas = [weight(result) - plain for result in (first, second)]
    torch.testing.assert_close(weight(first, second), plain + deltas[0] + deltas[1])
    torch.testing.assert_close(weight(full, first), weight(full) + deltas[0])
    assert weight(first, full).equal(weight(full))  # a full result has what was trained before it inside


def test_what_is_no_result_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match="empty: is no result of a training stage"):
        merge_results(linearized("llama"), [tmp_path / "empty"], tmp_path / "merged")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
    with pytest.raises(BadInput, match="empty: already exists"):
        merge_results(linearized("llama"), [], tmp_path / "empty")
