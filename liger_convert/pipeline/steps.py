"""The steps of a run: what each one reads, does and writes."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from liger_convert.config.names import MAIN
from liger_convert.config.recipe import Recipe
from liger_convert.config.sources import PydocSource, TeacherSource
from liger_convert.config.stages import AlignStage
from liger_convert.data import teacher
from liger_convert.data.documents import Document, Documents, load_source, reference_documents
from liger_convert.eval import ablation, suites
from liger_convert.eval.narrow import context_of, narrow
from liger_convert.eval.suites import KINDS
from liger_convert.io import checkpoint, checksums
from liger_convert.io.files import atomic_write
from liger_convert.io.run_folder import RunFolder
from liger_convert.io.weight_scale import weight_scale
from liger_convert.pipeline import adapt, card, convert, export, preflight, report, single_steps, stage_check
from liger_convert.pipeline.manifest import Manifest
from liger_convert.pipeline.plan import Plan, make_plan
from liger_convert.pipeline.recorded_inputs import InputFiles, data_inputs, parts_by_field
from liger_convert.pipeline.stage_check import Measures, StageCheck
from liger_convert.training import merge
from liger_convert.training.batch_split import sharing_groups, whole_groups
from liger_convert.utils import processes
from liger_convert.utils.device import gpu_memory, pick_device
from liger_convert.utils.errors import BadInput, counted
from liger_convert.utils.progress import console, show_progress

# the base and the linearized model continue these, for the report
PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a lighthouse keeper who",
    "A list in Python is",
)


@dataclass(frozen=True)
class Step:
    """One step. `work` fills the given folder (or the step's `outputs`) and returns facts for the manifest."""

    name: str
    work: Callable[[Path], dict[str, Any]]
    inputs: tuple[str, ...] = ()  # the steps whose outputs it reads
    outputs: tuple[str, ...] = ()  # kept in the run's folder; empty: steps/NAME, deleted once no step needs it
    continues: bool = False  # resumes from what a killed attempt left in its folder


class RunSteps:
    """All steps of the run of `recipe` in the folder `out`, and their shared base, tokenizer, documents and plan."""

    def __init__(self, recipe: Recipe, out: Path, manifest: Manifest, keep_steps: bool):
        self.recipe, self.out, self.manifest, self.keep_steps = recipe, out, manifest, keep_steps
        self.folder, self.inputs = RunFolder(out), InputFiles(manifest.inputs)
        self.device = pick_device(recipe.device)
        self.suite = suites.load(recipe.eval.suite)
        self.documents = functools.cache(self._load_documents)
        self.other_documents = functools.cache(self._load_other_documents)
        self.preflight = functools.cache(self._preflight)

    def all(self) -> list[Step]:
        """The steps that the recipe asks for, in order."""
        stages = tuple(self.recipe.stage_names)
        writing_steps = [
            Step(f"data-{name}", functools.partial(self._write_text, name), ("base",), continues=True)
            for name in self.recipe.teachers
        ]
        training_steps = [
            Step(
                name,
                functools.partial(self._train, i, stages[:i]),
                ("base", "convert", *self._written(*self.recipe.stages[i].sources), *stages[:i]),
                continues=True,
            )
            for i, name in enumerate(stages)
        ]
        selection = [Step("select-layers", self._select_layers, ("base",))] if self.recipe.measures_layers else []
        return [
            Step("base", self._base),
            *selection,
            Step("plan", self._plan, ("base", *(step.name for step in selection))),
            Step("convert", self._convert, ("base",)),
            *([Step("check", self._check_untrained, ("base",))] if self._wants_checks else []),
            *writing_steps,
            *training_steps,
            Step("merge", functools.partial(self._merge, stages), ("convert", *stages)),
            Step("export", self._export, ("merge",), outputs=("export",)),
            Step("eval", self._eval, ("base", "export", *self._written(self.recipe.eval.text)), continues=True),
            Step("report", self._report, ("eval",), outputs=("report.md", "report.html", "report.json")),
        ]

    # --- what the steps share

    @property
    def input_paths(self) -> dict[str, Path]:
        """The file or folder of every field of the recipe that names one, including the base."""
        given = checkpoint.locate_base(self.recipe.base)
        return parts_by_field("base", given or self._base_folder) | data_inputs(self.recipe)

    @functools.cached_property
    def _base_folder(self) -> Path:
        """The base's folder. Every process looks it up again, because a manifest holds no paths of a machine. A base
        from the hub stays at the commit that the run began with."""
        options = self.recipe.base_options.model_dump()
        options["revision"] = self.manifest.steps.get("base", {}).get("commit", options["revision"])
        return checkpoint.resolve_base(self.recipe.base, self.folder.step("base"), **options)

    @property
    def _data_dir(self) -> Path | None:
        return Path(self.recipe.eval.data) if self.recipe.eval.data is not None else None

    @functools.cached_property
    def _tokenizer(self) -> Any:
        return checkpoint.load_tokenizer(self._base_folder, self.recipe.base_options.trust_remote_code)

    @functools.cached_property
    def _planned(self) -> Plan:
        step = self.manifest.steps.get("select-layers")
        if step is None:
            return self._undecided
        chosen = step["selection"]
        recipe, longer = adapt.fit_long_windows(self.recipe, self._base_config)
        made = self._make_plan(recipe.with_layers(chosen["softmax_layers"], chosen.get("long_windows", [])))
        _, choice = adapt.fit_layers(self.recipe, self._base_config)  # why they were chosen as they were
        return replace(made, adapted=(*choice, *longer, *made.adapted))

    @functools.cached_property
    def _undecided(self) -> Plan:
        """The plan of the recipe as it is, even if layers are yet to be chosen."""
        return self._make_plan(self.recipe)

    @functools.cached_property
    def _shared(self) -> Plan:
        """The plan of the stages as the processes of this run train them."""
        recipe = self._adapted.model_copy(update={"adapt": None})  # its stages are fitted already
        return self._make_plan(recipe, processes.count())

    @functools.cached_property
    def _adapted(self) -> Recipe:
        """The recipe with its stages as they are trained. Stages recorded by the plan step take precedence, because a
        run that resumes on another GPU must not adapt them again."""
        recorded = self.manifest.steps.get("plan", {}).get("stages")
        return self.recipe.with_stages(self._planned.recipe_stages if recorded is None else recorded)

    def _make_plan(self, recipe: Recipe, number: int | None = None) -> Plan:
        return make_plan(recipe, self._base_config, number, scale=self._scale, stored=self._stored)

    @property
    def _base_config(self) -> Any:
        return checkpoint.load_config(self._base_folder, self.recipe.base_options.trust_remote_code)

    @functools.cached_property
    def _scale(self) -> float | None:
        return weight_scale(self._base_folder)

    @functools.cached_property
    def _stored(self) -> Any:
        return checkpoint.stored_dtype(self._base_folder)

    def _written(self, *sources: str | None) -> tuple[str, ...]:
        """The steps that generate those of the sources that the base writes."""
        return tuple(f"data-{source}" for source in sources if source in self.recipe.teachers)

    def _load_documents(self, name: str) -> Documents:
        source, written = self.recipe.data[name], self.folder.step(f"data-{name}") / teacher.FILE
        if name == self.recipe.eval.other_text:
            source = source.model_copy(update={"held_out": 0.0})  # nothing is trained on it, and all of it is measured
        with show_progress(f"data {name}") as report:
            return load_source(source, self._tokenizer, seed=self.recipe.seed, written=written, progress=report)

    def _load_other_documents(self) -> list[Document] | None:
        """All text of another kind than the training text. None if the suite needs none, or if there is none."""
        source, name = self.recipe.other_source, self.recipe.eval.other_text
        if source is None or not self.suite.needs_other:
            return None
        if name is not None:
            documents = self.documents(name)
            return documents.train + documents.held_out
        with show_progress("data of another kind") as report:
            return load_source(source, self._tokenizer, progress=report).train

    @functools.cached_property
    def _narrowed(self) -> tuple[suites.Suite, list[str]]:
        """The part of the suite that this run can measure, and notes on the rest."""
        return narrow(
            self.suite,
            context=context_of(self._base_config),
            tokenizer=self._tokenizer,
            data_dir=self._data_dir,
            has_other=self.recipe.other_source is not None,
            has_base=True,
        )

    # --- the steps

    def _base(self, folder: Path) -> dict[str, Any]:
        path, given = self._base_folder, checkpoint.locate_base(self.recipe.base)
        self.inputs.record(parts_by_field("base", given or path))
        return {"commit": path.name} if given is None and path.parent.name == "snapshots" else {}

    def _select_layers(self, folder: Path) -> dict[str, Any]:
        plan = self._undecided
        self.read_data()
        documents = self.documents(self.recipe.given_texts[0]).train
        selection = single_steps.choose_layers(
            self.recipe, plan, documents, self._base_folder, self._tokenizer, self.device
        )
        return {"selection": selection.to_dict()}

    def _plan(self, folder: Path) -> dict[str, Any]:
        plan = self._planned.to_dict()
        self.read_data()
        stages = [stage.model_dump(mode="json") for stage in self._planned.recipe_stages]
        return {"plan": plan | {"warnings": self.preflight()}, "stages": stages}

    def read_data(self) -> None:
        """Reads all data, so that an error there stops the run in its first steps and not in its last."""
        suites.check_data(self.suite, self._data_dir, self.recipe.eval.limit)
        for name, source in self.recipe.data.items():
            if isinstance(source, TeacherSource):
                single_steps.teacher_prompts(self.recipe, name, self._tokenizer, self.documents)
            else:
                self.documents(name)
        suite, other = self._narrowed[0], self.other_documents()
        preflight.check_held_out(self.recipe, suite, self.documents, other)
        self.inputs.record(data_inputs(self.recipe))
        self.preflight()

    def _preflight(self) -> list[str]:
        """Tries before the training what could fail after it, and returns warnings. The softmax layers need not be
        chosen yet."""
        suite, notes = self._narrowed
        with show_progress("preflight") as report:
            warnings = preflight.check(
                self.recipe,
                self._undecided if processes.count() == 1 else self._make_plan(self.recipe, processes.count()),
                base_dir=self._base_folder,
                config=self._base_config,
                tokenizer=self._tokenizer,
                suite=suite,
                data_dir=self._data_dir,
                documents=self.documents,
                prompts=PROMPTS,
                out=self.out,
                keep_steps=self.keep_steps,
                report=report,
            )
        said = [f"note: suite {suite.name}: {note}" for note in notes] + [f"warning: {text}" for text in warnings]
        for sentence in said:
            console.print(sentence, markup=False, soft_wrap=True)
        return warnings

    def _convert(self, folder: Path) -> dict[str, Any]:
        with show_progress("convert") as report:
            # in the base's dtype: weights to be trained should not first be rounded to the export's dtype
            return convert.convert_checkpoint(
                self._base_folder,
                folder / "model",
                self._planned.linearization,
                seed=self.recipe.seed,
                trust_remote_code=self.recipe.base_options.trust_remote_code,
                progress=report,
            )

    def _write_text(self, name: str, folder: Path) -> dict[str, Any]:
        processes.announce({"work": "write", "name": name})
        return self._write_part(name, folder)

    def _write_part(self, name: str, folder: Path) -> dict[str, Any]:
        return single_steps.write_teacher_text(
            self.recipe, name, folder, self._base_folder, self._tokenizer, self.device, self.documents
        )

    def _check_untrained(self, folder: Path) -> dict[str, Any]:
        try:
            checks = self._stage_check
            return {"check": checks.untrained(self._planned.linearization), "checked_on": checks.text}
        except BadInput as error:  # for example a tokenizer that cannot read this text, which is no reason not to train
            console.print(f"warning: the stages are not checked: {error}", markup=False, soft_wrap=True)
            return {}

    def _train(self, index: int, before: Sequence[str], folder: Path) -> dict[str, Any]:
        self._tell_of_spare_processes(index)

        def train(factor: float, out: Path) -> dict[str, Any]:
            where = str(out.relative_to(self.out))
            task: dict[str, Any] = {"index": index, "before": list(before), "factor": factor, "out": where}
            task["shard"], task["keep_gathered"] = self._how_sharded(index)
            processes.announce({"work": "train"} | task)
            return self.train_stage(**task)

        def check(out: Path) -> dict[str, Any]:
            return self._stage_check.trained(
                self.folder.step("convert") / "model", [*self._results(before), out / "result"]
            )

        if self._checks:
            facts = stage_check.train_checked(
                self.recipe.stage_names[index],
                self.recipe.when_worse,
                folder,
                aligns=isinstance(self.recipe.stages[index], AlignStage),
                before=self._checked(before),
                train=train,
                check=check,
                first=self._lowered(before),
                text=self._checked_on,
            )
        else:
            facts = train(1.0, folder)
        return facts | {"seed": self.recipe.stage_seed(index)}

    def _tell_of_spare_processes(self, index: int) -> None:
        stage, shards, count = self._adapted.stages[index], self.recipe.sequence_parallel, processes.count()
        used = sharing_groups(stage, whole_groups(count, shards)) * shards
        if used < count:
            rows = stage.batch_size * stage.grad_accumulation
            step = f"{self.recipe.stage_names[index]}: a step has {counted(rows, 'row')}"
            note = f"note: {step}, for which {used} of the {count} processes suffice; the others do not make it faster"
            console.print(note, markup=False, soft_wrap=True)

    def _lowered(self, stages: Sequence[str]) -> float:
        """The factor on the learning rates that the last of the finished `stages` ended with. One that had to be
        lowered stays so: the rates are too high for the base, and a longer stage would do as much harm."""
        return self.manifest.steps[stages[-1]].get("rates", 1.0) if stages else 1.0

    def _how_sharded(self, index: int) -> tuple[bool, bool]:
        """Whether the processes of this run shard the weights of stage `index`, and whether they keep gathered layers.
        The first process decides for all."""
        if processes.count() == 1:
            return False, False
        room, stage = gpu_memory() if self.device.type == "cuda" else None, self._shared.stages[index]
        shard = stage.is_sharded(self.recipe.sharding, room)
        return shard, shard and stage.keeps_gathered(room)

    def train_stage(
        self, index: int, before: Sequence[str], factor: float, out: str, shard: bool, keep_gathered: bool
    ) -> dict[str, Any]:
        """Trains stage `index` (from 0), with this `factor` on its learning rates, after the stages `before`, in the
        folder `out` of the run. All processes of a run call it together. shard: they shard the weights. keep_gathered:
        they keep gathered layers."""
        return single_steps.train_stage(
            self._adapted.with_stage(index, stage_check.with_rates(self._adapted.stages[index], factor)),
            index,
            self.out / out,
            model_dir=self.folder.step("convert") / "model",
            results=self._results(before),
            documents={name: self.documents(name).train for name in self.recipe.stages[index].sources},
            base_dir=self._base_folder,
            device=self.device,
            resume=True,
            shard=shard,
            keep_gathered=keep_gathered,
        )

    @property
    def _wants_checks(self) -> bool:
        return self.recipe.when_worse != "ignore" and bool(self.recipe.stages)

    @property
    def _checks(self) -> bool:
        """Whether stages are checked: the recipe wants it, and the base and the untrained window could be measured."""
        return self._wants_checks and "check" in self.manifest.steps["check"]

    @property
    def _checked_on(self) -> str:
        """What the stages are checked on; missing in the manifests of early runs."""
        return str(self.manifest.steps["check"].get("checked_on", KINDS["other"]))

    @functools.cached_property
    def _stage_check(self) -> StageCheck:
        documents, text = self._text_of_checks()
        return StageCheck(
            self._base_folder,
            self._tokenizer,
            documents,
            self.device,
            text=text,
            precision=self.recipe.precision,
            window=self._planned.linearization["mixers"][MAIN]["window"],
        )

    def _text_of_checks(self) -> tuple[list[Document], str]:
        """Text of another kind than the training text: Python's language reference. If a data source is Python's
        documentation, it is text held out of the training data instead, if there is any. With it, what to call it."""
        if not any(isinstance(source, PydocSource) for source in self.recipe.data.values()):
            return reference_documents(self._tokenizer), KINDS["other"]
        for name, source in self.recipe.data.items():
            if source.has_held_out and not isinstance(source, TeacherSource):
                return self.documents(name).held_out, KINDS["held_out"]
        return reference_documents(self._tokenizer), "text of Python's language reference"

    def _kept(self, stages: Sequence[str]) -> list[str]:
        """Those of the finished `stages` that were kept."""
        return [name for name in stages if self.manifest.steps[name].get("kept", True)]

    def _results(self, stages: Sequence[str]) -> list[Path]:
        """The folders of weights that the finished and kept `stages` produced, in order."""
        return [
            self.folder.step(name) / self.manifest.steps[name].get("result", "result") for name in self._kept(stages)
        ]

    def _checked(self, stages: Sequence[str]) -> dict[str, Measures]:
        """The measures before the next stage: of the base, of the untrained window and, once a checked stage is kept,
        of the model."""
        untrained: dict[str, Measures] = self.manifest.steps["check"]["check"]
        kept = [name for name in self._kept(stages) if "check" in self.manifest.steps[name]]
        return untrained | ({stage_check.MODEL: self.manifest.steps[kept[-1]]["check"]} if kept else {})

    def _merge(self, stages: Sequence[str], folder: Path) -> dict[str, Any]:
        if self._checks and self.recipe.when_worse != "warn":
            stage_check.require_better(self._checked(stages), self._checked_on)
        with show_progress("merge") as report:
            merge.merge_results(self.folder.step("convert") / "model", self._results(stages), folder / "model", report)
        return {}

    def _export(self, folder: Path) -> dict[str, Any]:
        model, out = self.folder.step("merge") / "model", self.out / "export"
        with show_progress("export") as report:
            return export.export_model(
                model,
                out,
                dtype=self._planned.dtype,
                name=self.recipe.name,
                base=self.recipe.base,
                base_dir=self._base_folder,
                progress=report,
            )

    def _eval(self, folder: Path) -> dict[str, Any]:
        options: dict[str, Any] = {"processes": self.recipe.eval.processes}
        if processes.count() > 1:
            options["call_others"] = lambda: processes.announce({"work": "measure"})
        with show_progress("eval") as report:
            results = ablation.diagnose(**self._measured, **options, report=report)
        atomic_write(folder / "results.json", json.dumps(results))
        return {}

    @property
    def _measured(self) -> dict[str, Any]:
        """What the step `eval` measures, as arguments of `ablation.diagnose`."""
        options = self.recipe.eval
        return {
            "model_dir": self.out / "export",
            "base_dir": self._base_folder,
            "suite": self.suite,
            "held_out": self.documents(options.text).held_out if options.text is not None else None,
            "other": self.other_documents(),
            "data_dir": self._data_dir,
            "limit": options.limit,
            "batch_size": options.batch_size,
            "device": self.device,
            "precision": self.recipe.precision,
            "prompts": PROMPTS,
            "keep": self.folder.step("eval"),
        }

    @property
    def written_by_report(self) -> list[Path]:
        """The outputs of the step `export` that the step `report` rewrites."""
        return [self.folder.path("export", name) for name in (card.CARD, checksums.SUMS)]

    def work_along(self, work: str, **task: Any) -> None:
        """What every process except the first does with a task that the first one has announced."""
        if work == "measure":
            ablation.measure_along(**self._measured)
        elif work == "write":
            self._write_part(task["name"], self.folder.step(f"data-{task['name']}"))
        else:
            self.train_stage(**task)

    def _report(self, folder: Path) -> dict[str, Any]:
        results = json.loads((self.folder.step("eval") / "results.json").read_text(encoding="utf-8"))
        report.write_report(self.out, results, asdict(self.manifest))
        card.add_figures(self.folder.path("export"), (self.out / "report.md").read_text(encoding="utf-8"))
        checksums.renew_sum(self.folder.path("export") / card.CARD)
        self.manifest.steps["export"]["outputs"] |= checksums.sha256_of(self.written_by_report, self.out)
        return {}
