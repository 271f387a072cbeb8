"""Stores the frozen matrices of a stage's layers in the compute dtype, which halves their memory.

Autocast casts a matrix to that dtype before every matmul anyway, so the result of training is bit-identical. Embeddings
and norms stay in float32, because autocast does not round them.

A mixture's experts are one tensor [experts, out, in] for each of their layers. The grouped product that transformers
takes for them is left alone by autocast. In float32 it would be slow, and read the number of tokens of each expert on
the host, which rules out a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from liger_convert.config.stages import AlignStage, Stage
from liger_convert.model import MIXER_MODULE
from liger_convert.training.adapters import adapted_model

# Other variants read the frozen weights themselves, not only the outputs, and so need their full precision.
ADAPTERS = ("lora", "rslora")


def is_narrowed(stage: Stage, dtype: torch.dtype) -> bool:
    """Whether `narrow_frozen` applies to this stage.

    It does not apply to layerwise training, where a layer is in memory only while it trains.
    """
    by_layer = isinstance(stage, AlignStage) and stage.layerwise
    return dtype.itemsize < 4 and not by_layer and (stage.lora is None or stage.lora.variant in ADAPTERS)


def narrow_frozen(model: Any, stage: Stage, dtype: torch.dtype) -> None:
    """Casts the frozen linear maps in the layers of `model` to `dtype`, in place, if `is_narrowed` says so. Mixers are
    left alone. The cast weights then differ from the stored ones."""
    if not is_narrowed(stage, dtype):
        return
    for parameter in _matrices(model):
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def run_wide_experts_apart(model: Any, dtype: torch.dtype) -> None:
    """Runs experts one by one, whose products autocast casts, if some are wider than the compute dtype."""
    if any(p.dim() == 3 and p.dtype.itemsize > dtype.itemsize for p in _matrices(model)):
        adapted_model(model).set_experts_implementation("eager")


def _matrices(model: Any) -> Iterator[torch.nn.Parameter]:
    """What belongs to the linear maps and experts in the layers, except those of mixers."""
    for name, module in adapted_model(model).model.layers.named_modules():
        if f".{MIXER_MODULE}." not in f"{name}.":
            for parameter in module.parameters(recurse=False):
                if isinstance(module, torch.nn.Linear) or parameter.dim() == 3:
                    yield parameter
