"""The definition of attention over slots, with a loop over tokens and a separate state for every query head.

Shapes: B batch, T tokens, H query heads, G key-value heads, D key size, V value size, M slots.
"""

from __future__ import annotations

import torch
from torch import Tensor


def naive_slots(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGV: Tensor,
    w_BTGM: Tensor,
    log_a: Tensor | None,
    *,
    scale: float,
    keys_BGMD: Tensor | None = None,
    values_BGMV: Tensor | None = None,
    segment_ids_BT: Tensor | None = None,
    exclusive: bool = False,
    normalize: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `gated_kernels.chunk_slots`. Computed in the dtype of the values, but in at least fp32."""
    B, T, H, D = q_BTHD.shape
    (G, V), M = v_BTGV.shape[2:], w_BTGM.shape[3]
    dtype = torch.promote_types(v_BTGV.dtype, torch.float32)
    log_a = w_BTGM.new_zeros(B, T, G, 1) if log_a is None else log_a
    keys = w_BTGM.new_zeros(B, G, M, D + normalize) if keys_BGMD is None else keys_BGMD
    values = w_BTGM.new_zeros(B, G, M, V) if values_BGMV is None else values_BGMV
    q, k, v, w, log_a = (
        x.to(dtype).repeat_interleave(H // x.shape[2], 2) for x in (q_BTHD, k_BTGD, v_BTGV, w_BTGM, log_a)
    )
    if normalize:
        k = torch.cat([k, torch.ones_like(k[..., :1])], -1)
    keys, values = (x.to(dtype).repeat_interleave(H // G, 1) for x in (keys, values))
    outputs, normalizers = [], []
    for t in range(T):
        if segment_ids_BT is not None and t > 0:
            same = (segment_ids_BT[:, t] == segment_ids_BT[:, t - 1])[:, None, None, None]
            keys, values = keys * same, values * same
        read_keys, read_values = keys, values
        decay = log_a[:, t, :, :, None].exp()
        keys = keys * decay + w[:, t, :, :, None] * k[:, t, :, None]
        values = values * decay + w[:, t, :, :, None] * v[:, t, :, None]
        if not exclusive:
            read_keys, read_values = keys, values
        normalizer = read_keys[..., -1] if normalize else torch.ones_like(read_keys[..., 0])
        empty = normalizer <= 0
        normalizer = normalizer.masked_fill(empty, 1)
        logits = torch.einsum("bhd,bhmd->bhm", q[:, t], read_keys[..., :D]) / normalizer * scale
        nothing = empty.all(-1)
        logits = logits.masked_fill(empty, -torch.inf).masked_fill(nothing[..., None], 0)
        weights = logits.softmax(-1).masked_fill(empty, 0)
        outputs.append(torch.einsum("bhm,bhmv->bhv", weights / normalizer, read_values))
        normalizers.append(logits.logsumexp(-1).masked_fill(nothing, -torch.inf))
    o_BTHV, lse_BTH = torch.stack(outputs, 1).to(v_BTGV.dtype), torch.stack(normalizers, 1)
    return o_BTHV, lse_BTH, keys[:, :: H // G], values[:, :: H // G]
