"""The chunkwise delta rule with momentum, along the lines of `gated_kernels.delta_rule.chunk`.

When the recurrence is unrolled, both states are weighted sums of the tokens' writes k_s^T n_s, where
n_s = v_s - r_s M_{s-1} is the residual of v_s. In Z_t the weight of a write is h(t, s), the product of m after s up to
t. In M_t it is w(t, s), the sum over j from s to t of (product of a after j up to t) c_j h(j, s). As there is one gate
per head, w is a product of two triangular matrices. The states before the chunk have weights of the same kind. The n_t
solve a triangular system:

    n_t + sum_{s<t} w(t-1, s) (r_t . k_s) n_s = v_t - r_t (the part of M_{t-1} from the states before the chunk)

Every weight is a sum of products of gates, so nothing overflows. The backward pass recomputes all of this, so that only
the inputs are saved.

Shapes: B batch, T tokens, H query heads, G key-value heads, R = H / G, F feature size, V value size, N chunks, C chunk
length. Chunked tensors are [B, G, N, C, ...]; M and Z are stacked, [.., 2 F, V].
"""

from __future__ import annotations

import torch
import torch.nn.functional as nnf
from torch import Tensor

from gated_kernels.common.recomputed import recomputed
from gated_kernels.delta_rule.chunk import same_segment, split

CHUNK = 16  # momentum overshoots where a key repeats many times, and a larger system would be solved less accurately


def chunk_momentum(
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
    """Z_t = m_t Z_{t-1} + k_t^T (v_t - r_t M_{t-1}), M_t = a_t M_{t-1} + c_t Z_t, o_t = q_t M_t.

    For a unit key u and a step size b, pass k = b u and r = u. Query head h uses key-value head h // R. Computes in
    fp32 (fp64 for fp64 values), even under autocast. Nothing bounds the states: steps can overshoot.

    log_a, log_m: [B, T, G, 1], at most 0: the logs of the decay a and of the momentum m.
    c_BTG1: factor of Z in M; 1 if it is not learned. A token with zeros in k, log_a, log_m and c leaves both states
        untouched.
    initial_state: [B, G, 2 F, V], with M's rows before Z's; None: zeros.
    segment_ids_BT: integers. The recurrence restarts where they change. The given state belongs to the first segment.
    exclusive: o_t = q_t M_{t-1}.

    Returns o_BTHV in v's dtype and the last state. Raises ValueError when H is not a multiple of G.
    """
    B, _, H, F = q_BTHF.shape
    G, V = v_BTGV.shape[2:]
    if H % G:
        raise ValueError(f"{H} query heads are not a multiple of {G} key-value heads")
    dtype = torch.promote_types(v_BTGV.dtype, torch.float32)
    state = v_BTGV.new_zeros(B, G, 2 * F, V, dtype=dtype) if initial_state is None else initial_state.to(dtype)
    inputs = q_BTHF.unflatten(2, (G, -1)), k_BTGF, v_BTGV, r_BTGF, log_a, log_m, c_BTG1
    with torch.autocast(v_BTGV.device.type, enabled=False):
        if q_BTHF.shape[1] == 1:
            o, last = _step(inputs, state, exclusive)
        else:
            o, last = recomputed(_chunked, inputs, state, segment_ids_BT, exclusive, on_gpu=v_BTGV.is_cuda)
        return o.flatten(2, 3).to(v_BTGV.dtype), last


def _step(inputs: tuple[Tensor, ...], state: Tensor, exclusive: bool) -> tuple[Tensor, Tensor]:
    q, k, v, r, log_a, log_m, c = (x[:, 0, ..., None, :].to(state.dtype) for x in inputs)
    memory, step = state.chunk(2, 2)
    new_step = torch.addcmul(step * log_m.exp(), k.mT, v - r @ memory)
    new = torch.addcmul(memory * log_a.exp(), c, new_step)
    o = q.squeeze(-2) @ (memory if exclusive else new)
    return o[:, None], torch.cat([new, new_step], 2)


def _chunked(
    inputs: tuple[Tensor, ...], state: Tensor, segment_ids_BT: Tensor | None, exclusive: bool
) -> tuple[Tensor, Tensor]:
    T = inputs[0].shape[1]
    C = min(CHUNK, 1 << (T - 1).bit_length())
    q, k, v, r, log_a, log_m, c = (split(x, C, state.dtype) for x in inputs)
    R, F = q.shape[4:]
    decay_a, decay_m = products(log_a), products(log_m)
    prefix_a, prefix_m = decay_a[..., :1] * log_a[..., :1, :].exp(), decay_m[..., :1] * log_m[..., :1, :].exp()
    # weights of the states before the chunk [.., C, 2] and of the chunk's writes [.., C, C], in M_t, then in M_{t-1}
    old, new = torch.cat([prefix_a, decay_a @ (c * prefix_m)], -1), decay_a @ (c * decay_m)
    # created on the device, because a copy from the host would synchronize
    first = (1 - torch.arange(2, dtype=old.dtype, device=old.device)).expand_as(old[..., :1, :])
    old_before, new_before = torch.cat([first, old[..., :-1, :]], -2), nnf.pad(new[..., :-1, :], (0, 0, 1, 0))
    if segment_ids_BT is not None:
        same = same_segment(segment_ids_BT, C)
        old, old_before, prefix_m = old * same.before, old_before * same.before, prefix_m * same.before
        new, new_before, decay_m = new * same.pairs, new_before * same.pairs, decay_m * same.pairs

    system = new_before * (r @ k.mT)
    right = torch.cat([v, _both(r, old_before)], -1)
    # (1 + system) n = right; the solver takes the diagonal as 1
    fresh, held = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split(
        [v.shape[-1], 2 * F], -1
    )
    write = torch.cat([new[..., -1:, :].mT * k, decay_m[..., -1:, :].mT * k], -1).mT
    kept = torch.stack([old[..., -1, :], nnf.pad(prefix_m[..., -1, :], (1, 0))], -2)
    eye = torch.eye(F, dtype=k.dtype, device=k.device)
    carried = (kept[..., :, None, :, None] * eye[:, None]).flatten(-4, -3).flatten(-2, -1) - write @ held
    added = write @ fresh
    states = [state]
    for carried_n, added_n in zip(carried.unbind(2), added.unbind(2)):
        states.append(carried_n @ states[-1] + added_n)
    last = states.pop()
    before_chunk = torch.stack(states, 2)
    if exclusive:
        old, new = old_before, new_before
    scores = (q.flatten(3, 4) @ k.mT).unflatten(3, (C, R)) * new[..., None, :]
    reads = _both(q, old[..., None, :]).flatten(3, 4)
    o = reads @ before_chunk + scores.flatten(3, 4) @ (fresh - held @ before_chunk)
    return o.unflatten(3, (C, R)).movedim(1, 3).flatten(1, 2)[:, :T], last


def products(log_gate: Tensor) -> Tensor:
    """[.., C, 1] -> [.., t, s]: the product of the gates after s up to t, made without division; 0 where s > t."""
    lower = log_gate.new_ones(log_gate.shape[-2], log_gate.shape[-2]).tril()
    return (lower @ (log_gate * lower.tril(-1))).exp() * lower


def _both(readers: Tensor, weights: Tensor) -> Tensor:
    """[.., F] and [.., 2] -> [.., 2 F]: vectors that read M and Z with one weight each."""
    return torch.cat([readers * weights[..., :1], readers * weights[..., 1:]], -1)
