"""A stage's checkpoints on disk. Each one is complete and hashed, or does not exist. The newest two are kept."""

from __future__ import annotations

import shutil
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from liger_convert.io import checksums
from liger_convert.io.files import fsync, fsync_tree
from liger_convert.training.disk_estimate import KEPT
from liger_convert.utils.errors import BadInput
from liger_convert.utils.progress import console

UNFINISHED = "unfinished"  # where a checkpoint is written


def finish(folder: Path) -> None:
    """Hashes the checkpoint in `folder`/unfinished, then moves it to `folder`.

    Removes checkpoints beyond the newest KEPT. Also removes those of the same or a later step: they must be damaged,
    or training would have resumed from them.
    """
    (written,) = (folder / UNFINISHED).iterdir()
    checksums.write_sums(written)
    fsync_tree(written)
    for damaged in newest_first(folder):
        if step_of(damaged) >= step_of(written):
            shutil.rmtree(damaged)
    written.rename(folder / written.name)
    fsync(folder)
    (folder / UNFINISHED).rmdir()
    for old in newest_first(folder)[KEPT:]:
        shutil.rmtree(old)


def clear_unfinished(folder: Path) -> None:
    """Removes a checkpoint that a killed process did not finish writing."""
    shutil.rmtree(folder / UNFINISHED, ignore_errors=True)


def newest_first(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, by step, newest first."""
    return sorted(folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"), key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """The number of optimizer steps done at a checkpoint."""
    return int(checkpoint.name.rpartition("-")[2])


def last_good(folder: Path) -> Path | None:
    """The newest checkpoint in `folder` whose hashes match, or None. Warns about newer, damaged ones."""
    for path in newest_first(folder):
        try:
            problems = checksums.problems(path, checksums.read_sums(path))
        except BadInput as error:
            problems = [str(error)]
        if not problems:
            return path
        console.print(
            f"warning: {problems[0]}; training continues from before this checkpoint", markup=False, soft_wrap=True
        )
    return None
