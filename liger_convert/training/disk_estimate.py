"""Estimates of what a run writes, step by step, and of the most that lies on the disk at once.

Headers, tokenizers and logs are left out: they are small compared to any real model's weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from liger_convert.config.recipe import Recipe
from liger_convert.config.stages import AlignStage, Stage
from liger_convert.training.memory_estimate import Sizes

KEPT = 2  # checkpoints of a stage; while one more is written, they are all there
BASE, CONVERT, MERGE, EXPORT = "base", "convert", "merge", "export"


@dataclass(frozen=True)
class Written:
    """What a step writes at its peak, what it leaves of it, and the step after which that is removed (None: never)."""

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
    """What each step of a run writes that writes anything to speak of, in their order. trained, started: of each stage,
    as a `StagePlan` has them. hidden_size, linear, compute: of the base, how many layers become linear, and the dtype
    that is computed in, for what a stage writes that trains layer by layer."""
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
        # what is trained, Adam's two moments, and an average
        saved, one = saves(stage), (16 if stage.ema_length else 12) * count
        if isinstance(stage, AlignStage) and stage.layerwise:  # a layer's checkpoints, and what of all is done
            hidden = hidden_bytes(stage.tokens // stage.seq_len, stage.seq_len, hidden_size, compute)
            most = 4 * (count + start) + max(hidden + min(saved, KEPT + 1) * one // linear, result)
        else:
            most = 4 * start + max(min(saved, KEPT + 1) * one, min(saved, KEPT) * one + result)
        steps.append(Written(name, most, result, MERGE))
    steps.append(Written(MERGE, full, full, EXPORT))
    steps.append(Written(EXPORT, exported, exported, None))
    return steps


def hidden_bytes(rows: int, seq_len: int, hidden_size: int, dtype: torch.dtype) -> int:
    """The hidden states of these rows, before a layer and behind it, as training layer by layer keeps them."""
    return 2 * rows * seq_len * hidden_size * dtype.itemsize


def saves(stage: Stage) -> int:
    """How many checkpoints a stage writes, the last one at its end; none where one would not do."""
    return -(-stage.steps // stage.save_every) if stage.save_every < stage.steps else 0


def peak(steps: list[Written], *, keep_steps: bool = False, without_base: bool = False) -> int:
    """The most bytes of a run on the disk at once. without_base: what the step `base` wrote is there already."""
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
    """The step after which no other reads a source that the base wrote."""
    if recipe.eval.text == source:
        return "eval"
    readers = [i for i, stage in enumerate(recipe.stages, 1) if source in stage.sources]
    return f"{readers[-1]}-{recipe.stages[readers[-1] - 1].kind}" if readers else f"data-{source}"
