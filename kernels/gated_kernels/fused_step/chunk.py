"""The fused decoding step of a linearized layer, on a CPU in torch.

With one token, an op takes longer to begin than to run, so what counts on a CPU is the number of ops. Masks are looked
at on the host, and left out where nothing is hidden. The state and the ring are updated where they lie. Everything is
computed in at least fp32.

On a GPU the step needs Triton. Where it is not supported, a layer runs its step op by op.

Shapes: see arguments.py; R = H / G, X keys of the ring, the sinks and the token itself.
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as nnf
from torch import Tensor

from gated_kernels.common.registry import kernel_for
from gated_kernels.fused_step.arguments import (
    EMPTY,
    MIN_NORMALIZER,
    Gate,
    MemoryWeight,
    StepCache,
    StepConfig,
    StepInputs,
    row_stride,
)

HIDDEN = -1e30  # logit of a token that is not visible: finite, so that a row of padding has no NaN


def is_supported(cache: StepCache, config: StepConfig, heads: int) -> bool:
    """Whether a kernel takes the steps of a layer with this cache and configuration. `heads`: number of query heads."""
    return _runs_kernel(cache) and is_covered(cache, config, heads)


def is_supported_in_torch(cache: StepCache, config: StepConfig, heads: int) -> bool:
    """Same as `is_supported`, for the step in torch, which is for a CPU and reads values on the host."""
    on_cpu = cache.state_NGFD.device.type == "cpu" and cache.row_B is None
    return on_cpu and is_covered(cache, config, heads)


def is_covered(cache: StepCache, config: StepConfig, heads: int) -> bool:
    """As `is_supported`, on a GPU with the kernels in use."""
    state, (_, P, G, D) = cache.state_NGFD, cache.k_NPGD.shape
    normalized, summed = config.memory_weight is not None, cache.z_NGF is not None
    evicted = cache.deferred_inputs_NPGD is not None
    if P == 0 or D > 256 or heads > 64 * G or not normalized == evicted == summed or state.shape[3] != D:
        return False
    parameters = [*(config.codes or ()), *(config.memory_weight or ())]
    if config.gate is not None and config.gate.bias_GF is not None:
        parameters.append(config.gate.bias_GF)
    kept, dtype = [x for x in cache[:7] if x is not None], cache.k_NPGD.dtype
    given = [*kept, *parameters, cache.ring_position, *([] if cache.row_B is None else [cache.row_B])]
    return (
        dtype in (torch.float32, torch.bfloat16, torch.float16)
        and all(x is None or x.dtype == dtype for x in cache[:5])
        and all(x is None or x.dtype == torch.float32 for x in (*cache[5:7], *parameters))
        and all(x.is_contiguous() for x in parameters)
        and all(x[:1].is_contiguous() for x in kept)
        and _are_aligned(cache)
        and all(x.device == state.device for x in given)
    )


def fused_step(token: StepInputs, cache: StepCache, config: StepConfig) -> Tensor:
    """The layer's output [B,H,D] in the dtype of the values. Updates `cache` in place. Requires `is_supported`
    or `is_supported_in_torch`."""
    if not _runs_kernel(cache):
        return _in_torch(token, cache, config)
    kernel = kernel_for("fused_step")
    assert kernel is not None
    return kernel(token, cache, config)


def _runs_kernel(cache: StepCache) -> bool:
    there = cache.state_NGFD.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    return there and kernel_for("fused_step") is not None


def _are_aligned(cache: StepCache) -> bool:
    """Whether the tensors of a dtype are contiguous, or have the same stride between rows."""
    for tensors in (cache[:5], cache[5:7]):
        kept = [x for x in tensors if x is not None]
        if row_stride(kept) is not None and len({x.stride(0) for x in kept}) > 1:
            return False
    return True


def _in_torch(token: StepInputs, cache: StepCache, config: StepConfig) -> Tensor:
    """See `fused_step`; for caches without `row_B`."""
    (B, H, D), dtype, position_BS = token.q_BHD.shape, token.v_BGD.dtype, token.position_BS
    slot = int(cache.ring_position) % cache.k_NPGD.shape[1]
    q_BHD, k_BGD, v_BGD = (_wide(x) for x in (token.q_BHD, token.k_BGD, token.v_BGD))
    k_rot_BGD = _rotated(k_BGD, token).to(dtype)
    padding_BS = position_BS < 0
    has_padding = bool(padding_BS.any())
    window_BGRD, lse_BGR1 = _window(token, cache, q_BHD, k_rot_BGD, slot, padding_BS if has_padding else None)

    evicted = cache.deferred_inputs_NPGD is not None
    if cache.deferred_inputs_NPGD is not None:
        written_B = position_BS[:, 0] >= (0 if token.sink_visible_BM is None else token.sink_visible_BM.shape[1])
        key_BGD, value_BGD = _wide(cache.deferred_inputs_NPGD[:, slot]), _wide(cache.v_NPGD[:, slot])
    else:
        written_B, key_BGD, value_BGD = ~padding_BS[:, -1], k_BGD, v_BGD
    written_B111 = None if bool(written_B.all()) else written_B[:, None, None, None]
    phi_q_BGRF, phi_k_BGF = _features(q_BHD, key_BGD, config)
    # a query does not see the token that leaves the window in its step
    before = _read(phi_q_BGRF, cache) if evicted else None
    _write(cache, phi_k_BGF[..., None], value_BGD[:, :, None], _decay(key_BGD, config.gate), written_B111)
    read_BGRD, normalizer_BGR1 = _read(phi_q_BGRF, cache) if before is None else before

    if config.memory_weight is None or normalizer_BGR1 is None:
        o_BGRD = (window_BGRD + read_BGRD) / 2
    else:
        normalizer_BGR1 = normalizer_BGR1.clamp_min(MIN_NORMALIZER)
        weight_BGR1 = _weight(q_BHD, normalizer_BGR1, config.memory_weight)
        o_BGRD = torch.lerp(window_BGRD, read_BGRD / normalizer_BGR1, (weight_BGR1 - lse_BGR1).sigmoid())
    _keep(token, cache, k_rot_BGD, slot)
    return o_BGRD.reshape(B, H, D).to(dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _rotated(x_BND: Tensor, token: StepInputs) -> Tensor:
    if token.cos_BC is None or token.sin_BC is None:
        return x_BND
    C = token.cos_BC.shape[1]
    turned, rest = (x_BND, None) if x_BND.shape[2] == C else (x_BND[..., :C], x_BND[..., C:])
    half = C // 2
    pair = torch.cat((-turned[..., half:], turned[..., :half]), -1)
    turned = torch.addcmul(turned * token.cos_BC[:, None], pair, _wide(token.sin_BC)[:, None])
    return turned if rest is None else torch.cat((turned, rest), -1)


def _window(
    token: StepInputs,
    cache: StepCache,
    q_BHD: Tensor,
    k_rot_BGD: Tensor,
    slot: int,
    padding_BS: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The window's output [B,G,R,D], and the log of its weight, [B,G,R,1].

    Keys lie as in the cache: the ring from slot 0, the sinks, the token itself. padding_BS: where `position_BS` is
    padding; None: nowhere.
    """
    B, P, G, D = cache.k_NPGD.shape
    q_BGRD = _rotated(q_BHD, token).to(token.v_BGD.dtype).view(B, G, -1, D)
    keys, values = [cache.k_NPGD, k_rot_BGD[:, None]], [cache.v_NPGD, token.v_BGD[:, None]]
    if cache.sink_k_NMGD is not None and cache.sink_v_NMGD is not None:
        keys.insert(1, cache.sink_k_NMGD)
        values.insert(1, cache.sink_v_NMGD)
    k_BGXD, v_BGXD = (_wide(torch.cat(parts, 1)).transpose(1, 2) for parts in (keys, values))
    logits_BGRX = torch.matmul(_wide(q_BGRD) * token.scale, k_BGXD.mT)
    hidden_BX = _hidden(token.sink_visible_BM, padding_BS, slot, P)
    if hidden_BX is not None:
        logits_BGRX = logits_BGRX.masked_fill(hidden_BX[:, None, None], HIDDEN)
    lse_BGR1 = logits_BGRX.logsumexp(-1, keepdim=True)
    weights_BGRX = (logits_BGRX - lse_BGR1).exp_()
    if hidden_BX is not None:  # where nothing is visible, all logits are equal
        weights_BGRX.masked_fill_(hidden_BX[:, None, None], 0)
    return torch.matmul(weights_BGRX, v_BGXD), lse_BGR1


