"""How the processes of a run share the rows of an optimizer step, which are the same at any number of processes."""

from __future__ import annotations

import math

from liger_convert.config.stages import AlignStage, Stage
from liger_convert.data.mixed_rows import MixedDataset
from liger_convert.data.packed_rows import PackedDataset
from liger_convert.utils.errors import BadInput


def share(stage: Stage, processes: int, shards: int = 1) -> tuple[int, int]:
    """Rows of a micro-batch and micro-batches of a step of each one of so many processes, of which `shards` that follow
    each other have the same rows.

    Whole micro-batches are shared first, as a step of fewer ones is as good as it was; then the rows of one. Raises
    BadInput where they do not divide, and for a stage that trains layer by layer.
    """
    if processes > 1 and isinstance(stage, AlignStage) and stage.layerwise:
        raise BadInput(f"align: layerwise trains on one GPU, not on {processes}; leave it out and set sharding: full")
    if processes % shards:
        why = f"{shards} processes share a row, but {processes} cannot be split into groups of {shards}"
        raise BadInput(f"sequence_parallel: {why}; start a multiple of {shards}")
    processes //= shards
    if not _divides(stage, processes):
        rows = f"{stage.kind}: batch_size {stage.batch_size} × grad_accumulation {stage.grad_accumulation}"
        fewer = next(number for number in range(processes - 1, 0, -1) if _divides(stage, number))
        other = -(-stage.grad_accumulation // processes) * processes
        how = f"start {fewer * shards}, or set grad_accumulation: {other}, which trains on a larger batch"
        groups = "processes" if shards == 1 else f"groups of {shards} processes"
        raise BadInput(f"{rows} cannot be divided among {processes} {groups}; {how}")
    common = math.gcd(processes, stage.grad_accumulation)
    return stage.batch_size * common // processes, stage.grad_accumulation // common


def steps_of(stage: Stage, dataset: PackedDataset | MixedDataset) -> int:
    """The optimizer steps that the rows of a stage give. Raises BadInput where they are less than one."""
    steps = len(dataset) // (stage.batch_size * stage.grad_accumulation)
    if not steps:
        raise BadInput(
            f"{len(dataset)} rows of {dataset.seq_len} tokens are fewer than one optimizer step of this stage takes"
        )
    return steps


def _divides(stage: Stage, processes: int) -> bool:
    return stage.batch_size % (processes // math.gcd(processes, stage.grad_accumulation)) == 0
