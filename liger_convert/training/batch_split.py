"""How the rows of an optimizer step are split among the processes of a run. The step's rows do not depend on their
number."""

from __future__ import annotations

import math

from liger_convert.config.stages import AlignStage, Stage
from liger_convert.data.mixed_rows import MixedDataset
from liger_convert.data.packed_rows import PackedDataset
from liger_convert.utils.errors import BadInput


def split_batch(stage: Stage, processes: int, shards: int = 1) -> tuple[int, int]:
    """Returns (rows of a micro-batch, micro-batches of a step) for each process. Each group of `shards` consecutive
    processes gets the same rows.

    The micro-batches of a step are divided among the processes first, since gradient accumulation is then shorter at
    the same efficiency; then the rows of a micro-batch. Raises BadInput if they do not divide evenly, and for a
    layerwise stage with several processes.
    """
    if processes > 1 and isinstance(stage, AlignStage) and stage.layerwise:
        raise BadInput(f"align: layerwise trains on one GPU, not on {processes}; leave it out and set sharding: full")
    if processes % shards:
        why = f"{shards} processes share a row, but {processes} cannot be split into groups of {shards}"
        raise BadInput(f"sequence_parallel: {why}; start a multiple of {shards}")
    processes //= shards
    if not divides(stage, processes):
        rows = f"{stage.kind}: batch_size {stage.batch_size} × grad_accumulation {stage.grad_accumulation}"
        fewer = next(number for number in range(processes - 1, 0, -1) if divides(stage, number))
        other = -(-stage.grad_accumulation // processes) * processes
        how = f"start {fewer * shards}, or set grad_accumulation: {other}, which trains on a larger batch"
        groups = "processes" if shards == 1 else f"groups of {shards} processes"
        raise BadInput(f"{rows} cannot be divided among {processes} {groups}; {how}")
    common = math.gcd(processes, stage.grad_accumulation)
    return stage.batch_size * common // processes, stage.grad_accumulation // common


def steps_of(stage: Stage, dataset: PackedDataset | MixedDataset) -> int:
    """The number of optimizer steps for the rows of a stage. Raises BadInput if it is 0."""
    steps = len(dataset) // (stage.batch_size * stage.grad_accumulation)
    if not steps:
        raise BadInput(
            f"{len(dataset)} rows of {dataset.seq_len} tokens are fewer than one optimizer step of this stage takes"
        )
    return steps


def divides(stage: Stage, processes: int) -> bool:
    """Whether the rows of a step divide evenly among `processes` processes."""
    return stage.batch_size % (processes // math.gcd(processes, stage.grad_accumulation)) == 0
