"""Frozen weights are held in lower precision without changing a bit of the training. Training only the mixers leaves
the base unchanged.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from stages import folders, make_stage, result_bytes, train
from tiny_models import TOKENS, build
from transformers import CONFIG_MAPPING

from liger_convert.config.stages import LearningRates, Lora
from liger_convert.model.families import FAMILIES
from liger_convert.model.loading import load_linearized, load_pretrained
from liger_convert.training import merge, trainer
from liger_convert.training.frozen import narrow_frozen, run_wide_experts_apart
from liger_convert.training.student import prepare

ALONE = LearningRates(mixer=1e-2)
ALL = LearningRates(mixer=1e-2, attention=1e-3, body=1e-3)
MOE = [name for name in FAMILIES if hasattr(CONFIG_MAPPING[name](), "num_experts_per_tok")]
BY_LORA = {"learning_rates": LearningRates(mixer=1e-2, lora=1e-2), "lora": Lora(rank=2)}


def loss_and_gradients(model: Any) -> list[torch.Tensor]:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(TOKENS).logits.float().square().mean()
    loss.backward()
    return [loss, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("family", FAMILIES)
def test_no_bit_of_a_training_changes(family: str) -> None:
    model = prepare(build(family, type="gla", window=5, sinks=2), stage := make_stage("distill", learning_rates=ALONE))
    if family in MOE:
        model.set_experts_implementation("eager")  # whose products autocast casts
    before, held = loss_and_gradients(model), sum(p.nbytes for p in model.parameters())
    narrow_frozen(model, stage, torch.bfloat16)
    assert sum(p.nbytes for p in model.parameters()) < held
    after = loss_and_gradients(model)
    assert len(after) == len(before) > 1
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


@pytest.mark.parametrize("family", MOE)
def test_frozen_experts_are_narrow_and_grouped_and_trained_ones_are_wide_and_apart(family: str) -> None:
    for rates, dtype, apart in ((ALONE, torch.bfloat16, False), (ALL, torch.float32, True)):
        model = prepare(
            build(family, type="gla", window=5, sinks=2), stage := make_stage("distill", learning_rates=rates)
        )
        model.set_experts_implementation("grouped_mm")
        narrow_frozen(model, stage, torch.bfloat16)
        run_wide_experts_apart(model, torch.bfloat16)
        experts = [p for name, p in model.named_parameters() if ".experts." in name]
        assert len(experts) == 6
        assert {p.dtype for p in experts} == {dtype}
        assert (model.config._experts_implementation == "eager") is apart
        assert all(value.isfinite().all() for value in loss_and_gradients(model))


def test_embeddings_in_fewer_digits_would_change_it() -> None:
    """The control of the test above: at lower precision, the embeddings would change the training."""
    model = prepare(build("llama", type="gla", window=5, sinks=2), make_stage("distill", learning_rates=ALONE))
    before = loss_and_gradients(model)
    embeddings = model.get_input_embeddings().weight
    embeddings.data = embeddings.data.bfloat16()
    assert not torch.equal(before[1], loss_and_gradients(model)[1])


@pytest.mark.parametrize("fields", [{"learning_rates": ALONE}, BY_LORA], ids=["mixers", "lora"])
@pytest.mark.parametrize("name", ["align", "distill"])
def test_a_stage_leaves_the_same_files(
    name: str, fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = make_stage(name, steps=3, **fields)
    stats = train(stage, tmp_path / "narrow", precision="bfloat16")
    monkeypatch.setattr(trainer, "narrow_frozen", lambda *given: None)
    wide = train(stage, tmp_path / "wide", precision="bfloat16")
    assert stats["loss"] == wide["loss"]
    assert result_bytes(tmp_path / "narrow") == result_bytes(tmp_path / "wide")


def test_what_is_not_trained_stays_what_the_stage_began_with(tmp_path: Path) -> None:
    """Frozen weights are equal to the last bit, although the stage held them in bfloat16. The mixers have changed."""
    train(make_stage("distill", steps=2, learning_rates=ALONE), tmp_path / "out", precision="bfloat16")
    start = load_linearized(folders()[1], dtype=torch.float32).state_dict()
    (file,) = (tmp_path / "out/result" / merge.MODEL).glob("*.safetensors")
    for name, tensor in load_file(file).items():
        assert torch.equal(tensor, start[name]) is (".mixer." not in name), name


@pytest.mark.parametrize("variant", ["dora", "pissa"])
def test_adapters_that_read_the_weights_beside_them_keep_their_digits(variant: str) -> None:
    lora = Lora(rank=2, variant=variant)
    stage = make_stage("distill", learning_rates=LearningRates(mixer=1e-2, lora=1e-2), lora=lora)
    model = prepare(build("llama", type="gla", window=5, sinks=2), stage)
    narrow_frozen(model, stage, torch.bfloat16)
    assert all(p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("alone", [True, False])
def test_with_the_mixers_alone_a_text_within_the_window_is_read_as_by_the_base(alone: bool, tmp_path: Path) -> None:
    """This holds however long the training is. The controls are a longer text, and a training of adapters."""
    rates = {"learning_rates": ALONE} if alone else BY_LORA
    stage = make_stage("distill", steps=20, **rates)
    train(stage, tmp_path / "out")
    base_dir, start = folders()
    base: Any = load_pretrained(base_dir, dtype=torch.float32)
    model = merge.load_chain(start, [tmp_path / "out/result"])
    window = model.config.linearization["mixers"]["main"]["window"]
    ids = TOKENS[:, : 3 * window]
    with torch.no_grad():
        apart = (base(ids).logits - model(ids).logits).abs().amax((0, 2)) / base(ids).logits.abs().max()
    assert (apart[:window].max().item() < 1e-5) is alone
    assert apart[window + 2 :].max().item() > 1e-3  # with 2 sinks, which leave the window last
