"""Loading a linearized model whose weights are quantized in the compressed-tensors format.

transformers leaves such weights compressed, and compressed-tensors decompresses them in the model's first forward pass.
That is too late: a backbone that is called directly fails, and compressed-tensors wraps every module to move its
inputs, which turns a mixer's named tuples into plain ones. So the weights are decompressed here right after loading.
Their modules still quantize their inputs per token, as they do in a server.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    Family = Any
else:
    Family = object  # each generated class adds its family's


class QuantizedWeights(Family):
    """Loading and saving of quantized weights, for every linearized class."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """transformers' from_pretrained, with compressed-tensors weights decompressed to the dtype of their scales.

        Raises ValueError when some of these weights are not in memory.
        """
        loaded = super().from_pretrained(*args, **kwargs)
        widen(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' save_pretrained. Raises ValueError for a model that was loaded from quantized weights."""
        if getattr(self, "is_quantized", False):
            what = "this model's weights were quantized, but were converted back when it was loaded"
            raise ValueError(f"{what}: copy the folder that it came from, or save the model that it was made from")
        return super().save_pretrained(*args, **kwargs)


def widen(model: nn.Module) -> None:
    """Decompresses the quantized weights of `model`, if any, to the dtype of their scales, in place.

    Raises ValueError for weights on the meta device, which are offloaded.
    """
    modules = [module for module in model.modules() if getattr(module, "quantization_status", None) == "compressed"]
    if not modules:
        return
    # import_module, because transformers requires every package that an export's code names in an import statement
    decompress_module = importlib.import_module("compressed_tensors.compressors.base").decompress_module
    if any(weight.is_meta for module in modules for weight in module.parameters(recurse=False)):
        raise ValueError("quantized weights have to fit into memory: leave out device_map, or give it more room")
    for module in modules:
        decompress_module(module)
    if (hook := getattr(model, "ct_decompress_hook", None)) is not None:
        hook.remove()
        del model.ct_decompress_hook
