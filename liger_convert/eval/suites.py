"""Suites: YAML files that say what is measured, and the local files that tasks may read instead of the hub."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from liger_convert.config import recipe_errors, resources, yaml_file
from liger_convert.config.fields import Count, Length, Strict, between, refuse
from liger_convert.eval import ruler
from liger_convert.utils.errors import BadInput

Draws = Annotated[int, between(2, 10**6)]  # of one there is no standard error
MOST_TOKENS = 10**9  # of one measure: they are in memory all at once
MOST_LENGTH = 10**7  # of a text of RULER's
POSITIONS = "_nll_at_"  # between a text's name and the end of a range of positions, in the name of their loss
FIRST_END = 256  # of the positions whose loss is shown; each bucket after the first is as long as all before it


# `held_out` is text of the kind that is trained on, `other` text of another kind
Source = Literal["held_out", "other"]
KINDS: dict[Source, str] = {"held_out": "held-out text", "other": "text of another kind"}
NAMES: dict[Source, str] = {"held_out": "text", "other": "other"}


def _name(fields: dict[str, Any]) -> str:
    return NAMES[fields.get("source", "held_out")]


class SourceMeasure(Strict, ABC):
    """What is measured on text of one kind, under a name that says which: `other` or `other_…` is of the other."""

    source: Source = "held_out"
    name: str = Field(default_factory=_name)
    window: Length = 1024
    windows: Draws = 64

    @property
    @abstractmethod
    def metrics(self) -> list[str]:
        """The names under which it is reported."""

    @model_validator(mode="after")
    def _named_after_its_source(self) -> SourceMeasure:
        if (self.source == "other") != self.name.startswith(NAMES["other"]):
            refuse("name", "a measure of `source: other`, and no other, has a name that begins with other")
        return self


class TextMeasure(SourceMeasure):
    """Perplexity of text, reported as `<name>_ppl` and `<name>_byte_ppl`; see `measures.text_perplexity`."""

    score_from: Count = 1

    @property
    def metrics(self) -> list[str]:
        return [f"{self.name}_ppl", f"{self.name}_byte_ppl"]

    @model_validator(mode="after")
    def _scores_something(self) -> TextMeasure:
        if self.score_from >= self.window:
            refuse("score_from", f"should be below the window of {self.window} tokens, or nothing is scored")
        return self


class PositionMeasure(SourceMeasure):
    """Loss of text by its distance from a window's start, reported as `<name>_nll_at_<end>` for positions up to 256, on
    from there to 512, to 1,024, and so on; see `measures.position_losses`. It ends with the base's context, or with
    half of the text if that is shorter. If the windows are shorter, there are more of them, so that as many tokens are
    read."""

    window: Annotated[Length, between(FIRST_END, 10**8)] = 8192
    windows: Draws = 16

    @property
    def ends(self) -> list[int]:
        return [FIRST_END << i for i in range((self.window // FIRST_END).bit_length())]

    @property
    def metrics(self) -> list[str]:
        return [f"{self.name}{POSITIONS}{end}" for end in self.ends]

    def at_most(self, tokens: int) -> PositionMeasure:
        """The same measure with windows of at most so many tokens."""
        window = min(self.window, tokens)
        return self.model_copy(update={"window": window, "windows": self.windows * (self.window // max(1, window))})


class CopyMeasure(Strict):
    """Loss on a repetition, reported as `copy_nll_<length>`, of random tokens as `copy_uniform_nll_<length>`; see
    `measures.copy_loss`. lengths: a curve, of which only those are measured that fit into the base's context twice."""

    length: Length = 256
    lengths: list[Length] = Field(default_factory=list)
    draws: Draws = 64
    tokens: Literal["text", "uniform"] = "text"

    @property
    def each(self) -> list[CopyMeasure]:
        """One measure for each length."""
        if not self.lengths:
            return [self]
        return [CopyMeasure(length=length, draws=self.draws, tokens=self.tokens) for length in self.lengths]

    @property
    def metrics(self) -> list[str]:
        name = f"copy{'_uniform' * (self.tokens == 'uniform')}_nll"
        return [f"{name}_{length}" for length in self.lengths or [self.length]]

    @model_validator(mode="after")
    def _consistent(self) -> CopyMeasure:
        if self.lengths and "length" in self.model_fields_set:
            refuse("length", "lengths already names what is repeated, so give one of the two")
        longest = max(self.lengths or [self.length])
        if self.draws * longest > MOST_TOKENS:
            refuse("draws", f"{self.draws:,} draws of {longest:,} tokens are more than {MOST_TOKENS:,} tokens")
        return self


class AgreementMeasure(Strict):
    """How much of what the base writes the model would have written, reported as `agreement/…`; see `agreement`.

    The base writes up to `tokens` after each of the prompts, which are cut from text of `source`."""

    source: Source = "other"
    prompts: Draws = 32
    prompt_tokens: Length = 512
    tokens: Count = 64

    @property
    def metrics(self) -> list[str]:
        return ["agreement/greedy_match", "agreement/common_prefix", "agreement/chat_match"]


