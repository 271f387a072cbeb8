"""Where a model runs and in which precision its matrix products are computed."""

from __future__ import annotations

import contextlib
import gc

import torch

from liger_convert.utils.errors import BadInput


def pick_device(name: str = "auto") -> torch.device:
    """The device called `name`; `auto` takes the first GPU and else the CPU. Raises BadInput when it is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BadInput(f"device: {name!r} is not a device; use auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BadInput(
            f"device: {name!r} asks for a GPU that does not exist ({torch.cuda.device_count()} found); use cpu"
        )
    return device


def has_fast_bf16(device: torch.device) -> bool:
    """Whether bf16 products are faster than fp32 ones: GPUs and CPUs with instructions for them. Older GPUs emulate
    them."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def compute_dtype(device: torch.device, precision: str = "auto") -> torch.dtype:
    """The dtype of matrix products: `float32`, `bfloat16`, or with `auto` bf16 exactly where it is fast."""
    if precision == "auto":
        return torch.bfloat16 if has_fast_bf16(device) else torch.float32
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if precision not in dtypes:
        raise BadInput(f"precision: {precision!r} is unknown; use auto, float32 or bfloat16")
    return dtypes[precision]


def gpu_memory() -> int | None:
    """The bytes of the first GPU, None where there is none."""
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def free_memory(device: torch.device) -> int | None:
    """The bytes of a GPU that nobody holds, None of a CPU."""
    if device.type != "cuda":
        return None
    gc.collect()  # a model that was trained, or is spread over devices, refers to itself
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def out_of_memory(error: Exception) -> bool:
    """Whether this is how torch says that a GPU's memory, or a CPU's, is full."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager:
    """Autocast to `dtype`; nothing at all for fp32, so that a float32 run is exactly that."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtype)
