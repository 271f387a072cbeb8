"""The definition of sliding-window attention with sinks, with one mask of all queries by all keys.

Shapes: B batch, T queries, S = P + T keys, H query heads, G key-value heads, D head size, V value size, M sinks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as nnf
from torch import Tensor


def naive_swa(
    q_BTHD: Tensor,
    k_BSGD: Tensor,
    v_BSGV: Tensor,
    *,
    window_size: int,
    scale: float,
    valid_BS: Tensor | None = None,
    segment_ids_BS: Tensor | None = None,
    sink_k_BMGD: Tensor | None = None,
    sink_v_BMGV: Tensor | None = None,
    sink_visible_BTM: Tensor | None = None,
    memory_BTHV: Tensor | None = None,
    normalizer_BTH: Tensor | None = None,
    memory_logit_BTH: Tensor | None = None,
    mix_weight_H: Tensor | None = None,
    softcap: float | None = None,
    bias_channels: int = 0,
) -> tuple[Tensor, Tensor]:
    """See `gated_kernels.chunk_swa`. Products are in the dtype of the inputs, the softmax is in at least fp32."""
    B, T, H, _ = q_BTHD.shape
    S, G = k_BSGD.shape[1:3]
    query, key = torch.arange(S - T, S, device=q_BTHD.device)[:, None], torch.arange(S, device=q_BTHD.device)
    seen = ((query - key >= 0) & (query - key < window_size)).expand(B, T, S)
    if valid_BS is not None:
        seen = seen & valid_BS[:, None]
    if segment_ids_BS is not None:
        seen = seen & (segment_ids_BS[:, S - T :, None] == segment_ids_BS[:, None])
    k, v = k_BSGD, v_BSGV
    if sink_k_BMGD is not None and sink_v_BMGV is not None and sink_visible_BTM is not None:
        k, v = torch.cat([k, sink_k_BMGD], 1), torch.cat([v, sink_v_BMGV], 1)
        seen = torch.cat([seen, sink_visible_BTM], 2)
    k, v, hidden = k.repeat_interleave(H // G, 2), v.repeat_interleave(H // G, 2), ~seen[:, :, None]
    float32 = torch.promote_types(q_BTHD.dtype, torch.float32)
    D = q_BTHD.shape[3] - (bias_channels if softcap is not None else 0)
    logits = torch.einsum("bthd,bshd->bths", q_BTHD[..., :D], k[..., :D]).to(float32) * scale
    if softcap is not None:
        bias = torch.einsum("bthd,bshd->bths", q_BTHD[..., D:], k[..., D:]).to(float32) * scale
        logits = softcap * (logits / softcap).tanh() + bias
    if memory_logit_BTH is not None:
        logits = torch.cat([logits, memory_logit_BTH[..., None].to(logits.dtype)], 3)
        hidden = nnf.pad(hidden.expand(B, T, 1, -1), (0, 1), value=False)
    empty = hidden.all(-1)
    logits = logits.masked_fill(hidden, -torch.inf).masked_fill(empty[..., None], 0)
    weights = logits.softmax(-1).masked_fill(hidden, 0)
    o_BTHV = torch.einsum("bths,bshv->bthv", weights[..., : v.shape[1]].to(v.dtype), v)
    lse_BTH = logits.logsumexp(-1)
    if mix_weight_H is not None:
        lse_BTH = lse_BTH - torch.log1p(-mix_weight_H.to(lse_BTH.dtype))
    lse_BTH = lse_BTH.masked_fill(empty, -torch.inf)
    if memory_BTHV is None:
        return o_BTHV, lse_BTH
    if normalizer_BTH is not None:
        memory_BTHV = (memory_BTHV / normalizer_BTH[..., None]).to(v.dtype)
    if mix_weight_H is None:
        return o_BTHV + weights[..., -1:].to(v.dtype) * memory_BTHV, lse_BTH
    mix_weight_H1 = mix_weight_H[:, None].to(v.dtype)
    return (1 - mix_weight_H1) * o_BTHV + mix_weight_H1 * memory_BTHV, lse_BTH