# the metrics of RULER's tasks are numbers, and YAML need not quote them
Metric = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) is int else value)]


class Task(Strict):
    """A task of lm-eval, or one of ours; `metrics` of it become `<name>/<metric>`. limit: documents at most, of RULER's
    tasks for each length. include_path: a folder with the task's YAML, which says itself where its rows are. shots: if
    left out, those of that YAML (num_fewshot), and none of other tasks."""

    name: str
    shots: Annotated[int, between(0, 1000)] | None = None
    metrics: Annotated[list[Metric], Field(min_length=1)]
    limit: Count | None = None
    needs_data: bool = False  # left out when no local data is given
    include_path: str | None = None

    @property
    def of_ruler(self) -> bool:
        return self.name in ruler.NAMES and self.include_path is None

    @property
    def id(self) -> str:
        """What the harness knows it as."""
        return f"{self.name}_{'_'.join(self.metrics)}" if self.of_ruler else self.name

    @property
    def each(self) -> list[Task]:
        """What is measured at once: of RULER's tasks one length."""
        return [self.model_copy(update={"metrics": [m]}) for m in self.metrics] if self.of_ruler else [self]

    @model_validator(mode="after")
    def _lengths_are_numbers(self) -> Task:
        for metric in self.metrics if self.of_ruler else []:
            if not (metric.isdecimal() and ruler.LEAST <= int(metric) <= MOST_LENGTH):
                bounds = f"from {ruler.LEAST} to {MOST_LENGTH:,}"
                refuse("metrics", f"those of {self.name} are the lengths of its texts in tokens, {bounds}")
        if self.of_ruler and self.shots:
            refuse("shots", f"{self.name} has none; its texts hold their own examples")
        return self


class Suite(Strict):
    name: str
    description: str
    text: list[TextMeasure] = Field(default_factory=list)
    positions: list[PositionMeasure] = Field(default_factory=list)
    copying: list[CopyMeasure] = Field(default_factory=list)
    agreement: AgreementMeasure | None = None
    tasks: list[Task] = Field(default_factory=list)

    @model_validator(mode="after")
    def _consistent(self) -> Suite:
        names = [metric for measure in self.of_text for metric in measure.metrics]
        names += [metric for copying in self.copying for metric in copying.metrics]
        names += self.agreement.metrics if self.agreement is not None else []
        names += [task.name for task in self.tasks]
        if not names:
            refuse("", "it measures nothing; give at least one of text, positions, copying, agreement and tasks")
        for name, times in Counter(names).items():
            if times > 1:
                refuse("", f"{name} would be measured {times} times; keep one, or name them apart")
        return self

    @property
    def of_text(self) -> list[SourceMeasure]:
        return [*self.text, *self.positions]

    def lengths(self, begin: int = 0) -> dict[str, int]:
        """How many tokens of a text the model reads for each metric. begin: how many the tokenizer puts before it."""
        texts = {metric: text.window for text in self.text for metric in text.metrics}
        texts |= {metric: end for one in self.positions for metric, end in zip(one.metrics, one.ends)}
        copies = [one for copying in self.copying for one in copying.each]
        return texts | {one.metrics[0]: begin + 2 * one.length for one in copies}

    def text_tokens(self, source: Source = "held_out") -> int:
        """Tokens of `source` for the two windows or spans without which there is an error; 0 when it reads none."""
        spans = [measure.window for measure in self.text if measure.source == source]
        spans += [FIRST_END for measure in self.positions if measure.source == source]  # shorter than its window
        if source == "held_out":
            spans += [one.length for copying in self.copying if copying.tokens == "text" for one in copying.each]
        if self.agreement is not None and self.agreement.source == source:
            spans.append(self.agreement.prompt_tokens)
        return 2 * max(spans, default=0)

    @property
    def needs_text(self) -> bool:
        """Whether it reads held-out text."""
        return self.text_tokens() > 0

    def needs_held_out(self, *, has_other: bool) -> bool:
        """Whether it reads held-out text. Without text of another kind its prompts are held-out text, too."""
        return self.needs_text or (self.needs_other and not has_other)

    @property
    def needs_other(self) -> bool:
        """Whether it reads text of another kind."""
        return self.text_tokens("other") > 0

    def tasks_for(self, data_dir: Path | None) -> list[Task]:
        return [task for task in self.tasks if not task.needs_data or task.include_path or data_dir is not None]

    def with_tasks_of(self, include_path: Path, names: Collection[str]) -> Suite:
        """This suite with the tasks called `names` taken from the folder `include_path`. Raises BadInput when it has
        none of them."""
        found = [task.name for task in self.tasks if task.name in names]
        if not found:
            there = ", ".join(sorted(names)) or "none"
            raise BadInput(f"{include_path}: has no task of suite {self.name}; the tasks there are {there}")
        update = {"include_path": str(include_path)}
        tasks = [task.model_copy(update=update) if task.name in found else task for task in self.tasks]
        return self.model_copy(update={"tasks": tasks})


