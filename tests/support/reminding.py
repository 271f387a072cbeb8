"""A task that only a memory can do, and tiny models trained on it in seconds.

A row counts, n, n + 1, … On its way stands once, several times over, a token that is no number: the reminder. After
every number that 12 divides, the reminder comes again. The windows of all layers together reach back fewer tokens than
lie between two reminders, and no sink holds one, so only the memory knows which of ten it is.
"""

from __future__ import annotations

import atexit
import functools
import shutil
from pathlib import Path
from typing import Any

import torch
from folders import shared_folder
from served import SIZES
from tiny import save_tiny_base, tiny_tokenizer
from tiny_models import linearization, moved_off_start
from torch import Tensor
from torch.nn.functional import cross_entropy

from liger_convert.model.loading import linearize_base

FIRST, NUMBERS, REMINDERS, EVERY = 3, 64, range(80, 90), 12
PLACE, COPIES = 4, 8
WINDOW, SINKS, DEPTH = 4, 3, 3
STEPS, AFTER, ROWS, TOKENS, RATE = 100, 25, 12, 96, 4e-3
LAYERS = {"linear": ["main"] * DEPTH, "hybrid": ["main", "softmax", "main"]}

assert DEPTH * (WINDOW - 1) < EVERY
assert SINKS < PLACE


def make_row(start: int, reminder: int, length: int) -> list[int]:
    """A row of so many tokens, which counts from `start`."""
    row: list[int] = []
    for n in range(start, start + length):
        row.append(FIRST + n % NUMBERS)
        if len(row) == PLACE:
            row += [reminder] * COPIES
        elif n % EVERY == 0 and len(row) > PLACE:
            row.append(reminder)
    return row[:length]


def make_prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """The beginnings of rows, of these lengths."""
    return [row[:length] for row, length in zip(random_rows(len(lengths), max(lengths), seed), lengths)]


def reminders_due(row: list[int]) -> list[int]:
    """Where a reminder stands that only the memory knows."""
    return [i for i, token in enumerate(row) if token in REMINDERS and i > PLACE + COPIES + EVERY]


def random_rows(count: int, length: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, NUMBERS, (count,), generator=generator).tolist()
    kinds = torch.randint(REMINDERS.start, REMINDERS.stop, (count,), generator=generator).tolist()
    return [make_row(start, kind, length) for start, kind in zip(starts, kinds)]


@functools.cache
def trained_export(layers: str, mixer: str) -> Path:
    """The folder of a trained model, in float32, which is there until this process ends. The same every time on one
    machine.

    A softmax layer that learns takes the memory's place. So a hybrid begins with the weights of the linear model, and
    its softmax layer's stay as they are.
    """
    folder = shared_folder(f"trained-{layers}-{mixer}")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model = _build(folder / "base", layers, mixer)
    if layers == "linear":
        _train(model, STEPS)
    else:
        linear = torch.load(trained_export("linear", mixer) / "weights.pt")
        assert not model.load_state_dict(linear, strict=False).missing_keys
        model.model.layers[LAYERS[layers].index("softmax")].self_attn.requires_grad_(False)
        _train(model, AFTER)
    torch.save(model.state_dict(), folder / "weights.pt")
    model.eval().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def _build(base: Path, layers: str, mixer: str) -> Any:
    save_tiny_base("llama", base, tokenizer=False, **{**SIZES, "initializer_range": 0.05})
    plan = linearization(LAYERS[layers], type=mixer, window=WINDOW, sinks=SINKS)
    return moved_off_start(linearize_base(base, plan, dtype=torch.float32))


def _train(model: Any, steps: int) -> None:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    for step in range(steps):
        rows = torch.tensor(random_rows(ROWS, TOKENS, seed=step))
        logits = model(rows, use_cache=False).logits[:, :-1]
        losses = cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none")
        weights: Tensor = torch.where(rows[:, 1:] >= REMINDERS.start, 8.0, 1.0)  # few tokens, and what it is all about
        (losses * weights).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
