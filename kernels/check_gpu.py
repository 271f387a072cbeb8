"""Checks every recurrence and every mixer on this machine's GPU: `python kernels/check_gpu.py`.

Ops run on their own cases (odd sizes, states carried in, packing, grouped heads, strong gates), in fp32, in bf16 and in
whatever else a case is in, by every path there is: the torch op, our kernels (`use("triton")`) and, where fla-core is
installed, its kernels alone (`use("fla")`), also where ours take the case. Outputs, states and all gradients are held
to the plain loop in float64 on the CPU, within twice the error of the same loop in the case's dtype. Where one exceeds
that, means over variations of the case decide: the error of a result of few numbers is as much luck as anything.

A mixer runs as one linearized layer between its projections: a prompt, the steps of one token after it as generation
takes them, and the gradient of its input, held to the same layer in float64 on the CPU, within twice the error of the
layer in its dtype there; four times that where kernels compute in three TF32 products instead of one in fp32, between
other steps that pass their errors on. What is wrong is said in one sentence, with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from bench import machine
from bench_layer import Core
from gated_kernels import KERNELS, OPS, has_fla, use
from gated_kernels.check import Inputs, Op, errors, run
from gated_kernels.common.registry import kernels_for, set_kernel
from gated_kernels.fused_step import cases as steps
from gated_kernels.fused_step.chunk import fused_step
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from liger_convert.mixers import MIXERS, resolve_spec
from liger_convert.model.attention import LinearizedAttention
from liger_convert.model.cache import LinearizedCacheLayer, advance
from liger_convert.model.configuration import FORMAT, linearized_config
from liger_convert.model.decoding import static_steps
from liger_convert.model.sequence import SequenceMetadata

DTYPES = (torch.float32, torch.bfloat16)
FLOAT = Tensor.float
BATCH, PROMPT, STEPS = 2, 70, 4  # of a layer
VARIATIONS = 8  # of a case
HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 16


class Result(NamedTuple):
    """An op or a mixer by one path in one case: the largest share of an allowed error, and what exceeds it."""

    kind: str
    name: str
    path: str
    case: str
    share: float
    wrong: list[str]


class Job(NamedTuple):
    """A case of an op, or a mixer, in a dtype; None where a case is taken as it is."""

    kind: str
    name: str
    case: str
    dtype: torch.dtype | None

    def __str__(self) -> str:
        dtype = "as it is" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        return f"{self.case}, {dtype}" if self.case else dtype


def jobs(names: Iterable[str]) -> Iterator[Job]:
    """Of the ops and mixers of these names."""
    for name in names:
        if name == "fused_step":
            yield from (Job("op", name, case, None) for case in steps.CASES)
        elif name in OPS:
            for case, values in import_module(f"gated_kernels.{name}.cases").CASES.items():
                yield from (Job("op", name, case, dtype) for dtype in DTYPES)
                if getattr(values, "sizes", values).v_dtype:  # another recurrence's cases hold its own
                    yield Job("op", name, case, None)
        if name in MIXERS:
            yield from (Job("mixer", name, "", dtype) for dtype in DTYPES)


def done(job: Job, device: str, tuned: bool) -> list[Result]:
    """The results of a job, one a path. A path that takes nothing of it is left out."""
    torch.set_num_threads(1)
    check = check_mixer if job.kind == "mixer" else check_step if job.name == "fused_step" else check_op
    with nullcontext() if tuned or device == "cpu" or not has_fla() else untuned():
        return list(check(job, torch.device(device)))


@contextmanager
def untuned() -> Iterator[None]:
    """The first choice of every kernel that Triton would tune, which is fla-core's alone, and nothing kept of it."""
    from triton.runtime.autotuner import Autotuner

    os.environ["FLA_CACHE_RESULTS"] = "0"  # read when the package is imported
    with mock.patch.object(Autotuner, "_bench", return_value=[0.0, 0.0, 0.0]):
        yield