def file_of(name: str) -> Path:
    """The YAML file that a suite's `name` stands for, or is. Raises BadInput with the list of shipped ones."""
    return Path(name) if name.endswith((".yaml", ".yml")) else resources.suite_path(name)


def load(name: str) -> Suite:
    """The suite called `name`, or the one in that YAML file. Raises BadInput, one sentence."""
    path = file_of(name)
    data = yaml_file.parse(yaml_file.read(path), str(path))
    if not isinstance(data, dict):
        raise BadInput(f"{path}: a suite is a mapping of fields (description, text, copying, tasks, …)")
    data = {"name": path.stem} | data
    try:
        return Suite.model_validate(data)
    except ValidationError as error:
        raise BadInput(f"{path}: {recipe_errors.sentence(error, Suite, data)}") from None


ANSWER_TOKENS = 48  # that one of our own tasks leaves for an answer
NEEDLES = {f"niah_{kind}_{tokens}": tokens for tokens in (1024, 2048, 4096, 8192) for kind in ("s1", "s2", "s3")}
# Task -> split -> stem of its local file, in lm-eval's own row schema. `test` is what is scored, whatever split of the
# hub's data set that is; `fewshot` is where shots are drawn from, and may be missing where there are none. Of RULER's
# tasks the rows are made of these files, or of none.
LOCAL_FILES: dict[str, dict[str, str]] = {
    "piqa": {"test": "piqa"},
    "arc_easy": {"test": "arc_easy"},
    "arc_challenge": {"test": "arc_challenge"},
    "hellaswag": {"test": "hellaswag"},
    "winogrande": {"test": "winogrande"},
    "mmlu": {"test": "mmlu", "fewshot": "mmlu_dev"},  # all subjects in one file, with a column `subject`
    "lambada_openai": {"test": "lambada_openai"},
    "wikitext": {"test": "wikitext2_test"},
    "boolq": {"test": "boolq"},
    "sciq": {"test": "sciq"},
    "openbookqa": {"test": "openbookqa"},
    "gsm8k": {"test": "gsm8k", "fewshot": "gsm8k_train"},
    "ifeval": {"test": "ifeval"},
    "drop": {"test": "drop"},
    "swde": {"test": "swde"},
    "fda": {"test": "fda"},
    "squad_ctx": {"test": "squad_1k"},
    "drop_ctx": {"test": "drop_1k"},
    **{name: {"test": name} for name in NEEDLES},
    **{name: {stem: stem for stem in stems} for name, stems in ruler.FILES.items()},
}
SUFFIXES = (".jsonl", ".jsonl.xz", ".jsonl.gz")


def local_files(task: Task, data_dir: Path) -> dict[str, Path]:
    """The files in `data_dir` that stand for the splits of `task`. Raises BadInput naming what is missing."""
    stems = LOCAL_FILES.get(task.name)
    if stems is None:
        known = ", ".join(LOCAL_FILES)
        raise BadInput(
            f"task {task.name}: has no local form; with --data use {known}, or give its folder (include_path)"
        )
    if task.shots and "fewshot" not in stems:
        raise BadInput(f"task {task.name}: has no local file to draw shots from; with --data set its shots to 0")
    found: dict[str, Path] = {}
    for split, stem in stems.items():
        there = [path for suffix in SUFFIXES if (path := data_dir / f"{stem}{suffix}").is_file()]
        if there:
            found[split] = there[0]
        elif split != "fewshot" or task.shots:
            form = f"; each row has {ruler.FORMS[stem]}" if task.of_ruler else ""
            which = f"which task {task.name} reads{form}"
            raise BadInput(f"{data_dir}: has no {stem}.jsonl (or .jsonl.xz, .jsonl.gz), {which}")
    return found


def check_files(suite: Suite, data_dir: Path | None) -> None:
    """Raises BadInput unless every task of `suite` finds its local files: cheap."""
    if data_dir is not None:
        if not data_dir.is_dir():
            raise BadInput(f"{data_dir}: there is no such folder; name one with JSONL files for the tasks")
        for task in suite.tasks:
            if task.include_path is None:
                local_files(task, data_dir)


def check_data(suite: Suite, data_dir: Path | None, limit: int | None) -> None:
    """Raises BadInput unless every task of `suite` finds its local files and their rows, up to the `limit`, fit it:
    once, before long work, as it takes as long as reading them."""
    check_files(suite, data_dir)
    if data_dir is not None:
        for task in suite.tasks:
            for stem, file in local_files(task, data_dir).items() if task.of_ruler else ():
                ruler.read(stem, file)
    local = [task for task in suite.tasks if task.include_path or (data_dir is not None and not task.of_ruler)]
    if local:
        from liger_convert.eval.harness import check_rows  # lm-eval takes seconds to import

        check_rows(local, data_dir, limit)
