"""Code shared by all pages of a report: names of models, number formats, which direction is better, layer summaries."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from liger_convert.config.names import MAIN, SOFTMAX
from liger_convert.eval.suites import POSITIONS
from liger_convert.eval.verdict import COPY_GAIN, LOSS_GAIN
from liger_convert.utils.errors import counted

if TYPE_CHECKING:
    from liger_convert.eval.measures import Measurement  # imports torch

TITLES = {
    "base": "base",
    "window_only_untrained": "window only, untrained",
    "linearized": "linearized",
    "memory_ablated": "memory ablated",
    "window_ablated": "window ablated",
}
_PERPLEXITY = re.compile(r"ppl$|perplexity")
_LOSS = re.compile(r"nll|loss|bits_per_byte|brier_score")


def cell(measured: Measurement | None) -> str:
    """`23.15 ± 1.24`; empty if it was not measured."""
    if measured is None:
        return ""
    value, stderr = measured["value"], measured["stderr"]
    if value is None:
        return "not finite"
    if value >= 1e5:
        return f"{value:.1e}" + (f" ± {stderr:.0e}" if stderr is not None else "")
    digits = 3 if value < 10 else 2 if value < 1000 else 0
    return f"{value:.{digits}f}" + (f" ± {stderr:.{digits}f}" if stderr is not None else "")


def beyond_context(plan: Mapping[str, Any]) -> str:
    """A sentence on the cache sizes of `plan` at lengths that the base does not support; empty if there are none."""
    context = plan.get("context")  # absent from older reports
    if context is None or all(int(tokens) <= context for tokens in plan["cache_bytes"]):
        return ""
    return f"The base supports {context:,} tokens. Sizes beyond that only show how a cache grows."


def metric_names(models: Mapping[str, Mapping[str, Measurement]]) -> list[str]:
    """Every metric once, in the order of the suite."""
    return list(dict.fromkeys(metric for measured in models.values() for metric in measured))


def lower_is_better(metric: str) -> bool:
    """Perplexities and losses are better when lower, all else when higher."""
    return bool(_PERPLEXITY.search(metric) or _LOSS.search(metric))


def recovery(metric: str, measured: Measurement, floor: Measurement, base: Measurement) -> float | None:
    """The fraction of the gap between `floor` (an untrained window) and `base` that a model recovers; 1 is the base.

    Perplexities are compared by their logarithms, which are losses. None if one of the three is not finite, or if the
    gap is not clear: it must exceed 1 % of a perplexity, 0.1 nats of a repetition (the thresholds of the verdict), and
    for other metrics two standard errors of the difference.
    """
    values = [_scaled(metric, each["value"]) for each in (measured, floor, base)]
    if any(value is None for value in values):
        return None
    value, low, high = (float(value) for value in values if value is not None)
    gap = low - high if lower_is_better(metric) else high - low
    if not math.isfinite(gap) or gap <= max(0.0, _least_gap(metric, floor, base)):
        return None
    return (value - low) / (high - low)


def _scaled(metric: str, value: float | None) -> float | None:
    if value is None or not _PERPLEXITY.search(metric):
        return value
    return math.log(value) if value > 0 else None


def _least_gap(metric: str, floor: Measurement, base: Measurement) -> float:
    if _PERPLEXITY.search(metric) or POSITIONS in metric:
        return LOSS_GAIN
    if metric.startswith("copy"):
        return COPY_GAIN
    return 2 * math.hypot(floor["stderr"] or 0, base["stderr"] or 0)


def stage_checks(report: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Measurement]]]:
    """(title, measures) by `stage_check` of the base, of the untrained window and after each stage; empty without."""
    untrained = [(TITLES.get(name, name), measured) for name, measured in report.get("check", {}).items()]
    return untrained + [(stage["name"], stage["check"]) for stage in report["training"] if "check" in stage]


def describe_sources(sources: Mapping[str, Mapping[str, float]]) -> str:
    """`20 % chat (read 1.5 times), 80 % text (read 0.1 times)`: the tokens of a stage, by source."""
    return ", ".join(
        f"{100 * read['fraction']:g} % {name} (read {read['epochs']:g} time{'s' * (read['epochs'] != 1)})"
        for name, read in sources.items()
    )


def describe_window(mixer: Mapping[str, Any]) -> str:
    return f"window {mixer['window']}" if mixer["window"] else "unlimited window"


def describe_layers(report: Mapping[str, Any]) -> str:
    """`Of the 4 attention layers of …, 2 became …, 1 became … and 1 stayed softmax.`, in Markdown."""
    linearization = report["plan"]["linearization"]
    layers = Counter(linearization["layers"])
    mixers = [
        f"{layers[name]} became {'' if name == MAIN else f'`{name}`: '}`{spec['type']}` "
        f"({describe_window(spec)}, {counted(spec['sinks'], 'sink')})"
        for name, spec in linearization["mixers"].items()
    ]
    windows = report["plan"].get("sliding_windows", [])  # missing in early reports
    # if all layers have a window, these are not the base's sliding layers beside ones that see all tokens
    own = [window for window, name in zip(windows, linearization["layers"]) if name == SOFTMAX and None in windows]
    sliding = len(own) - own.count(None)
    stayed = [f"{layers[SOFTMAX] - sliding} stayed softmax"] if layers[SOFTMAX] > sliding else []
    stayed += [f"{sliding} kept the base's own sliding window"] if sliding else []
    of_base = f"{layers.total()} attention layers of `{report['base']}`"
    if len(mixers) == 1 and not stayed:
        all_of = f"All {of_base}" if layers.total() > 1 else f"The only attention layer of `{report['base']}`"
        return f"{all_of} {mixers[0].partition(' ')[2]}."
    *others, last = [*mixers, *stayed]
    return f"Of the {of_base}, {', '.join(others)} and {last}."
