"""The delta rule in Triton kernels: the op around `launch.py` (one gate per head, or none) and `by_feature_launch.py`.

The kernels know one key to erase and write along. A token that erases along another, e, is two tokens to them: the
first erases along e and writes a value of 0, the second writes along k and looks up nothing.

Shapes: B batch, T tokens, H query heads, G key-value heads, F feature size, V value size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gated_kernels.common.gated_inputs import is_per_head, promoted, sizes_of, unfit, warn_once
from gated_kernels.common.interpreter import INTERPRETED
from gated_kernels.common.tiles import PRODUCTS, contiguous
from gated_kernels.delta_rule import by_feature_launch, launch
from gated_kernels.delta_rule import step as of_one_token


@torch.library.custom_op("gated_kernels::delta_rule", mutates_args=())
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    log_a: Tensor | None,
    state: Tensor,
    segment: Tensor | None,
    exclusive: bool,
) -> tuple[Tensor, Tensor]:
    """The outputs and the last state."""
    q, k, v, r, log_a, state, segment = contiguous(q, k, v, r, log_a, state, segment)
    with torch.cuda.device_of(v):
        if log_a is not None and not is_per_head(log_a):
            return by_feature_launch.forward(q, k, v, r, log_a, state, segment, exclusive)
        return launch.forward(q, k, v, r, log_a, state, segment, exclusive)


@forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, r: Tensor, log_a: Tensor | None, state: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    return v.new_empty(*q.shape[:3], v.shape[-1]), state.new_empty(state.shape)


@torch.library.custom_op("gated_kernels::delta_rule_backward", mutates_args=())
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    log_a: Tensor | None,
    state: Tensor,
    segment: Tensor | None,
    exclusive: bool,
    do: Tensor,
    dlast: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v, r, log_a (empty where there is none) and the state."""
    q, k, v, r, log_a, state, segment = contiguous(q, k, v, r, log_a, state, segment)
    do, dlast = contiguous(do, dlast)
    passed = by_feature_launch if log_a is not None and not is_per_head(log_a) else launch
    with torch.cuda.device_of(v):
        dq, dk, dv, dr, dlog_a, dstate = passed.backward(q, k, v, r, log_a, state, segment, exclusive, do, dlast)
    return dq, dk, dv, dr, v.new_empty(0) if dlog_a is None else dlog_a, dstate


@backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, r: Tensor, log_a: Tensor | None, state: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, dr, dstate = (x.new_empty(x.shape) for x in (q, k, v, r, state))
    return dq, dk, dv, dr, v.new_empty(0) if log_a is None else log_a.new_empty(log_a.shape), dstate


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.exclusive = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, do: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
    log_a = ctx.saved_tensors[4]
    dq, dk, dv, dr, dlog_a, dstate = backward(*ctx.saved_tensors, ctx.exclusive, do, dlast)
    return dq, dk, dv, dr, None if log_a is None else dlog_a, dstate, None, None


forward.register_autograd(_differentiate, setup_context=_save)


@torch.library.custom_op("gated_kernels::delta_rule_step", mutates_args=())
def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    log_a: Tensor | None,
    e: Tensor | None,
    state: Tensor,
    exclusive: bool,
) -> tuple[Tensor, Tensor]:
    """The outputs and the state after one token."""
    q, k, v, r, log_a, e, state = contiguous(q, k, v, r, log_a, e, state)
    with torch.cuda.device_of(v):
        return of_one_token.step(q, k, v, r, log_a, e, state, exclusive)


@step.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    log_a: Tensor | None,
    e: Tensor | None,
    state: Tensor,
    exclusive: bool,
) -> tuple[Tensor, Tensor]:
    return v.new_empty(*q.shape[:3], v.shape[-1]), state.new_empty(state.shape)


