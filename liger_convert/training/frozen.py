"""Stores the frozen matrices of a stage's layers in the compute dtype, which halves their memory.

Autocast casts a matrix to that dtype before every matmul anyway, so the result of training is bit-identical. Embeddings
and norms stay in float32, because autocast does not round them.
"""

from __future__ import annotations

from typing import Any

import torch
from peft import PeftModel

from liger_convert.config.stages import AlignStage, Stage
from liger_convert.model import MIXER_MODULE

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
    whole: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    for name, module in whole.model.layers.named_modules():
        if isinstance(module, torch.nn.Linear) and f".{MIXER_MODULE}." not in name:
            for parameter in module.parameters(recurse=False):
                if not parameter.requires_grad:
                    parameter.data = parameter.data.to(dtype)
