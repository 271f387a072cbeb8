"""Sums over tokens of losses on logits, in float32, without a float32 tensor of all tokens and the whole vocabulary.

Shapes: B batch, T tokens, N = B * T, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_convert.data.packed_rows import IGNORED
from liger_convert.training.memory_estimate import CHUNK_LOGITS

ChunkLoss = Callable[[Tensor, slice], Tensor]


def next_tokens(labels_BT: Tensor, tokens: int | None = None) -> Tensor:
    """[N]: what each position should predict: the label of the next one, none at the end of a row. tokens: how many
    positions there are, where the labels of a shard end with the next one's first."""
    return F.pad(labels_BT[:, 1:], (0, 1), value=IGNORED)[:, :tokens].flatten()


def summed(logits_NV: Tensor, chunk_loss: ChunkLoss) -> Tensor:
    """The sum of `chunk_loss(logits[i:j], slice(i, j))` over chunks of tokens: a float32 scalar to differentiate.

    The gradient, in the dtype of `logits`, is computed chunk by chunk along with the loss, while the chunk is at hand.
    """
    return _Summed.apply(logits_NV, chunk_loss)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, chunk_loss: ChunkLoss) -> Tensor:
        grad_NV = torch.empty_like(logits_NV)
        total = logits_NV.new_zeros((), dtype=torch.float32)
        size = max(1, CHUNK_LOGITS[logits_NV.device.type] // logits_NV.shape[1])
        for start in range(0, len(logits_NV), size):
            chunk = slice(start, start + size)
            with torch.enable_grad():
                piece_NV = logits_NV[chunk].detach().requires_grad_()
                loss = chunk_loss(piece_NV, chunk)
            (grad_NV[chunk],) = torch.autograd.grad(loss, piece_NV)
            total += loss.detach()
        ctx.save_for_backward(grad_NV)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad_NV,) = ctx.saved_tensors
        return _fused(_scaled, grad_NV)(grad_NV, grads[0]), None


def _scaled(grad_NV: Tensor, scale: Tensor) -> Tensor:
    return grad_NV * scale


def cross_entropy(logits_NV: Tensor, next_N: Tensor) -> Tensor:
    """Sum over the tokens that have a next one."""
    return _fused(_cross_entropy, logits_NV)(logits_NV, next_N)


def kl_divergence(logits_NV: Tensor, teacher_NV: Tensor, next_N: Tensor, temperature: float) -> Tensor:
    """Sum of KL(teacher || student) at `temperature`, times its square (which keeps the gradients' size), over the
    tokens that have a next one."""
    return _fused(_kl_divergence, logits_NV)(logits_NV, teacher_NV, next_N, temperature)


def _cross_entropy(logits_NV: Tensor, next_N: Tensor) -> Tensor:
    return F.cross_entropy(logits_NV.float(), next_N, ignore_index=IGNORED, reduction="sum")


def _kl_divergence(logits_NV: Tensor, teacher_NV: Tensor, next_N: Tensor, temperature: float) -> Tensor:
    student_NV = F.log_softmax(logits_NV.float() / temperature, -1)
    teacher_NV = F.log_softmax(teacher_NV.float() / temperature, -1)
    kl_N = F.kl_div(student_NV, teacher_NV, log_target=True, reduction="none").sum(-1)
    # selecting the tokens instead would make the host wait for their number
    return kl_N.masked_fill(next_N == IGNORED, 0).sum() * temperature**2


@functools.cache
def _compiled(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(loss)


def _fused(loss: Callable[..., Tensor], logits_NV: Tensor) -> Callable[..., Tensor]:
    """`loss`, on a GPU as few kernels that keep no float32 tensor of the logits' size."""
    return _compiled(loss) if logits_NV.is_cuda else loss
