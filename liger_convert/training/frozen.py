"""What a stage does not train, held in half the memory: the frozen matrices of its layers, in the compute dtype.

Autocast rounds a matrix to that dtype before every product, so the bits of a training stay what they are. Embeddings
and norms stay in float32, as autocast does not round what they add to and multiply.
"""

from __future__ import annotations

from typing import Any

import torch
from peft import PeftModel

from liger_convert.config.stages import AlignStage, Stage
from liger_convert.model import MIXER_MODULE

# others read the weights that they are beside, and not only what these give, and so need all of their digits
ADAPTERS = ("lora", "rslora")


def is_narrowed(stage: Stage, dtype: torch.dtype) -> bool:
    """Whether `narrow_frozen` is for this stage. Layer by layer a layer is in memory only while it is trained."""
    by_layer = isinstance(stage, AlignStage) and stage.layerwise
    return dtype.itemsize < 4 and not by_layer and (stage.lora is None or stage.lora.variant in ADAPTERS)


def narrow_frozen(model: Any, stage: Stage, dtype: torch.dtype) -> None:
    """Holds the frozen matrices of the layers of `model`, which trains `stage`, in `dtype`. They are then no longer
    what is stored."""
    if not is_narrowed(stage, dtype):
        return
    whole: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    for name, module in whole.model.layers.named_modules():
        if isinstance(module, torch.nn.Linear) and f".{MIXER_MODULE}." not in name:
            for parameter in module.parameters(recurse=False):
                if not parameter.requires_grad:
                    parameter.data = parameter.data.to(dtype)
