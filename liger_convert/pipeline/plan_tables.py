"""Shows a plan in a terminal: what each layer becomes, and what the conversion takes."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from liger_convert.config.names import LONG, MAIN, SOFTMAX
from liger_convert.mixers import MIXERS
from liger_convert.pipeline.plan import CONTEXTS, Plan
from liger_convert.training.memory_estimate import count
from liger_convert.training.traffic_estimate import ASSUMED


def render(plan: Plan) -> Group:
    """The plan as tables and sentences."""
    tables = [_sizes(plan), _cache(plan)]
    if plan.teacher_tokens:
        tables.append(_written_data(plan))
    if plan.stages:
        tables.append(_training(plan))
    memory, disk = _memory(plan), _disk(plan)
    for table in (*tables, memory, disk):
        for column in table.columns[1:]:
            column.justify = "left" if column.header == "of" else "right"
    device = Text(f"estimated for {plan.memory_for}; what the interpreter itself takes is not counted")
    fitted = [Text(f"adapted to this base: {sentence}") for sentence in plan.adapted]
    return Group(_layers(plan), *tables, memory, device, disk, *_traffic(plan), *fitted)


def _layers(plan: Plan) -> Table:
    table = Table("layers", "become", "window", "sinks", "memory", title=f"{plan.name}: {plan.model_type}")
    rest = [i for i, name in enumerate(plan.layers) if name != SOFTMAX or i not in plan.sliding]
    yet_to_choose = {SOFTMAX: plan.undecided, LONG: plan.undecided_windows}
    for name in dict.fromkeys(plan.layers[i] for i in rest):
        of_name = [i for i in rest if plan.layers[i] == name]
        where = _ranges(of_name)
        if yet_to_choose.get(name, plan.undecided or plan.undecided_windows):
            where = f"{len(of_name)} of {len(rest)}, chosen by measurement in the run"
        if name == SOFTMAX:
            table.add_row(where, "softmax attention, unchanged", "", "", "")
            continue
        spec = plan.linearization["mixers"][name]
        kind = spec["type"] if name == MAIN else f"{name}: {spec['type']}"
        table.add_row(where, kind, str(spec["window"] or "all"), str(spec["sinks"]), MIXERS[spec["type"]].summary)
    kept = [i for i in plan.sliding if i not in rest]
    for window in sorted({plan.sliding_windows[i] or 0 for i in kept}):
        where = _ranges([i for i in kept if plan.sliding_windows[i] == window])
        table.add_row(where, "the base's own sliding window, unchanged", str(window), "", "none: it does not grow")
    return table


def _sizes(plan: Plan) -> Table:
    table = Table("", "", title="sizes", show_header=False)
    table.add_row("parameters reused from the base", f"{count(plan.reused_parameters):,}")
    table.add_row("new parameters", f"{count(plan.new_parameters):,}")
    table.add_row("state of one sequence", decimal(plan.state_bytes))
    if plan.growing_bytes:
        table.add_row("plus, per token, what unlimited windows keep", decimal(plan.growing_bytes))
    return table


def _cache(plan: Plan) -> Table:
    table = Table("tokens", "base", "linearized", "ratio", title="cache of one sequence")
    if plan.context is not None and plan.context < CONTEXTS[-1]:
        table.caption = f"the base supports {plan.context:,} tokens"
    for n in plan.lengths:
        base, linearized = plan.kv_bytes(n), plan.cache_bytes(n)
        table.add_row(_tokens(n), decimal(base), decimal(linearized), f"{base / linearized:.1f}x")
    return table


def _written_data(plan: Plan) -> Table:
    table = Table("source", "tokens", title="data, written by the base")
    for name, tokens in plan.teacher_tokens.items():
        table.add_row(name, f"{tokens:,}")
    return table


def _training(plan: Plan) -> Table:
    table = Table("stage", "tokens", "of", "trained parameters", title="training")
    for stage in plan.stages:
        table.add_row(stage.kind, f"{stage.tokens:,}", _shares(stage.sources), f"{stage.trained:,}")
    return table


def _memory(plan: Plan) -> Table:
    table = Table("step", "peak", *(["weights sharded"] if plan.sharded_bytes else []), title="estimated memory")
    for step, size in plan.memory_bytes.items():
        sharded = [decimal(plan.sharded_bytes[step])] if step in plan.sharded_bytes else []
        table.add_row(step, decimal(size), *sharded)
    return table


def _disk(plan: Plan) -> Table:
    table = Table("step", "writes", title="estimated disk use")
    for step, size in plan.disk_bytes.items():
        table.add_row(step, decimal(size))
    table.add_row("peak", decimal(plan.disk_peak))
    return table


def _traffic(plan: Plan) -> list[Text]:
    """What a GPU sends in a step of each stage; empty for one GPU."""
    lines = [Text(f"{stage.kind}: {stage.traffic.line()}") for stage in plan.stages if stage.traffic is not None]
    return [Text(f"traffic of a GPU in a step, {ASSUMED}:"), *lines] if lines else []


def _shares(sources: Mapping[str, float]) -> str:
    """`text`, or `chat 20 %, text 80 %`."""
    if len(sources) == 1:
        return next(iter(sources))
    return ", ".join(f"{name} {100 * fraction:g} %" for name, fraction in sources.items())


def _tokens(number: int) -> str:
    return f"{number:,}" if number % 1024 else f"{number // 1024}K"


def _ranges(numbers: list[int]) -> str:
    """`0-2, 4, 6-9`: ascending numbers, with consecutive ones joined."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
