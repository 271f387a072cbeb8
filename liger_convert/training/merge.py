"""Folds what training stages learned into a linearized model, in memory or a tensor at a time."""

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
from liger_convert.io.files import atomic_dir, read_json
from liger_convert.model.bases import meta_model
from liger_convert.model.loading import check_folder, compare, load_linearized, read_finite, refuse_not_finite
from liger_convert.model.quantization import refuse_quantized
from liger_convert.model.shards import copied_shards, write_shards
from liger_convert.utils.errors import BadInput, first_line
from liger_convert.utils.progress import Report

ADAPTER, MODEL = "adapter", "model"  # what a stage's result folder holds: one of the two


def load_chain(model_dir: Path, results: Sequence[Path] = (), dtype: Any = torch.float32) -> Any:
    """The linearized model `model_dir` with the `results` of its stages folded in, in order, in `dtype` (`auto`: as it
    is stored): full results take the model's place, adapters are merged into it.

    Raises BadInput for a folder that is not a result, for an adapter that does not fit the model tensor by tensor, and
    as `load_linearized` does. Nothing is loaded before all of them are looked at.
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
    """The folder of the last whole model among `model_dir` and the `results` behind it, and the adapters since. Raises
    BadInput for a folder that is not a result, and for a model whose weights are quantised."""
    refuse_quantized(load_config(model_dir), model_dir, "merge")
    adapters: list[Path] = []
    for result in results:
        if (result / MODEL).is_dir():
            model_dir, adapters = result / MODEL, []
        elif (result / ADAPTER).is_dir():
            adapters.append(result / ADAPTER)
        else:
            raise BadInput(f"{result}: is not the result of a training stage (it has neither {MODEL}/ nor {ADAPTER}/)")
    return model_dir, adapters


def check_adapter(folder: Path, config: Any) -> tuple[Checkpoint, Any]:
    """The adapter in `folder`: its tensors, and the model of `config`, without storage, that peft has given places for
    them. Raises BadInput unless there is a place for every tensor, and a finite tensor of the right shape for every
    place."""
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
    except Exception as error:  # whatever a config that is broken, or another model's, makes the library raise
        raise BadInput(f"{folder / ADAPTER_CONFIG}: does not fit the model: {first_line(error)}") from error
    if peft_config.is_prompt_learning:
        raise BadInput(f"{folder}: {peft_config.peft_type.value} adds a prompt, so it has no weights to merge")
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    compare(adapter, {name: tuple(tensor.shape) for name, tensor in state.items()}, "adapter", ADAPTER_CONFIG)
    refuse_not_finite(adapter, ((name, adapter.read(name)) for name in adapter.tensors))
    return adapter, model


class Chain:
    """The linearized model `model_dir` with the `results` of its stages folded in, as `load_chain` makes it, but one
    tensor at a time. config: that of the model. checkpoint: the last whole model among them.

    Raises BadInput as `load_chain` does, for an adapter that is no LoRA of matrices, and for one that changes a tensor
    which is not stored: an end of the model that is tied to the other.
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
        """One tensor of the model, in float32, by the name that the checkpoint stores it under."""
        return self._read(name, len(self._adapters))

    def _read(self, name: str, adapters: int) -> Tensor:
        """The tensor behind so many adapters."""
        if not adapters:
            return read_finite(self.checkpoint, name).float()
        adapter = self._adapters[adapters - 1]

        def before(other: str) -> Tensor:
            return self._read(other, adapters - 1)

        return adapter.fold(name, before) if name in adapter.changed else before(name)

    def write(
        self, folder: Path, replaced: Mapping[str, Callable[[], Tensor]] | None = None, progress: Report | None = None
    ) -> None:
        """Writes weights and config to `folder`, in float32. replaced: what makes a tensor, by name, in the place of
        that of this model. No more than the tensor that is folded is held."""
        changed = {name for adapter in self._adapters for name in adapter.changed}
        made: dict[str, Callable[[], Tensor]] = {name: lambda name=name: self.read(name) for name in changed}  # type: ignore[misc]
        write_shards(copied_shards(self.checkpoint, "float32", replaced=made | dict(replaced or {})), folder, progress)
        self.config.use_cache = True  # a trained model's config may have it off
        self.config.dtype = torch.float32
        self.config.save_pretrained(folder)


class _Adapter:
    """An adapter whose changes are made to one module at a time, by peft itself. changed: the names of the tensors of
    the model that it changes."""

    def __init__(self, folder: Path, config: Any):
        self._file, model = check_adapter(folder, config)
        # peft's own names of what it saves; the parameters tell which is which
        saved = get_peft_model_state_dict(model, model.state_dict(keep_vars=True), save_embedding_layers=False)
        self._key = {id(parameter): key for key, parameter in saved.items()}
        self._model = model  # keeps the parameters, and with them their ids
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
        """The tensor called `name` with this adapter in it; `read` gives tensors without it."""
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
    """The name in the plain model of what peft calls `path`."""
    return ".".join(part for part in path.replace(".modules_to_save.default", "").split(".") if part != "base_layer")


def _is_added(path: str) -> bool:
    """Whether a parameter is one of an adapter, which the plain model has not."""
    return ".modules_to_save." not in path and ".default" in path


def merge_results(model_dir: Path, results: Sequence[Path], out: Path, progress: Report | None = None) -> None:
    """Writes the linearized model `model_dir` with the `results` of its stages folded in to the new folder `out`: a
    checkpoint like `model_dir`, in float32, with its tokenizer.

    A tensor at a time, so that the model is never held, unless an adapter is of a kind that only a whole model takes.
    Raises BadInput when `out` exists, and as `load_chain` and `Chain` do.
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
    """Whether an adapter is a LoRA of matrices, which changes a tensor by nothing but its own numbers."""
    config = read_json(folder / ADAPTER_CONFIG)
    others = config.get("target_parameters") or config.get("trainable_token_indices")
    return config.get("peft_type") == PeftType.LORA and not others
