"""The tensors of a checkpoint whose weights are sharded: every process writes and reads its own slices.

torch.distributed.checkpoint (DCP) stores slices with their places, so that any number of processes reads what any
number wrote, sharded or not. A checkpoint of whole tensors is read by sharded processes as well, each its slices.

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

FOLDER = "shards"  # in a checkpoint


def is_sharded(checkpoint: Path) -> bool:
    """Whether a checkpoint's tensors are slices."""
    return (checkpoint / FOLDER).is_dir()


def save(
    checkpoint: Path, trained: Mapping[str, nn.Parameter], optimizer: Any, average: Mapping[str, Tensor] | None
) -> None:
    """Writes what is trained, the optimizer's states of it, and an average. All processes call it."""
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
    """Reads what is trained, and an average, in place."""
    _load(checkpoint, _weights(trained, average))


def load_optimizer(checkpoint: Path, trained: Mapping[str, nn.Parameter], optimizer: Any) -> None:
    """Reads the optimizer's states. The learning rates are the scheduler's."""
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
    """Reads an optimizer's states of whole tensors, of which each process takes its slices, or all. parameters: in the
    order in which the optimizer that wrote them had them. They come from the mapped file: beside the states themselves
    no memory is held that could not be given back."""
    saved = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    for number, parameter in enumerate(parameters):
        for state, whole in saved["state"].get(number, {}).items():
            made = _like(parameter, state)
            copy_whole(made, whole)
            optimizer.state[parameter][state] = made


def _like(parameter: nn.Parameter, state: str) -> Tensor:
    """An empty state of a parameter: of its shape, but for Adam's count of steps."""
    if state == "step":
        return torch.zeros((), dtype=torch.float32, device=parameter.device)
    return torch.zeros_like(parameter, requires_grad=False)


def _weights(trained: Mapping[str, nn.Parameter], average: Mapping[str, Tensor] | None) -> dict[str, Any]:
    averages = {f"average.{name}": value for name, value in (average or {}).items()}
    return {f"weights.{name}": parameter.detach() for name, parameter in trained.items()} | averages


def _load(checkpoint: Path, tensors: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it should be with one process
        dcp.load(tensors, checkpoint_id=checkpoint / FOLDER, no_dist=processes.count() == 1)
