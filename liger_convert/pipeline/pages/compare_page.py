"""Shows a comparison of runs: as a table for the terminal, and as a self-contained page."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from liger_convert.io.files import atomic_write
from liger_convert.io.inputs import open_input
from liger_convert.pipeline.pages import curves
from liger_convert.pipeline.pages.charts import Axis, Series, draw, number
from liger_convert.pipeline.pages.common import cell
from liger_convert.pipeline.pages.rendering import Column
from liger_convert.pipeline.pages.rendering import render as render_page
from liger_convert.utils.errors import BadInput

OFFSET = 18  # pixels between runs whose caches have the same size
LOWEST = -0.5  # recovery at which a spread line is cut off, so that one broken measure does not squeeze all others
LOOKS = 8  # distinct styles of runs in style.css
MADE = '<meta name="generator" content="liger-convert compare">'  # near the beginning of every page
HEAD = 4096


def render(found: Mapping[str, Any]) -> Group:
    """The result of `compare.compare` as a table for a terminal, followed by its notes."""
    columns = list(_columns(found))
    table = Table()
    table.add_column(no_wrap=True)
    for _, name in columns:
        table.add_column(Text(name), justify="right", overflow="fold")
    sides = [found[kind][name] for kind, name in columns]
    table.add_row(f"cache, {found['tokens']:,} tokens", *(decimal(side["cache_bytes"]) for side in sides))
    shares = ["" if kind == "bases" else percent(side["mean_recovery"]) for (kind, _), side in zip(columns, sides)]
    table.add_row("gap recovered, mean", *shares, end_section=True)
    for metric in found["metrics"]:
        table.add_row(Text(metric), *(cell(side["measures"].get(metric)) for side in sides))
    worse = [Text(f"{name} is worse than its untrained window.", style="bold red") for name in _worse(found)]
    return Group(*worse, table, *(Text(note) for note in found["notes"]))


def write(found: Mapping[str, Any], out: Path) -> None:
    """Writes the page to the file `out`, over an older such page. Raises BadInput if `out` is another file,
    LinearizeError if it cannot be written."""
    _refuse_other(out)
    atomic_write(out, page(found))


def _refuse_other(out: Path) -> None:
    """Raises BadInput if `out` exists and is not a page of compare, or if its folder does not exist."""
    if not os.path.isdir(out.parent):
        raise BadInput(f"--out {out}: there is no folder {out.parent}; make it, or name another file")
    if not os.path.lexists(out):
        return
    with open_input(out) as file:
        if MADE.encode() not in file.read(HEAD):
            raise BadInput(f"--out {out}: already exists and is not a page that compare wrote; name another file")


def page(found: Mapping[str, Any]) -> str:
    """The result of `compare.compare` as HTML."""
    runs = found["runs"]
    looks = {name: f"run-{i % LOOKS}" for i, name in enumerate(runs)}
    numbers = {name: i for i, name in enumerate(runs, 1)}
    return render_page(
        "compare.html",
        found=found,
        columns=[
            Column(name, found["bases"][name]["measures"], "reference")
            if kind == "bases"
            else _run_column(name, found["runs"][name], looks[name], numbers[name])
            for kind, name in _columns(found)
        ],
        cache={
            "tokens": found["tokens"],
            "sizes": [decimal(found[kind][name]["cache_bytes"]) for kind, name in _columns(found)],
        },
        looks=looks,
        numbers=numbers,
        worse=list(_worse(found)),
        chart=_recovery_chart(found, looks, numbers),
        curves=_curves(found, looks),
        series=[
            *((looks[name], f"{numbers[name]} {name}") for name in runs),
            *(("base", base) for base in found["bases"]),
        ],
        extremes={name: _extremes(run["recovery"]) for name, run in runs.items()},
        percent=percent,
        size=decimal,
    )


def _run_column(name: str, run: Mapping[str, Any], look: str, number: int) -> Column:
    recovered = {metric: percent(share) for metric, share in run["recovery"].items()}
    return Column(name, run["measures"], number=number, run=look, recovered=recovered)


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


def _columns(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """("bases" or "runs", name): every base, followed by its runs."""
    for base in found["bases"]:
        yield "bases", base
        yield from (("runs", name) for name, run in found["runs"].items() if run["base"] == base)


def _worse(found: Mapping[str, Any]) -> Iterator[str]:
    return (name for name, run in found["runs"].items() if run["worse_than_untrained"])


def _extremes(recovered: Mapping[str, float]) -> tuple[str, str] | None:
    """The metrics that a run recovers least and most."""
    return (min(recovered, key=recovered.__getitem__), max(recovered, key=recovered.__getitem__)) if recovered else None


def _recovery_chart(found: Mapping[str, Any], looks: Mapping[str, str], numbers: Mapping[str, int]) -> Any:
    series: list[Series] = []
    sizes: list[int] = []
    for name, run in found["runs"].items():
        if not run["recovery"]:
            continue
        size, shares = run["cache_bytes"], run["recovery"].values()
        point, spread = (size, run["mean_recovery"]), (max(LOWEST, min(shares)), max(shares))
        shift = OFFSET * (sizes.count(size) % 4)
        series.append(Series(name, looks[name], [point], [spread], str(numbers[name]), shift))
        sizes.append(size)
    if not series:
        return None
    series += [
        Series(base, "base", [(about["cache_bytes"], 1.0)], mark="base") for base, about in found["bases"].items()
    ]
    title = f"Gap recovered over the cache at {found['tokens']:,} tokens"
    x = Axis("bytes of cache", log=True, show=lambda count: decimal(round(count)).replace(".0 ", " "))
    return draw(title, series, x, Axis("share of the gap", show=percent, include=(0.0, 1.0)))


def _curves(found: Mapping[str, Any], looks: Mapping[str, str]) -> list[tuple[str, Any]]:
    """(title, chart) for each metric that was measured at several lengths, with a line for every run and every base."""
    sides = [(name, looks[name], run["measures"]) for name, run in found["runs"].items()]
    sides += [(base, "base", about["measures"]) for base, about in found["bases"].items()]
    metrics = list(dict.fromkeys(metric for _, _, measured in sides for metric in measured))
    drawn = []
    for curve in curves.find(metrics):
        series = [Series(name, look, curve.points(measured)) for name, look, measured in sides]
        x = Axis(curve.x, log=True, ticks=list(curve.metrics), show=curves.tokens)
        drawn.append((curve.title, draw(curve.title, series, x, Axis(curve.y, show=curves.value, show_tick=number))))
    return [(title, chart) for title, chart in drawn if chart]
