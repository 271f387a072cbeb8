"""Loading a linearized model whose weights are quantised in the format of compressed-tensors.

transformers leaves such weights as they are stored, and compressed-tensors widens them in the model's first own forward
pass. By then a backbone that was called by itself has failed, and compressed-tensors has wrapped every module to move
its inputs, which makes plain tuples of a mixer's named ones. So the weights are widened here as soon as they are read.
Their modules go on quantising what comes in, a token at a time, as they do in a server.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    Family = Any
else:
    Family = object  # each generated class brings its own


class QuantizedWeights(Family):
    """What every linearized class does with weights that are quantised."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As transformers' own; weights that compressed-tensors has quantised come out in the model's dtype. Raises
        ValueError where some of these are not in memory."""
        loaded = super().from_pretrained(*args, **kwargs)
        widen(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers' own. Raises ValueError for a model that was loaded from quantised weights."""
        if getattr(self, "is_quantized", False):
            what = "this model's weights were quantised, but were converted back when it was loaded"
            raise ValueError(f"{what}: copy the folder that it came from, or save the model that it was made from")
        return super().save_pretrained(*args, **kwargs)


def widen(model: nn.Module) -> None:
    """Gives the quantised weights of `model`, where it has any, the dtype of their scales, in place. Raises ValueError
    for weights that wait on a disk."""
    modules = [module for module in model.modules() if getattr(module, "quantization_status", None) == "compressed"]
    if not modules:
        return
    # by a call: transformers asks for every package that a statement of an export's code imports, used or not
    decompress_module = importlib.import_module("compressed_tensors.compressors.base").decompress_module
    if any(weight.is_meta for module in modules for weight in module.parameters(recurse=False)):
        raise ValueError("quantised weights have to fit into memory: leave out device_map, or give it more room")
    for module in modules:
        decompress_module(module)
    if (hook := getattr(model, "ct_decompress_hook", None)) is not None:
        hook.remove()
        del model.ct_decompress_hook
