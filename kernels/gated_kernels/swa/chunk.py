"""Sliding-window attention with sinks, in blocks of queries: time and memory O(T (W + block)).

Above LOGITS logits, the queries are processed in parts, so that even a window over all tokens needs no [T, T] matrix. A
block of queries attends to the keys from the start of its first query's window to its last query's own key, and to the
sinks. Only the inputs, the mask and the log-sum-exp are saved. The backward pass recomputes the weights from them.

Shapes: B batch, T queries, S = P + T keys, H query heads, G key-value heads, R = H / G, D head size, V value size,
M sinks, N blocks, C block length, L keys of a block (C and those before it). Blocked tensors are [B, G, N, ...].
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor

from gated_kernels.common.derivatives import differentiable_gradients, quotient
from gated_kernels.common.registry import kernel_for

BLOCK = 32
LOGITS = 1 << 27  # at most at a time: 512 MiB in float32


class _Cap(NamedTuple):
    """The softcap of the logits, and how many of the last channels hold a bias that is added after it."""

    limit: float
    bias_channels: int


def chunk_swa(
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
    """A single softmax over each query's visible sinks and the last `window_size` keys.

    Query head h uses key-value head h // R. The S keys are P past keys followed by the T queries' own. Query t sees key
    j if 0 <= P + t - j < window_size, valid_BS[j] holds and both belong to the same segment. It sees sink m if
    sink_visible_BTM[t, m] holds. A token that is visible both as a key and as a sink would count twice.

    scale: factor of q.k.
    valid_BS, sink_visible_BTM: booleans. segment_ids_BS: integers.
    sink_k_BMGD, sink_v_BMGV, sink_visible_BTM: given together, or not at all.
    memory_BTHV: a memory's output for each query. It is divided by normalizer_BTH if that is given. With
        memory_logit_BTH it is one more value of the softmax, with this logit. With mix_weight_H it makes up this
        fraction of the output and the window the rest; lse is then the same as if the memory were such a value.
    softcap: caps the logits at softcap tanh(scale q.k / softcap), as in Gemma 2 (2408.00118); None: no cap.
    bias_channels: number of last channels of q and k whose scaled product is added after the softcap, not capped.

    Returns o_BTHV in v's dtype and lse_BTH, the log-sum-exp of the logits, in fp32 (fp64 for fp64). A query that sees
    nothing has o = 0 and lse = -inf, and propagates no gradient. Raises ValueError when S < T, window_size < 1, H is
    not a multiple of G, only some of the three sink arguments are given, or a memory does not come with exactly one of
    memory_logit_BTH and mix_weight_H.
    """
    T, H = q_BTHD.shape[1:3]
    S, G = k_BSGD.shape[1:3]
    if S < T or window_size < 1 or H % G:
        raise ValueError(f"window {window_size}, {T} queries, {S} keys, {H} query heads, {G} kv heads do not fit")
    if len({x is None for x in (sink_k_BMGD, sink_v_BMGV, sink_visible_BTM)}) > 1:
        raise ValueError("sink_k_BMGD, sink_v_BMGV and sink_visible_BTM are given together or not at all")
    if (memory_logit_BTH is not None) + (mix_weight_H is not None) != (memory_BTHV is not None):
        raise ValueError("a memory comes with memory_logit_BTH or else with mix_weight_H")
    given: dict[str, Any] = {
        "window_size": window_size, "scale": scale, "valid_BS": valid_BS, "segment_ids_BS": segment_ids_BS,
        "sink_k_BMGD": sink_k_BMGD, "sink_v_BMGV": sink_v_BMGV, "sink_visible_BTM": sink_visible_BTM,
    }  # fmt: skip
    kernel = kernel_for("swa")
    if kernel is not None and softcap is None:  # the kernels have no softcap
        weights = {"normalizer_BTH": normalizer_BTH, "memory_logit_BTH": memory_logit_BTH, "mix_weight_H": mix_weight_H}
        found = kernel(q_BTHD, k_BSGD, v_BSGV, **given, memory_BTHV=memory_BTHV, **weights)
        if found is not None:
            return found
    cap = None if softcap is None else _Cap(softcap, bias_channels)
    o_BTHV, lse_BTH = _without_memory(q_BTHD, k_BSGD, v_BSGV, **given, cap=cap)
    if memory_BTHV is None:
        return o_BTHV, lse_BTH
    return combine(o_BTHV, lse_BTH, memory_BTHV, normalizer_BTH, memory_logit_BTH, mix_weight_H)


def combine(
    o_BTHV: Tensor,
    lse_BTH: Tensor,
    memory_BTHV: Tensor,
    normalizer_BTH: Tensor | None,
    memory_logit_BTH: Tensor | None,
    mix_weight_H: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The window's output combined with a memory's, and the log-sum-exp of both; arguments as in `chunk_swa`."""
    with torch.autocast(o_BTHV.device.type, enabled=False):
        if normalizer_BTH is not None:
            memory_BTHV = quotient(_wide(memory_BTHV), normalizer_BTH)
        if mix_weight_H is not None:
            mix_weight = mix_weight_H.to(lse_BTH.dtype)[:, None]
            together_BTH = lse_BTH - torch.log1p(-mix_weight_H.to(lse_BTH.dtype))
            # where, not a plain sum: a query that sees no key must pass no gradient to the mix weight
            lse_BTH = torch.where(lse_BTH == -torch.inf, lse_BTH, together_BTH)
        else:
            assert memory_logit_BTH is not None
            # sigmoid(a - b) = e^a / (e^a + e^b): the memory's share of the sum, without computing either exponential
            mix_weight = (memory_logit_BTH.to(lse_BTH.dtype) - lse_BTH).sigmoid()[..., None]
            lse_BTH = torch.logaddexp(lse_BTH, memory_logit_BTH.to(lse_BTH.dtype))
        mixed_BTHV = torch.lerp(_wide(o_BTHV).to(mix_weight.dtype), _wide(memory_BTHV).to(mix_weight.dtype), mix_weight)
        return mixed_BTHV.to(o_BTHV.dtype), lse_BTH


