"""Devices that a CPU imitates: a tensor knows on which one it is, and an op over two of them fails as on GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import accelerate.hooks
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

KIND = "lazy"  # a type of device that no build of torch runs anything on
ACROSS = {"copy_", "_to_copy"}  # ops that move values between devices
BY_INDEX = {"index", "index_put", "index_put_", "_unsafe_index"}  # ops that also take indices on a CPU


class OnDevice(Tensor):
    """A tensor of the CPU, `inner`, that says it is on another device."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device) -> OnDevice:
        options: dict[str, Any] = {"dtype": inner.dtype, "device": device, "requires_grad": inner.requires_grad}
        strides = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        made: OnDevice = Tensor._make_wrapper_subclass(cls, inner.shape, **strides, **options)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{self.inner!r} on {self.device}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class Devices(TorchDispatchMode):
    """Context in which tensors can be made on these devices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = func.overloadpacket.__name__
    given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    held = [x for x in given if isinstance(x, OnDevice)]
    devices = {x.device for x in held}
    others = [x for x in given if not isinstance(x, OnDevice) and x.dim()]
    if name not in ACROSS and (len(devices) > 1 or (devices and others and name not in BY_INDEX)):
        raise RuntimeError(f"{name}: tensors are on {sorted({str(x.device) for x in given})}")
    asked = kwargs.get("device")
    asked = None if asked is None else torch.device(asked)
    device = asked or (args[0].device if held and name == "copy_" else next(iter(devices), torch.device("cpu")))
    if asked is not None and asked.type == KIND:
        kwargs = kwargs | {"device": torch.device("cpu")}
    inner = tree_map(lambda x: x.inner if isinstance(x, OnDevice) else x, (args, kwargs))
    if name == "_to_copy" and given[0].device != device:
        inner = ((inner[0][0].clone(),), inner[1])  # no memory is shared between devices
    if name == "histc":  # a GPU counts integers, a CPU does not
        inner = ((inner[0][0].float(), *inner[0][1:]), inner[1])
    result = func(*inner[0], **inner[1])
    if device.type != KIND:
        return result
    same = {id(x.inner): x for x in held}  # what an op in place returns is the tensor that it was given

    def placed(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return same[id(x)] if id(x) in same else OnDevice(x, device)

    return tree_map(placed, result)


def _set(module: nn.Module, name: str, device: Any, value: Tensor | None = None, **_: Any) -> None:
    """accelerate's `set_module_tensor_to_device`, which knows the types of devices that tensors can be on."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    old = getattr(owner, leaf)
    new = (old if value is None else value).detach().to(device)
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(new, old.requires_grad)
    else:
        owner._buffers[leaf] = new


@contextlib.contextmanager
def two_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.device]]:
    """Context with two devices, on which accelerate can place a model."""
    monkeypatch.setattr(accelerate.hooks, "set_module_tensor_to_device", _set)
    autocast, tensor = torch.autocast, torch.tensor

    def autocast_elsewhere(kind: str, *args: Any, **options: Any) -> Any:
        return contextlib.nullcontext() if kind == KIND else autocast(kind, *args, **options)

    def tensor_on(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        return tensor(data, **options).to(device)

    monkeypatch.setattr(torch, "autocast", autocast_elsewhere)
    monkeypatch.setattr(torch, "tensor", tensor_on)
    monkeypatch.setattr(torch, KIND, torch.cpu, raising=False)  # checkpointing looks for the module of a device
    with Devices():
        yield [torch.device(KIND, 0), torch.device(KIND, 1)]
