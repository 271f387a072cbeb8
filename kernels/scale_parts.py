"""One process of `bench_scale.py`: runs a part of the benchmark, alone or with other processes.

    RANK=0 WORLD_SIZE=1 … python kernels/scale_parts.py TASK.json

`bench_scale.py` starts it. TASK.json says which part it runs and where to write its rows. It begins when it reads a
line from standard input, because imports take longer than much of what is measured.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from gated_kernels import in_use, use
from gated_kernels.check import error
from scale_layers import DTYPE, Stack
from scale_timing import timed
from scale_trainings import WARM, Case, Worker, build, trainer_of
from torch import Tensor
from torch.distributed.tensor import DTensor

from liger_convert.training.sequence_parallel import Group, group_of
from liger_convert.training.trainer import StageTrainer
from liger_convert.utils.progress import quiet_libraries

LEARNED = 3  # steps after which losses and weights are compared
# Layers alone: how many are stacked, and the lengths of the rows that are checked and timed, in order of value. They
# divide among up to 8 GPUs, in shards longer than the window.
STACKS: dict[str, Any] = {"shape": "attention-8b", "layers": (4, 1), "checked": 2048, "timed": (131072, 32768)}
STACKS_ON_CPU = {"shape": "tiny", "layers": (2, 1), "checked": 640, "timed": (640,)}


def ddp(worker: Worker) -> None:
    """All weights, with captured steps if the trainer captures them, and without."""
    built = build(worker, worker.case("distill"))
    worker.attempt("rows shared", lambda: timed(worker, built))
    if worker.compiles:
        worker.attempt("rows shared, not captured", lambda: timed(worker, built, "kernel by kernel"))


def fsdp_lora(worker: Worker) -> None:
    """On several GPUs first with layers that stay gathered, which is faster, in case the time does not last."""
    if worker.count == 1:
        case = worker.case("distill-lora", checkpointed=True)
        worker.attempt("LoRA", lambda: timed(worker, build(worker, case)))
        return
    for name, keep_gathered in (("LoRA, layers stay gathered", True), ("LoRA", False)):
        options = {"sharing": "weights", "checkpointed": True, "keep_gathered": keep_gathered}
        case = worker.case("distill-lora", **options)
        worker.attempt(name, lambda case=case: timed(worker, build(worker, case)))


def fsdp_full(worker: Worker) -> None:
    case = worker.case("distill", sharing="weights", checkpointed=True)
    worker.attempt("all weights", lambda: timed(worker, build(worker, case)))


def sequence(worker: Worker) -> None:
    """One row split across all GPUs, in whole models and in layers alone, in order of value: the time may not last for
    all of it."""
    sizes = STACKS_ON_CPU if worker.task["cpu"] else STACKS

    def stack() -> Stack:
        return Stack(sizes["shape"], worker.device, group_of(worker.device, worker.count))

    stack().check(sizes["checked"])
    worker.free()
    for stage in ("finetune", "distill"):
        whole_models(worker, stage, "shared", sharing="sequence", compiled=False)
        whole_models(worker, stage, "each, not compiled", compiled=False)
    layers_alone(worker, stack(), sizes)
    worker.free()
    for stage in ("finetune", "distill") if worker.compiles else ():
        whole_models(worker, stage, "each")
        torch.compiler.reset()


def whole_models(worker: Worker, stage: str, how: str, **options: Any) -> None:
    """One row shared by all GPUs, or as many tokens in rows of their own, one for each GPU."""
    case, count = worker.case(stage, **options), worker.count
    told = f"{count * case.rows} x {case.length:,} tokens, {case.rows} for each of {count} GPUs"
    if case.sharing == "sequence":
        told = f"{case.rows} x {count * case.length:,} tokens, shared by {count} GPUs"
        if stage == "distill":
            told += f": a token of the base has {count} times as many keys as in a row for each"
    worker.attempt(f"{stage}, a row {how}", lambda: timed(worker, build(worker, case)), compared=told)


def layers_alone(worker: Worker, stack: Stack, sizes: dict[str, Any]) -> None:
    """The same row split across all GPUs and by one. The latter is measured once for all numbers of GPUs."""
    measured = {"warm": WARM, "steps": worker.task["steps"]}
    for count in sizes["layers"]:
        for length in sizes["timed"]:
            about = {"tokens_a_row": length, "layers": count, "rows": 1}
            if worker.count == worker.task["first"]:
                try:
                    alone = stack.measure(length, count, None, **measured)
                except torch.OutOfMemoryError:  # occurs in all processes alike, and none waits for another here
                    alone = {"missing": "does not fit: out of memory"}
                worker.free()
                worker.tell("layers, by one GPU", about | {"gpus": 1} | alone)
            shared = functools.partial(stack.measure, length, count, stack.group, **measured)
            worker.attempt("layers, a row shared", shared, **about)


class Plain(StageTrainer):
    """Trains with plain SGD, because Adam would take a full step even for a gradient that is mere rounding error."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.optimizer = torch.optim.SGD(self._trained().values(), lr=1e-2)


