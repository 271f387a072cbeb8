"""One process of `bench_scale.py`: trains models with random weights on random tokens, alone or with others.

    RANK=0 WORLD_SIZE=1 … python kernels/scale_parts.py TASK.json

`bench_scale.py` starts it. TASK.json says which part it runs and where to write its rows. It begins when it reads a
line from standard input, because imports take longer than much of what is measured. Stages, parallelism and trainer are
those of liger-convert.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from bench import machine
from bench_plan import PARTS, documents
from gated_kernels import in_use, use
from gated_kernels.check import error
from scale_layers import DTYPE, Stack
from torch import Tensor
from torch.distributed.tensor import DTensor

from liger_convert.benchmark.bench import quartiles
from liger_convert.benchmark.shapes import SHAPES, random_model
from liger_convert.config.stages import DistillStage, FinetuneStage, Stage
from liger_convert.model import MIXER_MODULE
from liger_convert.training import trainer as trainer_module
from liger_convert.training.distill import DistillObjective
from liger_convert.training.finetune import FinetuneObjective
from liger_convert.training.sequence_parallel import Group, group_of
from liger_convert.training.sharding import mesh_of, shard_base, shard_student
from liger_convert.training.stage import rows_of
from liger_convert.training.student import compile_layers, prepare
from liger_convert.training.trainer import Objective, StageTrainer
from liger_convert.utils import processes
from liger_convert.utils.progress import quiet_libraries

WARM = 3  # steps that are not counted: they compile, capture, and allocate the optimizer's state
STEP_ENDS = "loss, flags"  # the last part of a step
LEARNED = 3  # steps after which losses and weights are compared
RATES = {"mixer": 1e-5, "attention": 1e-5, "body": 1e-5}
STAGES = PARTS | {"finetune": {"kind": "finetune", "loss_on": "all", "learning_rates": RATES}}
KINDS: dict[str, type[Stage]] = {"distill": DistillStage, "finetune": FinetuneStage}

SHAPES["few-layers"] = SHAPES["smollm2-135m"] | {"num_hidden_layers": 4}
SHAPES["attention-8b"] = SHAPES["llama-3-8b"] | {"num_hidden_layers": 4, "intermediate_size": 64, "vocab_size": 256}
SHAPES["tiny"] = SHAPES["smollm2-135m"] | {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
SHAPES["tiny"] |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 101, "initializer_range": 0.1}

# Of each part: the shape, and the rows per GPU and step and their length. They fit on a GPU with 80 GB.
SIZES: dict[str, dict[str, Any]] = {
    "ddp": {"shape": "smollm2-135m", "rows": 16, "length": 2048},
    "fsdp-lora": {"shape": "llama-3-8b", "rows": 4, "length": 2048},
    "fsdp-full": {"shape": "llama-3-8b", "rows": 2, "length": 2048},
    "sequence": {"shape": "smollm2-135m", "rows": 1, "length": 32768},
    "equality": {"shape": "few-layers", "rows": 4, "length": 1024},
}
# Layers alone: how many are stacked, and the lengths of the rows that are checked and timed.
STACKS: dict[str, Any] = {"shape": "attention-8b", "layers": (1, 4), "checked": 2048, "timed": (32768, 131072)}
ON_CPU = {"shape": "tiny", "rows": 2, "length": 160}
STACKS_ON_CPU = {"shape": "tiny", "layers": (1, 2), "checked": 160, "timed": (320,)}


@dataclass(frozen=True)
class Case:
    """A training.

    sharing: `rows` (data parallel, or one process), `weights` (FSDP2) or `sequence`.
    rows, length: per process; with `sequence`, length is that of a process's shard of a row.
    """

    stage: str
    shape: str
    rows: int
    length: int
    sharing: str = "rows"
    checkpointed: bool = False
    compiled: bool = True
    keep_gathered: bool = False
    steps: int = WARM


class Worker:
    """This process, one of `count` that run a part together."""

    def __init__(self, task: dict[str, Any]):
        self.task, self.count, self.rank = task, processes.count(), processes.rank()
        local = int(os.environ.get("LOCAL_RANK", "0"))
        self.device = torch.device("cpu") if task["cpu"] else torch.device("cuda", local)
        if self.cuda:
            torch.cuda.set_device(self.device)
        self.folder = Path(task["folder"])
        self.rows_file = self.folder / f"{task['name']}-{self.rank}.jsonl"
        self.sizes = ON_CPU if task["cpu"] else SIZES[task["part"]]
        self.compiles = task["compile"] and self.cuda

    @property
    def cuda(self) -> bool:
        return not self.task["cpu"]

    def case(self, stage: str, **options: Any) -> Case:
        return Case(stage, **self.sizes | {"steps": WARM + self.task["steps"], "compiled": self.compiles} | options)

    def tell(self, case: str, found: dict[str, Any]) -> None:
        """Appends a row to this process's file."""
        about = machine(self.device.type) | {"kernels": in_use()}
        with self.rows_file.open("a") as file:
            file.write(json.dumps({"case": case, "gpus": self.count, "machine": about} | found) + "\n")

    def attempt(self, case: str, work: Callable[[], dict[str, Any]], **about: Any) -> None:
        """Writes a row with the result of `work`. If memory runs out, the row says so. With several processes this one
        then exits, because the others would wait for it forever."""
        try:
            self.tell(case, about | work())
        except torch.OutOfMemoryError as problem:
            held, asked = torch.cuda.max_memory_allocated() / 1e9, ". ".join(str(problem).split(". ")[:2])
            self.tell(case, about | {"missing": f"does not fit ({asked}; {held:.1f} GB at the peak before)"})
            if self.count > 1:
                os._exit(1)
        self.free()

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def free(self) -> None:
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()


