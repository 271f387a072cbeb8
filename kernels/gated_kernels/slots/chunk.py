"""Attention over slots as two passes of gated linear attention with a softmax between them.

Both states, K_t = diag(a_t) K_{t-1} + w_t^T [k_t, 1] and V_t likewise, are gated linear attention over slots. Reading
the values, p_t V_t, is what `chunk_gla` does. Reading the keys, K_t q_t, is a transposed read. It is the gradient with
respect to x_t of the read x_t K_t when q_t is the output's gradient, so the backward pass of `chunk_gla` computes it.
In turn, the gradient of the transposed read with respect to q_t is an ordinary read, and its other gradients are those
of that read with output gradient q_t. So neither pass needs code of its own for the decay.

Shapes: B batch, T tokens, H query heads, G key-value heads, R = H / G, D key size, V value size, M slots. The state of
the keys has D + 1 columns: the last is each slot's normalizer, the sum of the decayed weights written to it. Without
`normalize` it has D.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor

from gated_kernels.common.derivatives import differentiable_gradients
from gated_kernels.common.registry import kernel_for
from gated_kernels.common.tracing import is_exporting
from gated_kernels.gla.chunk import chunk_gla


def chunk_slots(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGV: Tensor,
    w_BTGM: Tensor,
    log_a: Tensor | None,
    *,
    scale: float,
    keys_BGMD: Tensor | None = None,
    values_BGMV: Tensor | None = None,
    segment_ids_BT: Tensor | None = None,
    exclusive: bool = False,
    normalize: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o_t = sum_m p_m V_m / z_m, p = softmax_m(scale q_t K_m / z_m).

    Token t adds w_t[m] (k_t, v_t, 1) to (K_m, V_m, z_m) of slot m. Query head h uses key-value head h // R. Computes in
    fp32 (fp64 for fp64 values), even under autocast.

    w_BTGM: the write weights, at least 0.
    log_a: the logs of the gates by which K, V and the normalizer z of a slot decay, at most 0: [B, T, G, M],
        [B, T, G, 1], or None for no decay.
    keys_BGMD, values_BGMV: the states to start from; zeros where None.
    segment_ids_BT: integers. The slots are emptied where they change, and the given states belong to the first segment.
    exclusive: a token reads the slots before it is written to them.
    normalize: divide by z, and leave out slots whose z is 0. If False, o_t = sum_m p_m V_m, p = softmax_m(scale q_t
        K_m), and an empty slot takes part with zeros as its key and value.

    Returns o_BTHV in v's dtype, the logits' log-sum-exp [B, T, H] (-inf where all slots are empty), and the last
    states: keys [B, G, M, D + 1] (D without `normalize`) and values [B, G, M, V]. Raises ValueError when H is not a
    multiple of G.
    """
    B, _, H, D = q_BTHD.shape
    G = v_BTGV.shape[2]
    if H % G:
        raise ValueError(f"{H} query heads are not a multiple of {G} key-value heads")
    kernel = kernel_for("slots")
    if kernel is not None and q_BTHD.shape[1] > 1:
        options = {
            "scale": scale,
            "keys_BGMD": keys_BGMD,
            "values_BGMV": values_BGMV,
            "segment_ids_BT": segment_ids_BT,
            "exclusive": exclusive,
            "normalize": normalize,
        }
        found = kernel(q_BTHD, k_BTGD, v_BTGV, w_BTGM, log_a, **options)
        if found is not None:
            return found
    dtype = torch.promote_types(v_BTGV.dtype, torch.float32)
    q, k, w = q_BTHD.to(dtype), k_BTGD.to(dtype), w_BTGM.to(dtype)
    log_a = None if log_a is None else log_a.to(dtype)
    keys = w.new_zeros(B, G, w.shape[3], D + normalize) if keys_BGMD is None else keys_BGMD.to(dtype)
    with torch.autocast(v_BTGV.device.type, enabled=False):
        if normalize:
            q, k = with_normalizer(q, k)
        in_one_graph = is_exporting() or (torch.compiler.is_compiling() and not w.is_cuda)
        transposed = _by_token if in_one_graph else _in_chunks
        read, keys = transposed(q, k, w, log_a, keys, segment_ids_BT, exclusive)
        weights, lse = slot_weights(read, scale, G, normalize)
        o, _, values = chunk_gla(
            weights,
            w,
            v_BTGV.to(dtype),
            log_a,
            initial_state=values_BGMV,
            segment_ids_BT=segment_ids_BT,
            exclusive=exclusive,
        )
    return o.to(v_BTGV.dtype), lse, keys, values


def with_normalizer(q_BTHD: Tensor, k_BTGD: Tensor) -> tuple[Tensor, Tensor]:
    """Keys with a last column of ones, whose state is the slots' normalizers, and one more query per key-value head,
    after its R query heads, that reads this column: [B, T, G (R + 1), D + 1] and [B, T, G, D + 1]."""
    q = nnf.pad(q_BTHD.unflatten(2, (k_BTGD.shape[2], -1)), (0, 1, 0, 1))
    one = nnf.pad(q.new_ones(1, 1), (q.shape[-1] - 1, 0, q.shape[-2] - 1, 0))
    return (q + one).flatten(2, 3), nnf.pad(k_BTGD, (0, 1), value=1)


