"""Properties of the GPU that affect how kernels are launched."""

from __future__ import annotations

import functools

import torch


@functools.cache
def multiplies_in_registers(device: torch.device) -> bool:
    """Whether matrix products keep operands and accumulators in the registers of single warps: sm_80 to sm_89, sm_120.

    On sm_90 and sm_100, four warps multiply together and operands may stay in shared memory. Tiles that fit into
    registers there may not fit on the other chips, which then take more warps or fewer rows.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] not in (9, 10)


@functools.cache
def has_tensor_memory(device: torch.device) -> bool:
    """Whether accumulators of matrix products live in tensor memory: on sm_100."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 10


@functools.cache
def overlaps_launches(device: torch.device) -> bool:
    """Whether the GPU has programmatic dependent launch: a kernel may begin while the one before it still runs."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def eight_bit_dtypes(device: torch.device) -> frozenset[torch.dtype]:
    """The 8-bit dtypes that kernels can convert: float8_e4m3fn from sm_89 on."""
    has_fp8 = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)
    return frozenset({torch.int8, torch.float8_e4m3fn} if has_fp8 else {torch.int8})
