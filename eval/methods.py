"""Writes eval/reports/methods.md: all methods side by side, from the reports that are committed beside it.

    python eval/methods.py             writes it
    python eval/methods.py --check     says so and exits with 1 if it is out of date

A report is a folder in eval/reports with a report.json and a manifest.json. What was measured of its models after the
run, by `linearize diagnose` and `linearize eval`, is in a measures.json beside them: {"models": {NAME: {METRIC: …}}}.
Reports share a table if their bases have the same perplexities, and other measures, over the same number of rows,
because then they are of the same base on the same text.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from liger_convert.config.names import MAIN, SOFTMAX
from liger_convert.config.renamed import current
from liger_convert.io.files import read_json
from liger_convert.mixers import MIXERS
from liger_convert.pipeline.pages.common import cell, metric_names
from liger_convert.pipeline.pages.compare import CONTEXT, alike
from liger_convert.pipeline.pages.read import read_report

PAGE = Path(__file__).parent / "reports" / "methods.md"
MADE = "<!-- Made by eval/methods.py from the reports beside it; change what it reads, not this page. -->"
KINDS = {  # kinds by a part of the folder's name; the first match counts
    "smollm2-135m-liger-paper": "Liger's layer",  # not trained as published
    "liger-": "Liger as published",
    "lolcats": "other method",
    "lizard": "other method",
    "gated-deltanet": "other method",
}
OURS = "ours"
HIDDEN = "_byte_ppl"  # metrics not shown, as they measure the same text again


@dataclass(frozen=True)
class Method:
    """One committed report: its folder, its report.json with all measures, and its manifest.json."""

    folder: Path
    report: dict[str, Any]
    manifest: dict[str, Any]

    @property
    def kind(self) -> str:
        return next((kind for part, kind in KINDS.items() if part in self.folder.name), OURS)

    @property
    def form(self) -> str:
        """`23 x gla; 7 x gla (codes 2048)`: what the layers became, with all options that differ from the defaults."""
        counts = Counter(self.report["plan"]["linearization"]["layers"])
        parts = [f"{counts[name]} x {_described(spec)}" for name, spec in self._specs.items()]
        return "; ".join([*parts, *([f"{counts[SOFTMAX]} x softmax"] if counts[SOFTMAX] else [])])

    @property
    def training(self) -> str:
        """`align 1.00M, finetune 12.00M (LoRA); 8.5 min`: kept stages with their tokens, and how long they took."""
        stages = [stage for stage in self.report["training"] if stage.get("kept", True)]
        told = [
            f"{stage['kind']} {stage['tokens'] / 1e6:.2f}M{' (LoRA)' if self._has_lora(_number(stage)) else ''}"
            for stage in stages
        ]
        return f"{', '.join(told)}; {sum(stage['seconds'] for stage in stages) / 60:.1f} min"

    def _has_lora(self, stage: int) -> bool:
        """Whether the stage of that index trained adapters, by its recipe or because the plan chose to."""
        adapted = self.report["plan"].get("adapted", [])
        in_recipe = self.manifest["recipe"]["resolved"]["stages"][stage].get("lora")
        return bool(in_recipe) or any(sentence.startswith(f"stages[{stage}].lora:") for sentence in adapted)

    @property
    def _specs(self) -> dict[str, dict[str, Any]]:
        used = set(self.report["plan"]["linearization"]["layers"])
        mixers = self.report["plan"]["linearization"]["mixers"]
        return {name: current("mixer", spec) for name, spec in mixers.items() if name in used or name == MAIN}


def _number(stage: Mapping[str, Any]) -> int:
    """The stage's index in the recipe, from 0, taken from its name (`1-align`)."""
    return int(stage["name"].partition("-")[0]) - 1


def _described(spec: Mapping[str, Any]) -> str:
    defaults = asdict(MIXERS[spec["type"]].Spec())
    changed = [f"{key} {value}" for key, value in spec.items() if key in defaults and value != defaults[key]]
    return f"`{spec['type']}`" + (f" ({', '.join(changed)})" if changed else "")


def methods(reports: Path) -> list[Method]:
    """Every report in the folder `reports`, by name. Raises BadInput if one cannot be read."""
    folders = sorted(file.parent for file in reports.glob("*/report.json"))
    return [Method(folder, _report(folder), read_json(folder / "manifest.json")) for folder in folders]


def _report(folder: Path) -> dict[str, Any]:
    """The report with the measures of measures.json. Those replace the run's own of the same metrics in all columns, as
    a run may have measured them on fewer rows."""
    report, file = read_report(folder), folder / "measures.json"
    if file.is_file():
        later = read_json(file)["models"]
        again = {metric for measured in later.values() for metric in measured}
        for name, measured in report["models"].items():
            kept = {metric: value for metric, value in measured.items() if metric not in again}
            report["models"][name] = kept | later.get(name, {})
    return report


