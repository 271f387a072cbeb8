"""Decoding equals prefill for every option of every mixer."""

from __future__ import annotations

from typing import Any

import pytest
from promises import LENGTH, assert_a_cache_changes_no_generation, assert_chunks_equal_one_pass
from tiny_models import SINKS, WINDOW, base_folder, build

from liger_convert.mixers import resolve_spec
from liger_convert.model.loading import linearize_base

VARIANTS = [
    {"window": 1},
    {"window": 1, "sinks": 0},
    {"sinks": 0},
    {"window": 3, "sinks": 7},
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
    {"gate": "pooled", "codes": 7},
    {"gate": "pooled", "scope": "all", "rope": True},
    {"type": "liger-paper", "gate": "random", "feature_map": "hedgehog"},
    {"type": "liger-paper", "combine": "memory"},
    {"type": "liger-hgrn2", "scope": "evicted", "combine": "learned"},
    {"type": "liger-gsa", "scope": "evicted", "combine": "learned", "slots": 4},
    {"type": "deltanet", "rope": True, "beta": "constant"},
    {"type": "gated-deltanet", "scope": "all", "combine": "fixed"},
    {"type": "gated-deltanet-2", "scope": "all", "beta": "constant"},
    {"type": "gated-deltanet-2", "rope": True, "write_bias": 2.0, "window": 1},
    {"type": "rwkv7", "rope": True, "beta": "constant", "window": 1},
    {"type": "ttt", "scope": "all", "learning_rate": 1.5},
    {"type": "titans", "scope": "all", "sinks": 0, "momentum_bias": 3.0},
    {"type": "ttt", "inner_norm": True, "rope": True, "beta": "constant"},
    {"type": "titans", "model": "mlp", "mini_batch": 16, "rope": True},
    {"type": "mom", "memories": 3, "combine": "learned", "inner": {"type": "ttt", "model": "mlp", "mini_batch": 3}},
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
    {"type": "forgetting", "rope": False, "gate": "learned", "kv_shift": True, "window": 0, "sinks": 0},
    {"type": "mom", "forget": True},
    {"type": "mom", "router": "layer", "memories": 5},
    {"type": "mom", "inner": {"gate": "pooled", "codes": 7}},
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
    assert_chunks_equal_one_pass(model, range(1, LENGTH + 1))
    assert_a_cache_changes_no_generation(model)


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
    assert_a_cache_changes_no_generation(model)
