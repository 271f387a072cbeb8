"""What a test can do to the processes of an engine on several of them, where it has no hold of its own."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from served import broken, lose


class Breakable:
    """Becomes part of vLLM's worker, as its `worker_extension_cls`. No name here may be one that the worker has."""

    rank: int
    model_runner: Any
    faults: contextlib.ExitStack

    def lose_from_pages(self, group: str, rank: int) -> None:
        """Process `rank` zeroes the tensors of a group of its cache from now on."""
        self.faults = contextlib.ExitStack()
        if self.rank == rank:
            self.faults.enter_context(broken(lose(group)))

    def mend_faults(self) -> None:
        self.faults.close()

    def exchange_mixers(self) -> None:
        """Every process gets the mixers' parameters of the next."""
        from vllm.distributed import get_tp_group

        group, model = get_tp_group(), self.model_runner.model
        own = {name: parameter for name, parameter in model.named_parameters() if ".mixer." in name}
        of_ranks: list[Any] = [None] * group.world_size
        torch.distributed.all_gather_object(
            of_ranks, {name: parameter.data.clone() for name, parameter in own.items()}, group=group.cpu_group
        )
        for name, parameter in own.items():
            parameter.data.copy_(of_ranks[(self.rank + 1) % group.world_size][name])
