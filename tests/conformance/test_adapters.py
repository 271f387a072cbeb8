"""peft on a linearized model: adapters of its projections work, those that need keys of past tokens are refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from clients import LAYERS, documents, folder, fresh, loss_alone
from torch import Tensor
from transformers import AutoModelForSequenceClassification, DataCollatorWithFlattening

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ADAPTERS: dict[str, Any] = {
    "lora": peft.LoraConfig(r=4, target_modules=ATTENTION),
    "rslora": peft.LoraConfig(r=4, target_modules=ATTENTION, use_rslora=True),
    "dora": peft.LoraConfig(r=4, target_modules=ATTENTION, use_dora=True),
    "all-linear": peft.LoraConfig(r=4, target_modules="all-linear"),
    "ia3": peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "adalora": peft.AdaLoraConfig(init_r=4, target_r=2, total_step=10, target_modules=ATTENTION),
    "loha": peft.LoHaConfig(r=4, target_modules=ATTENTION),
    "lokr": peft.LoKrConfig(r=4, target_modules=ATTENTION),
    "oft": peft.OFTConfig(oft_block_size=4, target_modules=ATTENTION),
    "vera": peft.VeraConfig(r=4, target_modules=["q_proj"]),
    "norms": peft.LNTuningConfig(target_modules=["input_layernorm", "norm"]),
    "fourier": peft.FourierFTConfig(n_frequency=16, target_modules=ATTENTION),
}
PROMPTS: dict[str, Any] = {
    "prompt tuning": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
    "p-tuning": peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=5, encoder_hidden_size=16),
}


def adapted(config: Any, model: Any) -> Any:
    torch.manual_seed(0)
    config = copy.deepcopy(config)  # peft writes into it
    config.task_type = config.task_type or "CAUSAL_LM"
    return peft.get_peft_model(model, config)


def train(model: Any, steps: int = 2, **batch: Tensor) -> set[str]:
    """A few steps; the names of the trained parameters that some step gave a gradient."""
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    moved = set()
    for _ in range(steps):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
        moved |= {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    model.eval()
    return moved


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize("layers", LAYERS)
def test_an_adapter_trains_saves_loads_and_merges(layers: str, name: str, tmp_path: Path) -> None:
    batch = dict(DataCollatorWithFlattening()(documents()))
    plain = loss_alone(fresh(layers), documents())
    model = adapted(ADAPTERS[name], fresh(layers))
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert train(model, steps=3, **batch) == trained
    with torch.no_grad():
        assert loss_alone(model, documents()) < plain
        batch.pop("labels")
        after = model(**batch).logits
        model.save_pretrained(tmp_path)
        again = peft.PeftModel.from_pretrained(fresh(layers), tmp_path)
        torch.testing.assert_close(again(**batch).logits, after)
        merged = again.merge_and_unload()
        assert merged.state_dict().keys() == fresh(layers).state_dict().keys()
        torch.testing.assert_close(merged(**batch).logits, after, atol=1e-3, rtol=1e-3)


def test_the_linear_maps_of_a_mixer_can_be_adapted() -> None:
    batch = dict(DataCollatorWithFlattening()(documents()))
    config = peft.LoraConfig(r=4, target_modules=["gate_proj"])
    model = adapted(config, fresh("linear", type="liger-paper", gate="random"))
    assert any(".mixer.gate_proj.lora_B" in name for name in train(model, **batch))


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("layers", LAYERS)
def test_virtual_tokens_are_read_like_tokens(layers: str, name: str, tmp_path: Path) -> None:
    rows = documents(3)
    width = max(len(row["input_ids"]) for row in rows)
    pads = [width - len(row["input_ids"]) for row in rows]
    batch = {
        "input_ids": torch.tensor([[0] * n + row["input_ids"] for n, row in zip(pads, rows)]),
        "labels": torch.tensor([[-100] * n + row["labels"] for n, row in zip(pads, rows)]),
        "attention_mask": torch.tensor([[0] * n + [1] * (width - n) for n in pads]),
    }
    model = adapted(PROMPTS[name], fresh(layers))
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert train(model, **batch) == trained
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(fresh(layers), tmp_path).eval()
    whole, embed = again.get_base_model(), again.get_base_model().get_input_embeddings()
    for row in rows:
        ids = torch.tensor([row["input_ids"]])
        prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        text = again.generate(**prompt, max_new_tokens=9, do_sample=False, eos_token_id=None, pad_token_id=0)
        with torch.no_grad():
            for token in text[0, ids.shape[1] :]:
                embeds = torch.cat((again.get_prompt(1), embed(ids)), 1)
                logits = whole(inputs_embeds=embeds, use_cache=False).logits
                assert logits[0, -1].argmax() == token
                ids = torch.cat((ids, token[None, None]), 1)


@pytest.mark.parametrize("layers", LAYERS)
def test_prefix_tuning_is_refused_in_its_own_words(layers: str) -> None:
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    model, ids = adapted(config, fresh(layers)), torch.tensor([[5, 6, 7]])
    for use in (lambda: model(input_ids=ids, labels=ids), lambda: model.generate(input_ids=ids, max_new_tokens=2)):
        with pytest.raises(ValueError, match="Prefix tuning works by such keys; use LoRA or prompt tuning instead"):
            use()


def test_a_head_is_trained_beside_its_adapter(tmp_path: Path) -> None:
    config = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["q_proj"])
    path = folder("hybrid")
    model = adapted(config, AutoModelForSequenceClassification.from_pretrained(path))
    ids = torch.randint(3, 101, (2, 9), generator=torch.Generator().manual_seed(0))
    moved = train(model, input_ids=ids, labels=torch.tensor([0, 1]))
    assert any("score" in name for name in moved)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(AutoModelForSequenceClassification.from_pretrained(path), tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(again(input_ids=ids).logits, model(input_ids=ids).logits)
