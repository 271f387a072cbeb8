"""The folder of a run: its paths, and the removal of a step's results.

What a stage or a measure keeps until it is finished, it removes itself."""

from __future__ import annotations

import shutil
from pathlib import Path

from liger_convert.utils.errors import BadInput

STEPS = "steps"


class RunFolder:
    """The folder `out` of a run. Paths in it come from `path`; `remove` and `discard` delete the results of steps."""

    def __init__(self, out: Path):
        self.out = Path(out)

    def path(self, *names: str) -> Path:
        """The path `out`/NAME/NAME/…. Raises BadInput for a name that is not a single file or folder name, and if a
        link on the path leads out of the run's folder."""
        for name in names:
            if name in ("", ".", "..") or "/" in name or "\0" in name:
                raise BadInput(f"{self.out}: {name!r} is not the name of a file or folder in a run")
        path = self.out.joinpath(*names)
        self._require_inside(path)
        return path

    def step(self, name: str) -> Path:
        """The folder of the step called `name`."""
        return self.path(STEPS, name)

    def remove(self, *paths: Path) -> None:
        """Removes files and folders of this run. Of a link, only the link is removed; missing paths are ignored.

        Raises BadInput, before anything is removed, if one of them lies outside the run's folder.
        """
        for path in paths:
            self._require_inside(path)
        for path in paths:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def discard(self) -> None:
        """Removes the whole folder, for a run that this process has started. Raises BadInput if it is a link."""
        if self.out.is_symlink():
            raise BadInput(f"{self.out}: has become a link; remove it by hand")
        shutil.rmtree(self.out)

    def _require_inside(self, path: Path) -> None:
        out = self.out.resolve()
        real = path.parent.resolve() / path.name
        if real == out or not real.is_relative_to(out):
            raise BadInput(f"{path}: leads to {real}, which is not in the run's folder {self.out}")
        if path.is_dir() and not path.resolve().is_relative_to(out):
            raise BadInput(f"{path}: is a link out of the run's folder {self.out}; a run keeps its files inside")
