"""Merges the results of training stages into a linearized model, in memory or one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel, PeftType, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from liger_convert.io.checkpoint import (
    ADAPTER_CONFIG,
    ADAPTER_PICKLE,
    ADAPTER_WEIGHTS,
    Checkpoint,
    copy_companions,
    load_config,
    read_header,
)
from liger_convert.io.config_sizes import SIZES
from liger_convert.io.files import atomic_dir, read_json
from liger_convert.model.bases import meta_model
from liger_convert.model.loading import check_folder, compare, load_linearized, read_finite, refuse_not_finite
from liger_convert.model.quantization import refuse_quantized
from liger_convert.model.shards import copied_shards, write_shards
from liger_convert.utils.errors import BadInput, first_line
from liger_convert.utils.progress import Report

ADAPTER, MODEL = "adapter", "model"  # a stage's result folder holds one of the two


def load_chain(model_dir: Path, results: Sequence[Path] = (), dtype: Any = torch.float32) -> Any:
    """Loads the linearized model `model_dir` with the `results` of its stages merged in, in order.

    A full result replaces the model; an adapter is merged into it. dtype: of the loaded weights; `auto` keeps the
    stored one. Raises BadInput for a folder that is not a result, for an adapter that does not match the model tensor
    by tensor, and as `load_linearized` does. All results are checked before any weights are loaded.
    """
    model_dir, adapters = last_model(model_dir, results)
    check_folder(model_dir, linearized=True)
    for adapter in adapters:
        check_adapter(adapter, load_config(model_dir))
    model = load_linearized(model_dir, dtype=dtype)
    for adapter in adapters:
        model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    return model


def last_model(model_dir: Path, results: Sequence[Path]) -> tuple[Path, list[Path]]:
    """The folder of the last full model among `model_dir` and its `results`, and the adapters that come after it.

    Raises BadInput for a folder that is not a result, for a full model unlike `model_dir`, and for a model with
    quantized weights.
    """
    config = load_config(model_dir)
    refuse_quantized(config, model_dir, "merge")
    adapters: list[Path] = []
    for result in results:
        if (result / MODEL).is_dir():
            trained = load_config(result / MODEL)
            for name in ("model_type", *SIZES, "linearization"):
                if getattr(trained, name, None) != getattr(config, name, None):
                    what = f"its {name} is not that of {model_dir}; merge it into the model that it was trained from"
                    raise BadInput(f"{result / MODEL}: {what}")
            model_dir, adapters = result / MODEL, []
        elif (result / ADAPTER).is_dir():
            adapters.append(result / ADAPTER)
        else:
            raise BadInput(f"{result}: is not the result of a training stage (it has neither {MODEL}/ nor {ADAPTER}/)")
    return model_dir, adapters


def check_adapter(folder: Path, config: Any) -> tuple[Checkpoint, Any]:
    """Checks the adapter in `folder` against the model of `config`.

    Returns the adapter's tensors, and the model on the meta device with peft's adapter modules. Raises BadInput unless
    the adapter has exactly the tensors that the model expects, all finite and of the right shapes.
    """
    read_json(folder / ADAPTER_CONFIG)
    if not (folder / ADAPTER_WEIGHTS).exists():
        what = f"has no {ADAPTER_WEIGHTS}"
        if (folder / ADAPTER_PICKLE).exists():
            what = "its weights are pickles, which can run code when read"
        raise BadInput(f"{folder}: {what}; give {ADAPTER_WEIGHTS}, as peft saves it by default")
    adapter = Checkpoint(folder, {folder / ADAPTER_WEIGHTS: read_header(folder / ADAPTER_WEIGHTS)})
    try:
        peft_config = PeftConfig.from_pretrained(str(folder))
        model = get_peft_model(meta_model(config), peft_config, low_cpu_mem_usage=True)
    except Exception as error:  # anything that peft raises over a broken config, or one for another model
        raise BadInput(f"{folder / ADAPTER_CONFIG}: does not fit the model: {first_line(error)}") from error
    if peft_config.is_prompt_learning:
        raise BadInput(f"{folder}: {peft_config.peft_type.value} adds a prompt, so it has no weights to merge")
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    compare(adapter, {name: tuple(tensor.shape) for name, tensor in state.items()}, "adapter", ADAPTER_CONFIG)
    refuse_not_finite(adapter, ((name, adapter.read(name)) for name in adapter.tensors))
    return adapter, model


class Chain:
    """The linearized model `model_dir` with the `results` of its stages merged in, as by `load_chain`, but read one
    tensor at a time.

    config: the model's config. checkpoint: the last full model among `model_dir` and `results`. Raises BadInput as
    `load_chain` does, for an adapter other than LoRA on matrices, and for one that changes a tensor which is not
    stored, such as an output embedding that is tied to the input embedding.
    """

    def __init__(self, model_dir: Path, results: Sequence[Path] = ()):
        folder, adapters = last_model(model_dir, results)
        self.checkpoint, self.config = check_folder(folder, linearized=True), load_config(folder)
        for path in adapters:
            if not _is_of_matrices(path):
                raise BadInput(f"{path}: is not a LoRA of matrices; merge it first, and give the merged model")
        self._adapters = [_Adapter(adapter, self.config) for adapter in adapters]
        for adapter, path in zip(self._adapters, adapters, strict=True):
            for name in adapter.changed:
                if name not in self.checkpoint.tensors:
                    what = f"changes {name}, which {folder} does not store under this name"
                    raise BadInput(f"{path}: {what}; give an adapter for other projections")

    def read(self, name: str) -> Tensor:
        """One merged tensor, in float32. name: its name in the checkpoint."""
        return self._read(name, len(self._adapters))

    def _read(self, name: str, adapters: int) -> Tensor:
        """The tensor with the first `adapters` adapters merged in."""
        if not adapters:
            return read_finite(self.checkpoint, name).float()
        adapter = self._adapters[adapters - 1]

        def before(other: str) -> Tensor:
            return self._read(other, adapters - 1)

        return adapter.fold(name, before) if name in adapter.changed else before(name)

    def write(
        self, folder: Path, replaced: Mapping[str, Callable[[], Tensor]] | None = None, progress: Report | None = None
    ) -> None:
        """Writes the weights (float32) and config to `folder`. replaced: by name, functions that return tensors to
        write instead of this model's. Only the tensor being merged is held in memory."""
        changed = {name for adapter in self._adapters for name in adapter.changed}
        made: dict[str, Callable[[], Tensor]] = {name: lambda name=name: self.read(name) for name in changed}  # type: ignore[misc]
        write_shards(copied_shards(self.checkpoint, "float32", replaced=made | dict(replaced or {})), folder, progress)
        self.config.use_cache = True  # a trained model's config may have it off
        self.config.dtype = torch.float32
        self.config.save_pretrained(folder)


