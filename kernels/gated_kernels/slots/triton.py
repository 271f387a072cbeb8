"""Attention over slots with inputs in bf16: both reads run in the Triton kernels of gated linear attention.

The keys' read is a transposed one (see `gla/bf16.py`), the values' read an ordinary one. Matrix products have operands
in bf16 and accumulate in fp32. Logits, normalizers and the softmax between the reads are in fp32.

Shapes: B batch, T tokens, H query heads, G key-value heads, D key size, V value size, M slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gated_kernels.common.gated_inputs import is_per_head, promoted, unfit, warn_once
from gated_kernels.common.interpreter import INTERPRETED
from gated_kernels.common.tiles import contiguous
from gated_kernels.gla import bf16
from gated_kernels.gla.triton import triton_gla
from gated_kernels.simple_gla.triton import triton_simple_gla
from gated_kernels.slots.chunk import slot_weights, with_normalizer


@torch.library.custom_op("gated_kernels::slot_logits", mutates_args=())
def forward(
    q: Tensor, k: Tensor, w: Tensor, log_a: Tensor, state: Tensor, segment: Tensor | None, exclusive: bool
) -> tuple[Tensor, Tensor]:
    """K_t q_t in fp32, [B, T, H, M], and the last K."""
    q, k, w, log_a, state, segment = contiguous(q, k, w, log_a, state, segment)
    with torch.cuda.device_of(k):
        return bf16.transposed_forward(q, w, k, log_a, state, segment, exclusive)


@forward.register_fake
def _(q: Tensor, k: Tensor, w: Tensor, log_a: Tensor, state: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], w.shape[-1], dtype=torch.float32), state.new_empty(state.shape)


@torch.library.custom_op("gated_kernels::slot_logits_backward", mutates_args=())
def backward(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    log_a: Tensor,
    state: Tensor,
    segment: Tensor | None,
    exclusive: bool,
    dlogits: Tensor,
    dlast: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, w, log_a and the state."""
    q, k, w, log_a, state, segment = contiguous(q, k, w, log_a, state, segment)
    dlogits, dlast = contiguous(dlogits.to(q.dtype), dlast)
    with torch.cuda.device_of(k):
        dq, dw, dk, dlog_a, dstate = bf16.transposed_backward(q, w, k, log_a, state, segment, exclusive, dlogits, dlast)
    return dq, dk, dw, dlog_a, dstate


@backward.register_fake
def _(q: Tensor, k: Tensor, w: Tensor, log_a: Tensor, state: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, k, w, log_a, state))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.exclusive = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, dlogits: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
    return *backward(*ctx.saved_tensors, ctx.exclusive, dlogits, dlast), None, None


forward.register_autograd(_differentiate, setup_context=_save)


def triton_slots(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Same as `gated_kernels.chunk_slots` for queries, keys and values in bf16, to which the write weights are rounded.

    None on a CPU and for other dtypes: then the torch op runs, whose reads have kernels of their own. Also None, with a
    warning the first time, for what the kernels do not support.
    """
    if not (v_BTGV.is_cuda or INTERPRETED.value) or promoted(q_BTHD, k_BTGD, v_BTGV) != torch.bfloat16:
        return None
    B, T, _, D = q_BTHD.shape
    G, M = w_BTGM.shape[2:]
    if why := unfit(
        q_BTHD.device,
        (k_BTGD, (B, T, G, D)),
        (v_BTGV, (B, T, G, v_BTGV.shape[3])),
        (w_BTGM, (B, T, G, M)),
        (log_a, (B, T, G, 1 if log_a is None else log_a.shape[-1])),
        (keys_BGMD, (B, G, M, D + normalize)),
        (values_BGMV, (B, G, M, v_BTGV.shape[3])),
        (segment_ids_BT, (B, T)),
    ):
        if not torch.compiler.is_compiling():
            warn_once("slots", why)
        return None
    with torch.autocast(v_BTGV.device.type, enabled=False):
        q, k, w = q_BTHD, k_BTGD, w_BTGM.to(torch.bfloat16)
        if normalize:
            q, k = with_normalizer(q, k)
        gates = w_BTGM.new_zeros(1, dtype=torch.float32) if log_a is None else log_a.float()
        keys = w_BTGM.new_zeros(B, G, M, k.shape[-1], dtype=torch.float32) if keys_BGMD is None else keys_BGMD.float()
        read, keys = forward(q, k, w, gates.expand(B, T, G, M), keys, segment_ids_BT, exclusive)
        weights, lse = slot_weights(read, scale, G, normalize)
        read_values: Callable[..., Any] = triton_simple_gla if is_per_head(log_a) else triton_gla
        o, _, values = read_values(
            weights.to(torch.bfloat16),
            w,
            v_BTGV,
            log_a,
            initial_state=values_BGMV,
            segment_ids_BT=segment_ids_BT,
            exclusive=exclusive,
        )
    return o, lse, keys, values
