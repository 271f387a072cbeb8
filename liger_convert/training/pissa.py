"""PiSSA: LoRA adapters initialized from the base's principal singular values and vectors, saved as changes of the base.

At the start, the adapter's part is subtracted from the base: W = R + s B0 A0. A and B train, and R is frozen. The saved
adapter is the change s (B A - B0 A0), as plain LoRA of twice the rank: A stacked on A0, and B next to -B0. So every
adapter of a chain can be merged into the model that its stage started from. peft has the same conversion, but it drops
the modules saved with the adapter, here the mixers, and needs the base in memory.

A0 and B0 are kept in the folder `start`, next to the checkpoints, until the stage is done. The decomposition is not
bit-reproducible on another machine or with another number of threads, and the A and B of a checkpoint are only valid
with their own A0 and B0.

Source: PiSSA (2404.02948), section 3 and appendix C; peft.tuners.lora.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from safetensors import safe_open
from torch import nn

from liger_convert.io import checksums
from liger_convert.io.files import atomic_dir
from liger_convert.model.shards import Entry, write_file
from liger_convert.utils import processes
from liger_convert.utils.errors import BadInput
from liger_convert.utils.progress import console

START, FILE = "start", "adapters.safetensors"
INIT = "pissa_niter_4"  # randomized SVD; according to the paper, 4 iterations come close to the exact one
NAME = "default"  # peft's name of the only adapter


@torch.no_grad()
def start(model: Any, checkpoints: Path, *, resumes: bool) -> None:
    """Initializes the LoRA adapters of `model` from its base, in place, and subtracts them from the base.

    All processes of a run call it. If they shard the weights, only the first has weights at this point.

    checkpoints: the stage's folder of checkpoints, in which the first process stores A0 and B0. resumes: load the
    stored A0 and B0 instead of computing them. The other processes always load them.
    """
    folder = checkpoints / START
    decomposes = not resumes and processes.is_first()
    if decomposes:
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        for name, module in _adapted(model):
            with torch.random.fork_rng(devices):  # so that a layer's adapters do not depend on earlier layers
                torch.manual_seed(zlib.crc32(name.encode()))
                # a fresh tensor: how a product's sums are ordered can depend on where in memory its factors begin
                weight = module.get_base_layer().weight
                weight.data = weight.data.clone()
                module.pissa_init(NAME, INIT)
        checkpoints.mkdir(parents=True, exist_ok=True)
        with atomic_dir(folder, overwrite=True) as new:
            parts = {f"{name}.{key}": part.weight for name, module in _adapted(model) for key, part in _parts(module)}
            write_file(new / FILE, Entry.of(parts), parts.values())
            checksums.write_sums(new)
    processes.barrier()
    if decomposes:
        return
    with safe_open(folder / FILE, "pt") as file:
        for name, module in _adapted(model):
            for key, part in _parts(module):
                part.weight.copy_(file.get_tensor(f"{name}.{key}"))
            weight = module.get_base_layer().weight
            # the same expression as in peft, so that the result is bit-identical
            product = module.scaling[NAME] * module.lora_B[NAME].weight @ module.lora_A[NAME].weight
            weight.copy_(weight.float() - product)


def is_kept(checkpoints: Path) -> bool:
    """Whether the folder of checkpoints has an undamaged A0 and B0 of its adapters. Warns if not."""
    folder = checkpoints / START
    try:
        problems = checksums.problems(folder, checksums.read_sums(folder))
    except BadInput as error:
        problems = [str(error)]
    if problems:
        said = f"warning: {problems[0]}; the checkpoints of this stage are useless without it, so it starts again"
        console.print(said, markup=False, soft_wrap=True)
    return not problems


@torch.no_grad()
def become_changes(model: Any, checkpoints: Path) -> None:
    """Turns the trained adapters of `model` into the changes that are saved, in place, with twice the rank.

    They no longer belong to the model's own base R, so afterwards the model can only be saved.
    """
    with safe_open(checkpoints / START / FILE, "pt") as file:
        for name, module in _adapted(model):
            for key, part in _parts(module):
                first = file.get_tensor(f"{name}.{key}").to(part.weight.device)
                both = (part.weight, first) if key == "A" else (part.weight, -first)
                part.weight = nn.Parameter(torch.cat(both, dim=0 if key == "A" else 1))
    double_rank(model.peft_config[NAME])


def double_rank(config: LoraConfig) -> None:
    """Doubles the rank in an adapter's config, in place, and alpha as well so that the scale stays the same."""
    config.r, config.lora_alpha = 2 * config.r, 2 * config.lora_alpha


def _adapted(model: Any) -> Iterator[tuple[str, Any]]:
    """Yields the name and the module of each projection whose adapter has storage."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) and not module.lora_A[NAME].weight.is_meta:
            yield name, module


def _parts(module: Any) -> tuple[tuple[str, Any], tuple[str, Any]]:
    return ("A", module.lora_A[NAME]), ("B", module.lora_B[NAME])
