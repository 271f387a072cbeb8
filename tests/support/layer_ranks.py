"""Trains tiny stages layer by layer; started by torchrun, in several processes at once.

    torchrun --nproc-per-node 2 tests/support/layer_ranks.py JOBS.json

A job has the `name` of a stage of `ranks.py`, the folder `out`, and may have `fields` (of `make_stage`), `options` (of
`train`), `plain` (descent without Adam, which would hide the scale of a gradient), `resume`, `replayed` (the passes, as
a CUDA graph's would be), `late`: the rank of a process whose disk is slow, `dies`, [rank, done]: where SIGKILL ends
that process, and the mistakes `same_rows` (all processes take those of the first), `apart` (gradients stay each
process's own) and `shifted` (the hidden states are those of the rows of another process). What is said of it has
`files`: the digests of the hidden states before each layer; `flat`: for each average of gradients, whether they were
averaged where they stood; and `kept`: how many trained layers were still in memory when the next one began.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import time
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import given_jobs, stage_of
from replays import replayed_on_a_cpu
from stages import train

from liger_convert.training import batch_split, layerwise, trainer
from liger_convert.training.hidden_states import HiddenStates, sums_of
from liger_convert.training.one_layer import LayerTrainer


def do(job: dict[str, Any]) -> dict[str, Any]:
    rank = int(os.environ.get("RANK", "0"))
    files: dict[str, str] = {}
    flat: list[bool] = []
    made: list[weakref.ref[Any]] = []
    kept: list[int] = []

    class Watched(LayerTrainer):
        def __init__(self, model: Any, *args: Any, **kwargs: Any):
            kept.append(sum(other() is not None for other in made))
            model._is_accelerate_prepared = "apart" in job
            super().__init__(model, *args, **kwargs)
            made.append(weakref.ref(next(iter(self._trained().values()))))
            if job.get("plain"):
                self.optimizer = torch.optim.SGD(self._trained().values(), lr=1e-2)

        def get_train_dataloader(self) -> Any:
            loader = super().get_train_dataloader()
            if job.get("same_rows"):
                loader.batch_sampler.process_index = 0
            return loader

        def _average(self) -> None:
            flat.append(self.flat)
            super()._average()

    def batches_of(stage: Any, steps: int, processes: int, process: int) -> list[range]:
        process = 0 if job.get("same_rows") else (process + 1) % processes if job.get("shifted") else process
        return batch_split.batches_of(stage, steps, processes, process)

    remove = layerwise.LayerwiseStage._remove_states_before

    def removed(self: Any, number: int) -> None:
        path = self.work / f"hidden-{number}"  # complete, since all processes have passed a barrier
        if self.is_first and path.exists():
            files[path.name] = hashlib.sha256(path.read_bytes() + sums_of(path).read_bytes()).hexdigest()
        remove(self, number)

    write = HiddenStates._write

    def written(self: Any, *args: Any) -> None:
        if job.get("late") == rank:
            time.sleep(0.2)
        write(self, *args)

    def progress(done: float, total: float | None, note: str = "") -> None:
        if job.get("dies") == [rank, done]:
            os.kill(os.getpid(), signal.SIGKILL)

    changes: dict[Any, dict[str, Any]] = {
        layerwise: {"LayerTrainer": Watched, "batches_of": batches_of},
        layerwise.LayerwiseStage: {"_remove_states_before": removed},
        HiddenStates: {"_write": written},
    }
    with contextlib.ExitStack() as stack:
        if job.get("replayed"):
            replayed_on_a_cpu(stack.enter_context(pytest.MonkeyPatch.context()))
            if job.get("apart"):
                changes[trainer] = {"average_flats": lambda *_: None}
        for where, values in changes.items():
            stack.enter_context(mock.patch.multiple(where, **values))
        stage = stage_of(job | {"fields": {"layerwise": True, **job.get("fields", {})}})
        stats = train(
            stage, Path(job["out"]), resume=job.get("resume", False), progress=progress, **job.get("options", {})
        )
    return stats | {"files": files, "flat": flat, "kept": kept}


if __name__ == "__main__":
    for job in given_jobs():
        found = do(job)
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(found), flush=True)
