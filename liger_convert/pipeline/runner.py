"""A run: the steps from a recipe to a report, each recorded in DIR/manifest.json once its outputs are complete.

Killed at any moment, a run continues after its last recorded step; a training stage continues from its last checkpoint.
Every step starts from the same seeds whatever ran before it in the process, so both ways end in the same weights.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

from liger_convert.config.recipe import Recipe
from liger_convert.config.sources import FileSource
from liger_convert.eval import suites
from liger_convert.io import checkpoint, checksums
from liger_convert.io.files import atomic_dir, disk_errors
from liger_convert.io.run_folder import STEPS, RunFolder
from liger_convert.pipeline import manifest
from liger_convert.pipeline.manifest import Manifest
from liger_convert.pipeline.recorded_inputs import data_inputs
from liger_convert.pipeline.steps import RunSteps, Step
from liger_convert.training.batch_split import whole_groups
from liger_convert.utils import processes
from liger_convert.utils.device import pick_device
from liger_convert.utils.errors import BadInput, LinearizeError
from liger_convert.utils.progress import console

# of the recipe's `eval`, what changes how the measures are made and not what they are
EVAL_SPEED = {"batch_size", "processes"}


class Interrupted(LinearizeError):
    """Ctrl-C or SIGTERM: the run can be resumed."""

    exit_code = 130


class Run:
    """A run of a recipe in the folder `out`: does the steps that its manifest does not record yet.

    keep_steps: keep what a step left when no other step needs it any more.
    """

    def __init__(self, recipe: Recipe, out: Path, manifest: Manifest, keep_steps: bool = False):
        self.recipe, self.out, self.manifest, self.keep_steps = recipe, out, manifest, keep_steps
        self.steps = RunSteps(recipe, out, manifest, keep_steps)
        self.folder = self.steps.folder

    def execute(self) -> None:
        """Does every step that the manifest does not record yet. Raises BadInput when the inputs or outputs of finished
        steps, from which it continues, have changed."""
        steps = self.steps.all()
        for step in steps:
            self._outputs(step)  # a link that leads out of the run is refused before the work
        unfinished = any(step.name not in self.manifest.steps for step in steps)
        if unfinished:
            self._accept_changed_inputs()
        self._check_outputs(steps)
        if unfinished:
            console.print(_computes_on(self.recipe), markup=False, soft_wrap=True)
        for number, step in enumerate(steps, 1):
            if step.name not in self.manifest.steps:
                self._check_inputs()
                console.print(f"[{number}/{len(steps)}] {step.name}", markup=False)
                self._perform(step)
            if not self.keep_steps:
                self._delete_unneeded(steps)

    def _perform(self, step: Step) -> None:
        folder, outputs = self.folder.step(step.name), self._outputs(step)
        if not step.continues:
            self.folder.remove(folder, *outputs)
        folder.mkdir(parents=True, exist_ok=True)
        set_seed(self.recipe.seed)
        started = time.monotonic()
        try:
            with disk_errors(folder):
                facts = step.work(folder)
        except BaseException:
            if not step.continues:
                self.folder.remove(folder, *outputs)
            raise
        facts |= {"wall_seconds": round(time.monotonic() - started, 1), "inputs": step.inputs}
        self.manifest.steps[step.name] = facts | {"outputs": checksums.sha256_of(outputs, self.out)}
        self.manifest.write(self.out)

    def _outputs(self, step: Step) -> list[Path]:
        return [self.folder.path(name) for name in step.outputs] or [self.folder.step(step.name)]

    def _delete_unneeded(self, steps: Sequence[Step]) -> None:
        done = self.manifest.steps
        needed = self._needed(steps)
        unneeded = [step.name for step in steps if step.name in done and step.name not in needed]
        self.folder.remove(*(self.folder.step(name) for name in unneeded))
        if len(done) == len(steps):
            self.folder.remove(self.folder.path(STEPS))

    def _needed(self, steps: Sequence[Step]) -> set[str]:
        """The steps whose outputs are read by one that is not done."""
        return {name for step in steps if step.name not in self.manifest.steps for name in step.inputs}

    def _check_outputs(self, steps: Sequence[Step]) -> None:
        """Raises BadInput unless the outputs that this run goes on from or ends with are those that its steps wrote."""
        rewritten = () if "report" in self.manifest.steps else self.steps.written_by_report
        # the report may have been stopped after it wrote them, and before it recorded that
        unsure = {str(path.relative_to(self.out)) for path in rewritten if path.exists()}
        for name in sorted(self._needed(steps) | {"export", "report"}):
            outputs = self.manifest.steps.get(name, {}).get("outputs", {})
            recorded = {path: sha256 for path, sha256 in outputs.items() if path not in unsure}
            if found := checksums.problems(self.out, recorded):
                raise BadInput(f"{found[0]}; restore what step {name} wrote, or start a new run in a new folder")

    def _check_inputs(self) -> None:
        """Raises BadInput if a base or data file has changed: the run would be partly of the old one and partly of the
        new."""
        if changed := self.steps.inputs.changes(self.steps.input_paths):
            raise BadInput(f"{changed[0]}, or start a new run in a new folder")

    def _accept_changed_inputs(self) -> None:
        """On resume, takes inputs as they are now where no step has read them for its work; else raises BadInput."""
        changed = self.steps.inputs.changes(self.steps.input_paths)
        for change in changed:
            if change.path is None or not self._is_unread(change.field):
                raise BadInput(f"{change}, or start a new run in a new folder")
        if not changed:
            return
        for change in changed:
            console.print(f"note: {change.path}: has changed, and is used as it is now", markup=False)
        if any(change.field.startswith("eval.") for change in changed):
            self.folder.remove(self.folder.step("eval"))  # measures of what was there before
        self.steps.read_data()
        self.manifest.write(self.out)

    def _is_unread(self, field: str) -> bool:
        """Whether all that reads the input `field` of the recipe is still to be done. A step that was interrupted has
        read it, but for `eval`, which starts again."""
        if field.startswith("eval."):
            return "eval" not in self.manifest.steps
        if not field.startswith("data."):
            return False
        name = field.split(".")[1]
        stages = [
            step
            for step, stage in zip(self.recipe.stage_names, self.recipe.stages, strict=True)
            if name in stage.sources
        ]
        readers = [
            *stages,
            *["eval"] * (name in (self.recipe.eval.text, self.recipe.eval.other_text)),
            *["select-layers"] * (name in self.recipe.given_texts[:1]),
            *[f"data-{other}" for other, teacher in self.recipe.teachers.items() if teacher.prompts == name],
        ]
        return not any(step in self.manifest.steps or self.folder.step(step).exists() for step in readers)


def run(
    recipe: Recipe,
    out: Path,
    *,
    text: str = "",
    overrides: Sequence[str] = (),
    resume: bool = False,
    keep_steps: bool = False,
) -> None:
    """Runs `recipe` in the folder `out`, which must be new, or with `resume` hold this run unfinished.

    text, overrides: what the recipe was read from, for the manifest. keep_steps: keep the models between the steps.
    Where a launcher started several processes, all call it: the first does the steps, the others train with it. A run
    that the launcher's processes had begun before they were restarted continues, with or without `resume`. Raises
    BadInput when the recipe, its base or its data cannot be used (a new run then leaves no folder), or when recipe or
    inputs are not those of the run to resume; LinearizeError when the work itself fails.
    """
    device = pick_device(recipe.device)
    processes.join(cpu=device.type == "cpu")
    if processes.is_first():
        _work(recipe, out, text=text, overrides=overrides, resume=resume, keep_steps=keep_steps)
        processes.announce(None)
    else:
        with _resumable(out):
            _work_along(recipe, out, keep_steps)
    processes.leave()


@contextlib.contextmanager
def _resumable(out: Path) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; the same command with --resume continues {out}") from None


def _work_along(recipe: Recipe, out: Path, keep_steps: bool) -> None:
    """What every process except the first does in a run."""
    steps: RunSteps | None = None
    for task in processes.tasks():
        record = Manifest.read(out)
        if steps is None:
            _take_threads(record)
            steps = RunSteps(recipe, out, record, keep_steps)
        steps.manifest.steps = record.steps  # of what has been done since
        steps.work_along(**task)


def _work(recipe: Recipe, out: Path, *, text: str, overrides: Sequence[str], resume: bool, keep_steps: bool) -> None:
    _check_place(recipe, out)
    if recipe.stages:
        whole_groups(processes.count(), recipe.sequence_parallel)
    if not resume and manifest.is_own(out):
        console.print(f"note: the processes were restarted and continue with {out}", markup=False, soft_wrap=True)
        resume = True
    if resume:
        _require_resumable(Manifest.read(out), out)
    else:
        _check(recipe)
        with atomic_dir(out) as new:
            Manifest.new(recipe, text, overrides, _machine(recipe)).write(new)
            manifest.sign(new)
    with manifest.lock(out):
        folder = RunFolder(out)
        folder.remove(*out.glob(".*.partial-*"), *out.glob("export/.*.partial-*"))  # left by a process that was killed
        record = Manifest.read(out)
        _take_recipe(record, folder, Manifest.new(recipe, text, overrides, record.machine))
        _take_threads(record)
        if changed := manifest.first_difference({"processes": 1} | record.machine, _machine(recipe)):
            console.print(f"note: {changed} on this machine, so the weights may differ a little", markup=False)
        try:
            with _resumable(out):
                Run(recipe, out, record, keep_steps).execute()
        except BadInput:
            if not resume and "convert" not in record.steps:
                folder.discard()
            raise


def _machine(recipe: Recipe) -> dict[str, Any]:
    return manifest.machine(pick_device(recipe.device), torch.get_num_threads(), processes.count())


def _computes_on(recipe: Recipe) -> str:
    """A sentence with the run's device, because without it a missing GPU shows only in how slow the first stage is."""
    where = "cpu" if pick_device(recipe.device).type == "cpu" else _machine(recipe)["device"]
    why = " (no GPU is visible to PyTorch)" if where == "cpu" and recipe.device == "auto" else ""
    shared = f" in {processes.count()} processes" if processes.count() > 1 else ""
    return f"computing on {where}{why}{shared}"


