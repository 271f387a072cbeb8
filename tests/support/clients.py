"""Linearized models and masked documents for tests of other people's trainers."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from folders import shared_folder
from tiny import save_tiny_base
from torch import Tensor
from transformers import AutoModelForCausalLM

from liger_convert.mixers import resolve_spec
from liger_convert.model.loading import linearize_base

LAYERS = {"linear": ["main"] * 3, "hybrid": ["main", "softmax", "main"]}
PROMPT = 5  # tokens of each document that are not learned


@functools.cache
def folder(layers: str = "linear", family: str = "llama", **spec: str) -> Path:
    """A tiny linearized checkpoint beside its `base`; tests must not write to it."""
    home = shared_folder("liger-test")
    base = save_tiny_base(family, home / "base")
    mixer = resolve_spec({"window": 6, "sinks": 2} | spec)
    plan = {"format": 2, "mixers": {"main": mixer}, "layers": LAYERS[layers]}
    linearize_base(base, plan).save_pretrained(home / "model")
    return home / "model"


def fresh(layers: str = "linear", family: str = "llama", **spec: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder(layers, family, **spec))


def documents(count: int = 4, seed: int = 0) -> list[dict[str, list[int]]]:
    """Documents of different lengths whose first PROMPT tokens have no label."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(count):
        ids = torch.randint(3, 101, (11 + 4 * i,), generator=generator).tolist()
        rows.append({"input_ids": ids, "labels": [-100] * PROMPT + ids[PROMPT:]})
    return rows


def loss_alone(model: Any, rows: list[dict[str, list[int]]]) -> Tensor:
    """The mean loss of all labeled tokens, each document read by itself and the loss worked out by hand."""
    losses = []
    for row in rows:
        labels = torch.tensor(row["labels"])[1:]
        log_p = F.log_softmax(model(torch.tensor([row["input_ids"]]), use_cache=False).logits[0, :-1].float(), -1)
        losses.append(-log_p[labels != -100].gather(1, labels[labels != -100, None]))
    return torch.cat(losses).mean()
