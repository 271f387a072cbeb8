"""Documents in one row by any collator are read as each by itself, and a mask that says otherwise is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from clients import documents, fresh, loss_alone
from transformers import DataCollatorWithFlattening

COLLATORS: dict[str, dict[str, Any]] = {
    "position_ids": {},
    "position_ids from 2": {"position_ids_start": 2},
    "cu_seq_lens": {"return_flash_attn_kwargs": True, "return_position_ids": False},
    "seq_idx": {"return_seq_idx": True, "return_position_ids": False},
    "all of them": {"return_flash_attn_kwargs": True, "return_seq_idx": True},
}


@pytest.mark.parametrize("collator", COLLATORS)
@pytest.mark.parametrize("layers", ["linear", "hybrid"])
def test_a_flattened_batch_has_the_loss_and_gradients_of_its_documents(layers: str, collator: str) -> None:
    model, rows = fresh(layers).train(), documents()
    alone = loss_alone(model, rows)
    alone.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    packed = model(**DataCollatorWithFlattening(**COLLATORS[collator])(rows)).loss
    packed.backward()
    torch.testing.assert_close(packed, alone)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-5, rtol=1e-4, msg=name)


def test_a_flattened_batch_of_one_document_can_be_cached() -> None:
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(documents(1))
    out = fresh()(**batch)
    assert out.past_key_values.get_seq_length() == batch["input_ids"].shape[1]


def test_packed_documents_make_no_cache_and_refuse_one() -> None:
    batch, model = DataCollatorWithFlattening()(documents()), fresh()
    assert model(**batch).past_key_values is None
    with pytest.raises(ValueError, match="packed documents cannot be cached: pass use_cache=False"):
        model(**batch, use_cache=True)


IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])
RESTARTS = torch.tensor([[0, 1, 2, 0, 1, 2]])
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "documents numbered": (
        {"attention_mask": torch.tensor([[1, 1, 1, 2, 2, 2]])},
        "attention_mask holds values other than 0 and 1",
    ),
    "added to logits": (
        {"attention_mask": torch.tensor([[0.0, 0, 0, 0, float("-inf"), float("-inf")]])},
        "attention_mask holds values other than 0 and 1",
    ),
    "ones over packed documents": (
        {"attention_mask": torch.ones_like(IDS), "position_ids": RESTARTS},
        "attention_mask and position_ids that restart contradict each other",
    ),
    "padding behind packed documents": (
        {"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0]]), "position_ids": RESTARTS},
        "attention_mask and position_ids that restart contradict each other",
    ),
    "pairs of tokens": (
        {"attention_mask": torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()},
        "takes a 2-D padding mask",
    ),
    "by kind of layer": ({"attention_mask": {"full_attention": None}}, "takes a 2-D padding mask"),
    "other documents than position_ids": (
        {"position_ids": RESTARTS, "seq_idx": torch.tensor([[0, 0, 0, 0, 1, 1]])},
        "seq_idx and position_ids name different documents",
    ),
    "positions that do not restart": (
        {"position_ids": torch.arange(6)[None], "cu_seq_lens_q": torch.tensor([0, 3, 6])},
        "cu_seq_lens_q and position_ids name different documents",
    ),
    "documents of another batch": (
        {"cu_seq_lens_q": torch.tensor([0, 3, 7])},
        "cu_seq_lens_q ends at token 7, but the batch has 6",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("layers", ["linear", "hybrid"])
def test_what_would_be_misread_is_refused(layers: str, case: str) -> None:
    inputs, sentence = REFUSED[case]
    with pytest.raises(ValueError, match=re.escape(sentence)):
        fresh(layers)(IDS, **inputs)


def test_a_token_cannot_be_masked_after_it_was_read() -> None:
    model = fresh()
    cache = model(IDS, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="cannot mask a token later"):
        model(IDS[:, :1], attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1, 1]]), past_key_values=cache)


@pytest.mark.parametrize(
    "inputs",
    [
        {"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1]]), "position_ids": torch.tensor([[1, 1, 0, 1, 2, 3]])},
        {"attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0]]), "position_ids": torch.tensor([[0, 1, 2, 3, 1, 1]])},
        {"attention_mask": torch.tensor([[1.0, 1, 1, 1, 0, 0]])},
        {"attention_mask": torch.ones_like(IDS), "position_ids": torch.tensor([[0, 1, 2, 40, 41, 42]])},
    ],
    ids=["padded left", "padded right", "of floats", "positions that skip"],
)
def test_masks_of_padding_are_taken(inputs: dict[str, Any]) -> None:
    assert fresh()(IDS, **inputs).logits.isfinite().all()
