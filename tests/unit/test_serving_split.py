"""The heads of a layer split over processes give, together, what the whole layer gives; no server is needed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_models import SINKS, TOKENS, WINDOW, build
from torch import Tensor, nn

from liger_convert.mixers import MIXERS, build_mixer
from liger_convert.model.sequence import SequenceMetadata
from liger_convert.serving.split import SPLIT_BY_HEADS, share_of_heads, share_of_parameter

BOUNDED = {"window": WINDOW, "sinks": SINKS}
PROCESSES = 2


def part_of(layer: Any, process: int, source: int) -> Any:
    """The layer of one process; its mixer's parameters are the share of process `source`."""
    part = copy.deepcopy(layer)
    part.dims = share_of_heads(layer.dims, PROCESSES)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        axis = int(name == "o_proj")
        weight = getattr(layer, name).weight
        getattr(part, name).weight = nn.Parameter(weight.chunk(PROCESSES, axis)[process])
    resolved = layer.config.linearization["mixers"]["main"]
    part.mixer = build_mixer(resolved, part.dims)
    saved = layer.mixer.state_dict()
    part.mixer.load_state_dict(
        {name: share_of_parameter(saved[name], own, source) for name, own in part.mixer.state_dict().items()}
    )
    return part.eval()


@torch.no_grad()
def apart(swapped: bool = False, **spec: Any) -> float:
    """The largest difference of the sum of two processes from the whole layer, of the largest number."""
    model = build("llama", ["main"] * 3, **spec)
    block = model.model.layers[1]
    layer, x_BTC = block.self_attn, block.input_layernorm(model.model.embed_tokens(TOKENS))
    position_BT = torch.arange(TOKENS.shape[1]).expand(TOKENS.shape)
    angles = model.model.rotary_emb(x_BTC, position_BT)

    def output(of: Any) -> Tensor:
        return of(x_BTC, angles, metadata=SequenceMetadata(TOKENS.shape[1], position_BT))[0]

    whole = output(layer)
    total = sum(output(part_of(layer, p, 1 - p if swapped else p)) for p in range(PROCESSES))
    return float((total - whole).abs().max() / whole.abs().max())


@pytest.mark.parametrize("mixer", MIXERS)
def test_two_halves_are_the_whole(mixer: str) -> None:
    print(mixer, apart(type=mixer, **BOUNDED))
