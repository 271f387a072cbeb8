"""The definition of gated linear attention, with a loop over tokens and a separate state for every query head.

Shapes: B batch, T tokens, H query heads, G key-value heads, F feature size, V value size, X = V, or V + 1 with a
normalizer.
"""

from __future__ import annotations

import torch
from torch import Tensor


def naive_gla(
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
    """See `gated_kernels.chunk_gla`. Computed in the dtype of the values, but in at least fp32."""
    B, T, H, F = q_BTHF.shape
    G = v_BTGV.shape[2]
    dtype = torch.promote_types(v_BTGV.dtype, torch.float32)
    log_a = k_BTGF.new_zeros(B, T, G, 1) if log_a is None else log_a
    v_BTGX = v_BTGV.to(dtype)
    if write_mask_BTG is not None:
        v_BTGX = torch.cat((v_BTGX, write_mask_BTG[..., None]), -1)
    q, k, v, log_a = (x.to(dtype).repeat_interleave(H // x.shape[2], 2) for x in (q_BTHF, k_BTGF, v_BTGX, log_a))
    q = q if q_lse_BTH is None else (q - q_lse_BTH.to(dtype)[..., None]).exp()
    initial_state = v.new_zeros(B, G, F, v.shape[-1]) if initial_state is None else initial_state.to(dtype)
    state = initial_state.repeat_interleave(H // G, 1)
    outputs = []
    for t in range(T):
        if segment_ids_BT is not None and t > 0:
            state = state * (segment_ids_BT[:, t] == segment_ids_BT[:, t - 1])[:, None, None, None]
        before = state
        state = state * log_a[:, t, :, :, None].exp() + torch.einsum("bhf,bhv->bhfv", k[:, t], v[:, t])
        outputs.append(torch.einsum("bhf,bhfv->bhv", q[:, t], before if exclusive else state))
    o, normalizer = torch.stack(outputs, 1).split((v_BTGV.shape[-1], v.shape[-1] - v_BTGV.shape[-1]), -1)
    return o.to(v_BTGV.dtype), None if write_mask_BTG is None else normalizer[..., 0], state[:, :: H // G]
