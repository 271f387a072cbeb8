"""The recipe: one YAML file that says what is converted, how it is trained and how it is measured.

`load` reads it (with `--set` overrides) into frozen pydantic models; every mistake becomes one BadInput sentence with
the file, the path of the field and the nearest right name. Nothing here imports torch: mixer options and layer numbers
are checked by the plan, which knows the mixers and the depth of the base.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from liger_convert.config import recipe_errors, yaml_file
from liger_convert.utils.errors import BadInput

MAIN = "main"
SOFTMAX = "softmax"
NAME_LENGTH = 60  # characters, so that a step's folder can be called after a name on every file system


def _whole(value: object) -> object:
    """1e6 is how people write token counts; YAML hands it over as a float."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def refuse(at: str, why: str) -> NoReturn:
    """A conflict between fields of the model under validation; `at` is the path of the guilty one below that model."""
    raise PydanticCustomError("conflict", "{why}", {"at": at, "why": why})


def _plain_name(name: str) -> str:
    if not re.fullmatch(r"\w[\w.-]*", name) or len(name) > NAME_LENGTH:
        rule = f"letters, digits, _, - and ., at most {NAME_LENGTH}, the first a letter, digit or _"
        refuse("", f"{name[:NAME_LENGTH]!r} cannot be a name; use {rule}")
    return name


def plain_name(text: str) -> str:
    """`text`, such as a folder's name, as a name that a recipe takes."""
    return re.sub(r"[^\w.-]+", "-", text).strip("-.")[:NAME_LENGTH] or "model"


# of a recipe, a source or a mixer: folders of a run are called after some of them
Name = Annotated[str, AfterValidator(_plain_name)]


def _number(value: float) -> str:
    return f"{value:,}" if value == 0 or 1e-3 <= abs(value) < 1e15 else f"{value:g}"


def between(low: float, high: float) -> AfterValidator:
    """Bounds of a number, both allowed, with a sentence that names them."""

    def check(value: float) -> float:
        if not low <= value <= high:
            refuse("", f"should be from {_number(low)} to {_number(high)}, not {_number(value)}")
        return value

    return AfterValidator(check)


