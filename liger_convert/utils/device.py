"""The device that a model runs on, its memory, and the precision of matmuls."""

from __future__ import annotations

import contextlib
import gc

import torch

from liger_convert.utils import processes
from liger_convert.utils.errors import BadInput


def pick_device(name: str = "auto") -> torch.device:
    """The device called `name`; `auto` means the first GPU, or the CPU if there is none. Raises BadInput for a name
    that is not a device, and for a GPU that does not exist."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = named_device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BadInput(
            f"device: {name!r} asks for a GPU that does not exist ({torch.cuda.device_count()} found); use cpu"
        )
    return device


def named_device(name: str) -> torch.device:
    """The device called `name`, whether or not this machine has it. Raises BadInput for a name that is not a device, or
    is one of another kind, such as mps."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BadInput(f"device: {name!r} is not a device; use auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise BadInput(f"device: {name!r} is not supported; use auto, cpu, cuda or cuda:N")
    return device


def has_fast_bf16(device: torch.device) -> bool:
    """Whether bf16 matmuls are faster than fp32 ones, as on GPUs and CPUs with bf16 instructions. Older GPUs only
    emulate them."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def compute_dtype(device: torch.device, precision: str = "auto") -> torch.dtype:
    """The compute dtype, in which matmuls run. precision: `float32`, `bfloat16`, or `auto` for bf16 where it is fast.

    Raises BadInput for another precision.
    """
    if precision == "auto":
        return torch.bfloat16 if has_fast_bf16(device) else torch.float32
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if precision not in dtypes:
        raise BadInput(f"precision: {precision!r} is unknown; use auto, float32 or bfloat16")
    return dtypes[precision]


def gpu_memory() -> int | None:
    """The total memory of the first GPU in bytes, None if there is no GPU."""
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def gpus_for(device: torch.device) -> list[torch.device]:
    """The devices that may hold the layers of a model on `device`, which comes first.

    These are all GPUs of the machine if `device` is `cuda`. A GPU that was named by its number is used alone, and so is
    that of each of several processes.
    """
    if device.type != "cuda" or device.index is not None or processes.count() > 1:
        return [device]
    first = torch.cuda.current_device()
    others = [i for i in range(torch.cuda.device_count()) if i != first]
    return [torch.device("cuda", i) for i in (first, *others)]


def free_memory(device: torch.device) -> int | None:
    """The free memory of a GPU in bytes, None for a CPU. Frees garbage and torch's cache first."""
    if device.type != "cuda":
        return None
    gc.collect()  # models that were trained or spread over devices have reference cycles
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def out_of_memory(error: Exception) -> bool:
    """Whether torch raised this error because the memory of a GPU, or of the host, is full."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager:
    """Autocast to `dtype`; a null context for float32."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtype)
