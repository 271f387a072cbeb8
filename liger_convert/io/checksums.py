"""sha256 of files and folders, and a folder's SHA256SUMS file, which the tool sha256sum can check as well."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from liger_convert.io.files import atomic_write
from liger_convert.utils.errors import BadInput
from liger_convert.utils.progress import console

SUMS = "SHA256SUMS"


def sha256_file(path: Path | str) -> str:
    """The hexadecimal sha256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_in(path: Path) -> list[Path]:
    """All files below a folder, sorted; for a file, just that file. Links to files count as files."""
    return [file for file in (sorted(path.rglob("*")) if path.is_dir() else [path]) if file.is_file()]


def sha256_of(paths: Iterable[Path], relative_to: Path) -> dict[str, str]:
    """sha256 of all files in `paths` and below the folders in it, by path relative to `relative_to`."""
    return {file.relative_to(relative_to).as_posix(): sha256_file(file) for path in paths for file in files_in(path)}


def problems(folder: Path, expected: Mapping[str, str]) -> list[str]:
    """A sentence for each file that is missing, unreadable or changed. expected: sha256 by path relative to
    `folder`."""
    found = []
    for name, sha256 in expected.items():
        path = folder / name
        try:
            if sha256_file(path) != sha256:
                found.append(f"{path}: has changed since it was written (its sha256 is not the recorded one)")
        except FileNotFoundError:
            found.append(f"{path}: is missing")
        except OSError as error:
            found.append(f"{path}: cannot be read: {error.strerror}")
    return found


def write_sums(folder: Path) -> None:
    """Writes SHA256SUMS into `folder`, for all other files in it."""
    _write(folder, sha256_of([file for file in files_in(folder) if file != folder / SUMS], folder))


def renew_sum(path: Path) -> None:
    """Updates the hash of the changed file `path` in its folder's SHA256SUMS. Raises BadInput if there is none."""
    _write(path.parent, read_sums(path.parent) | {path.name: sha256_file(path)})


def _write(folder: Path, sums: Mapping[str, str]) -> None:
    atomic_write(folder / SUMS, "".join(f"{sha256}  {name}\n" for name, sha256 in sums.items()))


def read_sums(folder: Path) -> dict[str, str]:
    """The hashes in the folder's SHA256SUMS, by path. Raises BadInput if it is missing, empty or malformed, or names
    a file outside the folder."""
    path = folder / SUMS
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise BadInput(f"{path}: there is no such file") from None
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from None
    sums = {}
    for number, line in enumerate(lines, 1):
        sha256, _, name = line.partition("  ")
        inside = name and not Path(name).is_absolute() and ".." not in Path(name).parts
        if len(sha256) != 64 or not inside:
            raise BadInput(f"{path}: line {number} is not a sha256 and the path of a file in this folder")
        sums[name] = sha256
    if not sums:
        raise BadInput(f"{path}: is empty, so nothing can be checked by it")
    return sums


def write_checked(path: Path, value: Any) -> None:
    """Writes JSON data together with its sha256 to one file."""
    atomic_write(path, json.dumps({"sha256": _sha256_json(value), "value": value}))


def read_checked(path: Path) -> Any | None:
    """Reads what `write_checked` wrote. None if there is no such file; None with a warning if it is damaged."""
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["sha256"] == _sha256_json(content["value"]):
            return content["value"]
    except (OSError, ValueError, LookupError, TypeError):
        pass
    console.print(f"warning: {path}: is damaged; what it held is made again", markup=False, soft_wrap=True)
    return None


def _sha256_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
