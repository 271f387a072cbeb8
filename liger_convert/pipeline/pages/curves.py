"""Metrics that are measured at several lengths, as curves: copying, needles, and the loss by position."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from liger_convert.pipeline.pages.common import cell

if TYPE_CHECKING:
    from liger_convert.eval.measures import Measurement  # imports torch


@dataclass(frozen=True)
class Kind:
    """Metrics whose names match `pattern`. Its group `length` is the x value. If it has a group `name`, each name gives
    a curve."""

    pattern: re.Pattern[str]
    title: str
    x: str
    y: str


KINDS = (
    Kind(re.compile(r"copy_nll_(?P<length>[1-9]\d{0,11})"), "Copying text", "tokens said twice", "nats per token"),
    Kind(
        re.compile(r"copy_uniform_nll_(?P<length>[1-9]\d{0,11})"),
        "Copying random tokens",
        "tokens said twice",
        "nats per token",
    ),
    Kind(
        re.compile(r"(?P<name>niah_\w+?)_(?P<length>[1-9]\d{0,11})/contains"),
        "Needle {name}",
        "tokens of the haystack",
        "share found",
    ),
    Kind(
        re.compile(r"(?P<name>niah_\w+|ruler\w*)/(?P<length>[1-9]\d{0,11})"),
        "RULER, {name}",
        "tokens of the text",
        "share found",
    ),
    Kind(
        re.compile(r"(?P<name>\w+?)_nll_at_(?P<length>[1-9]\d{0,11})"),
        "Loss by position, {name}",
        "position in the text",
        "nats per token",
    ),
)


@dataclass(frozen=True)
class Curve:
    """One chart: the metrics of its lengths."""

    title: str
    x: str
    y: str
    metrics: Mapping[int, str]  # by length, in its order

    def points(self, measured: Mapping[str, Measurement]) -> list[tuple[float, float]]:
        """(length, value) of one model at the lengths where it was measured and is finite."""
        found = ((length, measured.get(metric)) for length, metric in self.metrics.items())
        return [(length, m["value"]) for length, m in found if m is not None and m["value"] is not None]


def find(metrics: Sequence[str], fewest: int = 2) -> list[Curve]:
    """The curves in `metrics` that have at least `fewest` lengths."""
    found: dict[tuple[int, str], dict[int, str]] = {}
    for metric in metrics:
        for i, kind in enumerate(KINDS):
            if match := kind.pattern.fullmatch(metric):
                name = match.groupdict().get("name") or ""
                found.setdefault((i, name), {})[int(match["length"])] = metric
                break
    return [
        Curve(KINDS[i].title.format(name=name), KINDS[i].x, KINDS[i].y, dict(sorted(lengths.items())))
        for (i, name), lengths in sorted(found.items())
        if len(lengths) >= fewest
    ]


def tokens(count: float) -> str:
    """Formats a number of tokens: 1024 as `1K`."""
    return f"{count / 1024:g}K" if count >= 1024 and count % 1024 == 0 else f"{count:,.0f}"


def value(number: float) -> str:
    """A value with as many digits as in the tables."""
    return cell({"value": number, "stderr": None, "n": None})