class _Adapter:
    """An adapter that peft merges into one module at a time. changed: the names of the model's tensors that it
    changes."""

    def __init__(self, folder: Path, config: Any):
        self._file, model = check_adapter(folder, config)
        # maps each parameter to the name that peft saves it under
        saved = get_peft_model_state_dict(model, model.state_dict(keep_vars=True), save_embedding_layers=False)
        self._key = {id(parameter): key for key, parameter in saved.items()}
        self._model = model  # keeps the parameters alive, so that their ids stay valid
        self._tuned: dict[str, Any] = {}
        self._replaced: dict[str, str] = {}
        for path, module in model.base_model.model.named_modules():
            if isinstance(module, BaseTunerLayer):
                for name, parameter in module.get_base_layer().named_parameters():
                    is_kept = name == "bias" and isinstance(module, LoraLayer) and not any(module.lora_bias.values())
                    if not is_kept and id(parameter) not in self._key:
                        self._tuned[f"{_own(path)}.{name}"] = module
        for path, parameter in model.base_model.model.named_parameters():
            if id(parameter) in self._key and not _is_added(path):
                self._replaced[_own(path)] = self._key[id(parameter)]
        self.changed = self._tuned.keys() | self._replaced.keys()

    def fold(self, name: str, read: Callable[[str], Tensor]) -> Tensor:
        """The tensor `name` with this adapter merged in. read: returns a tensor without it, given its name."""
        if name in self._replaced:
            return self._file.read(self._replaced[name]).float()
        module = self._tuned[name]
        base: Any = module.get_base_layer()
        path, own = name.rsplit(".", 1)
        given: list[tuple[nn.Module, str, Any]] = []
        try:
            for part in module.modules():
                for key, parameter in part._parameters.items():
                    if parameter is None or not (id(parameter) in self._key or part is base):
                        continue
                    stored = self._key.get(id(parameter))
                    value = read(f"{path}.{key}") if stored is None else self._file.read(stored)
                    given.append((part, key, parameter))
                    part._parameters[key] = nn.Parameter(value, requires_grad=False)
            module.merge()
            merged: Tensor = getattr(base, own).detach()
            return merged
        finally:
            module.merged_adapters = []
            for part, key, parameter in given:
                part._parameters[key] = parameter


def _own(path: str) -> str:
    """The name in the plain model of the module or parameter that peft calls `path`."""
    return ".".join(part for part in path.replace(".modules_to_save.default", "").split(".") if part != "base_layer")


def _is_added(path: str) -> bool:
    """Whether a parameter belongs to an adapter and does not exist in the plain model."""
    return ".modules_to_save." not in path and ".default" in path


def merge_results(model_dir: Path, results: Sequence[Path], out: Path, progress: Report | None = None) -> None:
    """Merges the `results` of its stages into the linearized model `model_dir`, and writes it to the new folder `out`.

    The result is a checkpoint like `model_dir`, in float32, with its tokenizer. It is written one tensor at a time,
    without loading the model, unless an adapter is of a kind that can only be merged into a whole model. Raises
    BadInput when `out` exists, and as `load_chain` and `Chain` do.
    """
    with atomic_dir(out) as folder:
        if all(_is_of_matrices(adapter) for adapter in last_model(model_dir, results)[1]):
            Chain(model_dir, results).write(folder, progress=progress)
        else:
            model = load_chain(model_dir, results)
            model.config.use_cache = True  # a trained model's config may have it off
            model.save_pretrained(folder)
        copy_companions(model_dir, folder)


def _is_of_matrices(folder: Path) -> bool:
    """Whether an adapter is LoRA on matrices only, so that each tensor can be merged by itself."""
    config = read_json(folder / ADAPTER_CONFIG)
    others = config.get("target_parameters") or config.get("trainable_token_indices")
    return config.get("peft_type") == PeftType.LORA and not others