def slot_weights(read: Tensor, scale: float, G: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """The weights [B, T, H, M] with which values are read, and the logits' log-sum-exp [B, T, H].

    read: the products of queries and slots' keys, [B, T, H, M]. With `normalize`, those of `with_normalizer`: the keys
        are not yet divided by the normalizers, and each key-value head has one more row, which is the normalizers.
    """
    if not normalize:
        logits = read * scale
        return logits.softmax(-1), logits.logsumexp(-1)
    read_BTGRM = read.unflatten(2, (G, -1))
    logits, normalizer = read_BTGRM[:, :, :, :-1] * scale, read_BTGRM[:, :, :, -1:]
    empty = normalizer <= 0
    nothing = empty.all(-1, keepdim=True)
    normalizer = normalizer.masked_fill(empty, 1)
    logits = (logits / normalizer).masked_fill(empty, -torch.inf).masked_fill(nothing, 0)
    weights = (logits.softmax(-1) / normalizer).masked_fill(empty, 0).flatten(2, 3)
    return weights, logits.logsumexp(-1).masked_fill(nothing[..., 0], -torch.inf).flatten(2, 3)


class _Transposed(torch.autograd.Function):
    """K_t q_t, [B, T, H, M], and the last K. Differentiable with respect to all of its tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        w: Tensor,
        log_a: Tensor | None,
        state: Tensor,
        segment_ids_BT: Tensor | None,
        exclusive: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, w, log_a, state, segment_ids_BT)
        ctx.exclusive = exclusive
        x = q.new_zeros(*q.shape[:3], w.shape[3])
        o, last, (x, *_) = _run(x, k, w, log_a, state, segment_ids_BT, exclusive)
        return torch.autograd.grad(o, x, q)[0], last.detach()

    @staticmethod
    def backward(ctx: Any, dread: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
        q, k, w, log_a, state, segment_ids_BT = ctx.saved_tensors
        if torch.is_grad_enabled():
            return differentiable_gradients(_by_token, (*ctx.saved_tensors, ctx.exclusive), (dread, dlast))
        with torch.autocast(q.device.type, enabled=False):
            o, last, (_, *leaves) = _run(dread, k, w, log_a, state, segment_ids_BT, ctx.exclusive)
            dk, dw, dstate, *dlog_a = torch.autograd.grad((o, last), leaves, (q, dlast))
        return o.detach(), dk, dw, dlog_a[0] if dlog_a else None, dstate, None, None


@torch.compiler.disable
def _in_chunks(*given: Any) -> tuple[Tensor, Tensor]:
    """`_Transposed`, kept out of compiled graphs, because it calls autograd. `_by_token` would take minutes to compile
    for long rows."""
    read_and_last: tuple[Tensor, Tensor] = _Transposed.apply(*given)
    return read_and_last


def _by_token(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    log_a: Tensor | None,
    state: Tensor,
    segment_ids_BT: Tensor | None,
    exclusive: bool,
) -> tuple[Tensor, Tensor]:
    """Computes what `_Transposed` does, token by token: slow, but traceable into one graph, and differentiable any
    number of times."""
    reads = []
    for t in range(k.shape[1]):
        if segment_ids_BT is not None and t:
            state = state * (segment_ids_BT[:, t] == segment_ids_BT[:, t - 1])[:, None, None, None]
        decayed = state if log_a is None else state * log_a[:, t, :, :, None].exp()
        after = torch.addcmul(decayed, w[:, t, :, :, None], k[:, t, :, None])
        reads.append((q[:, t].unflatten(1, (k.shape[2], -1)) @ (state if exclusive else after).mT).flatten(1, 2))
        state = after
    return torch.stack(reads, 1), state


def _run(
    x: Tensor,
    k: Tensor,
    w: Tensor,
    log_a: Tensor | None,
    state: Tensor,
    segment_ids_BT: Tensor | None,
    exclusive: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """x_t K_t, the last K, and the leaves to differentiate with respect to: x, k, w, state and log_a (if given)."""
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [_own(t).requires_grad_() for t in (x, k, w, state, log_a) if t is not None]
        x, k, w, state, *gate = leaves
        o, _, last = chunk_gla(
            x,
            w,
            k,
            gate[0] if gate else None,
            initial_state=state,
            segment_ids_BT=None if segment_ids_BT is None else _own(segment_ids_BT),
            exclusive=exclusive,
        )
    return o, last, leaves


def _own(x: Tensor) -> Tensor:
    """A leaf with x's values. Inference tensors are copied, as they cannot be saved for a backward pass."""
    return x.clone() if x.is_inference() else x.detach()
