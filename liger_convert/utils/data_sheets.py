"""The speed of GPUs according to their data sheets."""

from __future__ import annotations

from typing import NamedTuple


class GPUSpeed(NamedTuple):
    """bandwidth: of the memory, in bytes a second. peak: of dense bf16 and fp16 products with fp32 accumulation, in
    floating-point operations a second."""

    bandwidth: float
    peak: float


# By torch's name for the GPU. From NVIDIA's data sheets (A100 40GB and 80GB, L40S, H100, H200; figures with sparsity
# are halved), the Ada white paper (RTX 4090) and the page of HGX B200 (an eighth of its figures). Other variants of
# these chips have other figures.
GPU_SPEEDS = {
    "NVIDIA A100-SXM4-40GB": GPUSpeed(1555e9, 312e12),
    "NVIDIA A100-SXM4-80GB": GPUSpeed(2039e9, 312e12),
    "NVIDIA A100-PCIE-40GB": GPUSpeed(1555e9, 312e12),
    "NVIDIA A100 80GB PCIe": GPUSpeed(1935e9, 312e12),
    "NVIDIA L40S": GPUSpeed(864e9, 362e12),
    "NVIDIA GeForce RTX 4090": GPUSpeed(1008e9, 165e12),
    "NVIDIA H100 80GB HBM3": GPUSpeed(3350e9, 989e12),
    "NVIDIA H200": GPUSpeed(4800e9, 989e12),
    "NVIDIA B200": GPUSpeed(8000e9, 2250e12),
}