def _take_threads(record: Manifest) -> None:
    """Uses as many threads as the run began with, because sums depend on their number. Another number of processes
    shares the cores differently."""
    if record.machine.get("processes", 1) == processes.count():
        torch.set_num_threads(record.machine["threads"])


def _require_resumable(record: Manifest, out: Path) -> None:
    """Raises BadInput for a run that an older version began: its recipe and its steps have other names."""
    if record.format != manifest.FORMAT:
        older = "was started by an older version of liger-convert, which gave recipes and steps other names"
        raise BadInput(f"{out}: {older}; finish it with that version, or start a new run in a new folder")


def _take_recipe(record: Manifest, folder: RunFolder, new: Manifest) -> None:
    """Goes on by the recipe of `new`, which may differ from the one of `record` in `eval` while nothing is measured,
    and in `when_worse` where `warn` would have made the same stages.

    Raises BadInput for any other difference.
    """
    old, given = record.recipe["resolved"], new.recipe["resolved"]
    if (changed := manifest.first_difference(old, given)) is None:
        return
    free: dict[str, Any] = {} if "eval" in record.steps else {"eval": None}
    if given["when_worse"] == "warn" and old["when_worse"] in ("go_back", "stop") and _went_straight(record):
        free["when_worse"] = None
    if (rest := manifest.first_difference(old | free, given | free)) is not None:
        raise BadInput(f"{folder.out}: is a run of a different recipe ({rest}); start a new run in a new folder")
    if any(old["eval"].get(name) != value for name, value in given["eval"].items() if name not in EVAL_SPEED):
        folder.remove(folder.step("eval"))  # measures of the other kind
    console.print(f"note: {changed}; the run continues with the new recipe", markup=False)
    record.recipe = new.recipe
    record.write(folder.out)


