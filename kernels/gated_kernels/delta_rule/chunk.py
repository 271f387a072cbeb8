"""The delta rule in chunks: a triangular solve within a chunk, a loop over the states between chunks.

What a token erases depends on what the tokens before it wrote, so the values n_t that are written along e_t solve a
triangular system of the chunk's scores (the WY form of a product of diagonal-plus-rank-one matrices, 2406.06484):

    n_t = -r_t D_t S_{t-1} = -(prefix_t r_t) S_0 - sum_{s<t} ((r_t . k_s) v_s + (r_t . e_s) n_s)

where S_0 is the state before the chunk and a score (x_t . y_s) holds every decay after s up to t. The rest is gated
linear attention of the two writes k^T v and e^T n. Where e is k they are one, of k^T (v + n), and half of the scores
are enough.

Decays are products of gates, never quotients of products from the start, as in common/gated_recurrence.py: a chunk
is halved until its blocks are mild. The backward pass computes all of it again, so that only the inputs are kept.

Shapes: B batch, T tokens, H query heads, G key-value heads, R = H / G, F feature size, V value size, N chunks, C chunk
length. Chunked tensors are [B, G, N, C, ...]; the R queries of a token and its r are J = R + 1 readers [.., C, J, F].
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor

from gated_kernels.common.recomputed import recomputed
from gated_kernels.common.registry import kernel_for
from gated_kernels.common.tracing import reads_no_values

CHUNK = 32
MILD = math.exp(-30)  # twice this exponent, in a pair that the mask removes, must stay finite


def chunk_delta_rule(
    q_BTHF: Tensor,
    k_BTGF: Tensor,
    v_BTGV: Tensor,
    r_BTGF: Tensor,
    log_a: Tensor | None,
    *,
    e_BTGF: Tensor | None = None,
    initial_state: Tensor | None = None,
    segment_ids_BT: Tensor | None = None,
    exclusive: bool = False,
) -> tuple[Tensor, Tensor]:
    """S_t = D_t S_{t-1} - e_t^T (r_t D_t S_{t-1}) + k_t^T v_t, D_t = diag(a_t), read by o_t = q_t S_t.

    r is the key under which a token looks up what the decayed state holds, e the one along which that is taken away.
    Without e it is k, and the token writes k_t^T (v_t - r_t D_t S_{t-1}): the difference between its value and the one
    held. Strengths are factors of k and e, so they are no arguments. With unit keys u and strengths b, DeltaNet and the
    linear per-token TTT are r = u, k = b u without a gate, gated DeltaNet adds a scalar one, and RWKV-7, which looks up
    before it decays, is r = u / a, e = b u with a k of its own. Zeros in k, log_a and e leave the state untouched.
    Nothing here bounds S: the matrices D_t - e_t^T (r_t D_t) should not expand.

    Query head h uses key-value head h // R. log_a <= 0 is [B, T, G, F], [B, T, G, 1] or None (no decay). With
    `exclusive`, o_t = q_t S_{t-1}. `segment_ids_BT` are integers; the recurrence restarts where they change, and the
    given state belongs to the first of them. Computes in fp32 (fp64 for fp64 values), under autocast too. Returns
    o_BTHV in v's dtype and the last state. Raises ValueError when H is no multiple of G.
    """
    B, T, H, F = q_BTHF.shape
    G, V = v_BTGV.shape[2:]
    if H % G:
        raise ValueError(f"{H} query heads are not a multiple of {G} key-value heads")
    dtype = torch.promote_types(v_BTGV.dtype, torch.float32)
    state = v_BTGV.new_zeros(B, G, F, V, dtype=dtype) if initial_state is None else initial_state.to(dtype)
    with torch.autocast(v_BTGV.device.type, enabled=False):
        if T == 1:
            step, found = kernel_for("delta_rule_step"), None
            if step is not None:
                options = {"e_BTGF": e_BTGF, "initial_state": state, "exclusive": exclusive}
                found = step(q_BTHF, k_BTGF, v_BTGV, r_BTGF, log_a, **options)
            return found or _step(q_BTHF, k_BTGF, v_BTGV, r_BTGF, log_a, e_BTGF, state, exclusive)
        kernel = kernel_for("delta_rule")
        if kernel is not None:
            options = {"initial_state": state, "segment_ids_BT": segment_ids_BT, "exclusive": exclusive}
            found = kernel(q_BTHF, k_BTGF, v_BTGV, r_BTGF, log_a, e_BTGF=e_BTGF, **options)
            if found is not None:
                return found
        q = reads_one_earlier(q_BTHF, segment_ids_BT) if exclusive else q_BTHF
        inputs = q, k_BTGF, v_BTGV, r_BTGF, log_a, e_BTGF, state, segment_ids_BT
        o_BTHV, last = recomputed(_chunked, *inputs, on_gpu=v_BTGV.is_cuda)
        o_BTHV = read_one_later(o_BTHV, q_BTHF, state) if exclusive else o_BTHV
        return o_BTHV.to(v_BTGV.dtype), last


def reads_one_earlier(q_BTHF: Tensor, segment_ids_BT: Tensor | None) -> Tensor:
    """The queries of an exclusive read for an op that has none: what q_t reads before token t, it would read after
    token t - 1."""
    q = nnf.pad(q_BTHF[:, 1:], (0, 0, 0, 0, 0, 1))
    if segment_ids_BT is not None:
        q = q * nnf.pad(segment_ids_BT[:, 1:] == segment_ids_BT[:, :-1], (0, 1))[..., None, None]
    return q


def read_one_later(o_BTHV: Tensor, q_BTHF: Tensor, state: Tensor) -> Tensor:
    """The outputs of an exclusive read, from those of `reads_one_earlier`; the first token reads the given state."""
    first = (q_BTHF[:, 0].to(state.dtype).unflatten(1, (state.shape[1], -1)) @ state).flatten(1, 2)
    return torch.cat([first[:, None], o_BTHV[:, :-1]], 1)


def _step(
    q_BTHF: Tensor,
    k_BTGF: Tensor,
    v_BTGV: Tensor,
    r_BTGF: Tensor,
    log_a: Tensor | None,
    e_BTGF: Tensor | None,
    state: Tensor,
    exclusive: bool,
) -> tuple[Tensor, Tensor]:
    q, k, v, r = (x[:, 0].to(state.dtype) for x in (q_BTHF, k_BTGF, v_BTGV, r_BTGF))
    decayed = state if log_a is None else state * log_a[:, 0, :, :, None].to(state.dtype).exp()
    new = -(r[..., None, :] @ decayed)
    if e_BTGF is None:
        last = torch.addcmul(decayed, k[..., None], new + v[..., None, :])
    else:
        last = torch.addcmul(decayed, e_BTGF[:, 0, :, :, None].to(state.dtype), new)
        last = torch.addcmul(last, k[..., None], v[..., None, :])
    o = q.unflatten(1, (v.shape[1], -1)) @ (state if exclusive else last)
    return o.flatten(1, 2)[:, None].to(v_BTGV.dtype), last


def _chunked(
    q_BTHF: Tensor,
    k_BTGF: Tensor,
    v_BTGV: Tensor,
    r_BTGF: Tensor,
    log_a: Tensor | None,
    e_BTGF: Tensor | None,
    state: Tensor,
    segment_ids_BT: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """o_BTHV in the state's dtype, and the last state."""
    T, G = k_BTGF.shape[1:3]
    C = min(CHUNK, 1 << (T - 1).bit_length())
    log_a = v_BTGV.new_zeros(()).expand(*v_BTGV.shape[:3], 1) if log_a is None else log_a
    q, k, v, r, gate = (split(x, C, state.dtype) for x in (q_BTHF.unflatten(2, (G, -1)), k_BTGF, v_BTGV, r_BTGF, log_a))
    e = k if e_BTGF is None else split(e_BTGF, C, state.dtype)
    R, F = q.shape[4:]
    decay = _decay(gate)
    prefix, suffix, total = decay.prefix, decay.suffix, decay.total
    same = None if segment_ids_BT is None else same_segment(segment_ids_BT, C)
    if same is not None:
        prefix, suffix, total = prefix * same.before, suffix * same.last, total * same.whole

    readers = torch.cat([q, r[..., None, :]], 4)

    def scores(keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of the tokens before, for the queries [.., C, R, C] and r [.., C, C]; of the token itself [.., C, R, 1]."""
        found = _scores(readers, keys, decay)
        found = found if same is None else found * same.pairs[..., None, :]
        return found[..., :R, :].flatten(3, 4), found[..., R, :], (q @ keys[..., None]).flatten(3, 4)

    q_e, r_e, self_e = scores(e)
    right = [v, prefix * r]
    if e_BTGF is not None:
        q_k, r_k, self_k = scores(k)
        right[0] = -(r_k @ v)
    # (1 + r_e) n = right, or (1 + r_e) (v + n) = right where e is k; the solver supplies the 1
    fresh, held = torch.linalg.solve_triangular(r_e, torch.cat(right, -1), upper=False, unitriangular=True).split(
        [v.shape[-1], F], -1
    )
    write = (e * suffix).mT
    added = write @ fresh if e_BTGF is None else write @ fresh + (k * suffix).mT @ v
    removed = write @ held
    states = [state]
    for added_n, removed_n, total_n in zip(added.unbind(2), removed.unbind(2), total.unbind(2)):
        states.append(total_n * states[-1] + added_n - removed_n @ states[-1])
    last = states.pop()
    before_chunk = torch.stack(states, 2)
    new = fresh - held @ before_chunk
    o = (q * prefix[..., None, :]).flatten(3, 4) @ before_chunk + q_e @ new + self_e * _each(new, R)
    if e_BTGF is not None:
        o = o + q_k @ v + self_k * _each(v, R)
    return o.unflatten(3, (C, R)).movedim(1, 3).flatten(1, 2)[:, :T].flatten(2, 3), last


class _Decay(NamedTuple):
    """Products of gates; `middle` and `levels` are for pairs of tokens within a chunk."""

    prefix: Tensor  # [.., C, F] from the start of the chunk to each token
    suffix: Tensor  # [.., C, F] after each token to the end of the chunk
    total: Tensor  # [.., F, 1] of the chunk
    base: int  # length of the blocks that are not halved
    middle: Tensor  # [.., C, F] from the middle of a token's base block to the token; its inverse for a key
    levels: list[tuple[int, Tensor, Tensor]]  # length of a half, prefix of second halves, suffix of first halves


def _decay(gate: Tensor) -> _Decay:
    totals = [gate.exp()]
    while totals[-1].shape[3] > 1:
        first, second = _halves(totals[-1], 1)
        totals.append((first * second).squeeze(4))
    base = 1 if reads_no_values() else _mild_length(totals)
    prefix, suffix, middle, levels = totals[0], torch.ones_like(gate), torch.ones_like(gate), []
    for level, total in enumerate(totals[:-1]):
        half = 1 << level
        (first_prefix, prefix_), (suffix_, last_suffix) = _halves(prefix, half), _halves(suffix, half)
        if 2 * half == base:
            middle = torch.stack([suffix_.reciprocal(), prefix_], 4).flatten(3, 5)
        elif half >= base:
            levels.append((half, prefix_, suffix_))
        first, second = _halves(total[..., None, :], 1)
        prefix = torch.stack([first_prefix, prefix_ * first.squeeze(4)], 4).flatten(3, 5)
        suffix = torch.stack([suffix_ * second.squeeze(4), last_suffix], 4).flatten(3, 5)
    return _Decay(prefix, suffix, totals[-1].mT, base, middle, levels)


def _mild_length(totals: list[Tensor]) -> int:
    """The length of the longest blocks that are mild, all of them."""
    mild = torch.stack([total.amin() for total in totals[:-1]]) >= MILD
    return 1 << int(mild.sum())


def _scores(readers: Tensor, keys: Tensor, decay: _Decay) -> Tensor:
    """[.., C, J, C]: of each reader with the keys of the tokens before its own, decayed; 0 elsewhere."""
    base = decay.base
    left, right = readers * decay.middle[..., None, :], keys / decay.middle
    before = left.new_ones(base, base).tril(-1)[:, None]
    blocks = _outer(left.unflatten(3, (-1, base)), right.unflatten(3, (-1, base))) * before
    for half, prefix, suffix in decay.levels:
        left, right = _halves(readers, half)[1] * prefix[..., None, :], _halves(keys, half)[0] * suffix
        first, second = _halves(blocks, 1)
        first, second = nnf.pad(first.squeeze(4), (0, half)), second.squeeze(4)
        blocks = torch.cat([first, torch.cat([_outer(left, right), second], -1)], 4)
    return blocks.squeeze(3)


def _outer(left: Tensor, right: Tensor) -> Tensor:
    """[.., t, J, F], [.., s, F] -> [.., t, J, s]"""
    return (left.flatten(-3, -2) @ right.mT).unflatten(-2, left.shape[-3:-1])


def _halves(x: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """[.., C, ...] -> the first and second halves of blocks, [.., C / 2 half, half, ...]."""
    first, second = x.unflatten(3, (-1, 2, half)).unbind(4)
    return first, second


def _each(x: Tensor, R: int) -> Tensor:
    """[.., C, V] -> [.., C R, V]: a token's values for each of its queries."""
    return x[..., None, :].expand(*x.shape[:-1], R, -1).flatten(3, 4)


class Same(NamedTuple):
    """Whether two places are of one segment; the state before a chunk is of its last token's."""

    pairs: Tensor  # [B, 1, N, C, C] two tokens of a chunk
    before: Tensor  # [B, 1, N, C, 1] a token and the state before its chunk
    last: Tensor  # [B, 1, N, C, 1] a token and the last of its chunk
    whole: Tensor  # [B, 1, N, 1, 1] the state before a chunk and its last token


def same_segment(segment_ids_BT: Tensor, C: int) -> Same:
    """The given state is of the first token's segment; what fills up the last chunk is of its last token's."""
    segment = nnf.pad(segment_ids_BT[:, None], (0, -segment_ids_BT.shape[1] % C), "replicate").unflatten(2, (-1, C))[
        ..., None
    ]
    last = segment[..., -1:, :]
    before = torch.cat([segment[:, :, :1, :1], last[:, :, :-1]], 2)
    return Same(segment == segment.mT, segment == before, segment == last, last == before)


def split(x: Tensor, C: int, dtype: torch.dtype) -> Tensor:
    """[B, T, G, ...] -> [B, G, N, C, ...], filled up with zeros."""
    T = x.shape[1]
    return nnf.pad(x.to(dtype), (0, 0) * (x.dim() - 2) + (0, -T % C)).unflatten(1, (-1, C)).movedim(3, 1)
