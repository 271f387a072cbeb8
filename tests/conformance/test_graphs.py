"""torch.export and torch.compile(fullgraph=True) take a linearized model as one graph, or an error says what they
cannot.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gated_kernels import chunk_delta_rule, chunk_gla
from gated_kernels.check import error
from tiny_models import TOKENS as LONG
from tiny_models import build, logits

from liger_convert.mixers import MIXERS

mixers = pytest.mark.parametrize("mixer", MIXERS)
TOKENS = LONG[:, :7]
PADDED_MASK = torch.ones_like(TOKENS)
PADDED_MASK[0, :2] = 0
# a graph halves every chunk to the end, whatever the gates, and adds up in another order
TOLERANCE = 1e-5
POSITIONS = torch.arange(TOKENS.shape[1])[None]


def one_layer(mixer: str, family: str = "llama") -> Any:
    bounded = {} if mixer == "forgetting" else {"window": 3, "sinks": 1}
    return build(family, ["softmax", "main", "softmax"], type=mixer, **bounded)


@pytest.mark.parametrize("op", [chunk_gla, chunk_delta_rule])
def test_a_graph_of_an_op_asks_for_no_value_whatever_its_gates(op: Any) -> None:
    random = torch.Generator().manual_seed(0)
    q, k, v, r = (torch.randn(1, 9, 2, 4, generator=random) / 2 for _ in range(4))
    gates = -torch.rand(1, 9, 2, 4, generator=random)
    inputs = (q, k, v) if op is chunk_gla else (q, k, v, r)
    torch._dynamo.reset()
    compiled = torch.compile(op, fullgraph=True, backend="eager")
    for times in (1, 100):  # beyond 30 in a few tokens, blocks are halved
        for found, expected in zip(compiled(*inputs, times * gates), op(*inputs, times * gates)):
            assert found is expected is None or error(found, expected) <= TOLERANCE


@pytest.mark.slow
@mixers
def test_an_exported_model_gives_its_logits_for_other_values_and_masks(mixer: str) -> None:
    model = one_layer(mixer)
    with torch.no_grad():
        exported = torch.export.export(
            model, (), {"input_ids": TOKENS, "attention_mask": torch.ones_like(TOKENS), "use_cache": False}
        )
        found = exported.module()(input_ids=TOKENS.flip(1), attention_mask=PADDED_MASK, use_cache=False).logits
    expected = logits(model, TOKENS.flip(1), attention_mask=PADDED_MASK)
    assert error(found[PADDED_MASK.bool()], expected[PADDED_MASK.bool()]) <= TOLERANCE


@pytest.mark.slow
@mixers
def test_a_model_compiles_to_one_graph_with_its_gradients(mixer: str) -> None:
    assert_compiles_to_one_graph(one_layer(mixer))


# a bound of logits, queries that grow, norms of each head and metadata beside the rotary's angles
@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "ministral3", "stablelm"])
def test_families_with_special_layers_compile_to_one_graph(family: str) -> None:
    assert_compiles_to_one_graph(one_layer("gla", family))


def assert_compiles_to_one_graph(model: Any) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    gradients = []
    for each in (model, compiled):
        model.zero_grad()
        each(TOKENS, attention_mask=PADDED_MASK, labels=TOKENS, use_cache=False).loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    plain, found = gradients
    assert error(found, plain) <= TOLERANCE


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "torch.export supports a linearized model only without its cache: pass use_cache=False"),
        ({"use_cache": False, "position_ids": POSITIONS}, "leave position_ids out, or pass the attention_mask"),
    ],
    ids=["cache", "positions"],
)
def test_what_cannot_be_exported_is_refused_in_a_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence), torch.no_grad():
        torch.export.export(one_layer("gla"), (), {"input_ids": TOKENS, **options})


@pytest.mark.slow
def test_packed_documents_stay_apart_in_a_compiled_model() -> None:
    model = one_layer("gla")
    positions = torch.cat((torch.arange(3), torch.arange(4)))[None].expand(2, -1)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    assert error(logits(compiled, TOKENS, position_ids=positions), logits(model, TOKENS, position_ids=positions)) < 1e-5
    found = logits(compiled, TOKENS, position_ids=POSITIONS.expand(2, -1), use_cache=True)
    assert error(found, logits(model, TOKENS)) < 1e-5
