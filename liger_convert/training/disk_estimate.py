"""Estimates the bytes that each step of a run writes, and the peak disk usage of the run.

Headers, tokenizers and logs are not counted: they are small compared to the weights of any real model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from liger_convert.config.recipe import Recipe
from liger_convert.config.stages import AlignStage, Stage
from liger_convert.training.memory_estimate import Sizes

KEPT = 2  # checkpoints of a stage; while another one is being written, all of these are still on disk
BASE, CONVERT, MERGE, EXPORT = "base", "convert", "merge", "export"


@dataclass(frozen=True)
class Written:
    """What a step writes, in bytes: at its peak, and what it leaves on disk.

    until: the step after which that is removed; None if it never is.
    """

    step: str
    peak: int
    left: int
    until: str | None


def written(
    recipe: Recipe,
    sizes: Sizes,
    trained: list[int],
    started: list[int],
    base_dtype: str,
    export_dtype: str,
    *,
    hidden_size: int,
    linear: int,
    compute: torch.dtype,
) -> list[Written]:
    """The steps of a run that write a significant amount, in order.

    trained, started: one number for each stage, as in `StagePlan`. base_dtype, export_dtype: names of torch dtypes. The
    others are for stages that train layer by layer. hidden_size: that of the base. linear: the number of layers that
    become linear. compute: the compute dtype.
    """
    full, numbers = 4 * (sizes.base + sizes.new), getattr(torch, base_dtype).itemsize * sizes.base
    exported = getattr(torch, export_dtype).itemsize * sizes.base + 4 * sizes.new
    steps = []
    if recipe.base.endswith(".gguf"):  # unpacked to float32
        steps.append(Written(BASE, 4 * sizes.base, 4 * sizes.base, "eval"))
    steps.append(Written(CONVERT, numbers + 4 * sizes.new, numbers + 4 * sizes.new, MERGE))
    for name, source in recipe.teachers.items():
        size = 4 * source.written_tokens
        steps.append(Written(f"data-{name}", size, size, _last_reader(recipe, name)))
    for name, stage, count, start in zip(recipe.stage_names, recipe.stages, trained, started, strict=True):
        result = full if stage.lora is None else 4 * (count + start)
        # trained parameters, Adam's two moments, and the average of the weights
        saved, one = saves(stage), (16 if stage.ema_length else 12) * count
        if isinstance(stage, AlignStage) and stage.layerwise:  # one layer's checkpoints, and all layers done so far
            hidden = hidden_bytes(stage.tokens // stage.seq_len, stage.seq_len, hidden_size, compute)
            most = 4 * (count + start) + max(hidden + min(saved, KEPT + 1) * one // linear, result)
        else:
            most = 4 * start + max(min(saved, KEPT + 1) * one, min(saved, KEPT) * one + result)
        if recipe.when_worse == "go_back" and stage.kind != "align":  # trained again, beside the first result
            most += result
        steps.append(Written(name, most, result, MERGE))
    steps.append(Written(MERGE, full, full, EXPORT))
    steps.append(Written(EXPORT, exported, exported, None))
    return steps


def of_conversion(steps: Sequence[Written]) -> list[Written]:
    """Of the steps of a run, what `linearize convert` writes: a model that is already in the dtype of the export."""
    exported = next(step.peak for step in steps if step.step == EXPORT)
    return [*(step for step in steps if step.step == BASE), Written(CONVERT, exported, exported, None)]


def hidden_bytes(rows: int, seq_len: int, hidden_size: int, dtype: torch.dtype) -> int:
    """Bytes of the hidden states of `rows` rows before and after one layer, both of which layerwise training keeps."""
    return 2 * rows * seq_len * hidden_size * dtype.itemsize


def saves(stage: Stage) -> int:
    """How many checkpoints a stage writes, the last one at its end. 0 if it has no more steps than `save_every`."""
    return -(-stage.steps // stage.save_every) if stage.save_every < stage.steps else 0


def peak(steps: list[Written], *, keep_steps: bool = False, without_base: bool = False) -> int:
    """The peak disk usage of a run, in bytes.

    keep_steps: nothing is removed during the run. without_base: the output of the step `base` already exists and is
    not counted.
    """
    lying: Mapping[str, Written] = {}
    most = 0
    for step in steps:
        if without_base and step.step == BASE:
            continue
        most = max(most, sum(other.left for other in lying.values()) + step.peak)
        lying = {**lying, step.step: step}
        if not keep_steps:
            lying = {name: other for name, other in lying.items() if other.until != step.step}
    return most


def _last_reader(recipe: Recipe, source: str) -> str:
    """The last step that reads a source written by the base."""
    if recipe.eval.text == source:
        return "eval"
    readers = [i for i, stage in enumerate(recipe.stages, 1) if source in stage.sources]
    return f"{readers[-1]}-{recipe.stages[readers[-1] - 1].kind}" if readers else f"data-{source}"
