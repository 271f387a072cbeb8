"""Gradients that processes average after the backward pass, and not in it.

DDP sends them from hooks of the backward pass, which a replayed CUDA graph has none of. So a stage whose passes are
captured goes without DDP. What its graphs write to are parts of one large tensor, see `flat_like`, which processes
average as it is when the passes of a step's last micro-batch are done. To send meanwhile would save little: a model
whose steps are worth capturing has small gradients.

No value is looked at for that. A host that waited for the passes would launch the clipping and the optimizer behind
them, and the GPU would wait for each launch. Whether large tensors mean the same in all processes is asked before the
step, when the GPU has nothing to do, see `are_alike`. Where they do not, as in steps in which graphs are still made,
`average_gradients` finds out which gradients there are, and waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed import ReduceOp, all_reduce, broadcast

PIECE = 1 << 26  # numbers, of which a piece is a copy
ALIGNED = 512  # bytes, as the allocator of a GPU has it: the order of a kernel's sums goes by where a tensor begins


@torch.no_grad()
def begin_alike(model: nn.Module) -> None:
    """Gives all processes the parameters and buffers of the first, as DDP does. All call it."""
    for tensor in (*model.parameters(), *model.buffers()):
        sent = tensor.data.contiguous()
        broadcast(sent, 0)
        tensor.data.copy_(sent)


def flat_like(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors like these, which are dense, as parts of a flat one for each dtype; and the flat ones, of zeros."""
    begins, sizes = [], Counter[torch.dtype]()
    for tensor in tensors:
        begins.append(sizes[tensor.dtype])
        sizes[tensor.dtype] += -(-tensor.nbytes // ALIGNED) * ALIGNED // tensor.itemsize
    flats = {dtype: torch.zeros(size, dtype=dtype, device=tensors[0].device) for dtype, size in sizes.items()}
    parts = [flats[x.dtype].as_strided(x.shape, x.stride(), begin) for x, begin in zip(tensors, begins)]
    return parts, list(flats.values())


def are_alike(number: int, device: torch.device) -> bool:
    """Whether all processes give the same number, other than 0. All call it."""
    ends = torch.tensor([number, -number], device=device)
    all_reduce(ends, ReduceOp.MAX)
    most, least = ends.tolist()
    return most == -least != 0


@torch.no_grad()
def average_flats(flats: Sequence[Tensor], processes: int) -> None:
    """Replaces each tensor by its mean over so many processes, in place. All call it, with tensors alike."""
    for flat in flats:
        all_reduce(flat)
        flat /= processes


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
        average_flats([flat], processes)
        torch._foreach_copy_(piece, list(_unflatten_dense_tensors(flat, piece)))


def _pieces(grads: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The gradients in their order, in groups of one dtype and of PIECE numbers at most, unless one has more."""
    piece: list[Tensor] = []
    size = 0
    for grad in grads:
        if piece and (grad.dtype != piece[0].dtype or size + grad.numel() > PIECE):
            yield piece
            piece, size = [], 0
        piece.append(grad)
        size += grad.numel()
    if piece:
        yield piece
