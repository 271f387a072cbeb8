"""Processes that the rows of a step do not divide among are spare: they change nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from launching import distance, learned, one_thread, told
from ranks import do
from stages import make_stage

from liger_convert.training.batch_split import sharing_groups, split_batch

EVERY = {"steps": 4, "batch": 2, "accumulation": 2, "warmup_ratio": 0.0, "schedule": "constant"}

# three processes, of which two share the rows of a step
SPARE: dict[str, dict[str, Any]] = {
    "align": {"name": "align"},
    "distill": {"name": "distill", "options": {"shard": True}},
    "finetune": {"name": "finetune", "replayed": True},
}


def test_a_spare_process_changes_nothing(tmp_path: Path) -> None:
    """Neither the weights nor the losses, whether it averages gradients in DDP, in shards or in flat tensors. In the
    control it counts like the others."""
    common = {"plain": True, "fields": EVERY}
    jobs = [common | job | {"out": f"{tmp_path}/{name}"} for name, job in SPARE.items()]
    wrong = [job | {"out": f"{job['out']}-counts", "spare_counts": True} for job in jobs]
    several = told(3, tmp_path, [*jobs, *wrong])
    for job in jobs:
        kind = job["name"]
        alone = {"name": kind, **common}
        with one_thread():
            stats = do(alone | {"out": tmp_path / "whole" / kind})
            do(alone | {"out": tmp_path / "apart" / kind, "fields": EVERY | {"batch": 1, "accumulation": 4}})
        whole = learned(tmp_path / "whole" / kind)
        rounding = distance(learned(tmp_path / "apart" / kind), whole)
        assert 0 < rounding < 1e-4, kind
        assert distance(learned(job["out"]), whole) < 10 * rounding, kind
        assert [loss for _, loss in several[kind]["loss"]] == pytest.approx([x for _, x in stats["loss"]], rel=1e-4)
        assert distance(learned(f"{job['out']}-counts"), whole) > 1000 * rounding, kind


@pytest.mark.parametrize(
    ("batch", "accumulation", "processes", "sharing"),
    [(4, 1, 3, 2), (4, 1, 8, 4), (1, 1, 2, 1), (2, 2, 6, 4), (3, 2, 5, 3), (6, 4, 7, 6)],
)
def test_as_many_processes_share_the_rows_as_these_divide_among(
    batch: int, accumulation: int, processes: int, sharing: int
) -> None:
    stage = make_stage("finetune", batch=batch, accumulation=accumulation)
    assert sharing_groups(stage, processes) == sharing
    assert split_batch(stage, processes) == split_batch(stage, sharing)
    assert math.prod(split_batch(stage, processes)) * sharing == batch * accumulation