def paths(device: torch.device) -> tuple[str, ...]:
    if device.type != "cuda":
        return ("torch",)
    return ("torch", "triton", *(["fla"] if has_fla() else []))


@contextmanager
def by(path: str) -> Iterator[set[str]]:
    """Runs the ops by a path, and lists the kernels that took something: "triton gla" and the like."""
    use(path)
    taken: set[str] = set()

    def watched(op: str, kernel: Any) -> Any:
        @wraps(kernel)
        def call(*args: Any, **options: Any) -> Any:
            found = kernel(*args, **options)
            if found is not None:
                taken.add(f"{kernel.__module__.rpartition('.')[2]} {op}")
            return found

        return call

    for op in {op for kernels in KERNELS.values() for op in kernels}:
        set_kernel(op, *(watched(op, kernel) for kernel in kernels_for(op)))
    try:
        yield taken
    finally:
        use("torch")


def adds(path: str, taken: set[str]) -> bool:
    """Whether another path than those before it ran."""
    return path == "torch" or any(kernel.startswith(path.replace("+", " ")) for kernel in taken)


def judged(job: Job, path: str, taken: set[str], found: dict[str, tuple[float, float]]) -> Result:
    wrong = [
        f"{name} errs by {ours:.1e}, allowed {most:.1e}" for name, (ours, most) in found.items() if not ours <= most
    ]
    share = max(ours / most for ours, most in found.values())
    return Result(job.kind, job.name, ", ".join(sorted(taken)) or path, str(job), share, wrong)


def raised(job: Job, path: str, problem: Exception) -> Result:
    sentence = " ".join(str(problem).split())[:300]
    return Result(job.kind, job.name, path, str(job), math.inf, [f"raised {type(problem).__name__}: {sentence}"])


def rounding(dtypes: set[torch.dtype]) -> float:
    """Of the factors of the kernels' products; one of fp32 is three of TF32, with 22 bits for 24."""
    return torch.finfo(torch.bfloat16).eps if torch.bfloat16 in dtypes else 2**-21


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """As mixers have it: gates and states in fp32, all else in the dtype."""

    def change(name: str, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return x.to(torch.float32 if name.startswith("log_") or name == "initial_state" or "_BG" in name else dtype)

    return {name: change(name, x) for name, x in inputs.items()}


def check_op(job: Job, device: torch.device) -> Iterator[Result]:
    cases = import_module(f"gated_kernels.{job.name}.cases")
    inputs: Inputs = cases.inputs(cases.CASES[job.case])
    if job.dtype is not None:
        inputs = cast(inputs, job.dtype)
    reference: Op = getattr(import_module(f"gated_kernels.{job.name}.naive"), f"naive_{job.name}")
    exact, plain = run(reference, inputs, torch.float64), run(reference, inputs)

    def held(inputs: Inputs, exact: dict[str, Tensor], plain: dict[str, Tensor]) -> dict[str, tuple[float, float]]:
        there = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in inputs.items()}
        got = {name: x.cpu() for name, x in run(OPS[job.name], there).items()}
        # an op that runs by another's kernels hands them fp32
        own = any(kernel.endswith(f" {job.name}") for kernel in taken)
        dtypes = {x.dtype for x in inputs.values() if isinstance(x, Tensor) and own}
        return errors(got, plain, exact, rounding(dtypes) if taken else None, 8 if taken and not own else 2)

    for path in paths(device):
        try:
            with by(path) as taken:
                result = judged(job, path, taken, held(inputs, exact, plain))
                if result.wrong:
                    others = [varied(inputs, seed) for seed in range(VARIATIONS)]
                    each = [held(x, run(reference, x, torch.float64), run(reference, x)) for x in others]
                    result = judged(job, path, taken, means(each))
        except Exception as problem:
            yield raised(job, path, problem)
            continue
        if adds(path, taken):
            yield result


