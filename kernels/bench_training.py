"""Times the optimizer steps of a training stage: `python kernels/bench_training.py --shape smollm2-135m`.

Times forward and backward pass, gradient clipping and optimizer step of align, distill and LoRA finetune, on a model
with random weights whose layers are all linear, and of the same finetune on its base. Losses, adapters, parameter
groups, autocast and compiled layers are those of liger-convert; tokens are random. Every length has the same number of
tokens per step, in rows of one document each, or of --documents, which begin anywhere and are kept apart. `step` is the
median by wall clock, and `busy` is the fraction of it in which the GPU computes. `peak` is reserved memory, including
weights, optimizer and CUDA graph.

Every length is compiled separately, and its passes are captured as one CUDA graph. --plain launches them kernel by
kernel. Before anything is timed, the loss and the gradients of a stage on a few short rows are compared with those of
the torch ops in float32. If they are wrong, or a loss is not finite, the row has no time and the exit code is 1. The
--json file is complete after every row, and also lists the kernels that take longest.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from bench import gpu_kernels, machine
from gated_kernels import in_use, use
from gated_kernels.check import error
from rich.console import Console
from rich.table import Table
from torch import Tensor

from liger_convert.benchmark.bench import in_float32, quartiles
from liger_convert.benchmark.shapes import SHAPES, random_model
from liger_convert.config.stages import AlignStage, DistillStage, FinetuneStage, LearningRates, Lora, Stage
from liger_convert.model import take_auxiliary_loss
from liger_convert.model.output_head import OutputHead
from liger_convert.training.align import AlignObjective
from liger_convert.training.capture import CapturedFwdBwd, FwdBwd, why_not_captured
from liger_convert.training.distill import DistillObjective
from liger_convert.training.finetune import FinetuneObjective
from liger_convert.training.frozen import narrow_frozen
from liger_convert.training.losses import cross_entropy, next_tokens, summed
from liger_convert.training.student import compile_layers, gains_by_compiling, prepare
from liger_convert.training.trainer import Objective, optimizer_groups
from liger_convert.utils.device import autocast, compute_dtype, pick_device

CHECKED = (3, 208)  # rows and tokens; all sizes of a graph's inputs differ, because dynamo assumes equal ones are one
BASE = "finetune-base"
LEAST_STEPS = 3
LONGEST = 24  # kernels whose times are reported

# Learning rates hardly affect the time. With these, a model with random weights stays finite.
STAGES: dict[str, dict[str, Any]] = {
    "align": {"kind": AlignStage, "learning_rates": LearningRates(mixer=1e-4, attention=1e-4)},
    "distill": {"kind": DistillStage, "learning_rates": LearningRates(mixer=1e-4, attention=1e-4, body=1e-4)},
    "finetune": {
        "kind": FinetuneStage,
        "learning_rates": LearningRates(lora=1e-4),
        "lora": Lora(targets=["q_proj", "k_proj", "v_proj"]),
        "loss_on": "all",
    },
}
STAGES[BASE] = STAGES["finetune"]


def make_stage(name: str, tokens: int, length: int, accumulation: int, concat: bool = True) -> Stage:
    """The stage as a recipe would define it, with one optimizer step."""
    options = {option: value for option, value in STAGES[name].items() if option != "kind"}
    rows = tokens // length // accumulation
    sizes = {"tokens": tokens, "seq_len": length, "batch_size": rows, "grad_accumulation": accumulation}
    return STAGES[name]["kind"](data="random", concat_documents=concat, **sizes, **options)


class BaseObjective:
    """`FinetuneObjective` for the base itself, whose own forward pass would compute the logits of all tokens."""

    summed = True

    def __call__(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        whole, next_N = model.get_base_model(), next_tokens(batch["labels"])
        inputs = {name: batch.get(name) for name in ("input_ids", "position_ids")}
        hidden_NC = whole.model(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)
        head = OutputHead.of(whole)
        return summed(hidden_NC, lambda piece_NV, chunk: cross_entropy(piece_NV, next_N[chunk]), head)


@dataclass
class Training:
    """A model in one stage, with its adapters and its teacher if it has them.

    documents: of each row. plain: whether its passes are launched kernel by kernel.
    """

    stage: Stage
    model: Any
    base: Any
    objective: Objective
    optimizer: torch.optim.Optimizer
    device: torch.device
    dtype: torch.dtype
    documents: int
    plain: bool

    @classmethod
    def of(cls, name: str, stage: Stage, a: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Training:
        """Sets a training up as `run_stage` does: weights in float32, the teacher's in the dtype of the computation."""
        model = random_model(a.shape, None if name == BASE else a.mixer, device, torch.float32).train()
        base = None
        if name in ("align", "distill"):
            base = random_model(a.shape, None, device, dtype).requires_grad_(False)
        objective: Objective = BaseObjective() if name == BASE else FinetuneObjective()
        if isinstance(stage, AlignStage):
            objective = AlignObjective(base, model.config)
        elif isinstance(stage, DistillStage):
            ids = base.get_input_embeddings().weight  # permuted embeddings: with equal weights, the divergence would be
            ids.data = ids.data.roll(1, 0)  # so small that the check would see nothing but rounding
            objective = DistillObjective(base, stage)
        rates = stage.learning_rates.trained()
        model = prepare(model, stage).to(device)
        if gains_by_compiling(device):
            compile_layers(model, objective, isinstance(stage, AlignStage))
        optimizer = torch.optim.AdamW(optimizer_groups(model, rates, stage.weight_decay), fused=True)
        return cls(stage, model, base, objective, optimizer, device, dtype, a.documents, a.plain)

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def batch(self, rows: int, tokens: int) -> dict[str, Tensor]:
        ids_BT = torch.randint(3, self.model.config.vocab_size, (rows, tokens), device=self.device)
        batch = {"input_ids": ids_BT, "labels": ids_BT}
        if self.documents > 1:
            begin_BN = torch.rand(rows, tokens - 1).argsort(1)[:, : self.documents - 1] + 1
            begin_BT = torch.zeros(rows, tokens, dtype=torch.int64).scatter(1, begin_BN, begin_BN)
            batch["position_ids"] = (torch.arange(tokens) - begin_BT.cummax(1).values).to(self.device)
        return batch

    def passes(self, batch: dict[str, Tensor], parts: int = 1) -> FwdBwd:
        """Forward and backward passes for micro-batches like `batch`, captured if StageTrainer captures them."""
        plain = partial(self.backward, parts=parts)
        models = [model for model in (self.model, self.base) if model is not None]
        if self.plain or why_not_captured(self.stage, models, self.device, False) is not None:
            return plain
        most = self.documents if self.documents > 1 else None
        passes = CapturedFwdBwd(plain, self.trained, models, most_documents=most)
        passes.capture(batch)
        return passes

    def backward(self, batch: dict[str, Tensor], parts: int = 1, dtype: torch.dtype | None = None) -> Tensor:
        """Passes of one micro-batch of `parts`, as in StageTrainer. The loss of the step is the sum of theirs."""
        with autocast(self.device, dtype or self.dtype):
            loss = self.objective(self.model, batch)
            auxiliary = take_auxiliary_loss(self.model) / parts
        rows, tokens = batch["labels"].shape
        loss = loss / (parts * rows * (tokens - 1) if self.objective.summed else parts) + auxiliary
        loss.backward()
        return loss.detach()

    def step(self, passes: FwdBwd, batches: list[dict[str, Tensor]]) -> Tensor:
        loss = torch.stack([passes(batch) for batch in batches]).sum()
        torch.nn.utils.clip_grad_norm_(self.trained, self.stage.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def check(self) -> dict[str, float]:
        """The relative errors of the loss and the gradients, and the errors allowed: twice those of the torch ops in
        this dtype, plus four roundings in case these are exact by luck. Raises ValueError if an error is larger."""
        batch, path = self.batch(*CHECKED), in_use()

        def found(passes: FwdBwd) -> tuple[Tensor, Tensor]:
            loss = passes(batch)
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.trained]
            self.optimizer.zero_grad()
            return loss, torch.cat([grad.flatten() for grad in grads])

        use("torch")
        try:
            with torch.compiler.set_stance("force_eager"):
                plain = found(self.backward)
                with nullcontext() if self.base is None else in_float32(self.base):
                    exact = found(partial(self.backward, dtype=torch.float32))
        finally:
            use(path)
        narrow_frozen(self.model, self.stage, self.dtype)  # as StageTrainer does; not for the float32 reference
        told = {}
        for what, ours, theirs, right in zip(("loss", "gradient"), found(self.passes(batch)), plain, exact):
            err, allowed = error(ours, right), 2 * error(theirs, right) + 4 * torch.finfo(self.dtype).eps
            if not err <= allowed:
                raise ValueError(f"its {what} errs by {err:.1e}, allowed {allowed:.1e}, so it is not timed")
            told |= {f"{what}_error": err, f"{what}_allowed": allowed}
        return told

    def measure(self, seconds: float) -> dict[str, Any]:
        """Times steps after two that are not counted. Compilation and capture come before the first."""
        stage, cuda, started = self.stage, self.device.type == "cuda", time.perf_counter()
        batches = [self.batch(stage.batch_size, stage.seq_len) for _ in range(stage.grad_accumulation)]
        passes = self.passes(batches[0], len(batches))

        def timed() -> float:
            _wait(self.device)
            begin = time.perf_counter()
            losses.append(self.step(passes, batches))
            _wait(self.device)
            return 1e3 * (time.perf_counter() - begin)

        losses: list[Tensor] = []
        timed()
        first_s = time.perf_counter() - started
        timed()
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        times, end = [], time.perf_counter() + seconds
        while len(times) < LEAST_STEPS or time.perf_counter() < end:
            times.append(timed())
        if not all(torch.isfinite(torch.stack(losses)).tolist()):
            raise ValueError("its loss is not finite, so no time is given")
        step_ms = quartiles(times)
        kernels = gpu_kernels([lambda: self.step(passes, batches)] * 2) if cuda else {}
        return {
            "first_step_s": first_s,
            "step_ms": step_ms,
            "tokens_per_s": 1e3 * stage.step_tokens / step_ms["median"],
            "busy": sum(kernels.values()) / step_ms["median"] if cuda else None,
            "kernels": dict(islice(kernels.items(), LONGEST)),
            "peak_bytes": torch.cuda.max_memory_reserved(self.device) if cuda else None,
            "loss": float(losses[-1]),
        }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(a: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for every stage and length. Each is printed and written as soon as it is known."""
    device = pick_device(a.device)
    dtype = compute_dtype(device, a.precision)
    about = machine(device.type) | {"kernels": in_use(), "dtype": str(dtype).removeprefix("torch.")}
    shape = {name: value for name, value in vars(a).items() if name != "json"}
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps({name: value for name, value in row.items() if name != "kernels"}), flush=True)
        if a.json:
            a.json.write_text(json.dumps({"machine": about, "shape": shape, "rows": rows}, indent=1) + "\n")

    for name in a.stages:
        torch.manual_seed(0)
        concat = a.documents == 1
        stages = [make_stage(name, a.tokens_a_step, length, a.accumulate, concat) for length in a.lengths]
        training, checked = Training.of(name, stages[0], a, device, dtype), {}
        for stage in stages:
            row: dict[str, Any] = {"stage": name, "tokens_a_row": stage.seq_len, "rows": stage.batch_size}
            training.stage = stage
            try:
                checked = checked or training.check()
                row |= training.measure(a.seconds) | {"check": checked}
            except torch.OutOfMemoryError:
                row["missing"] = "out of memory"
            except Exception as problem:  # for example from a compiler: the other rows stay valid
                row["wrong"] = f"{type(problem).__name__}: {str(problem).splitlines()[0]}"
            training.optimizer.zero_grad()
            add(row)
            _free(device)
        del training
        torch.compiler.reset()  # also drops the code compiled for these modules
        _free(device)
    return rows


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def show(rows: list[dict[str, Any]], title: str) -> None:
    """Prints the rows as a table, with the speed of a finetune also relative to its base's at the same length."""
    base = {row["tokens_a_row"]: row for row in rows if row["stage"] == BASE and "step_ms" in row}
    right = ("tokens a row", "step", "tokens/s", "x base", "busy", "peak", "first step")
    table = Table("stage", *right, title=title)
    for row in rows:
        cells = ["see below"]
        if "step_ms" in row:
            peer = base.get(row["tokens_a_row"]) if row["stage"] == "finetune" else None
            cells = [
                f"{row['step_ms']['median']:.1f} ms",
                f"{row['tokens_per_s']:,.0f}",
                f"{row['tokens_per_s'] / peer['tokens_per_s']:.2f}" if peer else "",
                f"{row['busy']:.0%}" if row["busy"] else "",
                f"{row['peak_bytes'] / 1e9:.1f} GB" if row["peak_bytes"] else "",
                f"{row['first_step_s']:.1f} s",
            ]
        table.add_row(row["stage"], f"{row['rows']} x {row['tokens_a_row']:,}", *cells)
    console = Console(width=120, highlight=False)
    console.print(table)
    for row in rows:
        if why := row.get("wrong") or row.get("missing"):
            console.print(f"{row['stage']}, {row['tokens_a_row']:,} tokens a row: {why}", markup=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m", help="(smollm2-135m)")
    parser.add_argument("--lengths", default="2048,4096,8192,16384", help="tokens a row (2048,4096,8192,16384)")
    parser.add_argument("--tokens-a-step", type=int, default=32768, help="of an optimizer step (32768)")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step, where memory is short (1)")
    parser.add_argument("--stages", default=",".join(STAGES), help="(%(default)s)")
    parser.add_argument("--mixer", default="gla", help="in every layer (gla)")
    parser.add_argument("--seconds", type=float, default=1, help="spent on each time (1)")
    parser.add_argument("--documents", type=int, default=1, help="in each row, kept apart (1)")
    parser.add_argument("--plain", action="store_true", help="capture nothing")
    parser.add_argument("--precision", choices=["auto", "float32", "bfloat16"], default="auto")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (auto)")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    a = parser.parse_args()
    a.lengths, a.stages = [int(length) for length in a.lengths.split(",")], a.stages.split(",")
    if unknown := [name for name in a.stages if name not in STAGES]:
        parser.error(f"--stages: {unknown[0]!r} is none of {', '.join(STAGES)}")
    for length in a.lengths:
        if a.tokens_a_step % (length * a.accumulate):
            parser.error(f"--tokens-a-step: {a.tokens_a_step} is no multiple of {a.accumulate} x {length} tokens")
    rows = measure(a)
    show(rows, f"{a.shape}, {a.mixer} in every layer, {a.tokens_a_step:,} tokens a step")
    sys.exit(any("wrong" in row for row in rows))


if __name__ == "__main__":
    main()
