"""The chunkwise gated recurrence in torch: matrix products within chunks, and a loop over chunks for the state.

This is the entry point for all kinds of gates. One gate per head, or none, is left to per_head_recurrence.py, and the
rest is about a gate for each feature.

The outputs of a chunk are the sum of an intra-chunk part, scores times values, and an inter-chunk part, decayed queries
times the state before the chunk. The score of tokens t and s is q_t k_s times every decay after s up to t. Decays are
products of the gates, never quotients of cumulative products, which underflow. So a chunk is halved recursively.
Queries in a second half are multiplied with keys in the first half, with both decays taken to the boundary between
them. Halving stops at blocks whose gates are mild (nearly always at the whole chunk). There, the decays of all pairs
are taken to the middle of the block.

The backward pass recomputes all of this, so that only the inputs are saved.

Shapes: B batch, T tokens, H query heads, G key-value heads, R = H / G, F feature size, V value size, X = V, or V + 1
with a normalizer, N chunks, C chunk length. Chunked tensors are [B, G, N, C, ...], queries [B, G, N, C, R, F].
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor

from gated_kernels.common.chunks import (
    by_token,
    by_tokens,
    chunk_length,
    cut_at_segments,
    scan,
    scan_backward,
    segments_of,
    split,
    step,
    unsplit,
)
from gated_kernels.common.derivatives import differentiable_gradients
from gated_kernels.common.per_head_recurrence import PerHead
from gated_kernels.common.tracing import reads_no_values

MILD = math.exp(-30)  # pairs that the mask removes reach exp(60), which must be finite in fp32


def gated_recurrence(
    q_BTHF: Tensor,
    k_BTGF: Tensor,
    v_BTGV: Tensor,
    log_a: Tensor | None,
    write_mask_BTG: Tensor | None,
    initial_state: Tensor | None,
    segment_ids_BT: Tensor | None,
    exclusive: bool,
    q_lse_BTH: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The outputs, the normalizer and the last state. Arguments and results are those of `chunk_gla`."""
    B, _, _, F = q_BTHF.shape
    G, V = v_BTGV.shape[2:]
    dtype = torch.promote_types(v_BTGV.dtype, torch.float32)
    with torch.autocast(v_BTGV.device.type, enabled=False):
        v_BTGX = v_BTGV
        if write_mask_BTG is not None:
            v_BTGX = torch.cat((v_BTGV.to(dtype), write_mask_BTG[..., None].to(dtype)), -1)
        if q_lse_BTH is not None:
            q_BTHF = (q_BTHF.to(dtype) - q_lse_BTH[..., None].to(dtype)).exp()
        X = v_BTGX.shape[-1]
        state = v_BTGV.new_zeros(B, G, F, X, dtype=dtype) if initial_state is None else initial_state.to(dtype)
        o_BTHX, last = _recurrence(q_BTHF, k_BTGF, v_BTGX, log_a, state, segment_ids_BT, exclusive)
    if write_mask_BTG is None:
        return o_BTHX.to(v_BTGV.dtype), None, last
    return o_BTHX[..., :V].to(v_BTGV.dtype), o_BTHX[..., V], last


def _recurrence(
    q_BTHF: Tensor,
    k_BTGF: Tensor,
    v_BTGV: Tensor,
    log_a: Tensor | None,
    state: Tensor,
    segment_ids_BT: Tensor | None,
    exclusive: bool,
) -> tuple[Tensor, Tensor]:
    B, T, G = v_BTGV.shape[:3]
    if T == 1:
        return step(q_BTHF, k_BTGF, v_BTGV, log_a, state, exclusive)
    if log_a is None or log_a.shape[-1] == 1:
        log_a = v_BTGV.new_zeros(()).expand(B, T, G, 1) if log_a is None else log_a
        return PerHead.apply(q_BTHF, k_BTGF, v_BTGV, log_a, state, segment_ids_BT, exclusive)
    if not exclusive:
        return _Chunked.apply(q_BTHF, k_BTGF, v_BTGV, log_a, state, segment_ids_BT)
    # Exclusive: the state before token t is the one after token t - 1, so q_t reads in the place of q_{t-1}.
    early_BTHF = nnf.pad(q_BTHF[:, 1:], (0, 0, 0, 0, 0, 1))
    if segment_ids_BT is not None:
        same_BT = nnf.pad(segment_ids_BT[:, 1:] == segment_ids_BT[:, :-1], (0, 1))
        early_BTHF = early_BTHF * same_BT[..., None, None]
    o_BTHV, last = _Chunked.apply(early_BTHF, k_BTGF, v_BTGV, log_a, state, segment_ids_BT)
    first = (q_BTHF[:, 0].to(state.dtype).unflatten(1, (G, -1)) @ state).flatten(1, 2)
    return torch.cat([first[:, None].to(o_BTHV.dtype), o_BTHV[:, :-1]], 1), last


