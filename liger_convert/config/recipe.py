"""The recipe: one YAML file that says what is converted, how it is trained and how it is measured.

`load` reads it (with `--set` overrides) into frozen pydantic models; every mistake becomes one BadInput sentence with
the file, the path of the field and the nearest right name. Nothing here imports torch: mixer options and layer numbers
are checked by the plan, which knows the mixers and the depth of the base.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError, model_validator

from liger_convert.config import recipe_errors, yaml_file
from liger_convert.config.adapt import Adapt
from liger_convert.config.fields import Count, Name, Processes, Rows, Seed, Strict, refuse
from liger_convert.config.layers import LayerChoice, Layers, LongWindows, resolve_layers
from liger_convert.config.names import LONG, MAIN, SOFTMAX
from liger_convert.config.sources import AnySource, PydocSource, TeacherSource, meet
from liger_convert.config.stages import DECAYS_BASE, AlignStage, AnyStage
from liger_convert.config.written_mixer import WrittenMixer
from liger_convert.utils.errors import BadInput


def _a_number(value: object) -> object:
    """Refuses true, which Python takes for 1."""
    if isinstance(value, bool):
        refuse("", f"should be 1, not {str(value).lower()}")
    return value


class BaseOptions(Strict):
    """How the base is fetched. Remote code and pickle files run other people's code, so they are off by default."""

    revision: str | None = None
    """Branch, tag or commit of a hub id; by default the hub's default branch."""
    trust_remote_code: bool = False
    """Run Python code that comes with the base."""
    allow_pickle: bool = False
    """Read weights from pickle files, which can run code when they are read."""


class Export(Strict):
    """How the finished model is written."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the exported weights; `auto` keeps the base's."""


class Eval(Strict):
    """How the finished model is measured."""

    suite: str = "quick"
    """Name of a suite that comes with the package, or a file like those in eval/suites."""
    data: str | None = None
    """Folder of local files for the tasks; by default they come from the hub."""
    limit: Count | None = None
    """Rows per task, instead of the suite's own limits."""
    text: str | None = None
    """Source under `data:` whose held-out part to measure on."""
    other_text: str | None = None
    """Source under `data:` with text of another kind than is trained on; all of it is used to measure. By default
    `pydoc`, unless the run reads that."""
    batch_size: Rows = 4
    """Rows measured at a time."""
    processes: Processes = 1
    """Models measured at once, on as many GPUs as there are. Not used by a run of several processes, all of which
    measure."""


