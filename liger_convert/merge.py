"""Folds what training stages learned into a linearized model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from liger_convert.checkpoint import copy_companions
from liger_convert.errors import BadInput
from liger_convert.files import atomic_dir
from liger_convert.model import load_linearized

ADAPTER, MODEL = "adapter", "model"  # what a stage's result folder holds: one of the two


def load_chain(model_dir: Path, results: Sequence[Path] = ()) -> Any:
    """The linearized model `model_dir` with the `results` of its stages folded in, in order, in float32: full results
    take the model's place, adapters are merged into it. Raises BadInput for a folder that is not a result."""
    adapters: list[Path] = []
    for result in results:
        if (result / MODEL).is_dir():
            model_dir, adapters = result / MODEL, []
        elif (result / ADAPTER).is_dir():
            adapters.append(result / ADAPTER)
        else:
            raise BadInput(f"{result}: is no result of a training stage (it holds neither {MODEL}/ nor {ADAPTER}/)")
    model = load_linearized(model_dir, dtype=torch.float32)
    for adapter in adapters:
        model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    return model


def merge(model_dir: Path, results: Sequence[Path], out: Path) -> None:
    """Writes `load_chain(model_dir, results)` to the new folder `out`: a linearized checkpoint like `model_dir`, in
    float32, with its tokenizer. Raises BadInput when `out` exists or a result is none."""
    with atomic_dir(out) as folder:
        model = load_chain(model_dir, results)
        model.config.use_cache = True  # a trained model's config may have it off
        model.save_pretrained(folder)
        copy_companions(model_dir, folder)
