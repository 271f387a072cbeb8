"""Progress of anything that may take longer than two seconds, on stderr: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from functools import partialmethod
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

SHOW_AFTER = 2.0  # seconds
LINE_EVERY = 15.0  # seconds between lines where there is no terminal

console = Console(stderr=True, highlight=False)


class Report(Protocol):
    """What long work calls now and then: how much is done, of how much (None: unknown), and a word such as the loss."""

    def __call__(self, done: float, total: float | None, note: str = "") -> None: ...


def part_of(report: Report, part: int, parts: int, label: str = "") -> Report:
    """A `Report` for part number `part`, counted from 0, of work in `parts` parts that count alike. label: what stands
    before each note."""

    def report_part(done: float, total: float | None, note: str = "") -> None:
        whole = 1 if total is None else total
        at = 0 if total is None else min(done, total)
        report(part * whole + at, parts * whole, f"{label}: {note}" if label else note)

    return report_part


@contextlib.contextmanager
def show_progress(label: str) -> Iterator[Report]:
    """A `Report` for the work called `label`; shows nothing for work that is over in two seconds."""
    started = last = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    times = (TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
    bar = Progress(*columns, *times, console=console, transient=True)
    task = bar.add_task(label, total=None, note="")

    def report(done: float, total: float | None, note: str = "") -> None:
        nonlocal last
        now = time.monotonic()
        done = done if total is None else min(done, total)
        if console.is_terminal:
            bar.update(task, completed=done, total=total, note=note)
            if now - started >= SHOW_AFTER:
                bar.start()
        elif now - last >= LINE_EVERY:
            last = now
            share = "" if total is None else f"{100 * done / max(total, 1):.0f}% "
            console.print(f"{label}: {share}after {now - started:.0f} s {note}".rstrip())

    try:
        yield report
    finally:
        if bar.live.is_started:  # else rich writes an empty line
            bar.stop()


def quiet_libraries() -> None:
    """Silences the bars, warnings and logs of the libraries below us; call it before they are imported. Only
    transformers, and with it tqdm, may be there already: `python -m liger_convert.cli` imports it along with the
    package."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # nothing here forks
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("LMEVAL_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if "tqdm" in sys.modules:  # it reads its variable only when it is imported
        from tqdm import tqdm

        if not vars(tqdm)["__init__"].keywords.get("disable"):
            tqdm.__init__ = partialmethod(tqdm.__init__, disable=True)
    if "transformers" in sys.modules:
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
    warnings.filterwarnings("ignore")
    for name in ("transformers", "datasets", "accelerate", "peft", "huggingface_hub", "lm_eval", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)
