"""Checks a run or an export against the hashes that were recorded when its files were written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from liger_convert.io.checksums import SUMS, problems, read_sums
from liger_convert.io.run_folder import STEPS
from liger_convert.pipeline import manifest
from liger_convert.pipeline.manifest import Manifest
from liger_convert.utils.errors import BadInput


@dataclass(frozen=True)
class Verified:
    """How many files were compared, and a sentence for each that is missing or changed."""

    checked: int
    problems: list[str]


def verify_files(folder: Path) -> Verified:
    """Compares the files of a run or an export with their recorded sha256. Steps whose folders a run has already
    removed are left out. Raises BadInput when `folder` is neither a run nor an export."""
    if (folder / manifest.FILE).exists():
        expected = _recorded(folder)
    elif (folder / SUMS).exists():
        expected = read_sums(folder)
    else:
        raise BadInput(f"{folder}: is neither a run (it has no {manifest.FILE}) nor an export (it has no {SUMS})")
    return Verified(len(expected), problems(folder, expected))


def _recorded(run: Path) -> dict[str, str]:
    """sha256 by path of the files that a run's steps wrote and that were not removed. If two steps wrote a file, the
    later one counts."""
    expected: dict[str, str] = {}
    for name, step in Manifest.read(run).steps.items():
        outputs = step["outputs"]
        if (run / STEPS / name).exists() or not all(path.startswith(f"{STEPS}/") for path in outputs):
            expected |= outputs
    return expected
