"""What families.py says of a family is what its own modules do; families that do not fit are refused in a sentence."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from tiny import tiny_config
from transformers import AutoModelForCausalLM

from liger_convert.model.bases import check_base
from liger_convert.model.families import FAMILIES, MISFITS, Family
from liger_convert.utils.errors import BadInput

ALL = FAMILIES | MISFITS


@pytest.fixture(params=ALL.values(), ids=lambda family: family.model_type)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


def layer_of(family: Family, **changes: Any) -> tuple[Any, dict[str, Any]]:
    """The first decoder layer of a tiny base, in training, and what its model passes it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family.model_type, **changes), attn_implementation="eager")
    model.train()
    taken: dict[str, Any] = {}

    def record(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        taken.update(kwargs, hidden_states=args[0] if args else kwargs["hidden_states"])

    with model.model.layers[0].register_forward_pre_hook(record, with_kwargs=True):
        model(torch.arange(3, 12)[None], use_cache=False)
    return model.model.layers[0], {name: x for name, x in taken.items() if name != "attention_mask"}


def test_a_decoder_layer_hands_on_what_it_is_given_as_its_family_says(family: Family) -> None:
    layer, given = layer_of(family)
    seen: list[dict[str, Any]] = []
    with layer.self_attn.register_forward_pre_hook(lambda _m, _a, kwargs: seen.append(kwargs), with_kwargs=True):
        layer(**given, metadata="of the batch")
    assert (seen[0].get("metadata") == "of the batch") == family.passes_kwargs


def test_attention_drops_parts_of_its_output_as_its_family_says(family: Family) -> None:
    drops = {"residual_dropout": 0.5, "resid_pdrop": 0.5, "hidden_dropout": 0.5, "attention_dropout": 0.0}
    config = tiny_config(family.model_type)
    layer, given = layer_of(family, **{name: value for name, value in drops.items() if hasattr(config, name)})
    # attention itself, which takes neither the library's caches nor our metadata here
    own = {"hidden_states": given["hidden_states"], "position_embeddings": given["position_embeddings"]}
    outputs = []
    for training in (True, False):
        layer.train(training)
        outputs.append(layer.self_attn(**own, attention_mask=None)[0])
    assert torch.equal(*outputs) == (not family.output_dropout)


def test_rotary_turns_channels_as_its_family_says(family: Family) -> None:
    layer, given = layer_of(family)
    rotate = sys.modules[type(layer.self_attn).__module__].apply_rotary_pos_emb
    (cos, sin), D = given["position_embeddings"], layer.self_attn.head_dim
    x = torch.randn(1, 1, cos.shape[1], D, generator=torch.Generator().manual_seed(0))
    C = cos.shape[-1]
    if family.rotary == "in_attention":
        assert C < D
        return
    part = x[..., :C]
    if family.rotary == "halves":
        angles, partner = (cos, sin), torch.cat((-part[..., C // 2 :], part[..., : C // 2]), -1)
    else:
        partner = torch.stack((-part[..., 1::2], part[..., ::2]), -1).flatten(-2)
        angles = tuple(angle[..., : C // 2].repeat_interleave(2, -1) for angle in (cos, sin))
    turned = part * angles[0] + partner * angles[1]
    for found in rotate(x, x, cos, sin):
        assert torch.equal(found, torch.cat((turned, x[..., C:]), -1))


@pytest.mark.parametrize(
    ("model_type", "sentence"),
    [
        ("stablelm", "its decoder layer does not pass the batch's metadata on to attention and its attention itself"),
        ("starcoder2", "its attention ends with a dropout, which a linearized layer would leave out"),
    ],
)
def test_a_family_that_does_not_fit_is_refused_in_a_sentence(model_type: str, sentence: str) -> None:
    with pytest.raises(BadInput, match=f"^config.json: model_type '{model_type}' cannot be linearized: {sentence}"):
        check_base(tiny_config(model_type))


def test_every_family_fits_and_every_misfit_says_why() -> None:
    assert [family.misfit() for family in FAMILIES.values()] == [None] * len(FAMILIES)
    assert all(family.misfit() for family in MISFITS.values())
    assert not FAMILIES.keys() & MISFITS.keys()
