"""Times the optimizer steps of a training of `bench_scale.py`, and the parts of a step."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections import defaultdict
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from scale_profile import Recorder
from scale_trainings import WARM, Built, Worker, trainer_of
from torch import Tensor

from liger_convert.benchmark.bench import quartiles
from liger_convert.training import trainer as trainer_module
from liger_convert.training.trainer import StageTrainer

STEP_ENDS = "loss, flags"  # the last part of a step


class Clocked(StageTrainer):
    """Records when each part of a step ends, on the host and by events on the GPU. The time between two notes counts
    for the later one, so that the parts add up to the step by either clock."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.notes: list[tuple[str, float, Any]] = []
        self.optimizer.register_step_post_hook(lambda *_: self.note("clipping, optimizer"))

    def note(self, part: str, at: float | None = None) -> None:
        """Records that `part` has ended, now or at the time `at` of the host's clock."""
        event = None
        if self.args.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self.notes.append((part, time.perf_counter() if at is None else at, event))

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

    def profile(self, last: int) -> dict[str, dict[str, float]]:
        """Median milliseconds of each part of the timed steps, by clock. A step ends with the note `STEP_ENDS`.

        last: the number of the last one, the warm-up included. Steps that the profiler records come later, and are
        slower.
        """
        ends = [at for at, (part, *_) in enumerate(self.notes) if part == STEP_ENDS][WARM - 1 : last]
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
    """Trains and times the optimizer steps after the warm-up; with --profile, records the kernels of those that follow.
    eager: a reason not to capture them, given to the trainer in advance, so that it also averages gradients as it does
    without capture."""
    marks: list[float] = []
    timed_steps = WARM + worker.task["steps"]
    recorder = Recorder(worker.device) if worker.recorded and worker.rank == 0 else None

    def mark(done: float, total: float | None, note: str = "") -> None:
        worker.wait()
        marks.append(time.perf_counter())
        if isinstance(trainer, Clocked):
            trainer.note(STEP_ENDS, marks[-1])  # by one reading of the clock, so that the parts add up to the step
        if done == WARM and worker.cuda:
            torch.cuda.reset_peak_memory_stats()
        if recorder is not None and done == timed_steps:
            recorder.start()
        elif recorder is not None and done == timed_steps + worker.recorded:
            recorder.stop()

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
    steps = [1e3 * (after - before) for before, after in zip(marks[WARM - 1 :], marks[WARM:timed_steps])]
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
        found["profile"] = trainer.profile(timed_steps)
        if worker.count > 1:
            found["sending_ms"] = sending(worker, trainer.fwd_bwd.parameters)
    if recorder is not None:
        found["kernel_ms"] = recorder.found()
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
