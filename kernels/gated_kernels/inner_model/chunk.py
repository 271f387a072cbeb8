"""A memory that is a small model, computed a chunk at a time.

After token t, the model's weights are W_t = p_t W_0 + D_t. W_0 is learned, p_t is the product of the document's gates
so far, and D_t is the sum of the decayed updates. A layer's update by token s is an outer product, x_s^T e_s, of its
input and the gradient with respect to its output. So a token's weights are never materialized. The output of a layer
for an input x at token t is

    p_t x W_0 + x (weighted D and Z from before the chunk) - sum_{s<=t} w(t, s) eta_s (x . x_s) e_s

with w and the weights of D and Z as in `gated_kernels.momentum.chunk`. A chunk has no more tokens than a mini-batch, so
at most one mini-batch of the document that continues into the chunk ends there. Documents that begin in the chunk take
their gradients at W_0. Hence there are two passes over the keys: one with the weights at the start of the first
mini-batch, and one, for the tokens after its end, with the weights at its end.

Shapes: B batch, T tokens, H query heads, G key-value heads, R = H / G, F feature size, V value size, W hidden size, N
chunks, C chunk length, X a layer's inputs and a 1 appended for the bias, Y its outputs, P weights of the model. Tensors
of a chunk are [B, G, C, ...].
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor

from gated_kernels.common.recomputed import recomputed
from gated_kernels.delta_rule.chunk import same_segment, split
from gated_kernels.momentum.chunk import products

EPS = 1e-6


def chunk_inner_model(
    q_BTHF: Tensor,
    k_BTGF: Tensor,
    v_BTGV: Tensor,
    eta_BTG1: Tensor,
    log_a: Tensor | None,
    log_m: Tensor | None,
    written_BTG1: Tensor,
    *,
    first_GFW: Tensor,
    second_GWV: Tensor | None = None,
    norm_G2V: Tensor | None = None,
    scale: float = 1.0,
    mini_batch: int = 16,
    initial_state: Tensor | None = None,
    segment_ids_BT: Tensor | None = None,
    exclusive: bool = False,
) -> tuple[Tensor, Tensor]:
    """Z_t = m_t Z_{t-1} - eta_t grad(W'; k_t, v_t), W_t = a_t W_{t-1} + Z_t, o_t = f(q_t; W_t).

    grad is the gradient of |f(k) - v|^2 / 2 at W', the weights at the start of the token's mini-batch. Query head h
    uses key-value head h // R. Computes in fp32 (fp64 for fp64 values), even under autocast. Nothing bounds the states:
    steps can overshoot.

    eta_BTG1: step sizes, at least 0.
    log_a, log_m: [B, T, G, 1], at most 0: the logs of the decay a and of the momentum m. None: no decay, no momentum.
    written_BTG1: where False, a token does not count toward a mini-batch and adds nothing to W. It leaves the state
        untouched if its eta and its log gates are 0, too.
    first_GFW, second_GWV: W_0, from which every document starts, [G, F + 1, W or V] and [G, W + 1, V] with the bias as
        the last row. y = [scale x, 1] first or, with `second_GWV`, y = [gelu([scale x, 1] first), 1] second.
    norm_G2V: weight and bias of a layer norm, with which f(x) = x + norm(y); None: f(x) = y.
    mini_batch: tokens in a mini-batch.
    initial_state: a state as returned; None: zeros, as at the start of a document.
    segment_ids_BT: integers. The recurrence restarts where they change. The given state belongs to the first segment.
    exclusive: o_t = f(q_t; W_{t-1}).

    Returns o_BTHV in v's dtype and the last state [B, G, 2 or 3, P + 2]. Its rows are the sum of updates D, the same at
    the start of the current mini-batch, and Z if there is momentum. Its last two columns are log p of the first two
    rows, and, in the first row, the number of tokens in the current mini-batch. Raises ValueError when H is not a
    multiple of G.
    """
    B, _, H, _ = q_BTHF.shape
    G = v_BTGV.shape[2]
    if H % G:
        raise ValueError(f"{H} query heads are not a multiple of {G} key-value heads")
    dtype = torch.promote_types(v_BTGV.dtype, torch.float32)
    layers = [x.to(dtype) for x in (first_GFW, second_GWV) if x is not None]
    if initial_state is None:
        size = 2 if log_m is None else 3, sum(x[0].numel() for x in layers) + 2
        initial_state = v_BTGV.new_zeros(B, G, *size, dtype=dtype)
    norm = None if norm_G2V is None else norm_G2V.to(dtype)
    model = Model(layers, norm, scale)
    with torch.autocast(v_BTGV.device.type, enabled=False):
        inputs = Inputs(q_BTHF.unflatten(2, (G, -1)), k_BTGF, v_BTGV, eta_BTG1, written_BTG1, log_a, log_m)
        arguments = inputs, model, initial_state.to(dtype), mini_batch, segment_ids_BT, exclusive
        if k_BTGF.shape[1] == 1:
            o, last = _chunked(*arguments)
        else:
            o, last = recomputed(_chunked, *arguments, on_gpu=v_BTGV.is_cuda)
    return o.flatten(2, 3).to(v_BTGV.dtype), last


class Inputs(NamedTuple):
    """The inputs of all tokens, [B,T,G,*], or of a chunk, [B,G,C,*]."""

    q: Tensor
    k: Tensor
    v: Tensor
    eta: Tensor
    written: Tensor
    log_a: Tensor | None = None
    log_m: Tensor | None = None


class Model(NamedTuple):
    """The model that is trained: W_0 of its layers [G,X,Y], the norm after them, and the scale of its inputs."""

    layers: list[Tensor]
    norm: Tensor | None
    scale: float

    def unpacked(self, row_BGP: Tensor) -> list[Tensor]:
        """Each layer's part [B,G,X,Y] of a row of the state."""
        parts = row_BGP.split([x[0].numel() for x in self.layers], -1)
        return [part.unflatten(-1, x.shape[1:]) for part, x in zip(parts, self.layers)]

    def packed(self, weights: list[Tensor], log_p: Tensor, count: Tensor) -> Tensor:
        """A row [B,G,1,P+2] of the state."""
        return torch.cat([*(x.flatten(2)[:, :, None] for x in weights), log_p, count], -1)


class Shares(NamedTuple):
    """The coefficients that make up the model's weights at a token: log p, the coefficients of the updates from before
    the chunk and of the momentum from there, each [B,G,C,1], and of the chunk's writes, [B,G,C,C] (with -eta)."""

    log_p: Tensor
    added: Tensor
    momentum: Tensor
    writes: Tensor

    def of_token(self, chosen_BGC1: Tensor) -> Shares:
        """The coefficients of the one token chosen by a 0/1 mask, [B,G,1,*]; all 0 where none is chosen."""
        return Shares(*((chosen_BGC1 * x).sum(2, keepdim=True) for x in self))


def _chunked(
    inputs: Inputs,
    model: Model,
    state: Tensor,
    mini_batch: int,
    segment_ids_BT: Tensor | None,
    exclusive: bool,
) -> tuple[Tensor, Tensor]:
    T = inputs.k.shape[1]
    C = min(mini_batch, T)
    chunks = [None if x is None else split(x, C, state.dtype).unbind(2) for x in inputs]
    same = None if segment_ids_BT is None else same_segment(segment_ids_BT, C)
    outputs = []
    for n in range(-(-T // C)):
        of_chunk: Any = [None if x is None else x[n] for x in chunks]
        of_segments = None if same is None else tuple(mask[:, :, n] for mask in same)
        o, state = _one_chunk(Inputs(*of_chunk), model, state, mini_batch, of_segments, exclusive)
        outputs.append(o)
    return torch.stack(outputs, 2).movedim(1, 3).flatten(1, 2)[:, :T], state


def _one_chunk(
    inputs: Inputs,
    model: Model,
    state: Tensor,
    mini_batch: int,
    same: tuple[Tensor, ...] | None,
    exclusive: bool,
) -> tuple[Tensor, Tensor]:
    q, k, v, eta, written, log_a, log_m = inputs
    C, R, P, ones = k.shape[2], q.shape[3], state.shape[-1] - 2, torch.ones_like(eta)
    rows = [model.unpacked(row) for row in state[..., :P].unbind(2)]
    added, anchor = rows[:2]
    momentum = None if log_m is None else rows[2]
    log_p, anchor_log_p, count = state[:, :, :1, P:-1], state[:, :, 1:2, P:-1], state[:, :, :1, -1:].detach()
    pairs, before, last = torch.tril(ones @ ones.mT), ones, ones
    if same is not None:
        pairs, before, last = pairs * same[0], before * same[1], last * same[2]

    log_a = torch.zeros_like(eta) if log_a is None else log_a
    decay_a = products(log_a)
    prefix_a = decay_a[..., :1] * log_a[..., :1, :].exp()
    if log_m is None:
        decay_m, prefix_m = torch.eye(C, dtype=k.dtype, device=k.device).expand_as(pairs), torch.zeros_like(eta)
    else:
        decay_m = products(log_m)
        prefix_m = decay_m[..., :1] * log_m[..., :1, :].exp()
    after = Shares(
        pairs @ log_a + before * log_p,
        before * prefix_a,
        before * (decay_a @ (written * prefix_m)),
        -pairs * (decay_a @ (written * decay_m)) * eta.mT,
    )
    # the number of tokens in the mini-batch before each token, and whether the mini-batch is full with it
    place = pairs @ written - written + before * count
    fills = (place == mini_batch - 1) * written

    writes = _gradients(model, k, v, (before * anchor_log_p).exp(), before, anchor)
    if C > 1:  # a single token is never after the end of a mini-batch
        # the weights at which tokens after the end of the continuing document's mini-batch take their gradients
        ended = after.of_token(fills * before)
        next_anchor = _summed(ended, added, momentum, writes)
        behind = _gradients(model, k, v, ended.log_p.exp(), ones, next_anchor)
        is_behind = place >= mini_batch
        writes = [
            (torch.where(is_behind, x_2, x_1), torch.where(is_behind, e_2, e_1))
            for (x_1, e_1), (x_2, e_2) in zip(writes, behind)
        ]

    read = after
    if exclusive:
        own = (before * log_p, before, torch.zeros_like(before), torch.zeros_like(after.writes))
        # the coefficients of the previous token, if it belongs to the same document
        follows = nnf.pad(pairs.diagonal(-1, -2, -1), (1, 0))[..., None]
        read = Shares(*(torch.where(follows > 0, nnf.pad(x[..., :-1, :], (0, 0, 1, 0)), y) for x, y in zip(after, own)))
    read = Shares(*(x.repeat_interleave(R, 2) for x in read))
    q_rows = q.flatten(2, 3)
    x = y = model.scale * q_rows
    for i, (start, (keys, errors)) in enumerate(zip(model.layers, writes)):
        x = _with_one(nnf.gelu(y, approximate="tanh") if i else x)
        y = read.log_p.exp() * (x @ start) + read.added * (x @ added[i]) + ((x @ keys.mT) * read.writes) @ errors
        if momentum is not None:
            y = y + read.momentum * (x @ momentum[i])
    o = y
    if model.norm is not None:
        o = q_rows + nnf.layer_norm(y, y.shape[-1:], eps=EPS) * model.norm[:, :1] + model.norm[:, 1:]

    end = Shares(*(x[:, :, -1:] for x in after))
    filled = fills * last
    has_filled = filled.sum(2, keepdim=True)
    at_fill, keeps = after.of_token(filled), before[:, :, -1:] * (1 - has_filled)
    new_anchor = [x + keeps * y for x, y in zip(_summed(at_fill, added, momentum, writes), anchor)]
    count = before[:, :, -1:] * count + (last * written).sum(2, keepdim=True) - mini_batch * has_filled
    none = torch.zeros_like(count)
    state_rows = [
        model.packed(_summed(end, added, momentum, writes), end.log_p, count),
        model.packed(new_anchor, at_fill.log_p + keeps * anchor_log_p, none),
    ]
    if momentum is not None:
        steps = end._replace(
            added=none, momentum=(before * prefix_m)[:, :, -1:], writes=(-pairs * decay_m * eta.mT)[:, :, -1:]
        )
        state_rows.append(model.packed(_summed(steps, added, momentum, writes), none, none))
    return o.unflatten(2, (C, R)), torch.cat(state_rows, 2)


def _gradients(
    model: Model, k: Tensor, v: Tensor, p: Tensor, share: Tensor, added: list[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """For each layer, its inputs [B,G,C,X] and the loss's gradient with respect to its outputs [B,G,C,Y], at the keys
    and with the weights p W_0 + share * added."""
    inputs, slopes = [], []
    x = y = model.scale * k
    for i, (start, more) in enumerate(zip(model.layers, added)):
        if i:
            x, slope = _gelu(y)
            slopes.append(slope)
        inputs.append(_with_one(x))
        y = p * (inputs[-1] @ start) + share * (inputs[-1] @ more)
    if model.norm is None:
        error = y - v
    else:
        size, shift = model.norm[:, :1], model.norm[:, 1:]
        normed, deviation = _normed(y)
        error = size * (k + normed * size + shift - v)
        error = (error - error.mean(-1, keepdim=True) - normed * (error * normed).mean(-1, keepdim=True)) / deviation
    errors = [error]
    for i in range(len(slopes), 0, -1):
        back = p * (errors[0] @ model.layers[i].mT) + share * (errors[0] @ added[i].mT)
        errors.insert(0, back[..., :-1] * slopes[i - 1])
    return list(zip(inputs, errors))


def _summed(
    shares: Shares, added: list[Tensor], momentum: list[Tensor] | None, writes: list[tuple[Tensor, Tensor]]
) -> list[Tensor]:
    """Each layer's weights [B,G,X,Y] at one token, without p W_0."""
    found = []
    for i, (keys, errors) in enumerate(writes):
        x = shares.added * added[i] + (keys * shares.writes.mT).mT @ errors
        found.append(x if momentum is None else x + shares.momentum * momentum[i])
    return found


def _with_one(x: Tensor) -> Tensor:
    return nnf.pad(x, (0, 1), value=1.0)


def _normed(y: Tensor) -> tuple[Tensor, Tensor]:
    """y normalized to mean 0 and variance 1, and its standard deviation."""
    y = y - y.mean(-1, keepdim=True)
    deviation = (y.square().mean(-1, keepdim=True) + EPS).sqrt()
    return y / deviation, deviation


def _gelu(y: Tensor) -> tuple[Tensor, Tensor]:
    """gelu(y), in the tanh approximation, and its derivative."""
    c = math.sqrt(2 / math.pi)
    tanh = torch.tanh(c * (y + 0.044715 * y**3))
    slope = (1 + tanh) / 2 + y * (1 - tanh * tanh) * (c / 2) * (1 + 3 * 0.044715 * y * y)
    return nnf.gelu(y, approximate="tanh"), slope
