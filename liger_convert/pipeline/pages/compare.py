"""Compares several runs: their measures, the sizes of their caches, and how much of the gap they recover.

The gap of a metric is that between the base and an untrained window. Recipes differ in their windows, and the untrained
window of a hybrid keeps its softmax layers. So if each run were compared with its own window, scales would differ.
Instead, all runs of one base share a scale. Its zero is, for each metric, the best untrained window among the runs with
the fewest softmax layers. The best one, so that a recipe with a weak window, such as one without sinks, does not widen
the gap and thereby raise all recoveries.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from liger_convert.config.names import SOFTMAX
from liger_convert.eval.suites import POSITIONS
from liger_convert.eval.verdict import verdict
from liger_convert.io.checksums import problems
from liger_convert.io.files import read_json
from liger_convert.pipeline.manifest import FILE as MANIFEST
from liger_convert.pipeline.pages.common import cell, lower_is_better, recovery
from liger_convert.pipeline.pages.read import FILE, read_report
from liger_convert.utils.errors import BadInput

CONTEXT = 32768  # tokens of the caches that are compared
SAME_BASE = 0.01  # tolerance, relative and absolute, for values of one base on different machines
NEEDED = ("linearized", "base", "window_only_untrained", "memory_ablated")


def compare(paths: Sequence[Path]) -> dict[str, Any]:
    """Compares the reports at `paths`, folders of runs or report.json files. Returns plain JSON:

    tokens: of the caches. metrics: those that all runs measured. bases: by name {"cache_bytes", "measures"}. runs: by
    name {"base" (a name in `bases`), "cache_bytes", "measures", "recovery" {METRIC: fraction of the gap},
    "mean_recovery", "worse_than_untrained", "missing" (metrics that only other runs have)}. zero: by base and metric
    the untrained window at which recovery is 0. notes: sentences on what cannot be compared. Measures of runs are those
    of the linearized model.

    recovery and its mean are over `metrics`, without those that measure the same text again (`_byte_ppl`, `_nll_at_`)
    and those whose gap is not clear. The mean is None if none is left. Raises BadInput when a report cannot be read,
    when there are fewer than two, or when they share no metric.
    """
    if len(paths) < 2:
        raise BadInput(f"RUN: {len(paths)} is too few to compare; name at least two runs")
    reports = [_read(path) for path in paths]
    names = _names(reports, paths)
    measured = [_measured(report) for report in reports]
    known = list(dict.fromkeys(metric for some in measured for metric in some))
    metrics = [metric for metric in measured[0] if all(metric in other for other in measured)]
    if not metrics:
        raise BadInput(f"{paths[0]}: models: has no metric in common with all the others; compare runs of one suite")
    groups, notes = _groups(reports, names)
    zero = {base: _zero([reports[i] for i in members], metrics) for base, members in groups.items()}
    runs = {}
    for i, (name, report) in enumerate(zip(names, reports, strict=True)):
        base = next(base for base, members in groups.items() if i in members)
        runs[name] = {"base": base} | _run(report, metrics, zero[base])
        runs[name]["missing"] = [metric for metric in known if metric not in measured[i]]
    first = {base: reports[members[0]] for base, members in groups.items()}
    return {
        "tokens": CONTEXT,
        "metrics": metrics,
        "bases": {
            base: {"cache_bytes": _cache(report, "base"), "measures": report["models"]["base"]}
            for base, report in first.items()
        },
        "runs": runs,
        "zero": zero,
        "notes": _edited(paths) + notes + _missing(runs) + _counted_differently(reports, names, metrics),
    }


def _read(path: Path) -> dict[str, Any]:
    report = read_report(path)
    if str(CONTEXT) not in report["plan"]["cache_bytes"]:
        raise BadInput(f"{path}: plan.cache_bytes: has no size at {CONTEXT} tokens, where caches are compared")
    return report


def _edited(paths: Sequence[Path]) -> list[str]:
    """A note for each report that is not what its run wrote, by the run's manifest, where there is one beside it."""
    notes = []
    for path in paths:
        folder = path if path.is_dir() else path.parent
        if (path.is_dir() or path.name == FILE) and (folder / MANIFEST).is_file():
            steps = read_json(folder / MANIFEST).get("steps")
            step = steps.get("report") if isinstance(steps, dict) else None
            outputs = step.get("outputs") if isinstance(step, dict) else None
            recorded = {FILE: outputs[FILE]} if isinstance(outputs, dict) and FILE in outputs else {}
            notes += [f"{problem}." for problem in problems(folder, recorded)]
    return notes


def _measured(report: Mapping[str, Any]) -> list[str]:
    """The metrics that a report has for all models that a comparison needs."""
    first, *others = (report["models"][name] for name in NEEDED)
    return [metric for metric in first if all(metric in other for other in others)]