class _Decay(NamedTuple):
    """Products of gates. `middle` and `levels` are for pairs of tokens within a chunk."""

    prefix: Tensor  # [.., C, F] from the start of the chunk to each token; 0 if the state before is another segment's
    suffix: Tensor  # [.., C, F] after each token to the end of the chunk; 0 if the state after is another segment's
    total: Tensor  # [.., F, 1] of the whole chunk; 0 if a segment ends between the token before it and its last one
    base: int  # length of the blocks that are not halved
    middle: Tensor  # [.., C, F] from the middle of a token's base block to the token; keys are divided by it
    levels: list[tuple[int, Tensor, Tensor]]  # length of a half, prefix of second halves, suffix of first halves


def _decay(gate: Tensor, segment: Tensor | None) -> _Decay:
    totals = [gate.exp()]
    while totals[-1].shape[3] > 1:
        pairs = totals[-1].unflatten(3, (-1, 2))
        totals.append(pairs[..., 0, :] * pairs[..., 1, :])
    base = 1 if reads_no_values() else _mild_length(totals)
    prefix, suffix, middle, levels = totals[0].clone(), torch.ones_like(gate), torch.ones_like(gate), []
    for level, total in enumerate(totals[:-1]):
        half = 1 << level
        second, first = _halves(prefix, half)[1], _halves(suffix, half)[0]
        if 2 * half == base:
            middle = torch.stack([first.reciprocal(), second], 4).flatten(3, 5)
        elif half >= base:
            levels.append((half, second.clone(), first.clone()))
        second *= total[..., 0::2, None, :]
        first *= total[..., 1::2, None, :]
    total = totals[-1].mT
    if segment is not None:
        prefix, suffix, total = cut_at_segments(prefix, suffix, total, segment)
    return _Decay(prefix, suffix, total, base, middle, levels)


def _mild_length(totals: list[Tensor]) -> int:
    """The length of the longest blocks such that no half of any block decays by less than a factor of MILD."""
    mild = torch.stack([total.amin() for total in totals[:-1]]) >= MILD
    return 1 << int(mild.sum())


