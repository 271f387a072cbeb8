"""What both chunkwise recurrences in torch share: cutting a row into chunks, the loop over them for the state, one
token's step, and the slow loop over tokens.

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


def unsplit(chunks: Tensor, like: Tensor) -> Tensor:
    """The inverse of `split`, in the shape and dtype of `like`."""
    return by_tokens(chunks)[:, : like.shape[1]].reshape(like.shape).to(like.dtype)


def chunk_length(tokens: int) -> int:
    return min(CHUNK, 1 << (tokens - 1).bit_length())


def segments_of(segment_ids_BT: Tensor, chunks: int, C: int) -> Tensor:
    """[B, 1, N, C]: the segments by chunk; padding continues the last one."""
    B, T = segment_ids_BT.shape
    padding = segment_ids_BT[:, -1:].expand(-1, chunks * C - T)
    return torch.cat([segment_ids_BT, padding], 1).view(B, 1, chunks, C)


def cut_at_segments(prefix: Tensor, suffix: Tensor, total: Tensor, segment: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The decays from the start of a chunk to each token [.., C, _], after it to the end [.., C, _], and of the whole
    chunk [.., _, 1]; 0 where a segment ends in between. segment: see `segments_of`."""
    last = segment[..., -1:]
    before = torch.cat([segment[:, :, :1, :1], last[:, :, :-1]], 2)
    prefix, suffix = prefix * (segment == before)[..., None], suffix * (segment == last)[..., None]
    return prefix, suffix, total * (last == before)[..., None]


def scan(added: Tensor, total: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The states before each chunk [B, G, N, F, V], and the last one [B, G, F, V].

    added: what each chunk adds, [B, G, N, F, V]. total: its decay, [B, G, N, F or 1, 1]. state: the first one.
    """
    states = torch.empty_like(added)
    slots, parts, totals = states.unbind(2), added.unbind(2), total.unbind(2)
    slots[0].copy_(state)
    for n in range(len(slots) - 1):
        torch.addcmul(parts[n], slots[n], totals[n], out=slots[n + 1])
    return states, torch.addcmul(parts[-1], slots[-1], totals[-1])


def scan_backward(dstates: Tensor, total: Tensor, dlast: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of `added` and `state` of `scan`, given those of its results."""
    dadded = torch.empty_like(dstates)
    slots, parts, totals = dadded.unbind(2), dstates.unbind(2), total.unbind(2)
    slots[-1].copy_(dlast)
    for n in reversed(range(1, len(slots))):
        torch.addcmul(parts[n], slots[n], totals[n], out=slots[n - 1])
    return dadded, torch.addcmul(parts[0], slots[0], totals[0])


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
