"""A mixture of memories writes to what a token chose and to nothing else, and its router learns to balance them."""

from __future__ import annotations

import copy
import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import shared_folder
from tiny import save_tiny_base
from torch import Tensor
from transformers import DynamicCache

from liger_convert.mixers import MIXERS, build_mixer, resolve_spec
from liger_convert.mixers.base import QKV, HeadDims
from liger_convert.mixers.linear.gla import GLA
from liger_convert.mixers.routed import mom as mom_module
from liger_convert.mixers.routed.memory_rows import MemoryRows, make_rows
from liger_convert.mixers.routed.mom import MoM
from liger_convert.model import take_auxiliary_loss
from liger_convert.model.loading import linearize_base
from liger_convert.model.sequence import SequenceMetadata

TOKENS = torch.randint(3, 101, (2, 29), generator=torch.Generator().manual_seed(0))
INNER = [name for name, mixer in MIXERS.items() if mixer.recurrence not in ("none", "routed")]
every_inner = pytest.mark.parametrize("inner", INNER)


@functools.cache
def base() -> Path:
    return save_tiny_base("llama", shared_folder("tiny-llama"), tokenizer=False)


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


def test_a_model_can_be_copied_while_it_is_trained_by_a_trainer_that_leaves_the_balance_loss() -> None:
    model = mom("gla").train()
    model(TOKENS).logits.sum().backward()
    twin = copy.deepcopy(model)
    assert take_auxiliary_loss(twin) == 0.0
    assert take_auxiliary_loss(model) > 0.0
    assert torch.equal(twin.eval()(TOKENS).logits, model.eval()(TOKENS).logits)


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


DIMS = HeadDims(16, 4, 2, 8)
CUTS = [[0, 3, 17, 18, 30, 37], [0, 11, 12, 13, 25, 37]]  # where documents begin in two rows of 37 tokens, and the end
KINDS = ["plain", "packed", "padded"]


