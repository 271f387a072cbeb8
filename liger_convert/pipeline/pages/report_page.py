"""report.html: the results of a run as one self-contained page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich.filesize import decimal

from liger_convert.config.names import MAIN, SOFTMAX
from liger_convert.pipeline.pages import curves
from liger_convert.pipeline.pages.charts import Axis, Series, draw, number
from liger_convert.pipeline.pages.common import (
    TITLES,
    beyond_context,
    cell,
    describe_layers,
    describe_sources,
    describe_window,
    metric_names,
    recovery,
    stage_checks,
)
from liger_convert.pipeline.pages.rendering import Column, render
from liger_convert.utils.errors import counted

CONTEXT = 32768  # tokens of the cache shown at the top of the page, or the base's context if that is shorter


def page(report: Mapping[str, Any]) -> str:
    """report.html from the content of report.json."""
    models = report["models"]
    return render(
        "report.html",
        report=report,
        titles=TITLES,
        columns=[
            Column(TITLES.get(name, name), measured, "own" if name == "linearized" else "")
            for name, measured in models.items()
        ],
        metrics=metric_names(models),
        converted=describe_layers(report),
        verdict=_verdict(report["verdict"]),
        glance=_glance(report),
        recovered={metric: found for metric in metric_names(models) if (found := _recovered(models, metric))},
        series=[(_look(name), TITLES.get(name, name)) for name in models],
        curves=_curves(models),
        layers=_layers(report),
        cache=_cache(report["plan"]["cache_bytes"]),
        beyond=beyond_context(report["plan"]),
        losses=[(stage["name"], chart) for stage in report["training"] if (chart := _losses(stage))],
        last_losses={stage["name"]: _first_and_last(stage) for stage in report["training"]},
        checks=stage_checks(report),
        read=describe_sources,
        cell=cell,
        size=decimal,
        nats=_nats,
    )


def _verdict(verdict: Mapping[str, Any]) -> dict[str, Any]:
    """The verdict's CSS class, and each sentence split into its statement and the measures it names."""
    worse, used = verdict.get("worse_than_untrained"), verdict["memory_used"]
    parts = [sentence.partition(": ") for sentence in verdict["sentences"]]
    return {
        "look": "bad" if worse else "good" if used else "plain" if used is None else "doubtful",
        "sentences": [(head + colon.strip(), rest) if rest else ("", head) for head, colon, rest in parts],
    }


