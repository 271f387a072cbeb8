"""Averages gradients across processes after the backward pass, not during it.

DDP all-reduces gradients from backward hooks, and a replayed CUDA graph runs no hooks. So a stage whose passes are
captured does not use DDP. Its graphs write their gradients into views of one flat tensor per dtype, see `flat_like`.
The processes all-reduce the flat tensors after the last micro-batch of a step. Overlapping this with the backward pass
would save little: a model whose steps are worth capturing has small gradients.

The all-reduce needs no host synchronization. If the host waited for the passes, it would launch clipping and the
optimizer only after them, and the GPU would idle before each launch. Whether the flat tensors have the same layout in
all processes is checked before the step, while the GPU is idle, see `are_alike`. If they differ, as in steps during
which graphs are still being captured, `average_gradients` finds out which gradients exist, and synchronizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed import ReduceOp, all_reduce, broadcast

PIECE = 1 << 26  # elements that are copied into one buffer and all-reduced together
ALIGNED = 512  # bytes, like CUDA's allocator: a tensor's alignment determines a kernel's summation order


@torch.no_grad()
def begin_alike(model: nn.Module) -> None:
    """Broadcasts the first process's parameters and buffers to all, as DDP does. A collective call."""
    for tensor in (*model.parameters(), *model.buffers()):
        sent = tensor.data.contiguous()
        broadcast(sent, 0)
        tensor.data.copy_(sent)


def flat_like(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Packs tensors of the same shapes, strides and dtypes as these into one flat tensor for each dtype.

    Returns the views, in the order of `tensors`, and the flat tensors that they share storage with, filled with zeros.
    `tensors` must be dense.
    """
    begins, sizes = [], Counter[torch.dtype]()
    for tensor in tensors:
        begins.append(sizes[tensor.dtype])
        sizes[tensor.dtype] += -(-tensor.nbytes // ALIGNED) * ALIGNED // tensor.itemsize
    flats = {dtype: torch.zeros(size, dtype=dtype, device=tensors[0].device) for dtype, size in sizes.items()}
    parts = [flats[x.dtype].as_strided(x.shape, x.stride(), begin) for x, begin in zip(tensors, begins)]
    return parts, list(flats.values())


def are_alike(number: int, device: torch.device) -> bool:
    """Whether all processes pass the same nonzero number. A collective call; waits for `device`."""
    ends = torch.tensor([number, -number], device=device)
    all_reduce(ends, ReduceOp.MAX)
    most, least = ends.tolist()
    return most == -least != 0


@torch.no_grad()
def average_flats(flats: Sequence[Tensor], processes: int) -> None:
    """Replaces each tensor by its mean over all `processes` processes, in place. A collective call: the tensors must
    have the same layout in every process."""
    for flat in flats:
        all_reduce(flat)
        flat /= processes


@torch.no_grad()
def average_gradients(parameters: Sequence[nn.Parameter], processes: int) -> None:
    """Replaces each gradient by its mean over all `processes` processes, in place.

    A gradient that is missing here but present elsewhere counts as zeros. One that no process has stays None. A
    collective call, with the same parameters in every process.
    """
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
    """Groups consecutive gradients of the same dtype, up to PIECE elements a group. A larger gradient is a group of
    its own."""
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
