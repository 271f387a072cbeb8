"""Runs all measures and tasks of a suite on one model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from liger_convert.data.documents import Document
from liger_convert.eval.agreement import Row, agreement, write_rows
from liger_convert.eval.measures import Measurement, copy_loss, position_losses, text_perplexity
from liger_convert.eval.narrow import context_of, narrow
from liger_convert.eval.suites import Suite, check_files
from liger_convert.io.checksums import read_checked, write_checked
from liger_convert.utils.device import compute_dtype
from liger_convert.utils.errors import BadInput
from liger_convert.utils.progress import Report


def evaluate_model(
    model: Any,
    tokenizer: Any,
    suite: Suite,
    *,
    held_out: Sequence[Document] | None = None,
    other: Sequence[Document] | None = None,
    base_rows: Sequence[Row] | None = None,
    data_dir: Path | None = None,
    limit: int | None = None,
    batch_size: int = 4,
    precision: str = "auto",
    keep: Path | None = None,
    report: Report = lambda done, total, note="": None,
) -> dict[str, Measurement]:
    """Evaluates any causal language model, on its current device. Returns {METRIC: {"value", "stderr", "n"}}.

    held_out: documents for the measures of text and of copying, tokenized by `tokenizer`. other: documents of another
    kind. base_rows: the base's continuations, see `let_base_write`. data_dir: a folder of local files for the tasks,
    which otherwise load their data from the hub. Measures that lack their data, or are longer than the model's context,
    are left out; `narrow.narrow` lists them.

    limit: the number of documents per task, instead of the suite's own limits; our own measures are not limited.
    batch_size: rows per forward pass. precision: of matmuls, see `compute_dtype`; the weights are not changed. keep: a
    file to which the results so far are saved after each measure or task, and from which the next attempt continues.
    report: called with the progress of each measure or task.

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
    options: dict[str, Any] = {"batch_size": batch_size, "dtype": dtype, "report": report}
    # results by the first metric of our own measures, and by the id of tasks
    found: dict[str, dict[str, Measurement]] = (read_checked(keep) if keep is not None else None) or {}

    def done(name: str, measured: dict[str, Measurement]) -> None:
        found[name] = measured
        if keep is not None:
            write_checked(keep, found)

    for text in suite.text:
        if text.metrics[0] not in found:
            done(text.metrics[0], text_perplexity(model, tokenizer, documents[text.source], text, **options))
    for positions in suite.positions:
        if positions.metrics[0] not in found:
            losses = position_losses(model, tokenizer, documents[positions.source], positions, **options)
            done(positions.metrics[0], losses)
    for copying in [one for measure in suite.copying for one in measure.each]:
        if copying.metrics[0] not in found:
            done(copying.metrics[0], copy_loss(model, tokenizer, documents["held_out"], copying, **options))
    if suite.agreement is not None and base_rows is not None and suite.agreement.metrics[0] not in found:
        done(suite.agreement.metrics[0], agreement(model, base_rows, dtype=dtype, report=report))
    if tasks := [part for task in suite.tasks for part in task.each if part.id not in found]:
        from liger_convert.eval.harness import run_tasks  # lm-eval takes seconds to import

        for task_id, measured in run_tasks(model, tokenizer, tasks, data_dir=data_dir, limit=limit, **options):
            done(task_id, measured)
    return {metric: measurement for measured in found.values() for metric, measurement in measured.items()}


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
) -> list[Row] | None:
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
