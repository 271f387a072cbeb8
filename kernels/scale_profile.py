"""Where the time of a step goes by kernels that torch's profiler has recorded: a part of `bench_scale.py`."""

from __future__ import annotations

import functools
import re
import time
from pathlib import Path

import gated_kernels
import torch

PROFILED = 2  # steps that are recorded, after those that are timed
Kernel = tuple[str, float, float]  # its name, and when it begins and ends, in microseconds
NCCL = "NCCL"  # how the names of the groups of NCCL's kernels begin
JIT = re.compile(r"@triton\.jit[^\n]*\n(?:@[^\n]*\n)*def (\w+)")
# Parts of a kernel's name, in lower case. The first group that fits counts: kernels of attention are also called after
# the product they use, and compiled ones after the copies in them.
GROUPS = {
    f"{NCCL} all-gather": "nccl.*allgather",
    f"{NCCL} reduce-scatter, all-reduce": "nccl.*(reducescatter|allreduce)",
    f"{NCCL}, other": "nccl",
    "attention": "flash|fmha|attention|sdpa",
    "products": "gemm|gemv|nvjet|cutlass|cublas|splitk|triton_(mm|tem)",
    "our Triton kernels": "",  # by their full names, see `ours`
    "compiled layers": "^triton_",
    "copies and casts": "memcpy|copy|chunk_cat",
    "everything else": "",
}
OURS, REST = "our Triton kernels", "everything else"
EXPOSED, IDLE, STEP = "of these, NCCL alone", "no kernel", "a step, profiled"


@functools.cache
def ours() -> frozenset[str]:
    """The names of the Triton kernels of gated_kernels."""
    files = Path(gated_kernels.__path__[0]).rglob("*.py")
    return frozenset(name for file in files for name in JIT.findall(file.read_text()))


@functools.cache
def group_of(name: str) -> str:
    """The group of the kernel called `name`."""
    for group, pattern in GROUPS.items():
        if group == OURS and re.sub(r"_\d+$", "", name) in ours():  # inductor numbers those that it launches
            return group
        if pattern and re.search(pattern, name.lower()):
            return group
    return REST


def covered(kernels: list[Kernel]) -> float:
    """The time in which at least one of `kernels` runs: the length of the union of their intervals."""
    total, until = 0.0, float("-inf")
    for _, begin, end in sorted(kernels, key=lambda kernel: kernel[1]):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def by_group(kernels: list[Kernel], wall: float, steps: int) -> dict[str, float]:
    """Milliseconds of a step, given the kernels of `steps` steps that took `wall` microseconds: of each group, added up
    although kernels overlap; of NCCL's kernels while no other runs; without any kernel; and the step's own."""
    found = dict.fromkeys(GROUPS, 0.0)
    for name, begin, end in kernels:
        found[group_of(name)] += end - begin
    busy = covered(kernels)
    found[EXPOSED] = busy - covered([kernel for kernel in kernels if not group_of(kernel[0]).startswith(NCCL)])
    found |= {IDLE: wall - busy, STEP: wall}
    return {what: spent / 1e3 / steps for what, spent in found.items()}


class Recorder:
    """Records the kernels of a device between `start` and `stop`. The device must be idle at both."""

    def __init__(self, device: torch.device):
        kind = torch.profiler.ProfilerActivity
        self.profiler = torch.profiler.profile(activities=[kind.CUDA if device.type == "cuda" else kind.CPU])
        self.wall = 0.0  # in microseconds

    def start(self) -> None:
        self.profiler.start()
        self.wall = -1e6 * time.perf_counter()

    def stop(self) -> None:
        self.wall += 1e6 * time.perf_counter()
        self.profiler.stop()

    def found(self) -> dict[str, float]:
        """What `by_group` finds in the PROFILED steps; on a CPU, no kernels."""
        gpu, events = torch.autograd.DeviceType.CUDA, self.profiler.events() or []
        on_gpu = [x for x in events if x.device_type == gpu and not getattr(x, "is_user_annotation", False)]
        kernels = [(x.name, float(x.time_range.start), float(x.time_range.end)) for x in on_gpu]
        return by_group(kernels, self.wall, PROFILED)
