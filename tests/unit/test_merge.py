"""Merging keeps what the stages learned, and the merged folder has the same form as the one it started from."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from folders import shared_folder
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import save_tiny_base
from transformers import AutoTokenizer

from liger_convert.cli import main
from liger_convert.config.stages import FinetuneStage, LearningRates, Lora
from liger_convert.data.documents import Document
from liger_convert.data.packed_rows import pack
from liger_convert.io.checkpoint import Checkpoint
from liger_convert.mixers import resolve_spec
from liger_convert.model.loading import linearize_base, load_linearized
from liger_convert.training import merge, run_stage
from liger_convert.training.merge import load_chain, merge_results
from liger_convert.utils.errors import BadInput

TOKENS = torch.randint(3, 101, (2, 24), generator=torch.Generator().manual_seed(0))
FAMILIES = ["llama", "phi3", "mixtral", "qwen3_moe", "olmoe"]


@functools.cache
def linearized(family: str) -> Path:
    folder = shared_folder("liger-test")
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
    out = shared_folder("liger-test")
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
    plain, merged = (Checkpoint.open(folder).tensors for folder in (linearized(family), tmp_path / "merged"))
    assert {name: info.shape for name, info in merged.items()} == {name: info.shape for name, info in plain.items()}
    assert {info.dtype for info in merged.values()} == {torch.float32}
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
    with pytest.raises(BadInput, match="empty: is not the result of a training stage"):
        merge_results(linearized("llama"), [tmp_path / "empty"], tmp_path / "merged")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
    with pytest.raises(BadInput, match="empty: already exists"):
        merge_results(linearized("llama"), [], tmp_path / "empty")


def same_bits(merged: Path, want: Any) -> None:
    """Whether the folder `merged` holds the weights of the model `want`."""
    got = load_linearized(merged, dtype=torch.float32).state_dict()
    assert {name for name, tensor in want.state_dict().items() if not got[name].equal(tensor)} == set()


@pytest.mark.parametrize("family", FAMILIES)
def test_tensor_by_tensor_it_is_what_the_whole_model_becomes(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = [lora(family, 2), lora(family, 3)]
    want = load_chain(linearized(family), results)
    monkeypatch.setattr(merge, "load_linearized", None)  # no model is held
    merge_results(linearized(family), results, tmp_path / "merged")
    same_bits(tmp_path / "merged", want)
    with pytest.raises(AssertionError):  # in another order they are not the same
        same_bits(tmp_path / "merged", load_linearized(linearized(family), dtype=torch.float32))


def adapter(folder: Path, model: Any, **options: Any) -> Path:
    """An adapter as peft saves it, whose weights are random."""
    made = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, **options))
    for number, (name, parameter) in enumerate(made.named_parameters()):
        if parameter.requires_grad:
            torch.manual_seed(number)
            parameter.data = torch.randn_like(parameter).abs() if "magnitude" in name else torch.randn_like(parameter)
    made.save_pretrained(folder / "adapter", save_embedding_layers=False)
    return folder


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
        {"target_modules": ["k_proj", "o_proj"], "use_rslora": True, "rank_pattern": {"k_proj": 8}},
        {"target_modules": ["v_proj"], "bias": "all"},
        {"target_modules": ["v_proj"], "lora_bias": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "mixer"]},
    ],
    ids=["dora", "rslora", "bias", "lora_bias", "modules_to_save"],
)
def test_adapters_that_others_trained_are_folded_as_peft_folds_them(options: dict[str, Any], tmp_path: Path) -> None:
    result = adapter(tmp_path / "result", load_linearized(linearized("qwen2"), dtype=torch.float32), **options)
    want = load_chain(linearized("qwen2"), [result])
    merge_results(linearized("qwen2"), [result], tmp_path / "merged")
    same_bits(tmp_path / "merged", want)
    assert not want.model.layers[0].self_attn.v_proj.weight.isnan().any()


def test_an_adapter_of_an_end_that_is_tied_is_refused(tmp_path: Path) -> None:
    """It would change the other end as well."""
    base = save_tiny_base("llama", tmp_path / "base", tie_word_embeddings=True)
    spec = resolve_spec({"type": "gla", "window": 6, "sinks": 2}, "mixer")
    tied = linearize_base(base, {"format": 2, "mixers": {"main": spec}, "layers": ["main", "main", "main"]})
    tied.save_pretrained(tmp_path / "linearized")
    result = adapter(tmp_path / "result", tied, target_modules=["lm_head"])
    with pytest.raises(BadInput, match=r"changes lm_head.weight, which .*linearized does not store under this name"):
        merge_results(tmp_path / "linearized", [result], tmp_path / "merged")


@pytest.mark.parametrize("command", [["generate", "--prompt", "a"], ["export", "out"]], ids=["generate", "export"])
@pytest.mark.parametrize(
    ("folder", "says"),
    [
        ("adapter", "it is an adapter for org/m: merge the two (peft's merge_and_unload) and give the result"),
        ("stage/result/adapter", "merge the two (linearize merge org/m {home}/stage --out MERGED) and give the result"),
        ("stage", "it is what `linearize train` wrote: give what `linearize merge MODEL "),
    ],
)
def test_what_is_not_merged_yet_is_refused_with_how_to_merge_it(
    command: list[str], folder: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for adapter in ("adapter", "stage/result/adapter"):
        (tmp_path / adapter).mkdir(parents=True)
        (tmp_path / adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "org/m"}')
    (tmp_path / "stage/begun.json").write_text("{}")
    name, *words = command
    given = [str(tmp_path / word) if word == "out" else word for word in words]
    assert main.main([name, str(tmp_path / folder), *given]) == 2
    assert says.format(home=tmp_path.resolve()) in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()
