"""Times how a server's layer reads prompts of different lengths in one step: `python kernels/bench_mixed_prompts.py`.

The layer has the sizes of Llama-3-8B's and random weights. Prompts are padded to share calls of the layer, if that is
worth it: `serving/rows.py` takes a further call for as long as so many tokens of padding. This times a step with
several values of that number, from 0, by which every length has a call of its own. Only what the layer does between
its projections is timed, which is all that depends on it, several times in a row, as for the layers of a model.

If the outputs in bfloat16 err from float32's by more than twice what they do when every prompt is read by itself,
nothing is timed, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from bench import machine
from gated_kernels.check import error
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from liger_convert.benchmark.shapes import SHAPES
from liger_convert.mixers import resolve_spec
from liger_convert.model.attention import LinearizedAttention, head_dims
from liger_convert.model.configuration import FORMAT, linearized_config
from liger_convert.serving import rows
from liger_convert.serving.batch import Batch, StepMetadata
from liger_convert.serving.layer import LayerPages, StepTensors, attend_batch
from liger_convert.serving.page import PageLayout
from liger_convert.utils.device import pick_device

CALLS, CALLS_CPU = (0, 1024, 2048, 4096, 8192, 16384, 65536), (0, 8, 16, 32, 64, 128, 256, 1024)
LAYERS = 24  # runs of the layer in a row
REPEATS = 5


def mixes(most: int) -> dict[str, list[int]]:
    """Lengths of the prompts of a step of at most `most` tokens, by name."""
    choose = random.Random(0)

    def some(shortest: int, longest: int) -> list[int]:
        found: list[int] = []
        while sum(found) + longest <= most:
            found.append(choose.randint(shortest, longest))
        return found

    eighth = most // 8
    return {
        "one": [most],
        "long": some(eighth // 2, 3 * eighth // 2),
        "middling": some(most // 160, most // 18),
        "short": some(most // 400, most // 80),
        "one long, others short": [most // 2, *(choose.randint(most // 160, most // 80) for _ in range(30))],
    }


class Prompts:
    """A layer of `shape`, and the projections of prompts of these lengths."""

    def __init__(self, shape: dict[str, Any], mixer: str, lengths: list[int], device: torch.device):
        torch.manual_seed(0)
        values = {name: value for name, value in shape.items() if name != "model_type"} | {"num_hidden_layers": 1}
        base, spec = LlamaConfig(**values), resolve_spec({"type": mixer})
        config = linearized_config(base, {"format": FORMAT, "mixers": {"main": spec}, "layers": ["main"]})
        with device:
            self.layer = LinearizedAttention(LlamaAttention(config, 0), config, 0).eval()
            self.layer.mixer.float().reset_parameters()
            self.layer.mixer.log_share_H.fill_(4.0)  # so that an error in the memory is seen
            position_N = torch.cat([torch.arange(length) for length in lengths])
            x_1NC = torch.randn(1, len(position_N), config.hidden_size)
            angles = LlamaRotaryEmbedding(config)(x_1NC, position_N[None])
        self.lengths, self.spec, self.dims, self.position_N = lengths, spec, head_dims(config), position_N
        self.step = StepTensors(x_1NC, *self.layer.base_qkv(x_1NC), *angles)

    def prepared(self, dtype: torch.dtype, call: int, most: int) -> tuple[Any, Tensor, int]:
        """A function that runs the layer, the tensor [N,H,D] that it writes, and the number of calls it takes."""
        device, count = self.position_N.device, len(self.lengths)
        step = StepTensors(*(x.to(dtype) for x in self.step))
        layout = PageLayout(self.spec, self.dims, dtype)
        pages = LayerPages(self.layer, layout, torch.zeros(count, layout.words, device=device))
        starts = [0, *torch.tensor(self.lengths).cumsum(0).tolist()]
        page_R, seen_R = torch.arange(count, device=device), torch.zeros(count, dtype=torch.long, device=device)
        o_NHD, metadata = torch.empty_like(step.q_1NHD[0]), StepMetadata(self.position_N)
        rows.CALL = rows.CALL_CPU = call
        batch = Batch(starts, [0] * count, page_R, seen_R, most)
        count = len(batch.rows(pages.fused))
        return lambda: attend_batch(self.layer, pages, batch, step, metadata, o_NHD), o_NHD, count


@torch.no_grad()
def measure(prompts: Prompts, call: int, most: int, exact: Tensor, allowed: float) -> dict[str, Any]:
    """Milliseconds for each layer of a step; that of the host alone is what it takes until all is launched."""
    run, o_NHD, calls = prompts.prepared(torch.bfloat16, call, most)
    run()
    found: dict[str, Any] = {"call": call, "calls": calls, "err": error(o_NHD, exact), "allowed": allowed}
    if not found["err"] <= allowed < 0.1:
        return found | {"wrong": True}
    device, whole, host = prompts.position_N.device, [], []
    for _ in range(REPEATS):
        wait(device)
        begun = time.perf_counter()
        for _ in range(LAYERS):
            run()
        host.append(time.perf_counter() - begun)
        wait(device)
        whole.append(time.perf_counter() - begun)
    return found | {"ms": 1e3 * statistics.median(whole) / LAYERS, "host_ms": 1e3 * statistics.median(host) / LAYERS}


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b", help="whose layer it is (llama-3-8b)")
    parser.add_argument("--mixer", default="gla", help="of the layer (gla)")
    parser.add_argument(
        "--tokens", type=int, default=8192, help="the most of a step, as max_num_batched_tokens (8,192)"
    )
    parser.add_argument("--device", default="auto", help="auto, cuda or cpu")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    a = parser.parse_args()
    device, found = pick_device(a.device), []
    calls = CALLS_CPU if device.type == "cpu" else CALLS
    table = Table("prompts", "a call counts as", "calls", "ms a layer", "of it launching")
    for name, lengths in mixes(a.tokens).items():
        prompts = Prompts(SHAPES[a.shape], a.mixer, lengths, device)
        runs = [prompts.prepared(dtype, 0, a.tokens) for dtype in (torch.float32, torch.bfloat16)]
        for run, *_ in runs:
            run()
        exact, plain = (o_NHD.float() for _, o_NHD, _ in runs)
        for call in calls if len(lengths) > 1 else calls[:1]:
            row = measure(prompts, call, a.tokens, exact, 2 * error(plain, exact))
            found.append({"prompts": name, "count": len(lengths), "tokens": sum(lengths)} | row)
            cells = ("wrong", "") if row.get("wrong") else (f"{row['ms']:.2f}", f"{row['host_ms']:.2f}")
            table.add_row(f"{len(lengths)}, {name}", f"{call:,}", str(row["calls"]), *cells)
    if a.json:
        a.json.write_text(json.dumps({"machine": machine(device.type), "rows": found}, indent=1))
    if any(row.get("wrong") for row in found):
        sys.exit(f"these err by more than is allowed: {[row for row in found if row.get('wrong')]}")
    Console().print(table)


if __name__ == "__main__":
    main()
