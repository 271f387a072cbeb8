"""What the tests of hostile input share: texts that parsers choke on, and the check of how a command ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from worlds import World, files

from liger_convert.cli import main

ROW = '{"text": "a line of text that is long enough"}\n'
DEEP = "[" * 100_000
DIGITS = "9" * 5_000


def hostile(topics: Mapping[str, Sequence[Any]]) -> pytest.MarkDecorator:
    """Parametrizes a test by the cases of all topics, each made by `worlds.case`."""
    return pytest.mark.parametrize(
        ("words", "says", "code"),
        [pytest.param(*entry.values, id=f"{topic}: {entry.id}") for topic, cases in topics.items() for entry in cases],
    )


def check_refusal(
    world: World, words: Callable[[World], list[str]], says: str, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Runs a command. It must end with this exit code and one sentence that contains `says`, and leave no file."""
    arguments = words(world)
    before = files(world.folder)
    capfd.readouterr()
    assert main.main(arguments) == code
    error = capfd.readouterr().err
    complaints = [line for line in error.splitlines() if line.startswith("error: ")]
    assert len(complaints) == 1, error
    assert error.rstrip().endswith(complaints[0])
    assert says in complaints[0]
    assert "Traceback" not in error
    assert "panicked" not in error
    assert files(world.folder) == before
