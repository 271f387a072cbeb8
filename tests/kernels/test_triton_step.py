"""The fused step of one token: on a GPU or, without one, in Triton's interpreter; and through the compiler.

Run as a script, it compiles the step of several sizes for sm_90, which needs the compiler but no GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported
triton = pytest.importorskip("triton", reason="Triton is not installed")
if DEVICE == "cpu" and os.environ["TRITON_INTERPRET"] == "1" and isinstance(triton.language.sum, triton.JITFunction):
    pytest.skip("another module imported Triton before it could be told to interpret", allow_module_level=True)

import gated_kernels  # noqa: E402
from gated_kernels.check import error  # noqa: E402
from gated_kernels.step import triton as kernels  # noqa: E402
from gated_kernels.step.cases import CASES, Case, changed, inputs  # noqa: E402
from gated_kernels.step.chunk import takes  # noqa: E402
from gated_kernels.step.reference import step as reference  # noqa: E402

BF16 = torch.bfloat16
COMPILED = {  # registers and shared memory are the larger, the more channels and features
    "128 channels, 128 features": Case(D=128, F=128, G=8, R=4, B=16, dtype=BF16),
    "128 channels, 256 features": Case(D=128, F=256, G=8, R=4, B=16, dtype=BF16),
    "64 channels, 128 features": Case(D=64, F=128, G=3, R=3, B=16, dtype=BF16),
    "64 channels, 256 features": Case(D=64, F=256, G=3, R=3, B=16, dtype=BF16),
    "64 channels, 1024 features": Case(D=64, F=1024, G=3, R=3, B=16, dtype=BF16),
    "128 channels, fp32": Case(D=128, F=128, G=8, R=4, B=16),
    "256 channels": Case(D=256, F=256, G=1, R=8, B=1, dtype=BF16),
    "liger-paper": Case("liger-paper", D=128, G=8, R=4, M=0, B=16, dtype=BF16),
}


@pytest.fixture
def use() -> Iterator[Callable[[str], None]]:
    yield gated_kernels.use
    gated_kernels.use("torch")


def placed(x: Any, dtype: torch.dtype | None = None) -> Any:
    """A copy of nested inputs on the device; their floating-point numbers in `dtype`."""
    return changed(x, lambda t: t.to(DEVICE, dtype if t.is_floating_point() else None, copy=True))


def outcome(step: Any, given: Any, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """What a step gives and leaves behind, by name."""
    token, kept, rules = placed(given, dtype)
    found = {"output": step(token, kept, rules)} | kept._asdict()
    return {name: x for name, x in found.items() if x is not None and x.is_floating_point()}


def faults(given: Any) -> list[str]:
    """As gated_kernels.check.faults, of everything that a step changes."""
    exact, plain, ours = (
        outcome(reference, given, torch.float64),
        outcome(reference, given),
        outcome(kernels.step, given),
    )
    found = []
    for name, x in ours.items():
        allowed = 2 * error(plain[name], exact[name]) + 4 * torch.finfo(torch.float32).eps
        if x.dtype != plain[name].dtype or not error(x, exact[name]) <= allowed:
            found.append(f"{name} ({x.dtype}) errs by {error(x, exact[name]):.1e}, allowed {allowed:.1e}")
    return found


@pytest.mark.parametrize("case", CASES)
def test_the_step_errs_at_most_twice_as_much_as_the_reference_in_its_dtype(case: str) -> None:
    given = inputs(CASES[case])
    assert not faults(given)


def test_an_empty_memory_weighs_nothing_whatever_is_asked_for() -> None:
    token, kept, rules = inputs(CASES["partly filled ring, nothing in memory"])
    assert rules.share is not None
    loud = rules._replace(share=rules.share._replace(log_H=torch.full_like(rules.share.log_H, 1e3)))
    quiet, asked = (outcome(kernels.step, (token, kept, r))["output"] for r in (rules, loud))
    assert torch.equal(quiet, asked)


def test_projections_may_be_parts_of_one_tensor() -> None:
    token, *rest = inputs(CASES["small"])
    whole = torch.cat([x.flatten(1) for x in (token.q_BHD, token.k_BGD, token.v_BGD)], 1)
    parts = whole.split([x[0].numel() for x in (token.q_BHD, token.k_BGD, token.v_BGD)], 1)
    q, k, v = (x.unflatten(1, (-1, token.q_BHD.shape[2])) for x in parts)
    one, other = (
        outcome(kernels.step, (token, *rest)),
        outcome(kernels.step, (token._replace(q_BHD=q, k_BGD=k, v_BGD=v), *rest)),
    )
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_layers_that_the_step_does_not_take_are_left_alone(use: Callable[[str], None]) -> None:
    _, kept, rules = placed(inputs(CASES["small"]))
    assert not takes(kept, rules, 4)
    use("triton")
    assert takes(kept, rules, 4)
    assert not takes(kept._replace(pending_BPGD=None), rules, 4)
    assert not takes(kept, rules._replace(share=None), 4)
    assert not takes(kept._replace(k_BPGD=kept.k_BPGD[:, :0]), rules, 4)
    assert not takes(kept._replace(state_BGFV=kept.state_BGFV.double()), rules, 4)
    assert not takes(kept._replace(v_BPGD=kept.v_BPGD.bfloat16()), rules, 4)


def test_every_size_compiles_for_hopper_without_spilling(tmp_path: Path) -> None:
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    if not ptxas.exists() and "TRITON_PTXAS_PATH" not in os.environ:
        pytest.skip("this Triton comes without ptxas")
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[0] for line in lines] == ["read_kernel", "write_kernel"] * len(COMPILED)
    assert max(int(line[1]) for line in lines) <= 99 * 1024


def compile_all() -> None:
    """Calls the step of every case with tensors that hold nothing; what would be launched is compiled. Prints each
    kernel, its shared memory, and where it is known the registers and the bytes spilled a thread."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = {torch.float32: "*fp32", BF16: "*bf16", torch.uint8: "*u8", torch.int64: "*i64", torch.bool: "*i1"}

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        options = {"num_warps": constants.pop("num_warps")}
        values = dict(zip(self.arg_names, args)) | constants
        signature, fixed, aligned = {}, {}, {}
        for i, (name, value) in enumerate(values.items()):
            if isinstance(value, Tensor):
                signature[name], aligned[i,] = names[value.dtype], [["tt.divisibility", 16]]
            elif name in constants or value is None or (isinstance(value, int) and value == 1):
                signature[name], fixed[name] = "constexpr", value
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
                if isinstance(value, int) and value % 16 == 0:
                    aligned[i,] = [["tt.divisibility", 16]]
        source = ASTSource(self, signature, fixed, aligned)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        print(self.__name__, compiled.metadata.shared, *resources(compiled.asm["cubin"]), flush=True)

    triton.runtime.jit.JITFunction.run = launch
    torch.cuda.device_of = nullcontext
    for case in COMPILED.values():
        kernels.step(*changed(inputs(case), lambda t: t.to("meta")))


def resources(cubin: bytes) -> tuple[str, ...]:
    import re
    import tempfile

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True)
    return tuple(re.findall(r"(?:REG|STACK|LOCAL):\d+", told.stdout + told.stderr))


if __name__ == "__main__":
    compile_all()
