"""Initializes mixers from the base in closed form, before any training. Takes seconds on one batch.

A layer whose window and memory share a denominator gets up to three fits, as far as its mixer has the parameters:

- The codebook, from the base's own activations. Queries and keys that attend to each other beyond the window are
  projected into a common space by canonical correlation of the attention-weighted pairs. Clusters there become the
  codes.
- The mixing weight: how much each head should trust its memory for each query. It is a weighted logistic regression on
  the weight that would bring the head's output closest to the base's.
- The memory's lifetime: the gate bias of each key-value head, chosen from a grid by the same error.

A learned mix has one weight per head for all queries. That weight has a least-squares solution, jointly with the scale
of each channel if the read has one.

Shapes: B batch, T tokens, N = B * T, H query heads, G key-value heads, R = H / G, D head size, E size of a code,
F codes, X predictors of a weight, O offsets.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.nn.functional as nnf
from gated_kernels.fused_step.arguments import EMPTY
from gated_kernels.swa.chunk import chunk_swa
from torch import Tensor

from liger_convert.mixers.base import QKV, MemoryOutput, Mixer
from liger_convert.mixers.feature_maps import Codebook
from liger_convert.mixers.window_attention import window_attention
from liger_convert.model import AlignTargets, LinearizedAttention, collect_align_targets, linear_layers
from liger_convert.model.sequence import SequenceMetadata
from liger_convert.utils.errors import LinearizeError

INV_TEMPERATURES = (10.0, 20.0, 40.0)
# Added to the gate's initial bias. With `gla`, a bias of 6 lasts 6,450 tokens, 4.5 lasts 1,440, and 3 lasts 321.
GATE_STEPS = (-1.5, -3.0)
STRENGTH = 0.75  # exponent of a direction's correlation in the code space: larger favors the strongest, 0 is uniform
RIDGE = 0.02  # fraction of the mean variance that is added to the variance of every direction
CLUSTER_STEPS = 12
LONG, SHORT = 8, 4  # in windows: half of the tokens of rows longer than LONG are read as documents of length SHORT
SAMPLES = 8192  # vectors to cluster per key-value head
NEWTON_STEPS = 12
MIXED = (0.02, 0.98)  # bounds of a learned mix's weight


@torch.no_grad()
def calibrate(model: Any, base: Any, input_ids: Tensor, position_ids: Tensor) -> None:
    """Fits every mixer of `model`, in place, to the base's own attention on a packed batch. Both tensors are [B,T].

    This takes one forward pass through the model. Each layer is fitted just before it runs, on the outputs of the
    layers fitted before it, so that it compensates for their errors instead of adding to them. Long rows are read at
    two lengths: a memory must also serve text that has only just left the window, and with long rows alone few queries
    see such a memory.
    """
    position_ids = in_two_lengths(position_ids, model)
    batch = {"input_ids": input_ids, "position_ids": position_ids}
    targets = collect_align_targets(base, batch, linear_layers(model.config))
    exact = torch.autocast(input_ids.device.type, enabled=False)  # a fit needs more digits than training
    with exact, calibrating(model, targets, input_ids, position_ids):
        model.model(**batch, use_cache=False)


@contextlib.contextmanager
def calibrating(model: Any, targets: AlignTargets, input_ids: Tensor, position_ids: Tensor) -> Iterator[None]:
    """Context in which a forward pass of `model` over this batch fits each layer of `targets` just before it runs."""
    metadata = SequenceMetadata.build(input_ids, position_ids, None)

    def fit_first(base_x_BTC: Tensor, embeddings: Any) -> Any:
        def hook(attention: LinearizedAttention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x_BTC = kwargs["hidden_states"]
            device = x_BTC.device  # that of the layer, which is not the base's where both are spread over devices
            angles = tuple(x.to(device) for x in embeddings)
            calibrate_layer(attention, x_BTC, base_x_BTC.to(x_BTC), angles, metadata.to(device))

        return hook

    hooks = [
        model.model.layers[i].self_attn.register_forward_pre_hook(fit_first(x_BTC, embeddings), with_kwargs=True)
        for i, x_BTC, embeddings in zip(targets.layers, targets.hidden, targets.position_embeddings)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def in_two_lengths(position_ids_BT: Tensor, model: Any) -> Tensor:
    """The positions [B,T], restarted every SHORT windows in the second half of the batch's tokens.

    Rows of at most LONG windows, or a model without windows, are returned unchanged. The largest window counts.
    """
    windows = [model.model.layers[i].self_attn.spec.window for i in linear_layers(model.config)]
    window = max(windows, default=0)
    tokens = position_ids_BT.shape[1]
    if tokens <= LONG * window or not window:
        return position_ids_BT
    at_BT = torch.arange(position_ids_BT.numel(), device=position_ids_BT.device).view_as(position_ids_BT)
    cut_BT = torch.minimum(position_ids_BT, at_BT % tokens % (SHORT * window))
    return torch.where(at_BT < at_BT.numel() // 2, position_ids_BT, cut_BT)


def calibrate_layer(
    attention: LinearizedAttention, x_BTC: Tensor, base_x_BTC: Tensor, embeddings: Any, metadata: SequenceMetadata
) -> None:
    """Fits one layer in place.

    x_BTC: the layer's own inputs, which its mixer reads. base_x_BTC: the base's inputs to this layer; the target is
    softmax attention on them, with the layer's own projections. Does nothing if the mixer is not calibrated, or if no
    query reaches beyond its window and sinks.
    """
    mixer: Mixer = attention.mixer
    if not mixer.spec.is_calibrated:
        return
    if not (metadata.position_BT >= mixer.spec.window + mixer.spec.sinks).any():
        return  # no query reaches beyond its window and sinks, and a fit to nothing would empty the codebook
    qkv, window_inputs = attention.prepare_inputs(x_BTC, embeddings, metadata, None)
    base_qkv, _ = attention.prepare_inputs(base_x_BTC, embeddings, metadata, None)
    log_forget_BTG = mixer.log_forget(qkv, metadata, None)
    window_o_BTHV, window_lse_BTH = window_attention(window_inputs, log_forget_BTG, None)
    target_BTHV, _ = chunk_swa(
        base_qkv.q_rot_BTHD,
        base_qkv.k_rot_BTGD,
        base_qkv.v_BSGD,
        window_size=min(metadata.tokens, attention.base_window or metadata.tokens),
        scale=attention.scaling,
        softcap=attention.softcap,
        segment_ids_BS=metadata.segment_ids_BT,
    )
    if mixer.spec.combine == "learned":
        fit_mix(mixer, mixer.remember(qkv, metadata, None), window_o_BTHV, target_BTHV)
        return
    fitted = mixer.calibration()
    books, biases = cast(tuple[Codebook, ...], fitted.codebooks), fitted.gate_biases
    for book in books:
        fit_codes(book, base_qkv, far_keys(attention, base_qkv, metadata))

    groups = mixer.dims.kv_heads
    best_G = target_BTHV.new_full((groups,), torch.inf, dtype=torch.float32)
    log_inv_temperatures = [
        log_inv_temperature for book in books for log_inv_temperature in (book.q_log_tau_H, book.k_log_tau_G)
    ]
    kept = [mixer.log_share_H, mixer.share_power_H, mixer.share_query_HD, *log_inv_temperatures, *biases]
    best = [parameter.clone() for parameter in kept]

    def attempt() -> None:
        nonlocal best_G, best
        memory = mixer.remember(qkv, metadata, None)
        error_H = fit_mix_weight(mixer, qkv.q_BTHD, memory, window_o_BTHV, window_lse_BTH, target_BTHV)
        error_G = error_H.unflatten(0, (groups, -1)).sum(1)
        better_G = error_G < best_G
        best_G = torch.where(better_G, error_G, best_G)
        best = [_where(better_G, parameter, old) for parameter, old in zip(kept, best)]

    def take_best() -> None:
        for parameter, value in zip(kept, best):
            parameter.copy_(value)

    for inv_temperature in INV_TEMPERATURES if books else INV_TEMPERATURES[:1]:
        for log_inv_temperature in log_inv_temperatures:
            log_inv_temperature.fill_(math.log(inv_temperature))
        attempt()
    take_best()
    starts = [bias.clone() for bias in biases]
    for step in GATE_STEPS if biases else ():
        for bias, start in zip(biases, starts):
            bias.copy_(start + step)
        attempt()
    take_best()


def far_keys(attention: LinearizedAttention, qkv: QKV, metadata: SequenceMetadata) -> tuple[Tensor, Tensor]:
    """Where the base's attention goes beyond the window and the sinks, for each query.

    Returns the attention-weighted sum of those keys (before rotary) [B,T,H,D], and the sum of the weights [B,T,H].
    """
    groups, spec = attention.dims.kv_heads, attention.spec
    pulled, weight = [], []
    for b, rank_T in enumerate(metadata.position_BT):
        distance_TT = rank_T[:, None] - rank_T
        seen_TT = (distance_TT >= 0) & (distance_TT < (attention.base_window or metadata.tokens))
        if metadata.segment_ids_BT is not None:
            seen_TT &= metadata.segment_ids_BT[b, :, None] == metadata.segment_ids_BT[b]
        far_TT = seen_TT & (distance_TT >= spec.window) & (rank_T >= spec.sinks)
        for g in range(groups):  # one group at a time: the T x T weights of all heads would take too much memory
            q_RTD = qkv.q_rot_BTHD[b].unflatten(1, (groups, -1))[:, g].transpose(0, 1).float()
            logits_RTT = q_RTD @ qkv.k_rot_BTGD[b, :, g].float().mT * attention.scaling
            if attention.softcap is not None:
                logits_RTT = attention.softcap * (logits_RTT / attention.softcap).tanh()
            weights_RTT = logits_RTT.masked_fill(~seen_TT, -torch.inf).softmax(-1) * far_TT
            pulled.append(weights_RTT @ qkv.k_BTGD[b, :, g].float())
            weight.append(weights_RTT.sum(-1))
    batch = len(metadata.position_BT)
    pulled_BGRTD = torch.stack(pulled).unflatten(0, (batch, groups))
    weight_BGRT = torch.stack(weight).unflatten(0, (batch, groups))
    return pulled_BGRTD.flatten(1, 2).transpose(1, 2), weight_BGRT.flatten(1, 2).transpose(1, 2)


def fit_codes(book: Codebook, qkv: QKV, far: tuple[Tensor, Tensor]) -> None:
    """Sets P, b and C of a codebook from the query-key pairs that attend to each other beyond the window.

    With whitened queries and keys, M_h is the mean of q k^T over the pairs of head h. The leading eigenvectors of the
    weighted sum over h of M_h^T M_h span the code space of a key-value head. Each query head maps into it by its own
    M_h. far: the result of `far_keys`.
    """
    q_NHD, k_NGD = qkv.q_BTHD.float().flatten(0, 1), qkv.k_BTGD.float().flatten(0, 1)
    pulled_NHD, weight_NH = far[0].flatten(0, 1), far[1].flatten(0, 1)
    groups, size = book.k_shift_GE.shape
    q_mean_HD, k_mean_GD = q_NHD.mean(0), k_NGD.mean(0)
    q_NHD, k_NGD = q_NHD - q_mean_HD, k_NGD - k_mean_GD
    q_white_HDD, k_white_GDD = _whitener(q_NHD), _whitener(k_NGD)
    shared = q_NHD.shape[1] // groups
    pulled_NHD = pulled_NHD - weight_NH[..., None] * k_mean_GD.repeat_interleave(shared, 0)
    weight_H = weight_NH.sum(0).clamp_min(1e-6)  # some heads do not attend beyond the window at all
    pairs_HDD = torch.einsum("nhd,nhe->hde", q_NHD, pulled_NHD) / weight_H[:, None, None]
    pairs_GRDD = (q_white_HDD @ pairs_HDD @ k_white_GDD.repeat_interleave(shared, 0)).unflatten(0, (groups, shared))

    weight_GR = weight_H.unflatten(0, (groups, shared))
    weight_GR = weight_GR / weight_GR.sum(1, keepdim=True)
    squares_G, directions_GDE = _eigen(torch.einsum("gr,grxd,grxe->gde", weight_GR, pairs_GRDD, pairs_GRDD))
    strength_GE = squares_G.float()[:, -size:].flip(1).clamp_min(0).sqrt()
    directions_GDE = directions_GDE.float()[..., -size:].flip(2)
    k_turn_GDE = k_white_GDD @ directions_GDE * strength_GE[:, None] ** STRENGTH
    seen_GRDE = pairs_GRDD @ directions_GDE[:, None]
    strength_GRE = seen_GRDE.norm(dim=2, keepdim=True).clamp_min(1e-9)
    q_turn_HDE = q_white_HDD @ (seen_GRDE / strength_GRE * strength_GRE**STRENGTH).flatten(0, 1)
    book.k_turn_GDE.copy_(k_turn_GDE)
    book.q_turn_HDE.copy_(q_turn_HDE)
    book.k_shift_GE.copy_(-torch.einsum("gd,gde->ge", k_mean_GD, k_turn_GDE))
    book.q_shift_HE.copy_(-torch.einsum("hd,hde->he", q_mean_HD, q_turn_HDE))

    u_k = book.projected_keys(qkv.k_BTGD).flatten(0, 1).transpose(0, 1)
    u_q = book.projected_queries(qkv.q_BTHD).flatten(0, 1).unflatten(1, (groups, shared)).permute(1, 2, 0, 3)
    # a fifth of the clustered vectors are queries, so that no query lands where there is no code
    points = torch.cat((_some(u_k, SAMPLES * 4 // 5), _some(u_q.flatten(1, 2), SAMPLES // 5)), 1)
    book.codes_GFE.copy_(_clusters(points, book.codes_GFE.shape[1]))


def fit_mix_weight(
    mixer: Mixer,
    q_BTHD: Tensor,
    memory: MemoryOutput,
    window_o_BTHV: Tensor,
    window_lse_BTH: Tensor,
    target_BTHV: Tensor,
) -> Tensor:
    """Sets gamma, c and beta (see MixerSpec) of each head to bring its output closest to the target.

    Two candidates are tried for each head: gamma = 1 with c = 0, and a logistic regression on the best weight of each
    token, in which each token counts by how much its weight matters. For both, beta is then searched on a grid with
    steps of 0.5, because the error has several minima: a memory that recalls badly is best ignored.

    Returns the remaining squared error, [H].
    """
    assert memory.log_normalizer_BTH is not None
    step = memory.o_BTHV.float() - window_o_BTHV.float()
    gap = window_o_BTHV.float() - target_BTHV.float()
    # the squared error |gap + weight * step|^2 is a parabola in the weight
    square_BTH, slope_BTH, left_H = step.square().sum(-1), (gap * step).sum(-1), gap.square().sum((0, 1, 3))

    def best_on_grid() -> tuple[Tensor, list[Tensor]]:
        start_H = mixer.log_share_H.clone()
        log_odds_BTH = mixer.memory_logit(q_BTHD, memory) - window_lse_BTH
        grid_OH = torch.arange(-8.0, 12.5, 0.5, device=gap.device)[:, None].expand(-1, len(start_H))
        # plus an offset that all but closes the memory at every token, however low the window's logits are
        shut_H = (-8 - log_odds_BTH.amax((0, 1))).clamp_max(-8)
        offsets_OH = torch.cat((grid_OH, shut_H[None]))
        errors = []
        for offset_H in offsets_OH:
            mix_BTH = (log_odds_BTH + offset_H).sigmoid()
            errors.append(left_H + (mix_BTH * (2 * slope_BTH + mix_BTH * square_BTH)).sum((0, 1)))
        error_H, index_H = torch.stack(errors).min(0)
        offset_H = offsets_OH.gather(0, index_H[None])[0]
        return error_H, [start_H + offset_H, mixer.share_power_H.clone(), mixer.share_query_HD.clone()]

    mixer.log_share_H.zero_()
    mixer.share_power_H.fill_(1)
    mixer.share_query_HD.zero_()
    plain_H, plain = best_on_grid()
    wanted_BTH = (-slope_BTH / square_BTH.clamp_min(1e-12)).clamp(0, 1)
    weight_BTH = square_BTH * (memory.log_normalizer_BTH > EMPTY)
    parameters = (mixer.log_share_H, mixer.share_power_H, mixer.share_query_HD)
    found = _regress(q_BTHD.float(), memory.log_normalizer_BTH, window_lse_BTH, wanted_BTH, weight_BTH)
    for parameter, value in zip(parameters, found):
        parameter.copy_(value)
    error_H, regressed = best_on_grid()
    better_H = error_H < plain_H
    for parameter, new, old in zip(parameters, regressed, plain):
        parameter.copy_(_where(better_H, new, old))
    return torch.where(better_H, error_H, plain_H)


def fit_mix(mixer: Mixer, memory: MemoryOutput, window_o_BTHV: Tensor, target_BTHV: Tensor) -> None:
    """Sets the memory's weight s of each head, and the scale of each channel if the read has one.

    They are the least-squares fit of (1 - s) w + s o to the target, with w the window's output and o the memory's. The
    weight is clamped to MIXED, because it would get no gradient at 0 or 1.
    """
    w, o, t = (x.float().flatten(0, 1) for x in (window_o_BTHV, memory.o_BTHV, target_BTHV))
    size_HV = mixer.calibration().read_size
    if size_HV is None:
        step, gap = o - w, w - t
        share_H = -(gap * step).sum((0, 2)) / step.square().sum((0, 2)).clamp_min(1e-12)
        mixer.mix_H.copy_(share_H.clamp(*MIXED).logit())
        return
    # a w + c o with one a per head and one c per channel: the best c is linear in a, so the error is a parabola in a
    ww, oo, wo, wt, ot = ((x * y).sum(0) for x, y in ((w, w), (o, o), (w, o), (w, t), (o, t)))
    oo = oo.clamp_min(1e-12)
    a_H = (wt - ot * wo / oo).sum(-1) / (ww - wo.square() / oo).sum(-1).clamp_min(1e-12)
    share_H = (1 - a_H).clamp(*MIXED)
    mixer.mix_H.copy_(share_H.logit())
    size_HV.mul_((ot - (1 - share_H)[:, None] * wo) / oo / share_H[:, None])


def _regress(
    q_BTHD: Tensor, log_normalizer_BTH: Tensor, window_lse_BTH: Tensor, wanted_BTH: Tensor, weight_BTH: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Logistic regression: weight = sigmoid(gamma log m + c q / sqrt(D) + beta - window's lse).

    Returns beta [H], gamma [H] >= 0 and c [H,D].
    """
    log_normalizer_HN, lse_HN = (
        x_BTH.float().flatten(0, 1).T for x_BTH in (log_normalizer_BTH.clamp_min(EMPTY), window_lse_BTH)
    )
    wanted_HN, weight_HN = wanted_BTH.flatten(0, 1).T, weight_BTH.flatten(0, 1).T
    weight_HN = weight_HN / weight_HN.sum(1, keepdim=True).clamp_min(1e-12)
    dim = q_BTHD.shape[-1]
    q_HND = q_BTHD.flatten(0, 1).transpose(0, 1) / dim**0.5
    known = torch.cat((log_normalizer_HN[..., None], q_HND, torch.ones_like(log_normalizer_HN)[..., None]), -1)
    at_rest = torch.zeros(known.shape[::2], device=known.device)
    at_rest[:, 0] = 1

    def newton(known_HNX: Tensor, at_rest_HX: Tensor) -> Tensor:
        theta_HX = at_rest_HX.clone()
        keep_X = torch.full_like(theta_HX[0], 1e-3)
        keep_X[-1] = 1e-6  # the offset is hardly regularized
        for _ in range(NEWTON_STEPS):
            share_HN = ((known_HNX @ theta_HX[..., None])[..., 0] - lse_HN).sigmoid()
            miss_HN = weight_HN * (share_HN - wanted_HN)
            slope_HX = (miss_HN[:, None] @ known_HNX)[:, 0] + keep_X * (theta_HX - at_rest_HX)
            bend_HN = weight_HN * (share_HN * (1 - share_HN) + 1e-4)
            bend_HXX = (known_HNX * bend_HN[..., None]).mT @ known_HNX + keep_X.diag()
            step_HX = _solve(bend_HXX, slope_HX)
            theta_HX -= step_HX * (3 / step_HX.abs().amax(-1, keepdim=True).clamp_min(3))
        return theta_HX

    theta_HX = newton(known, at_rest)
    # a larger normalizer must not lower the weight: heads for which it would are fitted without the normalizer
    without_HX = nnf.pad(newton(known[..., 1:], at_rest[:, 1:]), (1, 0))
    theta_HX = torch.where(theta_HX[:, :1] > 0, theta_HX, without_HX)
    return theta_HX[:, -1], theta_HX[:, 0], theta_HX[:, 1:-1]


