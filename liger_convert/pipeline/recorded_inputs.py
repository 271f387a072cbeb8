"""The files that a run reads from outside its folder: their content when it began, and whether they have changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from liger_convert.config.recipe import Recipe
from liger_convert.config.sources import FileSource
from liger_convert.data.row_files import is_data_file
from liger_convert.eval import suites
from liger_convert.io.checkpoint import TOKENIZER
from liger_convert.io.checksums import sha256_file
from liger_convert.io.gguf_parts import parts_of
from liger_convert.pipeline.manifest import input_files
from liger_convert.utils.errors import BadInput

# what is read of a base, besides its license
READ = (*TOKENIZER, "*.json", "*.safetensors", "*.jinja", "merges.txt")


def parts_by_field(field: str, path: Path) -> dict[str, Path]:
    """`path` under `field`. If it is one part of a split .gguf model, the other parts are under FIELD.2 and so on."""
    first, *others = parts_of(path) if path.is_file() else [path]
    return {field: first} | {f"{field}.{number}": part for number, part in enumerate(others, 2)}


def data_inputs(recipe: Recipe) -> dict[str, Path]:
    """The files and folders that `recipe` names, apart from its base, by field."""
    paths: dict[str, Any] = {"eval.suite": suites.file_of(recipe.eval.suite), "eval.data": recipe.eval.data}
    for name, source in recipe.data.items():
        if isinstance(source, FileSource):
            paths |= {f"data.{name}.path": source.path, f"data.{name}.validation": source.validation}
    return {field: Path(path) for field, path in paths.items() if path}


@dataclass(frozen=True)
class Change:
    """An input file that has changed since the run began. `name`: as in the manifest, FIELD/FILE."""

    name: str
    path: Path | None  # None: the file is gone
    is_new: bool = False  # it was not there when the run began

    def __str__(self) -> str:
        if self.path is None:
            return f"{self.name}: this input of the run is missing; put it back"
        if self.is_new:
            return f"{self.path}: was added since the run began; remove it"
        return f"{self.path}: has changed since the run began; restore the original"

    @property
    def field(self) -> str:
        """The recipe's field that names the file or its folder."""
        return self.name.partition("/")[0]


class InputFiles:
    """Hashes input files. A file is hashed again only if its device, inode, size or timestamps have changed.

    recorded: sha256 by name (FIELD/FILE), the `inputs` of the manifest; `record` adds to it.
    """

    def __init__(self, recorded: dict[str, str]):
        self.recorded = recorded
        self._stamps: dict[str, tuple[int, ...]] = {}

    def record(self, inputs: Mapping[str, Path]) -> None:
        """Records the current content of the files and folders of `inputs`, by field. Raises BadInput for a file that
        cannot be read."""
        for name, file in input_files(inputs).items():
            if self._stamps.get(name) != (stamp := _stamp(file)):
                self.recorded[name] = sha256_input(file)
                self._stamps[name] = stamp

    def changes(self, inputs: Mapping[str, Path]) -> list[Change]:
        """The recorded files that have changed or are gone, and files that were added to a recorded folder and would be
        read. `inputs`: the current file or folder of each field."""
        files = input_files(inputs)
        fields = {name.partition("/")[0] for name in self.recorded}
        found = [
            Change(name, file, is_new=True)
            for name, file in files.items()
            if name not in self.recorded and name.partition("/")[0] in fields and _is_read(name)
        ]
        for name, sha256 in self.recorded.items():
            file = files.get(name)
            if file is None:
                found.append(Change(name, None))
            elif self._stamps.get(name) != (stamp := _stamp(file)):
                if sha256_input(file) == sha256:
                    self._stamps[name] = stamp
                else:
                    found.append(Change(name, file))
        return found


def _is_read(name: str) -> bool:
    """Whether the file with this name in a folder, FIELD/FILE, is one of those that are read there."""
    field, _, file = name.partition("/")
    if field == "base":
        return "/" not in file and any(Path(file).match(pattern) for pattern in READ)
    return is_data_file(Path(file))


def sha256_input(file: Path) -> str:
    """The file's sha256. Raises BadInput if it cannot be read."""
    try:
        return sha256_file(file)
    except OSError as error:
        raise BadInput(f"{file}: cannot be read ({error.strerror})") from None


def _stamp(file: Path) -> tuple[int, ...]:
    stat = file.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
