"""Everything a suite measures, on one model."""

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
    """{METRIC: {"value", "stderr", "n"}} of any causal language model, on the device where it is.

    held_out: the documents that measures of text and of repetitions read, tokenised by `tokenizer`. other: documents of
    another kind. base_rows: what the model's base wrote, see `agreement.write_rows`. data_dir: a folder of local files
    for the tasks, which otherwise load their data from the hub. What cannot be measured with these, or is longer than
    the model takes, is left out; `narrow.narrow` says what.
    limit: documents of each task, instead of the suite's own limits; our own measures stay whole. precision: of the
    matrix products; the weights stay as they are. keep: a file that holds, after each measure or task, what there is so
    far, and from which the next attempt goes on. `report` is called with what is done of each measure or task.

    Raises BadInput when what the suite reads is not there.
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
    # by the first metric of a measure of ours, or the id of a task
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
    """What the base `model` writes for the suite's measure of agreement; None where there is nothing to write.

    The arguments are those of `evaluate_model`, whose `base_rows` this is for all models that are compared with it.
    Raises BadInput when the text to begin with is too short.
    """
    context, has_other = context_of(model.config), other is not None
    suite, _ = narrow(suite, context=context, tokenizer=tokenizer, data_dir=None, has_other=has_other, has_base=True)
    if (measure := suite.agreement) is None:
        return None
    documents = other if measure.source == "other" else held_out
    options: dict[str, Any] = {"batch_size": batch_size, "dtype": compute_dtype(model.device, precision)}
    return write_rows(model.eval(), tokenizer, documents or [], measure, context=context, report=report, **options)
