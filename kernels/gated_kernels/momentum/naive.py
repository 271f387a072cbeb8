"""The definition of the delta rule with momentum, with a loop over tokens and a separate state for every query head.

Shapes: B batch, T tokens, H query heads, G key-value heads, F feature size, V value size.
"""

from __future__ import annotations

import torch
from torch import Tensor


def naive_momentum(
    q_BTHF: Tensor,
    k_BTGF: Tensor,
    v_BTGV: Tensor,
    r_BTGF: Tensor,
    log_a: Tensor,
    log_m: Tensor,
    c_BTG1: Tensor,
    *,
    initial_state: Tensor | None = None,
    segment_ids_BT: Tensor | None = None,
    exclusive: bool = False,
) -> tuple[Tensor, Tensor]:
    """See `gated_kernels.chunk_momentum`. Computed in the dtype of the values, but in at least fp32."""
    B, T, H, F = q_BTHF.shape
    G, V = v_BTGV.shape[2:]
    dtype = torch.promote_types(v_BTGV.dtype, torch.float32)
    inputs = q_BTHF, k_BTGF, v_BTGV, r_BTGF, log_a, log_m, c_BTG1
    q, k, v, r, log_a, log_m, c = (x.to(dtype).repeat_interleave(H // x.shape[2], 2) for x in inputs)
    initial_state = v.new_zeros(B, G, 2 * F, V) if initial_state is None else initial_state.to(dtype)
    memory, step = initial_state.repeat_interleave(H // G, 1).chunk(2, 2)
    outputs = []
    for t in range(T):
        if segment_ids_BT is not None and t > 0:
            same = (segment_ids_BT[:, t] == segment_ids_BT[:, t - 1])[:, None, None, None]
            memory, step = memory * same, step * same
        before = memory
        missed = v[:, t] - torch.einsum("bhf,bhfv->bhv", r[:, t], memory)
        step = step * log_m[:, t, :, :, None].exp() + torch.einsum("bhf,bhv->bhfv", k[:, t], missed)
        memory = memory * log_a[:, t, :, :, None].exp() + step * c[:, t, :, :, None]
        outputs.append(torch.einsum("bhf,bhfv->bhv", q[:, t], before if exclusive else memory))
    return torch.stack(outputs, 1).to(v_BTGV.dtype), torch.cat([memory, step], 2)[:, :: H // G]
