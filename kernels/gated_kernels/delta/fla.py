"""The delta recurrence by kernels of flash-linear-attention, where fla-core 0.6 is installed.

Two of its chunked kernels compute ours by other names. Both look up in the state before the decay, ours after it:

    Comba (2506.02475)         S_t = g_t S_{t-1} - beta_t k_t^T (p_t S_{t-1}) + beta_t k_t^T v_t,  p = r g, beta = 1
    diagonal plus low rank     S_t = D_t S_{t-1} + b_t^T (a_t S_{t-1}) + k_t^T v_t,                a = -r D, b = e

The first is for e = k and one gate a head, or none, in chunks of 64 tokens; the second for all else, in chunks of 16.
Their products are of the inputs' dtype, fp32 as one of TF32: only bf16 goes to them, fp32 is the torch op's. The
gradient of a gate is to them a difference of two sums, of which rounding leaves nothing where gates are nearly closed:
these are the torch op's, too. The package, which needs a GPU, is imported by the first call that it takes.

Shapes: B batch, T tokens, H query heads, G key-value heads, F feature size, V value size, N segments of all rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

# What e^-50 lets through is nothing in bf16, and sums of gates over a chunk are then right to 1e-3.
CLOSED = -50.0
STRONG = -2.0  # mean of the gates below which their gradients would be noise


@torch.compiler.disable
def delta(
    q_BTHF: Tensor,
    k_BTGF: Tensor,
    v_BTGV: Tensor,
    r_BTGF: Tensor,
    log_a: Tensor | None,
    *,
    e_BTGF: Tensor | None,
    state_BGFV: Tensor,
    segment_BT: Tensor | None,
) -> tuple[Tensor, Tensor] | None:
    """As `gated_kernels.delta`; None on a CPU, and with a warning once for what the kernels cannot do."""
    if not v_BTGV.is_cuda:
        return None
    given = (q_BTHF, k_BTGF, v_BTGV, r_BTGF, *(() if e_BTGF is None else (e_BTGF,)))
    if problem := _problem({x.dtype for x in given}, k_BTGF.shape[-1], v_BTGV.shape[-1], log_a):
        _warn_once(problem)
        return None
    return by_kernels(q_BTHF, k_BTGF, v_BTGV, r_BTGF, log_a, e_BTGF, state_BGFV, segment_BT)


def by_kernels(
    q_BTHF: Tensor,
    k_BTGF: Tensor,
    v_BTGV: Tensor,
    r_BTGF: Tensor,
    log_a: Tensor | None,
    e_BTGF: Tensor | None,
    state_BGFV: Tensor,
    segment_BT: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """What `delta` returns. Theirs has as many heads everywhere, and documents of one row instead of segments of B."""
    B, T, H, _ = q_BTHF.shape
    R = H // v_BTGV.shape[2]
    gate = v_BTGV.new_zeros(*v_BTGV.shape[:3], 1) if log_a is None else log_a
    gate = gate.float().clamp(min=CLOSED)
    tensors = [q_BTHF, k_BTGF, v_BTGV, (r_BTGF * gate.exp()).to(r_BTGF.dtype), gate, e_BTGF]
    tensors = [x if x is None or x is q_BTHF else x.repeat_interleave(R, 2) for x in tensors]
    state, options = state_BGFV.float().repeat_interleave(R, 1), {}
    if segment_BT is not None:
        start_N, first_B, last_B = _segments(segment_BT)
        tensors = [None if x is None else x.flatten(0, 1)[None] for x in tensors]
        state = state.new_zeros(len(start_N), *state.shape[1:]).index_copy(0, first_B, state)
        options["cu_seqlens"] = torch.cat((start_N, start_N.new_tensor([B * T])))
    q, k, v, decayed, gate, e = tensors
    options |= {"scale": 1.0, "initial_state": state, "output_final_state": True}
    if e is None and gate.shape[-1] == 1:
        one = torch.ones_like(gate[..., 0], dtype=q.dtype)
        o, last = comba()(q, k, v, decayed, gate[..., 0].contiguous(), one, **options)
    else:
        gate = gate.expand(k.shape).contiguous()
        o, last = low_rank()(q, k, v, -decayed, k if e is None else e, gate, **options)
    if segment_BT is not None:
        o, last = o[0].unflatten(0, (B, T)), last[last_B]
    return o, last[:, ::R]


def _segments(segment_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where the segments of all rows begin in [B T], and which are the first and the last of each row."""
    new_BT = torch.ones_like(segment_BT, dtype=torch.bool)
    new_BT[:, 1:] = segment_BT[:, 1:] != segment_BT[:, :-1]
    index_BT = (new_BT.flatten().cumsum(0) - 1).view(segment_BT.shape)
    return new_BT.flatten().nonzero()[:, 0], index_BT[:, 0], index_BT[:, -1]


def _problem(dtypes: set[torch.dtype], F: int, V: int, log_a: Tensor | None) -> str | None:
    if other := dtypes - {torch.bfloat16}:
        return " beside ".join(sorted(map(str, other)))
    if not 16 <= F <= 256 or V < 16:
        return f"{F} features and {V} values a head"
    if log_a is not None and log_a.requires_grad and torch.is_grad_enabled() and log_a.mean() < STRONG:
        return f"the gradient of gates whose logs are below {STRONG:.0f} in the mean"
    return None


@cache
def _warn_once(problem: str) -> None:
    warnings.warn(f"delta runs in torch, the kernels of fla-core do not take {problem}", stacklevel=4)


def comba() -> Callable[..., Any]:
    from fla.ops.comba import chunk_comba

    return chunk_comba


def low_rank() -> Callable[..., Any]:
    from fla.ops.generalized_delta_rule import chunk_dplr_delta_rule

    return chunk_dplr_delta_rule
