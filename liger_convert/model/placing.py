"""Moves a model to the device that runs it, or to several, even if they cannot hold all of its weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from accelerate import dispatch_model, infer_auto_device_map
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from rich.filesize import decimal
from torch import nn

from liger_convert.model.attention import MIXER_MODULE, LinearizedAttention
from liger_convert.model.decoding import is_spread
from liger_convert.utils.device import free_memory, gpus_for
from liger_convert.utils.errors import BadInput
from liger_convert.utils.progress import console

SHARE = 0.75  # the part of a GPU's free memory that weights may take; the rest is for activations
HOST = "cpu"  # accelerate's name for the memory that offloaded weights stay in


def place(model: Any, device: torch.device, share: float = SHARE, taken: int = 0) -> Any:
    """Moves `model` from host memory to `device`, for inference only.

    share: the part of a GPU's free memory that weights may take. taken: bytes of that part which something else will
    need. If the weights do not fit into the remainder, accelerate places the layers that are left on the other GPUs of
    `gpus_for`; not with `taken`, since training is on one GPU. If these are full, too, the last layers are offloaded:
    they stay in host memory, and the weights of a module come to `device` while it runs. A note is printed; the outputs
    do not change. If `taken` alone exceeds the share, offloading would not help, and the whole model is moved.

    Embeddings and head always stay on `device`, because evaluations call the head many times per pass. So do the mixers
    of offloaded layers, which are small and are fitted in place. Raises BadInput when `device` has no room for these
    and one layer.
    """
    free = free_memory(device)
    size = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    if free is None or size + taken <= share * free or taken > share * free:
        return move(model, device)
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {module: name for name, module in model.named_modules()}
    gpus = [device] if taken else gpus_for(device)
    room = int(share * free) - taken - (0 if head.weight is embeddings.weight else head.weight.nbytes)
    places = _places(model, [room, *(int(share * (free_memory(gpu) or 0)) for gpu in gpus[1:])], size)
    if places.get(names[embeddings]) != 0:
        beside = f" beside the {decimal(taken)} that training needs" if taken else ""
        what = f"the GPU has {decimal(free)} free, too little for the embeddings, the head and one layer{beside}"
        raise BadInput(f"device: {what} of a model of {decimal(size)}; set device: cpu")
    places[names[head]] = 0
    devices: dict[str, Any] = {}
    for name, place in places.items():
        module = model.get_submodule(name)
        if place == HOST:
            devices |= _apart(name, module, gpus[0])
        else:  # what follows the layers goes where the head is, so that the backbone gives its outputs there, too
            devices[name] = gpus[place] if _layers(model, module) else gpus[0]
    # with requires_grad off, autocast does not cache casts of weights that are offloaded again
    model = model.requires_grad_(False).eval()
    model = dispatch_model(model, devices, gpus[0], skip_keys=sorted(model._skip_keys_device_placement))
    for name in _layers(model, model):  # offloaded in parts, a layer also has to bring what the parts share
        _align(model, model.get_submodule(name), gpus[0])
    for note in _notes(model, places, gpus, free, size):
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    return model


def move(model: Any, device: torch.device) -> Any:
    """Moves all of `model` to `device`, in eval mode. On a CPU, the weights of LayerNorms become float32.

    torch has no LayerNorm on a CPU whose weights have 16 bits and another dtype than its inputs. Under autocast,
    float16 weights have such inputs: their embeddings and products in bfloat16 add up to float32.
    """
    if device.type == "cpu":
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.float()
    return model.to(device).eval()


def place_both(first: Any, second: Any, device: torch.device) -> tuple[Any, Any]:
    """Places two models on one device with `place`; each may take half of SHARE. On several devices, the attentions of
    each can still run in the layers of the other."""
    half = SHARE / 2
    models = place(first, device, half), place(second, device, half / (1 - half))  # relative to what the first leaves
    for model in models:
        if is_spread(model):
            for layer in model.model.layers:
                _align(model, layer.self_attn, model.device).io_same_device = True
    return models


def waits(model: Any) -> bool:
    """Whether any weights of `model` are offloaded, so that they are on its device only while their module runs."""
    return any(parameter.is_meta for parameter in model.parameters())


def _layers(model: Any, module: nn.Module) -> list[str]:
    """The names of the layers, the modules that no device map splits, in `module` of `model`; "" is itself."""
    return [name for name, part in module.named_modules() if type(part).__name__ in model._no_split_modules]


def _align(model: Any, module: nn.Module, device: torch.device) -> Any:
    """The hook with which `module` brings its inputs to where it runs: on `device`, unless it has such a hook."""
    if not hasattr(module, "_hf_hook"):
        add_hook_to_module(module, AlignDevicesHook(device, skip_keys=sorted(model._skip_keys_device_placement)))
    return module._hf_hook


def _notes(model: Any, places: dict[str, Any], gpus: list[torch.device], free: int, size: int) -> Iterator[str]:
    """Where the layers of a placed model are. free: bytes of the first GPU. size: bytes of the model."""
    of_layers = [place for name, place in places.items() for _ in _layers(model, model.get_submodule(name))]
    only = f"the GPU has only {decimal(free)} free"
    if is_spread(model):
        only = "the GPUs have no room for more"
        ends = [(gpu, of_layers.index(i), of_layers.count(i)) for i, gpu in enumerate(gpus) if i in of_layers]
        parts = [f"layers {first}-{first + count - 1} on {gpu}" for gpu, first, count in ends]
        yield f"the model's {decimal(size)} are spread over several GPUs: {', '.join(parts)}"
    if waits(model):
        waiting = sum(parameter.nbytes for parameter in model.parameters() if parameter.is_meta)
        how = "stay in host memory and are copied to the GPU in every pass, which is slower"
        yield f"{only}, so {decimal(waiting)} of the model's {decimal(size)} {how}"


def _places(model: Any, rooms: list[int], size: int) -> dict[str, Any]:
    """The device map that accelerate infers for `model` without its mixers: the index of a GPU or HOST by module name.

    rooms: bytes for weights on each GPU, including the mixers. size: bytes of the model.
    """
    attentions = [module for module in model.modules() if isinstance(module, LinearizedAttention)]
    mixers = [attention.mixer for attention in attentions]
    taken = sum(parameter.nbytes for mixer in mixers for parameter in mixer.parameters())
    memory: dict[Any, int] = {i: max(0, room - taken) for i, room in enumerate(rooms)}
    try:
        for attention in attentions:
            attention.mixer = nn.Identity()  # counted on every GPU: which mixers it gets is not known yet
        kinds = sorted(model._no_split_modules)
        return infer_auto_device_map(model, memory | {HOST: size}, no_split_module_classes=kinds)
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
