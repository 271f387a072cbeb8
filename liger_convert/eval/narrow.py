"""Leaves out of a suite what cannot be measured on a model, with a note that says what and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from liger_convert.data.row_files import file_rows
from liger_convert.eval.measures import Measurement
from liger_convert.eval.suites import (
    ANSWER_TOKENS,
    NEEDLES,
    SUFFIXES,
    AgreementMeasure,
    CopyMeasure,
    PositionMeasure,
    Suite,
    Task,
    TextMeasure,
)
from liger_convert.io.tokenizer import text_prefix
from liger_convert.model.bases import context_length

NO_OTHER = "there is no text of another kind; name one with --other-text, or with eval.other_text in a recipe"
NO_DATA = "there is no folder of task rows; name one with --data, or with eval.data in a recipe"
NO_ENDS = "the tokenizer has neither a token that begins a text nor one that ends it"


def context_of(config: Any) -> int:
    """The context length in the config of a model; if it has none, a number that no context reaches."""
    return context_length(config) or 10**9


def narrow(
    suite: Suite, *, context: int, tokenizer: Any, data_dir: Path | None, has_other: bool, has_base: bool
) -> tuple[Suite, list[str]]:
    """The suite without what cannot be measured on a model of `context` tokens, and a note for everything left out.

    Text is read in windows of at most the context, unless a measure sets `score_from` to look further. Left out are:

    - lengths of a recall curve that do not fit twice into the context, positions beyond it, and needles longer than it
    - agreement whose texts are longer than the context, or without a base
    - text of another kind, if there is none
    - tasks that need local rows, without a folder of them
    - all tasks, if the tokenizer has no token that begins or ends a text

    Narrowing a suite again changes nothing.
    """
    notes: list[str] = []
    text, positions = suite.text, suite.positions
    if not has_other:
        text = [measure for measure in text if measure.source != "other"]
        positions = [measure for measure in positions if measure.source != "other"]
        gone = [metric for measure in suite.of_text if measure.source == "other" for metric in measure.metrics]
        notes += _left_out(gone, NO_OTHER)
    text = [_text(measure, context, notes) for measure in text]
    positions = [kept for measure in positions if (kept := _positions(measure, context, notes)).ends]
    begin = len(text_prefix(tokenizer))
    copying = [fits for measure in suite.copying if (fits := _copying(measure, begin, context, notes)) is not None]
    agreement = _agreement(suite.agreement, begin, context, has_other, has_base, notes)
    tasks = suite.tasks_for(data_dir)
    notes += _left_out([task.name for task in suite.tasks if task not in tasks], NO_DATA)
    if tasks and tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        notes += _left_out([task.name for task in tasks], NO_ENDS)
        tasks = []
    long = [part for task in tasks for part in task.each if _is_long(part, context, tokenizer, data_dir)]
    notes += _left_out(
        [f"{part.name}/{part.metrics[0]}" if part.of_ruler else part.name for part in long],
        f"with their answers they are longer than the {context} tokens that the base supports",
    )
    tasks = [shorter for task in tasks if (shorter := _without(task, long)) is not None]
    update = {"text": text, "positions": positions, "copying": copying, "agreement": agreement, "tasks": tasks}
    return suite.model_copy(update=update), notes


def cut_prompts(models: Mapping[str, Mapping[str, Measurement]]) -> list[str]:
    """A note for each task with prompts that were longer than the context. models: the measures of each model."""
    cut = {
        metric.partition("/")[0]: found["cut"]
        for measured in models.values()
        for metric, found in measured.items()
        if found.get("cut")
    }
    what = "prompts that are longer than the base supports were read without their beginnings"
    return [f"{task}: {what} ({count} different ones)" for task, count in cut.items()]


def _left_out(names: Sequence[str], why: str) -> list[str]:
    return [f"{', '.join(names)}: left out because {why}"] if names else []


def _text(measure: TextMeasure, context: int, notes: list[str]) -> TextMeasure:
    if measure.window <= context or measure.score_from > 1:
        return measure
    notes.append(
        f"{', '.join(measure.metrics)}: measured in windows of {context} tokens, the most that the base supports"
    )
    return measure.model_copy(update={"window": context})


def _positions(measure: PositionMeasure, context: int, notes: list[str]) -> PositionMeasure:
    kept = measure.at_most(context)
    gone = measure.metrics[len(kept.ends) :]
    notes += _left_out(gone, f"the base supports only {context} tokens")
    return kept


def _copying(measure: CopyMeasure, begin: int, context: int, notes: list[str]) -> CopyMeasure | None:
    lengths = [length for length in measure.lengths if begin + 2 * length <= context]
    gone = [metric for metric, length in zip(measure.metrics, measure.lengths) if length not in lengths]
    notes += _left_out(gone, f"repeated once, they are longer than the {context} tokens that the base supports")
    return measure.model_copy(update={"lengths": lengths}) if lengths or not measure.lengths else None


def _agreement(
    measure: AgreementMeasure | None, begin: int, context: int, has_other: bool, has_base: bool, notes: list[str]
) -> AgreementMeasure | None:
    if measure is None:
        return None
    tokens = begin + measure.prompt_tokens + measure.tokens
    if not has_base:
        notes += _left_out(["agreement"], "there is no base to agree with; name one with --base or --baseline")
        return None
    if tokens > context:
        notes += _left_out(
            ["agreement"], f"its texts of {tokens} tokens are longer than the {context} that the base supports"
        )
        return None
    if measure.source == "other" and not has_other:
        notes.append(f"agreement: measured after held-out text because {NO_OTHER}")
        return measure.model_copy(update={"source": "held_out"})
    return measure


def _without(task: Task, parts: Sequence[Task]) -> Task | None:
    """`task` with what is measured of it but for `parts`."""
    metrics = [metric for part in task.each if part not in parts for metric in part.metrics]
    return task.model_copy(update={"metrics": metrics}) if metrics else None


def _is_long(task: Task, context: int, tokenizer: Any, data_dir: Path | None) -> bool:
    """Whether a needle is longer than the base's context: it would be cut off before it is asked for."""
    if task.of_ruler:
        return int(task.metrics[0]) > context
    if task.name not in NEEDLES or task.include_path is not None or data_dir is None:
        return False
    files = [path for suffix in SUFFIXES if (path := data_dir / f"{task.name}{suffix}").is_file()]
    room = context - ANSWER_TOKENS
    return any(_longest(path, path.stat().st_mtime_ns, tokenizer, room) > room for path in files[:1])


@lru_cache(maxsize=len(NEEDLES))  # the branches of a model share a tokenizer, and reading 8,192 tokens a row takes time
def _longest(path: Path, _modified: int, tokenizer: Any, room: int) -> int:
    """The tokens of the longest prompt in the file, 0 where all have room: no token is shorter than a byte."""
    rows = [row.value for row in file_rows(path)]
    texts = [row["input"] for row in rows if isinstance(row, dict) and isinstance(row.get("input"), str)]
    texts = [text for text in texts if len(text.encode()) + 1 > room]
    return max((len(ids) for ids in tokenizer(texts, verbose=False)["input_ids"]), default=0) if texts else 0
