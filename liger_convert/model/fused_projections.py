"""Linear layers of a family in fewer kernels, for decoding steps that are captured as CUDA graphs.

Queries, keys and values have the same input, and so have the two halves of a feed-forward. They run in one kernel,
which reads their weights faster than one product after the other does.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from gated_kernels.common.registry import kernel_for
from torch import Tensor, nn

from liger_convert.model.fused_modules import Forward, by_class, is_unchanged

TOGETHER = ("q_proj", "k_proj", "v_proj")
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
        weights, biases = [layer.weight for layer in self.layers], [layer.bias for layer in self.layers]
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

    def _weights(self) -> tuple[Tensor, Tensor]:
        weights = [layer.weight for layer in self.layers]
        gate, up = weights[0].chunk(2) if len(weights) == 1 else weights
        return gate, up

    @torch.no_grad()
    def is_same(self) -> bool:
        """Whether the kernel computes what the module does, with gates that are neither all open nor all shut."""
        gate, _ = self._weights()
        generator = torch.Generator(gate.device).manual_seed(0)
        x = torch.randn(8, gate.shape[1], device=gate.device, generator=generator)
        size = (x @ gate.float().T).square().mean().sqrt()
        x = (x / size.clamp_min(torch.finfo(gate.dtype).tiny)).to(gate.dtype)
        found, wanted = self._in_kernel(x), by_class(self.module, x)
        if found is None or wanted.dtype != found.dtype or wanted.shape != found.shape:
            return False
        return bool((found.float() - wanted.float()).norm() <= SAME * wanted.float().norm())


def _is_plain(layer: Any) -> bool:
    return type(layer) is nn.Linear and type(layer.weight) is nn.Parameter and is_unchanged(layer)
