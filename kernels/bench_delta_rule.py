"""The delta rule on this machine's GPU by our kernels and by fla-core's: `python kernels/bench_delta_rule.py`.

Every contender is a process of its own with nothing compiled before. All make their first calls side by side: its
seconds, with compiling and tuning, are told, and ours is held to float64 (in bf16 and in fp32, with segments, exclusive
reads and another key to erase). Then one after the other times its calls, while the others stand still. fla-core tunes
its kernels at a first call, which can take minutes: it tries so many configurations of each, evenly spread, as
`--configurations` says. Who is not ready after `--patience` seconds is left out. A line of JSON for every figure; exit
code 1 if ours is wrong, which is then not timed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__)
SHAPES = ((16, 2048), (1, 32768))  # batch and tokens
HEADS, KV_HEADS = 32, 8
CHECKED = 160  # tokens
OURS = ("ours 128", "ours 64", "ours, a gate per feature 128", "ours, other cases")
CONTENDERS = (*OURS, "fla dplr 128", "fla gated 128", "fla dplr 64", "fla dplr, a gate per feature 128")


def tell(**figures: Any) -> None:
    print(json.dumps(figures), flush=True)


def contender(name: str, a: argparse.Namespace) -> None:
    """Runs as a process of its own: first calls, a word of the parent, times."""
    import torch

    if name.startswith("fla") and a.configurations:
        from triton.runtime import autotuner

        made = autotuner.Autotuner.__init__

        def fewer(self: Any, fn: Any, arg_names: Any, configs: Any, *args: Any, **options: Any) -> None:
            made(self, fn, arg_names, configs, *args, **options)
            step = -(-len(self.configs) // a.configurations)
            self.configs = self.configs[step // 2 :: step]

        autotuner.Autotuner.__init__ = fewer
    bench = import_module("bench")
    check = import_module("gated_kernels.check")
    naive = import_module("gated_kernels.delta_rule.naive").naive_delta_rule
    import_module("gated_kernels").use("torch")
    if name == OURS[-1]:
        tell(contender=name, wrong=wrong_cases(bench, check, naive))
        return
    size = int(name.split()[-1])
    sizes = argparse.Namespace(heads=HEADS, kv_heads=KV_HEADS, head_size=size)
    op = bench.in_triton("delta_rule")
    if name.startswith("fla"):
        op = bench.fla_adapted if "dplr" in name else bench.fla_chunk_gated_delta_rule

    def inputs(T: int, B: int) -> Any:
        with torch.device("cuda"):
            made = bench.delta_rule_inputs(sizes, T, B)
            if "per feature" in name:
                made["log_a"] = torch.nn.functional.logsigmoid(torch.randn(B, T, KV_HEADS, size)) / 16
        return bench.placed(made, torch.device("cuda"), torch.bfloat16)

    torch.manual_seed(0)
    first = inputs(CHECKED, 1)
    steps = {label: bench.STEPS[label] for label in ("forward", "forward + backward")}
    for label, step in list(steps.items()):
        started = time.perf_counter()
        try:
            step(op, first)
            torch.cuda.synchronize()
        except Exception as problem:
            del steps[label]
            tell(contender=name, step=label, raised=f"{type(problem).__name__}: {' '.join(str(problem).split())[:150]}")
            continue
        tell(contender=name, step=label, first_call_s=round(time.perf_counter() - started, 1))
    if name.startswith("ours"):
        wrong = check.faults(op, naive, first, torch.finfo(torch.bfloat16).eps / 8)
        tell(contender=name, wrong=wrong)
        if wrong:
            return
        for label, step in steps.items():  # a row of documents of other lengths compiles nothing more
            started = time.perf_counter()
            step(op, inputs(CHECKED + 77, 2))
            torch.cuda.synchronize()
            tell(contender=name, step=label, call_of_another_length_s=round(time.perf_counter() - started, 2))
    if not steps:
        return
    tell(contender=name, ready=True)
    if not sys.stdin.readline():  # the parent has ended
        return
    for B, T in SHAPES:
        batches = [inputs(T, B) for _ in range(2)]
        for label, step in steps.items():
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            milliseconds = bench.milliseconds(step, op, batches, "cuda", a.seconds)
            peak = (torch.cuda.max_memory_allocated() - before) / 1e9
            tell(contender=name, batch=B, tokens=T, step=label, ms=round(milliseconds, 3), extra_gb=round(peak, 2))
        if steps:
            spent = bench.gpu_kernels([partial(step, op, batches[0])] * 3)
            tell(
                contender=name, batch=B, tokens=T, kernels_ms={k[:40]: round(t, 3) for k, t in list(spent.items())[:12]}
            )
        del batches
        torch.cuda.empty_cache()
    if name == OURS[0]:
        time_steps(bench, inputs(1, 64), a.seconds)


def time_steps(bench: Any, x: Any, seconds: float) -> None:
    """One token, as decoding takes it, by our kernel and by the torch op, each replayed in a CUDA graph."""
    import torch

    registry = import_module("gated_kernels.common.registry")
    module = import_module("gated_kernels.delta_rule.triton")
    op = import_module("gated_kernels").chunk_delta_rule
    x["initial_state"] = torch.randn(
        *x["k_BTGF"].shape[::2], *x["k_BTGF"].shape[3:], x["v_BTGV"].shape[3], device="cuda"
    )
    for by, kernel in (("kernel", module.triton_delta_rule_step), ("torch", None)):
        registry.set_kernel("delta_rule_step", kernel)
        with torch.no_grad():
            op(**x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                op(**x)
        spent = bench.milliseconds(lambda _, graph: graph.replay(), op, [graph], "cuda", seconds)
        tell(step_of_one_token=by, batch=64, ms=round(spent, 4))
    registry.set_kernel("delta_rule_step")


def wrong_cases(bench: Any, check: Any, naive: Any) -> dict[str, list[str]]:
    """What our kernels get wrong in cases that are not timed."""
    import torch

    cases = import_module("gated_kernels.delta_rule.cases")
    sizes = cases.gla.Case(200, G=2, R=2, F=64, V=64, per_head=True, gate="mixed", segments=True, exclusive=True)
    half, small = torch.bfloat16, sizes._replace(T=130, F=32, V=17)
    given = {
        "segments, exclusive, bf16": (cases.Case(sizes._replace(dtype=half)), 2**-10),
        "erases elsewhere, fp32": (cases.Case(small, erases_elsewhere=True), 2**-21),
        "-60 a token, bf16": (cases.Case(sizes._replace(gate="-60", dtype=half)), 2**-10),
        "no decay, heads of 96 and 128, bf16": (
            cases.Case(sizes._replace(gate="none", F=96, V=128, dtype=half)),
            2**-10,
        ),
        "a gate per feature, bf16": (cases.Case(sizes._replace(per_head=False, gate="patches", dtype=half)), 2**-10),
        "a gate per feature, erases elsewhere, bf16": (
            cases.Case(sizes._replace(per_head=False, gate="strong", exclusive=False, dtype=half), True),
            2**-10,
        ),
        "fp16": (cases.Case(small._replace(dtype=torch.float16)), 2**-10),
        "128, fp32": (cases.Case(sizes._replace(T=100, F=128, V=128, gate="strong")), 2**-21),
    }
    found = {}
    for name, (case, rounding) in given.items():
        x = {n: v.cuda() if isinstance(v, torch.Tensor) else v for n, v in cases.inputs(case).items()}
        try:
            if problems := check.faults(bench.in_triton("delta_rule"), naive, x, rounding):
                found[name] = problems
        except Exception as problem:
            found[name] = [f"{type(problem).__name__}: {' '.join(str(problem).split())[:200]}"]
    x = cases.inputs(cases.Case(sizes._replace(T=1, segments=False, dtype=half)))
    x = {n: v.cuda() if isinstance(v, torch.Tensor) else v for n, v in x.items() if n != "segment_ids_BT"}
    exact = naive(**{n: v.double() if isinstance(v, torch.Tensor) else v for n, v in x.items()})
    with torch.no_grad():
        for got, right in zip(import_module("gated_kernels.delta_rule.triton").triton_delta_rule_step(**x), exact):
            if not check.error(got, right) <= 2**-8:
                found["step of one token"] = [f"errs by {check.error(got, right):.1e}"]
    return found


def start(name: str, a: argparse.Namespace, cache: str) -> subprocess.Popen[str]:
    options = ["--contender", name, "--seconds", str(a.seconds), "--configurations", str(a.configurations)]
    environment = os.environ | {"TRITON_CACHE_DIR": str(Path(cache) / name.replace(" ", "_"))}
    environment |= {"FLA_CACHE_RESULTS": "0"}
    return subprocess.Popen(
        [sys.executable, str(HERE), *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


def until(process: subprocess.Popen[str], ready: bool) -> tuple[bool, bool]:
    """Passes a process's lines on, to its end or until it is ready; whether it got there and all was right."""
    right = True
    assert process.stdout is not None
    for line in process.stdout:
        figures = json.loads(line) if line.startswith("{") else {}
        if ready and figures.get("ready"):
            return True, right
        right = right and not figures.get("wrong")
        print(line, end="", flush=True)
    return not ready, right and process.wait() == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.4, help="spent on each time (0.4)")
    parser.add_argument("--configurations", type=int, default=4, help="that fla-core tries of a kernel, 0: all (4)")
    parser.add_argument("--patience", type=float, default=60, help="seconds until who is not ready is left out (60)")
    parser.add_argument("--no-fla", action="store_true", help="only ours")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.contender:
        return contender(a.contender, a)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and none of the processes stays
    begun, right = time.monotonic(), True
    names = [name for name in CONTENDERS if not (a.no_fla and name.startswith("fla"))]
    with tempfile.TemporaryDirectory() as cache:
        running = {name: start(name, a, cache) for name in names}
        try:
            ready = []
            for name, process in running.items():
                left = a.patience + begun - time.monotonic()
                alarm = threading.Timer(max(left, 1), process.kill)
                alarm.start()
                got_there, fine = until(process, ready=name != OURS[-1])
                alarm.cancel()
                if not got_there:
                    tell(contender=name, left_out=True)
                right = right and (fine or name.startswith("fla"))
                ready += [name] * (got_there and process.poll() is None)
                if name == OURS[-1]:
                    turn(ready, running)
            turn([name for name in ready if name.startswith("fla")], running)
        finally:
            for process in running.values():
                process.kill()
    tell(seconds=round(time.monotonic() - begun), right=right)
    sys.exit(0 if right else 1)


def turn(names: list[str], running: dict[str, subprocess.Popen[str]]) -> None:
    """These time their calls, one after the other, while all others stand still."""
    for name in names:
        others = [process for other, process in running.items() if other != name and process.poll() is None]
        for process in others:
            process.send_signal(signal.SIGSTOP)
        stdin = running[name].stdin
        assert stdin is not None
        print("go", file=stdin, flush=True)
        until(running[name], ready=False)
        for process in others:
            process.send_signal(signal.SIGCONT)


if __name__ == "__main__":
    main()
