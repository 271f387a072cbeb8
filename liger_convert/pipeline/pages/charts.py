"""Line charts as inline SVG, drawn for a width of 360 pixels and scaled by the page's style sheet.

Colors, dashes and fonts come from style.css by the class of a series, so that they follow light, dark and print mode.
A chart's label (for screen readers) lists its values, and a point's tooltip shows its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup, escape

WIDTH, HEIGHT = 360, 224
TOP, BOTTOM, RIGHT = 10, 40, 12  # margins; the left one is as wide as its labels
DIGIT = 6.0  # width of a digit of a tick's label
MOST_NAMED = 12  # points of a series up to which a label lists all and each has a marker


@dataclass(frozen=True)
class Series:
    """Points (x, y) in ascending x, drawn with the class `s-LOOK` of style.css.

    spread: (lowest, highest) at each point, drawn as a vertical line. mark: the label next to the first point. shift:
    pixels by which the series is moved to the right, so that points at the same place do not hide each other.
    """

    name: str
    look: str
    points: Sequence[tuple[float, float]]
    spread: Sequence[tuple[float, float]] = ()
    mark: str = ""
    shift: float = 0


def number(value: float) -> str:
    return f"{value:.4g}"


@dataclass(frozen=True)
class Axis:
    """ticks: positions of labels; None chooses round numbers. show, show_tick: format a value and a tick; show_tick
    None: same as `show`. include: values that must fit."""

    label: str
    log: bool = False
    ticks: Sequence[float] | None = None
    show: Callable[[float], str] = number
    show_tick: Callable[[float], str] | None = None
    include: Sequence[float] = ()

    def label_of(self, tick: float) -> str:
        return (self.show_tick or self.show)(tick)


@dataclass(frozen=True)
class _Scale:
    """Maps values to pixels, on a linear or logarithmic scale."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    def __call__(self, value: float) -> float:
        low, high, value = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (self.end - self.start) * (value - low) / (high - low)


def draw(title: str, series: Sequence[Series], x: Axis, y: Axis) -> Markup:
    """The chart as an `<svg>`. Points that are not finite, or not positive on a logarithmic axis, are left out. Empty
    if no points remain."""
    series = [_drawable(each, x, y) for each in series]
    series = [each for each in series if each.points]
    if not series:
        return Markup("")
    xs = [px for each in series for px, _ in each.points]
    ys = [py for each in series for _, py in each.points] + [v for each in series for pair in each.spread for v in pair]
    y_ticks, y_low, y_high, y_log = _axis(y, ys)
    left = 8 + DIGIT * max(len(y.label_of(tick)) for tick in y_ticks)
    x_ticks, x_low, x_high, x_log = _axis(x, xs)
    if x.ticks is None and not x_log and min(xs) < max(xs):
        x_low, x_high = min(xs), max(xs)  # ends at the last value and not at the next tick
    across = _Scale(x_low, x_high, left, WIDTH - RIGHT, x_log)
    up = _Scale(y_low, y_high, HEIGHT - BOTTOM, TOP, y_log)
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(f"{title}. {_in_words(series, x, y)}")}"><title>{escape(title)}</title>',
        *_frame(across, up, x_ticks, y_ticks, x, y, left),
    ]
    for each in series:
        parts += _series(each, across, up, x, y)
    return Markup("".join([*parts, "</svg>"]))


def _drawable(series: Series, x: Axis, y: Axis) -> Series:
    def fits(value: float, axis: Axis) -> bool:
        return math.isfinite(value) and (value > 0 or not axis.log)

    kept = [i for i, (px, py) in enumerate(series.points) if fits(px, x) and fits(py, y)]
    spread = [series.spread[i] for i in kept] if series.spread else []
    return replace(series, points=[series.points[i] for i in kept], spread=spread)


def _axis(axis: Axis, values: Sequence[float]) -> tuple[list[float], float, float, bool]:
    """Ticks, lowest and highest value of an axis, and whether it is logarithmic: not if it would have fewer than three
    ticks."""
    low, high = min([*values, *axis.include]), max([*values, *axis.include])
    if axis.ticks is not None:
        return list(axis.ticks), *_padded(low, high, axis.log), axis.log
    if axis.log:
        first, last = _padded(low, high, True)
        for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
            ticks = [t for t in _decades(first, last, steps) if first <= t <= last]
            if len(ticks) >= 3:
                return ticks, first, last, True
    step = _round_step((high - low) or abs(high) or 1)
    if all(float(value).is_integer() for value in values):  # there is no step of training between two others
        step = max(step, 1.0)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    last = max(last, first + 1)
    return [i * step for i in range(first, last + 1)], first * step, last * step, False


