"""Gated linear attention with a gate per feature in Triton kernels.

Matrix products accumulate in fp32. Their operands have the inputs' precision: bf16 is used as it is, fp32 as three TF32
products, and fp16 as one TF32 product, which represents it exactly and does not overflow. The backward pass recomputes
everything, so only the inputs are saved. A state belongs to a key-value head and is never repeated.

bf16 inputs have their own kernels (`bf16.py`), because most of their chunks need no halving into levels. fp32 and fp16
inputs run in `fp32.py`. None of these kernels computes a normalizer: the write mask is passed as one more column of the
values. Only those for bf16 take queries with a log-sum-exp. For the others, exp(q - lse) is computed beforehand, once
in each pass.

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
    with_mask_column,
)
from gated_kernels.common.interpreter import INTERPRETED
from gated_kernels.common.tiles import contiguous
from gated_kernels.gla import bf16, fp32


@torch.library.custom_op("gated_kernels::gla", mutates_args=())
def forward(
    q: Tensor,
    q_lse: Tensor | None,
    k: Tensor,
    v: Tensor,
    log_a: Tensor,
    state: Tensor,
    segment: Tensor | None,
    exclusive: bool,
) -> tuple[Tensor, Tensor]:
    """The outputs and the last state."""
    q, q_lse, k, v, log_a, state, segment = contiguous(q, q_lse, k, v, log_a, state, segment)
    with torch.cuda.device_of(v):
        if (dtype := promoted(q, k, v)) == torch.bfloat16:
            return bf16.forward(q, q_lse, k, v, log_a, state, segment, exclusive)
        q = q if q_lse is None else features_of(q, q_lse, dtype)
        return fp32.forward(q, k, v, log_a, state, segment, exclusive)


@forward.register_fake
def _(q: Tensor, q_lse: Tensor | None, k: Tensor, v: Tensor, log_a: Tensor, state: Tensor, *_: Any) -> tuple:
    return v.new_empty(*q.shape[:3], v.shape[-1]), state.new_empty(state.shape)


@torch.library.custom_op("gated_kernels::gla_backward", mutates_args=())
def backward(
    q: Tensor,
    q_lse: Tensor | None,
    k: Tensor,
    v: Tensor,
    log_a: Tensor,
    state: Tensor,
    segment: Tensor | None,
    exclusive: bool,
    do: Tensor,
    dlast: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, q_lse (empty where there is none), k, v, log_a and the state."""
    q, q_lse, k, v, log_a, state, segment = contiguous(q, q_lse, k, v, log_a, state, segment)
    do, dlast = contiguous(do, dlast)
    none = v.new_empty(0, dtype=torch.float32)
    with torch.cuda.device_of(v):
        if (dtype := promoted(q, k, v)) == torch.bfloat16:
            found = bf16.backward(q, q_lse, k, v, log_a, state, segment, exclusive, do, dlast)
            dq, dlse, dk, dv, dlog_a, dstate = found
            return dq, none if dlse is None else dlse, dk, dv, dlog_a, dstate
        phi = q if q_lse is None else features_of(q, q_lse, dtype)
        dphi, dk, dv, dlog_a, dstate = fp32.backward(phi, k, v, log_a, state, segment, exclusive, do, dlast)
    if q_lse is None:
        return dphi, none, dk, dv, dlog_a, dstate
    dlogits = dphi.float() * phi
    return dlogits.to(q.dtype), -dlogits.sum(-1), dk, dv, dlog_a, dstate


@backward.register_fake
def _(q: Tensor, q_lse: Tensor | None, k: Tensor, v: Tensor, log_a: Tensor, state: Tensor, *_: Any) -> tuple:
    dq, dk, dv, dlog_a, dstate = (x.new_empty(x.shape) for x in (q, k, v, log_a, state))
    return dq, v.new_empty(0 if q_lse is None else q_lse.shape, dtype=torch.float32), dk, dv, dlog_a, dstate


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.exclusive = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, do: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
    dq, dlse, dk, dv, dlog_a, dstate = backward(*ctx.saved_tensors, ctx.exclusive, do, dlast)
    return dq, None if ctx.saved_tensors[1] is None else dlse, dk, dv, dlog_a, dstate, None, None


forward.register_autograd(_differentiate, setup_context=_save)


def triton_gla(
    q_BTHF: Tensor,
    k_BTGF: Tensor,
    v_BTGV: Tensor,
    log_a: Tensor,
    *,
    write_mask_BTG: Tensor | None = None,
    initial_state: Tensor | None = None,
    segment_ids_BT: Tensor | None = None,
    exclusive: bool = False,
    q_lse_BTH: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor] | None:
    """Same as `gated_kernels.chunk_gla` with a gate per feature.

    None on a CPU, and for what the kernels do not support, with a warning the first time.
    """
    if not (v_BTGV.is_cuda or INTERPRETED.value):
        return None
    if why := unsupported(q_BTHF, k_BTGF, v_BTGV, log_a, write_mask_BTG, initial_state, segment_ids_BT, q_lse_BTH):
        if not torch.compiler.is_compiling():
            warn_once("gla", why)
        return None
    state = first_state(v_BTGV, k_BTGF.shape[-1], write_mask_BTG, initial_state)
    q_lse = None if q_lse_BTH is None else q_lse_BTH.float()
    v = v_BTGV if write_mask_BTG is None else with_mask_column(v_BTGV, write_mask_BTG)
    o, last = forward(q_BTHF, q_lse, k_BTGF, v, log_a, state, segment_ids_BT, exclusive)
    if write_mask_BTG is None:
        return o, None, last
    return o[..., :-1], o[..., -1].float(), last
