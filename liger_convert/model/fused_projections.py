"""Linear layers of a family in fewer kernels, for decoding steps that are captured as CUDA graphs.

Queries, keys and values have the same input, and so have the two halves of a feed-forward. They run in one kernel,
which reads their weights faster than one product after the other does. Weights that torchao stores in 8 bits are read
as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from gated_kernels.common.registry import kernel_for
from gated_kernels.projections.arguments import ScaledWeight, Weight
from torch import Tensor, nn

from liger_convert.model.fused_modules import Forward, by_class, is_unchanged

TOGETHER = ("q_proj", "k_proj", "v_proj")
# torchao's classes, and what else may be done to numbers and inputs of such a layer
EIGHT_BITS = ("Int8Tensor", "Float8Tensor")
CHANGED = ("act_quant_kwargs", "act_quant_scale", "act_pre_scale")
SAME = 0.02  # the allowed relative difference of a feed-forward, which rounds more often than the kernel


def fused_projections(model: nn.Module) -> dict[nn.Module, Forward]:
    """The linear layers and feed-forwards of `model` that kernels can compute, and what runs instead of their forward.

    Feed-forwards differ in their activation and in what else they do. So one of each class is tried on random numbers.
    This reads a value on the host.
    """
    if kernel_for("projections") is None or kernel_for("swiglu") is None:
        return {}
    found: dict[nn.Module, Forward] = {}
    tried: dict[tuple[type, torch.dtype], bool] = {}
    for module in model.modules():
        together: list[Any] = [getattr(module, name, None) for name in TOGETHER]
        if all(_is_plain(layer) for layer in together):
            joint = JointProjections(together)
            found |= {layer: functools.partial(joint, layer) for layer in together}
        elif _is_plain(module) and module not in found:
            found[module] = functools.partial(JointProjections([module]), module)
        if (feed_forward := FeedForward.of(module)) is not None:
            kind = type(module), feed_forward.dtype
            if kind not in tried:
                tried[kind] = feed_forward.is_same()
            if tried[kind]:
                found[module] = feed_forward
    return found


class JointProjections:
    """Linear layers with the same input. The first one that is called with it computes the outputs of all."""

    def __init__(self, layers: Sequence[Any]):
        self.layers = layers
        self.held: tuple[Tensor, dict[nn.Module, Tensor]] | None = None

    def __call__(self, layer: nn.Module, x: Tensor) -> Tensor:
        """The output of one of the layers."""
        held = self.held  # read once: another thread may run the model with another input
        if held is None or held[0] is not x or layer not in held[1]:
            outputs = self._in_kernel(x)
            if outputs is None:
                by_module: Tensor = by_class(layer, x)
                return by_module
            held = self.held = x, dict(zip(self.layers, outputs))
        output = held[1].pop(layer)
        if not held[1]:
            self.held = None
        return output

    def _in_kernel(self, x: Tensor) -> tuple[Tensor, ...] | None:
        kernel = kernel_for("projections")
        weights, biases = [weight_of(layer) for layer in self.layers], [layer.bias for layer in self.layers]
        outputs: tuple[Tensor, ...] | None = None if kernel is None else kernel(x, weights, biases)
        return outputs


class FeedForward:
    """A feed-forward whose gate and up projection, which may be one layer, run in one kernel."""

    def __init__(self, module: Any, layers: Sequence[Any]):
        self.module, self.layers = module, layers

    @classmethod
    def of(cls, module: Any) -> FeedForward | None:
        """None if the module has other layers than a feed-forward."""
        names = ("gate_up_proj",) if hasattr(module, "gate_up_proj") else ("gate_proj", "up_proj")
        layers: list[Any] = [getattr(module, name, None) for name in names]
        if not isinstance(getattr(module, "down_proj", None), nn.Linear) or "forward" in vars(module):
            return None
        is_plain = all(_is_plain(layer) and layer.bias is None and not layer.weight.is_meta for layer in layers)
        return cls(module, layers) if is_plain else None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its weights."""
        dtype: torch.dtype = self.layers[0].weight.dtype
        return dtype

    def __call__(self, x: Tensor) -> Tensor:
        found = self._in_kernel(x)
        if found is None:
            found = by_class(self.module, x)
        return found

    def _in_kernel(self, x: Tensor) -> Tensor | None:
        kernel = kernel_for("swiglu")
        found: Tensor | None = None if kernel is None else kernel(x, *self._weights())
        return None if found is None else self.module.down_proj(found)

    def _weights(self) -> list[Weight]:
        """Those of the gate and of the up projection."""
        weights: list[Any] = [weight_of(layer) for layer in self.layers]
        if len(weights) == 2:
            return weights
        if isinstance(weights[0], ScaledWeight):
            return [ScaledWeight(*parts) for parts in zip(*(x.chunk(2) for x in weights[0]))]
        return list(weights[0].chunk(2))

    @torch.no_grad()
    def is_same(self) -> bool:
        """Whether the kernel computes what the module does, with gates that are neither all open nor all shut."""
        layer, device = self.layers[0], self.layers[0].weight.device
        generator = torch.Generator(device).manual_seed(0)
        x = torch.randn(8, layer.in_features, device=device, generator=generator).to(self.dtype)
        x = x / layer(x).float().square().mean().sqrt().clamp_min(torch.finfo(self.dtype).tiny).to(self.dtype)
        found, wanted = self._in_kernel(x), by_class(self.module, x)
        if found is None or wanted.dtype != found.dtype or wanted.shape != found.shape:
            return False
        return bool((found.float() - wanted.float()).norm() <= SAME * wanted.float().norm())


def weight_of(layer: Any) -> Weight | None:
    """The weight of a linear layer as the kernels take it: as it is, or by its numbers if torchao stored it in 8 bits
    with a scale for each row. None if it is stored in another way."""
    weight = layer.weight
    if type(weight) is nn.Parameter:
        return weight
    if type(weight).__name__ not in EIGHT_BITS or not type(weight).__module__.startswith("torchao."):
        return None
    numbers_NK, scale_N1 = weight.qdata, weight.scale
    if scale_N1.shape != (len(numbers_NK), 1) or any(getattr(weight, name, None) is not None for name in CHANGED):
        return None
    return ScaledWeight(numbers_NK, scale_N1[:, 0])


def are_read_as_stored(model: nn.Module) -> bool:
    """Whether the kernels take the weights of all linear layers of a model as they are stored."""
    return all(weight_of(layer) is not None for layer in model.modules() if isinstance(layer, nn.Linear))


def _is_plain(layer: Any) -> bool:
    if type(layer) is not nn.Linear or not is_unchanged(layer) or (weight := weight_of(layer)) is None:
        return False
    shift = getattr(layer.weight, "zero_point", None) if isinstance(weight, ScaledWeight) else None
    return shift is None or not bool(shift.any())
