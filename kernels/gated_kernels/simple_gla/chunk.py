"""Gated linear attention with one gate per key-value head, or none: S_t = a_t S_{t-1} + k_t^T v_t, o_t = q_t S_t.

`gated_kernels.chunk_gla` calls this op for such gates.

Shapes: B batch, T tokens, H query heads, G key-value heads, R = H / G, F feature size, V value size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gated_kernels.common.gated_recurrence import gated_recurrence
from gated_kernels.common.registry import kernel_for


def chunk_simple_gla(
    q_BTHF: Tensor,
    k_BTGF: Tensor,
    v_BTGV: Tensor,
    log_a: Tensor | None,
    *,
    write_mask_BTG: Tensor | None = None,
    initial_state: Tensor | None = None,
    segment_ids_BT: Tensor | None = None,
    exclusive: bool = False,
    q_lse_BTH: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The recurrence S_t = a_t S_{t-1} + k_t^T v_t, o_t = q_t S_t.

    log_a is [B, T, G, 1], or None for no decay. Other arguments and the results are as in `gated_kernels.chunk_gla`.
    Raises ValueError when the last size of log_a is not 1, and when H is not a multiple of G.
    """
    if q_BTHF.shape[2] % v_BTGV.shape[2]:
        raise ValueError(f"{q_BTHF.shape[2]} query heads are not a multiple of {v_BTGV.shape[2]} key-value heads")
    if log_a is not None and log_a.shape[-1] != 1:
        raise ValueError(f"simple_gla takes one gate per head, not {log_a.shape[-1]}: use chunk_gla")
    options: dict[str, Any] = {
        "write_mask_BTG": write_mask_BTG,
        "initial_state": initial_state,
        "segment_ids_BT": segment_ids_BT,
        "exclusive": exclusive,
        "q_lse_BTH": q_lse_BTH,
    }
    kernel = kernel_for("simple_gla")
    if kernel is not None and q_BTHF.shape[1] > 1:
        found = kernel(q_BTHF, k_BTGF, v_BTGV, log_a, **options)
        if found is not None:
            return found
    return gated_recurrence(q_BTHF, k_BTGF, v_BTGV, log_a, **options)
