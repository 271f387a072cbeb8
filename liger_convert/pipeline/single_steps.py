"""Steps that a run does and that a command may do by itself: choosing layers, text by the base, a training stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from liger_convert import training
from liger_convert.config.recipe import Recipe
from liger_convert.data import teacher
from liger_convert.data.documents import Document, Documents
from liger_convert.data.mixed_rows import MixedDataset
from liger_convert.data.packed_rows import PackedDataset
from liger_convert.pipeline import gate_selection, layer_selection
from liger_convert.pipeline.layer_selection import LayerSelection
from liger_convert.pipeline.plan import Plan
from liger_convert.utils.progress import show_progress


def choose_layers(
    recipe: Recipe, plan: Plan, documents: Sequence[Document], base_dir: Path, tokenizer: Any, device: torch.device
) -> LayerSelection:
    """The step `select-layers`: chooses on `documents` which layers stay softmax, as `layers.select` says. Raises
    BadInput, LinearizeError."""
    by_gates = recipe.selected_by == "gates"
    select = gate_selection.select_by_gates if by_gates else layer_selection.select_layers
    with show_progress("select-layers") as report:
        return select(recipe, plan, base_dir, tokenizer, documents, device, report)


def teacher_prompts(
    recipe: Recipe, name: str, tokenizer: Any, documents: Callable[[str], Documents]
) -> list[list[int]]:
    """What the base continues when it writes the source called `name`. documents: of the source with a name. Raises
    BadInput."""
    source = recipe.teachers[name]
    if source.prompts is None:
        return teacher.encode_prompts(source, tokenizer)
    return teacher.beginnings(source, documents(source.prompts).train, recipe.seed)


def write_teacher_text(
    recipe: Recipe,
    name: str,
    folder: Path,
    base_dir: Path,
    tokenizer: Any,
    device: torch.device,
    documents: Callable[[str], Documents],
) -> dict[str, Any]:
    """The step `data-NAME`: lets the base write the source called `name` into `folder`, and goes on where a killed call
    stopped. documents: of the source with a name. Raises BadInput, LinearizeError."""
    source, prompts = recipe.teachers[name], teacher_prompts(recipe, name, tokenizer, documents)
    with show_progress(f"data-{name}") as report:
        teacher.write(
            source,
            folder / teacher.FILE,
            prompts=prompts,
            base_dir=base_dir,
            device=device,
            precision=recipe.precision,
            seed=recipe.seed,
            progress=report,
        )
    return {"tokens": source.written_tokens, "prompts": len(prompts)}


def stage_rows(recipe: Recipe, index: int, documents: Mapping[str, Sequence[Document]]) -> PackedDataset | MixedDataset:
    """The rows that stage `index` (from 0) of `recipe` trains on. documents: of each of its sources, by name. Raises
    BadInput when there is not one."""
    return training.rows_of(recipe.stages[index], documents, recipe.stage_seed(index))


def train_stage(
    recipe: Recipe,
    index: int,
    folder: Path,
    *,
    model_dir: Path,
    results: Sequence[Path],
    documents: Mapping[str, Sequence[Document]],
    base_dir: Path,
    device: torch.device,
    resume: bool,
    shard: bool = False,
) -> dict[str, Any]:
    """A training step: stage `index` (from 0) of `recipe` on `documents`, those of each of its sources, into `folder`.
    Returns its statistics.

    model_dir, results: the linearized model, and what earlier stages made of it. resume: go on from the last checkpoint
    in `folder`. shard: the processes share the weights. Raises BadInput, LinearizeError.
    """
    stage, dataset = recipe.stages[index], stage_rows(recipe, index, documents)
    with show_progress(recipe.stage_names[index]) as report:
        return training.run_stage(
            stage,
            model_dir=model_dir,
            results=results,
            base_dir=base_dir,
            dataset=dataset,
            out=folder,
            device=device,
            precision=recipe.precision,
            seed=recipe.stage_seed(index),
            resume=resume,
            shard=shard,
            sequence_parallel=recipe.sequence_parallel,
            progress=report,
        )