class Recipe(Strict):
    """One YAML file that says what is converted, how it is trained and how it is measured."""

    version: Annotated[Literal[1], BeforeValidator(_a_number)]
    """Version of the recipe's format: 1."""
    name: Name
    """Name of the run and of its model: letters, digits, _, - and ."""
    base: Annotated[str, Field(min_length=1)]
    """The base: a model folder, a hub id, a .gguf file or `package:MODULE/FILE`."""
    base_options: BaseOptions = BaseOptions()
    """How the base is fetched."""
    mixer: WrittenMixer
    """What replaces attention in the layers called `main`."""
    mixers: dict[Name, WrittenMixer] = Field(default_factory=dict)
    """More mixers by name, for use in `layers`."""
    layers: Layers = "all"
    """Which layers become linear: `all`, a pattern such as LLLN, a list of names, or a mapping with one choice. If some
    of the base's layers already use sliding windows, those stay unchanged unless they are named, and patterns, counts
    and fractions refer to the other layers."""
    export: Export = Export()
    """How the finished model is written."""
    device: str = "auto"
    """Where to compute: `auto` (a GPU if there is one), `cpu` or `cuda`."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of matrix products; `auto` is bfloat16 if that is fast."""
    sharding: Literal["auto", "none", "full"] = "auto"
    """Whether several GPUs share the weights of a stage, each holding a slice of them. `full`: they do. `none`: each
    GPU holds all weights. `auto`: `full` for stages whose weights do not all fit one GPU."""
    sequence_parallel: Processes = 1
    """How many GPUs share each row, for rows longer than one GPU can hold; each takes a part of the tokens. The number
    of GPUs must be a multiple of it."""
    seed: Seed = 0
    """Seed of everything random."""
    data: dict[Name, AnySource] = Field(default_factory=dict)
    """Sources of text by name."""
    stages: list[AnyStage] = Field(default_factory=list)
    """Training stages, in order."""
    when_worse: Literal["go_back", "stop", "warn", "ignore"] = "go_back"
    """What to do if a stage makes the model worse on text of another kind or at repeating a text. `go_back` trains the
    stage again at a quarter of its rates, and leaves it out if that does not help; later stages keep the lower rates. A
    model that ends up worse than the untrained window is not exported. `stop` ends the run, `warn` only says so,
    `ignore` does not measure."""
    adapt: Adapt | None = None
    """Adapt the stages to the base and the GPU; without it they are used unchanged."""
    eval: Eval = Eval()
    """How the finished model is measured."""

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        for name in (MAIN, SOFTMAX):
            if name in self.mixers:
                refuse(
                    f"mixers.{name}", "this name is reserved (`main` is `mixer:`, `softmax` leaves a layer as it is)"
                )
        if self.long_windows is not None and LONG in self.mixers:
            refuse(f"mixers.{LONG}", "this name is that of the layers in layers.long_windows, so use another")
        names = [MAIN, SOFTMAX, *self.mixers]
        where, written = "layers", self.layers
        if isinstance(written, LayerChoice):
            where, written = "layers.repeat", written.repeat or []
        for i, layer in enumerate(written if isinstance(written, list) else []):
            if layer not in names:
                refuse(f"{where}[{i}]", recipe_errors.unknown(layer, names, "name"))
        if self.measures_layers and not self.given_texts:
            why = "the layers are chosen on text that exists before the run, so add another source under `data:`"
            refuse("layers.softmax_auto" if self.softmax_auto is not None else "layers.long_windows.layers", why)
        for i, stage in enumerate(self.stages):
            for name in stage.sources:
                if name not in self.data:
                    why = recipe_errors.unknown(name, self.data, "source under `data:`")
                    refuse(f"stages[{i}].{stage.where(name)}", why)
                if stage.responses_only and not self.data[name].has_responses:
                    refuse(f"stages[{i}].loss_on", f"source {name!r} is text without responses, so set it to all")
            if self.adapt is not None and self.adapt.lora_variant == "pissa" and stage.weight_decay:
                refuse(f"stages[{i}].weight_decay", DECAYS_BASE)
            trained = any(earlier.learning_rates.mixer is not None for earlier in self.stages[:i])
            if isinstance(stage, AlignStage) and stage.fits_mixers and trained:
                refuse(f"stages[{i}].calibrate", "would overwrite the mixers that earlier stages trained; use false")
        self._check_prompts()
        text = self.eval.text
        if text is not None:
            if text not in self.data:
                refuse("eval.text", recipe_errors.unknown(text, self.data, "source under `data:`"))
            if not self.data[text].has_held_out:
                refuse("eval.text", f"source {text!r} holds nothing out, so set data.{text}.held_out")
            for reader in sorted(self.read_by_run - {text}):
                if not self.data[reader].spares(self.data[text]):
                    why = f"the run would also read what source {text!r} holds out to be measured (eval.text)"
                    refuse(f"data.{reader}", f"{why}, so give both the same format and held_out, or drop one of them")
        self._check_other_text()
        return self

    def _check_prompts(self) -> None:
        """Raises a refusal where the text that a base is to continue is not there before it writes."""
        for name, teacher in self.teachers.items():
            if teacher.prompts is None:
                continue
            if teacher.prompts not in self.data:
                why = recipe_errors.unknown(teacher.prompts, self.data, "source under `data:`")
                refuse(f"data.{name}.prompts", why)
            if teacher.prompts in self.teachers:
                why = f"source {teacher.prompts!r} is written by the base, so name text that exists before the run"
                refuse(f"data.{name}.prompts", why)

    def _check_other_text(self) -> None:
        name = self.eval.other_text
        if name is None:
            return
        if name not in self.data:
            refuse("eval.other_text", recipe_errors.unknown(name, self.data, "source under `data:`"))
        if name in self.teachers:
            refuse(
                "eval.other_text", f"source {name!r} is written by the base, so name text that exists before the run"
            )
        for reader in sorted(self.read_by_run):
            if reader == name or meet(self.data[reader].places, self.data[name].places):
                why = f"source {name!r} is text that the run reads as {reader!r}, so name text of another kind"
                refuse("eval.other_text", why)

    @property
    def read_by_run(self) -> set[str]:
        """The sources that are trained on, that the base continues for it, whose held-out part is measured on, or that
        layers are chosen on."""
        measured = {self.eval.text} if self.eval.text is not None else set()
        names = set(self.trained_on) | self._with_prompts(measured)
        return names | set(self.given_texts[:1] if self.measures_layers else ())

    @property
    def trained_on(self) -> dict[str, AnySource]:
        """The sources that are trained on, and those that the base continues for it, by name."""
        names = self._with_prompts({name for stage in self.stages for name in stage.sources})
        return {name: source for name, source in self.data.items() if name in names}

    def _with_prompts(self, names: set[str]) -> set[str]:
        """These sources, and those that the base continues where it writes one of them."""
        return names | {prompts for name in names & self.teachers.keys() if (prompts := self.teachers[name].prompts)}

    @property
    def other_source(self) -> AnySource | None:
        """The text of another kind than is trained on: `eval.other_text`, or Python's documentation unless the run
        reads that; None then."""
        if self.eval.other_text is not None:
            return self.data[self.eval.other_text]
        read = any(isinstance(self.data[name], PydocSource) for name in self.read_by_run)
        return None if read else PydocSource()

    @property
    def softmax_auto(self) -> float | None:
        """How many layers, or which fraction of them, stay softmax, where a measurement chooses which."""
        return self.layers.softmax_auto if isinstance(self.layers, LayerChoice) else None

    @property
    def long_windows(self) -> LongWindows | None:
        """The linear layers with a longer window than the others."""
        return self.layers.long_windows if isinstance(self.layers, LayerChoice) else None

    @property
    def measures_windows(self) -> bool:
        """Whether the run chooses by measurement which layers have a longer window."""
        return self.long_windows is not None and self.long_windows.undecided

    @property
    def measures_layers(self) -> bool:
        """Whether the run chooses layers by measurement: those that stay softmax, or those with a longer window."""
        return self.softmax_auto is not None or self.measures_windows

    @property
    def selected_by(self) -> str:
        """How the softmax layers are chosen where a step of the run chooses them: copy, kl or gates."""
        return self.layers.select if isinstance(self.layers, LayerChoice) else "copy"

    def layer_names(self, depth: int, sliding: Collection[int] = ()) -> list[str]:
        """What each layer of a base of `depth` layers becomes: a mixer's name or softmax. `sliding`: those that have a
        window of the base's own where others see all tokens. Raises BadInput."""
        return resolve_layers(self.layers, depth, [MAIN, *self.mixers], sliding)

    @property
    def given_texts(self) -> list[str]:
        """The names of the sources that are there before the run, those of plain text first. Layers are chosen on the
        first one."""
        given = [name for name in self.data if name not in self.teachers and name != self.eval.other_text]
        return sorted(given, key=lambda name: self.data[name].has_responses)

    def with_layers(self, softmax: list[int], long: list[int]) -> Recipe:
        """This recipe with its choice of layers made: the layers `softmax` stay softmax. If the recipe does not name
        the layers with the longer window of `layers.long_windows` itself, they are the layers `long`."""
        windows = self.long_windows
        if windows is not None and windows.undecided:
            windows = LongWindows(layers=long, window=windows.window)
        return self.model_copy(update={"layers": LayerChoice(softmax=softmax, long_windows=windows)})

    def with_layer_choice(self, **fields: Any) -> Recipe:
        """This recipe with other values in these fields of its choice of layers."""
        assert isinstance(self.layers, LayerChoice)
        return self.model_copy(update={"layers": self.layers.model_copy(update=fields)})

    @property
    def stage_names(self) -> list[str]:
        """The name of each stage's step: its number, from 1, and its kind."""
        return [f"{number}-{stage.kind}" for number, stage in enumerate(self.stages, 1)]

    def with_stage(self, index: int, stage: AnyStage) -> Recipe:
        """This recipe with another stage in place of stage `index`, from 0."""
        return self.with_stages([*self.stages[:index], stage, *self.stages[index + 1 :]])

    def with_stages(self, stages: Sequence[Any]) -> Recipe:
        """This recipe with other stages, as data or as they are."""
        return self.model_copy(update={"stages": _STAGES.validate_python(list(stages))})

    def stage_seed(self, index: int) -> int:
        """The seed of stage `index`, from 0: stages on one source should not see its documents in the same order."""
        return self.seed + index

    @property
    def teachers(self) -> dict[str, TeacherSource]:
        """The sources that the base writes itself."""
        return {name: source for name, source in self.data.items() if isinstance(source, TeacherSource)}

    def dump(self) -> dict[str, Any]:
        """Everything resolved, as plain JSON; of a mixer only what was written."""
        specs = {name: spec.to_dict() for name, spec in self.mixers.items()}
        return self.model_dump(mode="json") | {"mixer": self.mixer.to_dict(), "mixers": specs}

    def fingerprint(self) -> str:
        """sha256 of the resolved recipe: two recipes with the same one ask for the same run."""
        return hashlib.sha256(json.dumps(self.dump(), sort_keys=True).encode()).hexdigest()


_STAGES: TypeAdapter[list[AnyStage]] = TypeAdapter(list[AnyStage])


def build(data: dict[str, Any], where: str) -> Recipe:
    """The recipe in plain data. Raises BadInput, one sentence that starts with `where`."""
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise BadInput(f"{where}: {recipe_errors.sentence(error, Recipe, data)}") from None


def parse(text: str, overrides: Sequence[str] = (), *, where: str = "recipe") -> Recipe:
    """The recipe in YAML text with the `--set` overrides applied. Raises BadInput."""
    data = yaml_file.parse(text, where)
    if not isinstance(data, dict):
        raise BadInput(f"{where}: a recipe is a mapping of fields (version, name, base, mixer, …)")
    for override in overrides:
        data = yaml_file.override(data, override)
    return build(data, where + " (after --set)" * bool(overrides))


def load(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in the file at `path`. Raises BadInput."""
    return parse(yaml_file.read(path), overrides, where=str(path))