def _without_memory(
    q_BTHD: Tensor,
    k_BSGD: Tensor,
    v_BSGV: Tensor,
    *,
    window_size: int,
    scale: float,
    valid_BS: Tensor | None,
    segment_ids_BS: Tensor | None,
    sink_k_BMGD: Tensor | None,
    sink_v_BMGV: Tensor | None,
    sink_visible_BTM: Tensor | None,
    cap: _Cap | None,
) -> tuple[Tensor, Tensor]:
    """`chunk_swa` without a memory, in torch."""
    T, H, S = *q_BTHD.shape[1:3], k_BSGD.shape[1]
    part = max(LOGITS // (len(q_BTHD) * H * min(S, window_size)), BLOCK)
    if part < T:
        tensors = (q_BTHD, k_BSGD, v_BSGV, valid_BS, segment_ids_BS, sink_visible_BTM)
        sinks: dict[str, Any] = {"sink_k_BMGD": sink_k_BMGD, "sink_v_BMGV": sink_v_BMGV}
        return _in_parts(part, *tensors, window_size=window_size, scale=scale, cap=cap, **sinks)
    reach = slice(max(S - T - window_size + 1, 0), None)  # keys before it are in no window
    k_BSGD, v_BSGV = k_BSGD[:, reach], v_BSGV[:, reach]
    valid_BS = None if valid_BS is None else valid_BS[:, reach].bool()
    segment_ids_BS = None if segment_ids_BS is None else segment_ids_BS[:, reach]
    with torch.autocast(q_BTHD.device.type, enabled=False):
        if T == 1:
            hidden_BS = _hidden_from_one(k_BSGD, valid_BS, segment_ids_BS, sink_visible_BTM)
            return _one_query(q_BTHD, k_BSGD, v_BSGV, sink_k_BMGD, sink_v_BMGV, hidden_BS, scale, cap)
        blocks = _Blocks.of(T, k_BSGD.shape[1], window_size)
        hidden = _hidden(blocks, window_size, valid_BS, segment_ids_BS, sink_visible_BTM, k_BSGD.device)
        return _Window.apply(q_BTHD, k_BSGD, v_BSGV, sink_k_BMGD, sink_v_BMGV, hidden, scale, cap, blocks)


def _in_parts(
    part: int,
    q_BTHD: Tensor,
    k_BSGD: Tensor,
    v_BSGV: Tensor,
    valid_BS: Tensor | None,
    segment_ids_BS: Tensor | None,
    sink_visible_BTM: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`part` queries at a time, with the keys from the first one's window to the last one's own."""
    T, past, results = q_BTHD.shape[1], k_BSGD.shape[1] - q_BTHD.shape[1], []
    for start in range(0, T, part):
        own, keys = (
            slice(start, start + part),
            slice(max(past + start - options["window_size"] + 1, 0), past + start + part),
        )
        valid, segment = (None if x is None else x[:, keys] for x in (valid_BS, segment_ids_BS))
        visible = None if sink_visible_BTM is None else sink_visible_BTM[:, own]
        masks: dict[str, Any] = {"valid_BS": valid, "segment_ids_BS": segment, "sink_visible_BTM": visible}
        results.append(_without_memory(q_BTHD[:, own], k_BSGD[:, keys], v_BSGV[:, keys], **masks, **options))
    o, lse = zip(*results)
    return torch.cat(o, 1), torch.cat(lse, 1)


def _one_query(
    q_BTHD: Tensor,
    k_BSGD: Tensor,
    v_BSGV: Tensor,
    sink_k_BMGD: Tensor | None,
    sink_v_BMGV: Tensor | None,
    hidden_BS: Tensor | None,
    scale: float,
    cap: _Cap | None,
) -> tuple[Tensor, Tensor]:
    if sink_k_BMGD is not None and sink_v_BMGV is not None:
        k_BSGD, v_BSGV = torch.cat([k_BSGD, sink_k_BMGD], 1), torch.cat([v_BSGV, sink_v_BMGV], 1)
    q = _wide(q_BTHD).unflatten(2, (k_BSGD.shape[2], -1))[:, 0]
    logits = _scaled_products(q, _wide(k_BSGD).transpose(1, 2), scale, cap)
    if hidden_BS is not None:
        logits = logits.masked_fill(hidden_BS[:, None, None], -torch.inf)
    o, lse = _attend(logits, v_BSGV.transpose(1, 2))
    return o.flatten(1, 2)[:, None], lse.flatten(1)[:, None]


def _attend(logits: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted means of v, in its dtype, and the log-sum-exp of the logits [..., 1]. Overwrites the logits."""
    top = logits.detach().amax(-1, keepdim=True).clamp_(min=torch.finfo(logits.dtype).min)
    weights = _exp_(logits.sub_(top))
    normalizer = weights.sum(-1, keepdim=True)
    weights = weights / normalizer.clamp(min=torch.finfo(normalizer.dtype).tiny)
    return weights.to(v.dtype) @ v, normalizer.log() + top


def _hidden_from_one(
    k_BSGD: Tensor, valid_BS: Tensor | None, segment_ids_BS: Tensor | None, sink_visible_BTM: Tensor | None
) -> Tensor | None:
    """[B, S + M] the keys and sinks that a single query does not see."""
    hidden = None if valid_BS is None else ~valid_BS
    if segment_ids_BS is not None:
        other = segment_ids_BS != segment_ids_BS[:, -1:]
        hidden = other if hidden is None else hidden | other
    if sink_visible_BTM is not None:
        hidden = torch.zeros_like(k_BSGD[..., 0, 0], dtype=torch.bool) if hidden is None else hidden
        hidden = torch.cat([hidden, ~sink_visible_BTM[:, 0].bool()], 1)
    return hidden


class _Blocks(NamedTuple):
    """How T queries and their keys are cut into blocks of `length` queries, each with `past` more keys."""

    length: int
    past: int
    tokens: int  # T
    front: int  # padding before the first key
    back: int  # padding after the last query and key

    @classmethod
    def of(cls, T: int, S: int, window_size: int) -> _Blocks:
        length = T if window_size >= S else min(max(BLOCK, window_size // 8), T)
        past = S - T if length == T else window_size - 1
        return cls(length, past, T, past - (S - T), -T % length)

    def queries(self, x_BTHD: Tensor, G: int) -> Tensor:
        """-> [B, G, N, C, R, D]"""
        x = nnf.pad(x_BTHD, (0, 0, 0, 0, 0, self.back)) if self.back else x_BTHD
        return x.unflatten(2, (G, -1)).unflatten(1, (-1, self.length)).movedim(3, 1).contiguous()

    def queries_back(self, x: Tensor) -> Tensor:
        return x.movedim(1, 3).flatten(1, 2)[:, : self.tokens].flatten(2, 3)

    def spread(self, x_BS: Tensor) -> Tensor:
        """[B, S] -> [B, N, L]"""
        return nnf.pad(x_BS, (self.front, self.back)).unfold(1, self.past + self.length, self.length)

    def keys(self, x_BSGD: Tensor, sink_BMGD: Tensor | None) -> Tensor:
        """-> [B, G, N, L + M, D]"""
        x = nnf.pad(x_BSGD, (0, 0, 0, 0, self.front, self.back)) if self.front or self.back else x_BSGD
        x = x.unfold(1, self.past + self.length, self.length).permute(0, 2, 1, 4, 3)
        if sink_BMGD is None:
            return x.contiguous()
        return torch.cat([x, sink_BMGD.transpose(1, 2)[:, :, None].expand(-1, -1, x.shape[2], -1, -1)], 3)

    def keys_back(self, dx: Tensor, sink_BMGD: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The gradients of the inputs of `keys`: a key's is summed over the blocks that contain it."""
        B, G, N, _, D = dx.shape
        L, C = self.past + self.length, self.length
        pieces = -(-L // C)
        total = dx.new_zeros(B, G, N + pieces - 1, C, D)
        for i in range(pieces):
            piece = dx[..., i * C : min((i + 1) * C, L), :]
            total[:, :, i : i + N, : piece.shape[3]] += piece
        dkeys = total.flatten(2, 3)[:, :, self.front : self.past + self.tokens].transpose(1, 2)
        return dkeys, None if sink_BMGD is None else dx[..., L:, :].sum(2).transpose(1, 2)


def _hidden(
    blocks: _Blocks,
    window_size: int,
    valid_BS: Tensor | None,
    segment_ids_BS: Tensor | None,
    sink_visible_BTM: Tensor | None,
    device: torch.device,
) -> Tensor:
    """[B or 1, N, C, L + M] the keys and sinks that the queries of each block do not see."""
    C, L = blocks.length, blocks.past + blocks.length
    distance = torch.arange(C, device=device)[:, None] + blocks.past - torch.arange(L, device=device)
    hidden = (distance < 0) | (distance >= window_size)
    if valid_BS is None:
        valid_BS = torch.ones(1, L - C + blocks.tokens - blocks.front, dtype=torch.bool, device=device)
    hidden = hidden | ~blocks.spread(valid_BS)[:, :, None]
    if segment_ids_BS is not None:
        own_BT = nnf.pad(segment_ids_BS[:, -blocks.tokens :], (0, blocks.back))
        hidden = hidden | (own_BT.unflatten(1, (-1, C))[..., None] != blocks.spread(segment_ids_BS)[:, :, None])
    if sink_visible_BTM is not None:
        shut = nnf.pad(~sink_visible_BTM.bool(), (0, 0, 0, blocks.back)).unflatten(1, (-1, C))
        hidden = torch.cat([hidden.expand(shut.shape[0], -1, -1, -1), shut], 3)
    return hidden


class _Window(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BTHD: Tensor,
        k_BSGD: Tensor,
        v_BSGV: Tensor,
        sink_k_BMGD: Tensor | None,
        sink_v_BMGV: Tensor | None,
        hidden: Tensor,
        scale: float,
        cap: _Cap | None,
        blocks: _Blocks,
    ) -> tuple[Tensor, Tensor]:
        q, k = blocks.queries(q_BTHD, k_BSGD.shape[2]), blocks.keys(k_BSGD, sink_k_BMGD)
        o, lse = _attend(_logits(q, k, hidden, scale, cap).flatten(3, 4), blocks.keys(v_BSGV, sink_v_BMGV))
        o_BTHV, lse_BTH = (blocks.queries_back(x.unflatten(3, q.shape[3:5])) for x in (o, lse))
        ctx.save_for_backward(q_BTHD, k_BSGD, v_BSGV, sink_k_BMGD, sink_v_BMGV, hidden, lse_BTH)
        ctx.scale, ctx.cap, ctx.blocks = scale, cap, blocks
        return o_BTHV, lse_BTH[..., 0]

    @staticmethod
    def backward(ctx: Any, do_BTHV: Tensor, dlse_BTH: Tensor) -> tuple[Tensor | None, ...]:
        q_BTHD, k_BSGD, v_BSGV, sink_k, sink_v, hidden, lse_BTH = ctx.saved_tensors
        blocks: _Blocks = ctx.blocks
        if torch.is_grad_enabled():
            inputs = q_BTHD, k_BSGD, v_BSGV, sink_k, sink_v, hidden, ctx.scale, ctx.cap, blocks
            return differentiable_gradients(_differentiable, inputs, (do_BTHV, dlse_BTH))
        G = k_BSGD.shape[2]
        with torch.autocast(do_BTHV.device.type, enabled=False):
            empty = lse_BTH == -torch.inf
            lse_BTH, dlse_BTH = lse_BTH.masked_fill(empty, 0), dlse_BTH[..., None].masked_fill(empty, 0)
            q, do, lse, dlse = (blocks.queries(x, G) for x in (q_BTHD, do_BTHV, lse_BTH, dlse_BTH))
            k, v, do = blocks.keys(k_BSGD, sink_k), blocks.keys(v_BSGV, sink_v), do.flatten(3, 4)
            weights = _exp_(_logits(q, k, hidden, ctx.scale, ctx.cap).sub_(lse))
            dv = weights.flatten(3, 4).to(do.dtype).mT @ do
            # The mean over the row is computed from these products: do.o, equal in theory, would not cancel as well.
            dlogits = (do @ v.mT).unflatten(3, q.shape[3:5]) * weights
            dlogits.addcmul_(weights, dlse - dlogits.sum(-1, keepdim=True)).mul_(ctx.scale)
            dq, dk = _product_gradients(dlogits.flatten(3, 4), q.flatten(3, 4), k, ctx.scale, ctx.cap)
            dq = blocks.queries_back(dq.unflatten(3, q.shape[3:5]))
            dk, dsink_k = blocks.keys_back(dk, sink_k)
            dv, dsink_v = blocks.keys_back(dv, sink_v)
        return dq, dk, dv, dsink_k, dsink_v, None, None, None, None


def _differentiable(
    q_BTHD: Tensor,
    k_BSGD: Tensor,
    v_BSGV: Tensor,
    sink_k_BMGD: Tensor | None,
    sink_v_BMGV: Tensor | None,
    hidden: Tensor,
    scale: float,
    cap: _Cap | None,
    blocks: _Blocks,
) -> tuple[Tensor, Tensor]:
    """Computes what `_Window` does, but is differentiable any number of times: it saves the weights."""
    q, k = blocks.queries(q_BTHD, k_BSGD.shape[2]), blocks.keys(k_BSGD, sink_k_BMGD)
    logits = _scaled_products(_wide(q).flatten(3, 4), _wide(k), scale, cap).unflatten(3, q.shape[3:5])
    hidden = hidden[:, None, :, :, None]
    nothing = hidden.all(-1, keepdim=True)
    logits = logits.masked_fill(hidden, -torch.inf).masked_fill(nothing, 0)
    weights = logits.softmax(-1).masked_fill(nothing, 0).flatten(3, 4).to(v_BSGV.dtype)
    o = (weights @ blocks.keys(v_BSGV, sink_v_BMGV)).unflatten(3, q.shape[3:5])
    lse = logits.logsumexp(-1, keepdim=True).masked_fill(nothing, -torch.inf)
    return blocks.queries_back(o), blocks.queries_back(lse)[..., 0]


def _logits(q: Tensor, k: Tensor, hidden: Tensor, scale: float, cap: _Cap | None) -> Tensor:
    """[B, G, N, C, R, L + M], -inf where hidden."""
    if cap is not None:
        logits = _scaled_products(_wide(q).flatten(3, 4), _wide(k), scale, cap).unflatten(3, q.shape[3:5])
        return logits.masked_fill_(hidden[:, None, :, :, None], -torch.inf)
    logits = (_wide(q).flatten(3, 4) @ _wide(k).mT).unflatten(3, q.shape[3:5])
    bias = torch.zeros_like(hidden, dtype=logits.dtype).masked_fill_(hidden, -torch.inf)
    return torch.add(bias[:, None, :, :, None], logits, alpha=scale, out=logits)


def _scaled_products(q: Tensor, k: Tensor, scale: float, cap: _Cap | None) -> Tensor:
    """[..., queries, keys] scaled products of q [..., queries, D] and k [..., keys, D], capped if there is a cap."""
    if cap is None:
        return (q @ k.mT) * scale
    D = q.shape[-1] - cap.bias_channels
    bounded = (q[..., :D] @ k[..., :D].mT * (scale / cap.limit)).tanh() * cap.limit
    return bounded + q[..., D:] @ k[..., D:].mT * scale if cap.bias_channels else bounded


def _product_gradients(dlogits: Tensor, q: Tensor, k: Tensor, scale: float, cap: _Cap | None) -> tuple[Tensor, Tensor]:
    """The gradients of q and k in `_scaled_products`. `dlogits` are already multiplied by the scale."""
    if cap is None:
        return dlogits.to(k.dtype) @ k, dlogits.to(q.dtype).mT @ q
    D = q.shape[-1] - cap.bias_channels
    slope = 1 - (_wide(q[..., :D]) @ _wide(k[..., :D]).mT * (scale / cap.limit)).tanh().square()
    dq, dk = _product_gradients(dlogits * slope, q[..., :D], k[..., :D], scale, None)
    if cap.bias_channels:
        dq_bias, dk_bias = _product_gradients(dlogits, q[..., D:], k[..., D:], scale, None)
        dq, dk = torch.cat((dq, dq_bias), -1), torch.cat((dk, dk_bias), -1)
    return dq, dk


def _exp_(x: Tensor) -> Tensor:
    """exp in place, computed as exp2: several times faster on a CPU, where exp is also slow at -inf."""
    return x.mul_(1 / math.log(2)).exp2_()


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
