"""Gated linear attention over a codebook's features, in the Triton kernels of both ops, saving only the inputs.

The backward pass recomputes the features of queries and keys, F numbers per head and token. With one gate per head, or
none, their gradients overwrite them. In the forward pass, the features of queries are computed where they are used
(`read.py`), except with gates per feature and with large heads.

Shapes: B batch, T tokens, H query heads, G key-value heads, D head size, E size of a code, F codes, V value size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gated_kernels.codebook import triton as codebook
from gated_kernels.codebook_gla import read
from gated_kernels.common.gated_inputs import Sizes, first_state, is_per_head, unfit, unfit_options, with_mask_column
from gated_kernels.common.interpreter import INTERPRETED
from gated_kernels.common.tiles import contiguous
from gated_kernels.common.tracing import launches_at_once
from gated_kernels.gla import triton as gla
from gated_kernels.simple_gla import launch
from gated_kernels.simple_gla import triton as simple_gla


def forward(
    q: Tensor,
    k: Tensor,
    q_proj: Tensor,
    q_bias: Tensor,
    q_log_inv_temperature: Tensor,
    k_proj: Tensor,
    k_bias: Tensor,
    k_log_inv_temperature: Tensor,
    codes: Tensor,
    v: Tensor,
    log_a: Tensor | None,
    write_mask: Tensor | None,
    state: Tensor,
    segment: Tensor | None,
    exclusive: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The outputs, the normalizer (empty without `write_mask`) and the last state."""
    codes = codes.to(codebook.CODES)  # once for both maps
    of_q, of_k = (q, q_proj, q_bias, q_log_inv_temperature, codes), (k, k_proj, k_bias, k_log_inv_temperature, codes)
    phi_k, _ = codebook.mapped(*of_k)
    if read.is_supported(q, codes, log_a):
        return read.forward(of_q, phi_k, v, log_a, write_mask, state, segment, exclusive)
    phi_q, _ = codebook.mapped(*of_q)
    if is_per_head(log_a):
        return simple_gla.forward(phi_q, None, phi_k, v, log_a, write_mask, state, segment, exclusive)
    o, last = gla.forward(phi_q, None, phi_k, v, log_a, state, segment, exclusive)
    return o, v.new_empty(0, dtype=torch.float32), last


_forward = torch.library.custom_op("gated_kernels::codebook_gla", forward, mutates_args=())


