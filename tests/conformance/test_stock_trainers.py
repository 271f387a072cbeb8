"""Trainers that know nothing of linearized models train, evaluate, save and resume them as they do a Llama."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import datasets
import pytest
import torch
import torch.nn.functional as F
import trl
from clients import LAYERS, documents, fresh, loss_alone
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import tiny_tokenizer
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
)

every_layout = pytest.mark.parametrize("layers", LAYERS)
QUIET: dict[str, Any] = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_steps": 1}


def arguments(out: Path, **changes: Any) -> TrainingArguments:
    values = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "max_steps": 2, "learning_rate": 1e-3}
    return TrainingArguments(output_dir=str(out), **QUIET | values | changes)


def trainer_of(model: Any, out: Path, collator: Any = None, **changes: Any) -> Trainer:
    rows = datasets.Dataset.from_list([row | {"note": "a"} for row in documents()])
    collator = collator or DataCollatorWithFlattening()
    options = {"model": model, "args": arguments(out, **changes), "data_collator": collator}
    return Trainer(**options, train_dataset=rows, eval_dataset=rows)


def weights(model: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@every_layout
def test_prompts_are_masked_where_documents_are_flattened(layers: str, tmp_path: Path) -> None:
    model = fresh(layers)
    expected = loss_alone(model, documents()).item()
    unmasked = [row | {"labels": row["input_ids"]} for row in documents()]
    assert abs(loss_alone(model, unmasked).item() - expected) > 0.01
    trainer = trainer_of(model, tmp_path)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-4)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected, rel=1e-3)
    assert loss_alone(model.eval(), documents()) < expected


@every_layout
def test_padded_batches_have_the_loss_of_their_documents(layers: str, tmp_path: Path) -> None:
    model, rows = fresh(layers), documents()
    for row in rows:  # this collator learns all tokens
        row["labels"] = row["input_ids"]
    expected = loss_alone(model, rows).item()
    collator = DataCollatorForLanguageModeling(tiny_tokenizer(), mlm=False)
    plain = [{"input_ids": row["input_ids"]} for row in rows]
    trainer = Trainer(model, arguments(tmp_path), collator, train_dataset=plain, eval_dataset=plain)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-4)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected, rel=1e-3)


def test_accumulated_batches_train_as_one_batch_does(tmp_path: Path) -> None:
    trained = []
    for batch, accumulation in ((4, 1), (1, 4)):
        model = fresh()
        size = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
        trainer_of(model, tmp_path, **size, optim="sgd", max_steps=1, train_sampling_strategy="sequential").train()
        trained.append(weights(model))
    for name, tensor in trained[0].items():
        torch.testing.assert_close(trained[1][name], tensor, atol=1e-6, rtol=1e-4, msg=name)


def test_smoothed_labels_are_those_of_the_next_token(tmp_path: Path) -> None:
    model, rows = fresh(), documents(1)
    logits = model(torch.tensor([rows[0]["input_ids"]])).logits[0, :-1]
    labels = torch.tensor(rows[0]["labels"][1:])
    expected = F.cross_entropy(logits, labels, label_smoothing=0.1).item()
    options = {"args": arguments(tmp_path, label_smoothing_factor=0.1), "data_collator": DataCollatorWithFlattening()}
    found = Trainer(model, **options, eval_dataset=rows).evaluate()["eval_loss"]
    assert found == pytest.approx(expected, rel=1e-4)


@every_layout
def test_the_best_model_is_loaded_at_the_end(layers: str, tmp_path: Path) -> None:
    model = fresh(layers)
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True}
    # the first step of a warm-up changes nothing, and those after it destroy the model
    warm_up = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 1, "learning_rate": 3.0, "max_steps": 3}
    trainer = trainer_of(model, tmp_path, **evaluated, **warm_up)
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert losses[0] < min(losses[1:])
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    assert loss_alone(model.eval(), documents()).item() == pytest.approx(losses[0], rel=1e-4)


@every_layout
def test_a_resumed_training_ends_with_the_same_weights(layers: str, tmp_path: Path) -> None:
    whole, half = fresh(layers), fresh(layers)
    trainer_of(whole, tmp_path / "whole", max_steps=4, lr_scheduler_type="constant").train()
    trainer_of(half, tmp_path / "half", max_steps=2, save_steps=2, lr_scheduler_type="constant").train()
    other = fresh(layers)
    resumed = trainer_of(other, tmp_path / "half", max_steps=4, lr_scheduler_type="constant")
    resumed.train(resume_from_checkpoint=True)
    for name, tensor in weights(whole).items():
        assert torch.equal(weights(other)[name], tensor), name


@every_layout
def test_a_model_that_a_trainer_saved_is_the_model(layers: str, tmp_path: Path) -> None:
    model = fresh(layers)
    trainer = trainer_of(model, tmp_path)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert type(again) is type(model)
    for name, tensor in weights(again).items():
        assert torch.equal(model.state_dict()[name], tensor), name


# --- TRL


def conversations() -> datasets.Dataset:
    texts = [
        ("Name a number. ", "Seven"),
        ("Say it twice: ", "no no"),
        ("And a longer one? ", "Of course, it is."),
    ]
    return datasets.Dataset.from_list([{"prompt": prompt, "completion": answer} for prompt, answer in texts])


def supervised(model: Any, out: Path, **changes: Any) -> trl.SFTTrainer:
    values = {"max_steps": 1, "per_device_train_batch_size": 3, "max_length": 128, "bf16": False}
    args = trl.SFTConfig(output_dir=str(out), **QUIET | values | changes)
    options = {"model": model, "args": args, "train_dataset": conversations(), "processing_class": tiny_tokenizer()}
    adapter = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])
    return trl.SFTTrainer(**options, peft_config=adapter)


@pytest.mark.parametrize(
    "options", [{}, {"packing": True}, {"padding_free": True, "max_length": None}], ids=["padded", "packed", "flat"]
)
@every_layout
def test_trl_learns_the_completions_of_the_documents_alone(
    layers: str, options: dict[str, Any], tmp_path: Path
) -> None:
    tokenizer, rows = tiny_tokenizer(), []
    for row in conversations():
        prompt = tokenizer(row["prompt"])["input_ids"]
        answer = [*tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id]
        rows.append({"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer})
    expected = loss_alone(fresh(layers), rows).item()
    model = fresh(layers)
    before = weights(model)
    trainer = supervised(model, tmp_path, **options)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected, rel=1e-3)
    adapters = [p for name, p in trainer.model.named_parameters() if "lora_B" in name]
    assert len(adapters) == 6
    assert all(p.any() for p in adapters)
    for name, tensor in trainer.model.get_base_model().state_dict().items():
        if ".lora_" not in name:
            assert torch.equal(before[name.replace(".base_layer", "")], tensor), name


# --- peft


@every_layout
def test_an_adapter_that_peft_saved_merges_into_the_model_it_was_trained_on(layers: str, tmp_path: Path) -> None:
    adapter = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "o_proj"], modules_to_save=["mixer"])
    model, batch = get_peft_model(fresh(layers), adapter), DataCollatorWithFlattening()(documents())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(2):  # the first step moves B alone
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    model.eval().save_pretrained(tmp_path)
    with torch.no_grad():
        trained = model(**batch).logits
        again = PeftModel.from_pretrained(fresh(layers), tmp_path)
        assert torch.equal(again(**batch).logits, trained)
        merged = again.merge_and_unload()
        assert not any("lora" in name for name in merged.state_dict())
        torch.testing.assert_close(merged(**batch).logits, trained, atol=1e-4, rtol=1e-4)
        assert (fresh(layers)(**batch).logits - trained).abs().max() > 0.1


# --- accelerate


@every_layout
def test_a_loop_by_accelerate_learns_flattened_documents(layers: str) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    model = fresh(layers).train()
    first = loss_alone(model, documents()).item()
    loader = torch.utils.data.DataLoader(documents(), batch_size=4, collate_fn=DataCollatorWithFlattening())
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loader)
    losses = []
    for _ in range(3):
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[0] == pytest.approx(first, rel=1e-4)
    assert losses[-1] < losses[0]
