"""Writes the full result of a stage: the whole model in float32, one tensor at a time, sharded or not.

If the weights are sharded, all processes gather one tensor after the other in the same order. The first process writes
each tensor, and the others discard it.
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

SHARD = 10**9  # maximum bytes per file, unless a single tensor is larger


@torch.no_grad()
def write_model(model: Any, folder: Path, start: Chain | None = None) -> None:
    """Writes the weights (float32) and config of `model` to the new folder `folder`.

    start: the model that the stage started from. It is needed if the frozen weights are held at reduced precision; they
    are then read from there. If the weights are sharded, the other processes must call `help_to_write` meanwhile.
    """
    plain, sharded = meta_model(model.config), any(isinstance(parameter, DTensor) for parameter in model.parameters())
    folder.mkdir()
    shards = [Shard(_entries(part, plain), _data(part, plain, start, sharded), None) for part in _parts(model)]
    write_shards(shards, folder)
    model.config.use_cache = True  # Trainer switches it off
    model.config.save_pretrained(folder)


@torch.no_grad()
def help_to_write(model: Any) -> None:
    """The counterpart of `write_model` for a sharded model: all processes but the first call it."""
    for part in _parts(model):
        processes.barrier()
        for parameter in part.values():
            if parameter.requires_grad:
                _whole(parameter)


def _parts(model: nn.Module) -> Iterator[dict[str, nn.Parameter]]:
    """The parameters by name, split into one part for each file."""
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


def _data(part: dict[str, nn.Parameter], plain: Any, start: Chain | None, sharded: bool) -> Iterator[Tensor]:
    """Yields the tensors of a file in order, flattened and on the CPU."""
    if sharded:
        # that of `help_to_write`; per file, because writing all files may take longer than the timeout of a collective
        processes.barrier()
    for name, parameter in part.items():
        if start is None or parameter.requires_grad:
            stored = _stored(name, _whole(parameter), plain)
        elif name in start.checkpoint.tensors:
            stored = _stored(name, start.read(name), plain)
        else:  # stored as several tensors, such as experts that the model fuses
            stored = {
                piece: start.read(piece) for piece in _stored(name, torch.empty_like(parameter, device="meta"), plain)
            }
        while stored:
            yield stored.pop(next(iter(stored))).cpu().contiguous().view(-1)


def _whole(parameter: Tensor) -> Tensor:
    """A parameter in float32, gathered if it is sharded."""
    whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
    return whole.float()


def _stored(name: str, tensor: Tensor, plain: Any) -> dict[str, Tensor]:
    """The tensors, by name, that a checkpoint stores for a parameter: several if the model fuses them into one."""
    stored: dict[str, Tensor] = revert_weight_conversion(plain, {name: tensor})
    return stored
