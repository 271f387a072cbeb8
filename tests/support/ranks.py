"""Trains tiny stages; started by torchrun, in several processes at once.

    torchrun --nproc-per-node 2 tests/support/ranks.py JOBS.json

A job has the `name` of a stage of `stages.py`, the folder `out`, and may have `fields` (of `make_stage`), `resume`,
`shard`, `plain` (descent without Adam, which would hide the scale of a gradient), `same_rows` (a mistake: all processes train on
the rows of the first) and `dies`, [rank, step]: where SIGKILL ends that process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from stages import make_stage, train

from liger_convert.config.stages import LearningRates, Lora
from liger_convert.training import stage as module
from liger_convert.training.trainer import StageTrainer


class Plain(StageTrainer):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.optimizer = torch.optim.SGD(self._trained().values(), lr=1e-2)


class SameRows(Plain):
    """Deals the batches of the first process to all."""

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        loader.batch_sampler.process_index = 0
        return loader


def stage_of(job: dict[str, Any]) -> Any:
    fields = dict(job.get("fields", {}))
    name = job["name"]
    if name == "distill-lora":  # without dropout, whose numbers are other ones in each process
        name, lora = "distill", {"lora": Lora(rank=4), "learning_rates": LearningRates(mixer=1e-2, lora=2e-2)}
        fields |= lora
    return make_stage(name, **fields)


def do(job: dict[str, Any]) -> dict[str, Any]:
    rank, dies = int(os.environ.get("RANK", "0")), job.get("dies")

    def progress(done: float, total: float | None, note: str = "") -> None:
        if dies == [rank, done]:
            os.kill(os.getpid(), signal.SIGKILL)

    trainer = SameRows if job.get("same_rows") else Plain if job.get("plain") else StageTrainer
    module.StageTrainer = trainer  # type: ignore[misc]
    return train(stage_of(job), Path(job["out"]), resume=job.get("resume", False), shard=job.get("shard", False), progress=progress)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for job in json.loads(Path(sys.argv[1]).read_text()):
        found = do(job)
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(found), flush=True)
