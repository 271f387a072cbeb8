"""Linearized attention layers alone, on whole rows and on rows split across GPUs: a part of `bench_scale.py`.

Shapes: B batch, T tokens, C hidden size.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import torch
from gated_kernels import in_use, use
from gated_kernels.check import error
from torch import Tensor

from liger_convert.benchmark.bench import quartiles
from liger_convert.benchmark.shapes import random_model
from liger_convert.model.sequence import SequenceMetadata
from liger_convert.training.sequence_parallel import Group
from liger_convert.utils.device import autocast

DTYPE = torch.bfloat16


class Stack:
    """A stack of linearized attention layers with their projections, for whole rows and for shards of rows."""

    def __init__(self, shape: str, device: torch.device, group: Group):
        self.device, self.group = device, group
        backbone = random_model(shape, "gla", device, torch.float32).model
        self.layers, self.rotary = [layer.self_attn for layer in backbone.layers], backbone.rotary_emb

    def row(self, length: int) -> tuple[Tensor, Tensor]:
        """Inputs and the gradient of the outputs, [1, length, C], the same in all processes."""
        torch.manual_seed(0)
        shape = 1, length, self.layers[0].dims.hidden
        x_BTC, d_BTC = (torch.randn(shape, device=self.device) for _ in range(2))
        return x_BTC, d_BTC

    def run(self, x_BTC: Tensor, d_BTC: Tensor, count: int, group: Group | None, dtype: torch.dtype) -> list[Tensor]:
        """Runs the first `count` layers forward and backward, on this process's shard if there is a `group`.

        Returns the outputs, the gradients of the inputs, and those of the parameters as one vector.
        """
        rows = torch.empty(x_BTC.shape[:2], device=x_BTC.device)
        metadata: Any = SequenceMetadata.build(rows, None, None)
        if group is not None:
            metadata = group.cut({"input_ids": rows})["metadata"]
        own = self.own(x_BTC.shape[1], group)
        x_BTC = x_BTC[:, own].detach().requires_grad_()
        h_BTC, (cos, sin) = x_BTC, self.rotary(x_BTC, metadata.position_BT)
        with autocast(x_BTC.device, dtype) if dtype != torch.float32 else nullcontext():
            for layer in self.layers[:count]:
                h_BTC = h_BTC + layer(h_BTC, position_embeddings=(cos, sin), metadata=metadata)[0]
        h_BTC.backward(d_BTC[:, own])
        parameters = [p for layer in self.layers[:count] for p in layer.parameters()]
        grads = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in parameters])
        for p in parameters:
            p.grad = None
        assert x_BTC.grad is not None
        return [h_BTC.detach(), x_BTC.grad, grads]

    def own(self, length: int, group: Group | None) -> slice:
        if group is None:
            return slice(0, length)
        tokens = length // group.size
        return slice(group.rank * tokens, (group.rank + 1) * tokens)

    def check(self, length: int) -> None:
        """Compares shards in bfloat16 with whole rows in the torch ops in float32. Raises ValueError if the error
        exceeds twice that of whole rows in bfloat16, plus four roundings."""
        row, own, path, count = self.row(length), self.own(length, self.group), in_use(), len(self.layers)

        def found(group: Group | None, dtype: torch.dtype) -> dict[str, Tensor]:
            outputs, gradients, of_parameters = self.run(*row, count, group, dtype)
            # without the residual stream: only what the layers have added
            added = [outputs, gradients] if group is not None else [outputs[:, own], gradients[:, own]]
            added = [value - beside[:, own] for value, beside in zip(added, row)]
            total = of_parameters if group is None else group.total(of_parameters)
            return {"outputs": added[0], "gradients": added[1], "parameters' gradients": total}

        use("torch")
        try:
            exact = found(None, torch.float32)
        finally:
            use(path)
        whole, shards = found(None, DTYPE), found(self.group, DTYPE)
        for what, right in exact.items():
            err, allowed = error(shards[what], right), 2 * error(whole[what], right) + 4 * torch.finfo(DTYPE).eps
            if not err <= allowed:
                raise ValueError(f"the {what} of shards err by {err:.1e}, allowed {allowed:.1e}, so nothing is timed")

    def measure(self, length: int, count: int, group: Group | None, warm: int, steps: int) -> dict[str, Any]:
        """Times forward and backward passes; the first `warm` do not count. If there is a `group`, all processes start
        each pass together."""
        row, times, cuda = self.row(length), [], self.device.type == "cuda"
        for step in range(warm + steps):
            if group is not None:
                group.total(torch.zeros(1, device=self.device))
            _wait(self.device)
            if step == warm and cuda:
                torch.cuda.reset_peak_memory_stats()
            begun = time.perf_counter()
            self.run(*row, count, group, DTYPE)
            _wait(self.device)
            times.append(1e3 * (time.perf_counter() - begun))
        step_ms = quartiles(times[warm:])
        found = {"step_ms": step_ms, "tokens_per_s": 1e3 * length / step_ms["median"], "fwd_bwd": "not compiled"}
        return found | ({"peak_bytes": torch.cuda.max_memory_allocated()} if cuda else {})


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