def _solve(bend_HXX: Tensor, slope_HX: Tensor) -> Tensor:
    """[H,X]: the solutions of symmetric, positive definite systems, in float64.

    A float32 sum may miss that by its rounding, so a multiple of the identity above it is added. Where Newton's method
    ends, the slope is 0, and this makes no difference.
    """
    ridge_H = 1e-6 * bend_HXX.diagonal(dim1=1, dim2=2).sum(-1)
    ridge_HXX = ridge_H[:, None, None] * torch.eye(bend_HXX.shape[1], device=bend_HXX.device)
    factor_HXX = torch.linalg.cholesky((bend_HXX + ridge_HXX).double())
    return torch.cholesky_solve(slope_HX.double()[..., None], factor_HXX)[..., 0].float()


def _whitener(x_NKD: Tensor) -> Tensor:
    """[K,D,D]: the symmetric matrix that brings the covariance of centered vectors close to the identity."""
    values_KD, vectors_KDD = _eigen(torch.einsum("nkd,nke->kde", x_NKD, x_NKD) / len(x_NKD))
    scale_KD = (values_KD.clamp_min(0) + RIDGE * values_KD.mean(-1, keepdim=True)).clamp_min(1e-12).rsqrt()
    return (vectors_KDD @ (scale_KD[..., None] * vectors_KDD.mT)).float()


