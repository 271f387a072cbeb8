"""Every family with every mixer keeps the promises of a Hugging Face model: decode equals prefill, batches equal single
rows, packed rows equal separate documents, and a saved model is the model."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from gated_kernels.check import error
from tiny import save_tiny_base
from transformers import AutoModelForCausalLM, DynamicCache

from liger_convert.mixers import MIXERS, resolve_spec
from liger_convert.model import LinearizedCacheLayer, collect_align_targets, modeling, set_branches
from liger_convert.model.decoding import Decoder
from liger_convert.model.families import FAMILIES
from liger_convert.model.loading import linearize_base

WINDOW, SINKS = 5, 2
LAYERS = ["main", "softmax", "main"]
LOGITS = 1e-4  # of the largest logit, fp32 on a CPU
TOKENS = torch.randint(3, 101, (2, 29), generator=torch.Generator().manual_seed(0))
PROMPT = TOKENS[:, :9]
MASK = torch.ones_like(PROMPT)
PADDED = torch.cat((torch.cat((torch.zeros(1, 4, dtype=torch.long), PROMPT[:1, :5]), 1), PROMPT[1:]))
PADDED_MASK = torch.cat((torch.tensor([[0] * 4 + [1] * 5]), MASK[1:]))
GREEDY: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def linearization(layers: list[str] = LAYERS, **spec: Any) -> dict[str, Any]:
    return {"format": 2, "mixers": {"main": resolve_spec(spec)}, "layers": layers}


@functools.cache
def base_folder(family: str) -> Path:
    return save_tiny_base(family, Path(tempfile.mkdtemp(prefix=f"tiny-{family}-")), tokenizer=False)


def build(family: str, layers: list[str] = LAYERS, **spec: Any) -> Any:
    """A linearized tiny model in eval mode, its new parameters moved off their start so that the memory matters."""
    plan = linearization(layers, **spec)
    model = linearize_base(base_folder(family), plan, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".mixer." in name:
                parameter += torch.randn(parameter.shape, generator=generator) * 0.5
            if name.endswith("log_share_H"):
                parameter += 4
    return model


@functools.cache
def shared_model(family: str, mixer: str) -> Any:
    bounded = {} if mixer == "forgetting" else {"window": WINDOW, "sinks": SINKS}  # that one sees all tokens
    return build(family, type=mixer, **bounded)


@pytest.fixture(params=[(family, mixer) for family in FAMILIES for mixer in MIXERS], ids="-".join)
def model(request: pytest.FixtureRequest) -> Any:
    return shared_model(*request.param)


def assert_same_logits(a: torch.Tensor, b: torch.Tensor, tolerance: float = LOGITS) -> None:
    assert a.isfinite().all()
    assert (a - b).abs().max() <= tolerance * b.abs().max()


def logits(model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(*args, **{"use_cache": False, **kwargs}).logits


def test_every_tensor_of_the_base_is_kept_and_every_new_one_is_the_mixers(model: Any) -> None:
    base = AutoModelForCausalLM.from_pretrained(base_folder(model.config.model_type.removeprefix("linearized_")))
    kept, made = base.state_dict(), model.state_dict()
    assert all(torch.equal(kept[name], made[name]) for name in kept)
    assert all(".self_attn.mixer." in name for name in made.keys() - kept.keys())


def test_greedy_decoding_with_a_cache_equals_without(model: Any) -> None:
    cached = model.generate(PROMPT, attention_mask=MASK, use_cache=True, **GREEDY)
    assert torch.equal(cached, model.generate(PROMPT, attention_mask=MASK, use_cache=False, **GREEDY))


@pytest.mark.parametrize("cuts", [(4, 5, 12, 13, 29), tuple(range(1, 30)), (1, 29), (28, 29)], ids=str)
def test_prefill_in_chunks_and_token_by_token_equals_one_pass(model: Any, cuts: tuple[int, ...]) -> None:
    cache = DynamicCache(config=model.config)
    parts = [
        logits(model, TOKENS[:, start:end], past_key_values=cache, use_cache=True)
        for start, end in zip((0, *cuts), cuts)
    ]
    assert_same_logits(torch.cat(parts, 1), logits(model, TOKENS))


def test_a_bare_dynamic_cache_is_adopted(model: Any) -> None:
    cache = DynamicCache()
    assert_same_logits(logits(model, TOKENS, past_key_values=cache, use_cache=True), logits(model, TOKENS))
    assert [isinstance(layer, LinearizedCacheLayer) for layer in cache.layers] == [True, False, True]


def test_the_cache_of_a_linearized_layer_stops_growing(model: Any) -> None:
    if not model.model.layers[0].self_attn.spec.window:
        pytest.skip("a window of all tokens keeps them all")
    cache = DynamicCache(config=model.config)
    sizes = []
    for start in range(0, 28, 7):
        logits(model, TOKENS[:, start : start + 7], past_key_values=cache, use_cache=True)
        sizes.append(cache.layers[0].nbytes())
        held = {id(t.untyped_storage()): t.untyped_storage().nbytes() for t in cache.layers[0].ring.values()}
        assert sum(held.values()) <= sizes[-1], "a view keeps more than the ring alive"
    assert sizes[0] == sizes[-1]
    assert cache.layers[0].ring["k"].shape[1] == WINDOW - 1


def test_a_left_padded_batch_equals_each_row_alone(model: Any) -> None:
    both = model.generate(PADDED, attention_mask=PADDED_MASK, **GREEDY)
    assert torch.equal(both[0, 9:], model.generate(PROMPT[:1, :5], **GREEDY)[0, 5:])
    assert torch.equal(both[1], model.generate(PROMPT[1:], **GREEDY)[0])


def test_right_padding_changes_nothing_before_it(model: Any) -> None:
    padded = torch.cat((PROMPT[:1, :5], torch.zeros(1, 4, dtype=torch.long)), 1)
    mask = torch.tensor([[1] * 5 + [0] * 4])
    assert_same_logits(logits(model, padded, attention_mask=mask)[:, :5], logits(model, PROMPT[:1, :5]))


def test_beam_search_with_a_cache_equals_without(model: Any) -> None:
    found = [
        model.generate(PADDED, attention_mask=PADDED_MASK, num_beams=3, use_cache=cached, **GREEDY)
        for cached in (True, False)
    ]
    assert torch.equal(*found)


def test_sampling_several_sequences_with_a_cache_equals_without(model: Any) -> None:
    found = []
    for cached in (True, False):
        torch.manual_seed(1)
        options = GREEDY | {"do_sample": True, "num_return_sequences": 2, "use_cache": cached}
        found.append(model.generate(PADDED, attention_mask=PADDED_MASK, **options))
    assert torch.equal(*found)


def test_a_generation_continued_from_its_cache_equals_one_without(model: Any) -> None:
    first = model.generate(PROMPT, attention_mask=MASK, return_dict_in_generate=True, **GREEDY)
    text = torch.cat((first.sequences, TOKENS[:, 9:15]), 1)
    mask = torch.ones_like(text)
    continued = model.generate(text, attention_mask=mask, past_key_values=first.past_key_values, **GREEDY)
    assert torch.equal(continued, model.generate(text, attention_mask=mask, use_cache=False, **GREEDY))


@pytest.mark.parametrize("in_place", [False, True])
def test_steps_of_fixed_shape_equal_plain_ones(model: Any, in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling, "Decoder", functools.partial(Decoder, in_place=in_place))
    options = GREEDY | {"return_dict_in_generate": True, "output_logits": True}
    fixed = model.generate(PADDED, attention_mask=PADDED_MASK, **options)
    bounded = all(mixer["window"] for mixer in model.config.linearization["mixers"].values())
    assert model.decoding == "fixed steps" if bounded else model.decoding.startswith("plain steps: a window without")
    plain = model.generate(PADDED, attention_mask=PADDED_MASK, disable_compile=True, **options)
    assert model.decoding.startswith("plain steps")
    assert torch.equal(fixed.sequences, plain.sequences)
    # both are fp32 sums over the same tokens, at most in another order
    assert_same_logits(torch.stack(fixed.logits), torch.stack(plain.logits), 1e-5)


def test_packed_documents_never_see_each_other(model: Any) -> None:
    rows = [(9, 7, 13), (1, 20, 8)]
    packed = TOKENS
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    together = logits(model, packed, position_ids=positions)
    for b, row in enumerate(rows):
        start = 0
        for n in row:
            alone = logits(model, packed[b : b + 1, start : start + n])
            assert_same_logits(together[b : b + 1, start : start + n], alone)
            start += n


@pytest.mark.parametrize("implementation", ["sdpa", "flex_attention"])
def test_the_attention_of_softmax_layers_can_be_chosen(model: Any, implementation: str) -> None:
    plain, padded = logits(model, TOKENS), logits(model, PADDED, attention_mask=PADDED_MASK)
    if implementation == "flex_attention" and not model._supports_flex_attn:
        with pytest.raises(ValueError, match="flex_attention"):  # the family's own limit (OLMoE), said by the library
            model.set_attn_implementation(implementation)
        return
    model.set_attn_implementation(implementation)
    try:
        assert_same_logits(logits(model, TOKENS), plain)
        again = logits(model, PADDED, attention_mask=PADDED_MASK)
        assert_same_logits(again[PADDED_MASK.bool()], padded[PADDED_MASK.bool()])
    finally:
        model.set_attn_implementation("eager")


def test_gradient_checkpointing_gives_the_same_gradients_and_all_of_them(model: Any) -> None:
    model.train()
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(TOKENS, labels=TOKENS).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    model.gradient_checkpointing_disable()
    model.eval().zero_grad()
    plain, checkpointed_ = gradients
    assert plain.keys() == checkpointed_.keys()
    assert all(plain[name].any() for name, _ in model.named_parameters() if ".mixer." in name)
    for name in plain:
        torch.testing.assert_close(plain[name], checkpointed_[name], rtol=1e-4, atol=1e-6)


def test_a_saved_model_loads_and_saves_as_itself(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "one")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "one", attn_implementation="eager").eval()
    assert type(loaded) is type(model)
    assert torch.equal(logits(loaded, TOKENS), logits(model, TOKENS))
    loaded.save_pretrained(tmp_path / "two")
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()


def test_embeddings_can_be_passed_instead_of_tokens(model: Any) -> None:
    embeddings = model.get_input_embeddings()(TOKENS)
    assert_same_logits(logits(model, inputs_embeds=embeddings), logits(model, TOKENS))


def test_a_reset_cache_is_a_fresh_one(model: Any) -> None:
    # without softmax layers, whose own cache 5.17 of transformers does not empty
    family, mixer = model.config.model_type.removeprefix("linearized_"), model.model.layers[0].self_attn.mixer.name
    every = build(family, ["main"] * 3, type=mixer, window=WINDOW, sinks=SINKS)
    cache = DynamicCache(config=every.config)
    first = logits(every, TOKENS, past_key_values=cache, use_cache=True)
    cache.reset()
    assert torch.equal(logits(every, TOKENS, past_key_values=cache, use_cache=True), first)


def test_a_device_map_changes_nothing(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    mapped = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cpu", attn_implementation="eager").eval()
    assert torch.equal(logits(mapped, TOKENS), logits(model, TOKENS))


def test_bfloat16_decodes_as_it_prefills(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    low = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager").eval()
    assert {p.dtype for name, p in low.named_parameters() if ".mixer." in name} <= {torch.float32}
    cache = DynamicCache(config=low.config)
    parts = [logits(low, TOKENS[:, i : i + 1], past_key_values=cache, use_cache=True) for i in range(TOKENS.shape[1])]
    stepwise, whole = torch.cat(parts, 1).float(), logits(low, TOKENS).float()
    full = logits(model, TOKENS)
    rounding = (whole - full).abs().mean()
    assert (stepwise - whole).abs().mean() <= 2 * rounding


def test_alignment_compares_with_the_bases_own_attention(model: Any) -> None:
    base = AutoModelForCausalLM.from_pretrained(
        base_folder(model.config.model_type.removeprefix("linearized_")), attn_implementation="eager"
    )
    targets = collect_align_targets(base, {"input_ids": TOKENS}, [0, 2])
    out = model(align=targets)
    layer = model.model.layers[0].self_attn
    assert out.layer_losses_L.shape == (2,)
    out.loss.backward()
    assert layer.get_submodule(layer.family.projections[0]).weight.grad.any()
    assert model.model.embed_tokens.weight.grad is None
    model.zero_grad()


LONG = torch.cat((torch.cat((torch.zeros(1, 13, dtype=torch.long), TOKENS[:1, :16]), 1), TOKENS[1:]))
LONG_MASK = torch.ones_like(LONG).index_fill(1, torch.arange(13), 0) | torch.tensor([[0], [1]])


@pytest.mark.parametrize(
    ("family", "mixer"), [*(("llama", mixer) for mixer in MIXERS), *((family, "gla") for family in FAMILIES)]
)
def test_a_prompt_read_in_pieces_is_continued_as_one_read_at_once(
    family: str, mixer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shared_model(family, mixer)
    options = GREEDY | {"return_dict_in_generate": True, "output_logits": True}
    text = torch.cat((LONG, torch.zeros(2, 20, dtype=torch.long), TOKENS[:, :11]), 1)
    mask = torch.cat((LONG_MASK, torch.ones(2, 31, dtype=torch.long)), 1)
    found = []
    for chunk in (None, 4):  # the padding of the first row fills three pieces
        monkeypatch.setattr(model, "prefill_chunk", chunk)
        first = model.generate(LONG, attention_mask=LONG_MASK, **options)
        text[:, 29:49] = first.sequences[:, 29:]
        second = model.generate(text, attention_mask=mask, past_key_values=first.past_key_values, **options)
        found.append((first, second))
    for whole, pieces in zip(*found):
        assert torch.equal(pieces.sequences, whole.sequences)
        assert_same_logits(torch.stack(pieces.logits), torch.stack(whole.logits))


def tokens_seen(module: torch.nn.Module, run: Any) -> list[int]:
    """How many tokens each call of `module` got while `run` ran."""
    seen: list[int] = []
    hook = module.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((*args, *kwargs.values())[0].shape[1]), with_kwargs=True
    )
    try:
        run()
    finally:
        hook.remove()
    return seen


def test_no_layer_sees_more_of_a_prompt_than_a_piece_and_the_head_no_more_than_its_last_token() -> None:
    model = build("llama", type="gla", window=WINDOW)
    generate = functools.partial(model.generate, TOKENS, **GREEDY | {"max_new_tokens": 2})
    assert tokens_seen(model.model.layers[0], generate) == [29, 1], "shorter than the chunk"
    assert tokens_seen(model.lm_head, generate) == [1, 1]
    model.prefill_chunk = 8
    assert tokens_seen(model.model.layers[0], generate) == [5, 8, 8, 8, 1]
    assert tokens_seen(model.lm_head, generate) == [1, 1]
    embedded = functools.partial(
        model.generate, inputs_embeds=model.get_input_embeddings()(TOKENS), **GREEDY | {"max_new_tokens": 2}
    )
    assert tokens_seen(model.model.layers[0], embedded) == [5, 8, 8, 8, 1]
    assert torch.equal(embedded(), generate()[:, 29:])
    # transformers' own pieces, where a caller asks for them
    assert tokens_seen(model.model.layers[0], functools.partial(generate, prefill_chunk_size=6)) == [6, 6, 6, 6, 5, 1]


def test_of_many_rows_a_piece_is_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama", type="gla", window=WINDOW)
    monkeypatch.setattr(modeling, "LEAST_CHUNK", 3)
    prompts = TOKENS[:1].repeat(12, 1)
    generate = functools.partial(model.generate, prompts, **GREEDY | {"max_new_tokens": 2})
    whole = generate()
    model.prefill_chunk = 8
    assert tokens_seen(model.model.layers[0], generate) == [4, 5, 5, 5, 5, 5, 1]
    assert torch.equal(generate(), whole)


@pytest.mark.parametrize("options", [{"output_hidden_states": True}, {"use_cache": False}], ids=str)
def test_what_needs_the_whole_prompt_at_once_gets_it(options: dict[str, Any]) -> None:
    model = build("llama", type="gla", window=WINDOW)
    model.prefill_chunk = 8
    generate = functools.partial(model.generate, TOKENS, **GREEDY | {"max_new_tokens": 1}, **options)
    assert tokens_seen(model.model.layers[0], generate) == [29]
    assert tokens_seen(model.model.layers[0], lambda: model(TOKENS, use_cache=True)) == [29], "the logits of all tokens"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mixer", ["gla", "window"])
def test_a_window_that_holds_everything_is_the_base(family: str, mixer: str) -> None:
    base = AutoModelForCausalLM.from_pretrained(base_folder(family), attn_implementation="eager").eval()
    tokens = TOKENS[:, :24]  # the bases' own sliding windows are 24
    linearized = build(family, type=mixer, window=32, sinks=0)
    assert_same_logits(logits(linearized, tokens), logits(base, tokens))
    ours, theirs = (model(tokens, output_hidden_states=True).hidden_states for model in (linearized, base))
    for of_ours, of_theirs in zip(ours, theirs, strict=True):
        assert_same_logits(of_ours, of_theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_without_softmax_layers_and_one_without_linearized_ones_work(family: str) -> None:
    every = build(family, ["main"] * 3, type="gla", window=WINDOW, sinks=SINKS)
    assert torch.equal(
        *(every.generate(PADDED, attention_mask=PADDED_MASK, use_cache=c, **GREEDY) for c in (True, False))
    )
    base = AutoModelForCausalLM.from_pretrained(base_folder(family), attn_implementation="eager").eval()
    none = build(family, ["softmax"] * 3, type="gla")
    assert torch.equal(none.generate(PROMPT, **GREEDY), base.generate(PROMPT, **GREEDY))


VARIANTS = [
    {"window": 1},
    {"window": 1, "sinks": 0},
    {"sinks": 0},
    {"window": 40},
    {"scope": "all"},
    {"combine": "learned"},
    {"combine": "fixed", "scope": "all", "sinks": 0},
    {"normalize": False, "combine": "learned", "feature_map": "identity"},
    {"feature_map": "exp"},
    {"feature_map": "elu1", "rope": True},
    {"feature_map": "softmax", "gate": "head"},
    {"gate": "constant"},
    {"gate": "none", "feature_map": "relu"},
    {"gate_bias": -300.0},
    {"feature_map": "hedgehog", "gate": "pooled"},
    {"codes": 7, "rope": True},
    {"type": "liger-paper", "gate": "random", "feature_map": "hedgehog"},
    {"type": "liger-paper", "combine": "memory"},
    {"type": "deltanet", "rope": True, "beta": "constant"},
    {"type": "gated-deltanet", "scope": "all", "combine": "fixed"},
    {"type": "rwkv7", "rope": True, "beta": "constant", "window": 1},
    {"type": "ttt", "scope": "all", "learning_rate": 1.5},
    {"type": "titans", "scope": "all", "sinks": 0, "momentum_bias": 3.0},
    {"type": "linear-attention", "feature_map": "softmax"},
    {"type": "linear-attention", "normalize": False, "combine": "learned", "feature_map": "identity"},
    {"type": "rebased", "feature_map": "products", "rope": True},
    {"type": "lightning", "scope": "all", "feature_map": "relu", "normalize": True, "combine": "shared"},
    {"type": "retnet", "rope": False, "slope": 4.0},
    {"type": "gated-retention", "gate": "constant"},
    {"gate": "learned", "feature_map": "hedgehog"},
    {"type": "mlstm", "gate": "learned"},
    {"type": "decaying-fast-weights", "gate": "learned"},
    {"type": "gateloop", "gate": "head", "scope": "all", "rope": True},
    {"type": "gateloop", "phase": False},
    {"type": "gateloop", "gate": "learned", "feature_map": "softmax2"},
    {"type": "hgrn2", "normalize": True, "combine": "shared", "feature_map": "hedgehog", "lower_bound": 0.0},
    {"type": "hgrn2", "lower_bound": 0.0, "gate_bias": -300.0},
    {"type": "mamba2", "gate": "constant", "feature_map": "softmax2", "gate_bias": 300.0},
    {"type": "mlstm", "scope": "all", "input_bias": 8.0},
    {"type": "mlstm", "normalize": False, "gate": "constant"},
    {"type": "rwkv6", "scope": "all"},
    {"type": "rwkv6", "scope": "all", "normalize": True, "combine": "shared", "feature_map": "exp", "gate_bias": 300.0},
    {"type": "decaying-fast-weights", "value_gates": 8, "scope": "all", "gate": "head"},
    {"type": "decaying-fast-weights", "value_gates": 1, "feature_map": "softmax2", "gate": "constant"},
    {"type": "gated-rfa", "feature_map": "gaussian", "gate": "constant"},
    {"type": "gated-rfa", "feature_map": "hedgehog", "rope": True, "scope": "all"},
    {"forget": True},
    {"forget": True, "window": 1, "sinks": 0, "scope": "all"},
    {"type": "window", "forget": True, "window": 7},
    {"type": "window", "window": 0, "sinks": 0},
    {"type": "forgetting", "window": 7, "sinks": 2},
    {"type": "mom", "forget": True},
    {"type": "gsa", "scope": "all", "combine": "learned", "slots": 4},
    {"type": "gsa", "slots": 1, "gate_bias": -300.0},
    {"type": "abc", "window": 1, "sinks": 0, "slots": 3},
    {"type": "mom", "memories": 3, "active": 1, "shared": False, "inner": {"type": "gsa", "slots": 4}},
    {"type": "mom", "scope": "all", "combine": "learned", "inner": {"type": "liger-paper"}},
    {"type": "mamba", "scope": "all", "combine": "learned", "states": 3},
    {"type": "s4", "window": 1, "sinks": 0, "states": 1},
]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_every_option_decodes_as_it_prefills(options: dict[str, Any]) -> None:
    model = build("llama", **{"type": "gla", "window": WINDOW, "sinks": SINKS, **options})
    cache = DynamicCache(config=model.config)
    parts = [logits(model, TOKENS[:, i : i + 1], past_key_values=cache, use_cache=True) for i in range(TOKENS.shape[1])]
    assert_same_logits(torch.cat(parts, 1), logits(model, TOKENS))
    assert torch.equal(
        *(model.generate(PADDED, attention_mask=PADDED_MASK, use_cache=c, **GREEDY) for c in (True, False))
    )


def test_branches_can_be_switched_off_and_the_memory_is_really_used() -> None:
    model = build("llama", type="gla", window=WINDOW, sinks=SINKS)
    control = build("llama", type="window", window=WINDOW, sinks=SINKS)
    both = logits(model, TOKENS)
    set_branches(model, "memory")
    memory = logits(model, TOKENS)
    set_branches(model, "window")
    assert_same_logits(logits(model, TOKENS), logits(control, TOKENS))
    assert (both - memory).abs().max() > 0.1 * both.abs().max()
    assert (both - logits(control, TOKENS)).abs().max() > 0.1 * both.abs().max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mixer", ["gla", "liger-paper", "mom"])
def test_every_branch_alone_keeps_to_the_dtype_of_its_model(mixer: str, dtype: torch.dtype) -> None:
    model = build("llama", type=mixer, window=WINDOW, sinks=SINKS)
    exact = {}
    for branches in ("both", "memory", "window"):
        set_branches(model, branches)
        exact[branches] = logits(model, TOKENS)
    model.to(dtype)
    errors = {}
    for branches, expected in exact.items():
        set_branches(model, branches)
        found = logits(model, TOKENS)
        assert found.dtype == dtype
        errors[branches] = error(found, expected)
    # beside a memory alone stands no window, and a codebook's temperature multiplies what rounding does to its queries
    assert max(errors.values()) <= 5 * errors["both"]


def test_different_mixers_and_windows_share_one_model() -> None:
    plan = {
        "format": 2,
        "mixers": {
            "a": resolve_spec({"window": 3, "sinks": 1}),
            "b": resolve_spec({"type": "liger-paper", "window": 7}),
        },
        "layers": ["a", "b", "softmax"],
    }
    model = linearize_base(base_folder("llama"), plan, attn_implementation="eager").eval()
    found = [model.generate(PADDED, attention_mask=PADDED_MASK, use_cache=cached, **GREEDY) for cached in (True, False)]
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"cache_implementation": "static"}, "cache_implementation 'static'"),
        ({"cache_implementation": "offloaded"}, "cache_implementation 'offloaded'"),
        ({"cache_implementation": "quantized"}, "cache_implementation 'quantized'"),
    ],
)
def test_a_cache_of_another_kind_is_refused_in_a_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        shared_model("llama", "gla").generate(PROMPT, **GREEDY, **options)


def test_a_cache_filled_by_the_base_is_refused() -> None:
    base = AutoModelForCausalLM.from_pretrained(base_folder("llama"))
    cache = base(PROMPT, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="already holds keys and values, which linearized layer"):
        shared_model("llama", "gla")(PROMPT, past_key_values=cache, use_cache=True)


def test_a_config_of_another_format_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"linearization\.format is 2, but this code reads 1"):
        linearize_base(base_folder("llama"), linearization() | {"format": 2})


def test_a_mask_of_pairs_and_a_packed_cached_row_are_refused() -> None:
    model = shared_model("llama", "gla")
    with pytest.raises(ValueError, match="2-D padding mask"):
        model(PROMPT, attention_mask=torch.ones(2, 1, 9, 9))
    with pytest.raises(ValueError, match="use_cache=False"):
        model(PROMPT, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5]]), use_cache=True)
