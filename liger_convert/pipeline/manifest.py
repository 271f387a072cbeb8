"""manifest.json: the inputs and outputs of a run. It is complete after every step, so that a run can resume."""

from __future__ import annotations

import contextlib
import fcntl
import json
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from liger_convert import __version__
from liger_convert.config.recipe import Recipe
from liger_convert.io.checksums import files_in
from liger_convert.io.files import UNSUPPORTED, atomic_write, read_json
from liger_convert.utils import processes
from liger_convert.utils.errors import BadInput
from liger_convert.utils.progress import console

FILE = "manifest.json"
FORMAT = 3  # the version written; a run of an older one can be verified, but not resumed
READABLE = (2, 3)
LOCK = ".lock"  # holds the name of the launch that works on a run, if its processes may be restarted
PACKAGES = ("torch", "transformers", "peft", "accelerate", "datasets", "lm-eval")


@dataclass
class Manifest:
    """The content of manifest.json.

    recipe: the file's text verbatim, the `--set` overrides and the resolved result. inputs: sha256 by name, see
    `input_files`. steps: one entry per finished step, in order, with its wall time, facts (tokens seen, losses) and
    outputs, sha256 by path in the run. It holds no paths but those that the recipe names.
    """

    recipe: dict[str, Any]
    machine: dict[str, Any]
    seed: int
    inputs: dict[str, str] = field(default_factory=dict)
    steps: dict[str, dict[str, Any]] = field(default_factory=dict)
    format: int = FORMAT

    @classmethod
    def new(cls, recipe: Recipe, text: str, overrides: Iterable[str], machine: dict[str, Any]) -> Manifest:
        written = {
            "text": text,
            "overrides": list(overrides),
            "resolved": recipe.dump(),
            "sha256": recipe.fingerprint(),
        }
        return cls(written, machine, recipe.seed)

    @classmethod
    def read(cls, run: Path) -> Manifest:
        """The manifest of the run at `run`, of any format in READABLE. Raises BadInput when there is none."""
        path = run / FILE
        if not path.exists():
            raise BadInput(f"{run}: has no run to resume (no {FILE}); start it without --resume")
        data = read_json(path)
        objects = (data.get(name) for name in ("recipe", "machine", "inputs", "steps"))
        known = data.keys() == cls.__dataclass_fields__.keys() and all(isinstance(part, dict) for part in objects)
        if data.get("format") not in READABLE or not known:
            raise BadInput(f"{path}: was not written by this version of liger-convert; start a new run in a new folder")
        return cls(**data)

    def write(self, run: Path) -> None:
        atomic_write(run / FILE, json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n")


def machine(device: Any, threads: int, processes: int = 1) -> dict[str, Any]:
    """What the numbers of a run depend on besides its inputs: the device, CPU threads, number of processes, kernels and
    versions. device: a torch.device."""
    from gated_kernels import in_use

    return {
        "device": _name(device),
        "threads": threads,
        "processes": processes,
        "kernels": in_use(),
        "platform": platform.platform(),
        "versions": {"python": platform.python_version(), "liger-convert": __version__}
        | {name: metadata.version(name) for name in PACKAGES},
    }


def _name(device: Any) -> str:
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def input_files(inputs: Mapping[str, Path]) -> dict[str, Path]:
    """Every file of `inputs` (the files and folders that a recipe names, by field), by a name that does not depend on
    the machine: the field, and the file's name or its path in the field's folder, as in `base/config.json`."""
    return {
        f"{field}/{file.relative_to(path) if path.is_dir() else file.name}": file
        for field, path in inputs.items()
        for file in files_in(path)
    }


def first_difference(old: Any, new: Any, path: str = "") -> str | None:
    """`stages[0].tokens was 100, is 200`: the first place where two resolved recipes differ, or None."""
    if isinstance(old, dict) and isinstance(new, dict):
        pairs = [(f"{path}.{k}".strip("."), old.get(k), new.get(k)) for k in [*old, *(k for k in new if k not in old)]]
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = [(f"{path}[{i}]", a, b) for i, (a, b) in enumerate(zip(old, new))]
    elif old == new:
        return None
    else:
        return f"{path} was {json.dumps(old, ensure_ascii=False)}, is {json.dumps(new, ensure_ascii=False)}"
    return next((found for where, a, b in pairs if (found := first_difference(a, b, where))), None)


@contextlib.contextmanager
def lock(run: Path) -> Iterator[None]:
    """Locks a run against a second process, and signs it. The system releases the lock however this process ends.
    Without locks, as on some file systems that many machines share, a note says so. Raises BadInput if the run is
    locked."""
    with open(run / LOCK, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(f"{run}: another process is working on this run; wait for it or stop it") from None
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            alone = "this file system has no locks, so see to it that no other process works on this run"
            console.print(f"note: {run}: {alone}", markup=False, soft_wrap=True)
        sign(run)
        yield


def sign(run: Path) -> None:
    """Records in the folder of a run that this launch works on it."""
    (run / LOCK).write_text(processes.launch_name(), encoding="utf-8")


def is_own(run: Path) -> bool:
    """Whether the processes of this launch have begun the run, before they were restarted."""
    name = processes.launch_name()
    return bool(name) and (run / LOCK).exists() and (run / LOCK).read_text(encoding="utf-8") == name