@dataclass
class Built:
    case: Case
    stage: Stage
    model: Any
    objective: Objective
    group: Group | None


def stage_of(case: Case, count: int) -> Stage:
    """The stage as a recipe would define it. A batch has the rows of all `count` processes, each a single document."""
    fields = {**STAGES[case.stage]}
    shards = count if case.sharing == "sequence" else 1
    length, rows = case.length * shards, case.rows * count // shards
    fields |= {"data": "random", "seq_len": length, "batch_size": rows, "tokens": case.steps * rows * length}
    fields |= {"concat_documents": True, "gradient_checkpointing": case.checkpointed, "compile": case.compiled}
    return KINDS[fields["kind"]].model_validate(fields | {"warmup_ratio": 0.0, "schedule": "constant"})


def build(worker: Worker, case: Case, dtype: torch.dtype = DTYPE) -> Built:
    """Sets a stage up as `run_stage` does, but with random weights created on the device. All but the mixers' are
    rounded to bfloat16, like those of pretrained models."""
    stage, device = stage_of(case, worker.count), worker.device
    mesh = mesh_of(device) if case.sharing == "weights" else None
    group = group_of(device, worker.count) if case.sharing == "sequence" else None
    base: Any = None
    objective: Objective = FinetuneObjective()
    if isinstance(stage, DistillStage):
        base = random_model(case.shape, None, device, DTYPE).requires_grad_(False)
        ids = base.get_input_embeddings().weight  # permuted embeddings, so that the teacher differs from the student
        ids.data = ids.data.roll(1, 0)
        base = base.to(dtype)
        if mesh is not None:
            base = shard_base(base, mesh, aligns=False, keep_gathered=case.keep_gathered)
        objective = DistillObjective(base, stage)
    model = random_model(case.shape, "gla", device, torch.float32)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if f".{MIXER_MODULE}." not in name:
                p.copy_(p.to(DTYPE))
    torch.manual_seed(0)  # for the adapters
    model = prepare(model, stage)
    if group is not None:
        for body in (model, base):
            if body is not None:
                group.install(body)
    if mesh is not None:
        model = shard_student(model, mesh, dtype, aligns=False, keep_gathered=case.keep_gathered)
    if case.compiled and group is None:
        compile_layers(model, objective, False)
    worker.free()
    return Built(case, stage, model.train(), objective, group)


