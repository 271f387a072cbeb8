"""Times everything between a layer's q/k/v projections and its output projection: `python kernels/bench_layer.py`.

This covers rotary embedding, feature maps, gates, memory, window, sinks and the mix of memory and window. A mixer is
compiled and runs under autocast to bfloat16, as in training. Every shape is compiled separately, as for rows of one
length. It is compared with full causal attention (without rotary embedding) and with fla's gated linear attention
alone, all in one run on rotating random inputs. What a model computes once for all its layers (token positions, rotary
angles) is not timed.

`ms` is the median of calls that are launched ahead, as in a model, and `GPU` is the time of their kernels. The forward
pass is that of training, recorded for the backward pass. Memory is the peak beyond inputs and parameters. A layer whose
output or gradients are wrong on the inputs to be timed is not timed: its row says so, and the exit code is 1. The
--json file is complete after every row, and also lists the kernels that take longest. Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from bench import fla_chunk_gla, gpu_kernels, machine, milliseconds
from gated_kernels import use
from gated_kernels.check import error
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from liger_convert.mixers import resolve_spec
from liger_convert.model.attention import LinearizedAttention
from liger_convert.model.configuration import FORMAT, linearized_config
from liger_convert.model.sequence import SequenceMetadata
from liger_convert.utils.device import autocast

DTYPE = torch.bfloat16
ROTATED = 3  # sets of inputs, used in turn
LONGEST = 16  # kernels whose times are reported
DEVICE = torch.device("cuda")

# The signature of a timed op: q [B,T,H,D], k and v [B,T,G,D] -> [B,T,HD]. Inputs come with the gradient of the output.
Heads = tuple[Tensor, Tensor, Tensor]
Run = Callable[[Heads], Tensor]
Inputs = tuple[Heads, Tensor]


class Core(LinearizedAttention):
    """A linearized layer without its projections. Its input is a tuple of q, k and v, or all three concatenated."""

    def qkv(self, x: Any, metadata: Any, past: Any = None) -> tuple[Tensor, ...]:
        H, G = self.dims.heads, self.dims.kv_heads
        return x if isinstance(x, tuple) else x.unflatten(-1, (-1, self.dims.dim)).split((H, G, G), 2)

    def extend_window(self, projected: Any, x: Any, metadata: Any, past: Any) -> Any:
        """Gives q, which is as wide, to routers and gates that read the layer's input, if there is no such input."""
        x_BTC = x[0].flatten(2) if isinstance(x, tuple) else x
        return super().extend_window(projected, x_BTC, metadata, past)


def core(a: argparse.Namespace, head_size: int, mixer: str) -> tuple[Core, LlamaRotaryEmbedding]:
    """A layer and its rotary embedding. The memory's weight is raised so that the check can see the memory."""
    base = LlamaConfig(
        hidden_size=a.heads * head_size,
        num_attention_heads=a.heads,
        num_key_value_heads=a.kv_heads,
        head_dim=head_size,
        num_hidden_layers=1,
    )
    spec = resolve_spec({"type": mixer} | ({"codes": a.codes} if mixer == "gla" else {}))
    config = linearized_config(base, {"format": FORMAT, "mixers": {"main": spec}, "layers": ["main"]})
    attention = LlamaAttention(config, 0)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        setattr(attention, name, nn.Identity())
    layer = Core(attention, config, 0)
    torch.manual_seed(0)
    layer.mixer.reset_parameters()
    with torch.no_grad():
        for name, parameter in layer.mixer.named_parameters():
            if name in ("log_share_H", "mix_H"):
                parameter.fill_(4.0 if name == "log_share_H" else 0.0)
            parameter += 0.1 * torch.randn_like(parameter)
    return layer.to(DEVICE), LlamaRotaryEmbedding(config).to(DEVICE)


