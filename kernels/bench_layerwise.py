"""Times alignment layer by layer: `python kernels/bench_layerwise.py --layers 3 --tokens 524288`.

A base of the sizes of Llama-3-70B, but with few layers and a small vocabulary, is created with random weights in a
temporary folder and converted. Then all its layers are trained as a stage with `layerwise: true` does. For each layer
this prints the time to its first step, and the speed of the steps after that. It also counts the operations of a step,
as `linearize plan` does, and prints what part of the peak of an H200 the speed comes to.

Under torchrun, the processes share the rows. If the error of a layer does not fall, nothing is printed, and the exit
code is 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from bench import machine
from bench_plan import documents, write_base
from rich.console import Console
from rich.table import Table

from liger_convert.benchmark.shapes import SHAPES, random_model
from liger_convert.config.names import MAIN
from liger_convert.config.recipe import Recipe, build
from liger_convert.config.stages import AlignStage
from liger_convert.pipeline.convert import convert_checkpoint
from liger_convert.pipeline.plan import make_plan
from liger_convert.training import run_stage
from liger_convert.training.batch_split import split_batch
from liger_convert.training.stage import rows_of
from liger_convert.training.traffic_estimate import PEAK
from liger_convert.utils import processes
from liger_convert.utils.device import pick_device
from liger_convert.utils.progress import quiet_libraries

VOCABULARY = 49152  # small, so that the embeddings take little time to write
SHAPES["llama-3-70b"] = SHAPES["llama-3-8b"] | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "vocab_size": VOCABULARY,
}
WARM = 8  # steps of a layer that are not timed: compilation, capture, and files that are new


def recipe_of(a: argparse.Namespace, layerwise: bool = True) -> Recipe:
    rates = {"mixer": 1e-3, "attention": 1e-5}
    stage = {"kind": "align", "data": "text", "seq_len": a.length, "batch_size": a.batch_size, "tokens": a.tokens}
    stage |= {"learning_rates": rates, "layerwise": layerwise, "concat_documents": True}
    fields = {"version": 1, "name": "layerwise", "base": "random", "mixer": {"type": "gla"}, "layers": "all"}
    fields |= {"data": {"text": {"source": "pydoc"}}, "stages": [stage], "device": a.device}
    return build(fields, "bench_layerwise.py")


def operations_per_token(a: argparse.Namespace, config: Any) -> float:
    """Of one layer of the base, and of the attention that is trained. The plan of several processes counts them."""
    (stage,) = recipe_of(a, layerwise=False).stages
    traffic = make_plan(recipe_of(a, layerwise=False), config, 2).stages[0].traffic
    assert traffic is not None
    rows, times = split_batch(stage, 2)
    return traffic.computed / (rows * times * stage.seq_len) / a.layers


class Clock:
    """Called as the stage's progress: keeps when each step of each layer ended."""

    def __init__(self) -> None:
        self.ends: dict[int, list[float]] = {}
        self.begun = time.perf_counter()

    def __call__(self, done: float, total: float | None, note: str = "") -> None:
        if note.startswith("layer ") and total is not None:
            self.ends.setdefault(int(note.split()[1].rstrip(",")), []).append(time.perf_counter())

    def layers(self, step_tokens: int) -> list[dict[str, Any]]:
        """For each layer: the seconds from the end of the one before to its first step, and tokens per second."""
        found, before = [], self.begun
        for number, ends in sorted(self.ends.items()):
            steps = [b - a for a, b in zip(ends[WARM:], ends[WARM + 1 :])]
            speed = step_tokens / statistics.median(steps) if steps else None  # None: there are too few steps
            found.append({"layer": number, "first_step_s": ends[0] - before, "tokens_per_s": speed})
            before = ends[-1]
        return found


def measure(a: argparse.Namespace, folder: Path) -> dict[str, Any]:
    device = pick_device(a.device)
    processes.join(device.type == "cpu")
    SHAPES[a.shape] = SHAPES[a.shape] | {"num_hidden_layers": a.layers}
    config = random_model(a.shape, None, torch.device("meta"), torch.bfloat16).config
    (stage,) = recipe_of(a).stages
    assert isinstance(stage, AlignStage)
    plan = make_plan(recipe_of(a), config, processes.count())
    per_token = operations_per_token(a, config)
    if processes.is_first():
        write_base(folder / "base", a.shape, device)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        convert_checkpoint(folder / "base", folder / "model", plan.linearization)
    processes.barrier()
    clock = Clock()
    dataset = rows_of(stage, {"text": documents(stage, config.vocab_size)}, 0)
    paths = {"model_dir": folder / "model", "base_dir": folder / "base", "out": folder / "stage"}
    stats = run_stage(stage, results=[], dataset=dataset, device=device, progress=clock, **paths)
    memory = torch.cuda.max_memory_reserved() if device.type == "cuda" else None
    errors = stats["align_error"]
    found = {"machine": machine(device.type), "gpus": processes.count(), "rows": a.batch_size, "length": a.length}
    found |= {"seconds": stats["seconds"], "fwd_bwd": stats["fwd_bwd"], "errors": errors, "memory": memory}
    found |= {"layers": clock.layers(stage.step_tokens), "mixer": plan.linearization["mixers"][MAIN]}
    wrong = [i for i, (was, now) in enumerate(zip(errors["before"], errors["after"])) if not now < was]
    processes.leave()
    return found | {"operations_per_token": per_token, "wrong": wrong}


def show(found: dict[str, Any]) -> None:
    table = Table("layer", "first step", "tokens/s", "of the peak")
    for row in found["layers"]:
        speed = row["tokens_per_s"] or 0.0
        part = speed * found["operations_per_token"] / PEAK / found["gpus"]
        table.add_row(str(row["layer"]), f"{row['first_step_s']:.1f} s", f"{speed:,.0f}", f"{part:.2f}")
    console = Console()
    console.print(table)
    memory = "" if found["memory"] is None else f", {found['memory'] / 1e9:.1f} GB reserved"
    console.print(f"{found['seconds']} s in all, {found['fwd_bwd']}, {found['gpus']} processes{memory}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3-70b", help="a shape of linearize bench, or llama-3-70b (default)")
    parser.add_argument("--layers", type=int, default=3, help="layers of the model (3)")
    parser.add_argument("--tokens", type=int, default=1 << 19, help="tokens of the stage (524,288)")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row (2,048)")
    parser.add_argument("--batch-size", type=int, default=4, help="rows of a step (4)")
    parser.add_argument("--device", default="auto", help="auto, cuda or cpu")
    parser.add_argument("--folder", type=Path, help="where to write; all processes must see it (a temporary folder)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    a = parser.parse_args()
    quiet_libraries()
    with tempfile.TemporaryDirectory() as temporary:
        found = measure(a, a.folder or Path(temporary))
    if not processes.is_first():
        return
    if a.json:
        a.json.write_text(json.dumps(found, indent=1))
    if found["wrong"]:
        sys.exit(f"the errors of these linear layers did not fall: {found['wrong']}; nothing is timed")
    show(found)


if __name__ == "__main__":
    main()
