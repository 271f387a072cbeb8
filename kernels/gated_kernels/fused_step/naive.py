"""The definition of a linearized layer's decoding step, by the naive window and the naive recurrence."""

from __future__ import annotations

import torch
import torch.nn.functional as nnf
from torch import Tensor

from gated_kernels.fused_step.arguments import EMPTY, MIN_NORMALIZER, Gate, StepCache, StepConfig, StepInputs
from gated_kernels.gla.naive import naive_gla
from gated_kernels.swa.naive import naive_swa


def naive_fused_step(token: StepInputs, cache: StepCache, config: StepConfig) -> Tensor:
    """The output [B,H,D] in the dtype of the values. Updates `cache` in place, as `fused_step` does."""
    (B, _, D), P = token.q_BHD.shape, cache.k_NPGD.shape[1]
    row_B = torch.arange(B, device=token.q_BHD.device) if cache.row_B is None else cache.row_B
    slot_B, dtype = cache.ring_position.expand(B) % P, token.v_BGD.dtype
    order_BP = (slot_B[:, None] + torch.arange(P, device=slot_B.device)) % P
    q, k, v = (_wide(x) for x in (token.q_BHD, token.k_BGD, token.v_BGD))
    q_rot, k_rot = (_rotated(x, token).to(dtype) for x in (q, k))
    position_BS, visible_BM = token.position_BS, token.sink_visible_BM
    sinks = 0 if visible_BM is None else visible_BM.shape[1]
    sink_k, sink_v = (None if x is None else x[row_B] for x in (cache.sink_k_NMGD, cache.sink_v_NMGD))
    window_o, window_lse = naive_swa(
        _wide(q_rot)[:, None],
        _wide(torch.cat((cache.k_NPGD[row_B[:, None], order_BP], k_rot[:, None]), 1)),
        torch.cat((cache.v_NPGD[row_B[:, None], order_BP], token.v_BGD[:, None]), 1),
        window_size=P + 1,
        scale=token.scale,
        valid_BS=position_BS >= 0,
        sink_k_BMGD=None if sink_k is None else _wide(sink_k),
        sink_v_BMGV=sink_v,
        sink_visible_BTM=None if visible_BM is None else visible_BM[:, None],
    )
    evicted = cache.deferred_inputs_NPGD is not None
    if cache.deferred_inputs_NPGD is not None:
        key, value = _wide(cache.deferred_inputs_NPGD[row_B, slot_B]), _wide(cache.v_NPGD[row_B, slot_B])
        written_B11 = (position_BS[:, 0] >= sinks)[:, None, None]
    else:
        key, value, written_B11 = k, v, (position_BS[:, -1] >= 0)[:, None, None]
    phi_q, phi_k = _features(q, key, config)
    state = cache.state_NGFD[row_B]
    if cache.z_NGF is not None:
        value, state = nnf.pad(value, (0, 1), value=1.0), torch.cat((state, cache.z_NGF[row_B][..., None]), -1)
    log_a = _log_gate(key, config.gate) * written_B11
    o, _, state = naive_gla(
        phi_q[:, None],
        (phi_k * written_B11)[:, None],
        (value * written_B11)[:, None],
        log_a[:, None],
        initial_state=state,
        exclusive=evicted,
    )
    o_BHD, mix_weight_BH1 = _wide(o[:, 0]), 0.5
    if config.memory_weight is not None:
        normalizer = o_BHD[..., -1].clamp_min(MIN_NORMALIZER)
        o_BHD = o_BHD[..., :-1] / normalizer[..., None]
        power_H, query_HD, log_H = config.memory_weight
        weight = power_H * normalizer.log() + (q * query_HD).sum(-1) / D**0.5 + log_H
        weight = weight.masked_fill(normalizer.log() <= EMPTY, -1e4)
        mix_weight_BH1 = (weight - window_lse[:, 0]).sigmoid()[..., None]
    mixed = (1 - mix_weight_BH1) * _wide(window_o[:, 0]) + mix_weight_BH1 * o_BHD
    cache.state_NGFD[row_B] = state[..., :D]
    if cache.z_NGF is not None:
        cache.z_NGF[row_B] = state[..., D]
    cache.k_NPGD[row_B, slot_B], cache.v_NPGD[row_B, slot_B] = k_rot, token.v_BGD
    if cache.deferred_inputs_NPGD is not None:
        cache.deferred_inputs_NPGD[row_B, slot_B] = token.k_BGD
    if cache.sink_k_NMGD is not None and cache.sink_v_NMGD is not None:
        for b, row in enumerate(row_B.tolist()):
            if 0 <= (position := int(position_BS[b, -1])) < sinks:
                cache.sink_k_NMGD[row, position], cache.sink_v_NMGD[row, position] = k_rot[b], token.v_BGD[b]
    return mixed.to(dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _rotated(x: Tensor, token: StepInputs) -> Tensor:
    if token.cos_BC is None or token.sin_BC is None:
        return x
    turned, rest = x.tensor_split([token.cos_BC.shape[1]], -1)
    first, second = turned.chunk(2, -1)
    turned = turned * token.cos_BC[:, None] + torch.cat((-second, first), -1) * token.sin_BC[:, None]
    return torch.cat((turned, rest), -1)


def _features(q: Tensor, k: Tensor, config: StepConfig) -> tuple[Tensor, Tensor]:
    if (c := config.codes) is None:
        return q.softmax(-1), k.softmax(-1)

    def near(x: Tensor, proj: Tensor, bias: Tensor, log_inv_temperature: Tensor) -> Tensor:
        u = nnf.normalize(torch.einsum("bnd,nde->bne", x, proj) + bias, dim=-1) * log_inv_temperature.exp()[:, None]
        codes = c.codes_GFE.repeat_interleave(len(proj) // len(c.codes_GFE), 0)
        return torch.einsum("bne,nfe->bnf", u, codes).softmax(-1)

    return near(q, c.q_proj_HDE, c.q_bias_HE, c.q_log_inv_temperature_H), near(
        k, c.k_proj_GDE, c.k_bias_GE, c.k_log_inv_temperature_G
    )


def _log_gate(key: Tensor, gate: Gate | None) -> Tensor:
    """[B,G,F] or [B,G,1]"""
    if gate is None:
        return torch.zeros_like(key[..., :1])
    logits = key if gate.of == "keys" else key.mean(-1, keepdim=True) if gate.of == "head" else 0 * key[..., :1]
    return nnf.logsigmoid(logits if gate.bias_GF is None else logits + gate.bias_GF) / gate.normalizer
