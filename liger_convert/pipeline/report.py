"""What a run found: report.json for machines, report.md and report.html for people, a table for the terminal."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from rich.console import Group
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from liger_convert.config import resources, yaml_file
from liger_convert.io.files import atomic_write
from liger_convert.pipeline.pages import report_page
from liger_convert.pipeline.pages.common import (
    TITLES,
    beyond_context,
    cell,
    describe_layers,
    describe_sources,
    metric_names,
    stage_checks,
)

if TYPE_CHECKING:
    from liger_convert.eval.measures import Measurement  # imports torch

PAGE = jinja2.Template(
    """\
# {{ name }}

{% if verdict.worse_than_untrained %}
> **{{ verdict.sentences[0] }}**

{% endif %}
{{ converted }}

## What it is worth

{% for sentence in verdict.sentences %}
- {{ sentence }}
{% endfor %}

{{ table }}

{% for warning in plan.warnings | default([]) %}
- Warning: {{ warning }}.
{% endfor %}
{% for note in notes | default([]) %}
- Note: {{ note }}.
{% endfor %}
{% if plan.warnings | default([]) or notes | default([]) %}

{% endif %}
± is the standard error of one model. All models read the same text, so differences between them are more certain.
Perplexities (`ppl`) and losses (`nll`) are better when lower, everything else when higher.
*{{ titles.window_only_untrained }}* is the base with only the window and the sinks in the layers that were
linearized: no memory and no training. *{{ titles.memory_ablated }}* and *{{ titles.window_ablated }}* are the converted
model with that branch switched off. Suite `{{ suite.name }}`: {{ suite.description }}.

## What it costs

The linearized layers keep {{ size(plan.state_bytes) }} for a sequence of any length
{%- if plan.growing_bytes | default(0) %}, plus {{ size(plan.growing_bytes) }} per token for unlimited windows
{%- endif %}. The whole cache of one sequence:

| tokens | base | linearized | ratio |
|---:|---:|---:|---:|
{% for tokens, cache in plan.cache_bytes.items() %}
{% set ratio = (cache.base / cache.linearized) | round(1) %}
| {{ "{:,}".format(tokens | int) }} | {{ size(cache.base) }} | {{ size(cache.linearized) }} | {{ ratio }} |
{% endfor %}

{% if beyond %}
{{ beyond }}

{% endif %}
{% if selection is defined and selection.path is defined %}
{% if selection.path | length == 1 %}
## Why this layer stayed softmax

{% else %}
## Why these layers stayed softmax

