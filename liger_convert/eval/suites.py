"""Suites: YAML files that say what is measured, and the local files that tasks may read instead of the hub."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from liger_convert.config import recipe_errors, resources, yaml_file
from liger_convert.config.recipe import Count, Length, Strict, between, refuse
from liger_convert.utils.errors import BadInput

Draws = Annotated[int, between(1, 10**6)]
MOST_TOKENS = 10**9  # of one measure: they are in memory all at once


class TextMeasure(Strict):
    """Perplexity of held-out text, reported as `<name>_ppl` and `<name>_byte_ppl`; see `measures.text_perplexity`."""

    name: str = "text"
    window: Length = 1024
    windows: Draws = 64
    score_from: Count = 1

    @property
    def metrics(self) -> list[str]:
        return [f"{self.name}_ppl", f"{self.name}_byte_ppl"]

    @model_validator(mode="after")
    def _scores_something(self) -> TextMeasure:
        if self.score_from >= self.window:
            refuse("score_from", f"should be below the window of {self.window} tokens, or nothing is scored")
        return self


class CopyMeasure(Strict):
    """Loss on a repetition, reported as `copy_nll_<length>`, of random tokens as `copy_uniform_nll_<length>`; see
    `measures.copy_loss`."""

    length: Length = 256
    draws: Draws = 64
    tokens: Literal["text", "uniform"] = "text"

    @property
    def metrics(self) -> list[str]:
        return [f"copy{'_uniform' * (self.tokens == 'uniform')}_nll_{self.length}"]

    @model_validator(mode="after")
    def _in_memory(self) -> CopyMeasure:
        if self.draws * self.length > MOST_TOKENS:
            refuse("draws", f"{self.draws:,} draws of {self.length:,} tokens are more than {MOST_TOKENS:,} tokens")
        return self


class Task(Strict):
    """A task of lm-eval, or one of ours; `metrics` of it become `<name>/<metric>`. limit: documents at most."""

    name: str
    shots: Annotated[int, between(0, 1000)] = 0
    metrics: Annotated[list[str], Field(min_length=1)]
    limit: Count | None = None
    needs_data: bool = False  # left out when no local data is given


class Suite(Strict):
    name: str
    description: str
    text: list[TextMeasure] = Field(default_factory=list)
    copying: list[CopyMeasure] = Field(default_factory=list)
    tasks: list[Task] = Field(default_factory=list)

    @model_validator(mode="after")
    def _consistent(self) -> Suite:
        names = [metric for text in self.text for metric in text.metrics]
        names += [metric for copying in self.copying for metric in copying.metrics]
        names += [task.name for task in self.tasks]
        if not names:
            refuse("", "it measures nothing; give at least one of text, copying and tasks")
        for name, times in Counter(names).items():
            if times > 1:
                refuse("", f"{name} would be measured {times} times; keep one, or name them apart")
        return self

    @property
    def text_tokens(self) -> int:
        """Held-out tokens that make the two windows or spans without which there is no error; 0 when it reads none."""
        spans = [text.window for text in self.text] + [copy.length for copy in self.copying if copy.tokens == "text"]
        return 2 * max(spans, default=0)

    @property
    def needs_text(self) -> bool:
        """Whether it scores held-out text."""
        return self.text_tokens > 0

    def tasks_for(self, data_dir: Path | None) -> list[Task]:
        return [task for task in self.tasks if data_dir is not None or not task.needs_data]


def file_of(name: str) -> Path:
    """The YAML file that a suite's `name` stands for, or is. Raises BadInput with the list of shipped ones."""
    return Path(name) if name.endswith((".yaml", ".yml")) else resources.suite_path(name)


def load(name: str) -> Suite:
    """The suite called `name`, or the one in that YAML file. Raises BadInput, one sentence."""
    path = file_of(name)
    data = yaml_file.parse(yaml_file.read(path), str(path))
    if not isinstance(data, dict):
        raise BadInput(f"{path}: a suite is a mapping of fields (description, text, copying, tasks)")
    data = {"name": path.stem} | data
    try:
        return Suite.model_validate(data)
    except ValidationError as error:
        raise BadInput(f"{path}: {recipe_errors.sentence(error, Suite, data)}") from None


# Task -> split -> stem of its local file, in lm-eval's own row schema. `test` is what is scored, whatever split of the
# hub's data set that is; `fewshot` is where shots are drawn from.
LOCAL_FILES: dict[str, dict[str, str]] = {
    "piqa": {"test": "piqa"},
    "arc_easy": {"test": "arc_easy"},
    "arc_challenge": {"test": "arc_challenge"},
    "hellaswag": {"test": "hellaswag"},
    "winogrande": {"test": "winogrande"},
    "mmlu": {"test": "mmlu", "fewshot": "mmlu_dev"},  # all subjects in one file, told apart by their column `subject`
    "lambada_openai": {"test": "lambada_openai"},
    "wikitext": {"test": "wikitext2_test"},
    "squad_ctx": {"test": "squad_1k"},
    "niah_s1_1024": {"test": "niah_s1_1024"},
    "niah_s2_1024": {"test": "niah_s2_1024"},
    "niah_s1_2048": {"test": "niah_s1_2048"},
    "niah_s2_2048": {"test": "niah_s2_2048"},
}
SUFFIXES = (".jsonl", ".jsonl.xz", ".jsonl.gz")


def local_files(task: Task, data_dir: Path) -> dict[str, Path]:
    """The files in `data_dir` that stand for the splits of `task`. Raises BadInput naming what is missing."""
    stems = LOCAL_FILES.get(task.name)
    if stems is None:
        raise BadInput(f"task {task.name}: has no local form; with --data use {', '.join(LOCAL_FILES)}")
    if task.shots and "fewshot" not in stems:
        raise BadInput(f"task {task.name}: has no local file to draw shots from; with --data set its shots to 0")
    found: dict[str, Path] = {}
    for split, stem in stems.items():
        there = [path for suffix in SUFFIXES if (path := data_dir / f"{stem}{suffix}").is_file()]
        if not there:
            raise BadInput(f"{data_dir}: has no {stem}.jsonl (or .jsonl.xz, .jsonl.gz), which task {task.name} reads")
        found[split] = there[0]
    return found


def check_files(suite: Suite, data_dir: Path | None) -> None:
    """Raises BadInput unless every task of `suite` finds its local files: cheap."""
    if data_dir is not None:
        for task in suite.tasks:
            local_files(task, data_dir)


def check_data(suite: Suite, data_dir: Path | None, limit: int | None) -> None:
    """Raises BadInput unless every task of `suite` finds its local files and their rows, up to the `limit`, fit it:
    once, before long work, as it takes as long as reading them."""
    check_files(suite, data_dir)
    if data_dir is not None and suite.tasks:
        from liger_convert.eval.harness import check_rows  # lm-eval takes seconds to import

        check_rows(suite.tasks, data_dir, limit)
