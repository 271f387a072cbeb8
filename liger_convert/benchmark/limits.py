"""The least time that a device can take (a roofline): bytes of weights over bandwidth, or products over peak FLOPS.

Only products with weights count. Those of attention and of a memory come on top, and so does reading a cache. So no
time can be below the limit if bandwidth and peak are those of a data sheet. If they are measured, it can be by the
noise of that measurement.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from liger_convert.utils.data_sheets import GPU_SPEEDS

COPIED = 1 << 28  # bytes: more than a chip's caches hold
SIDE, GPU_SIDE = 1024, 8192  # of the matrices that are multiplied on a CPU, and on a GPU
REPEATS = 5  # of which the fastest counts


class Limits(NamedTuple):
    """The limits of a device for a dtype: bytes per second, floating-point operations per second, and their sources."""

    bandwidth: float
    peak: float
    bandwidth_by: str
    peak_by: str


class Work(NamedTuple):
    """The work of a pass of a model: the bytes of the weights that it reads, the number of weights that multiply every
    token, and that of the head, which multiply only the last token."""

    weight_bytes: float
    weights: float
    head: int


def limits_of(device: torch.device, dtype: torch.dtype) -> Limits:
    """The figures of the data sheet if GPU_SPEEDS has the device (and, for the peak, if `dtype` is 16-bit). Otherwise
    measured: with a copy, which counts as a read and a write, and with a matrix product in `dtype`."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    known, narrow = GPU_SPEEDS.get(name), dtype in (torch.bfloat16, torch.float16)
    bandwidth = known.bandwidth if known else _copied(device)
    peak = known.peak if known and narrow else _multiplied(device, dtype)
    by = "data sheet" if known else "a copy in this run"
    return Limits(bandwidth, peak, by, by if known and narrow else "a matrix product in this run")


def work_of(model: Any) -> Work:
    """Counts every weight once, except an embedding that is not also the head. Of a layer's experts, it counts as many
    as one token uses."""
    config = model.config.get_text_config()
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    taken = config.num_experts_per_tok / experts if experts else 1.0
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    size = weights = 0.0
    for name, parameter in model.named_parameters():
        if parameter is embedding and embedding is not head:
            continue
        of_experts = ".experts." in name
        size += stored_bytes(parameter) * (taken if of_experts else 1.0)
        weights += parameter.numel() * taken if of_experts else 0.0
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module.weight is not head and ".experts." not in name:
            weights += module.weight.numel()
    return Work(size, weights, head.numel())


def stored_bytes(parameter: Any) -> int:
    """The bytes of a parameter, or of the numbers and scales that it is stored as."""
    parts = [parameter.qdata, parameter.scale] if hasattr(parameter, "qdata") else [parameter]
    return sum(part.numel() * part.element_size() for part in parts)


def least_ms(work: Work, limits: Limits, batch: int, tokens: int = 1) -> float:
    """The least milliseconds of a pass over `tokens` tokens in each of `batch` rows; by default, of a decoding step."""
    products = 2.0 * batch * (work.weights * tokens + work.head)
    return 1e3 * max(work.weight_bytes / limits.bandwidth, products / limits.peak)


def timed(device: torch.device, work: Callable[..., Any], *inputs: Any) -> tuple[float, Any]:
    """Seconds until the device has finished `work(*inputs)`, and its result."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    started = now()
    result = work(*inputs)
    return now() - started, result


def _copied(device: torch.device) -> float:
    source = torch.zeros(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _least_seconds(device, lambda: target.copy_(source))


def _multiplied(device: torch.device, dtype: torch.dtype) -> float:
    side = GPU_SIDE if device.type == "cuda" else SIDE
    a = torch.ones(side, side, dtype=dtype, device=device)
    return 2 * side**3 / _least_seconds(device, lambda: a @ a)


def _least_seconds(device: torch.device, work: Callable[[], object]) -> float:
    work()  # warm-up: loads libraries, touches the memory
    return min(timed(device, work)[0] for _ in range(REPEATS))
