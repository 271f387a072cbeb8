"""A linearized layer's step of one token as it is defined, from the references of the window and of the recurrence."""

from __future__ import annotations

import torch
import torch.nn.functional as nnf
from torch import Tensor

from gated_kernels.diagonal.reference import diagonal
from gated_kernels.step.chunk import EMPTY, LEAST_MASS, Gate, Kept, Rules, Token
from gated_kernels.window.reference import window


def step(token: Token, kept: Kept, rules: Rules) -> Tensor:
    """The output [B,H,D] in the dtype of the values; writes to `kept`, as a step does."""
    B, P, _, D = kept.k_BPGD.shape
    slot, dtype = int(kept.taken) % P, token.v_BGD.dtype
    evicted = kept.pending_BPGD is not None
    q, k, v = (_wide(x) for x in (token.q_BHD, token.k_BGD, token.v_BGD))
    q_rot, k_rot = (_rotated(x, token).to(dtype) for x in (q, k))
    rank_BS, visible_BM = token.rank_BS, token.sink_visible_BM
    sinks = 0 if visible_BM is None else visible_BM.shape[1]
    window_o, window_lse = window(
        _wide(q_rot)[:, None],
        _wide(torch.cat((kept.k_BPGD.roll(-slot, 1), k_rot[:, None]), 1)),
        torch.cat((kept.v_BPGD.roll(-slot, 1), token.v_BGD[:, None]), 1),
        window=P + 1,
        scale=token.scale,
        valid_BS=rank_BS >= 0,
        sink_k_BMGD=None if kept.sink_k_BMGD is None else _wide(kept.sink_k_BMGD),
        sink_v_BMGV=kept.sink_v_BMGD,
        sink_visible_BTM=None if visible_BM is None else visible_BM[:, None],
    )
    if kept.pending_BPGD is not None:
        key, value = _wide(kept.pending_BPGD[:, slot]), _wide(kept.v_BPGD[:, slot])
        written_B11 = (rank_BS[:, 0] >= sinks)[:, None, None]
    else:
        key, value, written_B11 = k, v, (rank_BS[:, -1] >= 0)[:, None, None]
    phi_q, phi_k = _features(q, key, rules)
    state = kept.state_BGFD
    if kept.z_BGF is not None:
        value, state = nnf.pad(value, (0, 1), value=1.0), torch.cat((state, kept.z_BGF[..., None]), -1)
    log_a = _log_gate(key, rules.gate) * written_B11
    o, _, state = diagonal(
        phi_q[:, None],
        (phi_k * written_B11)[:, None],
        (value * written_B11)[:, None],
        log_a[:, None],
        state_BGFV=state,
        exclusive=evicted,
    )
    o_BHD, share_BH1 = _wide(o[:, 0]), 0.5
    if rules.share is not None:
        mass = o_BHD[..., -1].clamp_min(LEAST_MASS)
        o_BHD = o_BHD[..., :-1] / mass[..., None]
        weight = rules.share.power_H * mass.log() + (q * rules.share.query_HD).sum(-1) / D**0.5 + rules.share.log_H
        weight = weight.masked_fill(mass.log() <= EMPTY, -1e4)
        share_BH1 = (weight - window_lse[:, 0]).sigmoid()[..., None]
    mixed = (1 - share_BH1) * _wide(window_o[:, 0]) + share_BH1 * o_BHD
    kept.state_BGFD.copy_(state[..., :D])
    if kept.z_BGF is not None:
        kept.z_BGF.copy_(state[..., D])
    kept.k_BPGD[:, slot], kept.v_BPGD[:, slot] = k_rot, token.v_BGD
    if kept.pending_BPGD is not None:
        kept.pending_BPGD[:, slot] = token.k_BGD
    if kept.sink_k_BMGD is not None and kept.sink_v_BMGD is not None:
        for b in range(B):
            if 0 <= (rank := int(rank_BS[b, -1])) < sinks:
                kept.sink_k_BMGD[b, rank], kept.sink_v_BMGD[b, rank] = k_rot[b], token.v_BGD[b]
    return mixed.to(dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _rotated(x: Tensor, token: Token) -> Tensor:
    if token.cos_BC is None or token.sin_BC is None:
        return x
    turned, rest = x.tensor_split([token.cos_BC.shape[1]], -1)
    first, second = turned.chunk(2, -1)
    turned = turned * token.cos_BC[:, None] + torch.cat((-second, first), -1) * token.sin_BC[:, None]
    return torch.cat((turned, rest), -1)


def _features(q: Tensor, k: Tensor, rules: Rules) -> tuple[Tensor, Tensor]:
    if (c := rules.codes) is None:
        return q.softmax(-1), k.softmax(-1)

    def near(x: Tensor, turn: Tensor, shift: Tensor, log_tau: Tensor) -> Tensor:
        u = nnf.normalize(torch.einsum("bnd,nde->bne", x, turn) + shift, dim=-1) * log_tau.exp()[:, None]
        codes = c.codes_GFE.repeat_interleave(len(turn) // len(c.codes_GFE), 0)
        return torch.einsum("bne,nfe->bnf", u, codes).softmax(-1)

    return near(q, c.q_turn_HDE, c.q_shift_HE, c.q_log_tau_H), near(k, c.k_turn_GDE, c.k_shift_GE, c.k_log_tau_G)


def _log_gate(key: Tensor, gate: Gate | None) -> Tensor:
    """[B,G,F] or [B,G,1]"""
    if gate is None:
        return torch.zeros_like(key[..., :1])
    logits = key if gate.of == "keys" else key.mean(-1, keepdim=True) if gate.of == "head" else 0 * key[..., :1]
    return nnf.logsigmoid(logits if gate.bias_GF is None else logits + gate.bias_GF) / gate.normalizer
