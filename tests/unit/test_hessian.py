"""Second derivatives are right: a Hessian-vector product is the change of the gradients along the vector."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import TOKENS, base_folder, build, linearization
from torch import Tensor

from liger_convert.mixers import MIXERS
from liger_convert.model.loading import linearize_base

STEP = 1e-4
# what is left of float64 by the family's own norms, which are float32; wrong derivatives are off by 0.8 and more
TOLERANCE = 5e-3
MASK = torch.ones(2, 11, dtype=torch.long)
MASK[0, :4] = 0
FAST = ("gla", "liger-paper", "gsa", "rwkv7")
mixers = pytest.mark.parametrize(
    "mixer", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in MIXERS]
)


def parameters(model: Any) -> list[Tensor]:
    return [p for name, p in model.named_parameters() if ".self_attn." in name]


def gradients(model: Any, create_graph: bool = False) -> list[Tensor]:
    ids = TOKENS[:, : MASK.shape[1]]
    loss = model(ids, attention_mask=MASK, labels=ids.masked_fill(MASK == 0, -100), use_cache=False).loss
    found = torch.autograd.grad(loss, parameters(model), create_graph=create_graph, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters(model))]


def directions(model: Any) -> list[Tensor]:
    random = torch.Generator().manual_seed(3)
    return [0.1 * torch.randn(p.shape, generator=random, dtype=p.dtype) for p in parameters(model)]


def products(model: Any) -> list[Tensor]:
    along = sum((g * d).sum() for g, d in zip(gradients(model, create_graph=True), directions(model)))
    found = torch.autograd.grad(along, parameters(model), allow_unused=True)
    return [torch.zeros_like(p) if h is None else h for h, p in zip(found, parameters(model))]


def bounded(mixer: str) -> dict[str, int]:
    return {} if mixer == "forgetting" else {"window": 3, "sinks": 1}


@mixers
def test_a_hessian_vector_product_is_the_change_of_the_gradients(mixer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "float", Tensor.double)  # float32 would drown the differences
    model = build("llama", ["main"] * 3, type=mixer, **bounded(mixer)).double()
    found, moved = products(model), []
    for sign in (1, -1):
        with torch.no_grad():
            for p, d in zip(parameters(model), directions(model)):
                p += sign * STEP * d
        moved.append(gradients(model))
        with torch.no_grad():
            for p, d in zip(parameters(model), directions(model)):
                p -= sign * STEP * d
    expected = torch.cat([(a - b).flatten() / (2 * STEP) for a, b in zip(*moved)])
    assert expected.norm() > 1
    assert (torch.cat([h.flatten() for h in found]) - expected).norm() <= TOLERANCE * expected.norm()


@mixers
def test_a_new_models_hessian_vector_product_is_finite(mixer: str) -> None:
    # its codebooks do not shift what they turn, so that the keys that stand for no token are of length 0
    plan = linearization(["main"] * 3, type=mixer, **bounded(mixer))
    model = linearize_base(base_folder("llama"), plan, dtype=torch.float32)
    assert all(h.isfinite().all() for h in products(model))
