"""Commands that die of SIGKILL at a chosen moment, each in a process of its own."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

SECONDS = 120  # that a command may take
# one server process imports torch and what a run needs once; each command begins as a copy of it
_processes = get_context("forkserver")
_processes.set_forkserver_preload(["liger_convert.pipeline.steps", "liger_convert.pipeline.single_steps"])


def exit_code_of(folder: Path, where: str, what: str, words: list[str]) -> int | None:
    """Runs a command in `folder`, and returns its exit code, -9 where it died of SIGKILL: for `LABEL DONE` when the
    work with that label reports so much done, for `record NAME` when that step is complete but not yet recorded."""
    process = _processes.Process(target=_run, args=(folder, where, what, words))
    process.start()
    process.join(SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
        raise TimeoutError(f"{words} took more than {SECONDS} seconds")
    return process.exitcode


def _run(folder: Path, where: str, what: str, words: list[str]) -> None:
    from liger_convert.cli.main import main
    from liger_convert.pipeline import layer_selection, manifest, single_steps, steps

    os.chdir(folder)
    layer_selection.CALIBRATION_TOKENS = 1024
    real_progress, real_write = steps.show_progress, manifest.Manifest.write

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    @contextmanager
    def progress(label: str) -> Iterator[Callable[..., None]]:
        with real_progress(label) as report:

            def watched(done: float, total: float | None, note: str = "") -> None:
                if label == where and done >= float(what):
                    die()
                report(done, total, note)

            yield watched

    def write(self: Any, folder: Path) -> None:
        if where == "record" and what in self.steps:
            die()
        real_write(self, folder)

    single_steps.show_progress = steps.show_progress = progress  # type: ignore[assignment]
    manifest.Manifest.write = write  # type: ignore[method-assign]
    sys.exit(main(words))
