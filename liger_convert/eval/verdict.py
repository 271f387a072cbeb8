"""What measures of text and copying say about a linearized model, in plain words and as facts.

Every sentence is made of the same comparisons that the facts hold, one for each metric. Where text of two kinds is
measured, what is said of the whole model is said of the kind on which it does worse.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal

from liger_convert.eval.suites import NAMES, POSITIONS

if TYPE_CHECKING:
    from liger_convert.eval.measures import Measurement  # imports torch

Models = Mapping[str, Mapping[str, "Measurement"]]
Relation = Literal["worse", "better", "no different"]

# Smaller differences are none: 0.1 of the 3.2 nats a token that separate a window from full attention on a repetition
# of 256 tokens, and 1 % of the perplexity of text, or as much of its loss.
COPY_GAIN = 0.1
TEXT_GAIN = 0.01
LOSS_GAIN = math.log1p(TEXT_GAIN)
NO_MEMORY = "THE MODEL HAS NO MEMORY: none of its linearized layers has one, so with its memory ablated it is the same."
MEMORY_ABLATED, WHOLE, UNTRAINED, BASE = "memory_ablated", "linearized", "window_only_untrained", "base"


def verdict(models: Models, short: Collection[str] = (), reach: int = 0, *, has_memory: bool = True) -> dict[str, Any]:
    """{"memory_used", "worse_than_untrained", "compared", "sentences"}: what the measures say about the memory.

    compared: three comparisons, each a dict from metric to "worse", "better" or "no different". `memory_ablated`
        compares the model with its memory ablated with the whole model. `against_untrained` and `against_base` compare
        the whole model with the untrained window and with the base. The metrics are the perplexities of text, the loss
        at the farthest positions, and the longest repetition. All of them are better when lower.
    memory_used: whether the model with its memory ablated is worse in any metric. None if all metrics are in `short`:
        their texts are no longer than the `reach` tokens that a layer sees without its memory. Always False without
        `has_memory`, the model's: whether any of its layers has a memory. The first sentences then say that none has.
    worse_than_untrained: whether the whole model is worse than the untrained window in any metric; the first sentence
        then says so. If text of two kinds is measured, the kind counts on which the model does worse. None without a
        base.

    The standard errors are shown, but decide nothing. All models read the same text, so most of the error cancels in a
    difference, and what is left of it was not measured.
    """
    metrics = _compared(models[WHOLE])
    if not metrics:
        unknown = "Neither text nor repetitions within the base's context were measured: no verdict."
        sentences, used = ([unknown], None) if has_memory else ([NO_MEMORY, unknown], False)
        return {"memory_used": used, "worse_than_untrained": None, "compared": {}, "sentences": sentences}
    pairs = {
        "memory_ablated": (MEMORY_ABLATED, WHOLE),
        "against_untrained": (WHOLE, UNTRAINED),
        "against_base": (WHOLE, BASE),
    }
    compared = {
        name: {metric: relation(models, *pair, metric) for metric in metrics}
        for name, pair in pairs.items()
        if all(model in models for model in pair)
    }
    told = {
        name: found if name == "memory_ablated" else _worse_kinds(models, *pairs[name], found)
        for name, found in compared.items()
    }
    listed = {name: _listed(models, *pairs[name], found) for name, found in told.items()}
    ablated = set(compared["memory_ablated"].values())
    was_read = not set(metrics) <= set(short)
    used = "worse" in ablated if was_read else None
    sentences = [f"{_memory(ablated)} {listed['memory_ablated']}." if was_read else _never_read(reach)]
    if not has_memory:
        used, sentences = False, [NO_MEMORY]
    against: set[Relation] = set()
    if "against_untrained" in compared:
        against = set(told["against_untrained"].values())
        said = (
            f"{_untrained(against)} the untrained base with only its window and sinks: {listed['against_untrained']}."
        )
        sentences.insert(0 if "worse" in against else 1, said)
    if "against_base" in compared:
        sentences.append(f"Against the base the model is {listed['against_base']}.")
    return {
        "memory_used": used,
        "worse_than_untrained": "worse" in against if against else None,
        "compared": compared,
        "sentences": sentences,
    }


def relation(models: Models, name: str, reference: str, metric: str) -> Relation:
    """How `name` compares with `reference`. Of two that are not finite neither is better."""
    value, other = _value(models, name, metric), _value(models, reference, metric)
    if value == other:
        return "no different"
    low, high = min(value, other), max(value, other)
    if high - low < _least_gain(metric, low):
        return "no different"
    return "worse" if value == high else "better"


def _least_gain(metric: str, low: float) -> float:
    """The least difference from `low`, the better of two values, that counts."""
    if metric.startswith("copy"):
        return COPY_GAIN
    return LOSS_GAIN if POSITIONS in metric else TEXT_GAIN * low


def _worse_kinds(models: Models, name: str, reference: str, found: Mapping[str, Relation]) -> dict[str, Relation]:
    """Of each pair of metrics that differ only in the kind of text, such as text_far_ppl and other_far_ppl, the one in
    which `name` does worse than `reference`; the other metrics as they are."""

    def excess(metric: str) -> float:
        value, other = _value(models, name, metric), _value(models, reference, metric)
        return 1.0 if value == other else value / other

    better = set()
    for metric in found:
        of_other_kind = NAMES["other"] + metric.removeprefix(NAMES["held_out"])
        if metric.startswith(NAMES["held_out"]) and of_other_kind in found:
            better.add(min(metric, of_other_kind, key=excess))
    return {metric: relation for metric, relation in found.items() if metric not in better}


def _memory(ablated: set[Relation]) -> str:
    if {"worse", "better"} <= ablated:
        return "The memory is used, for better and for worse: with its memory ablated the model is"
    if "worse" in ablated:
        return "The memory is used: with its memory ablated the model is"
    if "better" in ablated:
        return "THE MEMORY DOES HARM: with its memory ablated the model is"
    return "THE MEMORY IS UNUSED as far as was measured: with its memory ablated the model is"


def _never_read(reach: int) -> str:
    return (
        f"WHETHER THE MEMORY IS USED IS NOT KNOWN: no text that was measured reaches beyond the window and its sinks "
        f"({reach:,} tokens), so no memory was read."
    )


def _untrained(against: set[Relation]) -> str:
    if {"worse", "better"} <= against:
        return "THE MODEL IS WORSE IN PART than"
    if "worse" in against:
        return "THE MODEL IS WORSE than"
    return "The model is better than" if "better" in against else "THE MODEL IS NO BETTER than"


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
        return _rounded(value, digits) + (f" ± {_rounded(stderr, 2)}" if stderr is not None else "")

    return " against ".join(shown(model, value) for model, value in zip((name, reference), values))


def _rounded(value: float, digits: int) -> str:
    """`160` and not `1.6e+02`, but for numbers of a million and more."""
    return f"{float(f'{value:.{digits}g}'):.{max(digits, 6)}g}"


def _compared(metrics: Collection[str]) -> list[str]:
    """Of all metrics the perplexities of text by token, the loss at the farthest positions of each text, and the
    longest repetition of text."""
    text = [name for name in metrics if name.endswith("_ppl") and not name.endswith("_byte_ppl")]
    farthest: dict[str, int] = {}
    for name in metrics:
        of_text, positions, end = name.rpartition(POSITIONS)
        if positions and end.isdigit():
            farthest[of_text] = max(farthest.get(of_text, 0), int(end))
    far = [f"{of_text}{POSITIONS}{end}" for of_text, end in farthest.items()]
    copies = sorted((name for name in metrics if re.fullmatch(r"copy_nll_\d+", name)), key=lambda name: int(name[9:]))
    return [*text, *far, *copies[-1:]]


def _value(models: Models, name: str, metric: str) -> float:
    value = models[name][metric]["value"]
    return math.inf if value is None else value
