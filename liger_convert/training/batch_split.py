"""How the rows of an optimizer step are split among the processes of a run. The step's rows do not depend on their
number."""

from __future__ import annotations

import math

from liger_convert.config.stages import Stage
from liger_convert.data.mixed_rows import MixedDataset
from liger_convert.data.packed_rows import PackedDataset
from liger_convert.utils.errors import BadInput, counted


def split_batch(stage: Stage, processes: int, shards: int = 1) -> tuple[int, int]:
    """Returns (rows of a micro-batch, micro-batches of a step) for each process. Each group of `shards` consecutive
    processes gets the same rows.

    The micro-batches of a step are divided among the groups first, since gradient accumulation is then shorter at the
    same efficiency; then the rows of a micro-batch. If the rows do not divide evenly among all groups, fewer of them
    share the rows, see `sharing_groups`. Raises BadInput if the processes do not form whole groups.
    """
    groups = sharing_groups(stage, whole_groups(processes, shards))
    common = math.gcd(groups, stage.grad_accumulation)
    return stage.batch_size * common // groups, stage.grad_accumulation // common


def whole_groups(processes: int, shards: int) -> int:
    """How many groups of `shards` processes there are. Raises BadInput if some processes are left over."""
    if processes % shards:
        why = f"{shards} processes share a row, but {processes} cannot be split into groups of {shards}"
        raise BadInput(f"sequence_parallel: {why}; start a multiple of {shards}")
    return processes // shards


def sharing_groups(stage: Stage, groups: int) -> int:
    """How many of `groups` groups of processes share the rows of a step: as many as the rows divide among evenly.

    The others are spare. A spare group trains on the rows of another one with a weight of 0, so a step takes no longer
    than with the sharing groups alone, and has the same result. Spare groups still hold their part of sharded weights.
    """
    return next(number for number in range(groups, 0, -1) if divides(stage, number))


def batches_of(stage: Stage, steps: int, processes: int, process: int) -> list[range]:
    """The rows of each micro-batch of process number `process` in `steps` steps, in order.

    These are the rows that accelerate gives it in `StageTrainer`: the stage's rows are cut into micro-batches, and one
    after the other goes to one process after the other. A spare process repeats the rows of another one.
    """
    rows, times = split_batch(stage, processes)
    sharing = sharing_groups(stage, processes)
    every = rows * sharing
    return [range(first, first + rows) for first in range(process % sharing * rows, steps * times * every, every)]


def steps_of(stage: Stage, dataset: PackedDataset | MixedDataset) -> int:
    """The number of optimizer steps for the rows of a stage. Raises BadInput if it is 0."""
    steps = len(dataset) // (stage.batch_size * stage.grad_accumulation)
    if not steps:
        rows = f"{counted(len(dataset), 'row')} of {dataset.seq_len} tokens"
        raise BadInput(f"{rows}: fewer than one optimizer step of this stage takes")
    return steps


def divides(stage: Stage, processes: int) -> bool:
    """Whether the rows of a step divide evenly among `processes` processes."""
    return stage.batch_size % (processes // math.gcd(processes, stage.grad_accumulation)) == 0
