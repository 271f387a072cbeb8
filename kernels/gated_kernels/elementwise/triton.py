"""The elementwise recurrence in Triton kernels: the op around `launch.py`.

Shapes: B batch, T tokens, H query heads, G key-value heads, F feature size, V value size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gated_kernels.common.gated_inputs import promoted, unfit, warn_once
from gated_kernels.common.interpreter import INTERPRETED
from gated_kernels.common.tiles import PRODUCTS, contiguous
from gated_kernels.elementwise import launch


@torch.library.custom_op("gated_kernels::elementwise", mutates_args=())
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dt: Tensor,
    log_A: Tensor,
    state: Tensor,
    segment: Tensor | None,
    exclusive: bool,
) -> tuple[Tensor, Tensor]:
    """The outputs and the last state."""
    v, log_A, state, segment = contiguous(v, log_A, state, segment)
    with torch.cuda.device_of(v):
        return launch.forward(q, k, v, dt, log_A, state, segment, exclusive)


@forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, dt: Tensor, log_A: Tensor, state: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return v.new_empty(*v.shape[:2], q.shape[2], v.shape[-1]), state.new_empty(state.shape)


@torch.library.custom_op("gated_kernels::elementwise_backward", mutates_args=())
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dt: Tensor,
    log_A: Tensor,
    state: Tensor,
    segment: Tensor | None,
    exclusive: bool,
    do: Tensor,
    dlast: Tensor,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and dt (empty where one is not `wanted`), log_A and the state."""
    v, log_A, state, segment, do, dlast = contiguous(v, log_A, state, segment, do, dlast)
    with torch.cuda.device_of(v):
        found = launch.backward(q, k, v, dt, log_A, state, segment, exclusive, do, dlast, wanted)
    *of_tokens, dlog_A, dstate = found
    dq, dk, dv, ddt = (v.new_empty(0) if x is None else x for x in of_tokens)
    return dq, dk, dv, ddt, dlog_A, dstate


@backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dt: Tensor,
    log_A: Tensor,
    state: Tensor,
    segment: Tensor | None,
    exclusive: bool,
    do: Tensor,
    dlast: Tensor,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, ddt = (x.new_empty(x.shape) if w else v.new_empty(0) for x, w in zip((q, k, v, dt), wanted))
    return dq, dk, dv, ddt, log_A.new_empty(log_A.shape), state.new_empty(state.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.exclusive = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, do: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
    wanted = list(ctx.needs_input_grad[:4])
    *of_tokens, dlog_A, dstate = backward(*ctx.saved_tensors, ctx.exclusive, do, dlast, wanted)
    return *(x if w else None for x, w in zip(of_tokens, wanted)), dlog_A, dstate, None, None


forward.register_autograd(_differentiate, setup_context=_save)


def triton_elementwise(
    q_BTHF: Tensor,
    k_BTGF: Tensor,
    v_BTGV: Tensor,
    dt_BTGV: Tensor,
    log_A_GFV: Tensor,
    *,
    initial_state: Tensor | None = None,
    segment_ids_BT: Tensor | None = None,
    exclusive: bool = False,
) -> tuple[Tensor, Tensor] | None:
    """As `gated_kernels.chunk_elementwise`.

    None on a CPU, and with a warning once for what the kernels do not support.
    """
    if not (v_BTGV.is_cuda or INTERPRETED.value):
        return None
    if why := _unsupported(q_BTHF, k_BTGF, v_BTGV, dt_BTGV, log_A_GFV, initial_state, segment_ids_BT):
        if not torch.compiler.is_compiling():
            warn_once("elementwise", why)
        return None
    state = initial_state
    if state is None:
        B, _, G, V = v_BTGV.shape
        state = v_BTGV.new_zeros(B, G, k_BTGF.shape[-1], V, dtype=torch.float32)
    return forward(q_BTHF, k_BTGF, v_BTGV, dt_BTGV, log_A_GFV, state.float(), segment_ids_BT, exclusive)


def _unsupported(
    q_BTHF: Tensor,
    k_BTGF: Tensor,
    v_BTGV: Tensor,
    dt_BTGV: Tensor,
    log_A_GFV: Tensor,
    initial_state: Tensor | None,
    segment_ids_BT: Tensor | None,
) -> str | None:
    """What the kernels do not support of this, or None."""
    if (dtype := promoted(q_BTHF, k_BTGF, v_BTGV, dt_BTGV, log_A_GFV)) not in PRODUCTS:
        return f"inputs in {str(dtype).removeprefix('torch.')}"
    B, T, G, V = v_BTGV.shape
    H, F = q_BTHF.shape[2:]
    if F > launch.LARGEST:
        return f"{F} features a head"
    return unfit(
        v_BTGV.device,
        (q_BTHF, (1, 1, H, F) if q_BTHF.shape[:2] == (1, 1) else (B, T, H, F)),
        (k_BTGF, (B, T, G, F)),
        (dt_BTGV, (B, T, G, V)),
        (log_A_GFV, (G, F, V)),
        (initial_state, (B, G, F, V)),
        (segment_ids_BT, (B, T)),
    )
