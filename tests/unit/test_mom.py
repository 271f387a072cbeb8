"""A mixture of memories writes to what a token chose and to nothing else, and its router learns to balance them."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import save_tiny_base
from transformers import DynamicCache

from liger_convert.mixers import MIXERS, build_mixer, resolve_spec
from liger_convert.mixers.base import HeadDims
from liger_convert.mixers.routed.mom import MoM
from liger_convert.model import take_auxiliary_loss
from liger_convert.model.loading import linearize_base

TOKENS = torch.randint(3, 101, (2, 29), generator=torch.Generator().manual_seed(0))
INNER = [name for name, mixer in MIXERS.items() if mixer.recurrence not in ("none", "routed")]
every_inner = pytest.mark.parametrize("inner", INNER)


@functools.cache
def base() -> Path:
    return save_tiny_base("llama", Path(tempfile.mkdtemp(prefix="tiny-llama-")), tokenizer=False)


def build(**spec: Any) -> Any:
    plan = {"format": 2, "mixers": {"main": resolve_spec(spec)}, "layers": ["main", "softmax", "main"]}
    return linearize_base(base(), plan, dtype=torch.float32).eval()


def mom(inner: str, **options: Any) -> Any:
    # combined as every memory can be, with or without a normalizer
    return build(**{"type": "mom", "inner": {"type": inner}, "combine": "fixed", "window": 3, "sinks": 0, **options})


def routers(model: Any) -> list[MoM]:
    return [module for module in model.modules() if isinstance(module, MoM)]


@every_inner
@torch.no_grad()
def test_a_memory_that_no_token_chose_is_unchanged_bit_for_bit(inner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache = mom(inner, scope="all", memories=5), DynamicCache()
    model(TOKENS[:, :20], past_key_values=cache, use_cache=True)
    before = {name: state.clone() for name, state in cache.layers[0].states.items()}
    mixer, choices = routers(model)[0], []
    route = mixer.route
    monkeypatch.setattr(mixer, "route", lambda x: choices.append(route(x)) or choices[-1])
    model(TOKENS[:, 20:21], past_key_values=cache, use_cache=True)
    chosen_BGN = choices[0][1][:, 0]
    assert (chosen_BGN.sum(-1) == 2).all()
    for name, state in cache.layers[0].states.items():
        same_BSG = (state == before[name]).unflatten(2, (chosen_BGN.shape[1], -1)).flatten(3).all(-1)
        assert torch.equal(same_BSG[:, 1:].mT, ~chosen_BGN), name
        assert not same_BSG[:, 0].any(), "every token is written to the shared memory"


@every_inner
@pytest.mark.parametrize("memories", [1, 3])
@torch.no_grad()
def test_memories_that_all_tokens_choose_are_the_inner_mixer(inner: str, memories: int) -> None:
    routed = mom(inner, memories=memories, active=memories, shared=False)
    plain = build(type=inner, combine="fixed", window=3, sinks=0, scope="evicted")
    plain.load_state_dict({name.replace("mixer.inner.", "mixer."): t for name, t in routed.state_dict().items()}, False)
    expected = plain(TOKENS).logits
    # sums in another order, held to what the conformance tests allow
    torch.testing.assert_close(routed(TOKENS).logits, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


def test_ties_of_the_router_go_to_the_first_memories() -> None:
    mixer = routers(mom("gla"))[0]
    torch.nn.init.zeros_(mixer.router_GNC)
    assert mixer.route(torch.randn(2, 3, 32))[1].tolist() == [[[[True, True, False, False]] * 2] * 3] * 2


def test_the_balance_loss_is_each_layers_own_and_one_when_balanced() -> None:
    model = mom("gla", balance=1.0).train()
    for mixer in routers(model):
        torch.nn.init.zeros_(mixer.router_GNC)  # equal probabilities, whatever is chosen
    model(TOKENS)
    torch.testing.assert_close(torch.as_tensor(take_auxiliary_loss(model)), torch.tensor(2.0))
    assert take_auxiliary_loss(model) == 0.0
    model.eval()(TOKENS)
    assert take_auxiliary_loss(model) == 0.0


def test_the_balance_loss_reaches_the_router_through_gradient_checkpointing() -> None:
    model = mom("gla").train()
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        loss = model(TOKENS).logits.square().mean() * 0
        (loss + take_auxiliary_loss(model)).backward()
        gradients.append([mixer.router_GNC.grad for mixer in routers(model)])
    for plain, again in zip(*gradients):
        assert plain.any()
        torch.testing.assert_close(again, plain)


def test_of_a_mixture_is_calibrated_what_is_calibrated_of_its_memories() -> None:
    mixer = build_mixer(resolve_spec({"type": "mom", "inner": {"type": "gla"}}), HeadDims(32, 4, 2, 8))
    fitted = mixer.calibration()
    assert len(fitted.codebooks) == len(fitted.gate_biases) == 1
    own = {id(parameter) for parameter in mixer.parameters()}
    assert all(id(bias) in own for bias in fitted.gate_biases)
    # the size of the read is a memory's, and the mixture's is another
    of_sums = build_mixer(
        resolve_spec({"type": "mom", "combine": "learned", "inner": {"type": "retnet"}}), HeadDims(32, 4, 2, 8)
    )
    assert of_sums.inner.calibration().read_size is not None
    assert of_sums.calibration().read_size is None
