"""Decoding steps of fixed shape equal plain steps: from any start, for any length, captured or not."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from folders import shared_folder
from tiny import save_tiny_base
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, TextStreamer
from transformers.integrations import moe
from transformers.masking_utils import AttentionMaskInterface

from liger_convert.mixers import MIXERS, resolve_spec
from liger_convert.model import decoding, modeling
from liger_convert.model.cache import CACHE, StaticSoftmaxLayer
from liger_convert.model.cuda_graphs import capture
from liger_convert.model.decoding import Decoder
from liger_convert.model.families import FAMILIES
from liger_convert.model.loading import linearize_base

aten: Any = torch.ops.aten
TOKENS = torch.randint(3, 101, (2, 40), generator=torch.Generator().manual_seed(0))
GREEDY: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
PLAIN = {"disable_compile": True}


@functools.cache
def build(family: str, softmax: int | None, **spec: Any) -> Any:
    """Three layers, of which the one numbered `softmax` stays softmax."""
    layers = ["softmax" if i == softmax else "main" for i in range(3)]
    plan = {"format": 2, "mixers": {"main": resolve_spec({"window": 5, "sinks": 2} | spec)}, "layers": layers}
    base = save_tiny_base(family, shared_folder(f"tiny-{family}"), tokenizer=False)
    model = linearize_base(base, plan, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("log_share_H"):
                parameter += 4
    return model


# a linear layer first, a softmax one first, sliding softmax ones, none
MODELS = [("llama", 1), ("llama", 0), ("mistral", 0), ("qwen2", 2), ("llama", None)]


@pytest.fixture(params=MODELS, ids=str)
def model(request: pytest.FixtureRequest) -> Any:
    return build(*request.param)


@pytest.fixture(params=[False, True], ids=["fixed", "in place"])
def in_place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(modeling, "Decoder", functools.partial(Decoder, in_place=request.param))
    return request.param


@pytest.mark.parametrize("tokens", [1, 3, 4, 30])
def test_a_ring_is_full_partly_full_or_has_one_token_at_the_start(model: Any, in_place: bool, tokens: int) -> None:
    prompt = TOKENS[:, :tokens]
    fixed = model.generate(prompt, **GREEDY)
    assert model.decoding == ("fixed steps" if in_place else "fixed steps, fused")  # in torch, on a CPU
    assert torch.equal(fixed, model.generate(prompt, use_cache=False, **GREEDY))


def test_steps_are_fused_on_a_cpu_if_all_linear_layers_have_the_fused_step() -> None:
    mixers = {name: resolve_spec({"type": name, "window": 5, "sinks": 2}) for name in ("gla", "mamba2")}
    base = save_tiny_base("llama", shared_folder("tiny-mixed"), tokenizer=False)
    for layers, said in ((["gla", "softmax", "gla"], ", fused"), (["gla", "softmax", "mamba2"], "")):
        plan = {"format": 2, "mixers": {name: mixers[name] for name in layers if name in mixers}, "layers": layers}
        model = linearize_base(base, plan, dtype=torch.float32).eval()
        fixed = model.generate(TOKENS[:, :7], **GREEDY)
        assert model.decoding == f"fixed steps{said}"
        assert torch.equal(fixed, model.generate(TOKENS[:, :7], **GREEDY, **PLAIN))


def test_generation_goes_on_from_a_cache_of_fixed_shape(model: Any, in_place: bool) -> None:
    first = model.generate(TOKENS[:, :3], return_dict_in_generate=True, **GREEDY)
    assert any(isinstance(layer, StaticSoftmaxLayer) for layer in first.past_key_values.layers) == (
        in_place and "softmax" in model.config.linearization["layers"]
    )
    text = torch.cat((first.sequences, TOKENS[:, :7]), 1)
    again = model.generate(text, past_key_values=first.past_key_values, **GREEDY)
    assert torch.equal(again, model.generate(text, use_cache=False, **GREEDY))


def test_softmax_layers_grow_when_their_room_is_full(
    model: Any, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("liger_convert.model.decoding.ROOM", 4)
    fixed = model.generate(TOKENS[:, :5], **GREEDY)
    assert torch.equal(fixed, model.generate(TOKENS[:, :5], **GREEDY, **PLAIN))


def test_padding_among_the_steps_is_no_token(model: Any, in_place: bool) -> None:
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, 12:15] = mask[1, 10] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    found = []
    for step in (model, modeling.Decoder(model)):
        cache, logits = DynamicCache(config=model.config), []
        with torch.no_grad():
            model(TOKENS[:, :9], attention_mask=mask[:, :9], past_key_values=cache, use_cache=True)
            for i in range(9, 20):
                inputs = {"input_ids": TOKENS[:, i : i + 1], "position_ids": positions[:, i : i + 1]}
                out = step(**inputs, attention_mask=mask[:, : i + 1], **{CACHE: cache}, use_cache=True)
                logits.append(out.logits[:, 0])
        assert cache.get_seq_length() == 20
        found.append(torch.stack(logits, 1)[mask[:, 9:].bool()])
    plain, fixed = found
    assert (fixed - plain).abs().max() <= 1e-5 * plain.abs().max()


def test_no_step_in_place_moves_a_tensor_or_changes_a_shape() -> None:
    model, cache = build("llama", 1), DynamicCache()
    decoder = Decoder(model, in_place=True)

    def step(i: int) -> list[tuple[int, torch.Size]]:
        decoder(input_ids=TOKENS[:, i : i + 1], position_ids=torch.tensor([[i]]), **{CACHE: cache}, use_cache=True)
        return [(tensor.data_ptr(), tensor.shape) for layer in cache.layers for tensor in layer.tensors()]

    with torch.no_grad():
        model(TOKENS[:, :2], past_key_values=cache, use_cache=True)
        step(2)
        assert step(3) == step(4) == step(5)


LOOKS = {"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero"}
CONVOLVED = {"type": "mamba", "short_conv": 4, "output_gate": True, "skip": True}


def looks_of_a_step(model: Any) -> set[str]:
    """The ways in which a step in place, after the first one, reads a value on the host."""
    cache, decoder = DynamicCache(), Decoder(model, in_place=True)
    with torch.no_grad():
        model(TOKENS[:, :2], past_key_values=cache, use_cache=True)
        inputs = {"input_ids": TOKENS[:, 2:3], "position_ids": torch.tensor([[2]]), CACHE: cache}
        decoder(**inputs, use_cache=True)
        given = TOKENS[:, 3:4], torch.tensor([[3]]), torch.ones(2, 256).long()
        with torch.profiler.profile() as profile:
            decoder.step(*given)
    return LOOKS & {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("spec", [*({"type": name} for name in MIXERS), CONVOLVED], ids=str)
def test_a_step_reads_no_value_on_the_host(spec: dict[str, Any]) -> None:
    assert not looks_of_a_step(build("llama", 1, **spec))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_no_family_reads_a_value_on_the_host_or_copies_one_from_there(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A softmax layer and experts included. Their grouped product is left out: on a CPU it reads sizes on the host.
    Eager attention's masks are made without transformers' own, which copies a number to the GPU before 5.21."""
    model = copy.deepcopy(build(family, 1))
    model.set_attn_implementation("eager")
    real = AttentionMaskInterface._global_mapping["eager"]

    def of_prompts(*given: Any, q_length: int, **options: Any) -> Any:
        assert q_length > 1
        return real(*given, q_length=q_length, **options)

    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "eager", of_prompts)
    monkeypatch.setattr(moe, "_grouped_mm", lambda x, weight, offs: x.new_zeros(len(x), weight.shape[2]))
    assert not looks_of_a_step(model)


