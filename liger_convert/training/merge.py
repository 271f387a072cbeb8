"""Folds what training stages learned into a linearized model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict

from liger_convert.io.checkpoint import (
    ADAPTER_CONFIG,
    ADAPTER_PICKLE,
    ADAPTER_WEIGHTS,
    Checkpoint,
    copy_companions,
    load_config,
    read_header,
)
from liger_convert.io.files import atomic_dir, read_json
from liger_convert.model.bases import meta_model
from liger_convert.model.loading import check_folder, compare, load_linearized, refuse_not_finite
from liger_convert.utils.errors import BadInput, first_line

ADAPTER, MODEL = "adapter", "model"  # what a stage's result folder holds: one of the two


def load_chain(model_dir: Path, results: Sequence[Path] = ()) -> Any:
    """The linearized model `model_dir` with the `results` of its stages folded in, in order, in float32: full results
    take the model's place, adapters are merged into it.

    Raises BadInput for a folder that is not a result, for an adapter that does not fit the model tensor by tensor, and
    as `load_linearized` does. Nothing is loaded before all of them are looked at.
    """
    model_dir, adapters = last_model(model_dir, results)
    check_folder(model_dir, linearized=True)
    for adapter in adapters:
        check_adapter(adapter, load_config(model_dir))
    model = load_linearized(model_dir, dtype=torch.float32)
    for adapter in adapters:
        model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    return model


def last_model(model_dir: Path, results: Sequence[Path]) -> tuple[Path, list[Path]]:
    """The folder of the last whole model among `model_dir` and the `results` behind it, and the adapters since. Raises
    BadInput for a folder that is not a result."""
    adapters: list[Path] = []
    for result in results:
        if (result / MODEL).is_dir():
            model_dir, adapters = result / MODEL, []
        elif (result / ADAPTER).is_dir():
            adapters.append(result / ADAPTER)
        else:
            raise BadInput(f"{result}: is no result of a training stage (it holds neither {MODEL}/ nor {ADAPTER}/)")
    return model_dir, adapters


def check_adapter(folder: Path, config: Any) -> None:
    """Raises BadInput unless peft finds a place in the model of `config` for every tensor of the adapter in `folder`,
    and in the adapter a finite tensor of the right shape for every place that it makes."""
    read_json(folder / ADAPTER_CONFIG)
    if not (folder / ADAPTER_WEIGHTS).exists():
        what = f"holds no {ADAPTER_WEIGHTS}"
        if (folder / ADAPTER_PICKLE).exists():
            what = "its weights are pickles, which can run code when read"
        raise BadInput(f"{folder}: {what}; give {ADAPTER_WEIGHTS}, as peft saves it by itself")
    adapter = Checkpoint(folder, {folder / ADAPTER_WEIGHTS: read_header(folder / ADAPTER_WEIGHTS)})
    try:
        peft_config = PeftConfig.from_pretrained(str(folder))
        model = get_peft_model(meta_model(config), peft_config, low_cpu_mem_usage=True)
    except Exception as error:  # whatever a config that is broken, or another model's, makes the library raise
        raise BadInput(f"{folder / ADAPTER_CONFIG}: does not fit the model: {first_line(error)}") from error
    if peft_config.is_prompt_learning:
        raise BadInput(f"{folder}: {peft_config.peft_type.value} adds a prompt and has no weights that could be merged")
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    compare(adapter, {name: tuple(tensor.shape) for name, tensor in state.items()}, "adapter", ADAPTER_CONFIG)
    refuse_not_finite(adapter, ((name, adapter.read(name)) for name in adapter.tensors))


def merge_results(model_dir: Path, results: Sequence[Path], out: Path) -> None:
    """Writes `load_chain(model_dir, results)` to the new folder `out`: a linearized checkpoint like `model_dir`, in
    float32, with its tokenizer. Raises BadInput when `out` exists, and as `load_chain` does."""
    with atomic_dir(out) as folder:
        model = load_chain(model_dir, results)
        model.config.use_cache = True  # a trained model's config may have it off
        model.save_pretrained(folder)
        copy_companions(model_dir, folder)
