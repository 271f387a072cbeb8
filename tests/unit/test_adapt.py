"""A recipe with `adapt` follows the base and the GPU, says what it changed, and changes nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import write_home
from transformers import CONFIG_MAPPING

from liger_convert.benchmark.shapes import SHAPES
from liger_convert.cli import main
from liger_convert.config.recipe import Recipe, build, load
from liger_convert.config.stages import AlignStage
from liger_convert.model.bases import context_length
from liger_convert.pipeline import adapt
from liger_convert.pipeline.plan import make_plan

DEFAULT = Path(__file__).parents[2] / "recipes" / "default.yaml"
GB = 10**9


def config(shape: str, **fields: Any) -> Any:
    values = dict(SHAPES[shape]) | fields
    return CONFIG_MAPPING[values.pop("model_type")](**values)


def hybrid(**fields: Any) -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 128, "sliding_window": 512}
    return CONFIG_MAPPING["gemma3_text"](**sizes | fields, num_attention_heads=4, num_key_value_heads=1)


def recipe(**stage: Any) -> Recipe:
    common = {"data": "text", "tokens": 10**6, "seq_len": 1024, "batch_size": 8, "concat_documents": True}
    rates = {"mixer": 1e-3, "attention": 3e-4, "body": 6e-5}
    written = {
        "version": 1,
        "name": "tiny",
        "base": "anywhere",
        "mixer": {"type": "gla"},
        "precision": "bfloat16",  # `auto` differs between CPUs, and memory with it
        "adapt": {"hidden_size": 576, "trained": "weights"},
        "data": {"text": {"source": "pydoc"}},
        "stages": [common | {"kind": "distill", "learning_rates": rates} | stage],
    }
    return build(written, "recipe")


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, room: int | None) -> None:
    monkeypatch.setattr(adapt, "_room", lambda options, device: room)


ALL_WEIGHTS = ["adapt.trained=weights"]


def test_on_the_base_that_it_was_written_for_nothing_changes() -> None:
    written = load(DEFAULT, ALL_WEIGHTS)
    plan = make_plan(written, config("smollm2-135m", max_position_embeddings=8192))
    assert plan.adapted == ()
    assert list(plan.recipe_stages) == written.stages


@pytest.mark.parametrize(("context", "window"), [(8192, 256), (2048, 256), (2047, 128), (256, 32), (7, 1)])
def test_a_window_is_an_eighth_of_the_context_at_most(context: int, window: int) -> None:
    base, written = config("smollm2-135m", max_position_embeddings=context), load(DEFAULT)
    plan = make_plan(written, base)
    assert plan.linearization["mixers"]["main"]["window"] == window
    said = f"mixer.window: {window} in place of 256, because the base was made for {context:,} tokens"
    assert (said in plan.adapted) == (window != 256)
    taken_as_it_is = make_plan(written.model_copy(update={"adapt": None}), base)
    assert taken_as_it_is.linearization["mixers"]["main"]["window"] == 256


@pytest.mark.parametrize(("fraction", "window"), [(0.25, 512), (0.5, 1024), (0.49, 512), (1.0, 1024)])
def test_a_longer_window_is_at_most_the_fraction_of_the_context_that_is_asked_for(fraction: float, window: int) -> None:
    base = config("smollm2-135m", max_position_embeddings=2048)
    layers = "layers={softmax: [3], long_windows: {layers: [5], window: 1024}}"
    plan = make_plan(load(DEFAULT, [layers, f"adapt.longest_window={fraction}"]), base)
    assert plan.linearization["mixers"]["long"]["window"] == window
    assert plan.linearization["mixers"]["main"]["window"] == 256
    said = "layers.long_windows.window: 512 in place of 1024, because the base was made for 2,048 tokens"
    assert (said in plan.adapted) == (window == 512)


def test_a_plan_divides_rows_among_processes_as_they_are_adapted() -> None:
    """One row for two processes becomes two rows of half the length. Without `adapt`, one of the processes is spare."""
    written, base = recipe(batch_size=1, seq_len=1024), config("smollm2-135m", max_position_embeddings=512)
    adapted = make_plan(written, base, 2)
    assert adapted.recipe_stages[0].batch_size == 2
    unchanged = make_plan(written.model_copy(update={"adapt": None}), base, 2)
    spare = [made.stages[0].traffic.spare for made in (adapted, unchanged) if made.stages[0].traffic]
    assert spare == [0, 1]


def test_windows_of_further_mixers_fit_as_well_and_a_window_of_all_tokens_stays() -> None:
    written = load(DEFAULT, ["mixers.far={type: gla, window: 512}", "mixers.all={type: gla, window: 0}"])
    written = written.model_copy(update={"layers": "all"})
    specs = {name: {"window": size} for name, size in (("main", 16), ("far", 512), ("all", 0))}
    fitted, said = adapt.fit_windows(written, config("smollm2-135m", max_position_embeddings=1024), specs)
    assert {name: spec["window"] for name, spec in fitted.items()} == {"main": 16, "far": 128, "all": 0}
    assert said == ("mixers.far.window: 128 in place of 512, because the base was made for 1,024 tokens",)


@pytest.mark.parametrize(("sliding", "window"), [(15, 1024), (9, 1024), (8, 256), (18, 256)])
@pytest.mark.parametrize("context", [32768, 2048])
def test_where_few_layers_see_all_tokens_each_linear_one_gets_the_longer_window(
    sliding: int, window: int, context: int
) -> None:
    """As in Gemma 3, where they carry all that is farther back. If every layer has a window, there are no such few. The
    rows of every stage leave the longer window, and a step has as many tokens."""
    kinds = ["sliding_attention"] * sliding + ["full_attention"] * (18 - sliding)
    base = hybrid(layer_types=kinds, num_hidden_layers=18, max_position_embeddings=context)
    plan, written = make_plan(load(DEFAULT), base), load(DEFAULT)
    fitted = min(window, context // 4)
    assert plan.linearization["mixers"]["main"]["window"] == fitted
    why = f"because {sliding} of the base's 18 layers have windows of their own"
    assert (f"mixer.window: {fitted} in place of 256, {why}" in plan.adapted) == (window != 256)
    assert all(stage.seq_len > fitted + 4 for stage in plan.recipe_stages)
    assert [stage.step_tokens for stage in plan.recipe_stages] == [stage.step_tokens for stage in written.stages]
    for unchanged in ({"adapt": None}, {"layers": "all"}):
        as_written = make_plan(written.model_copy(update=unchanged), base)
        assert as_written.linearization["mixers"]["main"]["window"] == 256


@pytest.mark.parametrize(("context", "window"), [(32768, 1024), (2048, 512), (1024, 256), (512, 128)])
def test_a_window_that_two_rules_change_is_told_of_once(context: int, window: int) -> None:
    kinds = ["sliding_attention"] * 15 + ["full_attention"] * 3
    base = hybrid(layer_types=kinds, num_hidden_layers=18, max_position_embeddings=context)
    plan = make_plan(load(DEFAULT), base)
    said = [sentence for sentence in plan.adapted if sentence.startswith("mixer.window")]
    assert plan.linearization["mixers"]["main"]["window"] == window
    why = "because 15 of the base's 18 layers have windows of their own"
    assert said == ([] if window == 256 else [f"mixer.window: {window} in place of 256, {why}"])


@pytest.mark.parametrize(("own", "main", "long"), [(4096, 256, 1024), (512, 256, 512), (100, 100, None)])
def test_where_every_layer_has_a_window_of_its_own_none_becomes_longer(own: int, main: int, long: int | None) -> None:
    base = hybrid(layer_types=["sliding_attention"] * 18, num_hidden_layers=18, sliding_window=own)
    plan = make_plan(load(DEFAULT), base)
    windows = {name: spec["window"] for name, spec in plan.linearization["mixers"].items()}
    assert windows == {"main": main} | ({} if long is None else {"long": long})
    said = f"layers.long_windows.window: {own} in place of 1024, because a layer of the base sees only {own} tokens"
    assert (said in plan.adapted) == (own < 1024)


LONGER = "layers.long_windows.window: 2,048 in place of 1,024, because the base was made for {:,} tokens"


@pytest.mark.parametrize(
    ("context", "changes", "window"),
    [
        (32768, (), 2048),
        (131072, (), 2048),
        (32767, (), 1024),
        (8192, (), 1024),
        (32768, ("adapt.context=null",), 1024),
        (32768, ("adapt=null",), 1024),
        (32768, ("layers.long_windows.layers=[0, 3]",), 1024),  # a choice of one's own is left as it is
        (32768, ("layers.long_windows.layers=4",), 1024),
        (32768, ("stages[0].seq_len=2048", "stages[2].seq_len=2048"), 1024),  # nothing would leave a window of 2,048
        (65536, ("layers={softmax: [3], long_windows: {layers: 0.4, window: 2048}}",), 2048),
    ],
)
def test_a_longer_window_doubles_on_a_base_with_four_times_the_context(
    context: int, changes: tuple[str, ...], window: int
) -> None:
    base = config("smollm2-135m", max_position_embeddings=context)
    plan = make_plan(load(DEFAULT, changes), base)
    assert plan.linearization["mixers"]["long"]["window"] == window
    said = any(sentence.startswith(LONGER.format(context)) for sentence in plan.adapted)
    assert said == (window == 2048 and not changes)


def test_a_longer_window_stays_where_most_layers_have_windows_of_their_own() -> None:
    kinds = ["sliding_attention"] * 9 + ["full_attention"] * 9
    base = hybrid(layer_types=kinds, num_hidden_layers=18, max_position_embeddings=32768)
    assert make_plan(load(DEFAULT), base).linearization["mixers"]["main"]["window"] == 1024


@pytest.mark.parametrize(
    ("depth", "full", "fraction", "kept"),
    [(18, 3, 0.25, 2), (26, 13, 0.25, 3), (62, 10, 0.25, 6), (62, 10, 0.7, 7), (18, 3, 1, 1), (12, 8, 0.2, 1)],
)
def test_where_few_layers_see_all_tokens_at_least_a_tenth_of_all_layers_still_do(
    depth: int, full: int, fraction: float, kept: int
) -> None:
    """A fraction of few layers would be next to none. A number is taken as it is. The layers are chosen by copying,
    because the rows of KL lie within the windows."""
    kinds = ["full_attention"] * full + ["sliding_attention"] * (depth - full)
    base = hybrid(layer_types=kinds, num_hidden_layers=depth)
    plan = make_plan(load(DEFAULT, [f"layers.softmax_auto={fraction}"]), base)
    assert plan.undecided == kept
    why = f"because {depth - full} of the base's {depth} layers have windows of their own"
    said = f"layers.softmax_auto: {kept} of the other {full} in place of {fraction}, {why}"
    assert (said in plan.adapted) == (kept > fraction * full)
    few = depth - full >= full
    assert plan.selected_by == ("copy" if few else "kl")
    assert (f"layers.select: copy in place of kl, {why}" in plan.adapted) == few
    as_written = make_plan(load(DEFAULT, [f"layers.softmax_auto={fraction}", "adapt=null"]), base)
    assert as_written.undecided == max(1, int(fraction * full) if fraction < 1 else fraction)
    assert as_written.selected_by == "kl"


def test_rows_are_no_longer_than_the_context_and_a_step_has_as_many_tokens() -> None:
    plan = make_plan(load(DEFAULT, ALL_WEIGHTS), config("smollm2-135m", max_position_embeddings=3000))
    assert [stage.seq_len for stage in plan.recipe_stages] == [2048, 1024, 2048]
    assert [stage.step_tokens for stage in plan.recipe_stages] == [stage.step_tokens for stage in load(DEFAULT).stages]
    assert any("stages[0].seq_len: 2,048 in place of 4,096" in sentence for sentence in plan.adapted)
    assert "made for 3,000 tokens" in plan.adapted[0]


def test_second_lengths_that_no_longer_fit_are_dropped() -> None:
    rows = {"seq_len": 4096, "mixed_seq_lens": [{"seq_len": 2048, "fraction": 0.2}, {"seq_len": 512, "fraction": 0.3}]}
    plan = make_plan(recipe(**rows), config("smollm2-135m", max_position_embeddings=2048))
    assert [other.seq_len for other in plan.recipe_stages[0].mixed_seq_lens] == [512]
    assert plan.adapted[0].endswith("; mixed_seq_lens without 2,048")


def test_rows_that_never_leave_the_window_get_shorter_with_it() -> None:
    """As many of their micro-batches stay: on a base of 256 tokens, rows of 256 would fill its context."""
    for context, length in ((2048, 256), (1024, 128), (256, 32)):
        plan = make_plan(load(DEFAULT), config("smollm2-135m", max_position_embeddings=context))
        assert [(other.seq_len, other.fraction) for other in plan.recipe_stages[2].mixed_seq_lens] == [(length, 0.5)]
        said = f"mixed_seq_lens: rows of {length} in place of 256, because the window is {length} in place of 256"
        assert (f"stages[2].{said}" in plan.adapted) == (length != 256)
    longer = {"seq_len": 4096, "mixed_seq_lens": [{"seq_len": 512, "fraction": 0.3}]}
    (stage,) = make_plan(recipe(**longer), config("smollm2-135m", max_position_embeddings=1024)).recipe_stages
    assert [other.seq_len for other in stage.mixed_seq_lens] == [512]


def test_a_recipe_without_adapt_keeps_its_rows() -> None:
    written = load(DEFAULT, ["adapt=null"])
    plan = make_plan(written, config("llama-3.2-1b", max_position_embeddings=2048))
    assert list(plan.recipe_stages) == written.stages


@pytest.mark.parametrize(("hidden", "factor"), [(576, 1.0), (512, 1.0), (1152, 0.5), (2304, 0.25)])
def test_rates_of_the_bases_own_weights_fall_with_its_width_and_never_rise(hidden: int, factor: float) -> None:
    base = config("smollm2-135m", hidden_size=hidden, num_attention_heads=hidden // 64, num_key_value_heads=1)
    (stage,) = make_plan(recipe(), base).recipe_stages
    assert stage.learning_rates.trained() == pytest.approx(
        {"mixer": 1e-3, "attention": factor * 3e-4, "body": factor * 6e-5}
    )


@pytest.mark.parametrize(
    ("room", "rows", "accumulation", "checkpointing", "adapters"),
    [
        (None, 8, 1, False, False),  # a CPU
        (10**12, 8, 1, False, False),
        (50 * GB, 4, 2, False, False),
        (40 * GB, 2, 4, False, False),
        (26 * GB, 8, 1, True, False),
        (16 * GB, 2, 4, False, True),
        (12 * GB, 1, 8, False, True),
        (10 * GB, 4, 2, True, True),
    ],
)
def test_a_stage_gets_smaller_until_it_fits(monkeypatch, room, rows, accumulation, checkpointing, adapters) -> None:
    on_a_gpu(monkeypatch, room)
    plan = make_plan(recipe(), config("llama-3.2-1b"))
    (stage,) = plan.recipe_stages
    assert stage.step_tokens == recipe().stages[0].step_tokens
    if room is not None:
        assert plan.stages[0].memory_bytes <= room
    assert bool(stage.lora) is adapters, plan.stages[0].memory_bytes / GB
    made = (stage.batch_size, stage.grad_accumulation, stage.gradient_checkpointing)
    assert made == (rows, accumulation, checkpointing), plan.stages[0].memory_bytes / GB


@pytest.mark.parametrize(
    ("shape", "trained", "room", "scale", "rate"),
    [
        ("smollm2-135m", "adapters", None, 4.65, 4.98e-4),
        ("llama-3.2-1b", "adapters", None, 0.947, 1.01e-4),
        ("llama-3-8b", "weights", 72, 1.4, 1.5e-4),
        ("llama-3-8b", "adapters", 72, 1.4, 1.5e-4),
    ],
)
def test_adapters_train_every_base_and_what_does_not_fit(monkeypatch, shape, trained, room, scale, rate) -> None:
    on_a_gpu(monkeypatch, room and room * GB)
    base = config(shape, max_position_embeddings=8192)
    plan = make_plan(load(DEFAULT, [f"adapt.trained={trained}", "precision=bfloat16"]), base, scale=scale)
    if room:
        assert all(stage.memory_bytes <= room * GB for stage in plan.stages)
    align, distill, _ = plan.recipe_stages
    assert distill.lora is not None
    assert distill.lora.targets == "all"
    assert distill.learning_rates.trained() == {"mixer": 2e-3, "lora": rate}
    assert plan.adapted[0] == f"adapt.lora_rate: {rate:g}, because the base's weights have a scale of {scale:.2f}"
    said = f"stages[1].lora: rank 32 on all at {rate:g}, in place of the base's own weights"
    assert any(said in sentence for sentence in plan.adapted)
    if trained == "adapters":
        assert align.lora is not None
        assert align.lora.targets == "attention"
        assert align.learning_rates.trained() == {"mixer": 6e-3, "lora": rate}


@pytest.mark.parametrize(
    ("scale", "rate", "said"),
    [
        (0.1, 1.07e-5, "1.07e-05, because the base's weights have a scale of 0.10"),
        (40.0, 5.35e-4, "0.000535, because the base's weights have a scale of 40.00"),
        (None, 1.07e-4, "0.000107 times the scale of the base's weights, which a run measures"),
    ],
)
def test_the_rate_of_adapters_follows_the_scale_of_the_weights(scale: float | None, rate: float, said: str) -> None:
    plan = make_plan(load(DEFAULT), config("smollm2-135m", max_position_embeddings=8192), scale=scale)
    assert [stage.learning_rates.lora for stage in plan.recipe_stages] == [pytest.approx(rate)] * 3
    assert plan.adapted[0] == f"adapt.lora_rate: {said}"
    assert all(f"at {rate:g}, in place of the base's own weights" in sentence for sentence in plan.adapted[1:])


@pytest.mark.parametrize("shape", ["smollm2-135m", "llama-3.2-1b"])
def test_with_mixers_alone_nothing_of_the_base_is_trained(shape: str) -> None:
    base = config(shape, max_position_embeddings=8192)
    plan = make_plan(load(DEFAULT, ["adapt.trained=mixers"]), base)
    assert [set(stage.learning_rates.trained()) for stage in plan.recipe_stages] == [{"mixer"}] * 3
    assert sum("only those of the mixers, as set in adapt.trained" in sentence for sentence in plan.adapted) == 3
    plan = make_plan(load(DEFAULT), base)
    assert [set(stage.learning_rates.trained()) for stage in plan.recipe_stages] == [{"mixer", "lora"}] * 3


def test_adapters_are_of_the_variant_and_alpha_that_are_asked_for() -> None:
    asked = ["adapt.trained=adapters", "adapt.lora_variant=rslora", "adapt.lora_rank=128", "adapt.lora_alpha=16"]
    plan = make_plan(load(DEFAULT, asked), config("smollm2-135m"))
    for stage in plan.recipe_stages:
        assert stage.lora is not None
        assert (stage.lora.variant, stage.lora.rank, stage.lora.alpha) == ("rslora", 128, 16)
    assert any("lora: rslora, rank 128 and alpha 16 on all at 0.000107, " in sentence for sentence in plan.adapted)


def test_an_alignment_that_does_not_fit_is_trained_layer_by_layer(monkeypatch) -> None:
    """This is tried before adapters, for any number of processes, unless they share each row."""
    align = {"kind": "align", "learning_rates": {"mixer": 1e-3, "attention": 3e-4}}
    on_a_gpu(monkeypatch, 40 * GB)
    made, several = (make_plan(recipe(**align), config("llama-3-8b"), processes) for processes in (1, 2))
    assert several.recipe_stages == made.recipe_stages
    whole = recipe(**align)
    sharing = make_plan(whole.model_copy(update={"sequence_parallel": 2}), config("llama-3-8b"), 2)
    (stage,), (other,) = made.recipe_stages, sharing.recipe_stages
    assert isinstance(stage, AlignStage)
    assert stage.layerwise
    assert stage.lora is None
    assert made.stages[0].memory_bytes <= 40 * GB
    assert any("layerwise: true in place of false" in sentence for sentence in made.adapted)
    assert isinstance(other, AlignStage)
    assert not other.layerwise
    on_a_gpu(monkeypatch, 150 * GB)
    (stage,) = make_plan(recipe(**align), config("llama-3-8b")).recipe_stages
    assert isinstance(stage, AlignStage)
    assert not stage.layerwise


def test_without_adapters_a_base_that_is_no_wider_trains_all_weights() -> None:
    plan = make_plan(load(DEFAULT, ALL_WEIGHTS), config("smollm2-135m", max_position_embeddings=8192))
    assert all(stage.lora is None for stage in plan.recipe_stages)


@pytest.mark.parametrize(
    ("rope", "positions", "context"),
    [
        ({"rope_type": "default"}, 2048, 2048),
        ({"rope_type": "linear", "factor": 4.0}, 2048, 8192),
        ({"rope_type": "dynamic", "factor": 2.0}, 2048, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192, 8192),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 2048, 8192),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
            131072,
            131072,
        ),
    ],
)
def test_the_context_counts_rotary_scaling(rope: dict[str, Any], positions: int, context: int) -> None:
    base = CONFIG_MAPPING["llama"](max_position_embeddings=positions, rope_parameters=rope | {"rope_theta": 1e4})
    assert context_length(base) == context


def test_a_run_trains_by_what_its_plan_recorded_whatever_the_machine_is_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_home(tmp_path, [{"kind": "align", "learning_rates": {"mixer": 1e-3}, "seq_len": 64}])
    words = ["run", "recipe.yaml", "--out", "out", "--set", "adapt={hidden_size: 16}", "--set", "when_worse=ignore"]
    base = json.loads((tmp_path / "base/config.json").read_text())
    (tmp_path / "base/config.json").write_text(json.dumps(base | {"max_position_embeddings": 32}))
    assert main.main(words) == 0
    plan = json.loads((tmp_path / "out/manifest.json").read_text())["steps"]["plan"]
    assert plan["stages"][0]["seq_len"] == 32
    assert plan["stages"][0]["batch_size"] == 4
    assert "made for 32 tokens" in plan["plan"]["adapted"][0]
    assert torch.get_num_threads() >= 1
