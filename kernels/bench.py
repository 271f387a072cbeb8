"""Times the ops against their peers on this machine: `python kernels/bench.py --op gla --t 1024`.

Everything is measured in one run on the same rotating inputs. Times are medians, and ratios are relative to ours. An op
whose results are wrong (at these sizes and 160 tokens) is not timed: the script prints a sentence and exits with 1.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import platform
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from gated_kernels import KERNELS as FAST
from gated_kernels import OPS, use
from gated_kernels.check import Inputs, Op, faults
from rich.console import Console
from rich.table import Table
from torch import Tensor

OURS = "chunk"
KERNELS = "triton"
NAIVE = {op: "full mask" if op == "swa" else "naive loop" for op in OPS}  # labels of the definitions
BF16_ALONE = ("codebook", "codebook_gla", "slots")  # ops whose kernels take only bf16
CHECKED = 160  # tokens of the check; the reference is slow
NAMED = 100  # characters that are kept of a kernel's name
AHEAD = 8  # calls that are timed in a row
ROTATED = 4  # sets of inputs, used in turn


def codebook_inputs(a: argparse.Namespace, T: int, B: int, heads: int | None = None) -> Inputs:
    N, D, E = heads or a.heads, a.head_size, a.head_size // 2
    return {
        "x_BTND": torch.randn(B, T, N, D),
        "proj_NDE": torch.randn(N, D, E) * D**-0.5,
        "bias_NE": torch.randn(N, E) / 2,
        "log_inv_temperature_N": torch.full((N,), 2.5),
        "codes_GFE": torch.randn(a.kv_heads, a.feature_size, E) * E**-0.5,
    }


def codebook_gla_inputs(a: argparse.Namespace, T: int, B: int) -> Inputs:
    q, k = codebook_inputs(a, T, B), codebook_inputs(a, T, B, a.kv_heads)
    return {
        "q_BTHD": q["x_BTND"],
        "k_BTGD": k["x_BTND"],
        "v_BTGV": torch.randn(B, T, a.kv_heads, a.head_size),
        "log_a": torch.nn.functional.logsigmoid(torch.randn(B, T, a.kv_heads, 1)) / 16,
        "write_mask_BTG": torch.ones(B, T, a.kv_heads, dtype=torch.bool),
        "q_proj_HDE": q["proj_NDE"],
        "q_bias_HE": q["bias_NE"],
        "q_log_inv_temperature_H": q["log_inv_temperature_N"],
        "k_proj_GDE": k["proj_NDE"],
        "k_bias_GE": k["bias_NE"],
        "k_log_inv_temperature_G": k["log_inv_temperature_N"],
        "codes_GFE": k["codes_GFE"],
    }


def gla_inputs(a: argparse.Namespace, T: int, B: int) -> Inputs:
    q, k = torch.randn(B, T, a.heads, a.feature_size), torch.randn(B, T, a.kv_heads, a.feature_size)
    gate = torch.randn(B, T, a.kv_heads, a.feature_size)
    return {
        "q_BTHF": q.softmax(-1),
        "k_BTGF": k.softmax(-1),
        "v_BTGV": torch.randn(B, T, a.kv_heads, a.head_size + 1),  # with one more column for the normalizer
        "log_a": torch.nn.functional.logsigmoid(gate) / 16,
    }


def simple_gla_inputs(a: argparse.Namespace, T: int, B: int) -> Inputs:
    made = gla_inputs(a, T, B)
    return made | {"log_a": made["log_a"][..., :1].contiguous()}


def delta_rule_inputs(a: argparse.Namespace, T: int, B: int) -> Inputs:
    unit = torch.nn.functional.normalize
    r = unit(torch.randn(B, T, a.kv_heads, a.head_size), dim=-1)
    return {
        "q_BTHF": unit(torch.randn(B, T, a.heads, a.head_size), dim=-1),
        "k_BTGF": torch.rand(B, T, a.kv_heads, 1) * r,
        "v_BTGV": torch.randn(B, T, a.kv_heads, a.head_size),
        "r_BTGF": r,
        "log_a": torch.nn.functional.logsigmoid(torch.randn(B, T, a.kv_heads, 1)) / 16,
    }


def momentum_inputs(a: argparse.Namespace, T: int, B: int) -> Inputs:
    log_m = torch.nn.functional.logsigmoid(torch.randn(B, T, a.kv_heads, 1))
    return delta_rule_inputs(a, T, B) | {"log_m": log_m, "c_BTG1": torch.ones_like(log_m)}


def inner_model_inputs(a: argparse.Namespace, T: int, B: int) -> Inputs:
    unit, G, D = torch.nn.functional.normalize, a.kv_heads, a.head_size
    hidden = 4 * D  # TTT-MLP, with its norm and mini-batches of 16
    return {
        "q_BTHF": unit(torch.randn(B, T, a.heads, D), dim=-1),
        "k_BTGF": unit(torch.randn(B, T, G, D), dim=-1),
        "v_BTGV": torch.randn(B, T, G, D),
        "eta_BTG1": torch.rand(B, T, G, 1) / (16 * hidden),
        "log_a": None,
        "log_m": None,
        "written_BTG1": torch.ones(B, T, G, 1, dtype=torch.bool),
        "first_GFW": torch.randn(G, D + 1, hidden) / D**0.5,
        "second_GWV": torch.randn(G, hidden + 1, D) / hidden**0.5,
        "norm_G2V": torch.ones(G, 2, D),
        "scale": D**0.5,
    }


def elementwise_inputs(a: argparse.Namespace, T: int, B: int) -> Inputs:
    F, G, V = a.feature_size // 4, a.kv_heads, a.head_size  # 16 states per channel at the default sizes, as in Mamba
    return {
        "q_BTHF": torch.randn(B, T, a.heads, F),
        "k_BTGF": torch.randn(B, T, G, F),
        "v_BTGV": torch.randn(B, T, G, V),
        "dt_BTGV": torch.randn(B, T, G, V).exp() / 100,
        "log_A_GFV": -torch.arange(1.0, F + 1)[:, None].expand(G, F, V),
    }


def slots_inputs(a: argparse.Namespace, T: int, B: int) -> Inputs:
    q, k, v = (torch.randn(B, T, heads, a.head_size) for heads in (a.heads, a.kv_heads, a.kv_heads))
    log_a = torch.nn.functional.logsigmoid(torch.randn(B, T, a.kv_heads, a.feature_size)) / 16
    return {
        "q_BTHD": q,
        "k_BTGD": k,
        "v_BTGV": v,
        "w_BTGM": 1 - log_a.exp(),
        "log_a": log_a,
        "scale": a.head_size**-0.5,
    }


def swa_inputs(a: argparse.Namespace, T: int, B: int) -> Inputs:
    q, k, v = (torch.randn(B, T, heads, a.head_size) for heads in (a.heads, a.kv_heads, a.kv_heads))
    return {"q_BTHD": q, "k_BSGD": k, "v_BSGV": v, "window_size": a.window, "scale": a.head_size**-0.5}


def sdpa(q_BTHD: Tensor, k_BSGD: Tensor, v_BSGV: Tensor, window_size: int, scale: float) -> tuple[Tensor]:
    T = q_BTHD.shape[1]
    band = torch.ones(T, T, dtype=torch.bool, device=q_BTHD.device).tril().triu(1 - window_size)
    q, k, v = (x.transpose(1, 2) for x in (q_BTHD, k_BSGD, v_BSGV))
    attention = torch.nn.functional.scaled_dot_product_attention
    return (attention(q, k, v, attn_mask=band, scale=scale, enable_gqa=True).transpose(1, 2),)


def fla_chunk_gated_delta_rule(
    q_BTHF: Tensor, k_BTGF: Tensor, v_BTGV: Tensor, r_BTGF: Tensor, log_a: Tensor
) -> tuple[Tensor, Tensor]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    beta, R = (k_BTGF * r_BTGF).sum(-1), q_BTHF.shape[2] // r_BTGF.shape[2]
    k, v, g, beta = (x.repeat_interleave(R, 2) for x in (r_BTGF, v_BTGV, log_a[..., 0], beta))
    return chunk_gated_delta_rule(q_BTHF, k, v, g, beta, scale=1.0, output_final_state=True)


def fla_adapted(q_BTHF: Tensor, k_BTGF: Tensor, v_BTGV: Tensor, r_BTGF: Tensor, log_a: Tensor) -> tuple[Tensor, Tensor]:
    """The kernel that `use("fla")` chooses."""
    state = v_BTGV.new_zeros(len(v_BTGV), *k_BTGF.shape[2:], v_BTGV.shape[-1], dtype=torch.float32)
    adapter = import_module("gated_kernels.delta_rule.fla")
    return adapter.by_kernel(q_BTHF, k_BTGF, v_BTGV, r_BTGF, log_a, None, state, None)


def fla_chunk_gla(q_BTHF: Tensor, k_BTGF: Tensor, v_BTGV: Tensor, log_a: Tensor) -> tuple[Tensor, Tensor]:
    from fla.ops.gla import chunk_gla

    k, v, g = (x.repeat_interleave(q_BTHF.shape[2] // x.shape[2], 2) for x in (k_BTGF, v_BTGV, log_a))
    return chunk_gla(q_BTHF, k, v, g, scale=1.0, output_final_state=True)


INPUTS: dict[str, Callable[[argparse.Namespace, int, int], Inputs]] = {
    "codebook": codebook_inputs,
    "codebook_gla": codebook_gla_inputs,
    "delta_rule": delta_rule_inputs,
    "gla": gla_inputs,
    "simple_gla": simple_gla_inputs,
    "inner_model": inner_model_inputs,
    "momentum": momentum_inputs,
    "elementwise": elementwise_inputs,
    "slots": slots_inputs,
    "swa": swa_inputs,
}
PEERS: dict[str, dict[str, Op]] = {
    "codebook": {},
    "codebook_gla": {},
    "delta_rule": {
        "fla chunk_dplr_delta_rule": fla_adapted,
        "fla chunk_gated_delta_rule": fla_chunk_gated_delta_rule,
    },
    "gla": {"fla chunk_gla": fla_chunk_gla},
    "simple_gla": {},
    "inner_model": {},
    "momentum": {},
    "elementwise": {},
    "slots": {},
    "swa": {"SDPA, band mask": sdpa},
}


def in_triton(name: str) -> Op:
    def op(**inputs: Any) -> Tensor | tuple[Tensor, ...]:
        return getattr(import_module(f"gated_kernels.{name}.triton"), f"triton_{name}")(**inputs)

    return op


def placed(inputs: Inputs, device: torch.device, dtype: torch.dtype) -> Inputs:
    """The inputs on the device: logarithms (`log_*`) in fp32, all other floating-point tensors in `dtype`."""

    def place(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        wanted = torch.float32 if name.startswith("log_") else dtype
        return value.to(device, wanted if value.is_floating_point() else value.dtype)

    return {name: place(name, value) for name, value in inputs.items()}


def forward(op: Op, inputs: Inputs) -> None:
    with torch.no_grad():
        op(**inputs)


def forward_recorded(op: Op, inputs: Inputs) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    numbers = {name: x for name, x in inputs.items() if isinstance(x, Tensor) and x.is_floating_point()}
    leaves = {name: x.detach().requires_grad_() for name, x in numbers.items()}
    outputs = op(**inputs | leaves)
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    return tuple(x for x in outputs if x is not None), list(leaves.values())


def forward_backward(op: Op, inputs: Inputs) -> None:
    outputs, leaves = forward_recorded(op, inputs)
    torch.autograd.grad(outputs, leaves, [torch.ones_like(output) for output in outputs])


STEPS: dict[str, Callable[[Op, Inputs], object]] = {
    "forward": forward,
    "forward, recorded": forward_recorded,
    "forward + backward": forward_backward,
}


def milliseconds(
    step: Callable[[Op, Inputs], object], op: Op, batches: list[Inputs], device: str, seconds: float
) -> float:
    """The median over `seconds`, but at least three calls; that of one call if it takes longer than `seconds`. One
    warm-up call, which compiles kernels, is not counted.

    On a GPU, calls are launched ahead, as in a model, and each is timed between the events before and after it.
    """
    rotation = itertools.cycle(batches)
    times: list[float] = []

    def alone() -> float:
        started_at = time.perf_counter()
        step(op, next(rotation))
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - started_at) * 1e3

    alone()
    if (took := alone()) > seconds * 1e3:  # such as the plain loop over many tokens
        return took
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        if device == "cuda":
            torch.cuda.synchronize()
            step(op, next(rotation))  # runs while the timed calls are launched
            events = [torch.cuda.Event(enable_timing=True) for _ in range(AHEAD + 1)]
            events[0].record()
            for event in events[1:]:
                step(op, next(rotation))
                event.record()
            torch.cuda.synchronize()
            times += [before.elapsed_time(after) for before, after in itertools.pairwise(events)]
        else:
            times.append(alone())
    return statistics.median(times)


def gpu_kernels(calls: list[Callable[[], object]]) -> dict[str, float]:
    """Milliseconds per call that the profiler measures in every kernel, longest first: the mean over `calls`, each of
    which runs once."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for call in calls:
            call()
        torch.cuda.synchronize()
    on_gpu = [event for event in profiler.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
    # a user annotation spans kernels that are in the list themselves
    kernels = [event for event in on_gpu if not getattr(event, "is_user_annotation", False)]
    times: Counter[str] = Counter()  # names with the same first NAMED characters are merged
    for event in kernels:
        times[event.key[:NAMED]] += event.self_device_time_total / 1e3 / len(calls)
    return dict(times.most_common())


def measure(name: str, a: argparse.Namespace) -> list[dict[str, Any]]:
    """A row of times for our op and each of its peers. Exits if our results are wrong."""
    device, dtype = torch.device(a.device), getattr(torch, a.dtype)
    reference: Op = getattr(import_module(f"gated_kernels.{name}.naive"), f"naive_{name}")
    torch.manual_seed(0)
    checked = placed(INPUTS[name](a, min(a.t, CHECKED), 1), device, dtype)
    ours = {OURS: OPS[name]}
    taken = dtype == torch.bfloat16 or name not in BF16_ALONE
    taken = taken and (name != "delta_rule" or a.head_size <= 128)
    if name in FAST["triton"] and taken and device.type == "cuda" and find_spec("triton"):
        ours[KERNELS] = in_triton(name)
    for implementation, op in ours.items():
        products = torch.finfo(dtype).eps if implementation == KERNELS and dtype == torch.bfloat16 else None
        if found := faults(op, reference, checked, products):
            sys.exit(f"{name} ({implementation}) is not timed because it is wrong: {'; '.join(found)}.")
    batches = [placed(INPUTS[name](a, a.t, a.batch), device, dtype) for _ in range(ROTATED)]
    rows = []
    peers: dict[str, Op] = {**ours, NAIVE[name]: reference, **PEERS[name]}
    for peer, op in peers.items():
        row: dict[str, Any] = {"op": name, "implementation": peer}
        try:
            row |= {label: milliseconds(step, op, batches, device.type, a.seconds) for label, step in STEPS.items()}
        except ModuleNotFoundError as problem:
            row["missing"] = problem.name
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]], title: str, caption: str) -> None:
    measured = STEPS if rows[0]["op"] != "fused_step" else ("us a layer", "GB/s of state")
    table = Table("", *measured, title=title, caption=caption)
    for row in rows:
        cells = [f"{row[step]:.3f} ms, {row[step] / rows[0][step]:.1f} x" for step in STEPS if step in row]
        cells += [f"{row[step]:.1f}" for step in measured if step not in STEPS]
        table.add_row(row["implementation"], *(cells or ["not installed"]))
    Console().print(table)


