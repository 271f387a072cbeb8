"""Notices when modules are no longer what they were."""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_
from typing import Any

from torch import nn

_CONTAINERS = (dict, list, set)


class ModuleSnapshot:
    """The state of modules at one time: the attributes of each, and where its parameters and buffers are.

    It notices another parameter, weights at another address, adapters that are switched off or on, hooks, a replaced
    method of an instance, and every other change of an attribute or of a container in one. It does not notice new
    values in the same tensors, which is right for what reads the tensors again each time.
    """

    def __init__(self, roots: Iterable[nn.Module]):
        self._roots = list(roots)
        modules = list(dict.fromkeys(module for root in self._roots for module in root.modules()))
        self._attributes = [(vars(module), dict(vars(module))) for module in modules]
        containers = [
            value for _, before in self._attributes for value in before.values() if isinstance(value, _CONTAINERS)
        ]
        self._empty = [container for container in containers if not container]
        self._filled = [(container, _items(container)) for container in containers if container]
        self._tensors = [
            tensor
            for module in modules
            for tensor in (*module._parameters.values(), *module._buffers.values())
            if tensor is not None
        ]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]

    def still_holds(self, roots: Iterable[nn.Module]) -> bool:
        """Whether `roots` are the same modules, and nothing has changed. This is quick: it runs before every prompt."""
        return (
            _same(list(roots), self._roots)
            and all(
                now.keys() == before.keys() and all(map(is_, now.values(), before.values()))
                for now, before in self._attributes
            )
            and not any(self._empty)
            and all(_same(_items(container), items) for container, items in self._filled)
            and [tensor.data_ptr() for tensor in self._tensors] == self._addresses
        )


def _items(container: Any) -> list[Any]:
    return [*container.keys(), *container.values()] if isinstance(container, dict) else list(container)


def _same(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))  # by identity: tensors have no single truth value