def on_rows(layer: Core, rotary: LlamaRotaryEmbedding, B: int, T: int) -> Callable[[torch.dtype], Run]:
    """A function that, given a dtype, returns `layer` on B rows of T tokens, called as in a model: with metadata that
    is prepared once."""
    positions_1T = torch.arange(T, device=DEVICE)[None]
    metadata = SequenceMetadata.build(torch.empty(B, T, device=DEVICE), None, None)
    layer.prepare_metadata(metadata)

    def computing_in(dtype: torch.dtype) -> Run:
        angles = rotary(torch.empty(0, device=DEVICE, dtype=dtype), positions_1T)

        def run(qkv: Heads) -> Tensor:
            with autocast(DEVICE, dtype):
                return layer(qkv, position_embeddings=angles, metadata=metadata)[0]

        return run

    return computing_in


def leaves(qkv: Heads) -> Heads:
    q, k, v = (x.detach().requires_grad_() for x in qkv)
    return q, k, v


def results(run: Run, parameters: dict[str, Tensor], qkv: Heads, do_BTC: Tensor) -> dict[str, Tensor]:
    qkv = leaves(qkv)
    o = run(qkv)
    grads = torch.autograd.grad(o, [*qkv, *parameters.values()], do_BTC.to(o.dtype), allow_unused=True)
    names = [f"gradient of {name}" for name in ("q", "k", "v", *parameters)]
    return {"output": o.detach()} | {name: grad for name, grad in zip(names, grads) if grad is not None}


def check(runs: Callable[[torch.dtype], Run], layer: Core, inputs: list[Inputs]) -> list[str]:
    """Checks the compiled kernels in bfloat16 against the torch ops in float32. Returns a sentence for every fault.

    Two roundings of the same computation have similar errors. So twice the error of the torch ops in bfloat16 is
    allowed, plus four roundings of bfloat16 in case these are exact by luck. Errors are means over the inputs, because
    some gradients consist of few numbers.
    """
    parameters = dict(layer.mixer.named_parameters())
    ours: dict[str, list[float]] = {}
    plain: dict[str, list[float]] = {}
    for qkv, do in inputs:
        use("torch")
        with torch.compiler.set_stance("force_eager"):
            q, k, v = (x.float() for x in qkv)
            exact = results(runs(torch.float32), parameters, (q, k, v), do)
            for name, value in results(runs(DTYPE), parameters, qkv, do).items():
                plain.setdefault(name, []).append(error(value, exact[name]))
        use("triton")
        for name, value in results(runs(DTYPE), parameters, qkv, do).items():
            ours.setdefault(name, []).append(error(value, exact[name]))
    found = [f"{name} is missing" for name in plain if name not in ours]
    for name, errors in ours.items():
        err, allowed = fmean(errors), 2 * fmean(plain[name]) + 4 * torch.finfo(DTYPE).eps
        if not err <= allowed:
            found.append(f"{name} errs by {err:.1e}, allowed {allowed:.1e}")
    return found


def forward(op: Run, inputs: Inputs) -> Tensor:
    return op(leaves(inputs[0]))


def forward_backward(op: Run, inputs: Inputs) -> None:
    forward(op, inputs).backward(inputs[1])


