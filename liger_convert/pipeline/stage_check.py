"""How a run checks its own training: a quick measurement after each stage, and what follows if a stage did harm.

It measures the perplexity of text of another kind than the training text, if there is some, and the loss on a repeated
text. What training on one kind of text costs shows there first. The base and the untrained window (the base with only
window and sinks in the layers that become linear) are measured once, before training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from liger_convert.config.stages import AnyStage
from liger_convert.data.documents import Document
from liger_convert.eval.ablation import window_control
from liger_convert.eval.generation import weight_dtype
from liger_convert.eval.measures import Measurement, copy_loss, text_perplexity, worse_than_frequencies
from liger_convert.eval.narrow import context_of
from liger_convert.eval.suites import KINDS, CopyMeasure, TextMeasure
from liger_convert.eval.verdict import relation
from liger_convert.io.checksums import read_checked, write_checked
from liger_convert.io.tokenizer import text_prefix
from liger_convert.model.loading import linearize_base, load_pretrained
from liger_convert.model.placing import place
from liger_convert.pipeline.adapt import changed
from liger_convert.training.merge import load_chain
from liger_convert.utils.device import compute_dtype
from liger_convert.utils.errors import LinearizeError
from liger_convert.utils.progress import Report, console, part_of, show_progress

TEXT, COPY = "other_ppl", "copy_nll"
BASE, UNTRAINED, MODEL = "base", "window_only_untrained", "linearized"

CHECK = "check.json"
FACTORS = (1.0, 0.25)  # of a stage's first learning rates, in its first and its second attempt
ADVICE = "lower its learning rates, give it more tokens or other text, or set when_worse: warn"

Measures = Mapping[str, Measurement]


@dataclass(frozen=True)
class Size:
    """How much is measured: `windows` of `window` tokens of text, and `draws` of a text of `length` tokens that is
    repeated."""

    windows: int
    window: int
    draws: int
    length: int
    batch_size: int

    def leaving(self, window: int) -> Size:
        """About as much text in pieces that leave a window of this many tokens, so that the memory is read. Unchanged
        if they would be longer than LONGEST."""
        if not self.window < 2 * window <= LONGEST:
            return self
        windows, rows = (number * self.window // (2 * window) for number in (self.windows, self.batch_size))
        return replace(self, windows=max(FEWEST, windows), window=2 * window, batch_size=max(1, rows))


FEWEST = 4  # pieces of text, so that their mean has a standard error
LONGEST = 8192  # tokens of a piece; Python's language reference has about ninety thousand

# Small enough that a measurement takes little time compared to a stage. An idle CPU measures about 8 models of 135M
# parameters per minute; a GPU measures one in seconds. A repetition of 256 tokens, as in reports, lies within a window
# of 256: it tells what a stage did to copying as such. If it reached the memory, a stage that teaches the memory could
# excuse worse text. A GPU can afford more rows, so its means vary less from one text to another.
SIZES = {"cpu": Size(8, 512, 8, 256, 2), "cuda": Size(64, 1024, 32, 256, 16)}


@dataclass(frozen=True)
class StageCheck:
    """Measures the models of one run. documents: what they are measured on. text: what sentences call that, by default
    text of another kind than the training text. window: that of the linear layers, which texts are to leave."""

    base_dir: Path
    tokenizer: Any
    documents: Sequence[Document]
    device: torch.device
    precision: str
    window: int
    text: str = KINDS["other"]

    @property
    def size(self) -> Size:
        """How much is measured."""
        return SIZES[self.device.type].leaving(self.window)

    def untrained(self, linearization: dict[str, Any]) -> dict[str, dict[str, Measurement]]:
        """The measures of the base, and of the untrained window that belongs to `linearization`."""
        dtype = weight_dtype(self.device, self.precision)
        model = load_pretrained(self.base_dir, dtype=dtype)
        base, text = self._measure(model), text_measure(model, self.size)
        del model
        if said := worse_than_frequencies(base[TEXT], self.tokenizer, self.documents, text, self.text):
            console.print(f"warning: {said}", markup=False, soft_wrap=True)
        window = linearize_base(self.base_dir, window_control(linearization), dtype=dtype)
        return {BASE: base, UNTRAINED: self._measure(window)}

    def trained(self, model_dir: Path, results: Sequence[Path]) -> dict[str, Measurement]:
        """The measures of the linearized model `model_dir` with the `results` of its stages merged in."""
        return self._measure(load_chain(model_dir, results, weight_dtype(self.device, self.precision)))

    def _measure(self, model: Any) -> dict[str, Measurement]:
        with show_progress("check") as report:
            return measure(model, self.tokenizer, self.documents, self.size, self.device, self.precision, report)


def measure(
    model: Any,
    tokenizer: Any,
    documents: Sequence[Document],
    size: Size,
    device: torch.device,
    precision: str,
    report: Report,
) -> dict[str, Measurement]:
    """A model's perplexity on `documents` and its loss on a repetition of their text. Lower is better for both. Takes
    any model of transformers, with shorter windows if its context is shorter. Raises BadInput if there are too few
    documents."""
    most, text = context_of(model.config), text_measure(model, size)
    begin = len(text_prefix(tokenizer))
    copying = CopyMeasure(length=min(size.length, (most - begin) // 2), draws=size.draws)
    options: dict[str, Any] = {"batch_size": size.batch_size, "dtype": compute_dtype(device, precision)}
    model = place(model, device)
    perplexity = text_perplexity(model, tokenizer, documents, text, **options, report=part_of(report, 0, 2))
    loss = copy_loss(model, tokenizer, documents, copying, **options, report=part_of(report, 1, 2))
    return {TEXT: perplexity[text.metrics[0]], COPY: loss[copying.metrics[0]]}


def text_measure(model: Any, size: Size) -> TextMeasure:
    """The measure of text for a model: its windows are no longer than its context."""
    return TextMeasure(source="other", window=min(size.window, context_of(model.config)), windows=size.windows)


def is_worse(measured: Measures, reference: Measures, base: Measures) -> bool:
    """Whether a model is clearly worse than `reference` on text or copying and clearly better on neither, by the
    thresholds of `verdict`. A metric that is no worse than the base's does not count as worse. If the base itself is
    worse than its window, learning to be like the base is no harm."""
    models = {MODEL: measured, UNTRAINED: reference, BASE: base}
    found = {metric: relation(models, MODEL, UNTRAINED, metric) for metric in measured}
    lost = [m for m, how in found.items() if how == "worse" and relation(models, MODEL, BASE, m) == "worse"]
    return bool(lost) and "better" not in found.values()


def sentence(measured: Measures, before: Mapping[str, Measures], text: str = KINDS["other"]) -> str:
    """`perplexity of text of another kind 17.3 (base 16.9, …); loss on a repetition …`, with all earlier measures in
    parentheses. text: what was measured on."""
    names = {TEXT: f"perplexity of {text}", COPY: "loss on a repetition"}
    whose = {BASE: "base", UNTRAINED: "untrained window", MODEL: "before this stage"}
    parts = []
    for metric, name in names.items():
        known = ", ".join(f"{whose[who]} {_number(found[metric])}" for who, found in before.items())
        parts.append(f"{name} {_number(measured[metric])} ({known})")
    return "; ".join(parts)


def _number(measured: Measurement) -> str:
    return "not finite" if measured["value"] is None else f"{measured['value']:.4g}"


def with_rates(stage: AnyStage, factor: float) -> AnyStage:
    """`stage` with `factor` times its learning rates."""
    if factor == 1.0:
        return stage
    return changed(stage, learning_rates={name: factor * rate for name, rate in stage.learning_rates.trained().items()})


def train_checked(
    name: str,
    when_worse: str,
    folder: Path,
    *,
    aligns: bool,
    before: Mapping[str, Measures],
    train: Callable[[float, Path], dict[str, Any]],
    check: Callable[[Path], dict[str, Any]],
    first: float = 1.0,
    text: str = KINDS["other"],
) -> dict[str, Any]:
    """Trains the stage called `name` in `folder` and measures the result. If that is worse than before, does what the
    recipe's `when_worse` says. Returns facts for the manifest.

    aligns: whether it is an alignment. That is measured but never undone, because it fits layers one by one, and only
        later stages make one model of them.
    before: the measures of the base, of the untrained window and, after the first stage, of the model so far.
    train: trains with this factor on the learning rates in that folder, and resumes where a killed call stopped.
    check: measures the model after the stage in that folder.
    first: the factor on the learning rates in the first attempt.
    text: what sentences call the text that is measured on.

    The facts: those of the training, `check`, `rates` (the factor on the learning rates), `result` (the path of the
    weights in `folder`) and `kept` (whether the stage is kept). Raises LinearizeError if the stage made the model worse
    and `when_worse` is `stop`.
    """
    reference = before.get(MODEL, before[UNTRAINED])
    factors = FACTORS if when_worse == "go_back" and not aligns else FACTORS[:1]
    if first != 1.0:
        told = f"{name} begins at {first:g} times its learning rates, as an earlier stage did harm"
        console.print(told, markup=False, soft_wrap=True)
    for attempt, factor in enumerate((first * factor for factor in factors), 1):
        out = folder if attempt == 1 else folder / f"attempt-{attempt}"
        out.mkdir(exist_ok=True)
        facts = train(factor, out)
        measured: dict[str, Measurement] = read_checked(out / CHECK) or check(out)
        write_checked(out / CHECK, measured)
        result = "result" if attempt == 1 else f"{out.name}/result"
        facts |= {"check": measured, "rates": factor, "result": result, "kept": True}
        worse = not aligns and is_worse(measured, reference, before[BASE])
        lowered = f" at {factor:g} times its learning rates" * (factor != 1)
        told = f"after {name}{lowered}: {sentence(measured, before, text)}"
        console.print(f"{'WORSE ' * worse}{told}", markup=False, soft_wrap=True)
        if not worse or when_worse == "warn":
            return facts
    if when_worse == "stop":
        raise LinearizeError(f"{name} made the model worse: {sentence(measured, before, text)}; {ADVICE}")
    console.print(f"{name} is left out: the run continues with the model as it was before", markup=False)
    return facts | {"kept": False}


def require_better(checked: Mapping[str, Measures], text: str = KINDS["other"]) -> None:
    """Raises LinearizeError if no stage was kept, or if the model ends up worse than the untrained window."""
    if MODEL not in checked:
        raise LinearizeError(f"no stage made the model better than it was untrained, so nothing is exported; {ADVICE}")
    if is_worse(checked[MODEL], checked[UNTRAINED], checked[BASE]):
        before = {name: checked[name] for name in (BASE, UNTRAINED)}
        why = f"the model is worse than its untrained window: {sentence(checked[MODEL], before, text)}"
        raise LinearizeError(f"{why}; nothing is exported; {ADVICE}")
