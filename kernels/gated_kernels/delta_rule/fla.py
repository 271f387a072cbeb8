"""The delta recurrence by a kernel of flash-linear-attention, where fla-core 0.6 is installed: for what our kernels
leave, heads of more than 128.

Its chunked recurrence of diagonal-plus-low-rank transitions, RWKV-7's, is ours but for where it looks up: in the state
before the decay.

    S_t = D_t S_{t-1} + b_t^T (a_t S_{t-1}) + k_t^T v_t,   so a = -r D and b = e

Its products are of the inputs' dtype, fp32 as one of TF32: only bf16 goes to it, fp32 is the torch op's. To it the
gradient of a gate is a difference of two sums, of which rounding leaves nothing where gates are nearly closed: these
are the torch op's, too, but in a CUDA graph, where nothing can be looked at. Chunks are its default of 16 tokens: its
way through 64, for gates of a known bound, loses digits. Its kernels for one gate per head, of the gated delta rule and
Comba, are left alone: backwards they refuse Triton 3.4 to 3.7.0 on a Hopper chip, which compiles them wrong. The
package, which needs a GPU, is imported by the first call that it takes.

Shapes: B batch, T tokens, H query heads, G key-value heads, R = H / G, F feature size, V value size, N segments of all
rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gated_kernels.common.tracing import reads_no_values
from gated_kernels.delta_rule.chunk import read_one_later, reads_one_earlier

# What e^-50 lets through is nothing in bf16, and sums of gates over a chunk are then right to 1e-3.
CLOSED = -50.0
STRONG = -2.0  # mean of the log gates below which their gradients would be noise


@torch.compiler.disable
def fla_delta_rule(
    q_BTHF: Tensor,
    k_BTGF: Tensor,
    v_BTGV: Tensor,
    r_BTGF: Tensor,
    log_a: Tensor | None,
    *,
    e_BTGF: Tensor | None,
    initial_state: Tensor,
    segment_ids_BT: Tensor | None,
    exclusive: bool = False,
) -> tuple[Tensor, Tensor] | None:
    """As `gated_kernels.chunk_delta_rule`; None on a CPU, and with a warning once for what the kernel cannot do."""
    if not v_BTGV.is_cuda:
        return None
    given = (q_BTHF, k_BTGF, v_BTGV, r_BTGF, *(() if e_BTGF is None else (e_BTGF,)))
    if problem := _problem({x.dtype for x in given}, k_BTGF.shape[-1], v_BTGV.shape[-1], log_a):
        _warn_once(problem)
        return None
    q = reads_one_earlier(q_BTHF, segment_ids_BT) if exclusive else q_BTHF
    o_BTHV, last = by_kernel(q, k_BTGF, v_BTGV, r_BTGF, log_a, e_BTGF, initial_state, segment_ids_BT)
    o_BTHV = read_one_later(o_BTHV, q_BTHF, initial_state) if exclusive else o_BTHV
    return o_BTHV.to(v_BTGV.dtype), last


def by_kernel(
    q_BTHF: Tensor,
    k_BTGF: Tensor,
    v_BTGV: Tensor,
    r_BTGF: Tensor,
    log_a: Tensor | None,
    e_BTGF: Tensor | None,
    initial_state: Tensor,
    segment_ids_BT: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """What `delta` returns. Theirs has as many heads everywhere, and documents of one row instead of segments of B."""
    B, T, H, _ = q_BTHF.shape
    R = H // v_BTGV.shape[2]
    gate = k_BTGF.new_zeros(1) if log_a is None else log_a
    gate = gate.float().clamp(min=CLOSED).expand(k_BTGF.shape)
    a_BTGF = -(r_BTGF * gate.exp()).to(r_BTGF.dtype)
    shared = (k_BTGF, v_BTGV, a_BTGF, k_BTGF if e_BTGF is None else e_BTGF, gate)
    tensors = [q_BTHF, *(x.repeat_interleave(R, 2) for x in shared)]
    state = initial_state.float().repeat_interleave(R, 1)
    options: dict[str, Any] = {"scale": 1.0, "output_final_state": True}
    if segment_ids_BT is None:
        o_BTHV, last = kernel()(*tensors, initial_state=state, **options)
    else:
        start_N, first_B, last_B = _segments(segment_ids_BT)
        options["cu_seqlens"] = torch.cat((start_N, start_N.new_tensor([B * T])))
        state = state.new_zeros(len(start_N), *state.shape[1:]).index_copy(0, first_B, state)
        o, last = kernel()(*(x.flatten(0, 1)[None] for x in tensors), initial_state=state, **options)
        o_BTHV, last = o[0].unflatten(0, (B, T)), last[last_B]
    return o_BTHV, last[:, ::R]


def _segments(segment_ids_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where the segments of all rows begin in [B T], and which are the first and the last of each row."""
    new_BT = torch.ones_like(segment_ids_BT, dtype=torch.bool)
    new_BT[:, 1:] = segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1]
    index_BT = (new_BT.flatten().cumsum(0) - 1).view(segment_ids_BT.shape)
    return new_BT.flatten().nonzero()[:, 0], index_BT[:, 0], index_BT[:, -1]


def _problem(dtypes: set[torch.dtype], F: int, V: int, log_a: Tensor | None) -> str | None:
    if other := dtypes - {torch.bfloat16}:
        return " beside ".join(sorted(map(str, other)))
    if not 16 <= F <= 256 or V < 16:
        return f"{F} features and {V} values a head"
    # in a CUDA graph nobody can look: the kernel then keeps even gates that are nearly closed
    looks = torch.is_grad_enabled() and not reads_no_values()
    if looks and log_a is not None and log_a.requires_grad and log_a.mean() < STRONG:
        return f"the gradient of gates whose logs are below {STRONG:.0f} in the mean"
    return None


@cache
def _warn_once(problem: str) -> None:
    warnings.warn(f"delta runs in torch, because the kernel of fla-core does not support {problem}", stacklevel=4)


def kernel() -> Callable[..., Any]:
    from fla.ops.generalized_delta_rule import chunk_dplr_delta_rule

    return chunk_dplr_delta_rule
