"""The definition of a memory that is a model, with a loop over tokens, a separate state for every query head, and
gradients by autograd.

Shapes: B batch, T tokens, H query heads, G key-value heads, F feature size, V value size, W hidden size, P weights of
the model.
"""

from __future__ import annotations

import torch
import torch.nn.functional as nnf
from torch import Tensor


def naive_inner_model(
    q_BTHF: Tensor,
    k_BTGF: Tensor,
    v_BTGV: Tensor,
    eta_BTG1: Tensor,
    log_a: Tensor | None,
    log_m: Tensor | None,
    written_BTG1: Tensor,
    *,
    first_GFW: Tensor,
    second_GWV: Tensor | None = None,
    norm_G2V: Tensor | None = None,
    scale: float = 1.0,
    mini_batch: int = 16,
    initial_state: Tensor | None = None,
    segment_ids_BT: Tensor | None = None,
    exclusive: bool = False,
) -> tuple[Tensor, Tensor]:
    """See `gated_kernels.chunk_inner_model`. Computed in the dtype of the values, but in at least fp32."""
    B, T, H, _ = q_BTHF.shape
    R = H // v_BTGV.shape[2]
    dtype = torch.promote_types(v_BTGV.dtype, torch.float32)
    q, k, v, eta = (x.to(dtype).repeat_interleave(H // x.shape[2], 2) for x in (q_BTHF, k_BTGF, v_BTGV, eta_BTG1))
    no_gate = torch.zeros_like(eta)
    log_a = no_gate if log_a is None else log_a.to(dtype).repeat_interleave(R, 2)
    m = no_gate if log_m is None else log_m.to(dtype).repeat_interleave(R, 2).exp()
    written = written_BTG1.bool().repeat_interleave(R, 2)
    layers = [x.to(dtype).repeat_interleave(R, 0) for x in (first_GFW, second_GWV) if x is not None]
    norm = None if norm_G2V is None else norm_G2V.to(dtype).repeat_interleave(R, 0)
    start = torch.cat([x.flatten(1) for x in layers], 1)
    P = start.shape[1]

    def output(weights: Tensor, x: Tensor) -> Tensor:
        """f(x) of x [B, H, F] with weights [B, H, P]."""
        y, parts = scale * x, weights.split([part[0].numel() for part in layers], -1)
        for i, (part, layer) in enumerate(zip(parts, layers)):
            y = nnf.gelu(y, approximate="tanh") if i else y
            y = torch.einsum("bhf,bhfw->bhw", nnf.pad(y, (0, 1), value=1.0), part.unflatten(-1, layer.shape[1:]))
        return y if norm is None else x + nnf.layer_norm(y, y.shape[-1:], eps=1e-6) * norm[:, 0] + norm[:, 1]

    def gradient(weights: Tensor, x: Tensor, target: Tensor) -> Tensor:
        with torch.enable_grad():
            weights = weights if weights.requires_grad else weights.detach().requires_grad_()
            loss = (output(weights, x) - target).square().sum() / 2
            return torch.autograd.grad(loss, weights, create_graph=True)[0]

    if initial_state is None:
        initial_state = v.new_zeros(B, H // R, 2 if log_m is None else 3, P + 2)
    rows = initial_state.to(dtype).repeat_interleave(R, 1)
    delta, anchor = rows[:, :, 0, :P], rows[:, :, 1, :P]
    decay, anchor_decay, count = rows[:, :, 0, P : P + 1], rows[:, :, 1, P : P + 1], rows[:, :, 0, P + 1 :].detach()
    momentum = torch.zeros_like(delta) if log_m is None else rows[:, :, 2, :P]
    outputs = []
    for t in range(T):
        if segment_ids_BT is not None and t > 0:
            same = (segment_ids_BT[:, t] == segment_ids_BT[:, t - 1])[:, None, None]
            delta, anchor, momentum = delta * same, anchor * same, momentum * same
            decay, anchor_decay, count = decay * same, anchor_decay * same, count * same
        if exclusive:
            outputs.append(output(decay.exp() * start + delta, q[:, t]))
        now = written[:, t]
        step = -eta[:, t] * gradient(anchor_decay.exp() * start + anchor, k[:, t], v[:, t])
        momentum = m[:, t] * momentum + step
        delta, decay = log_a[:, t].exp() * delta + now * momentum, decay + log_a[:, t]
        count = count + now
        full = count == mini_batch
        anchor, anchor_decay = torch.where(full, delta, anchor), torch.where(full, decay, anchor_decay)
        count = count.masked_fill(full, 0)
        if not exclusive:
            outputs.append(output(decay.exp() * start + delta, q[:, t]))
    none = torch.zeros_like(count)
    last = [torch.cat([delta, decay, count], -1), torch.cat([anchor, anchor_decay, none], -1)]
    if log_m is not None:
        last.append(torch.cat([momentum, none, none], -1))
    return torch.stack(outputs, 1).to(v_BTGV.dtype), torch.stack(last, 2)[:, ::R]
