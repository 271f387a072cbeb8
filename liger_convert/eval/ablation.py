"""What each branch of a linearized model does: the same measures with each branch switched off, and on controls."""

from __future__ import annotations

import gc
import multiprocessing
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from liger_convert.data.documents import Document
from liger_convert.eval.agreement import Continuation
from liger_convert.eval.evaluation import evaluate_model, let_base_write, part_file, parts_of
from liger_convert.eval.generation import continuations, load_model, weight_dtype
from liger_convert.eval.measures import Measurement, worse_than_frequencies
from liger_convert.eval.narrow import context_of, cut_prompts, narrow
from liger_convert.eval.suites import Suite
from liger_convert.eval.verdict import verdict
from liger_convert.io.checkpoint import load_config, load_tokenizer
from liger_convert.io.checksums import read_checked, write_checked
from liger_convert.io.tokenizer import text_prefix
from liger_convert.mixers import resolve_spec
from liger_convert.mixers.base import Branches
from liger_convert.mixers.reach import reaches
from liger_convert.model import set_branches
from liger_convert.model.loading import linearize_base
from liger_convert.model.placing import place
from liger_convert.utils import workers
from liger_convert.utils.errors import LinearizeError
from liger_convert.utils.processes import barrier, claim, count, rank
from liger_convert.utils.progress import Report, part_of, quiet_libraries

BRANCHES: dict[str, Branches] = {
    "linearized": "both",
    "memory_ablated": "window",
    "window_ablated": "memory",
}
NAMES = ("base", "window_only_untrained", *BRANCHES)
BASE_ROWS = "base_rows.json"  # what the base wrote, in the folder of finished measures
SAID = "continuations"  # beside the parts of a suite, what a model said to the prompts


def diagnose(
    model_dir: Path,
    base_dir: Path | None,
    suite: Suite,
    *,
    held_out: Sequence[Document] | None,
    other: Sequence[Document] | None = None,
    data_dir: Path | None = None,
    limit: int | None = None,
    batch_size: int = 4,
    processes: int = 1,
    device: torch.device,
    precision: str = "auto",
    prompts: Sequence[str] = (),
    keep: Path | None = None,
    call_others: Callable[[], None] | None = None,
    report: Report = lambda done, total, note="": None,
) -> dict[str, Any]:
    """{"suite": …, "models": {NAME: {METRIC: measurement}}, "verdict": …, "continuations": […]}, NAME as in NAMES, and
    {"notes": […]} if something of the suite was left out.

    `linearized` is the model in `model_dir`. `memory_ablated` and `window_ablated` are the same with that branch
    switched off. `base` is the model it was made from, and `window_only_untrained` that base with only the model's
    window and sinks in the layers that the model has linearized; without `base_dir` these two are left out. The verdict
    leaves out what reads more tokens than the base supports, where the base fails and a mere window fails less.
    `prompts` are continued by the base and by the linearized model. For a suite that measures agreement, the base
    writes once what all models are asked about. One model is in memory at a time, or one in each of several
    `processes`, which take turns on the GPUs that there are. Each measure is written to the folder `keep` at once, and
    read from there by the next attempt. call_others: called when the other processes of this run can begin to measure
    with this one, see `measure_along`; then `processes` is not used. The other arguments are those of
    `evaluation.evaluate_model`, and so are the errors.
    """
    options: dict[str, Any] = {"held_out": held_out, "other": other, "batch_size": batch_size}
    options |= {"data_dir": data_dir, "limit": limit}
    job = _Job(model_dir, base_dir, suite, device, precision, prompts, options, keep)
    config, tokenizer, (measured, notes) = load_config(model_dir), job.tokenizer, job.narrowed
    context, names = context_of(config), job.names
    kept = {name: keep / f"{name}.json" for name in names} if keep is not None else {}
    found = {name: column for name, path in kept.items() if (column := read_checked(path)) is not None}
    left = [name for name in names if name not in found]
    if left and suite.agreement is not None and base_dir is not None:
        options["base_rows"] = job.base_rows(lambda done, total, note="": report(0, len(left), note))
        if processes > 1 and call_others is None:
            job.let_go()
    if call_others is not None:
        call_others()
        _measure_together(job, report)
        processes = 1  # in which nothing is left to measure
    columns = _one_by_one(job, left, report) if processes == 1 else _side_by_side(job, left, processes, report)
    for name, column in columns:
        found[name] = column
        if keep is not None:
            write_checked(kept[name], column)
            shutil.rmtree(_begun(keep, name), ignore_errors=True)  # a suite may measure nothing here
    models = {name: found[name][0] for name in names}
    memories = reaches(config.linearization)
    reach = min(memories, default=0)
    lengths = measured.lengths(len(text_prefix(tokenizer)))
    beyond = {metric for metric, length in lengths.items() if length > context}
    within = {name: {m: value for m, value in models[name].items() if m not in beyond} for name in names}
    short = {metric for metric, length in lengths.items() if length - 1 <= reach}  # nothing is scored after the last
    notes = [*notes, *cut_prompts(models)]
    for part in measured.text if base_dir is not None else ():
        documents = (other if part.source == "other" else held_out) or []
        if told := worse_than_frequencies(models["base"][part.metrics[0]], tokenizer, documents, part):
            notes.append(told)
    said = {name: found[name][1] for name in names if found[name][1]}
    texts = [{"prompt": prompt} | {name: said[name][i] for name in said} for i, prompt in enumerate(prompts)]
    return {
        "suite": suite.model_dump(mode="json"),
        "models": models,
        "verdict": verdict(within, short, reach, has_memory=bool(memories)),
        "continuations": texts,
        **({"notes": notes} if notes else {}),
    }


