"""Triton kernels through the compiler: a test module run as a script compiles instead of launching."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from gated_kernels.common import chips
from torch import Tensor

NAMES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int64: "*i64",
    torch.bool: "*i1",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.float8_e4m3fn: "*fp8e4nv",
}


def told_by(script: str, cache: Path, *words: str) -> list[list[str]]:
    """The words of every line that `script`, given `words`, prints in a process whose Triton compiles. Skips where none
    can."""
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    if not ptxas.exists() and "TRITON_PTXAS_PATH" not in os.environ:
        pytest.skip("this Triton comes without ptxas")
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, script, *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def resources(cubin: bytes) -> tuple[int, int]:
    """The registers of a thread, and the bytes that it has to put elsewhere, of a compiled kernel."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    (found,) = re.findall(r"REG:(\d+) STACK:(\d+)", told.stdout)
    return int(found[0]), int(found[1])


def overwritten(ttgir: str, stages: int) -> list[str]:
    """The buffers that a loop loads a coming tile into while a product of this turn may still read them.

    A loop of several stages loads tiles ahead into buffers that take turns, and needs one for every stage. Triton (3.6
    and 3.9) gives too few to a tile that is an operand of a product and used in registers as well.
    """
    lines, buffers, made_of = ttgir.splitlines(), {}, {}

    def allocation(name: str) -> str:
        return allocation(made_of[name]) if name in made_of else name

    for line in lines:
        if found := re.match(r"\s*(%\S+) = ttg\.local_alloc.*memdesc<(\d+)x", line):
            buffers[found[1]] = int(found[2])
        elif found := re.match(r"\s*(%\S+) = ttg\.memdesc_\w+ (%\w+)", line):
            made_of[found[1]] = found[2]
    wrong = []
    for start, line in enumerate(lines):
        if "scf.for" not in line:
            continue
        indent = len(line) - len(line.lstrip())
        end = next(i for i in range(start + 1, len(lines)) if re.match(rf"\s{{{indent}}}}}", lines[i]))
        under_way: list[set[str]] = []  # operands of the products that were begun in this turn
        for told in lines[start + 1 : end]:
            if found := re.search(r"warp_group_dot (%\w+), (%\w+),.*isAsync = true", told):
                under_way.append({allocation(found[1]), allocation(found[2])})
            elif found := re.search(r"warp_group_dot_wait.*pendings = (\d+)", told):
                under_way = under_way[max(0, len(under_way) - int(found[1])) :]
            elif found := re.search(r"async_copy_global_to_local [^,]+, (%\w+)", told):
                target = allocation(found[1])
                if buffers[target] < stages and any(target in operands for operands in under_way):
                    wrong.append(target)
    return wrong


def compiled_for_capability(capability: int, source: Any, options: dict[str, Any]) -> Any:
    """A kernel for the chips of that capability, 90 for sm_90. None may load a tile over one that is in use, whatever
    it is compiled for."""
    from triton.backends.compiler import GPUTarget

    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    found = overwritten(compiled.asm["ttgir"], compiled.metadata.num_stages)
    assert not found, f"{compiled.name} loads over {found}: {options}, {source.constants}"
    return compiled


def compile_instead_of_launching(tell: Callable[[str, Any], None], capability: int = 90) -> None:
    """From now on what would be launched, on tensors that may hold nothing, is compiled for that capability;
    `tell` gets the kernel's name and what became of it."""
    from triton.compiler import ASTSource

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        names = ("num_warps", "num_stages", "launch_pdl", "maxnreg")
        options = {name: constants.pop(name) for name in names if name in constants}
        if "OVERLAP" in constants:  # as on the chip that it is compiled for
            constants["OVERLAP"] = capability >= 90
            options["launch_pdl"] = capability >= 90
        values = dict(zip(self.arg_names, args)) | constants
        signature, fixed, aligned = {}, {}, {}
        for i, (name, value) in enumerate(values.items()):
            if isinstance(value, Tensor):
                signature[name], aligned[i,] = NAMES[value.dtype], [["tt.divisibility", 16]]
            elif name in constants or value is None or (isinstance(value, int) and value == 1):
                signature[name], fixed[name] = "constexpr", value
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
                if isinstance(value, int) and value % 16 == 0:
                    aligned[i,] = [["tt.divisibility", 16]]
        tell(self.__name__, compiled_for_capability(capability, ASTSource(self, signature, fixed, aligned), options))

    chips.multiplies_in_registers = lambda device: capability not in (90, 100)  # type: ignore[assignment]
    eight_bits = {torch.int8, torch.float8_e4m3fn} if capability >= 89 else {torch.int8}
    chips.eight_bit_dtypes = lambda device: frozenset(eight_bits)  # type: ignore[assignment]
    chips.has_tensor_memory = lambda device: capability == 100  # type: ignore[assignment]
    triton.runtime.jit.JITFunction.run = launch
    torch.cuda.device_of = nullcontext  # type: ignore[assignment,misc]