def _went_straight(record: Manifest) -> bool:
    """Whether nothing is merged yet, and no stage was left out or trained again at lower rates."""
    as_they_are = all(step.get("kept", True) and step.get("rates", 1.0) == 1.0 for step in record.steps.values())
    return as_they_are and "merge" not in record.steps


def _check_place(recipe: Recipe, out: Path) -> None:
    """Raises BadInput when the run's folder would lie in a folder that the run reads, which it must find unchanged."""
    inputs = {"base": checkpoint.locate_base(recipe.base)} | data_inputs(recipe)
    for field, path in inputs.items():
        if path is not None and path.is_dir() and out.resolve().is_relative_to(path.resolve()):
            raise BadInput(f"--out {out}: is inside {path}, which the recipe reads as {field}; name another folder")


def _check(recipe: Recipe) -> None:
    """What can be checked in a recipe before anything is fetched or written. Raises BadInput."""
    pick_device(recipe.device)
    suite = suites.load(recipe.eval.suite)
    suites.check_files(suite, Path(recipe.eval.data) if recipe.eval.data is not None else None)
    if suite.needs_held_out(has_other=recipe.other_source is not None) and recipe.eval.text is None:
        raise BadInput(
            f"eval.text: suite {suite.name} needs held-out text; name a source under `data:` that holds some out"
        )
    for name, source in recipe.data.items():
        if isinstance(source, FileSource) and not Path(source.path).exists():
            raise BadInput(f"data.{name}.path: {source.path}: there is no such file or folder")
