"""The definition of the elementwise recurrence, with a loop over tokens and a separate state for every query head.

Shapes: B batch, T tokens, H query heads, G key-value heads, F feature size, V value size.
"""

from __future__ import annotations

import torch
from torch import Tensor


def naive_elementwise(
    q_BTHF: Tensor,
    k_BTGF: Tensor,
    v_BTGV: Tensor,
    dt_BTGV: Tensor,
    log_A_GFV: Tensor,
    *,
    initial_state: Tensor | None = None,
    segment_ids_BT: Tensor | None = None,
    exclusive: bool = False,
) -> tuple[Tensor, Tensor]:
    """See `gated_kernels.chunk_elementwise`. Computed in the dtype of the values, but in at least fp32."""
    H, F = q_BTHF.shape[2:]
    B, T, G, V = v_BTGV.shape
    dtype = torch.promote_types(v_BTGV.dtype, torch.float32)
    q, k, v, dt = (x.to(dtype).repeat_interleave(H // x.shape[2], 2) for x in (q_BTHF, k_BTGF, v_BTGV, dt_BTGV))
    log_A = log_A_GFV.to(dtype).repeat_interleave(H // G, 0)
    initial_state = v.new_zeros(B, G, F, V) if initial_state is None else initial_state.to(dtype)
    state = initial_state.repeat_interleave(H // G, 1)
    outputs = []
    q = q.expand(B, T, H, F)
    for t in range(T):
        if segment_ids_BT is not None and t > 0:
            state = state * (segment_ids_BT[:, t] == segment_ids_BT[:, t - 1])[:, None, None, None]
        before = state
        state = state * (dt[:, t, :, None] * log_A).exp() + torch.einsum("bhf,bhv->bhfv", k[:, t], v[:, t])
        outputs.append(torch.einsum("bhf,bhfv->bhv", q[:, t], before if exclusive else state))
    return torch.stack(outputs, 1).to(v_BTGV.dtype), state[:, :: H // G]
