"""What measures of text and copying say about a linearized model, in plain words and as facts.

Every sentence is made of the same comparisons that the facts hold, one for each metric.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from liger_convert.eval.measures import Measurement

Models = Mapping[str, Mapping[str, Measurement]]
Relation = Literal["worse", "better", "no different"]

# Smaller differences are none: 0.1 of the 3.2 nats a token that separate a window from full attention on a repetition
# of 256 tokens, and 1 % of the perplexity of text.
COPY_GAIN = 0.1
TEXT_GAIN = 0.01
WINDOW_ALONE, WHOLE, UNTRAINED, BASE = "linearized_window_only", "linearized", "window_untrained", "base"


def verdict(models: Models) -> dict[str, Any]:
    """{"memory_used", "worse_than_untrained", "compared", "sentences"}: what the measures say about the memory.

    compared: of each metric of text, and of the longest repetition, whether the window alone is "worse", "better" or
    "no different" beside the whole model, and so is the whole beside the untrained window and beside the base.
    memory_used: whether the window alone is worse in any. worse_than_untrained: whether the model is in any, which the
    first sentence then says. Both are None when what they need was not measured. All values are better when lower.
    The standard errors are shown and decide nothing: all models read the same text, so most of what they stand for
    cancels in a difference, and what is left was not measured.
    """
    metrics = _compared(models[WHOLE])
    if not metrics:
        sentences = ["The suite measures neither text nor repetitions: no verdict."]
        return {"memory_used": None, "worse_than_untrained": None, "compared": {}, "sentences": sentences}
    pairs = {
        "window_alone": (WINDOW_ALONE, WHOLE),
        "beside_untrained": (WHOLE, UNTRAINED),
        "beside_base": (WHOLE, BASE),
    }
    compared = {
        name: {metric: relation(models, *pair, metric) for metric in metrics}
        for name, pair in pairs.items()
        if all(model in models for model in pair)
    }
    listed = {name: _listed(models, *pairs[name], found) for name, found in compared.items()}
    alone = set(compared["window_alone"].values())
    sentences = [f"{_memory(alone)} {listed['window_alone']}."]
    beside: set[Relation] = set()
    if "beside_untrained" in compared:
        beside = set(compared["beside_untrained"].values())
        said = f"{_untrained(beside)} the untrained base with only its window and sinks: {listed['beside_untrained']}."
        sentences.insert(0 if "worse" in beside else 1, said)
    if "beside_base" in compared:
        sentences.append(f"Beside the base the model is {listed['beside_base']}.")
    return {
        "memory_used": "worse" in alone,
        "worse_than_untrained": "worse" in beside if beside else None,
        "compared": compared,
        "sentences": sentences,
    }


def relation(models: Models, name: str, reference: str, metric: str) -> Relation:
    """What `name` is beside `reference`. Of two that are not finite neither is better."""
    value, other = _value(models, name, metric), _value(models, reference, metric)
    if value == other:
        return "no different"
    low, high = min(value, other), max(value, other)
    if high - low < (COPY_GAIN if metric.startswith("copy") else TEXT_GAIN * low):
        return "no different"
    return "worse" if value == high else "better"


def _memory(alone: set[Relation]) -> str:
    if {"worse", "better"} <= alone:
        return "The memory is used, for better and for worse: with the window alone the model is"
    if "worse" in alone:
        return "The memory is used: with the window alone the model is"
    if "better" in alone:
        return "THE MEMORY DOES HARM: with the window alone the model is"
    return "THE MEMORY IS UNUSED and carries nothing measurable: with the window alone the model is"


def _untrained(beside: set[Relation]) -> str:
    if {"worse", "better"} <= beside:
        return "THE MODEL IS WORSE IN PART than"
    if "worse" in beside:
        return "THE MODEL IS WORSE than"
    return "The model is better than" if "better" in beside else "THE MODEL IS NO BETTER than"


def _listed(models: Models, name: str, reference: str, found: Mapping[str, Relation]) -> str:
    """`worse in text_ppl (30.2 ± 1.6 against 26.1 ± 1.3), no different in …`: every metric with both numbers."""
    kinds: tuple[Relation, ...] = ("worse", "better", "no different")
    return "; ".join(
        f"{kind} in " + ", ".join(f"{metric} ({_numbers(models, name, reference, metric)})" for metric in there)
        for kind in kinds
        if (there := [metric for metric, what in found.items() if what == kind])
    )


def _numbers(models: Models, name: str, reference: str, metric: str) -> str:
    """Both values with their errors, in as many digits as it takes to tell them apart."""
    values = [_value(models, model, metric) for model in (name, reference)]
    digits = next((n for n in (4, 6, 9) if len({f"{value:.{n}g}" for value in values}) == len(set(values))), 17)

    def shown(model: str, value: float) -> str:
        stderr = models[model][metric]["stderr"]
        if math.isinf(value):
            return "not finite"
        return f"{value:.{digits}g}" + (f" ± {stderr:.2g}" if stderr is not None else "")

    return " against ".join(shown(model, value) for model, value in zip((name, reference), values))


def _compared(metrics: Iterable[str]) -> list[str]:
    """Of all metrics the perplexities of text by token, and the longest repetition of text."""
    text = [name for name in metrics if name.endswith("_ppl") and not name.endswith("_byte_ppl")]
    copies = sorted((name for name in metrics if re.fullmatch(r"copy_nll_\d+", name)), key=lambda name: int(name[9:]))
    return text + copies[-1:]


def _value(models: Models, name: str, metric: str) -> float:
    value = models[name][metric]["value"]
    return math.inf if value is None else value