@_forward.register_fake
def _(q: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    v, _, write_mask, state = given[8:12]
    normalizer = v.new_empty(0 if write_mask is None else q.shape[:3], dtype=torch.float32)
    return v.new_empty(*q.shape[:3], v.shape[-1]), normalizer, state.new_empty(state.shape)


@torch.library.custom_op("gated_kernels::codebook_gla_backward", mutates_args=())
def backward(
    q: Tensor,
    k: Tensor,
    q_proj: Tensor,
    q_bias: Tensor,
    q_log_inv_temperature: Tensor,
    k_proj: Tensor,
    k_bias: Tensor,
    k_log_inv_temperature: Tensor,
    codes: Tensor,
    v: Tensor,
    log_a: Tensor | None,
    write_mask: Tensor | None,
    state: Tensor,
    segment: Tensor | None,
    exclusive: bool,
    do: Tensor,
    dnormalizer: Tensor,
    dlast: Tensor,
) -> list[Tensor]:
    """The gradients of all tensors up to log_a (empty without one), and of the state."""
    of_q, of_k = (q, q_proj, q_bias, q_log_inv_temperature, codes), (k, k_proj, k_bias, k_log_inv_temperature, codes)
    (phi_q, q_sums), (phi_k, k_sums) = codebook.mapped(*of_q), codebook.mapped(*of_k)
    q_statistics = k_statistics = None
    if is_per_head(log_a):
        v, log_a, write_mask, state, segment = contiguous(v, log_a, write_mask, state, segment)
        do, dnormalizer, dlast = contiguous(do, dnormalizer, dlast)
        with torch.cuda.device_of(v):
            (dphi_q, dphi_k, dv, dlog_a, dstate), q_means, k_means = launch.backward_in_place(
                phi_q, phi_k, v, log_a, write_mask, state, segment, exclusive, do, dnormalizer, dlast
            )
        q_statistics, k_statistics = (q_sums, q_means), (k_sums, k_means)
    else:
        dphi_q, _, dphi_k, dv, dlog_a, dstate = gla.backward(
            phi_q, None, phi_k, v, log_a, state, segment, exclusive, do, dlast
        )
    del phi_q, phi_k
    dq, *dq_map, dcodes = codebook.gradients(*of_q, dphi_q, q_statistics)
    del dphi_q
    dk, *dk_map, dcodes_by_k = codebook.gradients(*of_k, dphi_k, k_statistics)
    dlog_a = v.new_empty(0) if dlog_a is None else dlog_a
    return [dq, dk, *dq_map, *dk_map, dcodes + dcodes_by_k, dv, dlog_a, dstate]


@backward.register_fake
def _(*given: Any) -> list[Tensor]:
    v, log_a, _, state = given[9:13]
    dlog_a = v.new_empty(0) if log_a is None else log_a.new_empty(log_a.shape)
    return [*(x.new_empty(x.shape) for x in given[:10]), dlog_a, state.new_empty(state.shape)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.exclusive = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, do: Tensor, dnormalizer: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
    *grads, dlog_a, dstate = backward(*ctx.saved_tensors, ctx.exclusive, do, dnormalizer, dlast)
    return *grads, None if ctx.saved_tensors[10] is None else dlog_a, None, dstate, None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def triton_codebook_gla(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGV: Tensor,
    log_a: Tensor | None,
    q_proj_HDE: Tensor,
    q_bias_HE: Tensor,
    q_log_inv_temperature_H: Tensor,
    k_proj_GDE: Tensor,
    k_bias_GE: Tensor,
    k_log_inv_temperature_G: Tensor,
    codes_GFE: Tensor,
    *,
    write_mask_BTG: Tensor | None = None,
    initial_state: Tensor | None = None,
    segment_ids_BT: Tensor | None = None,
    exclusive: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor] | None:
    """Same as `gated_kernels.chunk_codebook_gla`. None on a CPU and for what the kernels do not support.

    The two ops then run one after the other, and each warns about what its own kernels do not support.
    """
    if not (v_BTGV.is_cuda or INTERPRETED.value) or v_BTGV.dtype != torch.bfloat16:
        return None
    of_q, of_k = (q_proj_HDE, q_bias_HE, q_log_inv_temperature_H), (k_proj_GDE, k_bias_GE, k_log_inv_temperature_G)
    if any(codebook.unsupported(x, *of_x, codes_GFE) for x, of_x in ((q_BTHD, of_q), (k_BTGD, of_k))):
        return None
    (B, T, H, _), (G, F, _), V, device = q_BTHD.shape, codes_GFE.shape, v_BTGV.shape[3], q_BTHD.device
    of_keys = (k_BTGD, (B, T, G, k_BTGD.shape[3])), (v_BTGV, (B, T, G, V))
    options = log_a, write_mask_BTG, initial_state, segment_ids_BT
    if unfit(device, *of_keys) or unfit_options(Sizes(B, T, H, G, F, V), device, *options):
        return None
    state = first_state(v_BTGV, F, write_mask_BTG, initial_state)
    run = forward if launches_at_once(q_BTHD) else _forward
    parameters = *of_q, *of_k, codes_GFE
    if write_mask_BTG is None or is_per_head(log_a):
        o, normalizer, last = run(
            q_BTHD, k_BTGD, *parameters, v_BTGV, log_a, write_mask_BTG, state, segment_ids_BT, exclusive
        )
        return o, None if write_mask_BTG is None else normalizer, last
    v = with_mask_column(v_BTGV, write_mask_BTG)
    o, _, last = run(q_BTHD, k_BTGD, *parameters, v, log_a, None, state, segment_ids_BT, exclusive)
    return o[..., :-1], o[..., -1].float(), last
