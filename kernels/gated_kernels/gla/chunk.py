"""Gated linear attention: S_t = diag(a_t) S_{t-1} + k_t^T v_t, o_t = q_t S_t.

`chunk_gla` is the entry point for all kinds of gates. With one gate per head (last size 1), or none, it calls
`chunk_simple_gla`, which has its own kernels. In torch both run `common/gated_recurrence.py`.

Shapes: B batch, T tokens, H query heads, G key-value heads, R = H / G, F feature size, V value size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gated_kernels.common.gated_recurrence import gated_recurrence
from gated_kernels.common.registry import kernel_for
from gated_kernels.simple_gla.chunk import chunk_simple_gla


def chunk_gla(
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
    """The recurrence S_t = diag(a_t) S_{t-1} + k_t^T v_t, o_t = q_t S_t (2312.06635).

    Query head h uses key-value head h // R. Computes in fp32 (fp64 for fp64 values), even under autocast.

    log_a: the logs of the gates, at most 0: [B, T, G, F], [B, T, G, 1] for one gate per head, or None for no decay.
    write_mask_BTG: booleans. If given, the state has one more column, z_t = diag(a_t) z_{t-1} + mask_t k_t. Its read
        q_t z_t is the normalizer: the sum of the weights in o_t of the values where the mask is True. The mask does not
        affect S.
    initial_state: [B, G, F, V], with one more column if `write_mask_BTG` is given; None: zeros.
    segment_ids_BT: integers. The recurrence restarts where they change. The given state belongs to the first segment.
    exclusive: o_t = q_t S_{t-1}, so that a token does not read itself.
    q_lse_BTH: the state is read with exp(q - lse). That is softmax(q) if lse is q's log-sum-exp over the features.

    Returns o_BTHV in v's dtype, the normalizer [B, T, H] in the dtype of the computation (None without
    `write_mask_BTG`), and the last state. Raises ValueError when H is not a multiple of G.
    """
    options: dict[str, Any] = {
        "write_mask_BTG": write_mask_BTG,
        "initial_state": initial_state,
        "segment_ids_BT": segment_ids_BT,
        "exclusive": exclusive,
        "q_lse_BTH": q_lse_BTH,
    }
    if log_a is None or log_a.shape[-1] == 1:
        return chunk_simple_gla(q_BTHF, k_BTGF, v_BTGV, log_a, **options)
    if q_BTHF.shape[2] % v_BTGV.shape[2]:
        raise ValueError(f"{q_BTHF.shape[2]} query heads are not a multiple of {v_BTGV.shape[2]} key-value heads")
    kernel = kernel_for("gla")
    if kernel is not None and q_BTHF.shape[1] > 1:
        found = kernel(q_BTHF, k_BTGF, v_BTGV, log_a, **options)
        if found is not None:
            return found
    return gated_recurrence(q_BTHF, k_BTGF, v_BTGV, log_a, **options)
