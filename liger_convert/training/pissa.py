"""Adapters that start from the base's largest singular vectors and values (PiSSA), and end as changes of the base.

At the start an adapter takes its part out of the base: W = R + s B0 A0, of which A and B train and R is frozen. What is
saved is the change s (B A - B0 A0), as a plain LoRA of twice the rank: A over A0, and B beside -B0. So every adapter of
a chain folds into the model that its stage began with. peft has the same conversion, but drops what is saved beside the
adapters, here the mixers, and needs the base in memory.

A0 and B0 lie in the folder `start` beside the checkpoints until the stage is done. Another machine, or another number
of threads, would not find the same digits again, and A and B of a checkpoint are of no use with others.

Source: PiSSA (2404.02948), sections 3 and appendix C; peft.tuners.lora.
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
INIT = "pissa_niter_4"  # a randomized decomposition; the paper finds 4 iterations near the exact one
NAME = "default"  # of the only adapter


@torch.no_grad()
def start(model: Any, checkpoints: Path, *, resumes: bool) -> None:
    """Has the plain adapters of `model` start from its base, in place. All processes of a run call it; where they share
    the weights, the others have none yet and get those of the first.

    checkpoints: where the first process keeps what they start from. It begins with what is there where it `resumes`, as
    the others always do.
    """
    folder = checkpoints / START
    decomposes = not resumes and processes.is_first()
    if decomposes:
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        for name, module in _adapted(model):
            with torch.random.fork_rng(devices):  # so that a layer's are the same without the layers before it
                torch.manual_seed(zlib.crc32(name.encode()))
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
            # as peft has it, so that the digits are the same
            product = module.scaling[NAME] * module.lora_B[NAME].weight @ module.lora_A[NAME].weight
            weight.copy_(weight.float() - product)


def is_kept(checkpoints: Path) -> bool:
    """Whether there is, undamaged, what the adapters of the checkpoints in this folder started from. Warns if not."""
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
    """Makes the trained adapters of `model` those that are saved, in place. They do not belong to its own base, so that
    the model is good for nothing but being saved."""
    with safe_open(checkpoints / START / FILE, "pt") as file:
        for name, module in _adapted(model):
            for key, part in _parts(module):
                first = file.get_tensor(f"{name}.{key}").to(part.weight.device)
                both = (part.weight, first) if key == "A" else (part.weight, -first)
                part.weight = nn.Parameter(torch.cat(both, dim=0 if key == "A" else 1))
    double_rank(model.peft_config[NAME])


def double_rank(config: LoraConfig) -> None:
    """Makes the config of such adapters that of their changes: the scale stays."""
    config.r, config.lora_alpha = 2 * config.r, 2 * config.lora_alpha


def _adapted(model: Any) -> Iterator[tuple[str, Any]]:
    """The projections with an adapter that has storage, by name."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) and not module.lora_A[NAME].weight.is_meta:
            yield name, module


def _parts(module: Any) -> tuple[tuple[str, Any], tuple[str, Any]]:
    return ("A", module.lora_A[NAME]), ("B", module.lora_B[NAME])
