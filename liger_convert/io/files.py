"""Writes files and folders atomically: they appear under their final name complete, or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from liger_convert.io.inputs import JSON_BYTES, parse_json, read_text
from liger_convert.utils import interrupts
from liger_convert.utils.errors import BadInput, LinearizeError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_SHORT_WRITE = ("No space left on device", "unexpected pos")  # in what torch.save raises
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EFBIG, errno.ENAMETOOLONG)
_BROKEN = (errno.EIO, errno.ESTALE, errno.ENOTCONN)  # a disk or a mount that is damaged or gone
# What file systems say of locks and of flushing folders, if they have none, as some that are shared by many machines.
UNSUPPORTED = (errno.ENOSYS, errno.ENOTSUP, errno.EINVAL, errno.ENOLCK)


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Context that turns a full disk, missing write permission and the like into a LinearizeError that names `path`."""
    try:
        yield
    except Exception as error:
        code = error.errno if isinstance(error, OSError) else None
        # the Rust writers of safetensors and tokenizers raise their own types, with the error number in the text
        is_short = isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SHORT_WRITE)
        if code in _FULL or f"(os error {errno.ENOSPC})" in str(error) or is_short:
            raise LinearizeError(f"{path}: the disk is full; free some space and start again") from error
        if code in (*_REFUSED, *_BROKEN) or f"(os error {errno.EFBIG})" in str(error):
            raise LinearizeError(f"{path}: cannot be written: {_why(error)}") from error
        raise


def _why(error: Exception) -> str:
    """What stands in the way of writing, without the number of the system's error."""
    if getattr(error, "errno", errno.EFBIG) == errno.EFBIG:  # a copy names the file that it reads
        return "no file may be so large there (by the file system, or by ulimit -f); write to another disk"
    if not isinstance(error, OSError) or error.filename is None:
        return str(error)
    if error.errno == errno.ENAMETOOLONG:
        return f"the name {Path(error.filename).name[:20]}… is too long; use a shorter one"
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        path = Path(error.filename)
        if files := [place for place in (path, *path.parents) if place.is_file()]:
            return f"{files[0]} is a file, not a folder"
    return f"{error.filename}: {error.strerror}"


def fsync(path: Path) -> None:
    """Flushes a file or folder to disk; a folder only where the file system can."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    """Flushes a folder and everything in it to disk."""
    for path in [*folder.rglob("*"), folder]:
        fsync(path)


@contextlib.contextmanager
def temporary_folder(parent: Path, prefix: str, mode: int = 0o777) -> Iterator[Path]:
    """Context with a new temporary folder in `parent`, whose name begins with `prefix`.

    First removes such folders of killed processes. A live process holds a lock on its folder. The name contains the
    host, because on a shared disk locks may not be visible to other hosts.
    """
    prefix = f"{prefix}{re.sub('[^A-Za-z0-9.]', '_', socket.gethostname())}-"
    for path in parent.glob(f"{prefix}*"):
        _remove_if_abandoned(path)
    while (folder := _locked_folder(parent / f"{prefix}{secrets.token_hex(4)}", mode)) is None:
        pass  # another process removed the new folder before it was locked
    path, descriptor = folder
    try:
        yield path
    finally:
        with interrupts.finishing():
            shutil.rmtree(path, ignore_errors=True)
            os.close(descriptor)


def _locked_folder(path: Path, mode: int) -> tuple[Path, int] | None:
    """A new folder and the descriptor that holds its lock; None when it was removed before it could be locked."""
    try:
        path.mkdir(mode)
    except FileNotFoundError as error:  # its parent is there, but holds no folders of others, as /proc
        raise LinearizeError(f"{path.parent}: no folder can be made there") from error
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        pass  # no locks on this file system: nobody can lock the folder, so nobody removes it
    if path.exists():
        return path, descriptor
    os.close(descriptor)
    return None


def _remove_if_abandoned(path: Path) -> None:
    """Removes a temporary folder if it belongs to this user and no live process has locked it."""
    with contextlib.suppress(OSError):
        if path.is_symlink() or path.stat().st_uid != os.geteuid():
            return
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)
        finally:
            os.close(descriptor)


def scratch_folder() -> contextlib.AbstractContextManager[Path]:
    """Context with a folder in the system's temporary directory that only this user can read."""
    return temporary_folder(Path(tempfile.gettempdir()), "linearize-", mode=0o700)


def refuse_existing(out: Path) -> None:
    """Raises BadInput if `out` exists, but never advises to remove a model, which may be the one that is to be read."""
    if os.path.lexists(out):
        what = " and holds a model; name a new folder" if (out / "config.json").exists() else ""
        raise BadInput(f"{out}: already exists{what or '; name a new folder or remove this one'}")


@contextlib.contextmanager
def atomic_dir(out: Path | str, overwrite: bool = False) -> Iterator[Path]:
    """Context with a temporary folder next to `out`. It is renamed to `out` if the block succeeds, and else removed.

    Raises BadInput if `out` exists (unless `overwrite`), even if another process made it during the block. Raises
    LinearizeError if the disk is full or not writable.
    """
    out = Path(out)
    if not overwrite:
        refuse_existing(out)
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(out.parent, f".{out.name}.partial-") as partial:
            yield partial
            fsync_tree(partial)
            if overwrite and out.exists():
                shutil.rmtree(out)
            try:
                partial.rename(out)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                raise BadInput(f"{out}: was made by another process in the meantime; name a new folder") from None
            fsync(out.parent)


def atomic_write(path: Path | str, data: bytes | str) -> None:
    """Replaces a file atomically; on failure, the old file stays. Text is written as UTF-8.

    Raises LinearizeError if the disk is full or not writable.
    """
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


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object of at most JSON_BYTES. Raises BadInput if the file is missing or holds anything else."""
    try:
        data = parse_json(read_text(path, JSON_BYTES))
    except ValueError as error:
        raise BadInput(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(data, dict):
        raise BadInput(f"{path}: must hold a JSON object, not a {type(data).__name__}")
    return data
