"""What families.py says of each family agrees with the family's modules in transformers."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from tiny import tiny_config
from tiny_models import base_folder, linearization
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from liger_convert.mixers import resolve_spec
from liger_convert.model import linearized_classes, linearized_config
from liger_convert.model.bases import check_base
from liger_convert.model.families import FAMILIES, Family, base_model_type, is_linearized
from liger_convert.model.loading import linearize_base, load_pretrained
from liger_convert.pipeline import preflight
from liger_convert.training.sharding import without_weights
from liger_convert.utils.errors import BadInput


@pytest.fixture(params=FAMILIES.values(), ids=lambda family: family.model_type)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


def layer_of(family: Family, **changes: Any) -> tuple[Any, dict[str, Any]]:
    """The first decoder layer of a tiny base in training mode, and the inputs that the model passes to it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family.model_type, **changes), attn_implementation="eager")
    model.train()
    taken: dict[str, Any] = {}

    def record(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        taken.update(kwargs, hidden_states=args[0] if args else kwargs["hidden_states"])

    with model.model.layers[0].register_forward_pre_hook(record, with_kwargs=True):
        model(torch.arange(3, 12)[None], use_cache=False)
    return model.model.layers[0], {name: x for name, x in taken.items() if name != "attention_mask"}


def attended(family: Family, given: dict[str, Any], layer: Any, **options: Any) -> torch.Tensor:
    """The output of a family's own attention for the inputs of its decoder layer."""
    own = {"hidden_states": given["hidden_states"], "position_embeddings": given["position_embeddings"]}
    with torch.no_grad():
        return layer.self_attn(**own, attention_mask=None, **{"position_ids": given["position_ids"], **options})[0]


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
    outputs = []
    for training in (True, False):
        layer.train(training)
        outputs.append(attended(family, given, layer))
    assert torch.equal(*outputs) == (not family.output_dropout)


def test_rotary_turns_channels_as_its_family_says(family: Family) -> None:
    layer, given = layer_of(family)
    rotate = sys.modules[type(layer.self_attn).__module__].apply_rotary_pos_emb
    (cos, sin), D = given["position_embeddings"], layer.self_attn.head_dim
    x = torch.randn(1, 1, cos.shape[1], D, generator=torch.Generator().manual_seed(0))
    C = cos.shape[-1]
    part = x[..., :C]
    if family.rotary == "split_halves":
        assert C < D
        x = part
    if family.rotary != "pairs":
        angles, partner = (cos, sin), torch.cat((-part[..., C // 2 :], part[..., : C // 2]), -1)
    else:
        partner = torch.stack((-part[..., 1::2], part[..., ::2]), -1).flatten(-2)
        angles = (cos, sin)  # Cohere's are of pairs already, the others' of halves
        if not torch.equal(cos[..., ::2], cos[..., 1::2]):
            angles = tuple(angle[..., : C // 2].repeat_interleave(2, -1) for angle in (cos, sin))
    turned = part * angles[0] + partner * angles[1]
    for found in rotate(x, x, cos, sin):
        assert torch.equal(found, torch.cat((turned, x[..., C:]), -1))


def test_attention_bounds_its_logits_as_its_family_says(family: Family) -> None:
    layer, given = layer_of(family)
    layer.eval()
    before = attended(family, given, layer)
    layer.self_attn.attn_logit_softcapping = 1e-3  # of no meaning where nothing reads it
    assert (not torch.equal(attended(family, given, layer), before)) == family.softcap


def test_queries_grow_with_their_position_as_the_family_says(family: Family) -> None:
    layer, given = layer_of(family)
    layer.eval()
    far = given["position_ids"] + 100  # beside the same angles
    same = torch.equal(attended(family, given, layer, position_ids=far), attended(family, given, layer))
    assert same == (not family.position_scale)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_a_linearized_layer_drops_parts_of_its_output_in_training_as_the_family_does(rate: float) -> None:
    config = tiny_config("starcoder2", residual_dropout=rate)
    plan = {"format": 2, "mixers": {"main": resolve_spec({"window": 4, "sinks": 0})}, "layers": ["main"] * 3}
    torch.manual_seed(0)
    model = linearized_classes("starcoder2")[2](linearized_config(config, plan))
    attention, seen = model.model.layers[0].self_attn, []
    attention.register_forward_hook(lambda _m, _a, output: seen.append(output[0]))
    for training in (False, True):
        attention.train(training)
        model(torch.arange(3, 40)[None], use_cache=False)
    still, dropped = seen
    assert (dropped == 0).double().mean().item() == pytest.approx(rate, abs=0.05)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], still[kept] / (1 - rate))


@pytest.mark.parametrize("model_type", ["gemma", "gemma2", "gemma3_text"])
def test_a_base_whose_tokens_see_those_after_them_is_refused(model_type: str) -> None:
    check_base(tiny_config(model_type))
    with pytest.raises(BadInput, match=r"^config.json: use_bidirectional_attention is set"):
        check_base(tiny_config(model_type, use_bidirectional_attention=True))


@pytest.mark.parametrize("name", [*FAMILIES])
def test_a_bound_on_logits_counts_in_every_model_that_is_loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This covers a base and layers that stay softmax. Families without a bound are the control. Here transformers
    chooses sdpa by itself, as 5.19 does, which ignores the bound; 5.23 refuses it."""
    bounded, dtype = FAMILIES[name].softcap, torch.float32
    folder, plan = base_folder(name), linearization(["softmax", "main", "softmax"], type="gla")
    monkeypatch.setattr(MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[name]], "_supports_sdpa", True)
    of_base = load_pretrained(folder, dtype=dtype)
    for model in (of_base, linearize_base(folder, plan, dtype=dtype), without_weights(of_base.config)):
        assert model.config._attn_implementation == ("eager" if bounded else "sdpa")
    tokens = torch.arange(3, 27)[None]
    found = of_base(tokens).logits
    if bounded:
        for layer in of_base.model.layers:
            layer.self_attn.attn_logit_softcapping = None
        assert not torch.allclose(found, of_base(tokens).logits, atol=1e-2)
        with pytest.raises(ValueError, match="scaled_dot_product_attention"):
            linearize_base(folder, plan, dtype=dtype, attn_implementation="sdpa")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_tiny_model_that_generates(family: str) -> None:
    torch.manual_seed(0)  # so that no token that is generated ends the text
    config = tiny_config(family)
    linearization = {"format": 2, "mixers": {"main": resolve_spec({})}, "layers": ["main", "softmax", "main"]}
    model = preflight._tiny(config, linearization)
    assert model.config.linearization["layers"] == ["main", "softmax"]
    assert model.num_parameters() < 100_000
    assert model.generate(max_new_tokens=2, do_sample=False, pad_token_id=0).shape[1] == 3


def test_a_linearized_config_is_told_from_that_of_its_base(family: Family) -> None:
    base = tiny_config(family.model_type)
    linearized = linearized_config(base, {"layers": []})
    assert (is_linearized(base), is_linearized(linearized)) == (False, True)
    assert base_model_type(base) == base_model_type(linearized) == family.model_type