def test_streamed_and_sampled_steps_are_the_plain_ones(model: Any, in_place: bool) -> None:
    class Kept(TextStreamer):
        def __init__(self) -> None:
            self.pieces: list[torch.Tensor] = []

        def put(self, value: torch.Tensor) -> None:
            self.pieces.append(value.reshape(-1))

        def end(self) -> None:
            self.pieces.append(torch.tensor([-1]))

    found = []
    for options in ({}, PLAIN):
        torch.manual_seed(1)
        streamer = Kept()
        sampled = GREEDY | {"do_sample": True, "streamer": streamer, "eos_token_id": list(range(3, 30)), **options}
        found.append((model.generate(TOKENS[:1, :6], **sampled), torch.cat(streamer.pieces)))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_a_call_that_is_not_a_decoding_step_is_passed_to_the_model(model: Any, in_place: bool) -> None:
    decoder, embeddings = modeling.Decoder(model), model.get_input_embeddings()(TOKENS[:, :6])
    with torch.no_grad():
        assert torch.equal(decoder(inputs_embeds=embeddings).logits, model(TOKENS[:, :6]).logits)


def test_without_a_cache_steps_are_plain_and_say_so() -> None:
    model = build("llama", None)
    model.generate(TOKENS[:, :6], use_cache=False, **GREEDY)
    assert model.decoding == "plain steps: there is no cache"


