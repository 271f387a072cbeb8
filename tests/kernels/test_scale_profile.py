"""Where the time of a step goes, from the intervals of its kernels."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

KERNELS = Path(__file__).parents[2] / "kernels"
GATHER, GEMM = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "nvjet_hsh_128x256_64x4_TNT"
COPY = "void at::native::split_with_sizes_copy_out_contiguous_no_cast_kernel(char**)"


@pytest.fixture
def module(monkeypatch) -> Any:
    monkeypatch.syspath_prepend(str(KERNELS))
    return import_module("scale_profile")


def test_time_counts_once_where_kernels_overlap_and_not_where_none_runs(module) -> None:
    """Two steps of 100 ms: one kernel in another, two that overlap, two that touch, and gaps between and around."""
    kernels = [
        (GEMM, 10e3, 60e3),
        (GATHER, 20e3, 30e3),  # within the product
        (GEMM, 22e3, 24e3),  # within both
        (GATHER, 50e3, 75e3),  # 15 ms after the product
        (COPY, 75e3, 80e3),
        (GATHER, 110e3, 130e3),  # alone, with a second one
        (GATHER, 115e3, 140e3),
        (GEMM, 138e3, 150e3),  # begins before the second one ends
    ]
    found = module.by_group(kernels[::-1], wall=200e3, steps=2)
    groups = {"NCCL all-gather": 40, "products": 32, "copies and casts": 2.5}
    assert found == pytest.approx(
        dict.fromkeys(module.GROUPS, 0)
        | groups
        | {module.EXPOSED: (15 + 28) / 2, module.IDLE: (10 + 30 + 50) / 2, module.STEP: 100}
    )


def test_kernels_are_known_by_their_names(module) -> None:
    names = {
        GATHER: "NCCL all-gather",
        "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL": "NCCL reduce-scatter, all-reduce",
        "ncclDevKernel_Broadcast_RING_LL": "NCCL, other",
        GEMM: "products",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "products",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80": "attention",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16": "attention",
        "triton_poi_fused__to_copy_mul_silu_3": "compiled layers",
        COPY: "copies and casts",
        "Memcpy DtoD (Device -> Device)": "copies and casts",
        "void at::native::(anonymous namespace)::chunk_cat_cuda_kernel<float, c10::BFloat16>": "copies and casts",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float> >": "everything else",
    }
    names |= dict.fromkeys(("forward_kernel", "carry_kernel", "forward_kernel_2"), "our Triton kernels")
    assert {name: module.group_of(name) for name in names} == names