def measure_along(
    model_dir: Path,
    base_dir: Path | None,
    suite: Suite,
    *,
    device: torch.device,
    precision: str,
    prompts: Sequence[str],
    keep: Path,
    **options: Any,
) -> None:
    """Takes a share of what the first process of this run measures with `diagnose`, whose arguments these are.

    Every part of the suite is measured on every model by one of the processes, whichever comes to it first. They do not
    wait for each other in between. `keep` is a folder that all of them see.
    """
    job = _Job(model_dir, base_dir, suite, device, precision, prompts, options, keep)
    if base_dir is not None:
        options["base_rows"] = read_checked(keep / BASE_ROWS)
    _measure_together(job, lambda done, total, note="": None)


def _measure_together(job: _Job, report: Report) -> None:
    """Measures this process's share of what all processes of the run measure. Returns when all have finished."""
    assert job.keep is not None
    names = [name for name in job.names if read_checked(job.keep / f"{name}.json") is None]
    begin = rank() * len(names) // count()  # elsewhere than the others, to load fewer models
    for i, name in enumerate(names[begin:] + names[:begin]):
        begun = _begun(job.keep, name)
        due = [part for part in job.parts(name) if read_checked(part_file(begun, part)) is None]
        first = next((part for part in due if claim(f"{name}/{part}")), None)
        if first is not None:
            job.column(name, part_of(report, i, len(names), name), partial(_is_mine, name, first))
    job.let_go()
    barrier()


def _is_mine(name: str, first: str, part: str) -> bool:
    return part == first or claim(f"{name}/{part}")


Column = tuple[dict[str, Measurement], list[str]]  # what was measured on a model, and what it said


@dataclass
class _Job:
    """What is measured and how. The last model stays loaded, because the linearized model is measured with each branch
    ablated, one after the other.

    Until all results of a model are complete, they are kept in a folder of their own, one file for each part."""

    model_dir: Path
    base_dir: Path | None
    suite: Suite
    device: torch.device
    precision: str
    prompts: Sequence[str]
    options: dict[str, Any]
    keep: Path | None
    model: Any = None
    loaded: str = ""

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.model_dir)

    @property
    def names(self) -> tuple[str, ...]:
        """The models that are measured."""
        return NAMES if self.base_dir is not None else tuple(BRANCHES)

    @cached_property
    def narrowed(self) -> tuple[Suite, list[str]]:
        """What of the suite can be measured, and notes on the rest."""
        return narrow(
            self.suite,
            context=context_of(load_config(self.model_dir)),
            tokenizer=self.tokenizer,
            data_dir=self.options["data_dir"],
            has_other=self.options["other"] is not None,
            has_base=self.base_dir is not None,
        )

    def speaks(self, name: str) -> bool:
        """Whether this model continues the prompts."""
        return bool(self.prompts) and name in ("base", "linearized")

    def parts(self, name: str) -> list[str]:
        """What is measured of this model."""
        return parts_of(self.narrowed[0]) + [SAID] * self.speaks(name)

    def load(self, name: str) -> None:
        if name != self.loaded:
            self.let_go()
            self.model = _load(name, self.model_dir, self.base_dir, self.device, self.precision)
            self.loaded = name

    def let_go(self) -> None:
        self.model, self.loaded = None, ""

    def base_rows(self, report: Report) -> list[Continuation] | None:
        """What the base wrote for the measure of agreement: read from the folder `keep`, or written now."""
        path = self.keep / BASE_ROWS if self.keep is not None else None
        if path is not None and (kept := read_checked(path)) is not None:
            return kept
        self.load("base")
        options = {name: self.options[name] for name in ("held_out", "other", "batch_size")}
        rows = let_base_write(
            self.model, self.tokenizer, self.suite, **options, precision=self.precision, report=report
        )
        if path is not None and rows is not None:
            write_checked(path, rows)
        return rows

    def column(self, name: str, report: Report, is_wanted: Callable[[str], bool] = lambda part: True) -> Column:
        """What is measured on this model, of parts that are kept or wanted. It is loaded only if something is left to
        measure."""
        begun = None if self.keep is None else _begun(self.keep, name)
        kept: dict[str, Any] = {}
        if begun is not None:
            kept = {part: read_checked(part_file(begun, part)) for part in self.parts(name)}
        if kept and all(result is not None for result in kept.values()):
            said = kept.pop(SAID, [])
            return {metric: value for result in kept.values() for metric, value in result.items()}, said
        self.load("linearized" if name in BRANCHES else name)
        if name in BRANCHES:
            set_branches(self.model, BRANCHES[name])
        measured = evaluate_model(
            self.model,
            self.tokenizer,
            self.suite,
            **self.options,
            precision=self.precision,
            keep=begun,
            is_wanted=is_wanted,
            report=report,
        )
        said = kept.get(SAID)
        if said is None and self.speaks(name) and is_wanted(SAID):
            said = continuations(self.model, self.tokenizer, self.prompts)
            if begun is not None:
                begun.mkdir(exist_ok=True)
                write_checked(part_file(begun, SAID), said)
        return measured, said or []


