"""A CUDA graph on a CPU: records the operations of a function and repeats them on the same tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOST_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}


class RecordedOps(TorchDispatchMode):
    """Runs each operation and keeps it. Like a capture, it refuses what reads a value on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # storages that existed, and their content
        self.made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in HOST_READS:
            raise RuntimeError(f"{func} reads a value on the host, which a graph cannot")
        kwargs = kwargs or {}
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and (key := tensor.untyped_storage().data_ptr()) not in self.made:
                whole = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
                self.before.setdefault(key, (whole, whole.clone()))
        found = func(*args, **kwargs)
        outputs = [x for x in tree_leaves(found) if isinstance(x, Tensor)]
        self.made |= {key for x in outputs if (key := x.untyped_storage().data_ptr()) not in self.before and key != 0}
        self.ops.append((func, args, kwargs, outputs))
        return found

    def undo(self) -> None:
        """Restores all tensors that existed before, since a capture runs nothing."""
        for now, content in self.before.values():
            now.copy_(content)

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, outputs in self.ops:
                again = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
                for kept, new in zip(outputs, again, strict=True):
                    if kept.data_ptr() != new.data_ptr():
                        kept.copy_(new)


def graphs_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Prompts are read with graphs on a CPU, which are recorded operations. Returns words for what happens."""
    from liger_convert.model import prompt_graphs

    done: list[str] = []

    @contextlib.contextmanager
    def capturing() -> Iterator[None]:
        """Ops that may read values otherwise see that they must not."""
        with monkeypatch.context() as patches:
            patches.setattr(torch.cuda, "is_initialized", lambda: True)
            patches.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            yield

    def record(work: Callable[[], None], _: Any) -> Callable[[], None]:
        with capturing(), RecordedOps() as ops:
            work()
        ops.undo()
        done.append("recorded")

        def replay() -> None:
            done.append("replayed")
            ops.replay()

        return replay

    @contextlib.contextmanager
    def without_waiting() -> Iterator[None]:
        done.append("run")
        with capturing():
            yield

    monkeypatch.setattr(prompt_graphs, "record", record)
    monkeypatch.setattr(prompt_graphs, "without_waiting", without_waiting)
    monkeypatch.setattr(prompt_graphs, "SharedMemory", object)
    monkeypatch.setattr(prompt_graphs, "has_gpu", lambda model: True)
    monkeypatch.setattr(prompt_graphs, "on_one_gpu", lambda model: True)
    return done
