"""The full result of a stage: the whole model in float32, written a tensor at a time, also where processes share it.

These gather one tensor after the other, all in the same order. The first process writes it and the others let it go.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from liger_convert.model.bases import meta_model
from liger_convert.model.shards import Entry, Shard, write_shards
from liger_convert.training.merge import Chain
from liger_convert.utils import processes

SHARD = 10**9  # bytes of a file at most, unless one tensor has more


@torch.no_grad()
def write_model(model: Any, folder: Path, start: Chain | None = None) -> None:
    """Writes the weights and config of `model` to `folder`.

    start: the model that the stage began with, where what is not trained is held in fewer digits than it is stored in:
    it is read there. Other processes, with which this one shares the weights, call `help_to_write` then.
    """
    plain = meta_model(model.config)
    folder.mkdir()
    write_shards([Shard(_entries(part, plain), _data(part, plain, start), None) for part in _parts(model)], folder)
    model.config.use_cache = True  # Trainer switches it off
    model.config.save_pretrained(folder)


@torch.no_grad()
def help_to_write(model: Any) -> None:
    """What the other processes do of a sharded model while the first one calls `write_model`."""
    for part in _parts(model):
        processes.barrier()
        for parameter in part.values():
            if parameter.requires_grad:
                _whole(parameter)


def _parts(model: nn.Module) -> Iterator[dict[str, nn.Parameter]]:
    """The parameters of each file, by name."""
    part: dict[str, nn.Parameter] = {}
    size = 0
    for name, parameter in model.named_parameters():
        nbytes = 4 * parameter.numel()
        if part and size + nbytes > SHARD:
            yield part
            part, size = {}, 0
        part[name] = parameter
        size += nbytes
    yield part


def _entries(part: dict[str, nn.Parameter], plain: Any) -> list[Entry]:
    stored: dict[str, Tensor] = {}
    for name, parameter in part.items():
        stored |= _stored(name, torch.empty(parameter.shape, dtype=torch.float32, device="meta"), plain)
    return Entry.of(stored)


def _data(part: dict[str, nn.Parameter], plain: Any, start: Chain | None) -> Iterator[Tensor]:
    """The tensors of a file, flat, when their turn comes."""
    if start is not None:
        processes.barrier()  # what is written of a file may take as long as a collective waits, but not that of all
    for name, parameter in part.items():
        if start is None or parameter.requires_grad:
            stored = _stored(name, _whole(parameter), plain)
        elif name in start.checkpoint.tensors:
            stored = _stored(name, start.read(name), plain)
        else:  # stored in pieces, such as experts that the model has fused
            stored = {
                piece: start.read(piece) for piece in _stored(name, torch.empty_like(parameter, device="meta"), plain)
            }
        while stored:
            yield stored.pop(next(iter(stored))).cpu().contiguous().view(-1)


def _whole(parameter: Tensor) -> Tensor:
    """A parameter in float32, with all its slices."""
    whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
    return whole.float()


def _stored(name: str, tensor: Tensor, plain: Any) -> dict[str, Tensor]:
    """A parameter as a checkpoint holds it, by name: in several tensors where the model fuses them."""
    stored: dict[str, Tensor] = revert_weight_conversion(plain, {name: tensor})
    return stored
