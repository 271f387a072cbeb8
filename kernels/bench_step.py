"""Times a linearized layer's decoding step, fused and op by op: `python kernels/bench.py --op fused_step`.

A step is everything that the layer runs between its input projections and its output projection. It is timed over so
many layers that their states do not stay in the GPU's cache. On a GPU it is captured, as in generation. If the fused
step is wrong, nothing is timed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from gated_kernels.common.registry import kernel_for, set_kernel
from gated_kernels.fused_step.cases import Case, faults, inputs, placed
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from liger_convert.mixers import resolve_spec
from liger_convert.mixers.base import HeadDims
from liger_convert.model.attention import LinearizedAttention
from liger_convert.model.cache import LinearizedCacheLayer, advance
from liger_convert.model.decoding import static_steps
from liger_convert.model.sequence import SequenceMetadata

BYTES = 500e6  # of all layers' states together: more than a GPU's cache holds
LAYERS = 48  # at most
TOKENS = 100  # of the prompt before the step
STEPS = 200  # graph replays that are timed


class Part(nn.Module):
    """Replaces a projection: returns a range of its input's channels."""

    def __init__(self, start: int, end: int):
        super().__init__()
        self.channels = slice(start, end)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return x_BTC[..., self.channels]


class Steps:
    """One step of several equal layers, each with its own memory. `fused`, or op by op."""

    def __init__(self, a: argparse.Namespace, kind: str, fused: bool):
        torch.manual_seed(0)
        self.device, self.dtype = torch.device(a.device), getattr(torch, a.dtype)
        dims = HeadDims(a.heads * a.head_size, a.heads, a.kv_heads, a.head_size)
        options = {"codes": a.feature_size} if kind == "gla" else {}
        spec = resolve_spec({"type": kind, "window": a.window, **options})
        config: Any = LlamaConfig(
            hidden_size=dims.hidden,
            num_attention_heads=dims.heads,
            num_key_value_heads=dims.kv_heads,
            head_dim=dims.dim,
        )
        features = a.feature_size if kind == "gla" else a.head_size
        nbytes = 4 * a.batch * a.kv_heads * features * a.head_size
        count = max(1, min(LAYERS, int(BYTES / nbytes))) if a.device == "cuda" else 1
        config.linearization = {"mixers": {"main": spec}, "layers": ["main"] * count}
        self.layers = [self.layer(config, i) for i in range(count)]
        self.cache = SimpleNamespace(layers=[LinearizedCacheLayer() for _ in range(count)])
        width = (a.heads + 2 * a.kv_heads) * a.head_size
        self.x = torch.randn(a.batch, 1, width, dtype=self.dtype, device=self.device)
        self.rotary = LlamaRotaryEmbedding(config).to(self.device)
        self.positions = torch.full((a.batch, 1), TOKENS, device=self.device)
        self.valid = torch.ones(a.batch, 1, dtype=torch.bool, device=self.device)
        with torch.no_grad():
            prompt = torch.randn(a.batch, TOKENS, width, dtype=self.dtype, device=self.device)
            self.run(prompt, torch.arange(TOKENS, device=self.device)[None], None)
        for layer, past in zip(self.layers, self.cache.layers):
            past.to_static(layer.spec.cache_window, in_place=True)
            if fused and not layer.enable_fused_step(past):
                sys.exit(f"step: the kernels do not take {kind} of this size, dtype or device.")

    def layer(self, config: Any, i: int) -> Any:
        with torch.device("meta"):
            layer: Any = LinearizedAttention(LlamaAttention(config, i), config, i)
        mixer = layer.mixer.to_empty(device=self.device)
        mixer.reset_parameters()
        with torch.no_grad():
            for parameter in mixer.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        q, kv = (heads * layer.dims.dim for heads in (layer.dims.heads, layer.dims.kv_heads))
        layer.q_proj, layer.k_proj, layer.v_proj = Part(0, q), Part(q, q + kv), Part(q + kv, q + 2 * kv)
        layer.o_proj = nn.Identity()
        return layer.eval()

    def run(self, x_BTC: Tensor, positions_BT: Tensor, valid_BT: Tensor | None) -> Tensor:
        embeddings = self.rotary(x_BTC, positions_BT)
        pasts = self.cache.layers
        metadata = SequenceMetadata.build(x_BTC, positions_BT, valid_BT, pasts[0].positions, static=pasts[0].static)
        for layer in self.layers:
            o, _ = layer(x_BTC, embeddings, metadata=metadata, past_key_values=self.cache)
        windows = [layer.window_metadata(metadata, past) for layer, past in zip(self.layers, pasts)]
        advance(pasts, windows, metadata)
        return o

    def step(self) -> Tensor:
        with torch.no_grad(), static_steps(self.cache.layers):
            return self.run(self.x, self.positions, self.valid)

    def microseconds(self) -> float:
        """The median time of one layer's step."""
        for _ in range(3):
            self.step()
        if self.device.type != "cuda":
            return 1e6 * statistics.median(_timed(self.step) for _ in range(5)) / len(self.layers)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        times = []
        for _ in range(STEPS):
            started, stopped = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            started.record()
            graph.replay()
            stopped.record()
            torch.cuda.synchronize()
            times.append(started.elapsed_time(stopped))
        return 1e3 * statistics.median(times) / len(self.layers)


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@contextmanager
def fused_steps() -> Iterator[None]:
    set_kernel("fused_step", import_module("gated_kernels.fused_step.triton").triton_fused_step)
    try:
        yield
    finally:
        set_kernel("fused_step", None)


def measure(a: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each mixer, fused and op by op, in microseconds per layer. Exits if the fused step is wrong."""
    rows = []
    for kind in ("gla", "liger-paper"):
        case = Case(
            kind,
            W=a.window,
            M=4 if kind == "gla" else 0,
            B=min(a.batch, 17),
            G=a.kv_heads,
            R=a.heads // a.kv_heads,
            D=a.head_size,
            F=a.feature_size,
            dtype=getattr(torch, a.dtype),
        )
        with fused_steps():
            if found := faults(kernel_for("fused_step"), placed(inputs(case), a.device)):  # type: ignore[arg-type]
                sys.exit(f"step ({kind}) is not timed because it is wrong: {'; '.join(found)}.")
            fused = Steps(a, kind, True).microseconds()
        plain = Steps(a, kind, False).microseconds()
        floor = 2 * 4 * a.batch * a.kv_heads * (a.feature_size if kind == "gla" else a.head_size) * a.head_size
        for name, value in (("fused", fused), ("op by op", plain)):
            rows.append(
                {
                    "op": "fused_step",
                    "implementation": f"{kind}, {name}",
                    "us a layer": value,
                    "GB/s of state": floor / value / 1e3,
                }
            )
    return rows