def _glance(report: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The most important figures: (name, figure, what to compare it with)."""
    layers = report["plan"]["linearization"]["layers"]
    linear = sum(layer != SOFTMAX for layer in layers)
    found = [("linear layers", f"{linear} of {len(layers)}", _rest(len(layers) - linear))]
    context = min(CONTEXT, report["plan"].get("context") or CONTEXT)
    if cache := report["plan"]["cache_bytes"].get(str(context)):
        ratio = f"{cache['base'] / cache['linearized']:.1f} times smaller than {decimal(cache['base'])}"
        found.append((f"cache at {context:,} tokens", decimal(cache["linearized"]), ratio))
    models = report["models"]
    measured = models["linearized"]
    copies = [name for name in measured if name.startswith("copy_nll_")]
    names = [name for name in measured if name.endswith("_ppl") and not name.endswith("_byte_ppl")][:1]
    names += sorted(copies, key=lambda name: int(name.removeprefix("copy_nll_")))[-1:]
    for name in names:
        others = [f"{title} {_plain(models[key].get(name))}" for key, title in _CONTROLS.items() if key in models]
        found.append((name, _plain(measured[name]), ", ".join(others)))
    return found


def _rest(unchanged: int) -> str:
    if unchanged <= 1:
        return "the other one is unchanged" if unchanged else ""
    return "the others are unchanged"


_CONTROLS = {"base": "base", "window_only_untrained": "window only"}


def _plain(measured: Any) -> str:
    return cell(measured).partition(" ± ")[0]


def _recovered(models: Mapping[str, Any], metric: str) -> dict[str, float] | None:
    """`recovery` of the converted model, and of the same with its memory ablated, between the untrained window (0) and
    the base (1). None if the gap is not clear."""
    ends = [models.get(name, {}).get(metric) for name in ("window_only_untrained", "base")]
    if any(end is None for end in ends):
        return None
    placed = {
        name: recovery(metric, models[name][metric], *ends)
        for name in ("linearized", "memory_ablated")
        if metric in models.get(name, {})
    }
    found = {name: share for name, share in placed.items() if share is not None}
    return found if "linearized" in found else None


def _curves(models: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """(title, chart) for every metric that was measured at several lengths, with a line for each model."""
    drawn = []
    for curve in curves.find(metric_names(models)):
        series = [
            Series(TITLES.get(name, name), _look(name), curve.points(measured)) for name, measured in models.items()
        ]
        x = Axis(curve.x, log=True, ticks=list(curve.metrics), show=curves.tokens)
        drawn.append((curve.title, draw(curve.title, series, x, Axis(curve.y, show=curves.value, show_tick=number))))
    return [(title, chart) for title, chart in drawn if chart]


def _look(model: str) -> str:
    return model.replace("_", "-")


def _layers(report: Mapping[str, Any]) -> dict[str, Any]:
    """The cells of the layer diagram (each layer's kind and CSS class and, if it was aligned, its error before and
    after), a legend of the kinds, and the range of the errors."""
    linearization = report["plan"]["linearization"]
    layers, mixers = linearization["layers"], linearization["mixers"]
    looks = {name: f"mixer-{i % 4}" for i, name in enumerate(mixers)} | {SOFTMAX: "softmax"}
    kinds = {name: _kind(mixers[name]) if name in mixers else "softmax attention" for name in dict.fromkeys(layers)}
    errors = _align_errors(report, [i for i, layer in enumerate(layers) if layer != SOFTMAX])
    positive = [error for pair in errors.values() for error in pair if error > 0]
    low, high = min(positive, default=1.0), max(positive, default=1.0)

    def place(error: float) -> float:
        """The position of an error in its cell, in percent, on a logarithmic axis shared by all layers."""
        return 100 * math.log(max(error, low) / low) / (math.log(high / low) or 1)

    return {
        "cells": [
            {
                "index": i,
                "kind": mixers[name]["type"] if name == MAIN else name,
                "look": looks[name],
                "errors": errors.get(i),
                "places": [place(error) for error in errors.get(i, ())],
            }
            for i, name in enumerate(layers)
        ],
        "kinds": [
            (looks[name], kind if name in (MAIN, SOFTMAX) else f"{name}: {kind}") for name, kind in kinds.items()
        ],
        "range": (low, high) if positive else None,
    }


def _kind(mixer: Mapping[str, Any]) -> str:
    return f"{mixer['type']}, {describe_window(mixer)}, {counted(mixer['sinks'], 'sink')}"


def _align_errors(report: Mapping[str, Any], linear: list[int]) -> dict[int, tuple[float, float]]:
    """(error before the first alignment, error after the last) of every linearized layer; empty without alignment."""
    aligned = [stage["align_error"] for stage in report["training"] if "align_error" in stage]
    if not aligned or not len(aligned[0]["before"]) == len(aligned[-1]["after"]) == len(linear):
        return {}
    return dict(zip(linear, zip(aligned[0]["before"], aligned[-1]["after"], strict=True), strict=True))


def _cache(sizes: Mapping[str, Mapping[str, int]]) -> Any:
    series = [
        Series(name, name, [(int(tokens), cache[name]) for tokens, cache in sizes.items()])
        for name in ("base", "linearized")
    ]
    x = Axis("tokens", log=True, ticks=[int(tokens) for tokens in sizes], show=curves.tokens)
    return draw("Cache of one sequence", series, x, Axis("bytes", log=True, show=_short_size))


def _short_size(count: float) -> str:
    return decimal(int(count)).replace(".0 ", " ")


def _losses(stage: Mapping[str, Any]) -> Any:
    points = [(step, loss) for step, loss in stage["loss"]]
    if len(points) < 2:
        return None
    return draw(
        f"Loss of {stage['name']}", [Series("loss", "linearized", points)], Axis("step"), Axis("loss", log=True)
    )


def _first_and_last(stage: Mapping[str, Any]) -> str:
    losses = [round(loss, 3) for _, loss in stage["loss"]]
    return f"{losses[0]} → {losses[-1]}" if losses else "?"


def _nats(loss: float | None) -> str:
    return cell({"value": loss, "stderr": None, "n": None})
