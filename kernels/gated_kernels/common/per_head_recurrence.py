"""The chunkwise gated recurrence in torch with one gate per key-value head.

One gate for all features can multiply what is narrow instead of the features: scores, outputs and values. So features
are only copied into chunks and multiplied as matrices. The decay of a pair of tokens is the exponential of the sum of
the log gates between them. Sums are taken pair by pair, never as differences of sums from the start of the chunk, which
are too coarse after a strong gate.

The backward pass recomputes all of this, so that only the inputs are saved.

Shapes: B batch, T tokens, H query heads, G key-value heads, R = H / G, F feature size, V value size, N chunks, C chunk
length, t a query's place in its chunk, s a key's. Chunked tensors are [B, G, N, C, ...].
"""

from __future__ import annotations

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
    unsplit,
)
from gated_kernels.common.derivatives import differentiable_gradients


class PerHead(torch.autograd.Function):
    """The outputs [B,T,H,V] in the dtype of the state, and the last state [B,G,F,V]."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BTHF: Tensor,
        k_BTGF: Tensor,
        v_BTGV: Tensor,
        log_a: Tensor,
        state: Tensor,
        segment_ids_BT: Tensor | None,
        exclusive: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q_BTHF, k_BTGF, v_BTGV, log_a, state, segment_ids_BT)
        ctx.exclusive = exclusive
        run = _forward(q_BTHF, k_BTGF, v_BTGV, log_a, state, segment_ids_BT, exclusive)
        o = _times(run.q @ run.states, run.decay.prefix)
        o.flatten(0, 2).baddbmm_(run.scores.flatten(0, 2), run.v.flatten(0, 2))
        o = o.unflatten(3, (-1, run.repeats))
        # no cast here: if it is a no-op, torch 2.11 loses the gradients of this op under torch.compile
        return by_tokens(o)[:, : q_BTHF.shape[1]].flatten(2, 3), run.last

    @staticmethod
    def backward(ctx: Any, do_BTHV: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
        given = (*ctx.saved_tensors, ctx.exclusive)
        if torch.is_grad_enabled():
            return differentiable_gradients(by_token, given, (do_BTHV, dlast))
        with torch.autocast(do_BTHV.device.type, enabled=False):
            *grads, dstate = _backward(_forward(*given), do_BTHV, dlast, ctx.exclusive)
        return *(unsplit(g, x) for g, x in zip(grads, given)), dstate, None, None


class _Decay(NamedTuple):
    """Products of gates; 0 where a segment ends in between. With `exclusive`, those of a query end before its own."""

    pairs: Tensor  # [.., t, s] from after token s to token t; 0 for later s
    prefix: Tensor  # [.., C, 1] from the start of the chunk to each token
    suffix: Tensor  # [.., C, 1] after each token to the end of the chunk
    total: Tensor  # [.., 1, 1] of the whole chunk


class _Pass(NamedTuple):
    """The intermediate results of the forward pass that the backward pass recomputes."""

    q: Tensor  # [B, G, N, C R, F]
    k: Tensor
    v: Tensor
    decay: _Decay
    scores: Tensor  # [B, G, N, C R, C]
    states: Tensor  # [B, G, N, F, V] before each chunk
    last: Tensor  # [B, G, F, V]
    repeats: int  # R


def _decay(gate: Tensor, segment: Tensor | None, exclusive: bool) -> _Decay:
    C = gate.shape[3]
    causal = torch.ones(C, C, dtype=torch.bool, device=gate.device).tril_()
    sums = torch.where(causal.tril(-1), gate, 0).cumsum(3)
    pairs, prefix = sums.exp_().mul_(causal), gate.cumsum(3).exp()
    suffix, total = pairs[..., -1:, :].mT, prefix[..., -1:, :]
    if exclusive:
        pairs, prefix = nnf.pad(pairs[..., :-1, :], (0, 0, 1, 0)), nnf.pad(prefix[..., :-1, :], (0, 0, 1, 0), value=1.0)
    if segment is not None:
        pairs = pairs * (segment[..., :, None] == segment[..., None, :])
        prefix, suffix, total = cut_at_segments(prefix, suffix, total, segment)
    return _Decay(pairs, prefix, suffix, total)


def _forward(
    q_BTHF: Tensor,
    k_BTGF: Tensor,
    v_BTGV: Tensor,
    log_a: Tensor,
    state: Tensor,
    segment_ids_BT: Tensor | None,
    exclusive: bool,
) -> _Pass:
    T, G = k_BTGF.shape[1:3]
    C, R = chunk_length(T), q_BTHF.shape[2] // G
    q, k, v, gate = (split(x, C, state.dtype) for x in (q_BTHF.unflatten(2, (G, -1)), k_BTGF, v_BTGV, log_a))
    q = q.flatten(3, 4)
    decay = _decay(gate, None if segment_ids_BT is None else segments_of(segment_ids_BT, q.shape[2], C), exclusive)
    scores = _times(q @ k.mT, decay.pairs)
    states, last = scan(k.mT @ (v * decay.suffix), decay.total, state)
    return _Pass(q, k, v, decay, scores, states, last, R)


def _backward(run: _Pass, do_BTHV: Tensor, dlast: Tensor, exclusive: bool) -> tuple[Tensor, ...]:
    """The gradients of q, k, v and log_a, all chunked, and of the state."""
    q, k, v, decay, scores, states, _, R = run
    do = split(do_BTHV.unflatten(2, (-1, R)), k.shape[3], q.dtype).flatten(3, 4)
    do_far = _times(do.clone(), decay.prefix)
    dscores, dstates = do @ v.mT, q.mT @ do_far

    dadded, dstate = scan_backward(dstates, decay.total, dlast)

    # Gradients of the sums of log gates: every factor is the exponential of one.
    dpairs = (dscores * scores).unflatten(3, (-1, R)).sum(4)
    dprefix = (do_far * (q @ states)).unflatten(3, (-1, R)).sum((4, 5))
    dwritten = (k @ dadded).mul_(decay.suffix)
    dsuffix = (dwritten * v).sum(-1)
    dtotal = ((dadded * states).sum((-2, -1)) * decay.total[..., 0, 0])[..., None]
    dgate = _gradient_of_gates(dpairs, dprefix, dsuffix, exclusive) + dtotal

    dproducts = _times(dscores, decay.pairs)
    dq, dk, dv = dproducts @ k, dproducts.mT @ q, scores.mT @ do
    dq.flatten(0, 2).baddbmm_(do_far.flatten(0, 2), states.flatten(0, 2).mT)
    dk.flatten(0, 2).baddbmm_((v * decay.suffix).flatten(0, 2), dadded.flatten(0, 2).mT)
    return dq.unflatten(3, (-1, R)), dk, dv.add_(dwritten), dgate[..., None], dstate


def _gradient_of_gates(dpairs: Tensor, dprefix: Tensor, dsuffix: Tensor, exclusive: bool) -> Tensor:
    """[.., C]: a gate is in the pairs, prefixes and suffixes whose tokens it is between.

    A token reads itself without decay. Such pairs are left out, because they would only cancel.
    """
    if exclusive:  # a query's products end one token earlier
        dpairs, dprefix = nnf.pad(dpairs[..., 1:, :], (0, 0, 0, 1)), nnf.pad(dprefix[..., 1:], (0, 1))
    later = torch.ones_like(dpairs[0, 0, 0]).tril_(-1)
    between = (dpairs.cumsum(-1) * later).sum(-2) + dsuffix.cumsum(-1)  # for the gate after token s
    return nnf.pad(between[..., :-1], (1, 0)) + dprefix.flip(-1).cumsum(-1).flip(-1)


def _times(x: Tensor, by_query: Tensor) -> Tensor:
    """x [.., C R, X] times [.., C, X] or [.., C, 1], in place."""
    x.unflatten(-2, (by_query.shape[-2], -1)).mul_(by_query[..., None, :])
    return x
