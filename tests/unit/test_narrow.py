"""Parts of a suite that are longer than the base's context, or have no data, are left out with a note."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_tokenizer
from tokenizers.processors import TemplateProcessing

from liger_convert.eval.narrow import narrow
from liger_convert.eval.suites import Suite

SUITE: dict[str, Any] = {
    "name": "test",
    "description": "a test",
    "text": [{"window": 1024}, {"source": "other"}],
    "positions": [{"window": 4096}, {"source": "other", "window": 512}],
    "copying": [{"lengths": [64, 500, 2000]}, {"length": 4000}],
    "agreement": {},
    "tasks": [
        {"name": "niah_s1_1024", "metrics": ["contains"]},
        {"name": "piqa", "metrics": ["acc"], "needs_data": True},
    ],
}


def needles(folder: Path, *sizes: int) -> Path:
    rows = [{"input": "x" * size, "answers": ["1"]} for size in sizes]
    (folder / "niah_s1_1024.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def narrowed(
    data_dir: Path | None = None, context: int = 10**9, other: bool = True, base: bool = True, **fields: Any
) -> tuple[Suite, list[str]]:
    suite = Suite.model_validate(SUITE | fields)
    options: dict[str, Any] = {"context": context, "tokenizer": tiny_tokenizer(), "data_dir": data_dir}
    found, notes = narrow(suite, has_other=other, has_base=base, **options)
    assert narrow(found, has_other=other, has_base=base, **options)[0] == found
    return found, notes


def metrics(suite: Suite) -> set[str]:
    measures = [*suite.of_text, *suite.copying, *([suite.agreement] if suite.agreement else [])]
    return {metric for measure in measures for metric in measure.metrics} | {task.name for task in suite.tasks}


def test_what_fits_stays_as_it_is(tmp_path: Path) -> None:
    found, notes = narrowed(needles(tmp_path, 900, 1000))
    assert found == Suite.model_validate(SUITE)
    assert notes == []


def test_a_tokenizer_without_ends_of_texts_is_asked_no_tasks(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = tokenizer.eos_token = None
    options: dict[str, Any] = {"context": 10**9, "data_dir": needles(tmp_path, 9), "has_other": True, "has_base": True}
    found, notes = narrow(Suite.model_validate(SUITE), tokenizer=tokenizer, **options)
    assert found.tasks == []
    assert found.copying == Suite.model_validate(SUITE).copying
    (note,) = notes
    assert note.startswith("niah_s1_1024, piqa: left out because the tokenizer has neither")


def test_a_curve_ends_with_the_context_and_a_single_length_does_not() -> None:
    found, notes = narrowed(context=1000, text=[], positions=[], agreement=None, tasks=[])
    assert metrics(found) >= {"copy_nll_64", "copy_nll_500", "copy_nll_4000"}
    why = "repeated once, they are longer than the 1000 tokens that the base supports"
    assert notes == [f"copy_nll_2000: left out because {why}"]
    assert "copy_nll_500" not in metrics(narrowed(context=999, tasks=[])[0])


def test_text_is_read_in_windows_that_the_base_takes() -> None:
    """Beyond its context, a base is bad, and a window alone is better. The verdict would only show that."""
    far = {"name": "text_far", "window": 1024, "score_from": 512}  # asks for what is far on purpose: a run warns
    found, notes = narrowed(context=256, text=[*SUITE["text"], far], positions=[], copying=[], agreement=None, tasks=[])
    assert [measure.window for measure in found.text] == [256, 256, 1024]
    assert notes == [
        "text_ppl, text_byte_ppl: measured in windows of 256 tokens, the most that the base supports",
        "other_ppl, other_byte_ppl: measured in windows of 256 tokens, the most that the base supports",
    ]


def test_the_token_that_begins_a_text_takes_room_too() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    suite = Suite.model_validate(SUITE | {"positions": [], "tasks": []})
    options: dict[str, Any] = {"tokenizer": tokenizer, "data_dir": None, "has_other": True, "has_base": True}
    short, long = (narrow(suite, context=context, **options)[0] for context in (1000, 1001))
    assert [measure.lengths for measure in short.copying] == [[64], []]
    assert [measure.lengths for measure in long.copying] == [[64, 500], []]
    assert narrow(suite, context=576, **options)[0].agreement is None
    assert narrow(suite, context=577, **options)[0].agreement is not None


def test_positions_end_with_the_context() -> None:
    found, notes = narrowed(context=1500, copying=[], tasks=[], text=[])
    assert [measure.ends for measure in found.positions] == [[256, 512, 1024], [256, 512]]
    assert [measure.windows for measure in found.positions] == [2 * 16, 16]  # as many tokens as before
    assert notes == ["text_nll_at_2048, text_nll_at_4096: left out because the base supports only 1500 tokens"]
    assert narrowed(context=255, tasks=[])[0].positions == []


@pytest.mark.parametrize(("size", "stays"), [(952, True), (953, False)])
def test_a_needle_that_the_base_cannot_read_to_its_end_is_not_scored(tmp_path: Path, size: int, stays: bool) -> None:
    """Every character is a token, and the answer may take 48."""
    rows = needles(tmp_path, 10, size)
    found, notes = narrowed(rows, context=1000, text=[], positions=[], copying=[], agreement=None)
    assert ("niah_s1_1024" in metrics(found)) is stays
    why = (
        "niah_s1_1024: left out because with their answers they are longer than the 1000 tokens that the base supports"
    )
    assert notes == [why] * (not stays)


def test_without_text_of_another_kind_prompts_are_held_out_text() -> None:
    found, notes = narrowed(other=False, tasks=[])
    assert [measure.source for measure in found.of_text] == ["held_out"] * 2
    assert found.agreement is not None
    assert found.agreement.source == "held_out"
    gone, prompts = notes
    assert gone.startswith(
        "other_ppl, other_byte_ppl, other_nll_at_256, other_nll_at_512: left out because there is no text"
    )
    assert prompts.startswith("agreement: measured after held-out text because there is no text of another kind")


def test_without_a_base_or_room_there_is_no_agreement() -> None:
    assert narrowed(base=False)[0].agreement is None
    found, notes = narrowed(context=575, text=[], positions=[], copying=[], tasks=[])
    assert found.agreement is None
    why = "its texts of 576 tokens are longer than the 575 that the base supports"
    assert notes == [f"agreement: left out because {why}"]
    assert narrowed(context=576)[0].agreement is not None


def test_tasks_that_need_local_rows_are_named_without_them() -> None:
    found, notes = narrowed(None)
    assert [task.name for task in found.tasks] == ["niah_s1_1024"]
    why = "there is no folder of task rows; name one with --data, or with eval.data in a recipe"
    assert notes == [f"piqa: left out because {why}"]