def trainer_of(
    worker: Worker,
    built: Built,
    folder: str,
    progress: Any = None,
    kind: Callable[..., StageTrainer] = StageTrainer,
    dtype: torch.dtype = DTYPE,
) -> StageTrainer:
    return kind(
        built.model,
        built.stage,
        built.objective,
        rows_of(built.stage, {"random": documents(built.stage, built.model.config.vocab_size)}, 0),
        out=Path(folder),
        device=worker.device,
        dtype=dtype,
        seed=0,
        progress=progress,
        processes=worker.count,
        sharded=built.case.sharing == "weights",
        sequence=built.group,
    )


class Clocked(StageTrainer):
    """Records when each part of a step ends, on the host and by events on the GPU. The time between two notes counts
    for the later one, so that the parts add up to the step by either clock."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.notes: list[tuple[str, float, Any]] = []
        self.optimizer.register_step_post_hook(lambda *_: self.note("clipping, optimizer"))

    def note(self, part: str) -> None:
        event = None
        if self.args.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self.notes.append((part, time.perf_counter(), event))

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        found = super().get_batch_samples(*args, **kwargs)
        self.note("rows ready")
        return found

    def _pass(self, *args: Any) -> Tensor:
        loss = super()._pass(*args)
        self.note("forward, backward")
        return loss

    def _average(self) -> None:
        super()._average()
        self.note("averaging")

    def profile(self) -> dict[str, dict[str, float]]:
        """Median milliseconds of each part of a step after the warm-up, by clock. A step ends with the note
        `STEP_ENDS`."""
        ends = [at for at, (part, *_) in enumerate(self.notes) if part == STEP_ENDS][WARM - 1 :]
        steps: dict[str, list[dict[str, float]]] = {"host": [], "gpu": []}
        for begin, end in itertools.pairwise(ends):
            host, gpu = defaultdict[str, float](float), defaultdict[str, float](float)
            for (_, begun, before), (part, ended, after) in itertools.pairwise(self.notes[begin : end + 1]):
                host[part] += 1e3 * (ended - begun)
                if after is not None:
                    gpu[part] += before.elapsed_time(after)
            steps["host"].append(host)
            steps["gpu"].append(gpu)
        return {
            clock: {part: statistics.median(step[part] for step in of) for part in of[0]} for clock, of in steps.items()
        }


def sending(worker: Worker, parameters: list[Any]) -> float:
    """Median milliseconds of an all-reduce, alone, of as many fp32 numbers as there are trained parameters."""
    sent, times = torch.zeros(sum(p.numel() for p in parameters), device=worker.device), []
    for _ in range(2 * WARM):
        worker.wait()
        begun = time.perf_counter()
        torch.distributed.all_reduce(sent)
        worker.wait()
        times.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(times[WARM:])


def timed(worker: Worker, built: Built, eager: str | None = None) -> dict[str, Any]:
    """Trains and times the optimizer steps after the warm-up. eager: a reason not to capture them, given to the trainer
    in advance, so that it also averages gradients as it does without capture."""
    marks: list[float] = []

    def mark(done: float, total: float | None, note: str = "") -> None:
        worker.wait()
        marks.append(time.perf_counter())
        if isinstance(trainer, Clocked):
            trainer.note(STEP_ENDS)
        if done == WARM and worker.cuda:
            torch.cuda.reset_peak_memory_stats()

    kind = Clocked if worker.task["profile"] and worker.task["part"] == "ddp" else StageTrainer
    known = mock.patch.object(trainer_module, "why_not_captured", return_value=eager) if eager else nullcontext()
    built.model._is_accelerate_prepared = built.case.sharing == "weights"  # an earlier trainer may have set it
    with tempfile.TemporaryDirectory() as folder:
        with known:
            trainer = trainer_of(worker, built, folder, mark, kind)
        started = time.perf_counter()
        trainer.train()
    if worker.count > 1 and built.case.sharing != "weights":
        same_weights(worker, built.model)
    steps = [1e3 * (after - before) for before, after in zip(marks[WARM - 1 :], marks[WARM:])]
    step_ms = quartiles(steps)
    captured = trainer.eager is None
    found = {
        "stage": built.case.stage,
        "rows": built.stage.batch_size,
        "tokens_a_row": built.stage.seq_len,
        "first_step_s": marks[0] - started,
        "step_ms": step_ms,
        "tokens_per_s": 1e3 * built.stage.step_tokens / step_ms["median"],
        "fwd_bwd": "captured" if captured else f"eager: {trainer.eager}",
        "flat": trainer.flat,  # whether gradients were averaged in place
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    }
    if isinstance(trainer, Clocked):
        found["profile"] = trainer.profile()
        if worker.count > 1:
            found["sending_ms"] = sending(worker, trainer.fwd_bwd.parameters)
    if worker.cuda:
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        # a captured graph's memory pool stays reserved, but does not count as allocated between replays
        found |= {"peak_bytes": peaks[captured], "reserved_bytes": peaks[1]}
    return found


def same_weights(worker: Worker, model: Any) -> None:
    """Raises ValueError if data-parallel processes have ended with different weights. An Adam step with other gradients
    would change a parameter's sum by far more than rounding does."""
    sums = torch.stack([p.detach().double().sum() for p in model.parameters() if p.requires_grad])
    first = sums.clone()
    torch.distributed.broadcast(first, 0)
    if not torch.allclose(sums, first, rtol=1e-6, atol=1e-6):
        raise ValueError(f"process {worker.rank} has other weights than the first one after the same steps")