def test_fixed_steps_under_autocast_are_the_plain_loop_whose_keys_and_values_differ_in_dtype(in_place: bool) -> None:
    model = build("llama", 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fixed = model.generate(TOKENS[:, :9], **GREEDY)
        assert model.decoding == "fixed steps"
        assert torch.equal(fixed, model.generate(TOKENS[:, :9], **GREEDY, **PLAIN))


class NothingOfTheHost(TorchDispatchMode):
    """Raises where the capture of a CUDA graph would fail: at a tensor made from Python numbers, or at a value that is
    read."""

    ASKED: tuple[Any, ...] = (aten.lift_fresh.default, aten._local_scalar_dense.default, aten.nonzero.default)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.ASKED:
            raise AssertionError(f"a captured step cannot call {func}")
        return func(*args, **(kwargs or {}))


def step_as_captured(monkeypatch: pytest.MonkeyPatch, **spec: Any) -> None:
    """Generates with steps in place that must not do anything that a capture forbids."""
    plain, steps = Decoder._step, []

    def watched(self: Decoder, *given: Any) -> torch.Tensor:
        with NothingOfTheHost():
            steps.append(given)
            return plain(self, *given)

    monkeypatch.setattr(modeling, "Decoder", functools.partial(Decoder, in_place=True))
    monkeypatch.setattr(Decoder, "_step", watched)
    build("llama", None, **spec).generate(TOKENS[:, :7], **GREEDY | {"max_new_tokens": 3})
    assert len(steps) == 2


QUICK = ("gla", "gated-deltanet", "lightning", "mom")


@pytest.mark.parametrize("mixer", [pytest.param(m, marks=[] if m in QUICK else pytest.mark.slow) for m in MIXERS])
def test_a_step_of_every_mixer_asks_nothing_of_the_host(mixer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step_as_captured(monkeypatch, type=mixer)


def test_a_step_that_asks_for_a_value_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = MIXERS["retnet"].log_gate

    def asking(self: Any, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return gate(self, inputs) + torch.tensor(0.0)

    monkeypatch.setattr(MIXERS["retnet"], "log_gate", asking)
    with pytest.raises(AssertionError, match="lift_fresh"):
        step_as_captured(monkeypatch, type="retnet")


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a GPU")


@needs_cuda
def test_a_captured_step_equals_the_plain_one_token_for_token(model: Any) -> None:
    model.to("cuda")
    try:
        prompt = TOKENS[:, :6].cuda()
        captured = model.generate(prompt, **GREEDY)
        assert model.decoding.startswith("captured steps")  # fused, where Triton is asked for
        assert torch.equal(captured, model.generate(prompt, **GREEDY, **PLAIN))
    finally:
        model.to("cpu")


@needs_cuda
def test_a_step_captured_under_autocast_equals_the_same_step_launched(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.to("cuda")
    try:
        prompt = TOKENS[:, :6].cuda()
        with torch.autocast("cuda", torch.bfloat16):
            captured = model.generate(prompt, **GREEDY)
            assert model.decoding.startswith("captured steps")
            # not the plain loop: its softmax layers attend to the tokens, not to a room, and in bf16 two tokens tie
            monkeypatch.setattr(decoding, "why_not_captured", lambda model: "asked for")
            launched = model.generate(prompt, **GREEDY)
            assert model.decoding.endswith("not captured: asked for")
        assert torch.equal(captured, launched)
    finally:
        model.to("cpu")


@needs_cuda
def test_a_capture_changes_nothing_and_each_replay_is_one_step() -> None:
    state = torch.zeros(1, device="cuda")
    step = capture(lambda x: state.add_(x).clone(), (torch.ones(1, device="cuda"),), lambda: [state])  # type: ignore
    assert state.item() == 0
    assert [step(torch.full((1,), float(i), device="cuda")).item() for i in (1, 2, 3)] == [1, 3, 6]  # type: ignore


@needs_cuda
@pytest.mark.parametrize("waits", [lambda x: x.item(), lambda _: torch.cuda.synchronize()], ids=["found", "hidden"])
def test_a_capture_that_fails_leaves_nothing_behind(waits: Any) -> None:
    def step(x: Any) -> Any:
        y = torch.nn.functional.dropout(x)  # whose random numbers a capture takes over
        if torch.cuda.is_current_stream_capturing() or waits.__code__.co_varnames == ("x",):
            waits(y.sum())
        return y

    stream, x = torch.cuda.current_stream(), torch.ones(64, device="cuda")
    with pytest.raises(RuntimeError):
        capture(step, (x,), list)
    assert torch.cuda.current_stream() == stream
    assert torch.cuda.get_sync_debug_mode() == 0
    assert 0 < torch.nn.functional.dropout(x).count_nonzero() < 64
    assert 0 < torch.compile(torch.nn.functional.dropout)(x).count_nonzero() < 64
    replay = capture(torch.nn.functional.dropout, (x,), list)
    assert not torch.equal(replay(x).clone(), replay(x))
