"""Gated linear attention with one gate per head, or none, in Triton kernels: the op around `launch.py`.

For queries with a log-sum-exp, exp(q - lse) is computed once in each pass, so that it is not saved in between.

Shapes: B batch, T tokens, H query heads, G key-value heads, F feature size, V value size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gated_kernels.common.gated_inputs import (
    features_of,
    first_state,
    promoted,
    unsupported,
    warn_once,
)
from gated_kernels.common.interpreter import INTERPRETED
from gated_kernels.common.tiles import contiguous
from gated_kernels.simple_gla import launch


@torch.library.custom_op("gated_kernels::simple_gla", mutates_args=())
def forward(
    q: Tensor,
    q_lse: Tensor | None,
    k: Tensor,
    v: Tensor,
    log_a: Tensor | None,
    write_mask: Tensor | None,
    state: Tensor,
    segment: Tensor | None,
    exclusive: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The outputs, the normalizer (empty without `write_mask`) and the last state."""
    q, q_lse, k, v, log_a, write_mask, state, segment = contiguous(q, q_lse, k, v, log_a, write_mask, state, segment)
    if q_lse is not None:
        q = features_of(q, q_lse, promoted(q, k, v))
    with torch.cuda.device_of(v):
        return launch.forward(q, k, v, log_a, write_mask, state, segment, exclusive)


@forward.register_fake
def _(
    q: Tensor,
    q_lse: Tensor | None,
    k: Tensor,
    v: Tensor,
    log_a: Tensor | None,
    write_mask: Tensor | None,
    state: Tensor,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    normalizer = v.new_empty(0 if write_mask is None else q.shape[:3], dtype=torch.float32)
    return v.new_empty(*q.shape[:3], v.shape[-1]), normalizer, state.new_empty(state.shape)


@torch.library.custom_op("gated_kernels::simple_gla_backward", mutates_args=())
def backward(
    q: Tensor,
    q_lse: Tensor | None,
    k: Tensor,
    v: Tensor,
    log_a: Tensor | None,
    write_mask: Tensor | None,
    state: Tensor,
    segment: Tensor | None,
    exclusive: bool,
    do: Tensor,
    dnormalizer: Tensor,
    dlast: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, q_lse (empty without one), k, v, log_a (likewise) and the state."""
    q, q_lse, k, v, log_a, write_mask, state, segment = contiguous(q, q_lse, k, v, log_a, write_mask, state, segment)
    do, dnormalizer, dlast = contiguous(do, dnormalizer, dlast)
    phi = q if q_lse is None else features_of(q, q_lse, promoted(q, k, v))
    with torch.cuda.device_of(v):
        dphi, dk, dv, dlog_a, dstate = launch.backward(
            phi, k, v, log_a, write_mask, state, segment, exclusive, do, dnormalizer, dlast
        )
    dlog_a = v.new_empty(0) if dlog_a is None else dlog_a
    if q_lse is None:
        return dphi, v.new_empty(0, dtype=torch.float32), dk, dv, dlog_a, dstate
    dlogits = dphi.float() * phi
    return dlogits.to(q.dtype), -dlogits.sum(-1), dk, dv, dlog_a, dstate


@backward.register_fake
def _(
    q: Tensor,
    q_lse: Tensor | None,
    k: Tensor,
    v: Tensor,
    log_a: Tensor | None,
    write_mask: Tensor | None,
    state: Tensor,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, dstate = (x.new_empty(x.shape) for x in (q, k, v, state))
    dlse = v.new_empty(0 if q_lse is None else q_lse.shape, dtype=torch.float32)
    return dq, dlse, dk, dv, v.new_empty(0) if log_a is None else log_a.new_empty(log_a.shape), dstate


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.exclusive = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, do: Tensor, dnormalizer: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
    _, q_lse, _, _, log_a, *_ = ctx.saved_tensors
    dq, dlse, dk, dv, dlog_a, dstate = backward(*ctx.saved_tensors, ctx.exclusive, do, dnormalizer, dlast)
    dlse, dlog_a = None if q_lse is None else dlse, None if log_a is None else dlog_a
    return dq, dlse, dk, dv, dlog_a, None, dstate, None, None


forward.register_autograd(_differentiate, setup_context=_save)


def triton_simple_gla(
    q_BTHF: Tensor,
    k_BTGF: Tensor,
    v_BTGV: Tensor,
    log_a: Tensor | None,
    *,
    write_mask_BTG: Tensor | None = None,
    initial_state: Tensor | None = None,
    segment_ids_BT: Tensor | None = None,
    exclusive: bool = False,
    q_lse_BTH: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor] | None:
    """Same as `gated_kernels.chunk_simple_gla`.

    None on a CPU, and for what the kernels do not support, with a warning the first time.
    """
    if not (v_BTGV.is_cuda or INTERPRETED.value):
        return None
    if why := unsupported(q_BTHF, k_BTGF, v_BTGV, log_a, write_mask_BTG, initial_state, segment_ids_BT, q_lse_BTH):
        if not torch.compiler.is_compiling():
            warn_once("simple_gla", why)
        return None
    state = first_state(v_BTGV, k_BTGF.shape[-1], write_mask_BTG, initial_state)
    q_lse = None if q_lse_BTH is None else q_lse_BTH.float()
    o, normalizer, last = forward(
        q_BTHF, q_lse, k_BTGF, v_BTGV, log_a, write_mask_BTG, state, segment_ids_BT, exclusive
    )
    return o, None if write_mask_BTG is None else normalizer, last
