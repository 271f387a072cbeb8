"""A model on the device that runs it, also where that cannot hold all of its weights."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import dispatch_model, infer_auto_device_map
from rich.filesize import decimal

from liger_convert.utils.device import free_memory
from liger_convert.utils.errors import BadInput
from liger_convert.utils.progress import console

SHARE = 0.75  # of what a GPU has free, for weights; the rest is for what a forward pass makes
HOST = "cpu"  # accelerate's name of the memory that weights wait in


def place(model: Any, device: torch.device) -> Any:
    """`model`, which is in the host's memory, on `device`, to be run but not trained.

    Where its weights take more than a GPU has to spare, its last layers stay where they are, and the weights of a
    module come to the GPU for as long as it runs; accelerate does that. A note says so. Such a model gives what it
    would give. The ends of the model are on the GPU, as measures call its head many times a pass. Raises BadInput for a
    GPU that has no room for these and a layer.
    """
    free = free_memory(device)
    size = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    if free is None or size <= SHARE * free:
        return model.to(device).eval()
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {module: name for name, module in model.named_modules()}
    room = int(SHARE * free) - (0 if head.weight is embeddings.weight else head.weight.nbytes)
    kinds = sorted(model._no_split_modules)
    places = infer_auto_device_map(model, {0: max(0, room), HOST: size}, no_split_module_classes=kinds)
    if places.get(names[embeddings]) != 0:
        what = f"the GPU has {decimal(free)} free, which does not hold the ends of the model and a layer"
        raise BadInput(f"device: {what}, of {decimal(size)} in all; set device: cpu")
    places[names[head]] = 0
    devices = {name: HOST if place == HOST else device for name, place in places.items()}
    # without gradients autocast keeps no copies of weights that come and go
    model = model.requires_grad_(False).eval()
    model = dispatch_model(model, devices, device, skip_keys=sorted(model._skip_keys_device_placement))
    waiting = sum(parameter.nbytes for parameter in model.parameters() if parameter.is_meta)
    what = f"{decimal(waiting)} of the model's {decimal(size)} wait in the host's memory"
    why = f"the GPU has {decimal(free)} free, and come to it in every pass, which takes longer"
    console.print(f"note: {what}, as {why}", markup=False, soft_wrap=True)
    return model