def page(found: Sequence[Method]) -> str:
    """The page as Markdown."""
    lines = [
        "# All methods side by side",
        "",
        MADE,
        "",
        "Every figure is that of a committed report, to which a method's name leads. ± is the standard error of one",
        "model. All models of a table read the same text, so differences between them are more certain.",
        "A `measures.json` beside a report has what was measured of its models after the run. `text` is held-out text",
        "of the kind that a method was trained on, and so are copies; `other` is wikitext-2. Perplexities (`ppl`) and",
        "losses (`nll`) are better when lower, everything else when higher. *memory ablated*",
        f"is the model above it with its memory switched off. Cache: of one sequence of {CONTEXT:,} tokens. An empty",
        "cell was not measured there. An untrained window is that of the first method below with such layers.",
        "",
        "Not here, as no reports of them are committed: LoLCATs, Lizard's form, gated DeltaNet without convolution,",
        "the other mixers, and further seeds of the default. [Results](../../docs/results.md) has their figures.",
    ]
    groups: list[list[Method]] = []
    for method in found:
        group = next((group for group in groups if _same_base(group[0].report, method.report)), None)
        if group is None:
            groups.append([method])
        else:
            group.append(method)
    for group in groups:
        lines += ["", *_table(group)]
    return "\n".join(lines) + "\n"


def _same_base(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two reports share a perplexity of their bases, and agree on all measures that they share."""
    first, second = (report["models"]["base"] for report in (one, other))
    shared = [metric for metric in first if metric in second]
    pairs = [(first[metric], second[metric]) for metric in shared]
    same = all(a["n"] == b["n"] and alike(a["value"], b["value"]) for a, b in pairs)
    return same and any(metric.endswith("_ppl") for metric in shared)


def _table(members: Sequence[Method]) -> list[str]:
    order = [OURS, *dict.fromkeys(KINDS.values())]
    members = sorted(members, key=lambda method: (order.index(method.kind), method.folder.name))
    columns = {method.folder.name: method.report["models"]["linearized"] for method in members}
    metrics = [name for name in metric_names(columns) if not name.endswith(HIDDEN)]
    first, devices = members[0].report, {method.report["reproduce"]["device"] for method in members}
    windows = next((value["n"] for name, value in first["models"]["base"].items() if name.endswith("_ppl")), None)
    of_text = "" if windows is None else f", {windows} windows of text"
    rows = [
        f"## {first['base'].rstrip('/').rpartition('/')[2]}{of_text}",
        "",
        f"Trained on {' and '.join(sorted(devices))}:",
        "",
        "| method | kind | layers | training | seed | cache |",
        "| --- | --- | --- | --- | ---: | ---: |",
        f"| base | | {len(first['plan']['linearization']['layers'])} x softmax | | | {_cache(first, 'base')} |",
    ]
    for method in members:
        seed, size = method.report["reproduce"]["seed"], _cache(method.report, "linearized")
        rows.append(f"| {_link(method)} | {method.kind} | {method.form} | {method.training} | {seed} | {size} |")
    head = " | ".join(f"`{name}`" for name in metrics)
    rows += ["", f"|  | {head} |", "| --- |" + " ---: |" * len(metrics)]
    rows.append(_measures("base", first["models"]["base"], metrics))
    for windows, measured in _untrained(members).items():
        rows.append(_measures(f"window only, untrained: {windows}", measured, metrics))
    for method in members:
        models = method.report["models"]
        rows.append(_measures(_link(method), models["linearized"], metrics))
        rows.append(_measures("… memory ablated", models["memory_ablated"], metrics))
    return rows


def _untrained(members: Sequence[Method]) -> dict[str, Mapping[str, Any]]:
    """The measures of the untrained windows by a description. They differ in window and sinks or in softmax layers."""
    found: dict[str, dict[str, Any]] = {}
    for method in members:
        linear = method.report["plan"]["linearization"]
        sizes = sorted({(spec["window"], spec["sinks"]) for spec in linear["mixers"].values()})
        softmax = [str(i) for i, name in enumerate(linear["layers"]) if name == SOFTMAX]
        title = " and ".join(f"{window or 'all'} + {sinks} sinks" for window, sinks in sizes)
        title += f", layers {', '.join(softmax)} softmax" if softmax else ""
        for metric, measured in method.report["models"]["window_only_untrained"].items():
            found.setdefault(title, {}).setdefault(metric, measured)
    return found


def _measures(title: str, measured: Mapping[str, Any], metrics: Sequence[str]) -> str:
    return "| " + " | ".join([title, *(cell(measured.get(metric)) for metric in metrics)]) + " |"


def _link(method: Method) -> str:
    return f"[{method.folder.name}]({method.folder.name}/report.md)"


def _cache(report: Mapping[str, Any], model: str) -> str:
    return decimal(report["plan"]["cache_bytes"][str(CONTEXT)][model])


def main(words: Sequence[str]) -> int:
    made = page(methods(PAGE.parent))
    if "--check" not in words:
        PAGE.write_text(made, encoding="utf-8")
    elif not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != made:
        print(f"{PAGE.relative_to(PAGE.parents[2])} is out of date; run: python eval/methods.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