def _begun(keep: Path, name: str) -> Path:
    """The folder of a model's results until they are complete."""
    return keep / f"{name}.begun"


def _one_by_one(job: _Job, names: Sequence[str], report: Report) -> Iterator[tuple[str, Column]]:
    for i, name in enumerate(names):
        yield name, job.column(name, part_of(report, i, len(names), name))


def _side_by_side(job: _Job, names: Sequence[str], processes: int, report: Report) -> Iterator[tuple[str, Column]]:
    if job.device.type == "cuda":  # what this process held for training is theirs
        gc.collect()
        torch.cuda.empty_cache()
    context = multiprocessing.get_context("spawn")  # a GPU does not survive a fork
    turns = context.Queue()
    for turn in range(processes):
        turns.put(turn)
    begin = workers.pickled(partial(_begin, job, processes))
    with ProcessPoolExecutor(processes, context, workers.begin, (begin, turns)) as pool:
        try:
            futures = {pool.submit(_column, name): name for name in names}
            report(0, len(names))
            for done, future in enumerate(as_completed(futures), 1):
                if future.exception() is None:
                    yield futures[future], future.result()
                report(done, len(names), futures[future])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.kill()  # the pool would wait for what they are measuring
            raise
    for future in futures:
        try:
            future.result()  # raises what one raised, once the others are kept
        except BrokenProcessPool as error:
            raise LinearizeError(
                "eval.processes: a process was killed from outside, perhaps for lack of memory; set fewer"
            ) from error


_job: _Job  # in a worker process


def _begin(job: _Job, processes: int, turns: Any) -> None:
    """Initializes a worker process: gives it a GPU of its own, if there are enough, and its share of the cores."""
    global _job
    quiet_libraries()
    torch.set_num_threads(max(1, torch.get_num_threads() // processes))
    if job.device.type == "cuda" and job.device.index is None:
        job = replace(job, device=torch.device("cuda", turns.get() % torch.cuda.device_count()))
        torch.cuda.set_device(job.device)  # where Triton launches
    _job = job


def _column(name: str) -> Column:
    return _job.column(name, lambda done, total, note="": None)


def window_control(linearization: dict[str, Any]) -> dict[str, Any]:
    """The linearization with only the window and the sinks of each mixer."""
    control = {
        name: resolve_spec({"type": "window", "window": spec["window"], "sinks": spec["sinks"]})
        for name, spec in linearization["mixers"].items()
    }
    return linearization | {"mixers": control}


def _load(name: str, model_dir: Path, base_dir: Path | None, device: torch.device, precision: str) -> Any:
    if name == "linearized" or base_dir is None:
        return load_model(model_dir, device, precision)
    if name == "base":
        return load_model(base_dir, device, precision)
    linearization = window_control(load_config(model_dir).linearization)
    dtype = weight_dtype(device, precision)
    return place(linearize_base(base_dir, linearization, dtype=dtype), device)
