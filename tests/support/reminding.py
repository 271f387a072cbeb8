"""A task that only a memory can do, and a tiny model trained on it in seconds.

A row counts, n, n + 1, … On its way stands once a token that is no number, the reminder. Behind every number that 16
divides, the reminder comes again. The window is shorter than 16 and the reminder no sink, so at these places only the
memory knows it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from served import make_export
from torch import Tensor

from liger_convert.model.loading import load_linearized

FIRST, NUMBERS, REMINDERS, EVERY, PLACE = 3, 64, range(80, 90), 16, 4


def make_row(start: int, reminder: int, length: int) -> list[int]:
    """A row of so many tokens, which counts from `start`."""
    row, n = [], start
    while len(row) < length:
        row.append(FIRST + n % NUMBERS)
        if len(row) == PLACE or (n % EVERY == 0 and len(row) > PLACE):
            row.append(reminder)
        n += 1
    return row[:length]


def reminders_due(row: list[int]) -> list[int]:
    """Where the reminder stands by the memory's doing."""
    return [i for i, token in enumerate(row) if token in REMINDERS and i > PLACE + EVERY]


def random_rows(count: int, length: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, NUMBERS, (count,), generator=generator).tolist()
    kinds = torch.randint(REMINDERS.start, REMINDERS.stop, (count,), generator=generator).tolist()
    return torch.tensor([make_row(start, kind, length) for start, kind in zip(starts, kinds)])


def train(folder: Path, layers: list[str], steps: int = 500, **spec: Any) -> tuple[Path, float]:
    """A trained export, and the share of the reminders that it gets right on rows that it has not seen."""
    export = make_export(folder, "llama", layers, {"initializer_range": 0.05, "hidden_size": 64}, **spec)
    model = load_linearized(export, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    for step in range(steps):
        rows = random_rows(12, 96, seed=step)
        logits = model(rows, use_cache=False).logits[:, :-1]
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none")
        weights = torch.where(rows[:, 1:] >= REMINDERS.start, 8.0, 1.0)  # few tokens, and what it is all about
        (losses * weights).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(export)
    with torch.no_grad():
        rows = random_rows(32, 120, seed=-1)
        guesses = model(rows, use_cache=False).logits.argmax(-1)
    due = [(r, i) for r, row in enumerate(rows.tolist()) for i in reminders_due(row)]
    return export, sum(int(guesses[r, i - 1] == rows[r, i]) for r, i in due) / len(due)