def varied(inputs: Inputs, seed: int) -> Inputs:
    """Every number up to 2 % larger, each by another share; a 0 stays one, and so do signs."""
    random = torch.Generator().manual_seed(seed)

    def change(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return (x.double() * (1 + 0.02 * torch.rand(x.shape, generator=random, dtype=torch.float64))).to(x.dtype)

    return {name: change(x) for name, x in inputs.items()}


def means(each: list[dict[str, tuple[float, float]]]) -> dict[str, tuple[float, float]]:
    """Of the errors of every result, and of what is allowed them."""
    return {
        name: (fmean(found[name][0] for found in each), fmean(found[name][1] for found in each)) for name in each[0]
    }


def check_step(job: Job, device: torch.device) -> Iterator[Result]:
    if device.type != "cuda":
        return
    given = steps.placed(steps.inputs(steps.CASES[str(job.case)]), str(device))
    for where, step in (("", fused_step), (" in pages", steps.over_pages(fused_step))):
        try:
            with by("triton") as taken:
                result = judged(job, "triton", taken, steps.errors(step, given))
        except Exception as problem:
            yield raised(job, f"triton{where}", problem)
            continue
        yield result._replace(path=result.path + where)


def layer_of(mixer: str, dtype: torch.dtype) -> tuple[Core, LlamaRotaryEmbedding]:
    """A layer whose parameters have moved off their start, so that the memory matters, and its rotary."""
    base = LlamaConfig(
        hidden_size=(HEADS + 2 * KV_HEADS) * HEAD_SIZE,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_SIZE,
        num_hidden_layers=1,
        attn_implementation="sdpa",
    )
    spec = resolve_spec({"type": mixer} | ({} if mixer == "forgetting" else {"window": 9, "sinks": 2}))
    config = linearized_config(base, {"format": FORMAT, "mixers": {"main": spec}, "layers": ["main"]})
    torch.manual_seed(0)
    attention = LlamaAttention(config, 0)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        setattr(attention, name, torch.nn.Identity())
    layer = Core(attention, config, 0)
    layer.mixer.reset_parameters()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter += 0.5 * torch.randn_like(parameter)
            if name.endswith(("log_share_H", "mix_H")):
                parameter += 3
    return layer.to(dtype).eval(), LlamaRotaryEmbedding(config)


def lived(layer: LinearizedAttention, rotary: LlamaRotaryEmbedding, x_BTC: Tensor) -> dict[str, Tensor]:
    """What a layer gives for a prompt, for the steps after it, and as the gradient of its input."""
    cache = SimpleNamespace(layers=[LinearizedCacheLayer()])
    kept = cache.layers[0]

    def see(x_BTC: Tensor, start: int, past: Any = None, valid_BT: Tensor | None = None) -> Tensor:
        positions_1T = torch.arange(start, start + x_BTC.shape[1], device=x_BTC.device)[None]
        metadata = SequenceMetadata.build(
            x_BTC, positions_1T, valid_BT, None if start == 0 else kept.positions, static=kept.static
        )
        with mock.patch.object(Tensor, "float", FLOAT):  # as transformers has them, whatever mixers compute in
            angles = rotary(x_BTC, positions_1T)
        o, _ = layer(x_BTC, angles, past_key_values=past, metadata=metadata)
        if past is not None:
            advance([kept], [layer.window_metadata(metadata, kept)], metadata)
        return o

    prompt = x_BTC[:, :PROMPT].clone().requires_grad_()
    o = see(prompt, 0)
    weights = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(o)
    (gradient,) = torch.autograd.grad(o, prompt, weights)
    with torch.no_grad():
        outputs = {"gradient of the input": gradient, "prompt": see(prompt, 0, cache)}
        fixed = x_BTC.is_cuda and layer.spec.window
        if fixed:
            kept.to_static(layer.spec.cache_window, in_place=True)
            layer.enable_fused_step(kept)
        found = []
        for t in range(PROMPT, x_BTC.shape[1]):
            valid_B1 = torch.ones(len(x_BTC), 1, dtype=torch.bool, device=x_BTC.device) if fixed else None
            with static_steps([kept]) if fixed else nullcontext():
                found.append(see(x_BTC[:, t : t + 1], t, cache, valid_B1))
        outputs["steps"] = torch.cat(found, 1)
    return outputs | {f"state {name}": x for name, x in kept.states.items()}


def check_mixer(job: Job, device: torch.device) -> Iterator[Result]:
    assert job.dtype is not None
    layer, rotary = layer_of(job.name, job.dtype)
    width = (HEADS + 2 * KV_HEADS) * HEAD_SIZE
    x_BTC = torch.randn(BATCH, PROMPT + STEPS, width, generator=torch.Generator().manual_seed(2)).to(job.dtype)
    with by("torch"):
        plain = lived(layer, rotary, x_BTC)
    wide, _ = layer_of(job.name, job.dtype)
    with by("torch"), mock.patch.object(Tensor, "float", Tensor.double):  # which mixers compute in
        exact = lived(wide.double(), rotary, x_BTC.double())
    if device.type == "cpu":  # nothing else to compare with than itself
        yield judged(job, "torch", set(), errors(plain, plain, exact))
        return
    layer, rotary = layer.to(device), rotary.to(device)
    for path in paths(device):
        try:
            with by(path) as taken:
                got = {name: x.cpu() for name, x in lived(layer, rotary, x_BTC.to(device)).items()}
        except Exception as problem:
            yield raised(job, path, problem)
            continue
        if adds(path, taken):
            single = bool(taken) and job.dtype == torch.float32
            found = errors(got, plain, exact, rounding({job.dtype}), 8 if single else 2)
            yield judged(job, path, taken, found)


def show(rows: list[dict[str, Any]], caption: str) -> None:
    table = Table("op or mixer", "path that ran", "cases", "worst error / allowed", caption=caption)
    for row in rows:
        worst = f"{row['worst']:.2f}, {row['in']}"
        table.add_row(
            f"{row['kind']} {row['name']}", row["path"], str(row["cases"]), f"[red]{worst}" if row["wrong"] else worst
        )
    Console(width=140).print(table)


def summed(results: list[Result]) -> list[dict[str, Any]]:
    """A row for every path of every op and mixer."""
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.kind, result.name, result.path), []).append(result)
    rows = []
    for (kind, name, path), group in groups.items():
        worst = max(group, key=lambda result: result.share)
        wrong = [f"{result.case}: {'; '.join(result.wrong)}" for result in group if result.wrong]
        row = {"kind": kind, "name": name, "path": path, "cases": len(group), "worst": worst.share, "in": worst.case}
        rows.append(row | {"wrong": wrong})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = list(dict.fromkeys([*OPS, "fused_step", *MIXERS]))
    parser.add_argument(
        "--only", action="append", choices=every, metavar="NAME", help="an op or a mixer, may be given again (all)"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, default=min(8, os.cpu_count() or 1), help="side by side (up to 8)")
    parser.add_argument(
        "--tuned", action="store_true", help="let fla-core tune its kernels to every size, which takes many minutes"
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    a = parser.parse_args()
    todo, started = list(jobs(a.only or every)), time.perf_counter()
    if a.processes > 1:
        with ProcessPoolExecutor(a.processes, multiprocessing.get_context("spawn")) as pool:
            found = list(pool.map(partial(done, device=a.device, tuned=a.tuned), todo))
    else:
        found = [done(job, a.device, a.tuned) for job in todo]
    rows = summed([result for results in found for result in results])
    about = machine(a.device) | {"seconds": round(time.perf_counter() - started)}
    show(rows, ", ".join(f"{key} {value}" for key, value in about.items()))
    if a.json:
        a.json.write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n")
    if wrong := [f"{row['kind']} {row['name']} by {row['path']} ({row['wrong'][0]})" for row in rows if row["wrong"]]:
        sys.exit(f"{len(wrong)} of {len(rows)} are wrong: {'; '.join(wrong)}.")


if __name__ == "__main__":
    main()
