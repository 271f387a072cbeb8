"""The trainings that `bench_scale.py` times and compares: models with random weights, on random tokens.

A `Worker` is one process of a part of the benchmark. A `Case` describes a training, `build` sets it up, and
`trainer_of` makes its trainer. Stages, parallelism and trainer are those of liger-convert.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench import machine
from bench_plan import PARTS, documents
from gated_kernels import in_use
from scale_layers import DTYPE
from scale_profile import PROFILED

from liger_convert.benchmark.shapes import SHAPES, random_model
from liger_convert.config.stages import DistillStage, FinetuneStage, Stage
from liger_convert.model import MIXER_MODULE
from liger_convert.training.distill import DistillObjective
from liger_convert.training.finetune import FinetuneObjective
from liger_convert.training.sequence_parallel import Group, group_of
from liger_convert.training.sharding import mesh_of, shard_base, shard_student
from liger_convert.training.stage import rows_of
from liger_convert.training.student import compile_layers, prepare
from liger_convert.training.trainer import Objective, StageTrainer
from liger_convert.utils import processes

WARM = 3  # steps that are not counted: they compile, capture, and allocate the optimizer's state
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
ON_CPU = {"shape": "tiny", "rows": 2, "length": 160}
SHARD = 80  # the shortest shard of a row: longer than the window
BY_KERNEL = "fsdp-lora", "fsdp-full"  # parts whose steps are profiled by kernels


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
        if task["part"] == "equality":  # one process and several train on the same rows
            least = {"rows": task["first"], "length": SHARD * task["first"]}
            self.sizes = self.sizes | {name: max(self.sizes[name], size) for name, size in least.items()}
        self.compiles = task["compile"] and self.cuda

    @property
    def cuda(self) -> bool:
        return not self.task["cpu"]

    @property
    def recorded(self) -> int:
        """The steps after the timed ones, whose kernels are recorded."""
        return PROFILED if self.task["profile"] and self.task["part"] in BY_KERNEL else 0

    def case(self, stage: str, **options: Any) -> Case:
        steps = WARM + self.task["steps"] + self.recorded
        return Case(stage, **self.sizes | {"steps": steps, "compiled": self.compiles} | options)

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