class SameRows(Plain):
    """A deliberate mistake: all processes train on the rows of the first."""

    def get_train_dataloader(self) -> Any:
        loader: Any = super().get_train_dataloader()
        loader.batch_sampler.process_index = 0
        return loader


# A deliberate mistake: shards of rows receive zeros from their neighbors.
DEAF = {"send": lambda *_: None, "receive": lambda _group, like, _source: torch.zeros_like(like)}


def learned(
    worker: Worker, case: Case, kind: type[StageTrainer] = Plain, dtype: torch.dtype = DTYPE
) -> dict[str, Tensor]:
    """The losses of all steps, and the total change of the weights, as vectors."""
    built = build(worker, case, dtype)
    before = weights(built.model)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(worker, built, folder, None, kind, dtype)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": torch.tensor(losses), "weights": weights(built.model) - before}


def weights(model: Any) -> Tensor:
    """The trained weights of a model, gathered if they are sharded, as one vector on the CPU."""
    trained = [p.detach() for p in model.parameters() if p.requires_grad]
    return torch.cat([(p.full_tensor() if isinstance(p, DTensor) else p).flatten().float().cpu() for p in trained])


def equality(worker: Worker) -> None:
    """One process trains in float32 and bfloat16 and saves both results. Several train in bfloat16 and compare with
    them."""
    steps = {"steps": LEARNED}
    rows = worker.sizes["rows"]
    kept = {stage: worker.folder / f"equality-{stage}.pt" for stage in ("distill", "distill-lora")}
    if worker.count == 1:
        for stage, file in kept.items():
            case, path = worker.case(stage, compiled=False, **steps), in_use()
            plain = learned(worker, case)
            use("torch")
            try:
                exact = learned(worker, case, dtype=torch.float32)
            finally:
                use(path)
            torch.save({"plain": plain, "exact": exact}, file)
            worker.tell(f"{stage}: bfloat16", {"stage": stage, "errors": errors(plain, exact)})
        return
    by_rows = {"rows": rows // worker.count}
    shards = {"sharing": "sequence", "length": worker.sizes["length"] // worker.count}
    kept_gathered = {"sharing": "weights", "keep_gathered": True}
    cases: list[tuple[str, str, type[StageTrainer], dict[str, Any]]] = [
        ("rows shared", "distill", Plain, by_rows),
        ("weights shared", "distill", Plain, by_rows | {"sharing": "weights"}),
        ("weights shared", "distill-lora", Plain, by_rows | {"sharing": "weights"}),
        ("weights shared, layers stay gathered", "distill", Plain, by_rows | kept_gathered),
        ("a row shared", "distill", Plain, shards),
        ("mistake: the same rows", "distill", SameRows, by_rows),
        ("mistake: the same rows, weights shared", "distill", SameRows, by_rows | {"sharing": "weights"}),
        ("mistake: no neighbors", "distill", Plain, shards),
    ]
    if worker.compiles:
        compiled = {"compiled": True}
        cases.insert(5, ("rows shared, compiled", "distill", Plain, by_rows | compiled))
        cases.insert(6, ("weights shared, compiled", "distill", Plain, by_rows | compiled | {"sharing": "weights"}))
    for name, stage, kind, options in cases:
        case = worker.case(stage, **{"compiled": False} | steps | options)
        deaf = mock.patch.multiple(Group, **DEAF) if "neighbors" in name else nullcontext()
        with deaf:
            ours = learned(worker, case, kind)
        one = torch.load(kept[stage])
        found = errors(ours, one["exact"])
        plain = errors(one["plain"], one["exact"])
        # Two roundings of the same computation have similar errors. A quarter of a rounding is added in case the plain
        # result is exact by luck.
        allowed = {name: 2 * err + torch.finfo(DTYPE).eps / 4 for name, err in plain.items()}
        holds = all(found[name] <= allowed[name] for name in found)
        row = {"stage": stage, "errors": found, "allowed": allowed, "mistake": "mistake" in name}
        if holds == row["mistake"]:
            row["wrong"] = "a mistake that is not noticed" if holds else "errs by more than is allowed"
        worker.tell(f"{stage}: {name}", row)
        worker.free()


def errors(ours: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    return {name: error(ours[name], x) for name, x in exact.items()}


TASKS: dict[str, Callable[[Worker], None]] = {
    "ddp": ddp,
    "fsdp-lora": fsdp_lora,
    "fsdp-full": fsdp_full,
    "sequence": sequence,
    "equality": equality,
}


def main() -> None:
    faulthandler.register(signal.SIGUSR1)
    quiet_libraries()
    task = json.loads(Path(sys.argv[1]).read_text())
    sys.stdin.readline()
    worker = Worker(task)
    torch.manual_seed(0)
    try:
        TASKS[task["part"]](worker)
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # without destroying the process group, which would wait for the others
    if worker.count > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