def _names(reports: Sequence[Mapping[str, Any]], paths: Sequence[Path]) -> list[str]:
    """The name of each run. Runs with the same name are named by their folders, and if these are the same, numbered."""
    called = [str(report["name"]) for report in reports]
    folders = [(path if path.is_dir() else path.parent).resolve().name for path in paths]
    names = [folder if called.count(name) > 1 else name for name, folder in zip(called, folders, strict=True)]
    unique: list[str] = []
    for name in names:
        candidates = (name if number == 1 else f"{name} ({number})" for number in itertools.count(1))
        unique.append(next(candidate for candidate in candidates if candidate not in unique))
    return unique


def _groups(reports: Sequence[Mapping[str, Any]], names: Sequence[str]) -> tuple[dict[str, list[int]], list[str]]:
    """The runs of each base, and notes. Runs whose bases have the same name but different measures are kept apart."""
    groups: dict[str, list[int]] = {}
    notes = []
    for i, report in enumerate(reports):
        base = str(report["base"]).rstrip("/").rpartition("/")[2]
        number, name = 1, base
        while name in groups and (metric := _difference(reports[groups[name][0]], report)):
            first = groups[name][0]
            values = " against ".join(
                cell(reports[j]["models"]["base"][metric]).partition(" ± ")[0] for j in (i, first)
            )
            note = (
                f"{names[i]} and {names[first]} measured {base} differently ({metric}: {values}), so they used "
                "different texts or bases: each is compared with its own base."
            )
            number, name = number + 1, f"{base} ({number + 1})"
            if name not in groups:
                notes.append(note)
        groups.setdefault(name, []).append(i)
    return groups, notes


def _difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """A metric in which the bases of two reports differ; None if there is none."""
    bases = [report["models"]["base"] for report in (one, other)]
    shared = [metric for metric in bases[0] if metric in bases[1]]
    return next((metric for metric in shared if not alike(*(base[metric]["value"] for base in bases))), None)


def alike(one: float | None, other: float | None) -> bool:
    """Whether two values agree up to differences between machines (SAME_BASE)."""
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=SAME_BASE, abs_tol=SAME_BASE)


def _zero(reports: Sequence[Mapping[str, Any]], metrics: Iterable[str]) -> dict[str, Any]:
    """For each metric, the best finite measure, if there is one, of the untrained windows of the reports with the
    fewest softmax layers."""
    softmax = [report["plan"]["linearization"]["layers"].count(SOFTMAX) for report in reports]
    fewest = [report for report, count in zip(reports, softmax) if count == min(softmax)]
    found = {}
    for metric in metrics:
        windows = [report["models"]["window_only_untrained"][metric] for report in fewest]
        finite = [window for window in windows if window["value"] is not None]
        if finite:
            found[metric] = (min if lower_is_better(metric) else max)(finite, key=lambda window: window["value"])
    return found


def _run(report: Mapping[str, Any], metrics: Sequence[str], zero: Mapping[str, Any]) -> dict[str, Any]:
    models, measured = report["models"], _measured(report)
    recovered = {
        metric: share
        for metric in metrics
        if metric in zero
        and not (metric.endswith("_byte_ppl") or POSITIONS in metric)
        and (share := recovery(metric, models["linearized"][metric], zero[metric], models["base"][metric])) is not None
    }
    # the report knows which measures reach beyond the base's context, on which no verdict is based
    judged = report.get("verdict", {}).get("compared", {}).get("memory_ablated", measured)
    within = {name: {metric: models[name][metric] for metric in measured if metric in judged} for name in NEEDED}
    return {
        "cache_bytes": _cache(report, "linearized"),
        "measures": models["linearized"],
        "recovery": recovered,
        "mean_recovery": sum(recovered.values()) / len(recovered) if recovered else None,
        "worse_than_untrained": verdict(within)["worse_than_untrained"],
    }


def _cache(report: Mapping[str, Any], model: str) -> int:
    return int(report["plan"]["cache_bytes"][str(CONTEXT)][model])


def _missing(runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [
        f"{name} did not measure {', '.join(run['missing'])}, which others did."
        for name, run in runs.items()
        if run["missing"]
    ]


def _counted_differently(
    reports: Sequence[Mapping[str, Any]], names: Sequence[str], metrics: Iterable[str]
) -> list[str]:
    """Notes on metrics that are means over different numbers of rows in the runs, and so may be from other suites."""
    alike: dict[tuple[int | None, ...], list[str]] = {}
    for metric in metrics:
        counts = tuple(report["models"]["linearized"][metric]["n"] for report in reports)
        alike.setdefault(counts, []).append(metric)
    notes = []
    for counts, same in alike.items():
        runs = {n: [name for name, count in zip(names, counts, strict=True) if count == n] for n in counts}
        if len(runs) > 1:
            told = "; ".join(f"{n} in {', '.join(there)}" for n, there in runs.items())
            notes.append(f"Measured over different numbers of rows: {', '.join(same)} ({told}).")
    return notes
