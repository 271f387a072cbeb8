"""The diagonal recurrence over a codebook's maps, by the Triton kernels of both, keeping only what it is given.

The maps of queries and keys, F numbers a head and token, are made once more in the backward pass, where with one gate a
head, or none, their gradients take their places. Forward, that of the queries is made where it is read (`read.py`), but
for gates per feature and large heads.

Shapes: B batch, T tokens, H query heads, G key-value heads, D head size, E size of a code, F codes, V value size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gated_kernels.codebook import triton as codebook
from gated_kernels.coded import read
from gated_kernels.diagonal import scalar
from gated_kernels.diagonal import triton as diagonal
from gated_kernels.diagonal.tiles import contiguous
from gated_kernels.interpreter import INTERPRETED


@torch.library.custom_op("gated_kernels::coded", mutates_args=())
def forward(
    q: Tensor,
    k: Tensor,
    q_turn: Tensor,
    q_shift: Tensor,
    q_log_tau: Tensor,
    k_turn: Tensor,
    k_shift: Tensor,
    k_log_tau: Tensor,
    codes: Tensor,
    v: Tensor,
    log_a: Tensor | None,
    written: Tensor | None,
    state: Tensor,
    segment: Tensor | None,
    exclusive: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The outputs, the mass (empty without `written`) and the last state."""
    of_q, phi_k = (q, q_turn, q_shift, q_log_tau, codes), codebook.forward(k, k_turn, k_shift, k_log_tau, codes)
    if read.takes(q, codes, log_a):
        return read.forward(of_q, phi_k, v, log_a, written, state, segment, exclusive)
    return diagonal.forward(codebook.forward(*of_q), None, phi_k, v, log_a, written, state, segment, exclusive)


@forward.register_fake
def _(q: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    v, _, written, state = given[8:12]
    mass = v.new_empty(0 if written is None else q.shape[:3], dtype=torch.float32)
    return v.new_empty(*q.shape[:3], v.shape[-1]), mass, state.new_empty(state.shape)


@torch.library.custom_op("gated_kernels::coded_backward", mutates_args=())
def backward(
    q: Tensor,
    k: Tensor,
    q_turn: Tensor,
    q_shift: Tensor,
    q_log_tau: Tensor,
    k_turn: Tensor,
    k_shift: Tensor,
    k_log_tau: Tensor,
    codes: Tensor,
    v: Tensor,
    log_a: Tensor | None,
    written: Tensor | None,
    state: Tensor,
    segment: Tensor | None,
    exclusive: bool,
    do: Tensor,
    dmass: Tensor,
    dlast: Tensor,
) -> list[Tensor]:
    """The gradients of all tensors up to log_a (empty where there is none), and of the state."""
    of_q, of_k = (q, q_turn, q_shift, q_log_tau, codes), (k, k_turn, k_shift, k_log_tau, codes)
    (phi_q, q_sums), (phi_k, k_sums) = codebook.mapped(*of_q), codebook.mapped(*of_k)
    q_known = k_known = None
    if log_a is None or log_a.shape[-1] == 1:
        v, log_a, written, state, segment = contiguous(v, log_a, written, state, segment)
        do, dmass, dlast = contiguous(do, dmass, dlast)
        with torch.cuda.device_of(v):
            dphi_q, dphi_k, dv, dlog_a, dstate, (q_means, k_means) = scalar.backward(
                phi_q, phi_k, v, log_a, written, state, segment, exclusive, do, None if written is None else dmass,
                dlast, over=True,
            )  # fmt: skip
        q_known, k_known = (q_sums, q_means), (k_sums, k_means)
    else:
        dphi_q, _, dphi_k, dv, dlog_a, dstate = diagonal.backward(
            phi_q, None, phi_k, v, log_a, written, state, segment, exclusive, do, dmass, dlast
        )
    del phi_q, phi_k
    dq, *dq_map, dcodes = codebook.gradients(*of_q, dphi_q, q_known)
    del dphi_q
    dk, *dk_map, dcodes_by_k = codebook.gradients(*of_k, dphi_k, k_known)
    dlog_a = v.new_empty(0) if dlog_a is None else dlog_a
    return [dq, dk, *dq_map, *dk_map, dcodes + dcodes_by_k, dv, dlog_a, dstate]


@backward.register_fake
def _(*given: Any) -> list[Tensor]:
    v, log_a, _, state = given[9:13]
    dlog_a = v.new_empty(0) if log_a is None else log_a.new_empty(log_a.shape)
    return [*(x.new_empty(x.shape) for x in given[:10]), dlog_a, state.new_empty(state.shape)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.exclusive = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, do: Tensor, dmass: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
    *grads, dlog_a, dstate = backward(*ctx.saved_tensors, ctx.exclusive, do, dmass, dlast)
    return *grads, None if ctx.saved_tensors[10] is None else dlog_a, None, dstate, None, None


forward.register_autograd(_differentiate, setup_context=_keep)


def coded(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGV: Tensor,
    log_a: Tensor | None,
    q_turn_HDE: Tensor,
    q_shift_HE: Tensor,
    q_log_tau_H: Tensor,
    k_turn_GDE: Tensor,
    k_shift_GE: Tensor,
    k_log_tau_G: Tensor,
    codes_GFE: Tensor,
    *,
    written_BTG: Tensor | None = None,
    state_BGFV: Tensor | None = None,
    segment_BT: Tensor | None = None,
    exclusive: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor] | None:
    """As `gated_kernels.coded`; None for what one of the two ops does not take, which says why when it is called."""
    if not (v_BTGV.is_cuda or INTERPRETED.value) or v_BTGV.dtype != torch.bfloat16:
        return None
    of_q, of_k = (q_turn_HDE, q_shift_HE, q_log_tau_H), (k_turn_GDE, k_shift_GE, k_log_tau_G)
    if any(codebook.problem(x, *of_x, codes_GFE) for x, of_x in ((q_BTHD, of_q), (k_BTGD, of_k))):
        return None
    G, F = k_BTGD.shape[2], codes_GFE.shape[1]
    phi_q, phi_k = (x.new_empty(1).expand(*x.shape[:3], F) for x in (q_BTHD, k_BTGD))  # of their sizes, nothing more
    if len(codes_GFE) != G or diagonal.problem(phi_q, phi_k, v_BTGV, log_a, written_BTG, state_BGFV, segment_BT):
        return None
    state = diagonal.first_state(v_BTGV, F, written_BTG, state_BGFV)

    def run(v: Tensor, written: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        return forward(q_BTHD, k_BTGD, *of_q, *of_k, codes_GFE, v, log_a, written, state, segment_BT, exclusive)

    return diagonal.with_mass(run, v_BTGV, log_a, written_BTG)
