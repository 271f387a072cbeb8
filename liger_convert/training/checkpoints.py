"""A stage's checkpoints on the disk: each complete and hashed, or not there at all; the newest two are kept."""

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
    """Gives the checkpoint below `folder`/unfinished its hashes and then its place in `folder`. Removes older ones, and
    newer ones, which were damaged or training would have gone on from them."""
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
    """Removes what a killed process had not finished writing."""
    shutil.rmtree(folder / UNFINISHED, ignore_errors=True)


def newest_first(folder: Path) -> list[Path]:
    """The checkpoints in `folder`."""
    return sorted(folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"), key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """The optimizer steps behind a checkpoint."""
    return int(checkpoint.name.rpartition("-")[2])


def last_good(folder: Path) -> Path | None:
    """The newest checkpoint in `folder` whose files are what was written; warns of newer ones."""
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
