"""A trained model whose memory does what nothing else can goes on doing it in vLLM, and not without its state."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import reminding
import torch
from served import Answer, Reference, answers, assert_same, engine, run, sampling

from liger_convert.serving.rows import Rows

NEW = 40
ROWS = [reminding.make_row(7 * i, reminding.REMINDERS[i], 200) for i in range(10)]
TEXTS = [row[:length] for row, length in zip(ROWS, (24, 25, 30, 37, 48, 60, 75, 98, 127, 150))]


class Trained(NamedTuple):
    export: Path
    wanted: list[Answer]
    tolerance: list[float]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    export, share = reminding.train(tmp_path_factory.mktemp("trained"), ["main", "main"], type="gla")
    assert share > 0.9
    reference = Reference(export)
    return Trained(export, [reference.generate(t, NEW) for t in TEXTS], [reference.tolerance(t) for t in TEXTS])


def reminded(outputs: list[Any]) -> float:
    """The share of the reminders among the answers that are right."""
    right = total = 0
    for row, text, output in zip(ROWS, TEXTS, outputs):
        written = answers(output)[0].tokens
        due = [i - len(text) for i in reminding.reminders_due(row) if len(text) <= i < len(text) + NEW]
        right, total = right + sum(written[i] == row[len(text) + i] for i in due), total + len(due)
    return right / total


def test_it_reminds_as_generate_does(trained: Trained) -> None:
    with engine(trained.export) as llm:
        outputs = run(llm, TEXTS, sampling(NEW), every=2)
    for output, wanted, tolerance in zip(outputs, trained.wanted, trained.tolerance):
        assert_same(answers(output)[0], wanted, tolerance)
    assert reminded(outputs) > 0.9


def test_without_its_state_it_does_not(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Rows.load

    def forgetful(self: Rows, *args: Any) -> Any:
        past = load(self, *args)
        past.states = {name: torch.zeros_like(state) for name, state in past.states.items()}
        return past

    monkeypatch.setattr(Rows, "load", forgetful)
    with engine(trained.export) as llm:
        outputs = run(llm, TEXTS, sampling(NEW), every=2)
    assert reminded(outputs) < 0.5
