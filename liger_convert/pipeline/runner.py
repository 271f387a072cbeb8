"""A run: the steps from a recipe to a report, each recorded in DIR/manifest.json once its outputs are complete.

Killed at any moment, a run continues after its last recorded step; a training stage continues from its last checkpoint.
Every step starts from the same seeds whatever ran before it in the process, so both ways end in the same weights.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

from liger_convert import training
from liger_convert.config.recipe import FileSource, Recipe, TeacherSource
from liger_convert.data import corpus, teacher
from liger_convert.eval import ablation, suites
from liger_convert.io import checkpoint, checksums
from liger_convert.io.files import atomic_dir, atomic_write, disk_errors
from liger_convert.io.run_folder import STEPS, RunFolder
from liger_convert.pipeline import card, convert, export, layer_selection, manifest, preflight, report
from liger_convert.pipeline.manifest import Manifest
from liger_convert.pipeline.plan import Plan, make_plan
from liger_convert.pipeline.recorded_inputs import InputFiles
from liger_convert.training import merge
from liger_convert.utils.device import pick_device
from liger_convert.utils.errors import BadInput, LinearizeError
from liger_convert.utils.progress import console, progress

PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a lighthouse keeper who",
    "A list in Python is",
)


# of the recipe's `eval`, what changes how the measures are made and not what they are
EVAL_SPEED = {"batch_size", "processes"}


class Interrupted(LinearizeError):
    """Ctrl-C or SIGTERM: the run can be resumed."""

    exit_code = 130


@dataclass(frozen=True)
class Step:
    """One step. `work` fills the folder it is given (or its `outputs`) and returns facts for the manifest."""

    name: str
    work: Callable[[Path], dict[str, Any]]
    inputs: tuple[str, ...] = ()  # the steps whose outputs it reads
    outputs: tuple[str, ...] = ()  # in the run's folder, to stay; empty: steps/NAME, deleted once no step needs it
    continues: bool = False  # goes on from what a killed attempt left in its folder


class Run:
    """A recipe at work in the folder `out`."""

    def __init__(self, recipe: Recipe, out: Path, manifest: Manifest):
        self.recipe, self.out, self.manifest = recipe, out, manifest
        self.folder, self.inputs = RunFolder(out), InputFiles(manifest.inputs)
        self.device = pick_device(recipe.device)
        self.suite = suites.load(recipe.eval.suite)
        self.documents = functools.cache(self._load_documents)
        self.preflight = functools.cache(self._preflight)
        self.keep_steps = False

    def steps(self) -> list[Step]:
        """What the recipe asks for, in order."""
        stages = tuple(f"{number}-{stage.kind}" for number, stage in enumerate(self.recipe.stages, 1))
        writing_steps = [
            Step(f"data-{name}", functools.partial(self._write, name), ("base",), continues=True)
            for name in self.recipe.teachers
        ]
        training_steps = [
            Step(
                name,
                functools.partial(self._stage, i, stages[:i]),
                ("base", "convert", *self._written(self.recipe.stages[i].data), *stages[:i]),
                continues=True,
            )
            for i, name in enumerate(stages)
        ]
        ranking = [Step("rank", self._rank, ("base",))] if self.recipe.softmax_auto is not None else []
        return [
            Step("base", self._base),
            *ranking,
            Step("plan", self._plan, ("base", *(step.name for step in ranking))),
            Step("convert", self._convert, ("base",)),
            *writing_steps,
            *training_steps,
            Step("merge", functools.partial(self._merge, stages), ("convert", *stages)),
            Step("export", self._export, ("merge",), outputs=("export",)),
            Step("eval", self._eval, ("base", "export", *self._written(self.recipe.eval.text)), continues=True),
            Step("report", self._report, ("eval",), outputs=("report.md", "report.json")),
        ]

    def execute(self, keep_steps: bool = False) -> None:
        """Does every step that the manifest does not record yet. Raises BadInput when what it goes on from, inputs or
        outputs of finished steps, is not what it was."""
        self.keep_steps = keep_steps
        steps = self.steps()
        for step in steps:
            self._outputs(step)  # a link that leads out of the run is refused before the work
        if any(step.name not in self.manifest.steps for step in steps):
            self._accept_changed_inputs()
        self._check_outputs(steps)
        for number, step in enumerate(steps, 1):
            if step.name not in self.manifest.steps:
                self._check_inputs()
                console.print(f"[{number}/{len(steps)}] {step.name}", markup=False)
                self._perform(step)
            if not keep_steps:
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
        """Raises BadInput unless the outputs that this run goes on from are those that its steps wrote."""
        for name in [*sorted(self._needed(steps)), "report"]:
            recorded = self.manifest.steps.get(name, {}).get("outputs", {})
            if found := checksums.problems(self.out, recorded):
                raise BadInput(f"{found[0]}; put back what step {name} wrote, or start a new run in a new folder")

    def _check_inputs(self) -> None:
        """A base or data file that is not what it was would make half a run of each. Raises BadInput."""
        if changed := self.inputs.changes(self._input_paths):
            raise BadInput(f"{changed[0]}, or start a new run in a new folder")

    def _accept_changed_inputs(self) -> None:
        """On resume, takes inputs as they are now where no step has read them for its work; else raises BadInput."""
        changed = self.inputs.changes(self._input_paths)
        for change in changed:
            if change.path is None or not self._is_unread(change.field):
                raise BadInput(f"{change}, or start a new run in a new folder")
        if not changed:
            return
        for change in changed:
            console.print(f"note: {change.path}: has changed, and is taken as it is now", markup=False)
        if any(change.field.startswith("eval.") for change in changed):
            self.folder.remove(self.folder.step("eval"))  # measures of what was there before
        self._read_data()
        self.manifest.write(self.out)

    def _is_unread(self, field: str) -> bool:
        """Whether all that reads the input `field` of the recipe is still to be done. A step that was interrupted has
        read it, but for `eval`, which starts again."""
        if field.startswith("eval."):
            return "eval" not in self.manifest.steps
        if not field.startswith("data."):
            return False
        name = field.split(".")[1]
        stages = [f"{i}-{stage.kind}" for i, stage in enumerate(self.recipe.stages, 1) if stage.data == name]
        readers = [*stages, *["eval"] * (name == self.recipe.eval.text), *["rank"] * (name in self.recipe.plain_texts)]
        return not any(step in self.manifest.steps or self.folder.step(step).exists() for step in readers)

    # --- what the steps share

    @property
    def _input_paths(self) -> dict[str, Path]:
        """The file or folder behind every field of the recipe that names one, the base included."""
        return {"base": checkpoint.locate_base(self.recipe.base) or self._base_folder} | self._data_inputs

    @functools.cached_property
    def _base_folder(self) -> Path:
        """Looked up by every process again, since a manifest names no place on a machine; of a hub base, the commit
        that the run began with."""
        options = self.recipe.base_options.model_dump()
        options["revision"] = self.manifest.steps.get("base", {}).get("commit", options["revision"])
        return checkpoint.resolve_base(self.recipe.base, self.folder.step("base"), **options)

    @property
    def _data_inputs(self) -> dict[str, Path]:
        """The files and folders that the recipe names beside its base, by field."""
        options = self.recipe.eval
        paths: dict[str, Any] = {"eval.suite": suites.file_of(options.suite), "eval.data": options.data}
        for name, source in self.recipe.data.items():
            if isinstance(source, FileSource):
                paths |= {f"data.{name}.path": source.path, f"data.{name}.validation": source.validation}
        return {field: Path(path) for field, path in paths.items() if path}

    @property
    def _data_dir(self) -> Path | None:
        return Path(self.recipe.eval.data) if self.recipe.eval.data is not None else None

    @functools.cached_property
    def _tokenizer(self) -> Any:
        return checkpoint.load_tokenizer(self._base_folder, self.recipe.base_options.trust_remote_code)

    @functools.cached_property
    def _planned(self) -> Plan:
        ranked = self.manifest.steps.get("rank")
        return self._make_plan(self.recipe if ranked is None else self.recipe.keeping(ranked["ranking"]["kept"]))

    def _make_plan(self, recipe: Recipe) -> Plan:
        return make_plan(recipe, checkpoint.load_config(self._base_folder, recipe.base_options.trust_remote_code))

    def _written(self, source: str | None) -> tuple[str, ...]:
        """The step that a source comes from, if the base writes it."""
        return (f"data-{source}",) if source in self.recipe.teachers else ()

    def _load_documents(self, name: str) -> corpus.Documents:
        source, written = self.recipe.data[name], self.folder.step(f"data-{name}") / teacher.FILE
        with progress(f"data {name}") as report:
            return corpus.load_source(source, self._tokenizer, seed=self.recipe.seed, written=written, progress=report)

    # --- the steps

    def _base(self, folder: Path) -> dict[str, Any]:
        path, given = self._base_folder, checkpoint.locate_base(self.recipe.base)
        self.inputs.record({"base": given or path})
        return {"commit": path.name} if given is None and path.parent.name == "snapshots" else {}

    def _rank(self, folder: Path) -> dict[str, Any]:
        """Chooses the layers that stay softmax, on the training part of the first text."""
        plan = self._make_plan(self.recipe)
        self._read_data()
        documents = self.documents(self.recipe.plain_texts[0]).train
        with progress("rank") as report:
            ranking = layer_selection.rank(
                self.recipe, plan, self._base_folder, self._tokenizer, documents, self.device, report
            )
        return {"ranking": ranking.to_dict()}

    def _plan(self, folder: Path) -> dict[str, Any]:
        plan = self._planned.to_dict()
        self._read_data()
        return {"plan": plan | {"warnings": self.preflight()}}

    def _read_data(self) -> None:
        """Reads all data: what is wrong there should stop the run in its first steps and not in its last."""
        suites.check_data(self.suite, self._data_dir, self.recipe.eval.limit)
        for name, source in self.recipe.data.items():
            if isinstance(source, TeacherSource):
                teacher.encode_prompts(source, self._tokenizer)
            else:
                self.documents(name)
        if (text := self.recipe.eval.text) is not None:
            if text in self.recipe.teachers:
                held_out = self.recipe.teachers[text].held_out_tokens
            else:
                held_out = sum(len(document.ids) for document in self.documents(text).held_out)
            if held_out < self.suite.text_tokens:
                needed = f"suite {self.suite.name} needs {self.suite.text_tokens}"
                raise BadInput(f"data.{text}: {held_out} tokens are held out, {needed}; hold out more")
        self.inputs.record(self._data_inputs)
        self.preflight()

    def _preflight(self) -> list[str]:
        """What would fail after the training is tried before it. The layers need not be chosen yet."""
        config = checkpoint.load_config(self._base_folder, self.recipe.base_options.trust_remote_code)
        with progress("preflight") as report:
            warnings = preflight.check(
                self.recipe,
                make_plan(self.recipe, config),
                base_dir=self._base_folder,
                config=config,
                tokenizer=self._tokenizer,
                suite=self.suite,
                data_dir=self._data_dir,
                documents=self.documents,
                prompts=PROMPTS,
                out=self.out,
                keep_steps=self.keep_steps,
                report=report,
            )
        for warning in warnings:
            console.print(f"warning: {warning}", markup=False, soft_wrap=True)
        return warnings

    def _convert(self, folder: Path) -> dict[str, Any]:
        with progress("convert") as report:
            # in the base's dtype: what is about to be trained should not be rounded to the export's first
            return convert.convert(
                self._base_folder,
                folder / "model",
                self._planned.linearization,
                seed=self.recipe.seed,
                trust_remote_code=self.recipe.base_options.trust_remote_code,
                progress=report,
            )

    def _write(self, name: str, folder: Path) -> dict[str, Any]:
        source = self.recipe.teachers[name]
        with progress(folder.name) as report:
            teacher.write(
                source,
                folder / teacher.FILE,
                prompts=teacher.encode_prompts(source, self._tokenizer),
                base_dir=self._base_folder,
                device=self.device,
                precision=self.recipe.precision,
                seed=self.recipe.seed,
                progress=report,
            )
        return {"tokens": source.written_tokens}

    def _stage(self, index: int, before: Sequence[str], folder: Path) -> dict[str, Any]:
        stage = self.recipe.stages[index]
        seed = self.recipe.seed + index  # stages that share a source should not see its documents in the same order
        documents = self.documents(stage.data).train
        dataset = training.rows_of(stage, documents, seed)
        with progress(folder.name) as report:
            stats = training.run_stage(
                stage,
                model_dir=self.folder.step("convert") / "model",
                results=[self.folder.step(name) / "result" for name in before],
                base_dir=self._base_folder,
                dataset=dataset,
                out=folder,
                device=self.device,
                precision=self.recipe.precision,
                seed=seed,
                resume=True,
                progress=report,
            )
        return stats | {"seed": seed}

    def _merge(self, stages: Sequence[str], folder: Path) -> dict[str, Any]:
        results = [self.folder.step(name) / "result" for name in stages]
        merge.merge(self.folder.step("convert") / "model", results, folder / "model")
        return {}

    def _export(self, folder: Path) -> dict[str, Any]:
        model, out = self.folder.step("merge") / "model", self.out / "export"
        with progress("export") as report:
            return export.export(
                model,
                out,
                dtype=self._planned.dtype,
                name=self.recipe.name,
                base=self.recipe.base,
                base_dir=self._base_folder,
                progress=report,
            )

    def _eval(self, folder: Path) -> dict[str, Any]:
        options = self.recipe.eval
        with progress("eval") as report:
            results = ablation.diagnose(
                self.out / "export",
                self._base_folder,
                self.suite,
                held_out=self.documents(options.text).held_out if options.text is not None else None,
                data_dir=self._data_dir,
                limit=options.limit,
                batch_size=options.batch_size,
                processes=options.processes,
                device=self.device,
                precision=self.recipe.precision,
                prompts=PROMPTS,
                keep=folder,
                report=report,
            )
        atomic_write(folder / "results.json", json.dumps(results))
        return {}

    def _report(self, folder: Path) -> dict[str, Any]:
        results = json.loads((self.folder.step("eval") / "results.json").read_text(encoding="utf-8"))
        report.write_report(self.out, results, asdict(self.manifest))
        exported = self.folder.path("export")
        card.add_figures(exported, (self.out / "report.md").read_text(encoding="utf-8"))
        checksums.renew_sum(exported / card.CARD)
        changed = checksums.sha256_of([exported / card.CARD, exported / checksums.SUMS], self.out)
        self.manifest.steps["export"]["outputs"] |= changed
        return {}


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
    Raises BadInput when the recipe, its base or its data cannot be used (a new run then leaves no folder), or when
    recipe or inputs are not those of the run to resume; LinearizeError when the work itself fails.
    """
    _check_place(recipe, out)
    if resume:
        Manifest.read(out)
    else:
        _check(recipe)
        machine = manifest.machine(pick_device(recipe.device), torch.get_num_threads())
        with atomic_dir(out) as new:
            Manifest.new(recipe, text, overrides, machine).write(new)
    with manifest.lock(out):
        folder = RunFolder(out)
        folder.remove(*out.glob(".*.partial-*"))  # left by a process that was killed
        record = Manifest.read(out)
        _take_recipe(record, folder, Manifest.new(recipe, text, overrides, record.machine))
        torch.set_num_threads(record.machine["threads"])
        machine = manifest.machine(pick_device(recipe.device), torch.get_num_threads())
        if changed := manifest.first_difference(record.machine, machine):
            console.print(f"note: {changed} since the run began, so its weights may differ a little", markup=False)
        try:
            Run(recipe, out, record).execute(keep_steps)
        except BadInput:
            if not resume and "convert" not in record.steps:
                folder.discard()
            raise
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted; the same command with --resume continues {out}") from None


