"""Sharded checkpoints: every process writes and reads its own slices of the tensors.

torch.distributed.checkpoint (DCP) stores each slice with its offset, so that any number of processes can read what any
other number wrote, sharded or not. Sharded processes can also read a checkpoint of whole tensors, each its own slices.

Names: `weights.P`, `average.P`, and `optimizer.P.S` for each state S of parameter P.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp

from liger_convert.training.sharding import copy_whole
from liger_convert.utils import processes

FOLDER = "shards"  # inside a checkpoint


def is_sharded(checkpoint: Path) -> bool:
    """Whether a checkpoint is sharded."""
    return (checkpoint / FOLDER).is_dir()


def save(
    checkpoint: Path, trained: Mapping[str, nn.Parameter], optimizer: Any, average: Mapping[str, Tensor] | None
) -> None:
    """Writes the trained parameters, their optimizer states, and the average if there is one. A collective call."""
    states = {
        f"optimizer.{name}.{state}": value
        for name, parameter in trained.items()
        for state, value in optimizer.state[parameter].items()
    }
    dcp.save(_weights(trained, average) | states, checkpoint_id=checkpoint / FOLDER)


def names(checkpoint: Path) -> list[str]:
    """The names of all tensors in a sharded checkpoint."""
    return list(dcp.FileSystemReader(checkpoint / FOLDER).read_metadata().state_dict_metadata)


def load_weights(checkpoint: Path, trained: Mapping[str, nn.Parameter], average: Mapping[str, Tensor] | None) -> None:
    """Reads the trained parameters, and the average if there is one, in place."""
    _load(checkpoint, _weights(trained, average))


def load_optimizer(checkpoint: Path, trained: Mapping[str, nn.Parameter], optimizer: Any) -> None:
    """Reads the optimizer states into `optimizer`. The learning rates are restored by the scheduler."""
    stored = set(names(checkpoint))
    states: dict[str, Tensor] = {}
    for name, parameter in trained.items():
        prefix = f"optimizer.{name}."
        for full in (full for full in stored if full.startswith(prefix)):
            state = full.removeprefix(prefix)
            states[full] = _like(parameter, state)
            optimizer.state[parameter][state] = states[full]
    _load(checkpoint, states)


def load_whole_optimizer(file: Path, parameters: Sequence[nn.Parameter], optimizer: Any) -> None:
    """Reads unsharded optimizer states from `file` into `optimizer`; each process keeps its own slices, if sharded.

    parameters: in the order of the optimizer that wrote the file. The file is memory-mapped, so beyond the states
    themselves only reclaimable memory is used.
    """
    saved = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    for number, parameter in enumerate(parameters):
        for state, whole in saved["state"].get(number, {}).items():
            made = _like(parameter, state)
            copy_whole(made, whole)
            optimizer.state[parameter][state] = made


def _like(parameter: nn.Parameter, state: str) -> Tensor:
    """A zero-filled optimizer state of a parameter, of its shape; Adam's `step` is a scalar."""
    if state == "step":
        return torch.zeros((), dtype=torch.float32, device=parameter.device)
    return torch.zeros_like(parameter, requires_grad=False)


def _weights(trained: Mapping[str, nn.Parameter], average: Mapping[str, Tensor] | None) -> dict[str, Any]:
    averages = {f"average.{name}": value for name, value in (average or {}).items()}
    return {f"weights.{name}": parameter.detach() for name, parameter in trained.items()} | averages


def _load(checkpoint: Path, tensors: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as intended with one process
        dcp.load(tensors, checkpoint_id=checkpoint / FOLDER, no_dist=processes.count() == 1)
