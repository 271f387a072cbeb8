"""Trains tiny stages; started by torchrun, in several processes at once.

    torchrun --nproc-per-node 2 tests/support/ranks.py JOBS.json

A job has the `name` of a stage of `stages.py`, the folder `out`, and may have `fields` (of `make_stage`), `options` (of
`train`), `variant` (of the adapters of a name that ends with -lora), `plain` (descent without Adam, which would hide
the scale of a gradient), `same_rows` (a mistake: all processes train on the rows of the first), `spare_counts` (a
mistake: a spare process counts as one that shares the rows), `apart` (a mistake: flat gradients stay each process's
own), `deaf` (a mistake: shards of rows get nothing from their neighbors),
`compiled` (the layers, without a compiler behind), `rounded` (a mistake: all that is gathered is in the compute dtype,
but for the mixers), `replayed` (the passes, as a CUDA graph's would be), `dies`, [rank, step]: where SIGKILL ends that
process, `keeps`, a step at which what is in `out` is copied to `out`-kept, and `hoards` (a mistake: keeps all that is
gathered for the result). What is said of a full result has `writing`: by how many bytes memory grew while it was
written. `flat` says whether gradients of the last step were averaged where they stood, in flat tensors. What is said of
a compiled job has `graphs`: how many ran in its forward passes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from peaks import TOLD, forget_peak, peak
from replays import replayed_on_a_cpu
from stages import folders, make_stage, train
from torch._dynamo.backends.registry import lookup_backend
from torch.distributed.tensor import DTensor

from liger_convert.config.stages import LearningRates, Lora
from liger_convert.data.packed_rows import collate
from liger_convert.training import full_result, sharding, trainer
from liger_convert.training import stage as module
from liger_convert.training.sequence_parallel import Group
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


class SpareCounts(Plain):
    """Counts the rows and labels of every process."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.weight, self.data_collator = self.weight or 1.0, collate


def held(made: StageTrainer) -> dict[str, Any]:
    """The bytes of parameters that this process holds of the model and its teacher, and their dtypes."""
    bodies = {"model": made.models[0], "base": (made.models[1:] or [None])[0]}
    found: dict[str, Any] = {}
    for name, body in bodies.items():
        if body is not None:
            own = [p.to_local() if isinstance(p, DTensor) else p for p in body.parameters()]
            found[name] = sum(p.nbytes for p in own if not p.is_meta)
    kinds: dict[str, set[str]] = {}
    for name, p in made.models[0].named_parameters():
        part = "mixer" if ".mixer." in name else "trained" if p.requires_grad else "frozen"
        kinds.setdefault(part, set()).add(str(p.dtype).removeprefix("torch."))
    return found | {"dtypes": {part: sorted(names) for part, names in kinds.items()}}


def stage_of(job: dict[str, Any]) -> Any:
    fields = dict(job.get("fields", {}))
    name = job["name"]
    if name.endswith("-lora"):  # without dropout, whose numbers are other ones in each process
        name = name.removesuffix("-lora")
        lora = Lora(rank=4, variant=job.get("variant", "lora"))
        fields |= {"lora": lora, "learning_rates": LearningRates(mixer=1e-2, lora=2e-2)}
    return make_stage(name, **fields)


def do(job: dict[str, Any]) -> dict[str, Any]:
    rank, dies = int(os.environ.get("RANK", "0")), job.get("dies")

    def progress(done: float, total: float | None, note: str = "") -> None:
        if dies == [rank, done]:
            os.kill(os.getpid(), signal.SIGKILL)
        if job.get("keeps") == done and not rank:
            made[0].finish_checkpoint()
            shutil.copytree(job["out"], f"{job['out']}-kept")

    mistakes = [kind for name, kind in (("same_rows", SameRows), ("spare_counts", SpareCounts)) if job.get(name)]
    kind = (*mistakes, Plain if job.get("plain") else StageTrainer)[0]
    made: list[StageTrainer] = []

    def make(*args: Any, **kwargs: Any) -> StageTrainer:
        made.append(kind(*args, **kwargs))
        modules = made[0].models[0].named_modules()
        mixers = [module for name, module in modules if name.endswith(".self_attn.mixer")]
        for mixer in [] if job.get("compiled") else mixers:  # compiled with its layer
            mixer.register_forward_pre_hook(
                lambda module, _args: computed.update(str(p.dtype).removeprefix("torch.") for p in module.parameters())
            )
        return made[0]

    def write(*args: Any, **kwargs: Any) -> None:
        held_before = forget_peak()
        full_result.write_model(*args, **kwargs)
        grew.append(peak() - held_before)

    def hoard(parameter: torch.Tensor) -> torch.Tensor:
        hoarded.append(gather(parameter))
        return hoarded[-1]

    def counted(graph: Any, inputs: Any) -> Any:
        run = lookup_backend("aot_eager")(graph, inputs)

        def call(*args: Any) -> Any:
            ran.append(graph)
            return run(*args)

        return call

    computed: set[str] = set()
    ran: list[Any] = []
    grew: list[int] = []
    hoarded: list[torch.Tensor] = []
    gather = full_result._whole
    changed: dict[Any, dict[str, Any]] = {module: {"StageTrainer": make} | ({"write_model": write} if TOLD else {})}
    if job.get("hoards"):
        changed[full_result] = {"_whole": hoard}
    if job.get("deaf"):
        nothing = {"send": lambda *_: None, "receive": lambda _group, like, _source: torch.zeros_like(like)}
        changed[Group] = nothing
    if job.get("compiled"):
        changed[module]["gains_by_compiling"] = lambda device: True
        changed[torch] = {"compile": functools.partial(torch.compile, backend=counted)}
    if job.get("rounded"):
        changed[sharding] = {"_trains_body": lambda model: True}
    if job.get("apart"):
        changed[trainer] = {"average_flats": lambda *_: None}
    with contextlib.ExitStack() as stack:
        if job.get("replayed"):
            replayed_on_a_cpu(stack.enter_context(pytest.MonkeyPatch.context()))
        for where, values in changed.items():
            stack.enter_context(mock.patch.multiple(where, **values))
        options = job.get("options", {})
        stats = train(stage_of(job), Path(job["out"]), resume=job.get("resume", False), progress=progress, **options)
    stats |= {"writing": grew[-1]} if grew else {}
    if not made:
        return stats
    stats |= {"graphs": len(ran)} if job.get("compiled") else {}
    return stats | {"held": held(made[0]), "mixers_computed_in": sorted(computed), "flat": made[0].flat}


def given_jobs() -> list[dict[str, Any]]:
    """The jobs in the file that the command line names, with the models they need made."""
    torch.set_num_threads(1)
    jobs: list[dict[str, Any]] = json.loads(Path(sys.argv[1]).read_text())
    for job in jobs:  # while there is no group, in which transformers saves in one process only
        options = job.get("options", {})
        folders(options.get("family", "llama"), **options.get("changes", {}))
    return jobs


if __name__ == "__main__":
    for job in given_jobs():
        found = do(job)
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(found), flush=True)
