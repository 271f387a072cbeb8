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
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())


class BaseOptions(Strict):
    """How the base is fetched; remote code and pickle files run other people's code and stay off unless asked for."""

    revision: str | None = None
    trust_remote_code: bool = False
    allow_pickle: bool = False


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
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"


class DataSource(Strict):
    """Documents; `held_out` of them are kept from training and measure the perplexity."""

    source: str
    held_out: Fraction = 0.0

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
    format: Literal["text", "messages"] = "text"

    @property
    def has_responses(self) -> bool:
        return self.format != "text"


class RowSource(DataSource):
    """Rows with text (`field`), Alpaca's instruction/input/output, or chat messages."""

    format: Literal["text", "alpaca", "messages"] = "text"
    field: str | None = None  # the column to read; None: "text", or "messages" for messages
    validation: str | None = None

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
    """A .txt, .jsonl or .json file, plain or compressed (.xz, .gz); `validation` is another such file."""

    source: Literal["file"] = "file"
    path: str


class HubSource(RowSource):
    """A data set of the Hugging Face hub; `validation` is another split of it."""

    source: Literal["hub"] = "hub"
    id: str
    name: str | None = None
    split: str = "train"
    revision: str | None = None


class TeacherSource(DataSource):
    """Text that the base writes itself, sampled once a run, see `teacher.write`.

    prompt: what documents begin with, in turn; None: the token that begins a text.
    """

    source: Literal["teacher"] = "teacher"
    tokens: Tokens
    document_tokens: Length = 512
    temperature: Temperature = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    batch_size: Rows = 16
    prompt: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None

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


class Rates(Strict):
    """Peak learning rate of each parameter group; a group without one is frozen."""

    mixer: Rate | None = None
    attention: Rate | None = None
    body: Rate | None = None
    embeddings: Rate | None = None
    lora: Rate | None = None

    def trained(self) -> dict[str, float]:
        return {name: rate for name, rate in self.model_dump().items() if rate is not None}


class Lora(Strict):
    rank: Annotated[int, BeforeValidator(_whole), between(1, 1 << 16)] = 8  # no projection has a larger rank
    alpha: Annotated[float, between(1e-6, 1e6)] = 16.0
    dropout: Fraction = 0.0
    targets: Annotated[Literal["attention"] | list[str], BeforeValidator(_lora_targets)] = "attention"


class Shorter(Strict):
    """Shorter rows of a stage, and in which share of its micro-batches rows are cut into such."""

    seq_len: Length
    share: Annotated[float, Field(gt=0, lt=1)]


class Stage(Strict):
    """What the three kinds of stages share.

    shorter: rows of other lengths among those of `seq_len`, as many more as they are shorter: what is learned in long
    rows alone is lost on short ones.
    repeats: the share of training rows that say a stretch of their own text twice, see `data.PackedDataset`.
    joined: whether a row is one text for the model, whatever documents it is made of; otherwise each begins anew.
    compile: on a GPU, whether the layers are compiled, which takes the first step a minute, and where rows are joined
    the step's passes captured as one CUDA graph.
    """

    kind: str
    data: str
    tokens: Tokens
    seq_len: Length = 512
    batch_size: Rows = 4
    grad_accumulation: Rows = 1
    rates: Rates
    lora: Lora | None = None
    warmup: Fraction = 0.05
    schedule: Literal["cosine", "constant", "linear"] = "cosine"
    weight_decay: Annotated[float, between(0, 100)] = 0.0
    clip: Annotated[float, between(1e-9, 1e12)] = 1.0  # large: none
    save_every: Count = 50
    gradient_checkpointing: bool = False
    compile: bool = True
    repeats: Fraction = 0.0
    joined: bool = False
    shorter: list[Shorter] = []

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
        trained = self.rates.trained()
        if not trained:
            refuse("rates", "every group is frozen, so give one of mixer, attention, body, embeddings, lora a rate")
        if self.lora is None and "lora" in trained:
            refuse("rates.lora", "this stage has no `lora:` section, so add one or drop the rate")
        if self.lora is not None:
            if "lora" not in trained:
                refuse("rates.lora", "the `lora:` section needs a learning rate here")
            own = [name for name in ("attention", "body", "embeddings") if name in trained]
            if own:
                refuse(f"rates.{own[0]}", "with `lora:` the base's own weights stay frozen, so drop one of the two")
        for i, other in enumerate(self.shorter):
            if other.seq_len == self.seq_len or self.seq_len % other.seq_len:
                refuse(f"shorter[{i}].seq_len", f"{other.seq_len} does not divide seq_len ({self.seq_len}) into pieces")
        if sum(other.share for other in self.shorter) >= 1:
            refuse("shorter", f"its shares leave no row of seq_len ({self.seq_len}), so make them smaller")
        if self.steps < 1:
            size = f"batch_size × grad_accumulation × seq_len = {self.step_tokens}"
            refuse("tokens", f"{self.tokens} is less than one optimizer step ({size})")
        return self


