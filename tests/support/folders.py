"""Folders that several tests share. They are removed when the process ends."""

from __future__ import annotations

import tempfile
from pathlib import Path

_made: list[tempfile.TemporaryDirectory[str]] = []


def shared_folder(name: str) -> Path:
    """A new empty folder whose name begins with `name`."""
    _made.append(tempfile.TemporaryDirectory(prefix=f"{name}-"))
    return Path(_made[-1].name)


def remove_shared_folders() -> None:
    while _made:
        _made.pop().cleanup()