def machine(device: str) -> dict[str, Any]:
    packages = {}
    for package in ("torch", "triton", "fla-core"):
        with contextlib.suppress(PackageNotFoundError):
            packages[package] = version(package)
    cpu = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    name = torch.cuda.get_device_name() if device == "cuda" else cpu
    return {"device": name, "threads": torch.get_num_threads(), "python": platform.python_version(), **packages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--op", choices=[*OPS, "fused_step"], action="append", help="may be given again; without, all but fused_step"
    )
    parser.add_argument("--t", type=int, default=1024, help="tokens of a sequence (1024)")
    parser.add_argument("--batch", type=int, default=1, help="sequences (1)")
    parser.add_argument("--heads", type=int, default=9, help="query heads (9)")
    parser.add_argument("--kv-heads", type=int, default=3, help="key-value heads (3)")
    parser.add_argument("--head-size", type=int, default=64, help="size of a head (64)")
    parser.add_argument("--feature-size", type=int, default=64, help="features of the recurrence, or slots (64)")
    parser.add_argument("--window", type=int, default=64, help="(64)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="(float32)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, help="CPU threads (all)")
    parser.add_argument("--seconds", type=float, default=2, help="spent on each time (2)")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    a = parser.parse_args()
    if a.threads:
        torch.set_num_threads(a.threads)
    use("torch")  # whatever GATED_KERNELS says: `chunk` means the torch op
    results: dict[str, Any] = {"machine": machine(a.device), "shape": {k: v for k, v in vars(a).items() if k != "json"}}
    results["rows"] = []
    for name in a.op or OPS:
        rows = import_module("bench_step").measure(a) if name == "fused_step" else measure(name, a)
        sizes = f"{a.heads} / {a.kv_heads} heads of {a.head_size}, features {a.feature_size}, window {a.window}"
        title = f"{name}: {a.batch} x {1 if name == 'fused_step' else a.t} tokens, {sizes}, {a.dtype}"
        show(rows, title, ", ".join(f"{key} {value}" for key, value in results["machine"].items()))
        results["rows"] += rows
    if a.json:
        a.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
