"""What both chunkwise recurrences in torch share: cutting a row into chunks, one token's step, and the slow loop.

Shapes: B batch, T tokens, H query heads, G key-value heads, F feature size, V value size, N chunks, C chunk length.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 32


def split(x: Tensor, C: int, dtype: torch.dtype) -> Tensor:
    """[B, T, G, ...] -> [B, G, N, C, ...] in one copy, padded with zeros."""
    B, T, G = x.shape[:3]
    chunks = x.new_empty(B, G, -(-T // C), C, *x.shape[3:], dtype=dtype)
    tokens = by_tokens(chunks)
    tokens[:, :T] = x
    tokens[:, T:] = 0
    return chunks


def by_tokens(x: Tensor) -> Tensor:
    """[B, G, N, C, ...] -> a view [B, N C, G, ...]."""
    return x.movedim(1, 3).flatten(1, 2)


def chunk_length(tokens: int) -> int:
    return min(CHUNK, 1 << (tokens - 1).bit_length())


def segments_of(segment_ids_BT: Tensor, chunks: int, C: int) -> Tensor:
    """[B, 1, N, C]: the segments by chunk; padding continues the last one."""
    B, T = segment_ids_BT.shape
    padding = segment_ids_BT[:, -1:].expand(-1, chunks * C - T)
    return torch.cat([segment_ids_BT, padding], 1).view(B, 1, chunks, C)


def step(
    q_BTHF: Tensor, k_BTGF: Tensor, v_BTGV: Tensor, log_a: Tensor | None, state: Tensor, exclusive: bool
) -> tuple[Tensor, Tensor]:
    """The output of a row of one token, in the dtype of its values, and the state after it."""
    q, k, v = (x[:, 0].to(state.dtype) for x in (q_BTHF, k_BTGF, v_BTGV))
    k, v_row = k[..., None], v[..., None, :]
    if log_a is None:
        last = torch.addcmul(state, k, v_row)
    else:  # in place: allocating another state would cost as much as the addition
        last = (state * log_a[:, 0, :, :, None].to(state.dtype).exp()).addcmul_(k, v_row)
    o = q.unflatten(1, (v.shape[1], -1)) @ (state if exclusive else last)
    return o.flatten(1, 2)[:, None].to(v_BTGV.dtype), last


def by_token(
    q_BTHF: Tensor,
    k_BTGF: Tensor,
    v_BTGV: Tensor,
    log_a: Tensor,
    state: Tensor,
    segment_ids_BT: Tensor | None,
    exclusive: bool = False,
) -> tuple[Tensor, Tensor]:
    """The recurrence token by token: slow, but differentiable any number of times."""
    outputs = []
    for t in range(k_BTGF.shape[1]):
        if segment_ids_BT is not None and t:
            state = state * (segment_ids_BT[:, t] == segment_ids_BT[:, t - 1])[:, None, None, None]
        q, k, v, gate = (x[:, t : t + 1] for x in (q_BTHF, k_BTGF, v_BTGV, log_a))
        o_B1HV, state = step(q, k, v, gate, state, exclusive)
        outputs.append(o_B1HV)
    return torch.cat(outputs, 1), state