def _take_recipe(record: Manifest, folder: RunFolder, new: Manifest) -> None:
    """Goes on by the recipe of `new`, which may differ from the one of `record` in `eval` while nothing is measured.

    Raises BadInput for any other difference.
    """
    old, given = record.recipe["resolved"], new.recipe["resolved"]
    if (changed := manifest.first_difference(old, given)) is None:
        return
    rest = manifest.first_difference(old | {"eval": None}, given | {"eval": None})
    if rest is not None or "eval" in record.steps:
        raise BadInput(f"{folder.out}: is a run of another recipe ({rest or changed}); start a new run in a new folder")
    if any(old["eval"].get(name) != value for name, value in given["eval"].items() if name not in EVAL_SPEED):
        folder.remove(folder.step("eval"))  # measures of the other kind
    console.print(f"note: {changed}; the run goes on by the new recipe", markup=False)
    record.recipe = new.recipe
    record.write(folder.out)


def _check_place(recipe: Recipe, out: Path) -> None:
    """Raises BadInput when the run's folder would lie in a folder that the run reads, which it must find unchanged."""
    inputs = {"base": checkpoint.locate_base(recipe.base), "eval.data": recipe.eval.data}
    for field, path in inputs.items():
        if path is not None and Path(path).is_dir() and out.resolve().is_relative_to(Path(path).resolve()):
            raise BadInput(f"--out {out}: lies in the folder {path}, which the recipe reads as {field}; name another")


def _check(recipe: Recipe) -> None:
    """What can be said of a recipe before anything is fetched or written. Raises BadInput."""
    pick_device(recipe.device)
    suite = suites.load(recipe.eval.suite)
    suites.check_files(suite, Path(recipe.eval.data) if recipe.eval.data is not None else None)
    if suite.needs_text and recipe.eval.text is None:
        raise BadInput(
            f"eval.text: suite {suite.name} scores held-out text; name a source under `data:` that holds some out"
        )
    for name, source in recipe.data.items():
        if isinstance(source, FileSource) and not Path(source.path).exists():
            raise BadInput(f"data.{name}.path: {source.path}: there is no such file")