def triton_delta_rule_step(
    q_BTHF: Tensor,
    k_BTGF: Tensor,
    v_BTGV: Tensor,
    r_BTGF: Tensor,
    log_a: Tensor | None,
    *,
    e_BTGF: Tensor | None,
    initial_state: Tensor,
    exclusive: bool,
) -> tuple[Tensor, Tensor] | None:
    """As `gated_kernels.chunk_delta_rule` of one token. None on a CPU, for what the kernel does not support, and where
    gradients are wanted."""
    if not (v_BTGV.is_cuda or INTERPRETED.value):
        return None
    given = [q_BTHF, k_BTGF, v_BTGV, r_BTGF, initial_state, *(x for x in (log_a, e_BTGF) if x is not None)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        return None
    options = e_BTGF, initial_state, None
    if _unfit(q_BTHF, k_BTGF, v_BTGV, r_BTGF, log_a, *options) or q_BTHF.shape[-1] > of_one_token.LARGEST:
        return None
    return step(q_BTHF, k_BTGF, v_BTGV, r_BTGF, log_a, e_BTGF, initial_state, exclusive)


def triton_delta_rule(
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
) -> tuple[Tensor, Tensor] | None:
    """As `gated_kernels.chunk_delta_rule`.

    None on a CPU, and with a warning once for what the kernels do not support.
    """
    if not (v_BTGV.is_cuda or INTERPRETED.value):
        return None
    if why := _unsupported(q_BTHF, k_BTGF, v_BTGV, r_BTGF, log_a, e_BTGF, initial_state, segment_ids_BT):
        if not torch.compiler.is_compiling():
            warn_once("delta_rule", why, "in torch, or by fla-core where that takes it")
        return None
    B, _, G, V = v_BTGV.shape
    if initial_state is None:
        initial_state = v_BTGV.new_zeros(B, G, k_BTGF.shape[-1], V, dtype=torch.float32)
    q, k, v, r, segment = q_BTHF, k_BTGF, v_BTGV, r_BTGF, segment_ids_BT
    if e_BTGF is not None:
        k, v, r = _turns(e_BTGF, k), _turns(None, v), _turns(r, None)
        q = _turns(q, None) if exclusive else _turns(None, q)
        log_a = None if log_a is None else _turns(log_a, None)
        segment = None if segment is None else segment.repeat_interleave(2, 1)
    o, last = forward(q, k, v, r, log_a, initial_state.float(), segment, exclusive)
    if e_BTGF is not None:
        o = o[:, ::2] if exclusive else o[:, 1::2]
    return o, last


def _turns(first: Tensor | None, second: Tensor | None) -> Tensor:
    """[B, 2 T, ...]: a token of the first, one of the second, and so on; zeros of one that is not given."""
    given = [x for x in (first, second) if x is not None]
    first, second = (torch.zeros_like(given[0]) if x is None else x for x in (first, second))
    return torch.cat((first[:, :, None], second[:, :, None]), 2).flatten(1, 2)


def _unsupported(
    q_BTHF: Tensor,
    k_BTGF: Tensor,
    v_BTGV: Tensor,
    r_BTGF: Tensor,
    log_a: Tensor | None,
    e_BTGF: Tensor | None,
    initial_state: Tensor | None,
    segment_ids_BT: Tensor | None,
) -> str | None:
    """What the kernels of chunks do not support of this, or None."""
    given = q_BTHF, k_BTGF, v_BTGV, r_BTGF, log_a, e_BTGF, initial_state, segment_ids_BT
    if why := _unfit(*given):
        return why
    F, V = k_BTGF.shape[-1], v_BTGV.shape[-1]
    if max(F, V) > launch.LARGEST:
        return f"{F} features and {V} values a head"
    dtype = _dtype(q_BTHF, k_BTGF, v_BTGV, r_BTGF, e_BTGF)
    if not is_per_head(log_a) and dtype != torch.bfloat16:
        return f"a gate per feature in {str(dtype).removeprefix('torch.')}"
    return None


def _unfit(
    q_BTHF: Tensor,
    k_BTGF: Tensor,
    v_BTGV: Tensor,
    r_BTGF: Tensor,
    log_a: Tensor | None,
    e_BTGF: Tensor | None,
    initial_state: Tensor | None,
    segment_ids_BT: Tensor | None,
) -> str | None:
    """What no kernel supports of this, or None."""
    if (dtype := _dtype(q_BTHF, k_BTGF, v_BTGV, r_BTGF, e_BTGF)) not in PRODUCTS:
        return f"inputs in {str(dtype).removeprefix('torch.')}"
    B, T, _, G, F, V = sizes_of(q_BTHF, v_BTGV)
    return unfit(
        q_BTHF.device,
        (k_BTGF, (B, T, G, F)),
        (v_BTGV, (B, T, G, V)),
        (r_BTGF, (B, T, G, F)),
        (e_BTGF, (B, T, G, F)),
        (log_a, (B, T, G, 1 if is_per_head(log_a) else F)),
        (initial_state, (B, G, F, V)),
        (segment_ids_BT, (B, T)),
    )


def _dtype(*tensors: Tensor | None) -> torch.dtype:
    return promoted(*(x for x in tensors if x is not None))
