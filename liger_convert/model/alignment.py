"""What a linearized model compares with its base, layer by layer: activations, and the loss on them.

Shapes: B batch, T tokens, C hidden size, L linearized layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast


@dataclass
class AlignTargets:
    """Inputs and outputs of the base's attention, per linearized layer.

    It is a class because wrappers such as DDP and FSDP rebuild lists and dicts. hidden, outputs: [B,T,C] each.
    position_embeddings: the base's, for these inputs.
    """

    layers: list[int]
    hidden: list[Tensor]
    outputs: list[Tensor]
    position_embeddings: list[tuple[Tensor, Tensor]]


@dataclass
class AlignOutput(CausalLMOutputWithPast):
    """`loss`: the mean over layers of the relative squared error; `layer_losses_L`: that of each layer."""

    layer_losses_L: Tensor | None = None


def row_sizes(x_BTC: Tensor, valid_BT: Tensor | None) -> Tensor:
    """[B]: the sum of squares of each row, in float32, without padding."""
    size_BT = x_BTC.float().square().sum(-1)
    return (size_BT if valid_BT is None else size_BT * valid_BT).sum(1)
