"""Counts the bytes that the collectives of tiny stages move while they train; started by torchrun.

    torchrun --nproc-per-node 2 tests/support/sent.py JOBS.json

A job is one of `ranks.py`. What is said of it has for each process the bytes of its collectives, by their names, those
of no more than SMALL left out, unless one process sends to another.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import Any
from unittest import mock

import torch.distributed as dist
from ranks import do, given_jobs
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from liger_convert.training import stage as module
from liger_convert.training.one_layer import LayerTrainer

SMALL = 256  # bytes: counts, losses, norms


class Moved(TorchDispatchMode):
    """The bytes of all tensors that collectives were given to send, by the collective's name.

    Of a gather and a scatter it is the whole tensor, all processes' parts together.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = Counter[str]()
        self.small = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # comes again, as what is done with its slice
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::").strip("_")
            tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
            # of a gather or a scatter the larger one is the whole
            size = max((x.nbytes for x in tensors), default=0)
            if size > SMALL or name in ("send", "recv"):
                self.found[name] += size
            else:
                self.small += size
        return func(*args, **(kwargs or {}))


def count(job: dict[str, Any]) -> dict[str, int]:
    moved, train = Moved(), module._train

    def counted(*args: Any) -> float:
        with moved:
            return train(*args)

    def counted_layer(self: Any, *args: Any, **kwargs: Any) -> Any:
        with moved:
            return super(LayerTrainer, self).train(*args, **kwargs)

    with mock.patch.object(module, "_train", counted), mock.patch.object(LayerTrainer, "train", counted_layer):
        do(job)
    return {**moved.found, "small": moved.small}


if __name__ == "__main__":
    for job in given_jobs():
        found = count(job)
        all_found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(all_found, found)
        if os.environ["RANK"] == "0":
            print(json.dumps({"processes": all_found}), flush=True)
