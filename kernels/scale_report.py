"""What follows from the rows of `bench_scale.py`: speedups beside their targets, and tables."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

Row = dict[str, Any]
FITS = "fsdp-full: all weights fit"


def findings(rows: list[Row]) -> list[Row]:
    """The speedups and memory ratios that follow from the rows, with their targets, for every number of GPUs."""
    speeds = {(row["part"], row["case"], row["gpus"]): row["tokens_per_s"] for row in rows if "tokens_per_s" in row}
    peaks = {(row["part"], row["case"], row["gpus"]): row["peak_bytes"] for row in rows if "peak_bytes" in row}
    counts = sorted({row["gpus"] for row in rows} - {1})
    found: list[Row] = []

    def add(what: str, value: Any, target: float | None) -> None:
        found.append(
            {"what": what, "value": value, "target": target, "met": None if target is None else value >= target}
        )

    def compare(what: str, ours: tuple[Any, ...], theirs: tuple[Any, ...], target: float, share: float = 1) -> None:
        if ours in speeds and theirs in speeds:
            add(what, speeds[ours] / speeds[theirs] * share, target)

    for n in counts:
        for case in ("rows shared", "rows shared, not captured"):
            compare(f"ddp: {n} GPUs beside one, {case}", ("ddp", case, n), ("ddp", case, 1), 0.9 * n)
    for n in counts:
        for case in ("LoRA", "LoRA, layers stay gathered"):
            ours, how = ("fsdp-lora", case, n), case.removeprefix("LoRA")
            compare(f"fsdp-lora: a GPU of {n} beside one{how}", ours, ("fsdp-lora", "LoRA", 1), 0.92, 1 / n)
            if ours in speeds:
                add(f"fsdp-lora: tokens/s of a GPU of {n}{how}", speeds[ours] / n, 7000)
    for n in counts:
        of_all = [row for row in rows if (row["part"], row["gpus"]) == ("fsdp-full", n)]
        if any("step_ms" in row or "missing" in row for row in of_all):
            add(f"{FITS} {n} GPUs", float(any("step_ms" in row for row in of_all)), 1)
        for half in (other for other in counts if 2 * other == n):
            ours, theirs = (("fsdp-full", "all weights", count) for count in (n, half))
            compare(f"fsdp-full: a GPU of {n} beside one of {half}", ours, theirs, 0.85, 1 / 2)
    for n in counts:
        for stage in ("finetune", "distill"):
            shared, own = (("sequence", f"{stage}, a row {how}", n) for how in ("shared", "each"))
            eager = (*own[:1], f"{own[1]}, not compiled", n)
            what = f"sequence: {stage}, a row shared by {n} GPUs beside a row each"
            compare(what, shared, own, 0.9)
            compare(f"{what}, not compiled", shared, eager, 0.9)
            if shared in peaks and eager in peaks:
                what = f"sequence: {stage}, peak of a row shared by {n} GPUs beside that of a row {n} times shorter"
                add(what, peaks[shared] / peaks[eager], None)
    return found + of_layers(rows)


def of_layers(rows: list[Row]) -> list[Row]:
    """The findings on layers alone: rows shared by several GPUs beside the same rows by one."""
    layers = [row for row in rows if "layers" in row and "tokens_per_s" in row]
    found = []
    for row in layers:
        n, tokens, count = row["gpus"], row["tokens_a_row"], row["layers"]
        for one in layers:
            if n > 1 and (one["gpus"], one["tokens_a_row"], one["layers"]) == (1, tokens, count):
                target = 0.92 if tokens > 100_000 else 0.8
                what = f"sequence: {count} layers of {tokens:,} tokens, part of {n} times the speed"
                value = row["tokens_per_s"] / one["tokens_per_s"] / n
                found.append({"what": what, "value": value, "target": target, "met": value >= target})
    return found


def show(rows: list[Row]) -> None:
    console = Console(width=150, highlight=False)
    times = Table("part", "case", "GPUs", "rows", "step", "tokens/s", "of a GPU", "peak", "first step", "passes")
    equal = Table("equality: case", "GPUs", "losses err by", "allowed", "weights err by", "allowed", "")
    for row in rows:
        if "errors" in row:
            of = row["errors"], row.get("allowed", {})
            pairs = [f"{x[name]:.1e}" if x else "" for name in ("losses", "weights") for x in of]
            said = {True: "noticed", False: "equal", None: ""}[row.get("mistake")]
            equal.add_row(row["case"], str(row["gpus"]), *pairs, row.get("wrong", said))
        elif "step_ms" in row:
            given = f"{row['rows']} x {row['tokens_a_row']:,}"
            given += f", {row['layers']} layers" if "layers" in row else ""
            cells = [given, f"{row['step_ms']['median']:.1f} ms", f"{row['tokens_per_s']:,.0f}"]
            cells += [f"{row['tokens_per_s'] / row['gpus']:,.0f}"]
            cells += [f"{row['peak_bytes'] / 1e9:.1f} GB" if "peak_bytes" in row else ""]
            cells += [f"{row['first_step_s']:.1f} s" if "first_step_s" in row else "", row["fwd_bwd"].partition(":")[0]]
            times.add_row(row["part"], row["case"], str(row["gpus"]), *cells)
    marks = Table("what", "measured", "target", "")
    for finding in findings(rows):
        target = "" if finding["target"] is None else f"{finding['target']:,}"
        met = {True: "met", False: "missed", None: ""}[finding["met"]]
        value = finding["value"]
        marks.add_row(finding["what"], f"{value:,.0f}" if value > 100 else f"{value:.3f}", target, met)
    profiles = [profile_of(some) for some in alike(rows, "profile", "case")]
    profiles += [kernels_of(some) for some in alike(rows, "kernel_ms", "part")]
    for table in (equal, times, *profiles, marks):
        if table.row_count:
            console.print(table)
    for row in rows:
        if why := row.get("wrong") or row.get("missing") or row.get("failed"):
            console.print(f"{row['part']}, {row['case']}, {gpus(row)}: {why}", markup=False)


def alike(rows: list[Row], field: str, by: str) -> list[list[Row]]:
    """The rows that have `field`, those with the same value of `by` together, and the fewest GPUs first."""
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["gpus"]):
        if field in row:
            found.setdefault(row[by], []).append(row)
    return list(found.values())


def gpus(row: Row) -> str:
    return f"{row['gpus']} GPU{'s' * (row['gpus'] > 1)}"


def kernels_of(rows: list[Row]) -> Table:
    """A table of the kernels of a step, for the rows of a part."""
    table = Table(f"ms of a step's kernels, {rows[0]['part']}", *(f"{gpus(row)}: {row['case']}" for row in rows))
    for what in rows[0]["kernel_ms"]:
        if any(row["kernel_ms"][what] for row in rows):
            table.add_row(what, *(f"{row['kernel_ms'][what]:.2f}" for row in rows))
    table.add_row("a step, not profiled", *(f"{row['step_ms']['median']:.2f}" for row in rows))
    return table


def profile_of(rows: list[Row]) -> Table:
    """A table of where the time of a step goes, for the rows of a case. The GPU clock includes time in which the GPU
    waits."""
    clocks = [(row, clock) for row in rows for clock in ("gpu", "host") if row["profile"][clock]]
    heads = [f"{gpus(row)}, {clock}" for row, clock in clocks]
    table = Table(f"ms of a step, {rows[0]['case']}", *heads)
    columns = [row["profile"][clock] for row, clock in clocks]
    parts = dict.fromkeys(part for column in reversed(columns) for part in column)
    for part in parts:
        table.add_row(part, *(f"{column[part]:.2f}" if part in column else "" for column in columns))
    table.add_row("together", *(f"{sum(column.values()):.2f}" for column in columns))
    sent = [row.get("sending_ms") for row, _ in clocks]
    table.add_row("sending as much, by itself", *("" if ms is None else f"{ms:.2f}" for ms in sent))
    return table
