"""What kernels ask about the chip that they are launched on."""

from __future__ import annotations

import functools

import torch


@functools.cache
def multiplies_in_registers(device: torch.device) -> bool:
    """Whether a product takes its operands and sums from the registers of single warps: sm_80 to sm_89, and sm_120.

    On sm_90 and sm_100 four warps multiply together, and operands may stay in shared memory. What fits into registers
    there may not on the other chips, which then take more warps or fewer rows.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] not in (9, 10)


@functools.cache
def has_tensor_memory(device: torch.device) -> bool:
    """Whether the sums of a product stand in a memory of their own: on sm_100."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 10