{% endif %}
{% if selection.path | length == 1 %}
It was chosen by {{ "gates between softmax and linear attention, one per layer, all trained together: its gate is the
largest" if selection.select is defined else "measurement: it is the layer that helps most" }}.
{% elif selection.select is defined %}
They were chosen by gates between softmax and linear attention, one per layer, all trained together: largest first.
{% else %}
They were chosen by measurement: each is the layer that helps most, given those chosen before it.
{% endif %}
{% if selection.base.kl is defined %}
The table shows the divergence from the base in nats per token, before any training.

| softmax layers | KL |
|---|---:|
| none | {{ nats(selection.linear.kl) }} |
{% for step in selection.path %}
| + {{ step.layer }} | {{ nats(step.kl) }} |
{% endfor %}
{% else %}
The table shows losses in nats per token on texts repeated once, before any training: on the repetition and on the text
itself.

| softmax layers | repetition | text |
|---|---:|---:|
| none | {{ nats(selection.linear.copy_nll) }} | {{ nats(selection.linear.text_nll) }} |
{% for step in selection.path %}
| + {{ step.layer }} | {{ nats(step.copy_nll) }} | {{ nats(step.text_nll) }} |
{% endfor %}
| all: the base | {{ nats(selection.base.copy_nll) }} | {{ nats(selection.base.text_nll) }} |
{% endif %}

{% endif %}
{% if selection is defined and selection.window_kl is defined %}
{% if selection.long_windows | length == 1 %}
## Why this layer has a longer window

It was chosen by measurement: the divergence from the base is lowest with a window of {{ selection.long_window }} in
this layer. The table shows it in nats per token, before any training.
{% else %}
## Why these layers have a longer window

They were chosen by measurement: the divergence from the base is lowest with a window of {{ selection.long_window }} in
one of these layers. The table shows it in nats per token, before any training.
{% endif %}

| layers with this window | KL |
|---|---:|
| none | {{ nats(selection.window_kl.without) }} |
{% for layer in selection.long_windows %}
| {{ layer }} | {{ nats(selection.window_kl.alone[layer | string]) }} |
{% endfor %}
| all of these | {{ nats(selection.window_kl.together) }} |

{% endif %}
{% if training %}
## Training

| stage | tokens | trained parameters | seconds | loss, first → last |
|---|---:|---:|---:|---:|
{% for stage in training %}
{% set losses = stage.loss | map("last") | map("round", 3) | list or ["?"] %}
{% set loss = losses[0] ~ " → " ~ losses[-1] %}
{% set slower = " (at %g times its learning rates)" | format(stage.rates) if stage.rates | default(1) != 1 else "" %}
{% set name = stage.name ~ (slower if stage.kept | default(true) else " (left out: it made the model worse)") %}
{% set counts = "{:,} | {:,}".format(stage.tokens, stage.trained_parameters) %}
| {{ name }} | {{ counts }} | {{ stage.seconds }} | {{ loss }} |
{% endfor %}

{% for stage in training if stage.sources is defined %}
- {{ stage.name }} read {{ read(stage.sources) }}.
{% endfor %}
{% for stage in training if stage.gpu_memory is defined %}
- {{ stage.name }} took up to {{ size(stage.gpu_memory) }} of GPU memory.
{% endfor %}
{% if training | selectattr("sources", "defined") | list or training | selectattr("gpu_memory", "defined") | list %}

{% endif %}
{% if checks %}
The model after each stage, on a little {{ checked_on | default("text of another kind") }} and on a repetition of it:

|  | perplexity | loss on the repetition |
|---|---:|---:|
{% for name, measured in checks %}
| {{ name }} | {{ cell(measured.other_ppl) }} | {{ cell(measured.copy_nll) }} |
{% endfor %}

{% endif %}
{% for sentence in plan.adapted | default([]) %}
- Adapted to this base and machine: {{ sentence }}.
{% endfor %}
{% if plan.adapted | default([]) %}

{% endif %}
{% endif %}
{% if continuations %}
## Continuations

Greedy decoding, the first words of each answer.

{% for row in continuations %}
**{{ row.prompt }}**
{% for model in ("base", "linearized") if model in row %}
- {{ model }}: {{ row[model].split() | join(" ") }}
{% endfor %}

{% endfor %}
{% endif %}
## How to reproduce it

```
{{ reproduce.command }}
```

with the recipe that `manifest.json` records verbatim, along with the sha256 of every input and output file.
{{ reproduce.device }}, {{ reproduce.threads }} thread{{
"s" if reproduce.threads != 1 }}, {{ reproduce.kernels }} kernels, seed {{ reproduce.seed }}.
{{ reproduce.versions.items() | map("join", " ") | join(", ") }}.
""",
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    undefined=jinja2.StrictUndefined,
)


def write_report(out_dir: Path, results: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
    """Writes report.json, report.md and report.html into `out_dir`, each complete or not at all.

    results: what `ablation.diagnose` returns. manifest: manifest.json's content, whose steps hold the plan and what the
    training stages returned. Raises LinearizeError when they cannot be written.
    """
    report = build(results, manifest)
    files = {
        "report.json": json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n",
        "report.md": page(report),
        "report.html": report_page.page(report),
    }
    for name, text in files.items():
        atomic_write(out_dir / name, text)


def build(results: Mapping[str, Any], manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The content of report.json: the results, and from the manifest the plan, the stages and how to repeat it all."""
    recipe, machine, steps = manifest["recipe"], manifest["machine"], manifest["steps"]
    plan = {key: value for key, value in steps["plan"]["plan"].items() if key != "new_parameters"}
    training = [{"name": name} | step for name, step in steps.items() if "trained_parameters" in step]
    options = [word for override in recipe["overrides"] for word in ("--set", override)]
    name = recipe["resolved"]["name"]
    file = yaml_file.parse(recipe["text"], "recipe").get("name", name)  # by its own name, whatever a run was called
    if not resources.is_shipped(file, recipe["text"]):
        file += ".yaml"
    return {
        "name": name,
        "base": recipe["resolved"]["base"],
        **results,
        "plan": plan,
        **({"selection": steps["select-layers"]["selection"]} if "select-layers" in steps else {}),
        **{key: found for key, found in steps.get("check", {}).items() if key in ("check", "checked_on")},
        "training": [{key: stage[key] for key in stage if key not in ("inputs", "outputs")} for stage in training],
        "reproduce": {
            "command": shlex.join(["linearize", "run", file, *options]),
            "seed": manifest["seed"],
            **machine,
        },
    }


def page(report: Mapping[str, Any]) -> str:
    """report.md from the content of report.json."""
    text: str = PAGE.render(
        **report,
        titles=TITLES,
        size=decimal,
        nats=lambda loss: cell({"value": loss, "stderr": None, "n": None}),
        converted=describe_layers(report),
        checks=stage_checks(report),
        read=describe_sources,
        beyond=beyond_context(report["plan"]),
        cell=cell,
        table=_markdown(report["models"]),
    )
    return text


def render(results: Mapping[str, Any]) -> Group:
    """The measures as a table for a terminal, and below it the verdict, if there is one. That a model is worse than its
    untrained window is said above the table, too."""
    models = results["models"]
    table = Table()
    table.add_column(no_wrap=True)  # no name of a metric is cut off on a narrow terminal
    for name in models:
        table.add_column(TITLES.get(name, name), justify="right", overflow="fold")
    for metric in metric_names(models):
        table.add_row(metric, *(cell(measured.get(metric)) for measured in models.values()))
    found = results.get("verdict", {})
    said = [Text(sentence) for sentence in found.get("sentences", [])]
    first = [Text(said[0].plain, style="bold red")] if found.get("worse_than_untrained") else []
    return Group(*first, table, *said, *(Text(f"note: {note}") for note in results.get("notes", [])))


def _markdown(models: Mapping[str, Mapping[str, Measurement]]) -> str:
    rows = [["", *(TITLES.get(name, name) for name in models)], ["---", *["---:"] * len(models)]]
    rows += [[f"`{m}`", *(cell(measured.get(m)) for measured in models.values())] for m in metric_names(models)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
