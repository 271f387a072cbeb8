"""The chunkwise elementwise recurrence.

First, all chunks step through their tokens in parallel, each from a zero state. Then a loop over the chunks carries the
states. Finally, every token also reads the state before its chunk, decayed.

With a decay per entry of the state, there is no matrix product over tokens, so T F V intermediate values are computed.
The backward pass recomputes them, so that only the inputs are saved. Every decay is the exponential of a number of at
most 0, and nothing is divided by a decay.

Shapes: B batch, T tokens, H query heads, G key-value heads, R = H / G, F feature size, V value size, N chunks, C chunk
length. Chunked tensors are [B, G, N, C, ...].
"""

from __future__ import annotations

import torch
import torch.nn.functional as nnf
from torch import Tensor

from gated_kernels.common.recomputed import recomputed
from gated_kernels.common.registry import kernel_for

CHUNK = 32


def chunk_elementwise(
    q_BTHF: Tensor,
    k_BTGF: Tensor,
    v_BTGV: Tensor,
    dt_BTGV: Tensor,
    log_A_GFV: Tensor,
    *,
    initial_state: Tensor | None = None,
    segment_ids_BT: Tensor | None = None,
    exclusive: bool = False,
) -> tuple[Tensor, Tensor]:
    """S_t = exp(dt_t log A) * S_{t-1} + k_t^T v_t, o_t = q_t S_t. Query head h uses key-value head h // R.

    dt_t[v] >= 0 scales log_A[f, v] <= 0. Computes in fp32 (fp64 for fp64 values), even under autocast.

    q_BTHF: or [1, 1, H, F], the same query for all tokens.
    initial_state: [B, G, F, V]; None: zeros.
    segment_ids_BT: integers. The recurrence restarts where they change. The given state belongs to the first segment.
    exclusive: o_t = q_t S_{t-1}.

    Returns o_BTHV in v's dtype and the last state. Raises ValueError when H is not a multiple of G.
    """
    H, F = q_BTHF.shape[2:]
    B, T, G, V = v_BTGV.shape
    if H % G:
        raise ValueError(f"{H} query heads are not a multiple of {G} key-value heads")
    dtype = torch.promote_types(v_BTGV.dtype, torch.float32)
    state = v_BTGV.new_zeros(B, G, F, V, dtype=dtype) if initial_state is None else initial_state.to(dtype)
    with torch.autocast(v_BTGV.device.type, enabled=False):
        kernel = kernel_for("elementwise")
        if kernel is not None:
            options = {"initial_state": state, "segment_ids_BT": segment_ids_BT, "exclusive": exclusive}
            found = kernel(q_BTHF, k_BTGF, v_BTGV, dt_BTGV, log_A_GFV, **options)
            if found is not None:
                return found
        inputs = (
            *(x.to(dtype) for x in (q_BTHF.expand(B, T, H, F), k_BTGF, v_BTGV, dt_BTGV, log_A_GFV)),
            state,
            segment_ids_BT,
            exclusive,
        )
        o_BTHV, last = recomputed(_run, *inputs, on_gpu=v_BTGV.is_cuda)
    return o_BTHV.to(v_BTGV.dtype), last


def _run(
    q_BTHF: Tensor,
    k_BTGF: Tensor,
    v_BTGV: Tensor,
    dt_BTGV: Tensor,
    log_A_GFV: Tensor,
    state: Tensor,
    segment_ids_BT: Tensor | None,
    exclusive: bool,
) -> tuple[Tensor, Tensor]:
    T, G = v_BTGV.shape[1:3]
    C = min(CHUNK, T)
    q, k, v, dt = (_split(x, C) for x in (q_BTHF.unflatten(2, (G, -1)), k_BTGF, v_BTGV, dt_BTGV))
    log_A = log_A_GFV[:, None]
    same = before = None  # [B, 1, N, C, 1, 1] same segment as the token before it, as the token before its chunk
    if segment_ids_BT is not None:
        same, before = _same_segment(segment_ids_BT, C)

    local, outputs = k.new_zeros(*k.shape[:3], k.shape[4], v.shape[4]), []
    for c in range(C):
        if same is not None:
            local = local * same[:, :, :, c]
        past = local
        local = local * (dt[:, :, :, c, None] * log_A).exp() + k[:, :, :, c, :, None] * v[:, :, :, c, None]
        outputs.append(q[:, :, :, c] @ (past if exclusive else local))

    since = dt.cumsum(3)
    carried = (since[:, :, :, -1, None] * log_A).exp()
    if before is not None:
        carried = carried * before[:, :, :, -1]
    states = [state]
    for added, decay in zip(local.unbind(2), carried.unbind(2)):
        states.append(torch.addcmul(added, states[-1], decay))

    if exclusive:
        since = nnf.pad(since[:, :, :, :-1], (0, 0, 1, 0))
    decayed = (since[:, :, :, :, None] * log_A[:, None]).exp() * torch.stack(states[:-1], 2)[:, :, :, None]
    if before is not None:
        decayed = decayed * before
    o = torch.stack(outputs, 3) + q @ decayed
    return o.movedim(1, 3).flatten(1, 2)[:, :T].flatten(2, 3), states[-1]


def _same_segment(segment_ids_BT: Tensor, C: int) -> tuple[Tensor, Tensor]:
    segment = torch.cat([segment_ids_BT, segment_ids_BT[:, -1:].expand(-1, -segment_ids_BT.shape[1] % C)], 1)
    previous = torch.cat([segment[:, :1], segment[:, :-1]], 1)
    same, chunks = segment == previous, segment.unflatten(1, (-1, C))
    before = chunks == previous.unflatten(1, (-1, C))[..., :1]
    return same.unflatten(1, (-1, C))[:, None, ..., None, None], before[:, None, ..., None, None]


def _split(x: Tensor, C: int) -> Tensor:
    """[B, T, G, ...] -> [B, G, N, C, ...], padded with zeros."""
    filled = torch.cat([x, x.new_zeros(x.shape[0], -x.shape[1] % C, *x.shape[2:])], 1)
    return filled.unflatten(1, (-1, C)).movedim(3, 1)