def _padded(low: float, high: float, log: bool) -> tuple[float, float]:
    """Slightly more than the range of the values, so that no point lies on the edge."""
    if log:
        ratio = max((high / low) ** 0.06, 1.05)
        return low / ratio, high * ratio
    pad = 0.04 * (high - low) or abs(high) or 1
    return low - pad, high + pad


def _decades(low: float, high: float, steps: Sequence[float]) -> Iterator[float]:
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        yield from (step * 10.0**power for step in steps)


def _round_step(span: float) -> float:
    """1, 2 or 5 times a power of ten, about a quarter of the span."""
    raw = span / 4
    power = 10.0 ** math.floor(math.log10(raw))
    return min((step * power for step in (1, 2, 5, 10)), key=lambda step: abs(math.log(step / raw)))


def _frame(
    across: _Scale, up: _Scale, x_ticks: Sequence[float], y_ticks: Sequence[float], x: Axis, y: Axis, left: float
) -> Iterator[str]:
    """Grid lines, labels of both axes, and their names."""
    for tick in y_ticks:
        at, text = up(tick), y.label_of(tick)
        yield f'<line class="grid" x1="{left:.1f}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield f'<text class="tick" x="{left - 5:.1f}" y="{at + 3.5:.1f}" text-anchor="end">{escape(text)}</text>'
    bottom, free = HEIGHT - BOTTOM, math.inf
    for tick in sorted(x_ticks, reverse=True):  # the largest first; labels that would overlap are left out
        at, text = across(tick), x.label_of(tick)
        half = DIGIT * len(text) / 2
        if at < left - 1 or at > WIDTH - RIGHT + 1 or at + half > free:
            continue
        free = at - half - 6
        yield f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{bottom}" y2="{bottom + 4}"/>'
        center = min(at, WIDTH - half - 1)
        yield f'<text class="tick" x="{center:.1f}" y="{bottom + 15}" text-anchor="middle">{escape(text)}</text>'
    yield f'<line class="axis" x1="{left:.1f}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>'
    middle = (left + WIDTH - RIGHT) / 2
    yield f'<text class="name" x="{middle:.1f}" y="{HEIGHT - 5}" text-anchor="middle">{escape(x.label)}</text>'


def _series(series: Series, across: _Scale, up: _Scale, x: Axis, y: Axis) -> Iterator[str]:
    places = [(across(px) + series.shift, up(py)) for px, py in series.points]
    yield f'<g class="s-{series.look}">'
    if len(places) > 1:
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
        yield f'<polyline points="{path}"/>'
    for (px, _), (low, high) in zip(places, series.spread):
        yield f'<line class="spread" x1="{px:.1f}" x2="{px:.1f}" y1="{up(low):.1f}" y2="{up(high):.1f}"/>'
    if len(places) <= MOST_NAMED:
        for (px, py), point in zip(places, series.points):
            told = escape(f"{series.name}: {y.show(point[1])} at {x.show(point[0])}")
            yield f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3"><title>{told}</title></circle>'
    if series.mark and places:
        px, py = places[0]
        inside = px + 7 + DIGIT * len(series.mark) * 1.2 < WIDTH
        side = f'x="{px + 7:.1f}" text-anchor="start"' if inside else f'x="{px - 7:.1f}" text-anchor="end"'
        yield f'<text class="mark" {side} y="{py + 4:.1f}">{escape(series.mark)}</text>'
    yield "</g>"


def _in_words(series: Sequence[Series], x: Axis, y: Axis) -> str:
    """All values of short series, and the first and last of long ones, as text."""
    told = []
    for each in series:
        points = each.points if len(each.points) <= MOST_NAMED else [each.points[0], each.points[-1]]
        told.append(f"{each.name}: " + ", ".join(f"{y.show(py)} at {x.show(px)}" for px, py in points))
    return f"{y.label} over {x.label}. " + "; ".join(told) + "."