def ddp(worker: Worker) -> None:
    """All weights, with captured steps if the trainer captures them, and without."""
    built = build(worker, worker.case("distill"))
    worker.attempt("rows shared", lambda: timed(worker, built))
    if worker.compiles:
        worker.attempt("rows shared, not captured", lambda: timed(worker, built, "kernel by kernel"))


def fsdp_lora(worker: Worker) -> None:
    sharing = "weights" if worker.count > 1 else "rows"
    case = worker.case("distill-lora", sharing=sharing, checkpointed=True)
    worker.attempt("LoRA", lambda: timed(worker, build(worker, case)))
    if worker.count > 1:
        kept = replace(case, keep_gathered=True)
        worker.attempt("LoRA, layers stay gathered", lambda: timed(worker, build(worker, kept)))


def fsdp_full(worker: Worker) -> None:
    case = worker.case("distill", sharing="weights", checkpointed=True)
    worker.attempt("all weights", lambda: timed(worker, build(worker, case)))


def sequence(worker: Worker) -> None:
    """Layers alone, then whole models: one row split across all GPUs, compared with one row per GPU."""
    sizes = STACKS_ON_CPU if worker.task["cpu"] else STACKS
    stack = Stack(sizes["shape"], worker.device, group_of(worker.device, worker.count))
    stack.check(sizes["checked"])
    measured = {"warm": WARM, "steps": worker.task["steps"]}
    for length in sizes["timed"]:
        for count in sizes["layers"]:
            about = {"tokens_a_row": length, "layers": count, "rows": 1}
            try:
                alone = stack.measure(length, count, None, **measured)
            except torch.OutOfMemoryError:  # occurs in all processes alike, and none waits for another here
                alone = {"missing": "does not fit: out of memory"}
            worker.free()
            worker.tell("layers, by one GPU", about | {"gpus": 1} | alone)
            shared = functools.partial(stack.measure, length, count, stack.group, **measured)
            worker.attempt("layers, a row shared", shared, **about)
    del stack
    worker.free()
    for stage in ("finetune", "distill"):
        cases = {"shared": {"sharing": "sequence", "compiled": False}, "each, not compiled": {"compiled": False}}
        if worker.compiles:
            cases["each"] = {}
        for name, options in cases.items():
            case = worker.case(stage, **options)
            worker.attempt(f"{stage}, a row {name}", lambda case=case: timed(worker, build(worker, case)))
        torch.compiler.reset()


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
        ("mistake: no neighbours", "distill", Plain, shards),
    ]
    if worker.compiles:
        compiled = {"compiled": True}
        cases.insert(5, ("rows shared, compiled", "distill", Plain, by_rows | compiled))
        cases.insert(6, ("weights shared, compiled", "distill", Plain, by_rows | compiled | {"sharing": "weights"}))
    for name, stage, kind, options in cases:
        case = worker.case(stage, **{"compiled": False} | steps | options)
        deaf = mock.patch.multiple(Group, **DEAF) if "neighbours" in name else nullcontext()
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