def _hidden(sink_visible_BM: Tensor | None, padding_BS: Tensor | None, slot: int, P: int) -> Tensor | None:
    """Which keys, as `_window` has them, are not visible; None if all are."""
    sinks_seen = sink_visible_BM is None or bool(sink_visible_BM.all())
    if padding_BS is None and sinks_seen:
        return None
    if padding_BS is None:
        assert sink_visible_BM is not None
        padding_BS = sink_visible_BM.new_zeros(len(sink_visible_BM), P + 1)
    of_ring = padding_BS[:, :P].roll(slot, 1)  # oldest first -> from slot 0
    of_sinks = [] if sink_visible_BM is None else [~sink_visible_BM]
    return torch.cat((of_ring, *of_sinks, padding_BS[:, P:]), 1)


def _features(q_BHD: Tensor, k_BGD: Tensor, config: StepConfig) -> tuple[Tensor, Tensor]:
    """phi(q) [B,G,R,F] and phi(k) [B,G,F]."""
    (B, H, _), G = q_BHD.shape, k_BGD.shape[1]
    if (c := config.codes) is None:
        return q_BHD.softmax(-1).view(B, G, H // G, -1), k_BGD.softmax(-1)
    codes_GEF = _wide(c.codes_GFE).mT

    def near(x_BND: Tensor, proj_NDE: Tensor, bias_NE: Tensor, log_inv_temperature_N: Tensor) -> Tensor:
        """[G,N/G,B,F]"""
        u_NBE = torch.baddbmm(bias_NE[:, None], x_BND.transpose(0, 1), proj_NDE)
        u_NBE = nnf.normalize(u_NBE, dim=-1) * log_inv_temperature_N.exp()[:, None, None]
        return torch.bmm(u_NBE.view(G, -1, u_NBE.shape[2]), codes_GEF).softmax(-1).view(G, -1, B, codes_GEF.shape[2])

    phi_q_GRBF = near(q_BHD, c.q_proj_HDE, c.q_bias_HE, c.q_log_inv_temperature_H)
    phi_k_G1BF = near(k_BGD, c.k_proj_GDE, c.k_bias_GE, c.k_log_inv_temperature_G)
    return phi_q_GRBF.permute(2, 0, 1, 3), phi_k_G1BF[:, 0].transpose(0, 1)


def _decay(key_BGD: Tensor, gate: Gate | None) -> Tensor | None:
    """The gate [B or 1,G,F or 1]; None without one."""
    if gate is None:
        return None
    if gate.of == "constant":
        assert gate.bias_GF is not None
        logits = gate.bias_GF[None]
    else:
        logits = key_BGD if gate.of == "keys" else key_BGD.mean(-1, keepdim=True)
        logits = logits if gate.bias_GF is None else logits + gate.bias_GF
    return (nnf.logsigmoid(logits) / gate.normalizer).exp()


def _read(phi_q_BGRF: Tensor, cache: StepCache) -> tuple[Tensor, Tensor | None]:
    """phi(q) S [B,G,R,D], and the normalizer phi(q) z, [B,G,R,1]."""
    normalizer_BGR1 = None if cache.z_NGF is None else torch.matmul(phi_q_BGRF, cache.z_NGF[..., None])
    return torch.matmul(phi_q_BGRF, cache.state_NGFD), normalizer_BGR1


def _write(
    cache: StepCache, phi_k_BGF1: Tensor, value_BG1D: Tensor, decay_BGF: Tensor | None, written_B111: Tensor | None
) -> None:
    """Decays the state and adds a token to it, in rows where one is written."""
    if written_B111 is not None:
        phi_k_BGF1 = phi_k_BGF1 * written_B111
        if decay_BGF is not None:
            decay_BGF = torch.where(written_B111[..., 0], decay_BGF, 1)
    if decay_BGF is not None:
        cache.state_NGFD.mul_(decay_BGF[..., None])
    cache.state_NGFD.addcmul_(phi_k_BGF1, value_BG1D)
    if cache.z_NGF is not None:
        if decay_BGF is not None:
            cache.z_NGF.mul_(decay_BGF)
        cache.z_NGF.add_(phi_k_BGF1[..., 0])


def _weight(q_BHD: Tensor, normalizer_BGR1: Tensor, weight: MemoryWeight) -> Tensor:
    """The log of the memory's weight, [B,G,R,1]."""
    of_heads = normalizer_BGR1.shape[1:]
    log_normalizer = normalizer_BGR1.log()
    of_query_BGR1 = (q_BHD * weight.query_HD).sum(-1).view(normalizer_BGR1.shape)
    found = torch.addcmul(weight.log_H.view(of_heads), log_normalizer, weight.power_H.view(of_heads))
    found = found.add(of_query_BGR1, alpha=q_BHD.shape[2] ** -0.5)
    return found.masked_fill(log_normalizer <= EMPTY, -1e4)


def _keep(token: StepInputs, cache: StepCache, k_rot_BGD: Tensor, slot: int) -> None:
    """The new token takes the place of the oldest in the ring, and one among the sinks if it is one of them."""
    cache.k_NPGD[:, slot], cache.v_NPGD[:, slot] = k_rot_BGD, token.v_BGD
    if cache.deferred_inputs_NPGD is not None:
        cache.deferred_inputs_NPGD[:, slot] = token.k_BGD
    if cache.sink_k_NMGD is None or cache.sink_v_NMGD is None:
        return
    for row, position in enumerate(token.position_BS[:, -1].tolist()):
        if 0 <= position < cache.sink_k_NMGD.shape[1]:
            cache.sink_k_NMGD[row, position], cache.sink_v_NMGD[row, position] = k_rot_BGD[row], token.v_BGD[row]
