"""The folder of a run: every path in it, and all that is ever removed from it."""

from __future__ import annotations

import shutil
from pathlib import Path

from liger_convert.utils.errors import BadInput

STEPS = "steps"


class RunFolder:
    """The folder `out` of a run. Every path in it comes from `path`, and only `remove` and `discard` delete."""

    def __init__(self, out: Path):
        self.out = Path(out)

    def path(self, *names: str) -> Path:
        """`out`/NAME/NAME/…. Raises BadInput for a name that is not the name of one file or folder, and where a link
        on the way leads out of the run."""
        for name in names:
            if name in ("", ".", "..") or "/" in name or "\0" in name:
                raise BadInput(f"{self.out}: {name!r} is not the name of a file or folder in a run")
        path = self.out.joinpath(*names)
        self._require_inside(path)
        return path

    def step(self, name: str) -> Path:
        """The folder that the step called `name` works in."""
        return self.path(STEPS, name)

    def remove(self, *paths: Path) -> None:
        """Removes files and folders of this run; of a link, the link. What is not there is fine. Raises BadInput,
        before anything is removed, when one of them lies outside of the run."""
        for path in paths:
            self._require_inside(path)
        for path in paths:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def discard(self) -> None:
        """Removes the whole run, which this process has begun."""
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
