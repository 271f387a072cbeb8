"""Shows the results of a bench: a table, bench.json, and curves in bench.png."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from liger_convert.io.files import atomic_dir

FILE, CURVES = "bench.json", "bench.png"


def render(results: Mapping[str, Any]) -> Group:
    """The rows as a table of prefill and one of decoding, followed by what was checked, what counts as memory, the
    limits, and what is missing."""
    peak = results["memory"] == "peak_bytes"
    sizes = ["cache_bytes", *(["peak_bytes"] if peak else [])]
    rows = sorted(results["rows"], key=lambda row: row["tokens"])
    tables = []
    for kind, title, time in (("prefill", "prefill", "first token"), ("decode", "decoding", "a step")):
        if kind == "prefill" and results["prompts"] == "filled":
            continue
        table = Table("tokens", "model", title=title)
        kept = sizes if kind == "decode" else []
        for header in (time, "limit", "tokens/s", *(size.partition("_")[0] for size in kept)):
            table.add_column(header, justify="right")
        for row in rows:
            cells = [row.get("error", "")]
            if "error" not in row and (time_ms := row[f"{kind}_ms"]):
                cells = [
                    _cell(row, f"{kind}_ms", f"{time_ms['median']:.4g} ms"),
                    f"{row['limit_ms'][kind]:.3g} ms",
                    f"{row[f'{kind}_tokens_per_s']:,.0f}",
                    *(_cell(row, size, decimal(row[size])) for size in kept),
                ]
            table.add_row(f"{row['tokens']:,}", row["model"], *cells)
        tables.append(table)
    checked, limits = results["check"], results["limits"]
    filled = "Prompts were not read: all but their first tokens are noise in the cache."
    told = [
        f"Checked: decoding equals prefill to {checked['error']:.1e} of the largest logit (allowed "
        f"{checked['allowed']:.1e}). x: the base's figure divided by the model's.",
        "Memory: the tensors of the cache, exactly"
        + ("; the peak counts the weights, too." if peak else ", as a peak is only known of a GPU."),
        f"Limit: what reading the weights takes at {limits['bandwidth'] / 1e9:.4g} GB/s ({limits['bandwidth_by']}), "
        f"or their products at {limits['peak'] / 1e12:.3g} TFLOPS ({limits['peak_by']}), whichever is longer.",
        *([filled] if results["prompts"] == "filled" else []),
        *(f"Missing: {name}: {why}." for name, why in results["missing"].items()),
    ]
    return Group(Text(_title(results)), *tables, *(Text(line) for line in told))


def _title(results: Mapping[str, Any]) -> str:
    source, batch, dtype, kernels, decoding = (
        results[name] for name in ("source", "batch_size", "dtype", "kernels", "decoding")
    )
    prefilling = results.get("prefilling", "plain chunks")  # older results are of plain chunks
    device = results["machine"]["device"]
    if (stored := results.get("quantize")) is not None:
        dtype = f"{dtype} with {stored} weights"
    how = f"{kernels} kernels; prefill: {prefilling}; decoding: {decoding}"
    if (attention := results.get("base_attention")) is not None:
        how += f"; base: {attention} attention"
    return f"{source}: batch {batch}, {dtype}, {device}, {how}"


def _cell(row: Mapping[str, Any], name: str, value: str) -> str:
    ratio = (row.get("ratio") or {}).get(name)
    return value if ratio is None else f"{value}, {ratio:.3g}x"


def write(results: dict[str, Any], out: Path) -> None:
    """Writes bench.json and bench.png to the new folder `out`. Without matplotlib, the curves are listed in `missing`.

    Raises BadInput when `out` exists, LinearizeError when the disk is full.
    """
    drawn = find_spec("matplotlib") is not None
    if not drawn:
        results["missing"]["curves"] = "matplotlib draws them, so pip install 'liger-convert[bench]'"
    with atomic_dir(out) as folder:
        (folder / FILE).write_text(json.dumps(results, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        if drawn:
            draw(results, folder / CURVES)


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draws time to the first token, time of a decoding step and memory over the length of the prompt, as a PNG."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    figure = Figure(figsize=(13, 4), dpi=150, layout="constrained")
    figure.suptitle(_title(results))
    memory = results["memory"]
    panels = {
        "prefill_ms": "ms to the first token",
        "decode_ms": "ms a decode step",
        memory: f"{memory.partition('_')[0]}, GB",
    }
    if results["prompts"] == "filled":
        del panels["prefill_ms"]
    lengths = sorted({row["tokens"] for row in results["rows"]})
    for axes, (key, title) in zip(figure.subplots(1, len(panels)), panels.items()):
        for name in dict.fromkeys(row["model"] for row in results["rows"]):
            mine = [row for row in results["rows"] if row["model"] == name]
            missing = [f"{row['error']} at {_short(row['tokens'])}" for row in mine if "error" in row]
            label = "; ".join([name, *missing])
            mine = [row for row in mine if "error" not in row]
            tokens, values = [row["tokens"] for row in mine], [row[key] for row in mine]
            if key == memory:
                axes.plot(tokens, [value / 1e9 for value in values], marker="o", label=label)
                continue
            (line,) = axes.plot(tokens, [value["median"] for value in values], marker="o", label=label)
            low, high = ([value[q] for value in values] for q in ("q1", "q3"))
            axes.fill_between(tokens, low, high, alpha=0.2, color=line.get_color())
        axes.set(xscale="log", yscale="log", xlabel="tokens of the prompt", title=title)
        axes.set_xticks(lengths, [_short(tokens) for tokens in lengths])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)


def _short(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else f"{tokens:,}"
