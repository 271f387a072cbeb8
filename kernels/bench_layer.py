"""Times what stands between a layer's q/k/v projections and its output projection: `python kernels/bench_layer.py`.

Rotary, feature maps, gates, memory, window, sinks and join of a mixer, compiled as training compiles them, beside full
causal attention (without rotary) and fla's gated linear attention alone. All in one run on rotating random inputs;
times are medians. A layer whose output or gradient is wrong, on these sizes at 160 tokens, is not timed: one sentence,
exit code 1. Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from bench import fla_chunk_gla, machine, milliseconds
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
from liger_convert.model.layout import SequenceLayout

CHECKED = 160  # tokens
ROTATED = 3  # sets of inputs
DEVICE = torch.device("cuda")


class Core(LinearizedAttention):
    """A linearized layer without its projections: its input is q, k and v side by side, [B,T,(H+2G)D]."""

    def project(self, x_BTC: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        H, G = self.dims.heads, self.dims.kv_heads
        q, k, v = x_BTC.unflatten(-1, (-1, self.dims.dim)).split((H, G, G), 2)
        return q, k, *self.rotate(q, k, *position_embeddings, unsqueeze_dim=2), v


def core(a: argparse.Namespace, head_size: int, mixer: str) -> tuple[Core, LlamaRotaryEmbedding]:
    base = LlamaConfig(
        hidden_size=a.heads * head_size,
        num_attention_heads=a.heads,
        num_key_value_heads=a.kv_heads,
        head_dim=head_size,
        num_hidden_layers=1,
        attn_implementation="sdpa",
    )
    spec = resolve_spec({"type": mixer} | ({"codes": a.codes} if mixer == "gla" else {}))
    config = linearized_config(base, {"format": FORMAT, "mixers": {"main": spec}, "layers": ["main"]})
    attention = LlamaAttention(config, 0)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        setattr(attention, name, nn.Identity())
    layer = Core(attention, config, 0)
    layer.mixer.reset_parameters()
    return layer.to(DEVICE), LlamaRotaryEmbedding(config).to(DEVICE)


def step(layer: Core, rotary: LlamaRotaryEmbedding) -> Callable[[Tensor], Tensor]:
    def run(x_BTC: Tensor) -> Tensor:
        B, T, _ = x_BTC.shape
        positions_1T = torch.arange(T, device=DEVICE)[None]
        layout = SequenceLayout.build(B, T, positions_1T, None, None)
        layer.prepare(layout)
        return layer(x_BTC, position_embeddings=rotary(x_BTC, positions_1T), layout=layout)[0]

    return run


def results(run: Callable[[Tensor], Tensor], x_BTC: Tensor) -> dict[str, Tensor]:
    x_BTC = x_BTC.detach().requires_grad_()
    o = run(x_BTC)
    torch.manual_seed(1)
    (dx,) = torch.autograd.grad(o, x_BTC, torch.randn_like(o, dtype=torch.float32).to(o.dtype))
    return {"output": o.detach(), "gradient of the input": dx}


def check(run: Callable[[Tensor], Tensor], compiled: Callable[[Tensor], Tensor], x_BTC: Tensor) -> list[str]:
    """The kernels in bf16 against the torch ops in float32, beside the torch ops in bf16."""
    use("torch")
    exact, plain = results(run, x_BTC.float()), results(run, x_BTC)
    use("triton")
    found = []
    for name, got in results(compiled, x_BTC).items():
        ours, allowed = error(got, exact[name]), 2 * error(plain[name], exact[name]) + 4 * torch.finfo(x_BTC.dtype).eps
        if not ours <= allowed:
            found.append(f"{name} errs by {ours:.1e}, allowed {allowed:.1e}")
    return found


def forward_backward(op: Callable[[Tensor], Tensor], x: Tensor) -> None:
    x = x.detach().requires_grad_()
    o = op(x)
    o.backward(torch.ones_like(o))


def measured(
    step: Callable[[Any, Any], object], op: Callable[[Tensor], Any], inputs: list[Tensor], seconds: float
) -> tuple[float, float]:
    """Milliseconds of `step(op, input)`, and GB of memory at the peak beyond what was there."""
    for x in inputs:  # compiled, and what libraries keep is there
        step(op, x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    median = milliseconds(step, op, inputs, "cuda", seconds)
    return median, (torch.cuda.max_memory_allocated() - before) / 1e9


def forward(op: Callable[[Tensor], Any], x: Tensor) -> None:
    with torch.no_grad():
        op(x)


def causal(heads: int, kv_heads: int, backend: SDPBackend, x_BTC: Tensor, size: int) -> Tensor:
    q, k, v = x_BTC.unflatten(-1, (-1, size)).split((heads, kv_heads, kv_heads), 2)
    with sdpa_kernel(backend):
        o = nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
    return o.transpose(1, 2)


def fla_alone(heads: int, kv_heads: int, x_BTC: Tensor, size: int) -> Tensor:
    q, k, v = x_BTC.unflatten(-1, (-1, size)).split((heads, kv_heads, kv_heads), 2)
    log_a = nn.functional.logsigmoid(k.float()) / 16
    return fla_chunk_gla(q.softmax(-1), k.softmax(-1), v, log_a)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixer", action="append", help="may be given again (liger-paper, gla)")
    parser.add_argument("--head-size", type=int, action="append", help="may be given again (128, 64)")
    parser.add_argument("--shape", action="append", help="BATCHxTOKENS, again and again (16x2048 4x8192 1x32768)")
    parser.add_argument("--heads", type=int, default=32, help="query heads (32)")
    parser.add_argument("--kv-heads", type=int, default=8, help="key-value heads (8)")
    parser.add_argument("--codes", type=int, default=256, help="of the codebook of gla (256)")
    parser.add_argument("--seconds", type=float, default=0.5, help="spent on each time (0.5)")
    parser.add_argument("--no-fla", action="store_true", help="leave fla out: its first calls take minutes")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    a = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_layer.py: needs a GPU; on a CPU time the ops by kernels/bench.py")
    torch._dynamo.config.recompile_limit = 64
    rows: list[dict[str, Any]] = []
    for size in a.head_size or [128, 64]:
        ops: dict[str, Callable[[Tensor], Tensor]] = {}
        for mixer in a.mixer or ["liger-paper", "gla"]:
            torch.manual_seed(0)
            layer, rotary = core(a, size, mixer)
            plain = step(layer, rotary)
            fast, _ = core(a, size, mixer)
            fast.load_state_dict(layer.state_dict())
            fast.compile()
            x_BTC = torch.randn(1, CHECKED, (a.heads + 2 * a.kv_heads) * size, device=DEVICE, dtype=torch.bfloat16)
            if wrong := check(plain, step(fast, rotary), x_BTC):
                sys.exit(f"{mixer} (head size {size}) is not timed because it is wrong: {'; '.join(wrong)}.")
            ops[f"ours, {mixer}"] = step(fast, rotary)
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
            ops[f"full causal, {backend.name}"] = partial(causal, a.heads, a.kv_heads, backend, size=size)
        if not a.no_fla:
            ops["fla chunk_gla alone"] = partial(fla_alone, a.heads, a.kv_heads, size=size)
        for shape in a.shape or ["16x2048", "4x8192", "1x32768"]:
            B, T = map(int, shape.split("x"))
            inputs = [
                torch.randn(B, T, (a.heads + 2 * a.kv_heads) * size, device=DEVICE, dtype=torch.bfloat16)
                for _ in range(ROTATED)
            ]
            for name, op in ops.items():
                row: dict[str, Any] = {"layer": name, "head_size": size, "shape": shape}
                if name.startswith("fla") and not find_spec("fla"):
                    rows.append(row | {"missing": "fla"})
                    continue
                row["forward_ms"], row["forward_gb"] = measured(forward, op, inputs, a.seconds)
                row["both_ms"], row["both_gb"] = measured(forward_backward, op, inputs, a.seconds)
                rows.append(row)
                print(json.dumps(row), flush=True)
    about = machine("cuda")
    table = Table("", "head size", "shape", "forward", "forward + backward", "memory", caption=str(about))
    for row in rows:
        cells = ["not installed"] if "missing" in row else [
            f"{row['forward_ms']:.3f} ms", f"{row['both_ms']:.3f} ms", f"{row['both_gb']:.2f} GB"
        ]  # fmt: skip
        table.add_row(row["layer"], str(row["head_size"]), row["shape"], *cells)
    Console(width=120).print(table)
    if a.json:
        a.json.write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
