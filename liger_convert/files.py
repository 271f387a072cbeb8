"""Files that appear under their final name complete or not at all, and what their bytes hash to."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from liger_convert.errors import BadInput, LinearizeError
from liger_convert.inputs import JSON_BYTES, parse_json, read_text

_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """A full disk or a folder that is not ours to write becomes one sentence."""
    try:
        yield
    except Exception as error:
        code = error.errno if isinstance(error, OSError) else None
        # the Rust writers of safetensors and tokenizers raise types of their own, with the number in the text
        if code in _FULL or f"(os error {errno.ENOSPC})" in str(error):
            raise LinearizeError(f"{path}: the disk is full; free some space and start again") from error
        if code in _REFUSED:
            raise LinearizeError(f"{path}: cannot be written: {error}") from error
        raise


def fsync(path: Path) -> None:
    """Waits until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


@contextlib.contextmanager
def atomic_dir(out: Path | str, overwrite: bool = False) -> Iterator[Path]:
    """A new folder beside `out` to write into; it becomes `out` when the block ends and disappears when it fails.

    Raises BadInput when `out` exists (unless `overwrite`), LinearizeError when the disk is full or not writable.
    """
    out = Path(out)
    if out.exists() and not overwrite:
        raise BadInput(f"{out}: already exists; name a new folder or remove this one")
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        for stale in out.parent.glob(f".{out.name}.partial-*"):  # left by a process that was killed
            pid = stale.name.rpartition("-")[2]
            if pid.isdigit() and (int(pid) == os.getpid() or not _alive(int(pid))):
                shutil.rmtree(stale)
        partial = out.parent / f".{out.name}.partial-{os.getpid()}"
        partial.mkdir()
        try:
            yield partial
            for path in [*partial.rglob("*"), partial]:
                fsync(path)
            if overwrite and out.exists():
                shutil.rmtree(out)
            partial.rename(out)
            fsync(out.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def atomic_write(path: Path | str, data: bytes | str) -> None:
    """Writes a whole file or leaves what was there. Raises LinearizeError when the disk is full or not writable."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    with disk_errors(path):
        try:
            with open(partial, "wb") as file:
                file.write(data.encode() if isinstance(data, str) else data)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def sha256_file(path: Path | str) -> str:
    """The hex sha256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises BadInput when the file is missing, is not JSON or holds something else."""
    try:
        data = parse_json(read_text(path, JSON_BYTES))
    except ValueError as error:
        raise BadInput(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(data, dict):
        raise BadInput(f"{path}: must hold a JSON object, not a {type(data).__name__}")
    return data
