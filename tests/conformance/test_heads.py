"""Classification heads on the linearized backbone, as the family has them, or one sentence if the family has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from clients import LAYERS, documents, folder
from tiny import tiny_tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

from liger_convert.model import HEAD_CLASSES
from liger_convert.model.families import FAMILIES

AUTO = {
    "AutoModelForSequenceClassification": (AutoModelForSequenceClassification, {"labels": torch.tensor([0, 1])}),
    "AutoModelForTokenClassification": (AutoModelForTokenClassification, {"labels": torch.tensor([[0, 1] * 5] * 2)}),
    "AutoModelForQuestionAnswering": (
        AutoModelForQuestionAnswering,
        {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 4])},
    ),
}
every_head = pytest.mark.parametrize("auto", AUTO)


def load(auto: str, path: Path) -> Any:
    torch.manual_seed(0)  # the head is new
    return AUTO[auto][0].from_pretrained(path).eval()


def logits(model: Any, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        out = model(**inputs)
    return out.logits if "logits" in out else torch.stack((out.start_logits, out.end_logits), -1)


@every_head
@pytest.mark.parametrize(("layers", "family"), [("linear", "llama"), ("hybrid", "llama"), ("hybrid", "mixtral")])
def test_a_head_is_added_to_the_linearized_backbone(layers: str, family: str, auto: str, tmp_path: Path) -> None:
    path = folder(layers, family)
    model, loaded = AUTO[auto][0].from_pretrained(path, output_loading_info=True)
    head = "qa_outputs" if auto == "AutoModelForQuestionAnswering" else "score"
    assert {name.split(".")[0] for name in loaded["missing_keys"]} == {head}
    assert loaded["unexpected_keys"] == {"lm_head.weight"}
    for name, tensor in AutoModelForCausalLM.from_pretrained(path).model.state_dict().items():
        assert torch.equal(model.state_dict()[f"model.{name}"], tensor), name
    ids = torch.randint(3, 101, (2, 10), generator=torch.Generator().manual_seed(0))
    loss = model(ids, **AUTO[auto][1]).loss
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.model.layers[0].parameters())
    model.eval().save_pretrained(tmp_path)
    assert torch.equal(logits(load(auto, tmp_path), input_ids=ids), logits(model, input_ids=ids))


@every_head
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("layers", LAYERS)
def test_padding_changes_nothing_that_a_head_says(layers: str, side: str, auto: str) -> None:
    model, rows = load(auto, folder(layers)), documents(3)
    inputs = [{"input_ids": row["input_ids"]} for row in rows]
    padded = DataCollatorWithPadding(tiny_tokenizer())
    padded.tokenizer.padding_side = side
    batch = padded(inputs)
    together = logits(model, **batch)
    for i, row in enumerate(inputs):
        alone = logits(model, input_ids=torch.tensor([row["input_ids"]]))[0]
        found = (
            together[i] if auto == "AutoModelForSequenceClassification" else together[i][batch.attention_mask[i] == 1]
        )
        torch.testing.assert_close(found, alone, atol=1e-4, rtol=1e-4)


def test_a_trainer_learns_classes_and_evaluates_them(tmp_path: Path) -> None:
    model = load("AutoModelForSequenceClassification", folder("hybrid"))
    rows = [{"input_ids": row["input_ids"], "label": i % 2} for i, row in enumerate(documents())]
    args = TrainingArguments(
        str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True, num_train_epochs=6, learning_rate=1e-3
    )
    trainer = Trainer(model, args, DataCollatorWithPadding(tiny_tokenizer()), rows, rows)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before / 2


def test_the_head_of_a_base_without_a_padding_token_takes_one_row() -> None:
    model = load("AutoModelForSequenceClassification", folder())
    model.config.pad_token_id = None
    assert logits(model, input_ids=torch.tensor([[5, 6, 7]])).shape == (1, 2)
    with pytest.raises(ValueError, match="no padding token is defined"):
        logits(model, input_ids=torch.tensor([[5, 6, 7]] * 2))


@pytest.mark.parametrize("auto", AUTO)
@pytest.mark.parametrize("family", ["granite", "olmo2"])
def test_a_head_that_the_family_has_not_is_refused(family: str, auto: str) -> None:
    path = folder("hybrid", family)
    if auto in HEAD_CLASSES[family]:
        assert load(auto, path).config.model_type == f"linearized_{family}"
        return
    sentence = f"transformers has no {auto.removeprefix('AutoModelFor')} head for {family}"
    with pytest.raises(ValueError, match=sentence):
        load(auto, path)
    with pytest.raises(ValueError, match=sentence):
        AUTO[auto][0].from_config(AutoConfig.from_pretrained(path))


def test_every_family_has_the_heads_that_transformers_gives_it() -> None:
    found = {family: {name.removeprefix("AutoModelFor") for name in HEAD_CLASSES[family]} for family in FAMILIES}
    all_three = {"SequenceClassification", "TokenClassification", "QuestionAnswering"}
    expected = dict.fromkeys(FAMILIES, all_three) | {
        "phi3": all_three - {"QuestionAnswering"},
        "gemma": all_three - {"QuestionAnswering"},
        "gemma2": all_three - {"QuestionAnswering"},
        "gemma3_text": {"SequenceClassification"},
        "glm4": all_three - {"QuestionAnswering"},
        "glm": all_three - {"QuestionAnswering"},
        "cohere": set(),
        "cohere2": set(),
        "ernie4_5": set(),
        "helium": all_three - {"QuestionAnswering"},
        "apertus": {"TokenClassification"},
        "olmo": {"SequenceClassification"},
        "olmo2": {"SequenceClassification"},
        "olmo3": {"SequenceClassification"},
        "granite": set(),
        "starcoder2": all_three - {"QuestionAnswering"},
        "stablelm": all_three - {"QuestionAnswering"},
        "olmoe": set(),
    }
    assert found == expected
