"""Gradients that processes average after the backward pass, and not in it.

DDP sends them from hooks of the backward pass, which a replayed CUDA graph has none of. So a stage whose passes are
captured goes without DDP: when those of a step's last micro-batch are done, its gradients go out in a few large pieces.
To send meanwhile would save little: a model whose steps are worth capturing has small gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed import ReduceOp, all_reduce, broadcast

PIECE = 1 << 26  # numbers, of which a piece is a copy


@torch.no_grad()
def begin_alike(model: nn.Module) -> None:
    """Gives all processes the parameters and buffers of the first, as DDP does. All call it."""
    for tensor in (*model.parameters(), *model.buffers()):
        sent = tensor.data.contiguous()
        broadcast(sent, 0)
        tensor.data.copy_(sent)


@torch.no_grad()
def average_gradients(parameters: Sequence[nn.Parameter], processes: int) -> None:
    """Replaces each gradient by its mean over so many processes, in place; one that only others have got counts as
    zeros here, and one that nobody has got stays None. All call it, with the same parameters."""
    got = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8, device=parameters[0].device)
    all_reduce(got, ReduceOp.MAX)
    grads = []
    for parameter, anywhere in zip(parameters, got.tolist(), strict=True):
        if anywhere:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            grads.append(parameter.grad)
    for piece in _pieces(grads):
        flat = _flatten_dense_tensors(piece)
        all_reduce(flat)
        flat /= processes
        torch._foreach_copy_(piece, list(_unflatten_dense_tensors(flat, piece)))


def _pieces(grads: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The gradients in their order, in groups of one dtype and of PIECE numbers at most, unless one has more."""
    piece: list[Tensor] = []
    for grad in grads:
        size = sum(other.numel() for other in piece)
        if piece and (grad.dtype != piece[0].dtype or size + grad.numel() > PIECE):
            yield piece
            piece = []
        piece.append(grad)
    if piece:
        yield piece