def results(monkeypatch: pytest.MonkeyPatch, spec: dict[str, Any], kind: str) -> dict[str, Tensor]:
    """The memory's read and the gradients of inputs and parameters, in float64, of rows of one kind."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # which mixers compute in
    common = {"type": "mom", "combine": "fixed", "window": 5, "sinks": 1, "memories": 5}
    torch.manual_seed(0)
    mixer = build_mixer(resolve_spec({**common, **spec}), DIMS).double().train()
    mixer.reset_parameters()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    positions = mask = None
    if kind == "packed":
        positions = torch.stack([torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(c)]) for c in CUTS])
    if kind == "padded":
        mask = torch.ones(2, 37, dtype=torch.long)
        mask[0, :9] = 0
    heads = [torch.randn(2, 37, n, 8, dtype=torch.double, requires_grad=True) for n in (4, 2, 4, 2, 2)]
    x = torch.randn(2, 37, 16, dtype=torch.double, requires_grad=True)
    metadata = SequenceMetadata.build(x, positions, mask)
    memory = mixer.remember(QKV(*heads, metadata.position_BT, x), metadata, None)
    o = memory.o_BTHV if mask is None else memory.o_BTHV[mask.bool()]
    inputs = {"x": x, **dict(zip(["q", "k", "q_rot", "k_rot", "v"], heads)), **dict(mixer.named_parameters())}
    assert mixer.auxiliary_loss is not None
    loss = (o * torch.randn_like(o)).sum() + mixer.auxiliary_loss
    grads = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
    return {"read": o.detach()} | {name: grad for name, grad in zip(inputs, grads) if grad is not None}


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """The tensors that differ by more than float64 rounding. They are sums of some thousand terms, and in those of
    gates the terms cancel."""
    assert found.keys() == expected.keys()
    return [name for name, x in expected.items() if not (found[name] - x).norm() <= 1e-10 * x.norm()]


def over_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MoM, "_rows", lambda *_: None)


@every_inner
@pytest.mark.parametrize(
    ("scope", "router"),
    [
        ("evicted", "head"),
        ("all", "layer"),
        pytest.param("all", "head", marks=pytest.mark.slow),
        pytest.param("evicted", "layer", marks=pytest.mark.slow),
    ],
)
def test_memories_run_over_their_own_tokens_are_those_run_over_all(
    inner: str, scope: str, router: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # of unknown length for heads that choose for themselves, and of known length for a layer's router
    monkeypatch.setattr(mom_module, "may_read_values", lambda _: router == "head")
    for kind in KINDS:
        spec = {"inner": {"type": inner}, "scope": scope, "router": router}
        with monkeypatch.context() as patch:
            found = results(patch, spec, kind)
            over_all_tokens(patch)
            assert not differences(found, results(patch, spec, kind)), kind


@pytest.mark.parametrize("kind", ["forgotten documents", "what is not written", "another reader's place"])
def test_wrong_rows_are_seen(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {"scope": "evicted", "inner": {"type": "gla", "codes": 8}}
    with monkeypatch.context() as patch:
        over_all_tokens(patch)
        expected = results(patch, spec, "packed")

    def wrong(*given: Any) -> MemoryRows:
        rows = make_rows(*given)
        if kind == "forgotten documents":
            return rows._replace(segment_ids_BL=None)
        if kind == "what is not written":
            return rows._replace(written_BLG=torch.ones_like(rows.written_BLG))
        return rows._replace(slot_BTGN=rows.slot_BTGN.roll(1, 1).clamp_min(0))

    monkeypatch.setattr(mom_module, "make_rows", wrong)
    assert "read" in differences(results(monkeypatch, spec, "packed"), expected)


def lengths_of_scans(monkeypatch: pytest.MonkeyPatch, **spec: Any) -> list[int]:
    scanned = []
    scan = GLA.scan

    def counted(self: GLA, qkv: QKV, entries: tuple[Tensor, ...], *rest: Any) -> Any:
        scanned.append(entries[1].shape[1])
        return scan(self, qkv, entries, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(GLA, "scan", counted)
        results(patch, {"inner": {"type": "gla", "codes": 8}, **spec}, "plain")
    return scanned


def test_a_memory_is_run_over_no_more_tokens_than_any_head_has_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    choices = []
    route = MoM.route
    monkeypatch.setattr(MoM, "route", lambda self, x: choices.append(route(self, x)) or choices[-1])
    shared, *own = lengths_of_scans(monkeypatch, scope="all")
    assert shared == 37
    assert own == choices[0][1].sum(1).amax((0, 1)).tolist()
    assert sum(own) < 5 * 37


def test_rows_of_a_layers_router_are_of_a_length_that_no_value_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mom_module, "may_read_values", lambda _: False)
    assert lengths_of_scans(monkeypatch, router="layer", scope="all") == [37, 2 * 37]
    assert lengths_of_scans(monkeypatch, router="layer", scope="evicted") == [37, 4 * 37]
    assert lengths_of_scans(monkeypatch, router="layer", scope="evicted", memories=4) == 5 * [37], "as many as all"
    assert lengths_of_scans(monkeypatch, router="head", scope="all") == 6 * [37]


def test_one_router_chooses_for_all_heads_of_a_layer() -> None:
    mixer = routers(mom("gla", router="layer"))[0]
    assert mixer.router_GNC.shape[0] == 1
    torch.nn.init.normal_(mixer.router_GNC)
    chosen_BTGN = mixer.route(torch.randn(2, 9, 32))[1]
    assert chosen_BTGN.shape == (2, 9, 2, 4)
    assert torch.equal(chosen_BTGN[:, :, 0], chosen_BTGN[:, :, 1])
    # and each head for itself otherwise
    mixer = routers(mom("gla"))[0]
    torch.nn.init.normal_(mixer.router_GNC)
    chosen_BTGN = mixer.route(torch.randn(2, 9, 32))[1]
    assert not torch.equal(chosen_BTGN[:, :, 0], chosen_BTGN[:, :, 1])
