"""What `linearize train` began a stage with: begun.json in its folder, so that it is resumed with nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from liger_convert.config.recipe import Recipe
from liger_convert.io.files import atomic_write, read_json
from liger_convert.pipeline.manifest import first_difference
from liger_convert.pipeline.recorded_inputs import InputFiles, data_inputs, sha256_input
from liger_convert.utils.errors import BadInput

FILE = "begun.json"


@dataclass(frozen=True)
class BegunStage:
    """settings: the stage, its sources, and whatever else of the recipe changes what it learns. inputs: sha256 by name,
    see `input_files`."""

    settings: dict[str, Any]
    inputs: dict[str, str]

    def write(self, out: Path) -> None:
        atomic_write(out / FILE, json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n")


def begun_stage(recipe: Recipe, number: int, model: Path, base: Path, out: Path | None) -> BegunStage:
    """What stage `number` (from 1) of `recipe` begins with. out: the folder of a stage to resume, None for a new one.

    Raises BadInput if the stage in `out` was begun with something else, or if there is none.
    """
    names = set(recipe.stages[number - 1].sources)
    names |= {source.prompts for name, source in recipe.teachers.items() if name in names and source.prompts}
    inputs = {"model": model, "base": base}
    inputs |= {field: path for field, path in data_inputs(recipe).items() if field.split(".")[1] in names}
    written = recipe.dump()
    settings = {
        "--stage": number,
        "stage": written["stages"][number - 1],
        "data": {name: source for name, source in written["data"].items() if name in names},
        **{name: written[name] for name in ("adapt", "precision", "seed")},
    }
    if out is None:
        files = InputFiles({})
        files.record(inputs)
        return BegunStage(settings, files.recorded)
    return _resumed(out, settings, inputs)


def odd_merge(model: Path, trained: Sequence[Path]) -> str | None:
    """A sentence if the stages in `trained` do not build upon each other and `model`, as far as is known; else None.

    The first one should have been trained on the weights in the folder `model`. A later one that was trained on them,
    too, would undo what an earlier one has learned, or has never seen it. Raises BadInput for a stage that is given
    twice.
    """
    seen: set[Path] = set()
    for out in trained:
        if out.resolve() in seen:
            raise BadInput(f"{out}: is given twice, and would be merged twice; give each stage once, in order")
        seen.add(out.resolve())
    first, *later = trained
    if _was_trained_on(first, model) is False:
        return f"{first}: was trained on other weights than those of {model}"
    for before, out in zip(trained, later):
        if _was_trained_on(out, model):
            return f"{out}: was trained on {model} without {before}; merge that first and train on the result"
    return None


def _was_trained_on(out: Path, model: Path) -> bool | None:
    """Whether the stage in `out` was begun with the weights in the folder `model`; None if it does not say.

    Reads the weights up to the first file that differs.
    """
    inputs = read_json(out / FILE).get("inputs") if (out / FILE).exists() else None
    if not isinstance(inputs, dict):
        return None
    left = [sha256 for name, sha256 in inputs.items() if re.fullmatch(r"model/[^/]+\.safetensors", name)]
    files = [file for file in sorted(model.glob("*.safetensors")) if file.is_file()]
    if len(files) == len(left):
        for file in files:
            if (found := sha256_input(file)) not in left:
                break
            left.remove(found)
        else:
            return True
    return False


def _resumed(out: Path, settings: dict[str, Any], inputs: Mapping[str, Path]) -> BegunStage:
    if not (out / FILE).exists():
        raise BadInput(f"{out}: has no stage to resume (no {FILE}); name a new folder, without --resume")
    old = read_json(out / FILE)
    if not all(isinstance(old.get(name), dict) for name in ("settings", "inputs")):
        raise BadInput(f"{out / FILE}: was not written by this version of liger-convert; start in a new folder")
    if (changed := first_difference(old["settings"], settings)) is not None:
        raise BadInput(f"{out}: was begun with other settings ({changed}); start in a new folder")
    for change in InputFiles(old["inputs"]).changes(inputs):
        raise BadInput(str(change))
    return BegunStage(settings, old["inputs"])
