"""A model on the device that runs it, also where that cannot hold all of its weights."""

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

SHARE = 0.75  # of what a GPU has free, for weights; the rest is for what a forward pass makes
HOST = "cpu"  # accelerate's name of the memory that weights wait in


def place(model: Any, device: torch.device, share: float = SHARE, taken: int = 0) -> Any:
    """`model`, which is in the host's memory, on `device`, to be run but not trained.

    share: the part of what the GPU has free that the weights may take. taken: bytes of it that something else will
    take; where that is more than all of it, no waiting would help, and the model is put there whole. Where the weights
    take more than the rest, the last layers stay where they are, and the weights of a module come to the GPU
    for as long as it runs; accelerate does that. A note says so. Such a model gives what it would give. The ends of the
    model are on the GPU, as measures call its head many times a pass, and so are its mixers, which are small and are
    fitted in place. Raises BadInput for a GPU that has no room for these and a layer.
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
    # without gradients autocast keeps no copies of weights that come and go
    model = model.requires_grad_(False).eval()
    model = dispatch_model(model, devices, device, skip_keys=sorted(model._skip_keys_device_placement))
    waiting = sum(parameter.nbytes for parameter in model.parameters() if parameter.is_meta)
    what = f"the GPU has only {decimal(free)} free, so {decimal(waiting)} of the model's {decimal(size)}"
    how = "stay in host memory and are copied to the GPU in every pass, which is slower"
    console.print(f"note: {what} {how}", markup=False, soft_wrap=True)
    return model


def place_both(first: Any, second: Any, device: torch.device) -> tuple[Any, Any]:
    """Two models on one device, as `place` does: each may take half of what there is room for."""
    half = SHARE / 2
    return place(first, device, half), place(second, device, half / (1 - half))  # of what the first one leaves


def waits(model: Any) -> bool:
    """Whether weights of `model` come to its device only for as long as a module runs."""
    return any(parameter.is_meta for parameter in model.parameters())


def _places(model: Any, room: int, size: int) -> dict[str, Any]:
    """Where accelerate puts the parts of `model`, of `size` bytes, beside its mixers: 0, for the GPU, while there is
    `room`, and then HOST."""
    attentions = [module for module in model.modules() if isinstance(module, LinearizedAttention)]
    mixers = [attention.mixer for attention in attentions]
    room -= sum(parameter.nbytes for mixer in mixers for parameter in mixer.parameters())
    try:
        for attention in attentions:
            attention.mixer = nn.Identity()  # they are counted above, wherever their layers are
        kinds = sorted(model._no_split_modules)
        return infer_auto_device_map(model, {0: max(0, room), HOST: size}, no_split_module_classes=kinds)
    finally:
        for attention, mixer in zip(attentions, mixers, strict=True):
            attention.mixer = mixer


def _apart(name: str, module: nn.Module, device: torch.device) -> dict[str, Any]:
    """Where the parts are of the module called `name`, which waits: its mixers on the device."""
    if not any(isinstance(part, LinearizedAttention) for part in module.modules()):
        return {name: HOST}
    found: dict[str, Any] = {}
    for child, part in module.named_children():
        is_mixer = isinstance(module, LinearizedAttention) and child == MIXER_MODULE
        path = f"{name}.{child}"
        found |= {path: device} if is_mixer else _apart(path, part, device)
    return found