# The upper bounds stand well above all that is trained, so that a slip of the keyboard is told from a large number:
# models are trained on up to 4e13 tokens, in contexts of up to 1e7, and batches of some thousand rows. What a machine
# has no room for is the plan's to say.
Count = Annotated[int, BeforeValidator(_whole), between(1, 10**9)]
Index = Annotated[int, between(0, 10**9)]
Tokens = Annotated[int, BeforeValidator(_whole), between(1, 10**15)]
Length = Annotated[int, BeforeValidator(_whole), between(2, 10**8)]  # of a row, a document, a window
Rows = Annotated[int, BeforeValidator(_whole), between(1, 10**5)]  # that are worked on at once
Processes = Annotated[int, BeforeValidator(_whole), between(1, 1024)]
Seed = Annotated[int, between(0, 2**31 - 1)]  # a stage adds its number; numpy takes less than 2**32
Rate = Annotated[float, between(1e-12, 10)]  # Adam's steps are as large as the rate, weights some hundredths
Temperature = Annotated[float, between(1e-3, 1e3)]  # of softmax
Weight = Annotated[float, between(0, 1e6)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Strict(BaseModel):
    """The base of all parts of a recipe. The text below a field describes it, here and in docs/recipes.md."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )


class BaseOptions(Strict):
    """How the base is fetched. Remote code and pickle files run other people's code and stay off unless asked for."""

    revision: str | None = None
    """Branch, tag or commit of a hub id; without it, the hub's default branch."""
    trust_remote_code: bool = False
    """Run Python code that comes with the base."""
    allow_pickle: bool = False
    """Read weights in pickle files, which can run code when they are read."""


# Of a mixer's codes, slots, sinks, states, …: each takes memory in every layer, and the most in use are some hundred.
OPTION_SIZE = 1 << 16


def _bound_options(options: dict[str, Any], path: str) -> None:
    for name, value in options.items():
        if isinstance(value, dict):
            _bound_options(value, f"{path}{name}.")
        elif isinstance(value, int | float) and not -OPTION_SIZE <= value <= OPTION_SIZE:
            refuse(f"{path}{name}", f"should be from {-OPTION_SIZE:,} to {OPTION_SIZE:,}, not {_number(value)}")


class MixerSpec(Strict):
    """A mixer as written; its further options and all defaults belong to the mixer (`mixers.resolve_spec`)."""

    model_config = ConfigDict(extra="allow")

    type: str
    window: Annotated[int, BeforeValidator(_whole), between(0, 10**8)] | None = None
    sinks: Annotated[int, between(0, OPTION_SIZE)] | None = None

    @model_validator(mode="after")
    def _bounded(self) -> MixerSpec:
        _bound_options(self.model_extra or {}, "")
        return self

    def to_dict(self) -> dict[str, Any]:
        """Only what was written, ready for `mixers.resolve_spec`."""
        return self.model_dump(mode="json", exclude_unset=True)


def _layers_kept(value: Any) -> Any:
    if value is None or (type(value) in (int, float) and 0 < value < 1):
        return value
    if type(value) in (int, float) and value >= 1 and value == int(value):
        return int(value)
    refuse("", f"should be a whole number of layers above 0, or a share of them between 0 and 1, not {value!r}")


class LayerChoice(Strict):
    """Exactly one of: every n-th layer stays softmax, these become linear, these stay softmax, so many, or such a share
    of all, stay softmax and a measurement chooses which (`pipeline.layer_selection`), these names over and over."""

    softmax_every: Annotated[int, between(2, 10**4)] | None = None
    linear: Annotated[list[Index], Field(min_length=1)] | None = None
    softmax: list[Index] | None = None
    softmax_auto: Annotated[int | float | None, BeforeValidator(_layers_kept)] = None
    repeat: Annotated[list[str], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _one(self) -> LayerChoice:
        if sum(value is not None for value in self.model_dump().values()) != 1:
            refuse("", "give exactly one of softmax_every, linear, softmax, softmax_auto and repeat")
        return self


def _lora_targets(value: object) -> object:
    if value != "attention" and not (isinstance(value, list) and value and all(isinstance(v, str) for v in value)):
        refuse("", "should be attention, or a list of projection names such as [q_proj, v_proj]")
    return value


def _layers_tag(value: object) -> str:
    if isinstance(value, dict | LayerChoice):
        return "choice"
    return "names" if isinstance(value, list | tuple) else "pattern"


def _pattern(value: str) -> str:
    if not re.fullmatch("all|[LN]*L[LN]*", value):
        refuse("", f"{value!r} is no pattern; use all, or letters such as LLLN (L becomes linear, N stays softmax)")
    return value


Layers = Annotated[
    Annotated[str, AfterValidator(_pattern), Tag("pattern")]
    | Annotated[Annotated[list[str], Field(min_length=1)], Tag("names")]
    | Annotated[LayerChoice, Tag("choice")],
    Discriminator(_layers_tag),
]


class Export(Strict):
    """How the finished model is written."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the exported weights; `auto` keeps that of the base."""


class DataSource(Strict):
    """Documents to train on, and documents kept from training to measure the perplexity on."""

    source: str
    """Where the documents come from: pydoc, file, hub or teacher."""
    held_out: Fraction = 0.0
    """Fraction of the documents that is not trained on; `eval.text` measures on it."""

    @property
    def has_held_out(self) -> bool:
        return self.held_out > 0

    @property
    def has_responses(self) -> bool:
        """Whether its documents know which tokens are responses."""
        return False


class PydocSource(DataSource):
    """The documentation every Python carries, as texts or as questions and answers: no file, no network."""

    source: Literal["pydoc"] = "pydoc"
    """`pydoc`: the documentation of the Python that runs."""
    format: Literal["text", "messages"] = "text"
    """`text` for plain texts, `messages` for questions and answers."""

    @property
    def has_responses(self) -> bool:
        return self.format != "text"


class RowSource(DataSource):
    """Rows with a text, with Alpaca's instruction, input and output, or with chat messages."""

    format: Literal["text", "alpaca", "messages"] = "text"
    """What a row holds: a text, Alpaca's instruction, input and output, or chat messages."""
    field: str | None = None
    """Column to read; without it, `text`, or `messages` for chat messages."""
    validation: str | None = None
    """Held-out documents of their own, in place of `held_out`: another file, or another split of a data set."""

    @property
    def has_held_out(self) -> bool:
        return self.held_out > 0 or self.validation is not None

    @property
    def has_responses(self) -> bool:
        return self.format != "text"

    @model_validator(mode="after")
    def _consistent(self) -> RowSource:
        if self.field is not None and self.format == "alpaca":
            refuse("field", "Alpaca rows have fixed columns, so drop it or set format to text or messages")
        if self.held_out and self.validation is not None:
            refuse("held_out", "validation already names the held-out documents, so give one of the two")
        return self


class FileSource(RowSource):
    """A .txt, .jsonl or .json file, plain or compressed (.xz, .gz)."""

    source: Literal["file"] = "file"
    """`file`: a file on this machine."""
    path: str
    """The file; a relative path starts at the working directory."""


class HubSource(RowSource):
    """A data set of the Hugging Face hub."""

    source: Literal["hub"] = "hub"
    """`hub`: a data set of the Hugging Face hub."""
    id: str
    """Id of the data set, such as yahma/alpaca-cleaned."""
    name: str | None = None
    """Configuration of the data set, where it has several."""
    split: str = "train"
    """Split to train on."""
    revision: str | None = None
    """Branch, tag or commit of the data set."""


class TeacherSource(DataSource):
    """Text that the base writes itself, sampled once a run."""

    source: Literal["teacher"] = "teacher"
    """`teacher`: text sampled from the base."""
    tokens: Tokens
    """How many tokens are written; what does not fill a last document is left out."""
    document_tokens: Length = 512
    """Tokens of each document, the prompt among them."""
    temperature: Temperature = 1.0
    """Temperature of the sampling."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample among the likeliest tokens that together have this probability."""
    batch_size: Rows = 16
    """Documents that are written at a time."""
    prompt: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None
    """Texts that documents begin with, in turn; without it, the token that begins a text."""

    @property
    def documents(self) -> int:
        """All of one length; the tokens that do not fill a last one are not written."""
        return self.tokens // self.document_tokens

    @property
    def written_tokens(self) -> int:
        return self.documents * self.document_tokens

    @property
    def held_out_documents(self) -> int:
        """At least one where any are: the first ones, since each is drawn without regard to the others."""
        return max(1, round(self.documents * self.held_out)) if self.held_out else 0

    @property
    def held_out_tokens(self) -> int:
        """At least, and known before any is written: measures may leave out the token that begins a document."""
        return self.held_out_documents * (self.document_tokens - 1)

    @model_validator(mode="after")
    def _enough(self) -> TeacherSource:
        if self.documents < 1:
            refuse("tokens", f"{self.tokens} is less than one document (document_tokens = {self.document_tokens})")
        if self.held_out_documents == self.documents:
            refuse("held_out", f"holds out all documents (there are {self.documents}), so nothing is left to train on")
        return self


AnySource = Annotated[PydocSource | FileSource | HubSource | TeacherSource, Field(discriminator="source")]


class LearningRates(Strict):
    """Peak learning rate of each parameter group; a group without one is frozen."""

    mixer: Rate | None = None
    """The new parameters: gates, feature maps, codes, and how memory and window are combined."""
    attention: Rate | None = None
    """The attention projections of the base."""
    body: Rate | None = None
    """The other weights of the base's layers: MLPs and norms."""
    embeddings: Rate | None = None
    """The token embeddings and the output head."""
    lora: Rate | None = None
    """The adapters of the stage's `lora`."""

    def trained(self) -> dict[str, float]:
        return {name: rate for name, rate in self.model_dump().items() if rate is not None}


class Lora(Strict):
    """Low-rank adapters, which train in the place of the base's own weights and are merged into them afterwards."""

    rank: Annotated[int, BeforeValidator(_whole), between(1, 1 << 16)] = 8  # no projection has a larger rank
    """Rank of each adapter."""
    alpha: Annotated[float, between(1e-6, 1e6)] = 16.0
    """What an adapter adds is scaled by alpha / rank."""
    dropout: Fraction = 0.0
    """Fraction of an adapter's inputs that is dropped in training."""
    targets: Annotated[Literal["attention"] | list[str], BeforeValidator(_lora_targets)] = "attention"
    """`attention`, the attention projections of the linearized layers, or a list of projections in all layers."""


class MixedSeqLen(Strict):
    """A second row length of a stage, and how many of its micro-batches have it."""

    seq_len: Length
    """Tokens of these rows; divides the stage's own `seq_len`."""
    fraction: Annotated[float, Field(gt=0, lt=1)]
    """Fraction of the micro-batches whose rows are cut to this length."""


class Stage(Strict):
    """What the three kinds of stages share."""

    kind: str
    """What is learned: align, distill or finetune."""
    data: str
    """Name of the source under `data:` that is trained on."""
    tokens: Tokens
    """Tokens to train on, rounded down to whole optimizer steps; a text is used again once it has all been read."""
    seq_len: Length = 512
    """Tokens of a row."""
    batch_size: Rows = 4
    """Rows of a micro-batch."""
    grad_accumulation: Rows = 1
    """Micro-batches of an optimizer step."""
    learning_rates: LearningRates
    """Peak learning rate of each parameter group; a group without one is frozen."""
    lora: Lora | None = None
    """Low-rank adapters in the place of the base's own weights."""
    warmup_ratio: Fraction = 0.05
    """Fraction of the steps in which the learning rates rise from 0."""
    schedule: Literal["cosine", "constant", "linear"] = "cosine"
    """How the learning rates fall after the warm-up."""
    weight_decay: Annotated[float, between(0, 100)] = 0.0
    """AdamW's weight decay, of the base's matrices and of adapters alone."""
    max_grad_norm: Annotated[float, between(1e-9, 1e12)] = 1.0
    """Larger gradients are scaled down to this norm; a very large number turns that off."""
    save_every: Count = 50
    """Optimizer steps between two checkpoints."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, slower."""
    compile: bool = True
    """On a GPU, compile the layers, which takes the first step a minute. With `concat_documents`, the forward and
    backward pass of a step are also captured as one CUDA graph."""
    copy_fraction: Fraction = 0.0
    """Fraction of the rows in which a stretch of text is repeated later in the row, so that a memory of what has left
    the window pays."""
    concat_documents: bool = False
    """Treat a row as one text, whatever documents it is made of; otherwise each document starts anew."""
    mixed_seq_lens: list[MixedSeqLen] = []
    """Shorter rows among those of `seq_len`: what is learned on long rows alone is lost on short ones."""

    @property
    def step_tokens(self) -> int:
        return self.batch_size * self.grad_accumulation * self.seq_len

    @property
    def steps(self) -> int:
        """Optimizer steps; the tokens that do not fill a last step are not trained on."""
        return self.tokens // self.step_tokens

    @property
    def responses_only(self) -> bool:
        """Whether the loss leaves out what is not a response."""
        return False

    @model_validator(mode="after")
    def _consistent(self) -> Stage:
        trained = self.learning_rates.trained()
        if not trained:
            refuse(
                "learning_rates",
                f"every group is frozen, so give one of {', '.join(LearningRates.model_fields)} a rate",
            )
        if self.lora is None and "lora" in trained:
            refuse("learning_rates.lora", "this stage has no `lora:` section, so add one or drop the rate")
        if self.lora is not None:
            if "lora" not in trained:
                refuse("learning_rates.lora", "the `lora:` section needs a learning rate here")
            own = [name for name in ("attention", "body", "embeddings") if name in trained]
            if own:
                refuse(
                    f"learning_rates.{own[0]}",
                    "with `lora:` the base's own weights stay frozen, so drop one of the two",
                )
        for i, other in enumerate(self.mixed_seq_lens):
            if other.seq_len == self.seq_len or self.seq_len % other.seq_len:
                refuse(
                    f"mixed_seq_lens[{i}].seq_len",
                    f"{other.seq_len} does not divide seq_len ({self.seq_len}) into pieces",
                )
        if sum(other.fraction for other in self.mixed_seq_lens) >= 1:
            refuse("mixed_seq_lens", f"its fractions leave no row of seq_len ({self.seq_len}), so make them smaller")
        if self.steps < 1:
            size = f"batch_size × grad_accumulation × seq_len = {self.step_tokens}"
            refuse("tokens", f"{self.tokens} is less than one optimizer step ({size})")
        return self


class AlignStage(Stage):
    """Each layer learns to give the attention output of the base on the base's own activations."""

    kind: Literal["align"] = "align"
    """`align`: each layer learns the base's attention output."""
    calibrate: bool = True
    """First fit each mixer that is trained in closed form on one batch, see `training.calibrate`."""

    @model_validator(mode="after")
    def _reachable(self) -> AlignStage:
        for name in ("body", "embeddings"):
            if name in self.learning_rates.trained():
                refuse(
                    f"learning_rates.{name}", "alignment gives it no gradient: each layer is fed the base's activations"
                )
        return self


class DistillStage(Stage):
    """The model learns the base's next-token distribution: KL to its logits, and optionally cross-entropy."""

    kind: Literal["distill"] = "distill"
    """`distill`: the model learns the base's next-token distribution."""
    kl_weight: Weight = 1.0
    """Weight of the KL divergence from the base's distribution."""
    ce_weight: Weight = 0.0
    """Weight of the cross-entropy on the text."""
    temperature: Temperature = 1.0
    """Temperature of both distributions in the KL divergence."""

    @model_validator(mode="after")
    def _weighted(self) -> DistillStage:
        if self.kl_weight == 0 and self.ce_weight == 0:
            refuse("kl_weight", "kl_weight and ce_weight are both 0, so there is nothing to learn")
        return self


class FinetuneStage(Stage):
    """Cross-entropy on the data itself, on the responses only or on every token."""

    kind: Literal["finetune"] = "finetune"
    """`finetune`: the model learns the data itself."""
    loss_on: Literal["responses", "all"] = "responses"
    """`responses` trains on the assistant's tokens alone, `all` on every token."""

    @property
    def responses_only(self) -> bool:
        return self.loss_on == "responses"

    @model_validator(mode="after")
    def _tells_responses(self) -> FinetuneStage:
        if self.copy_fraction and self.responses_only:
            refuse("copy_fraction", "a copied stretch has no mask of its responses, so drop it or set loss_on to all")
        return self


AnyStage = Annotated[AlignStage | DistillStage | FinetuneStage, Field(discriminator="kind")]


class Eval(Strict):
    """How the finished model is measured."""

    suite: str = "quick"
    """Name of a suite that comes with the package, or a file like those in eval/suites."""
    data: str | None = None
    """Folder of local files for the tasks; without it they come from the hub."""
    limit: Count | None = None
    """Rows of each task, in place of the suite's own limits."""
    text: str | None = None
    """Source under `data:` whose held-out part is measured on."""
    batch_size: Rows = 4
    """Rows that are measured at a time."""
    processes: Processes = 1
    """Models that are measured at once, on as many GPUs as there are."""


class Recipe(Strict):
    """One YAML file that says what is converted, how it is trained and how it is measured."""

    version: Literal[1]
    """Version of the recipe's format: 1."""
    name: Name
    """Name of the run and of its model: letters, digits, _, - and ."""
    base: Annotated[str, Field(min_length=1)]
    """The base: a model folder, a hub id, a .gguf file or `package:MODULE/FILE`."""
    base_options: BaseOptions = BaseOptions()
    """How the base is fetched."""
    mixer: MixerSpec
    """What replaces the attention of the layers called `main`."""
    mixers: dict[Name, MixerSpec] = {}
    """Further mixers by name, for use in `layers`."""
    layers: Layers = "all"
    """Which layers become linear: `all`, a pattern such as LLLN, a list of names, or a mapping with one choice."""
    export: Export = Export()
    """How the finished model is written."""
    device: str = "auto"
    """Where the run computes: `auto` (a GPU where there is one), `cpu` or `cuda`."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of matrix products; `auto` is bfloat16 where that is fast."""
    seed: Seed = 0
    """Seed of all that is drawn at random."""
    data: dict[Name, AnySource] = {}
    """Sources of text by name."""
    stages: list[AnyStage] = []
    """Training stages, in order."""
    eval: Eval = Eval()
    """How the finished model is measured."""

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        for name in (MAIN, SOFTMAX):
            if name in self.mixers:
                refuse(f"mixers.{name}", "this name is taken (`main` is `mixer:`, `softmax` stays as it is)")
        names = [MAIN, SOFTMAX, *self.mixers]
        where, written = "layers", self.layers
        if isinstance(written, LayerChoice):
            where, written = "layers.repeat", written.repeat or []
        for i, layer in enumerate(written if isinstance(written, list) else []):
            if layer not in names:
                refuse(f"{where}[{i}]", recipe_errors.unknown(layer, names, "name"))
        if self.softmax_auto is not None and not self.plain_texts:
            why = "the layers are chosen on text that is there before, so add a source of plain text under `data:`"
            refuse("layers.softmax_auto", why)
        for i, stage in enumerate(self.stages):
            if stage.data not in self.data:
                refuse(f"stages[{i}].data", recipe_errors.unknown(stage.data, self.data, "source under `data:`"))
            if stage.responses_only and not self.data[stage.data].has_responses:
                refuse(f"stages[{i}].loss_on", f"source {stage.data!r} is text without responses, so set it to all")
        text = self.eval.text
        if text is not None:
            if text not in self.data:
                refuse("eval.text", recipe_errors.unknown(text, self.data, "source under `data:`"))
            if not self.data[text].has_held_out:
                refuse("eval.text", f"source {text!r} holds nothing out, so set data.{text}.held_out")
        return self

    @property
    def softmax_auto(self) -> float | None:
        """How many layers, or which share of them, stay softmax, where a measurement chooses which."""
        return self.layers.softmax_auto if isinstance(self.layers, LayerChoice) else None

    @property
    def plain_texts(self) -> list[str]:
        """The names of the sources of plain text that is there before the run."""
        return [name for name, source in self.data.items() if not (source.has_responses or name in self.teachers)]

    def keeping(self, softmax: list[int]) -> Recipe:
        """This recipe with its choice of layers made: these stay softmax."""
        return self.model_copy(update={"layers": LayerChoice(softmax=softmax)})

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
