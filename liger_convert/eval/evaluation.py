"""Runs all measures and tasks of a suite on one model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from liger_convert.data.documents import Document
from liger_convert.eval.agreement import Continuation, agreement, write_rows
from liger_convert.eval.measures import Measurement, copy_loss, position_losses, text_perplexity
from liger_convert.eval.narrow import context_of, narrow
from liger_convert.eval.suites import Suite, check_files
from liger_convert.io.checksums import read_checked, write_checked
from liger_convert.utils.device import compute_dtype
from liger_convert.utils.errors import BadInput
from liger_convert.utils.progress import Report, part_of


def evaluate_model(
    model: Any,
    tokenizer: Any,
    suite: Suite,
    *,
    held_out: Sequence[Document] | None = None,
    other: Sequence[Document] | None = None,
    base_rows: Sequence[Continuation] | None = None,
    data_dir: Path | None = None,
    limit: int | None = None,
    batch_size: int = 4,
    precision: str = "auto",
    keep: Path | None = None,
    is_wanted: Callable[[str], bool] = lambda part: True,
    report: Report = lambda done, total, note="": None,
) -> dict[str, Measurement]:
    """Evaluates any causal language model, on its current device. Returns {METRIC: {"value", "stderr", "n"}}.

    held_out: documents for the measures of text and of copying, tokenized by `tokenizer`. other: documents of another
    kind. base_rows: the base's continuations, see `let_base_write`. data_dir: a folder of local files for the tasks,
    which otherwise load their data from the hub. Measures that lack their data, or are longer than the model's context,
    are left out; `narrow.narrow` lists them.

    limit: the number of documents per task, instead of the suite's own limits; our own measures are not limited.
    batch_size: rows per forward pass. precision: of matmuls, see `compute_dtype`; the weights are not changed. keep: a
    folder to which each measure or task saves its result, and from which the next attempt continues. is_wanted: called
    with each of `parts_of` just before it would be measured; those that are not wanted are left out. report: called
    with the number of measures and tasks that are done, of all of them.

    Raises BadInput if data that the suite needs is missing.
    """
    context = context_of(model.config)
    given = {"has_other": other is not None, "has_base": base_rows is not None}
    suite, _ = narrow(suite, context=context, tokenizer=tokenizer, data_dir=data_dir, **given)
    if suite.needs_text and held_out is None:
        raise BadInput(f"suite {suite.name}: needs held-out text, but none is given")
    check_files(suite, data_dir)
    dtype = compute_dtype(model.device, precision)
    model.eval()
    documents = {"held_out": held_out or [], "other": other or []}
    found: dict[str, dict[str, Measurement]] = {}
    parts = parts_of(suite)

    def progress(done: float, total: float | None, note: str = "") -> None:
        part_of(report, len(found), len(parts))(done, total, note)

    options: dict[str, Any] = {"batch_size": batch_size, "dtype": dtype, "report": progress}
    for part in parts:
        if keep is not None and (measured := read_checked(part_file(keep, part))) is not None:
            found[part] = measured

    def is_due(part: str) -> bool:
        return part not in found and is_wanted(part)

    def done(part: str, measured: dict[str, Measurement]) -> None:
        found[part] = measured
        if keep is not None:
            keep.mkdir(exist_ok=True)
            write_checked(part_file(keep, part), measured)

    for text in suite.text:
        if is_due(text.metrics[0]):
            done(text.metrics[0], text_perplexity(model, tokenizer, documents[text.source], text, **options))
    for positions in suite.positions:
        if is_due(positions.metrics[0]):
            losses = position_losses(model, tokenizer, documents[positions.source], positions, **options)
            done(positions.metrics[0], losses)
    for copying in [one for measure in suite.copying for one in measure.each]:
        if is_due(copying.metrics[0]):
            done(copying.metrics[0], copy_loss(model, tokenizer, documents["held_out"], copying, **options))
    if suite.agreement is not None and base_rows is not None and is_due(suite.agreement.metrics[0]):
        done(suite.agreement.metrics[0], agreement(model, base_rows, dtype=dtype, report=progress))
    if tasks := [part for task in suite.tasks for part in task.each if part.id not in found]:
        from liger_convert.eval.harness import run_tasks  # lm-eval takes seconds to import

        options |= {"data_dir": data_dir, "limit": limit, "is_wanted": is_wanted}
        for task_id, measured in run_tasks(model, tokenizer, tasks, **options):
            done(task_id, measured)
    return {metric: found[part][metric] for part in parts if part in found for metric in found[part]}


def parts_of(suite: Suite) -> list[str]:
    """The names of the parts in which `evaluate_model` measures a narrowed suite: the first metric of our own measures,
    and the id of tasks."""
    own = [measure.metrics[0] for measure in (*suite.text, *suite.positions)]
    own += [one.metrics[0] for measure in suite.copying for one in measure.each]
    own += [] if suite.agreement is None else suite.agreement.metrics[:1]
    return own + [part.id for task in suite.tasks for part in task.each]


def part_file(keep: Path, part: str) -> Path:
    """The file in the folder `keep` for the result of a part."""
    return keep / f"{quote(part, safe='')}.json"


def let_base_write(
    model: Any,
    tokenizer: Any,
    suite: Suite,
    *,
    held_out: Sequence[Document] | None = None,
    other: Sequence[Document] | None = None,
    batch_size: int = 4,
    precision: str = "auto",
    report: Report = lambda done, total, note="": None,
) -> list[Continuation] | None:
    """The continuations that the base `model` writes for the suite's agreement measure; None if it has none.

    They are the `base_rows` of `evaluate_model` for all models that are compared with this base. The arguments are
    those of `evaluate_model`. Raises BadInput if the documents for the prompts are too short.
    """
    context, has_other = context_of(model.config), other is not None
    suite, _ = narrow(suite, context=context, tokenizer=tokenizer, data_dir=None, has_other=has_other, has_base=True)
    if (measure := suite.agreement) is None:
        return None
    documents = other if measure.source == "other" else held_out
    options: dict[str, Any] = {"batch_size": batch_size, "dtype": compute_dtype(model.device, precision)}
    return write_rows(model.eval(), tokenizer, documents or [], measure, context=context, report=report, **options)
