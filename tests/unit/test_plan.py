"""A plan says exactly what a conversion makes, from a config alone: layers, parameters, and the bytes of its cache."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from planned import plan, recipe
from rich.console import Console
from tiny import tiny_config
from transformers import AutoModelForCausalLM, DynamicCache, GPT2Config
from transformers.cache_utils import DynamicLayer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from liger_convert.config.recipe import load
from liger_convert.eval import suites
from liger_convert.mixers import MIXERS
from liger_convert.model import CLASSES, LinearizedCacheLayer, linearized_config, new_state
from liger_convert.model.families import FAMILIES, family_of
from liger_convert.pipeline.plan import make_plan
from liger_convert.pipeline.plan_tables import render
from liger_convert.pipeline.preflight import wider_windows
from liger_convert.utils.errors import BadInput

RECIPES = Path(__file__).parents[2] / "recipes"
L, N = "main", "softmax"
OTHER = {"other": {"type": "window"}}


# --- layers


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("all", [L, L, L, L, L]),
        ("LLLN", [L, L, L, N, L]),
        ("NL", [N, L, N, L, N]),
        ({"softmax_every": 2}, [L, N, L, N, L]),
        ({"linear": [4, 0]}, [L, N, N, N, L]),
        ({"softmax": [1]}, [L, N, L, L, L]),
        ({"softmax": [], "linear": None}, [L, L, L, L, L]),
        ({"softmax_auto": 2}, [L, L, L, N, N]),
        ({"softmax_auto": 0.5}, [L, L, L, N, N]),
        ({"softmax_auto": 0.1}, [L, L, L, L, N]),
        ([L, "other", N, N, "other"], [L, "other", N, N, "other"]),
        ({"repeat": [L, "other", N]}, [L, "other", N, L, "other"]),
    ],
)
def test_every_form_of_layers_says_what_each_layer_becomes(layers, expected):
    assert recipe(layers=layers, mixers=OTHER).layer_names(5) == expected


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("all", [N, L, N, N, L, L]),
        ("LN", [N, L, N, N, N, L]),
        ({"softmax_every": 3}, [N, L, N, N, L, N]),
        ({"softmax_auto": 1}, [N, L, N, N, L, N]),
        ({"softmax_auto": 0.7}, [N, L, N, N, N, N]),
        ({"softmax": [4]}, [N, L, N, N, N, L]),
        ({"repeat": [L, "other"]}, [N, L, N, N, "other", L]),
        ({"linear": [0, 1]}, [L, L, N, N, N, N]),
        ([L, N, "other", N, N, N], [L, N, "other", N, N, N]),
    ],
)
def test_layers_with_a_window_of_the_bases_own_stay_unless_they_are_named(layers, expected):
    assert recipe(layers=layers, mixers=OTHER).layer_names(6, sliding=[0, 2, 3]) == expected
    assert recipe(layers="all").layer_names(6) == [L] * 6


@pytest.mark.parametrize(
    ("depth", "sliding", "says"),
    [(1, [], "only one layer; use layers: all"), (3, [0, 2], "only one layer without a window of its own")],
)
def test_of_one_layer_there_is_nothing_to_choose(depth, sliding, says):
    with pytest.raises(BadInput, match=f"layers.softmax_auto: keeps at least one layer, but the base has {says}"):
        recipe(layers={"softmax_auto": 0.25}).layer_names(depth, sliding)


def test_fewer_layers_are_kept_than_see_all_tokens():
    with pytest.raises(
        BadInput, match="3 is too many; keep fewer than the base's 3 layers without a window of their own"
    ):
        recipe(layers={"softmax_auto": 3}).layer_names(6, sliding=[0, 2, 3])


@pytest.mark.parametrize(
    ("family", "expected", "says"),
    [
        ("gemma3_text", [L, N, N], ["1-2", "the base's own sliding window, unchanged", "24"]),
        ("qwen2", [L, L, N], ["2", "the base's own sliding window, unchanged", "24"]),
        ("mistral", [L, L, L], None),  # where every layer has a window, it is what there is to linearize
        ("llama", [L, L, L], None),
    ],
)
def test_the_plan_says_which_layers_have_a_window_of_the_bases_own(family, expected, says):
    made = plan(family)
    assert made.layers == expected
    console = Console(width=160, file=io.StringIO(), record=True)
    console.print(render(made))
    rows = [line for line in console.export_text().splitlines() if "own sliding" in line]
    assert [[cell.strip() for cell in row.split("│")[1:4]] for row in rows] == ([says] if says else [])


@pytest.mark.parametrize(
    ("family", "layers", "window", "begin"),
    [
        ("mistral", "all", 24, None),
        ("mistral", "all", 25, "mixer.window: 25 is more than the 24 tokens that the base attends to in 3 of"),
        ("mistral", ["other", "other", N], 8, "mixers.other.window: unlimited is more than the 24 tokens"),
        ("qwen2", "all", 25, None),  # its layer with a window stays as it is
        ("qwen2", [N, N, L], 25, "mixer.window: 25 is more than the 24 tokens that the base attends to in 1 of its"),
        ("llama", "all", 128, None),
    ],
)
def test_a_window_longer_than_the_bases_own_is_a_warning(family, layers, window, begin):
    mixers = {"other": {"type": "window", "window": 0, "sinks": 0}}
    warnings = wider_windows(plan(family, mixer={"type": "gla", "window": window}, mixers=mixers, layers=layers))
    assert [warning.startswith(begin) for warning in warnings] == [True] * (begin is not None)


def test_a_choice_by_measurement_counts_the_layers_that_see_all_tokens():
    config = tiny_config("gemma2", num_hidden_layers=6, layer_types=["sliding_attention", "full_attention"] * 3)
    made = make_plan(recipe(layers={"softmax_auto": 1}), config)
    assert (made.undecided, made.layers) == (1, [N, L, N, L, N, N])
    console = Console(width=160, file=io.StringIO(), record=True)
    console.print(render(made))
    rows = [line.split("│")[1].strip() for line in console.export_text().splitlines() if "chosen by" in line]
    assert rows == ["2 of 3, chosen by measurement in the run", "1 of 3, chosen by measurement in the run"]


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ("", "layers: '' is not a pattern"),
        ("LLX", "layers: 'LLX' is not a pattern"),
        ([N] * 5, "layers: leaves all 5 layers softmax"),
        ([L, N], "layers: names 2 layers, but the base has 5"),
        ([L, L, L, L, "othr"], r"layers\[4\]: 'othr' is not a name; did you mean 'other'"),
        ({"repeat": [L, "othr"]}, r"layers\.repeat\[1\]: 'othr' is not a name; did you mean 'other'"),
        ({"linear": [5]}, r"layers\.linear: layer 5 does not exist; the base has layers 0 to 4"),
        ({"linear": [-1]}, r"layers\.linear\[0\]: should be from 0"),
        ({"softmax": [1, 2, 1]}, r"layers\.softmax: layer 1 is named twice"),
        ({"softmax": [0, 1, 2, 3, 4]}, "layers: leaves all 5 layers softmax"),
        ({"softmax_every": 1}, r"layers\.softmax_every: should be from 2"),
        ({"softmax_auto": 5}, r"layers\.softmax_auto: 5 is too many; keep fewer than the base's 5 layers"),
    ],
)
def test_layers_that_do_not_fit_the_base_are_refused(layers, says):
    with pytest.raises(BadInput, match=says):
        recipe(layers=layers, mixers=OTHER).layer_names(5)


def test_only_the_mixers_in_use_are_part_of_the_linearization():
    other = {"kept": {"type": "window", "window": 4}, "unused": {"type": "liger-paper"}}
    made = plan(mixers=other, layers=["main", "kept", "softmax"])
    assert list(made.linearization["mixers"]) == ["main", "kept"]
    assert made.linearization["mixers"]["kept"]["type"] == "window"
    assert made.layers == ["main", "kept", "softmax"]


# --- sizes


@torch.no_grad()
def cache_bytes(model: Any, tokens: int) -> int:
    """What the cache of one sequence of so many tokens really holds."""
    cache = DynamicCache(config=model.config)
    model.eval()(torch.randint(3, 100, (1, tokens)), past_key_values=cache, use_cache=True)
    ours = [layer.nbytes() for layer in cache.layers if isinstance(layer, LinearizedCacheLayer)]
    kept = [t.nbytes for layer in cache.layers if isinstance(layer, DynamicLayer) for t in (layer.keys, layer.values)]
    return sum(ours) + sum(kept)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "gemma3_text", "starcoder2"])
def test_the_cache_of_the_base_is_as_large_as_the_plan_says(family):
    model = AutoModelForCausalLM.from_config(tiny_config(family))
    for tokens in (10, 60):
        assert plan(family).kv_bytes(tokens) == cache_bytes(model, tokens)


@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_the_cache_of_the_linearized_model_is_as_large_as_the_plan_says(family, mixer, sinks):
    made = plan(family, mixer={"type": mixer, "window": 8, "sinks": sinks}, layers="LN")
    config = linearized_config(tiny_config(family), made.linearization)
    model = CLASSES[family][2](config)
    assert made.cache_bytes(60) == cache_bytes(model, 60)


@pytest.mark.parametrize("mixer", ["deltanet", "mamba", "gla"])
def test_the_state_of_a_short_convolution_is_counted(mixer):
    made = plan("llama", mixer={"type": mixer, "window": 8, "short_conv": 4}, layers="LN")
    model = CLASSES["llama"][2](linearized_config(tiny_config("llama"), made.linearization))
    without = plan("llama", mixer={"type": mixer, "window": 8}, layers="LN").cache_bytes(60)
    assert made.cache_bytes(60) == cache_bytes(model, 60) > without


@pytest.mark.parametrize("options", [{"persistent": 3}, {"combine": "gate"}, {"combine": "context"}], ids=str)
def test_what_titans_adds_to_attention_has_no_state(options):
    without, made = (plan("llama", mixer={"type": "titans", "window": 8, **own}, layers="LN") for own in ({}, options))
    model = CLASSES["llama"][2](linearized_config(tiny_config("llama"), made.linearization))
    assert made.cache_bytes(60) == cache_bytes(model, 60) == without.cache_bytes(60)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_window_of_all_tokens_grows_as_the_plan_says(family):
    made = plan(family, mixers={"kept": {"type": "forgetting"}}, layers={"repeat": ["main", "kept"]})
    model = CLASSES[family][2](linearized_config(tiny_config(family), made.linearization))
    for tokens in (10, 60):
        assert made.cache_bytes(tokens) == cache_bytes(model, tokens)
    console = Console(width=160, file=io.StringIO(), record=True)
    console.print(render(made))
    assert "plus, per token" in console.export_text()


@pytest.mark.parametrize(
    ("context", "rows", "says"),
    [
        (16, ["16"], True),
        (2048, ["2K"], True),
        (8192, ["4K", "8K"], True),
        (100_000, ["4K", "32K", "100,000"], True),
        (131_072, ["4K", "32K", "128K"], False),
        (1_048_576, ["4K", "32K", "128K"], False),
    ],
)
def test_cache_sizes_are_shown_up_to_the_bases_context(context, rows, says):
    made = make_plan(recipe(), tiny_config("llama", max_position_embeddings=context))
    console = Console(width=160, file=io.StringIO(), record=True)
    console.print(render(made))
    text = console.export_text()
    table = text.partition("cache of one sequence")[2].partition("└")[0].splitlines()
    assert [line.split("│")[1].strip() for line in table if "│" in line] == rows
    assert (f"the base supports {context:,} tokens" in text) is says
    sizes = made.to_dict()["cache_bytes"]
    assert {"4096", "32768", "131072"} <= sizes.keys(), "what `linearize compare` reads"
    assert {str(tokens) for tokens in made.lengths} <= sizes.keys()
    assert replace(made, context=None).lengths == [4096, 32768, 131_072]


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_counted_as_the_model_has_them(family):
    config, made = tiny_config(family), plan(family, layers="LN")
    sizes = made.to_dict()["parameters"]
    assert sizes["reused"] == AutoModelForCausalLM.from_config(config).num_parameters()
    new = new_state(linearized_config(config, made.linearization))
    assert made.new_parameters == {name: tuple(tensor.shape) for name, tensor in new.items()}
    assert sizes["new"] == sum(tensor.numel() for tensor in new.values())


@pytest.mark.parametrize("family", ["llama", "phi3"])
@pytest.mark.parametrize("targets", ["attention", ["down_proj"]])
def test_a_stage_with_lora_trains_what_peft_adds(family, targets):
    stage = {"kind": "distill", "data": "text", "tokens": 2e5, "learning_rates": {"lora": 1e-4}}
    made = plan(family, stages=[stage | {"lora": {"rank": 4, "targets": targets}}])
    config = tiny_config(family)
    names = list(family_of(config).projections) if targets == "attention" else targets
    adapted = get_peft_model(AutoModelForCausalLM.from_config(config), LoraConfig(r=4, target_modules=names))
    assert made.stages[0].trained == adapted.get_nb_trainable_parameters()[0]


def test_variants_of_adapters_take_what_they_keep():
    """dora keeps a magnitude for each output of a projection, and both parts of its output for each token. pissa keeps
    its initial adapters on the disk, next to the checkpoints."""
    stage = {"kind": "distill", "data": "text", "tokens": 2e5, "learning_rates": {"lora": 1e-4}, "batch_size": 2}

    def of_variant(name: str, **changes: Any) -> Any:
        return plan(stages=[stage | {"lora": {"variant": name, "targets": "linearized"}}], layers="LN", **changes)

    made = {variant: of_variant(variant, when_worse="warn") for variant in ("lora", "rslora", "dora", "pissa")}
    lora, rslora, dora, pissa = (made[variant].stages[0] for variant in made)
    assert lora == rslora
    outputs = made["lora"].layers.count("main") * (32 + 16 + 16 + 32 + 48 + 48 + 32)
    assert dora.trained == lora.trained + outputs
    itemsize = torch.float32.itemsize if "float32" in made["lora"].memory_for else 2
    assert dora.memory["activations"] == lora.memory["activations"] + 2 * 512 * 2 * itemsize * outputs
    assert (pissa.trained, pissa.started) == (lora.trained, lora.trained)
    # pissa reads the weights beside it, which are then held in float32 and copied
    assert {part for part in lora.memory if pissa.memory[part] != lora.memory[part]} <= {"weights", "copies"}
    assert pissa.memory["weights"] >= lora.memory["weights"]
    disk = {variant: plan.disk_bytes["1-distill"] for variant, plan in made.items()}
    assert disk["pissa"] == disk["lora"] + 4 * lora.trained  # at the peak, of three checkpoints; the result comes later
    assert disk["dora"] > disk["lora"]
    # a stage that made the model worse is trained again beside its first result
    assert of_variant("pissa").disk_bytes["1-distill"] == disk["pissa"] + 4 * (pissa.trained + pissa.started)


def test_a_stage_counts_the_tokens_of_whole_steps_and_the_groups_with_a_rate():
    shape = {"data": "text", "seq_len": 64, "batch_size": 2, "grad_accumulation": 4}
    align = {"kind": "align", "tokens": 1300, "learning_rates": {"mixer": 1e-2}} | shape
    finetune = {
        "kind": "finetune",
        "tokens": 5000,
        "learning_rates": {"mixer": 1e-2, "body": 1e-5, "attention": 1e-4},
    } | shape
    made = plan(stages=[align, finetune | {"loss_on": "all"}], layers="LN")
    assert [stage.tokens for stage in made.stages] == [1024, 4608]
    sizes = made.to_dict()["parameters"]
    embeddings = 2 * 101 * 32
    assert made.stages[0].trained == sizes["new"]
    assert made.stages[1].trained == sizes["new"] + sizes["reused"] - embeddings
    assert made.memory_bytes.keys() == {"convert", "inference", "1-align", "2-finetune"}


def test_the_export_dtype_sets_the_bytes_of_weights_and_cache():
    full, half = plan(), plan(export={"dtype": "bfloat16"})
    assert (full.dtype, half.dtype) == ("float32", "bfloat16")
    assert half.kv_bytes(4096) * 2 == full.kv_bytes(4096)
    assert half.memory_bytes["inference"] < full.memory_bytes["inference"]


# --- the shipped recipes


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_fit_their_family_and_train_all_that_is_new(path):
    loaded = load(path)
    family = "mistral" if "mistral" in path.stem else "llama"
    depth = len(loaded.layers) if isinstance(loaded.layers, list) else 32
    made = make_plan(loaded, tiny_config(family, num_hidden_layers=depth))
    assert all(stage.trained > 0 for stage in made.stages)
    assert not made.new_parameters or any(stage.learning_rates.mixer for stage in loaded.stages)
    suite = suites.load(loaded.eval.suite)
    assert loaded.eval.text is not None or not suite.needs_text


# --- what is shown and what is refused


def test_text_that_the_base_will_write_is_counted():
    own = {"source": "teacher", "tokens": 1e6, "document_tokens": 300}
    made = plan(data={"own": own, "text": {"source": "pydoc"}})
    assert made.to_dict()["teacher_tokens"] == {"own": 999_900}
    console = Console(width=160, file=io.StringIO(), record=True)
    console.print(render(made))
    assert "999,900" in console.export_text()


def test_a_plan_is_easy_to_read_on_80_columns():
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(render(plan()))
    lines = [line.strip() for line in console.export_text().splitlines()]
    assert "estimated memory" in lines
    counts = [line.split("│")[2] for line in lines if " parameters " in line]
    assert [count.rstrip() + " " for count in counts] == counts


def test_equal_layers_share_a_row():
    console = Console(width=160, file=io.StringIO(), record=True)
    console.print(render(make_plan(recipe(layers="LLN"), tiny_config("llama", num_hidden_layers=7))))
    rows = [line.split("│")[1].strip() for line in console.export_text().splitlines() if "attention" in line]
    assert rows == ["0-1, 3-4, 6", "2, 5"]


def test_layers_that_a_run_will_choose_are_counted_and_not_named():
    made, decided = plan(layers={"softmax_auto": 1}), plan(layers="LNL")
    assert made.to_dict()["linearization"]["layers"] == {"softmax_auto": 1}
    console = Console(width=160, file=io.StringIO(), record=True)
    console.print(render(made))
    rows = [line.split("│")[1].strip() for line in console.export_text().splitlines() if "attention" in line]
    assert rows == ["2 of 3, chosen by measurement in the run", "1 of 3, chosen by measurement in the run"]
    same = ("parameters", "state_bytes", "cache_bytes", "memory_bytes")
    assert all(made.to_dict()[name] == decided.to_dict()[name] for name in same)


def test_the_plan_is_plain_json():
    made = plan(layers="LLN")
    assert json.loads(json.dumps(made.to_dict()))["linearization"] == made.linearization


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (GPT2Config(), "model_type 'gpt2' is not supported"),
        (CONFIG_MAPPING["granitemoe"](), "model_type 'granitemoe' is not supported; supported:"),  # it is no granite
        (tiny_config("llama", quantization_config={"quant_method": "gptq"}), "says it is quantized"),
        (tiny_config("llama", pad_token_id=500), "no llama can be built from it"),
        (linearized_config(tiny_config("llama"), {"layers": []}), "'linearized_llama' is linearized already"),
    ],
    ids=["family", "similar family", "quantized", "impossible", "linearized"],
)
def test_a_base_that_cannot_be_linearized_is_refused(config, says):
    with pytest.raises(BadInput, match=says):
        make_plan(recipe(), config)


def test_a_mixer_that_does_not_exist_is_refused_with_its_path():
    with pytest.raises(BadInput, match=r"mixers\.other\.type: .*'glaa'.*did you mean gla"):
        plan(mixers={"other": {"type": "glaa"}})
