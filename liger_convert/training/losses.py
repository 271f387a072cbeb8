"""Losses on logits, summed over tokens in float32, without a float32 tensor of all tokens times the vocabulary.

Shapes: B batch, T tokens, N = B * T, C hidden size, V vocabulary, X either of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_convert.data.packed_rows import IGNORED
from liger_convert.model.output_head import OutputHead
from liger_convert.training.memory_estimate import CHUNK_LOGITS, HEAD_LOGITS

ChunkLoss = Callable[[Tensor, slice], Tensor]


def next_tokens(labels_BT: Tensor, tokens: int | None = None) -> Tensor:
    """[N]: the target of each position, which is the label of the next position, or IGNORED at the end of a row.

    tokens: the number of positions per row, if `labels_BT` has one more: with sequence parallelism, the labels of a
    shard end with the first label of the next shard.
    """
    return F.pad(labels_BT[:, 1:], (0, 1), value=IGNORED)[:, :tokens].flatten()


def summed(states_NX: Tensor, chunk_loss: ChunkLoss, head: OutputHead | None = None) -> Tensor:
    """The sum of `chunk_loss(logits[i:j], slice(i, j))` over chunks of tokens, as a differentiable float32 scalar.

    states_NX: the logits [N,V]; or, with a `head`, the hidden states [N,C] from which it computes logits chunk by
    chunk, so that the logits of all tokens never exist at once. Gradients are computed in the forward pass, along with
    each chunk's loss: that of `states_NX` in its dtype, those of the head's weights accumulated in float32. Second
    derivatives are not supported.
    """
    if head is None:
        return _OfLogits.apply(states_NX, chunk_loss)
    return _OfHidden.apply(states_NX, head.weight_VC, head.bias_V, head.bounded, chunk_loss)


class _OfLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, chunk_loss: ChunkLoss) -> Tensor:
        grad_NV = torch.empty_like(logits_NV)
        total = _differentiated(logits_NV, chunk_loss, grad_NV)
        ctx.save_for_backward(grad_NV)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad_NV,) = ctx.saved_tensors
        return _fused(_scaled, grad_NV)(grad_NV, grads[0]), None


class _OfHidden(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NC: Tensor,
        weight_VC: Tensor,
        bias_V: Tensor | None,
        bounded: Callable[[Tensor], Tensor],
        chunk_loss: ChunkLoss,
    ) -> Tensor:
        device, (vocabulary, _) = hidden_NC.device.type, weight_VC.shape
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight_VC.dtype
        used_VC, used_V = weight_VC.to(dtype), None if bias_V is None else bias_V.to(dtype)
        grad_NC = torch.empty_like(hidden_NC) if ctx.needs_input_grad[0] else None
        grad_VC = torch.zeros_like(weight_VC, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        grad_V = weight_VC.new_zeros(vocabulary, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        total = hidden_NC.new_zeros((), dtype=torch.float32)
        size = max(1, HEAD_LOGITS[device] // vocabulary)

        def loss(piece_NV: Tensor, chunk: slice) -> Tensor:
            return chunk_loss(bounded(piece_NV), chunk)

        for start in range(0, len(hidden_NC), size):
            chunk = slice(start, start + size)
            chunk_NC = hidden_NC[chunk].to(dtype)
            product_NV = F.linear(chunk_NC, used_VC, used_V)
            d_NV = torch.empty_like(product_NV)
            total += _differentiated(product_NV, loss, d_NV, start)
            if grad_NC is not None:
                grad_NC[chunk] = d_NV @ used_VC
            if grad_VC is not None:
                grad_VC += d_NV.T @ chunk_NC
            if grad_V is not None:
                grad_V += d_NV.sum(0, dtype=torch.float32)
        ctx.save_for_backward(grad_NC, grad_VC, grad_V)
        ctx.dtypes = weight_VC.dtype, None if bias_V is None else bias_V.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_NC, grad_VC, grad_V = (None if x is None else x * grads[0] for x in ctx.saved_tensors)
        of_weight, of_bias = ctx.dtypes
        return (
            grad_NC,
            None if grad_VC is None else grad_VC.to(of_weight),
            None if grad_V is None else grad_V.to(of_bias),
            None,
            None,
        )


def _differentiated(logits_NV: Tensor, chunk_loss: ChunkLoss, grad_NV: Tensor, first: int = 0) -> Tensor:
    """The sum of the chunk losses over `logits_NV`, detached; writes its gradient to `grad_NV`. first: the index of the
    first row of `logits_NV` among all tokens."""
    total = logits_NV.new_zeros((), dtype=torch.float32)
    size = max(1, CHUNK_LOGITS[logits_NV.device.type] // logits_NV.shape[1])
    for start in range(0, len(logits_NV), size):
        end = min(start + size, len(logits_NV))
        with torch.enable_grad():
            piece_NV = logits_NV[start:end].detach().requires_grad_()
            loss = chunk_loss(piece_NV, slice(first + start, first + end))
        (grad_NV[start:end],) = torch.autograd.grad(loss, piece_NV)
        total += loss.detach()
    return total


def _scaled(grad_NV: Tensor, scale: Tensor) -> Tensor:
    return grad_NV * scale


def cross_entropy(logits_NV: Tensor, next_N: Tensor) -> Tensor:
    """Cross-entropy, summed over the tokens whose target in `next_N` is not IGNORED. A float32 scalar."""
    return _fused(_cross_entropy, logits_NV)(logits_NV, next_N)


def kl_divergence(logits_NV: Tensor, teacher_NV: Tensor, next_N: Tensor, temperature: float) -> Tensor:
    """KL(teacher || student) at `temperature`, summed over the tokens whose target in `next_N` is not IGNORED.

    It is multiplied by the squared temperature, which keeps the scale of the gradients. A float32 scalar.
    """
    return _fused(_kl_divergence, logits_NV)(logits_NV, teacher_NV, next_N, temperature)


def _cross_entropy(logits_NV: Tensor, next_N: Tensor) -> Tensor:
    return F.cross_entropy(logits_NV.float(), next_N, ignore_index=IGNORED, reduction="sum")


def _kl_divergence(logits_NV: Tensor, teacher_NV: Tensor, next_N: Tensor, temperature: float) -> Tensor:
    student_NV = F.log_softmax(logits_NV.float() / temperature, -1)
    teacher_NV = F.log_softmax(teacher_NV.float() / temperature, -1)
    kl_N = F.kl_div(student_NV, teacher_NV, log_target=True, reduction="none").sum(-1)
    # masked, not indexed: indexing would make the host wait for the number of tokens
    return kl_N.masked_fill(next_N == IGNORED, 0).sum() * temperature**2


@functools.cache
def _compiled(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(loss)


def _fused(loss: Callable[..., Tensor], logits_NV: Tensor) -> Callable[..., Tensor]:
    """`loss`, compiled on a GPU: its few fused kernels keep no float32 tensor of the logits' size."""
    return _compiled(loss) if logits_NV.is_cuda else loss
