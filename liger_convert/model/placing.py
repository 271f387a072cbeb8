"""Moves a model to the device that runs it, even if the device cannot hold all of its weights."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import dispatch_model, infer_auto_device_map
from rich.filesize import decimal
from torch import nn

from liger_convert.model.attention import MIXER_MODULE, LinearizedAttention
from liger_convert.utils.device import free_memory
from liger_convert.utils.errors import BadInput
from liger_convert.utils.progress import console

SHARE = 0.75  # the part of a GPU's free memory that weights may take; the rest is for activations
HOST = "cpu"  # accelerate's name for the memory that offloaded weights stay in


def place(model: Any, device: torch.device, share: float = SHARE, taken: int = 0) -> Any:
    """Moves `model` from host memory to `device`, for inference only.

    share: the part of the GPU's free memory that weights may take. taken: bytes of that part which something else will
    need. If the weights do not fit into the remainder, accelerate offloads the last layers: they stay in host memory,
    and the weights of a module come to the GPU while it runs. A note is printed; the outputs do not change. If `taken`
    alone exceeds the share, offloading would not help, and the whole model is moved.

    Embeddings and head always stay on the GPU, because evaluations call the head many times per pass. So do the mixers,
    which are small and are fitted in place. Raises BadInput when the GPU has no room for these and one layer.
    """
    free = free_memory(device)
    size = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    if free is None or size + taken <= share * free or taken > share * free:
        return model.to(device).eval()
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {module: name for name, module in model.named_modules()}
    room = int(share * free) - taken - (0 if head.weight is embeddings.weight else head.weight.nbytes)
    places = _places(model, room, size)
    if places.get(names[embeddings]) != 0:
        beside = f" beside the {decimal(taken)} that training needs" if taken else ""
        what = f"the GPU has {decimal(free)} free, too little for the embeddings, the head and one layer{beside}"
        raise BadInput(f"device: {what} of a model of {decimal(size)}; set device: cpu")
    places[names[head]] = 0
    devices: dict[str, Any] = {}
    for name, place in places.items():
        devices |= _apart(name, model.get_submodule(name), device) if place == HOST else {name: device}
    # with requires_grad off, autocast does not cache casts of weights that are offloaded again
    model = model.requires_grad_(False).eval()
    model = dispatch_model(model, devices, device, skip_keys=sorted(model._skip_keys_device_placement))
    waiting = sum(parameter.nbytes for parameter in model.parameters() if parameter.is_meta)
    what = f"the GPU has only {decimal(free)} free, so {decimal(waiting)} of the model's {decimal(size)}"
    how = "stay in host memory and are copied to the GPU in every pass, which is slower"
    console.print(f"note: {what} {how}", markup=False, soft_wrap=True)
    return model


def place_both(first: Any, second: Any, device: torch.device) -> tuple[Any, Any]:
    """Places two models on one device with `place`; each may take half of SHARE."""
    half = SHARE / 2
    return place(first, device, half), place(second, device, half / (1 - half))  # relative to what the first leaves


def waits(model: Any) -> bool:
    """Whether any weights of `model` are offloaded, so that they are on its device only while their module runs."""
    return any(parameter.is_meta for parameter in model.parameters())


def _places(model: Any, room: int, size: int) -> dict[str, Any]:
    """The device map that accelerate infers for `model` without its mixers: 0 (the GPU) or HOST by module name.

    room: bytes for weights on the GPU, including the mixers. size: bytes of the model.
    """
    attentions = [module for module in model.modules() if isinstance(module, LinearizedAttention)]
    mixers = [attention.mixer for attention in attentions]
    room -= sum(parameter.nbytes for mixer in mixers for parameter in mixer.parameters())
    try:
        for attention in attentions:
            attention.mixer = nn.Identity()  # already counted above: mixers always go to the GPU
        kinds = sorted(model._no_split_modules)
        return infer_auto_device_map(model, {0: max(0, room), HOST: size}, no_split_module_classes=kinds)
    finally:
        for attention, mixer in zip(attentions, mixers, strict=True):
            attention.mixer = mixer


def _apart(name: str, module: nn.Module, device: torch.device) -> dict[str, Any]:
    """The device map of an offloaded module called `name`: its mixers go to `device`, all else to HOST."""
    if not any(isinstance(part, LinearizedAttention) for part in module.modules()):
        return {name: HOST}
    found: dict[str, Any] = {}
    for child, part in module.named_children():
        is_mixer = isinstance(module, LinearizedAttention) and child == MIXER_MODULE
        path = f"{name}.{child}"
        found |= {path: device} if is_mixer else _apart(path, part, device)
    return found