class _Pass(NamedTuple):
    """The intermediate results of the forward pass that the backward pass recomputes."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: _Decay
    same: Tensor | None  # [B, 1, N, C, 1, C] whether two tokens belong to the same segment
    scores: Tensor  # [B, G, N, C, R, C]
    read: Tensor  # [B, G, N, C, R, F] queries decayed from the start of the chunk
    write: Tensor  # [B, G, N, C, F] keys decayed to the end of the chunk
    states: Tensor  # [B, G, N, F, V] before each chunk
    last: Tensor  # [B, G, F, V]


def _forward(
    q_BTHF: Tensor, k_BTGF: Tensor, v_BTGV: Tensor, log_a: Tensor, state: Tensor, segment_ids_BT: Tensor | None
) -> _Pass:
    T, G = k_BTGF.shape[1:3]
    C = chunk_length(T)
    q, k, v, gate = (split(x, C, state.dtype) for x in (q_BTHF.unflatten(2, (G, -1)), k_BTGF, v_BTGV, log_a))
    B, G, N, C, R, _ = q.shape
    segment = same = None
    if segment_ids_BT is not None:
        segment = segments_of(segment_ids_BT, N, C)
        same = (segment[..., :, None] == segment[..., None, :])[..., None, :]
    decay = _decay(gate, segment)

    left, right = _base_factors(q, k, decay)
    blocks = _outer(left, right).mul_(_causal(decay.base, q))
    if decay.base == C:
        scores = blocks.squeeze(3)
    else:
        scores = q.new_zeros(B, G, N, C, R, C)
        _blocks(scores, decay.base).copy_(blocks)
    for half, prefix, suffix in decay.levels:
        left, right = _halves(q, half)[1] * prefix[..., None, :], _halves(k, half)[0] * suffix
        _blocks(scores, 2 * half)[..., half:, :, :half] = _outer(left, right)
    if same is not None:
        scores *= same

    read, write = q * decay.prefix[..., None, :], k * decay.suffix
    states, last = scan(write.mT @ v, decay.total, state)
    return _Pass(q, k, v, decay, same, scores, read, write, states, last)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BTHF: Tensor,
        k_BTGF: Tensor,
        v_BTGV: Tensor,
        log_a: Tensor,
        state: Tensor,
        segment_ids_BT: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q_BTHF, k_BTGF, v_BTGV, log_a, state, segment_ids_BT)
        run = _forward(q_BTHF, k_BTGF, v_BTGV, log_a, state, segment_ids_BT)
        o = run.scores.flatten(3, 4) @ run.v
        o.flatten(0, 2).baddbmm_(run.read.flatten(3, 4).flatten(0, 2), run.states.flatten(0, 2))
        o = o.unflatten(3, run.q.shape[3:5])
        # no cast here: if it is a no-op, torch 2.11 loses the gradients of this op under torch.compile
        return by_tokens(o)[:, : q_BTHF.shape[1]].flatten(2, 3), run.last

    @staticmethod
    def backward(ctx: Any, do_BTHV: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        if torch.is_grad_enabled():
            return differentiable_gradients(by_token, inputs, (do_BTHV, dlast))
        with torch.autocast(do_BTHV.device.type, enabled=False):
            *grads, dstate = _backward(_forward(*inputs), do_BTHV, dlast)
        return *(unsplit(g, x) for g, x in zip(grads, inputs)), dstate, None


def _backward(run: _Pass, do_BTHV: Tensor, dlast: Tensor) -> tuple[Tensor, ...]:
    """The gradients of q, k, v and log_a, all chunked, and of the state."""
    q, k, decay = run.q, run.k, run.decay
    C, R = q.shape[3:5]
    base = decay.base

    do = split(do_BTHV.unflatten(2, (-1, R)), C, q.dtype).flatten(3, 4)
    dscores, dread = (do @ run.v.mT).unflatten(3, (C, R)), (do @ run.states.mT).unflatten(3, (C, R))
    dv, dstates = run.scores.flatten(3, 4).mT @ do, run.read.flatten(3, 4).mT @ do
    if run.same is not None:
        dscores *= run.same

    dadded, dstate = scan_backward(dstates, decay.total, dlast)
    dv += run.write @ dadded
    dwrite = run.v @ dadded.mT

    # Gradients of the sums of log gates: every factor is the exponential of one.
    dtotal = ((dadded * run.states).sum(-1, keepdim=True) * decay.total).mT
    dsuffix = dwrite * run.write
    dprefix = (dread * run.read).sum(4)
    dk, dq = dwrite * decay.suffix, dread * decay.prefix[..., None, :]

    for half, prefix, suffix in reversed(decay.levels):
        dtotal = _descend(dprefix, dsuffix, dtotal, half)
        dblock = _blocks(dscores, 2 * half)[..., half:, :, :half]
        left, right = _halves(q, half)[1] * prefix[..., None, :], _halves(k, half)[0] * suffix
        dleft, dright = _outer_backward(dblock, left, right)
        _halves(dprefix, half)[1].add_((dleft * left).sum(5))
        _halves(dsuffix, half)[0].add_(dright * right)
        _halves(dq, half)[1].addcmul_(dleft, prefix[..., None, :])
        _halves(dk, half)[0].addcmul_(dright, suffix)

    # A token reads itself without decay, so this must stay out of the gates' gradients, where it would only cancel.
    dself = dscores.diagonal(dim1=3, dim2=5).mT[..., None]
    dq.addcmul_(dself, k[..., None, :])
    dk += (dself * q).sum(4)
    left, right = _base_factors(q, k, decay)
    dleft, dright = _outer_backward(_blocks(dscores, base) * _causal(base, q, -1), left, right)
    dmiddle = ((dleft * left).sum(5) - dright * right).flatten(3, 4)
    dq.addcmul_(dleft.flatten(3, 4), decay.middle[..., None, :])
    dk.addcdiv_(dright.flatten(3, 4), decay.middle)
    half = base // 2
    while half:
        dtotal = _descend(dprefix, dsuffix, dtotal, half)
        if 2 * half == base:
            _halves(dprefix, half)[1].add_(_halves(dmiddle, half)[1])
            _halves(dsuffix, half)[0].sub_(_halves(dmiddle, half)[0])
        half //= 2
    return dq, dk, dv, dtotal + dprefix, dstate


def _descend(dprefix: Tensor, dsuffix: Tensor, dtotal: Tensor, half: int) -> Tensor:
    """The gradient of the totals of halves, from those of the totals of blocks and of the prefixes and suffixes that
    they were multiplied into."""
    first, second = _halves(dprefix, half)[1].sum(4) + dtotal, _halves(dsuffix, half)[0].sum(4) + dtotal
    return torch.stack([first, second], 4).flatten(3, 4)


def _base_factors(q: Tensor, k: Tensor, decay: _Decay) -> tuple[Tensor, Tensor]:
    left, right = q * decay.middle[..., None, :], k / decay.middle
    return left.unflatten(3, (-1, decay.base)), right.unflatten(3, (-1, decay.base))


def _outer(left: Tensor, right: Tensor) -> Tensor:
    """[.., t, R, F], [.., s, F] -> [.., t, R, s]"""
    return (left.flatten(-3, -2) @ right.mT).unflatten(-2, left.shape[-3:-1])


def _outer_backward(d: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    d = d.flatten(-3, -2)
    return (d @ right).unflatten(-2, left.shape[-3:-1]), d.mT @ left.flatten(-3, -2)


def _causal(size: int, like: Tensor, diagonal: int = 0) -> Tensor:
    """[t, 1, s] 1 where s <= t, or with diagonal -1 where s < t; 0 elsewhere."""
    return like.new_ones(size, size).tril_(diagonal)[:, None]


def _blocks(scores: Tensor, size: int) -> Tensor:
    """[.., C, R, C] -> the blocks on its diagonal, a view [.., C / size, size, R, size]."""
    M = scores.shape[3] // size
    return scores.unflatten(5, (M, size)).unflatten(3, (M, size)).diagonal(dim1=3, dim2=6).movedim(-1, 3)


def _halves(x: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """[.., C, ...] -> the first and second halves of blocks, views [.., C / 2 half, half, ...]."""
    first, second = x.unflatten(3, (-1, 2, half)).unbind(4)
    return first, second
