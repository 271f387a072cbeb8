"""If heads are split over processes, the parts together give the whole layer's output. No server is needed."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from tiny_models import SINKS, TOKENS, WINDOW, build
from torch import Tensor, nn

from liger_convert.mixers import build_mixer
from liger_convert.mixers.registry import BUILT_IN
from liger_convert.model.families import FAMILIES
from liger_convert.model.sequence import SequenceMetadata
from liger_convert.serving.settings import layouts
from liger_convert.serving.split import SPLIT_BY_HEADS, check_split, share_of_heads, share_of_parameter
from liger_convert.utils.errors import BadInput

BOUNDED = {"window": WINDOW, "sinks": SINKS}
PROCESSES = 2
SAME = 2e-6  # of the largest number: float32's rounding in a sum of some dozen products; 5e-7 are usual
OPTIONS: list[dict[str, Any]] = [
    *({"gate": gate} for gate in ("pooled", "head", "constant", "none")),
    {"rope": True},
    {"forget": True},
    {"short_conv": 4},
    {"output_gate": True},
    {"combine": "learned"},
    {"feature_map": "hedgehog", "gate": "learned"},
    {"type": "mamba2", "output_gate": True, "norm_after_gate": True, "short_conv": 4, "conv_bias": True},
    {"type": "titans", "combine": "gate", "persistent": 3},
    {"type": "titans", "combine": "context"},
]
WHOLE = dict.fromkeys(("phi3", "olmo2", "olmo3", "olmoe", "stablelm"), "projections") | {"cohere": "norms"}


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
    """The largest difference between the sum over two processes and the whole layer, relative to the largest number."""
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


@pytest.mark.parametrize("mixer", sorted(BUILT_IN))
def test_heads_split_in_two_give_the_output_of_the_whole_layer(mixer: str) -> None:
    assert (apart(type=mixer, **BOUNDED) <= SAME) == (mixer in SPLIT_BY_HEADS)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_heads_split_in_two_give_the_output_of_the_whole_layer_with_options(options: dict[str, Any]) -> None:
    options = {"type": "gla", **BOUNDED, **options}
    assert apart(**options) <= SAME
    assert apart(**options, swapped=True) > 1000 * SAME


def test_pages_of_a_layer_split_in_two_are_half_as_large() -> None:
    config = build("llama", ["main", "softmax", "main"], type="gla", **BOUNDED).config
    whole, half = (layouts(config, torch.float32, processes)[0].words for processes in (1, PROCESSES))
    assert PROCESSES * half == whole


@pytest.mark.parametrize("family", FAMILIES)
def test_families_whose_projections_are_one_or_normalized_together_are_refused(family: str) -> None:
    config = build(family, ["main", "softmax", "main"], type="gla", **BOUNDED).config
    check_split(config, 1)
    refused = f"{WHOLE.get(family)} of {family}"
    with contextlib.nullcontext() if family not in WHOLE else pytest.raises(BadInput, match=refused):
        check_split(config, PROCESSES)


def test_what_cannot_be_split_is_refused_by_name() -> None:
    config = build("llama", ["main", "softmax", "main"], type="retnet", **BOUNDED).config
    with pytest.raises(BadInput, match="tensor_parallel_size: 2: mixer 'retnet'"):
        check_split(config, 2)
    with pytest.raises(BadInput, match="does not divide the 2 key-value heads"):
        check_split(config, 4)
    config = build("llama", ["main", "softmax", "main"], type="mamba2", norm_all_heads=True, **BOUNDED).config
    with pytest.raises(BadInput, match="tensor_parallel_size: 2 splits layers by heads, but norm_all_heads"):
        check_split(config, 2)
    assert apart(type="mamba2", norm_all_heads=True, **BOUNDED) > 1000 * SAME
