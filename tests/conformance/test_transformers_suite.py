"""transformers' own tests of a model pass for the generated classes: all layers linear, some, and as published."""

from __future__ import annotations

import unittest
from typing import Any
from unittest import mock

import pytest
import torch
import upstream
from tiny import tiny_config
from transformers.models.auto import modeling_auto

from liger_convert.mixers import resolve_spec
from liger_convert.model import linearized_classes, linearized_config

if (reason := upstream.missing()) is not None:
    pytest.skip(reason, allow_module_level=True)
MODEL_MIXIN, GENERATION_MIXIN = upstream.mixins()
MIXINS = (MODEL_MIXIN,) if GENERATION_MIXIN is None else (MODEL_MIXIN, GENERATION_MIXIN)

# smaller than the rows of the tests, so that there is a memory in each
WINDOW = {"window": 3, "sinks": 1}
FORMS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "linear": ({"type": "gla", **WINDOW}, ["main", "main"]),
    "hybrid": ({"type": "gla", **WINDOW}, ["main", "softmax"]),
    "paper": ({"type": "liger-paper", "window": 3}, ["main", "main"]),
}

OF_MODELS = {
    "test_attention_outputs": "counts one entry a layer; hybrids of transformers return those of their softmax layers "
    "alone, as ours do (test_attentions.py)",
    "test_generation_tester_mixin_inheritance": "asks for GenerationTesterMixin, which an sdist does not have",
}
STATE = "needs a cache of fixed size or a state that can be rolled back, which a recurrent state cannot"
KEYS = "expects keys and values of every token in every layer of the cache"
OF_GENERATION = {
    "test_generate_with_static_cache": STATE,
    "test_generate_from_inputs_embeds_with_static_cache": STATE,
    "test_generate_compile_model_forward_fullgraph": STATE,
    "test_generate_compilation_all_outputs": STATE,
    "test_static_cache_no_recompile_with_smaller_length": STATE,
    "test_past_key_values_format": KEYS,
    "test_greedy_generate_dict_outputs_use_cache": KEYS,
    "test_beam_search_generate_dict_outputs_use_cache": KEYS,
    "test_inherits_generation_mixin": "looks among the direct bases; ours is made from a class that has it for a base",
    "test_custom_4d_attention_mask": "a recurrence takes padding masks, not masks of pairs of tokens",
}
OF_FORM = {"paper": {"test_keep_in_fp32_modules_exist": "the published layer's mixer has no parameters"}}
LEFT_OUT = OF_MODELS if GENERATION_MIXIN is None else OF_MODELS | OF_GENERATION
if GENERATION_MIXIN is not None:
    del LEFT_OUT["test_generation_tester_mixin_inheritance"]

# those that found something, and are done within a second
FAST = (
    "test_all_tensors_are_parameter_or_buffer",
    "test_can_init_all_missing_weights",
    "test_from_pretrained_no_checkpoint",
    "test_hidden_states_output",
    "test_init_weights_can_init_buffers",
    "test_retain_grad_hidden_states_attentions",
    "test_save_load",
    "test_training",
)


class Tester:
    """What the mixins ask of a model's tester: sizes, configs and inputs."""

    batch_size, seq_length, hidden_size, num_attention_heads = 5, 7, 32, 4
    num_hidden_layers = 2
    is_training = True

    def __init__(self, family: str, form: str):
        self.family, self.form = family, form

    def get_config(self) -> Any:
        spec, layers = FORMS[self.form]
        plan = {"format": 2, "mixers": {"main": resolve_spec(spec)}, "layers": layers}
        base = tiny_config(self.family, num_hidden_layers=self.num_hidden_layers, initializer_range=0.02)
        return linearized_config(base, plan)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        ids_BT = torch.randint(3, 101, (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": ids_BT, "attention_mask": torch.ones_like(ids_BT).tril()}


def make_case(family: str, form: str) -> Any:
    _, backbone, lm = linearized_classes(family)
    # by their names in these tables the mixins tell which class has a loss
    tables = (modeling_auto.MODEL_MAPPING_NAMES, backbone), (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, lm)

    def set_up(self: Any) -> None:
        self.model_tester = Tester(family, form)
        for table, cls in tables:
            entry = mock.patch.dict(table, {cls.config_class.model_type: cls.__name__})
            entry.start()
            self.addCleanup(entry.stop)

    members = {
        "__module__": __name__,
        "setUp": set_up,
        "all_model_classes": (backbone, lm),
        "has_attentions": "softmax" in FORMS[form][1],
        "test_can_init_all_missing_weights_before_2023": True,
    }
    case: Any = type(f"{family.title()}{form.title()}Test", (*MIXINS, unittest.TestCase), members)
    for name in [name for name in dir(case) if name.startswith("test_") and callable(getattr(case, name))]:
        if name in LEFT_OUT or name in OF_FORM.get(form, {}):
            setattr(case, name, None)
        elif name not in FAST:  # the mixin wraps every test anew for each case, so that the mark is this one's
            setattr(case, name, pytest.mark.slow(getattr(case, name)))
    return case


for family in ("llama", "qwen3", "gemma2", "stablelm"):
    for form in FORMS:
        case = make_case(family, form)
        globals()[case.__name__] = case
del case


@pytest.mark.parametrize("name", [*LEFT_OUT, *OF_FORM["paper"], *FAST])
def test_what_is_left_out_and_what_is_fast_exists(name: str) -> None:
    assert any(hasattr(mixin, name) for mixin in MIXINS)
