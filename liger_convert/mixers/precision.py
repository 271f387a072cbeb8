"""The precision of a recurrence's matmuls."""

from __future__ import annotations

import torch
from torch import Tensor


def multiplies_in_bf16(v_BSGD: Tensor) -> bool:
    """Whether a recurrence multiplies in bf16: on a GPU, if the layer's values are bf16.

    Tensor cores multiply bf16 several times faster than float32 and accumulate in float32; bf16 has the same range.
    """
    return v_BSGD.is_cuda and v_BSGD.dtype == torch.bfloat16


def factors(q_BTHD: Tensor, k_BTGD: Tensor, v_BTGV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values in the dtype that a recurrence multiplies them in: bf16 or float32."""
    if multiplies_in_bf16(v_BTGV):
        return q_BTHD.to(v_BTGV.dtype), k_BTGD.to(v_BTGV.dtype), v_BTGV
    return q_BTHD.float(), k_BTGD.float(), v_BTGV.float()