def measured(step: Callable[..., object], op: Run, inputs: list[Inputs], seconds: float) -> tuple[Any, ...]:
    """Milliseconds of `step(op, input)` by the clock and of its kernels, GB of memory at the peak beyond what was
    allocated before, and milliseconds of the kernels that take longest."""
    for x in inputs:  # warm-up: compiles, and lets libraries allocate their workspaces
        step(op, x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    median = milliseconds(step, op, inputs, "cuda", seconds)
    peak = (torch.cuda.max_memory_allocated() - before) / 1e9
    kernels = gpu_kernels([partial(step, op, x) for x in inputs])
    return median, sum(kernels.values()), peak, dict(islice(kernels.items(), LONGEST))


def causal(backend: SDPBackend, qkv: Heads) -> Tensor:
    q, k, v = qkv
    with sdpa_kernel(backend):
        o = nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
    return o.transpose(1, 2).flatten(2)


def fla_alone(qkv: Heads) -> Tensor:
    q, k, v = qkv
    log_a = nn.functional.logsigmoid(k.float()) / 16
    return fla_chunk_gla(q.softmax(-1), k.softmax(-1), v, log_a)[0].flatten(2)


def row_of(op: Run, inputs: list[Inputs], seconds: float) -> dict[str, Any]:
    """The times of one op. The row says so if it is not installed, rejects these sizes or runs out of memory."""
    row: dict[str, Any] = {}
    try:
        for name, step in (("forward", forward), ("both", forward_backward)):
            figures = measured(step, op, inputs, seconds)
            row |= {f"{name}_{unit}": figure for unit, figure in zip(("ms", "gpu_ms", "gb", "kernels"), figures)}
    except ModuleNotFoundError as problem:
        row["missing"] = f"{problem.name} is not installed"
    except RuntimeError as problem:
        row["missing"] = str(problem).splitlines()[0]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixer", action="append", help="may be given again (liger-paper, gla)")
    parser.add_argument("--head-size", type=int, action="append", help="may be given again (128)")
    parser.add_argument("--shape", action="append", help="BATCHxTOKENS, again and again (16x2048 1x32768)")
    parser.add_argument("--heads", type=int, default=32, help="query heads (32)")
    parser.add_argument("--kv-heads", type=int, default=8, help="key-value heads (8)")
    parser.add_argument("--codes", type=int, default=256, help="of the codebook of gla (256)")
    parser.add_argument("--seconds", type=float, default=0.3, help="spent on each time (0.3)")
    parser.add_argument("--no-fla", action="store_true", help="leave fla out: its first calls take minutes")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    a = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_layer.py: needs a GPU; on a CPU time the ops by kernels/bench.py")
    rows = measure(a)
    show(rows)
    sys.exit(any("wrong" in row for row in rows))


def measure(a: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for every head size, shape and op. Each is printed and written as soon as it is known."""
    torch._dynamo.config.recompile_limit = 64
    about, rows = machine(DEVICE.type), []  # type: ignore[var-annotated]
    mixers, peers = a.mixer or ["liger-paper", "gla"], (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)

    def add(**row: Any) -> None:
        rows.append(row)
        print(json.dumps({name: value for name, value in row.items() if not name.endswith("kernels")}), flush=True)
        if a.json:
            a.json.write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n")

    for size in a.head_size or [128]:
        for shape in a.shape or ["16x2048", "1x32768"]:
            B, T = map(int, shape.split("x"))
            random = partial(torch.randn, device=DEVICE, dtype=DTYPE)
            inputs = [
                (
                    (random(B, T, a.heads, size), random(B, T, a.kv_heads, size), random(B, T, a.kv_heads, size)),
                    random(B, T, a.heads * size),
                )
                for _ in range(ROTATED)
            ]
            ops: dict[str, Run] = {f"full causal, {backend.name}": partial(causal, backend) for backend in peers}
            if not a.no_fla:
                ops["fla chunk_gla alone"] = fla_alone
            for mixer in mixers:
                found: dict[str, Any] = {"layer": f"ours, {mixer}", "head_size": size, "shape": shape}
                try:
                    layer, rotary = core(a, size, mixer)
                    layer.compile(dynamic=False)
                    runs = on_rows(layer, rotary, B, T)
                    wrong = check(runs, layer, inputs)
                    found |= {"wrong": "; ".join(wrong)} if wrong else row_of(runs(DTYPE), inputs, a.seconds)
                except Exception as problem:  # for example from a compiler: the other rows stay valid
                    found["wrong"] = f"{type(problem).__name__}: {str(problem).splitlines()[0]}"
                add(**found)
            for name, op in ops.items():
                add(layer=name, head_size=size, shape=shape, **row_of(op, inputs, a.seconds))
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("", "head size", "shape", "forward", "GPU", "forward + backward", "GPU", "memory")
    for row in rows:
        cells = ["see below"]
        if "both_gb" in row:
            times = [f"{row[name]:.3f} ms" for name in ("forward_ms", "forward_gpu_ms", "both_ms", "both_gpu_ms")]
            cells = [*times, f"{row['both_gb']:.2f} GB"]
        table.add_row(row["layer"], str(row["head_size"]), row["shape"], *cells)
    console = Console(width=120, highlight=False)
    console.print(table)
    for row in rows:
        if why := row.get("wrong") or row.get("missing"):
            console.print(f"{row['layer']}, head size {row['head_size']}, {row['shape']}: {why}", markup=False)


if __name__ == "__main__":
    main()
