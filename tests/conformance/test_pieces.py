"""Optional parts of a mixer do not change a converted model before training. Decoding equals prefill with them, with
any chunks, padding, packing and beam reordering.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from promises import (
    LENGTH,
    assert_a_cache_changes_no_generation,
    assert_chunks_equal_one_pass,
    assert_left_padding_changes_nothing,
    assert_packed_documents_are_separate,
    stepwise_logits,
)
from tiny_models import (
    GREEDY,
    PADDED,
    PADDED_MASK,
    SINKS,
    TOKENS,
    WINDOW,
    assert_same_logits,
    base_folder,
    build,
    linearization,
    logits,
)
from transformers import AutoModelForCausalLM, DynamicCache

from liger_convert.model import modeling
from liger_convert.model.decoding import Decoder
from liger_convert.model.loading import linearize_base

CONV = {"short_conv": 4}
SILU = {**CONV, "conv_activation": "silu", "output_gate": True, "output_gate_activation": "silu"}
QWEN = {**SILU, "output_norm": "rms", "decay_scale": True, "combine": "memory"}
PIECES: list[dict[str, Any]] = [
    {"type": "deltanet", **CONV},
    {"type": "gated-deltanet", **CONV, "scope": "all"},
    {"type": "gated-deltanet", "short_conv": 7, "window": 2},
    {"type": "kda", "short_conv": 2, "window": 1, "sinks": 0},
    {"type": "titans", **CONV},
    {"type": "mamba", **CONV},
    {"type": "mamba", **CONV, "scope": "all"},
    {"type": "mamba2", **CONV},
    {"type": "mamba2", "skip": True, "scope": "all"},
    {"type": "mamba2", "skip": True, **CONV},
    {"type": "gla", **CONV},
    {"type": "mlstm", **CONV, "scope": "all"},
    {"type": "rwkv6", **CONV, "scope": "all"},
    {"type": "retnet", **CONV, "rope": False},
    {"type": "hgrn2", **CONV},
    {"type": "s4", "skip": True},
    {"type": "mamba", "skip": True, **CONV, "scope": "all"},
    {"type": "mom", "inner": {"type": "mamba", "skip": True}},
    {"type": "mom", "inner": {"type": "gated-deltanet"}, "combine": "learned", **CONV},
    {"type": "mom", "inner": {"type": "mamba"}, "output_norm": "rms", "output_gate": True, "scope": "all"},
    {"type": "mom", "router": "layer", "memories": 5, "output_gate": True, **CONV},
    {"type": "rwkv6", "bonus": True, **CONV},
    {"type": "rwkv6", "bonus": True, "normalize": True, "combine": "shared", "feature_map": "exp"},
    {"type": "rwkv7", "bonus": True, "short_conv": 2},
    {"type": "rwkv7", "bonus": True, "output_norm": "rms", "output_gate": True, "scope": "all", "rope": True},
    {"type": "mom", "combine": "learned", "inner": {"type": "rwkv7", "bonus": True}},
    {"type": "gla", "output_gate": True},
    {"type": "retnet", "output_gate": True},
    {"type": "gated-deltanet", "output_gate": True, **CONV},
    {"type": "kda", "output_gate": True, "output_norm": "rms", "scope": "all"},
    {"type": "mamba", "output_gate": True, "output_norm": "rms"},
    {"type": "rwkv6", "token_shift": True},
    {"type": "rwkv6", "token_shift": True, "scope": "all", "window": 1, "sinks": 0, **CONV},
    {"type": "forgetting", "kv_shift": True, "output_gate": True},
    {"type": "forgetting", "kv_shift": True, "qk_norm": True, "output_norm": "rms"},
    {"type": "forgetting", "gate": "fixed", "shortest": 2, "longest": 9, "output_gate": True},
    {"type": "ttt", "inner_norm": True, "mini_batch": 3, **CONV},
    {"type": "ttt", "model": "mlp", "inner_norm": True, "mini_batch": 4, "scope": "all"},
    {"type": "ttt", "model": "mlp", "window": 1, "sinks": 0, "output_gate": True},
    {"type": "titans", "mini_batch": 3, "scope": "all"},
    {"type": "titans", "model": "mlp", "mini_batch": 4, **CONV},
    {"type": "titans", "persistent": 3},
    {"type": "titans", "persistent": 2, "scope": "all", "sinks": 0, "window": 1, "output_gate": True},
    {"type": "titans", "combine": "gate", "persistent": 2},
    {"type": "titans", "combine": "context", **CONV},
    {"type": "gated-deltanet", "gate_proj": True, "decay_scale": True, **CONV},
    {"type": "gated-deltanet", "gate_proj": True, "scope": "all", **QWEN},
    {"type": "gated-deltanet-2", "gate_proj": True, "beta": "constant"},
    {"type": "kda", "gate_proj": True, "decay_scale": True, "window": 1, "sinks": 0, "rope": True},
    {"type": "deltanet", "gate_proj": True, "rope": True},
    {"type": "rwkv7", "gate_proj": True, "bonus": True, **CONV},
    {"type": "titans", "gate_proj": True, "persistent": 2},
    {"type": "gla", "gate_proj": True},
    {"type": "gla", "gate_proj": True, "gate": "pooled", "scope": "all"},
    {"type": "gated-rfa", "gate_proj": True, "gate": "learned"},
    {"type": "gateloop", "gate_proj": True, "rope": True},
    {"type": "decaying-fast-weights", "gate_proj": True},
    {"type": "mlstm", "gate_proj": True, "gate": "constant", **CONV},
    {"type": "rwkv6", "gate_proj": True, "token_shift": True, "bonus": True},
    {"type": "mamba2", "gate_proj": True, "skip": True, "scope": "all", **SILU},
    {"type": "mamba2", "norm_after_gate": True, "norm_all_heads": True, "conv_bias": True, "scope": "all", **SILU},
    {"type": "mamba2", "norm_all_heads": True, "conv_bias": True, "skip": True, **CONV},
    {"type": "kda", "conv_bias": True, "window": 1, "sinks": 0, **CONV},
    {"type": "mom", "inner": {"type": "gated-deltanet"}, "combine": "learned", "conv_bias": True, **CONV},
    {"type": "mamba", "scope": "all", **SILU},
    {"type": "mom", "inner": {"type": "gated-deltanet", "gate_proj": True}, "combine": "learned", **SILU},
]
CHANGES = {
    "output_norm",
    "qk_norm",
    "model",
    "inner_norm",
    "mini_batch",
    "conv_activation",
    "output_gate_activation",
    "norm_after_gate",
    "norm_all_heads",
}  # what is no identity, whatever it starts with
OPTIONS = CHANGES | {"short_conv", "skip", "bonus", "output_gate", "token_shift", "kv_shift", "persistent"}
OPTIONS |= {"gate_proj", "decay_scale", "conv_bias"}
WINDOW_ALONE = ("gate", "context")  # forms of `combine` that start as the window alone, and so differ from the others
every_piece = pytest.mark.parametrize("options", PIECES, ids=str)


def spec_of(options: dict[str, Any]) -> dict[str, Any]:
    return {"window": WINDOW, "sinks": SINKS, **options}


def without(options: dict[str, Any]) -> dict[str, Any]:
    left = {name: value for name, value in options.items() if name not in OPTIONS and value not in WINDOW_ALONE}
    return left | ({"inner": without(left["inner"])} if "inner" in left else {})


@functools.cache
def _built(options: str) -> Any:
    return build("llama", **spec_of(json.loads(options)))


def model_of(options: dict[str, Any]) -> Any:
    return _built(json.dumps(options))


@every_piece
def test_a_converted_model_is_unchanged_before_it_is_trained(options: dict[str, Any]) -> None:
    found = [
        logits(linearize_base(base_folder("llama"), linearization(**spec_of(spec)), dtype=torch.float32).eval(), TOKENS)
        for spec in (options, without(options))
    ]
    identity = CHANGES.isdisjoint(options) and options.get("combine") not in WINDOW_ALONE
    assert torch.equal(*found) == identity, "an identity, or none"
    off_start = logits(model_of(options), TOKENS), logits(build("llama", **spec_of(without(options))), TOKENS)
    assert (off_start[0] - off_start[1]).abs().max() > 1e-3 * off_start[1].abs().max(), "the piece does nothing"


@every_piece
@pytest.mark.parametrize("size", [1, 3, 29])
def test_prefill_in_chunks_equals_one_pass(options: dict[str, Any], size: int) -> None:
    assert_chunks_equal_one_pass(model_of(options), [*range(size, LENGTH, size), LENGTH])


@every_piece
def test_packed_documents_never_see_each_other(options: dict[str, Any]) -> None:
    assert_packed_documents_are_separate(model_of(options))


@every_piece
def test_padding_changes_nothing(options: dict[str, Any]) -> None:
    assert_left_padding_changes_nothing(model_of(options))


@every_piece
def test_beams_with_a_cache_equal_those_without(options: dict[str, Any]) -> None:
    assert_a_cache_changes_no_generation(model_of(options), num_beams=3)


@every_piece
@pytest.mark.parametrize("in_place", [False, True])
def test_steps_of_fixed_shape_equal_plain_ones(
    options: dict[str, Any], in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(options)
    monkeypatch.setattr(modeling, "Decoder", functools.partial(Decoder, in_place=in_place))
    asked = GREEDY | {"return_dict_in_generate": True, "output_logits": True, "attention_mask": PADDED_MASK}
    fixed = model.generate(PADDED, **asked)
    assert model.decoding == "fixed steps", "no fused step knows the piece"
    plain = model.generate(PADDED, disable_compile=True, **asked)
    assert torch.equal(fixed.sequences, plain.sequences)
    assert_same_logits(torch.stack(fixed.logits), torch.stack(plain.logits), 1e-5)


@every_piece
def test_every_parameter_gets_a_gradient(options: dict[str, Any]) -> None:
    model = build("llama", **spec_of(options)).train()
    model(TOKENS, labels=TOKENS).loss.backward()
    left = [name for name, p in model.named_parameters() if ".mixer." in name and (p.grad is None or not p.grad.any())]
    assert left == []


@every_piece
def test_a_saved_model_loads_as_itself(options: dict[str, Any], tmp_path: Path) -> None:
    model = model_of(options)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert torch.equal(logits(loaded, TOKENS), logits(model, TOKENS))


@pytest.mark.parametrize("options", [{"type": "kda", **CONV}, {"type": "mamba", **CONV, "skip": True}], ids=str)
def test_gradient_checkpointing_and_bfloat16_know_the_pieces(options: dict[str, Any]) -> None:
    model, gradients = build("llama", **spec_of({**options, "output_gate": True, "output_norm": "rms"})).train(), []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(TOKENS, labels=TOKENS).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-6)
    model = model.eval().to(torch.bfloat16)
    cache = DynamicCache(config=model.config)
    stepwise = stepwise_logits(model, cache)
    assert all(state.dtype == torch.float32 for state in cache.layers[0].states.values())
    assert_same_logits(stepwise.float(), logits(model, TOKENS).float(), 0.1)