class AlignStage(Stage):
    """Each layer learns to give the attention output of the base on the base's own activations.

    calibrate: first fit each mixer that is trained in closed form on one batch, see `training.calibrate`.
    """

    kind: Literal["align"] = "align"
    calibrate: bool = True

    @model_validator(mode="after")
    def _reachable(self) -> AlignStage:
        for name in ("body", "embeddings"):
            if name in self.rates.trained():
                refuse(f"rates.{name}", "alignment gives it no gradient: each layer is fed the base's activations")
        return self


class DistillStage(Stage):
    """The model learns the base's next-token distribution: KL to its logits, and optionally cross-entropy."""

    kind: Literal["distill"] = "distill"
    kl_weight: Weight = 1.0
    ce_weight: Weight = 0.0
    temperature: Temperature = 1.0

    @model_validator(mode="after")
    def _weighted(self) -> DistillStage:
        if self.kl_weight == 0 and self.ce_weight == 0:
            refuse("kl_weight", "kl_weight and ce_weight are both 0, so there is nothing to learn")
        return self


class FinetuneStage(Stage):
    """Cross-entropy on the data itself, on the responses only or on every token."""

    kind: Literal["finetune"] = "finetune"
    loss_on: Literal["responses", "all"] = "responses"

    @property
    def responses_only(self) -> bool:
        return self.loss_on == "responses"

    @model_validator(mode="after")
    def _tells_responses(self) -> FinetuneStage:
        if self.repeats and self.responses_only:
            refuse("repeats", "the masks that tell responses know no copies, so drop it or set loss_on to all")
        return self


AnyStage = Annotated[AlignStage | DistillStage | FinetuneStage, Field(discriminator="kind")]


class Eval(Strict):
    """`suite`: a name from eval/suites; `data`: a folder of local task files; `text`: a source with a held-out part;
    `processes`: how many of the compared models are measured at once, on as many GPUs as there are."""

    suite: str = "quick"
    data: str | None = None
    limit: Count | None = None
    text: str | None = None
    batch_size: Rows = 4
    processes: Processes = 1


class Recipe(Strict):
    version: Literal[1]
    name: Name
    base: Annotated[str, Field(min_length=1)]
    base_options: BaseOptions = BaseOptions()
    mixer: MixerSpec
    mixers: dict[Name, MixerSpec] = {}
    layers: Layers = "all"
    export: Export = Export()
    device: str = "auto"
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    seed: Seed = 0
    data: dict[Name, AnySource] = {}
    stages: list[AnyStage] = []
    eval: Eval = Eval()

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        for name in (MAIN, SOFTMAX):
            if name in self.mixers:
                refuse(f"mixers.{name}", "this name is taken (`main` is `mixer:`, `softmax` a kept layer)")
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