def _eigen(squares_KDD: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors, in float64. Raises LinearizeError if the squares are not finite."""
    if not bool(squares_KDD.isfinite().all()):
        raise LinearizeError("calibration: the squares of the base's queries and keys are not finite; is it damaged?")
    values_KD, vectors_KDD = torch.linalg.eigh(squares_KDD.double())
    return values_KD, vectors_KDD


def _some(x_GNE: Tensor, count: int) -> Tensor:
    return x_GNE[:, :: max(1, -(-x_GNE.shape[1] // count))]


def _clusters(points_GNE: Tensor, count: int) -> Tensor:
    """[G,count,E]: unit-length cluster centers of unit vectors, by spherical k-means from evenly spaced points."""
    points = points_GNE.shape[1]
    first = torch.arange(count, device=points_GNE.device) * points // count % points
    centres_GFE = points_GNE[:, first]
    for _ in range(CLUSTER_STEPS):
        nearest_GN = (points_GNE @ centres_GFE.mT).argmax(-1)
        sums_GFE = torch.zeros_like(centres_GFE).scatter_add_(
            1, nearest_GN[..., None].expand_as(points_GNE), points_GNE
        )
        found_GF1 = sums_GFE.norm(dim=-1, keepdim=True) > 1e-6  # a center without points stays
        centres_GFE = torch.where(found_GF1, nnf.normalize(sums_GFE, dim=-1), centres_GFE)
    return centres_GFE


def _where(better: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """`new` for the heads where `better` is true, else `old`. Heads of a key-value head may share one entry of
    `better`."""
    better = better.repeat_interleave(len(new) // len(better))
    return torch.where(better.view(-1, *[1] * (new.dim() - 1)), new, old)
