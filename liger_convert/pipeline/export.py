"""Exports a linearized checkpoint to a folder that anyone can load: the weights, and the code that runs them.

The code is copied from this package, see `shipped_code`. With the package installed, the copy is not needed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from liger_convert.io.checkpoint import copy_companions, load_config, locate_base
from liger_convert.io.checksums import write_sums
from liger_convert.io.files import atomic_dir
from liger_convert.model import HEAD_CLASSES, linearized_classes
from liger_convert.model.bases import meta_model
from liger_convert.model.families import base_model_type, is_linearized
from liger_convert.model.loading import check_folder
from liger_convert.model.quantization import (
    check_quantizable,
    linear_weights,
    quantization_config,
    quantized_shards,
    refuse_quantized,
)
from liger_convert.model.shards import copied_shards, write_shards
from liger_convert.pipeline.card import HUB_ID, cached_folder, write_card
from liger_convert.pipeline.shipped_code import ENTRY_FILE, code_files, used_mixers, write_code
from liger_convert.utils.errors import BadInput
from liger_convert.utils.progress import Report


def export_model(
    model_dir: Path | str,
    out: Path | str,
    *,
    dtype: str = "auto",
    name: str | None = None,
    base: str | None = None,
    base_dir: Path | None = None,
    quantize: str | None = None,
    measure: Callable[[Path], dict[str, Any]] | None = None,
    progress: Report | None = None,
) -> dict[str, Any]:
    """Writes the linearized checkpoint `model_dir` and the code that runs it to the new folder `out`.

    dtype: of all weights but the mixers', which keep theirs; `auto`: as in the checkpoint.
    name: the model's name in the model card. If it is a hub id (org/name), the card's example loads the model from it;
        otherwise from the name of `out`.
    base: the base, as recipes name it. base_dir: the base's folder, if it is not `base` itself.
    quantize: a name in `quantization.SCHEMES`, for 8-bit weights.
    measure: measures the loss of quality of the quantized model in the new folder (`quantization_loss`), for the model
        card.

    Returns {"bytes", "dtype"}. For quantized weights also "scheme", "weights" (how many were quantized),
    "unquantized_bytes" and "loss" (the result of `measure`, or None). Raises BadInput when `model_dir` is not a
    linearized checkpoint, is damaged or already quantized, when `out` exists, or when a mixer's code comes from a
    package and cannot be copied. With `quantize`, also for a model with experts, and when compressed-tensors is not
    installed.
    """
    model_dir = Path(model_dir)
    config = load_config(model_dir)
    if not is_linearized(config):
        raise BadInput(
            f"{model_dir}: is not a linearized model but a {config.model_type}; "
            "export takes what `linearize convert`, `calibrate` or `merge` made"
        )
    refuse_quantized(config, model_dir, "export")
    if quantize is not None:
        check_quantizable(config, model_dir, quantize)
    checkpoint = check_folder(model_dir)
    weights = [] if quantize is None else linear_weights(meta_model(config))
    code = code_files(used_mixers(config.linearization))
    model_type = base_model_type(config)
    classes = dict(zip(("AutoConfig", "AutoModel", "AutoModelForCausalLM"), linearized_classes(model_type)))
    hub_base = base if base is not None and locate_base(base) is None else None
    if base is not None and base_dir is None:
        base_dir = locate_base(base) or cached_folder(base)
    with atomic_dir(out) as folder:
        shards = plain = copied_shards(checkpoint, dtype)
        if quantize is not None:
            shards = quantized_shards(checkpoint, weights, quantize, dtype)
            config.quantization_config = quantization_config(quantize)
        total = write_shards(shards, folder, progress)
        if dtype != "auto":
            config.dtype = getattr(torch, dtype)
        config.use_cache = True  # training turns it off
        config.architectures = [classes["AutoModelForCausalLM"].__name__]
        config.auto_map = {
            auto: f"{ENTRY_FILE}.{cls.__name__}" for auto, cls in (classes | HEAD_CLASSES[model_type]).items()
        }
        config.save_pretrained(folder)
        copy_companions(model_dir, folder)
        write_code(folder, code)
        written: dict[str, Any] = {"bytes": total, "dtype": str(config.dtype).removeprefix("torch.")}
        if quantize is not None:
            unquantized = sum(entry.nbytes for shard in plain for entry in shard.entries)
            loss = None if measure is None else measure(folder)
            written |= {"scheme": quantize, "unquantized_bytes": unquantized, "weights": len(weights), "loss": loss}
        place = Path(out).resolve().name
        title, load_from = name or place, name if name and HUB_ID.fullmatch(name) else place
        write_card(folder, config, title, load_from, hub_base=hub_base, base_dir=base_dir, written=written)
        write_sums(folder)
    return written
