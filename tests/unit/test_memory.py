"""The estimated memory of training is near what was measured on a GPU, and counts what autocast really keeps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from liger_convert.benchmark.shapes import SHAPES
from liger_convert.config.recipe import build
from liger_convert.config.stages import FinetuneStage, Lora
from liger_convert.model import CLASSES, linearized_config
from liger_convert.pipeline import plan as plans
from liger_convert.pipeline.plan import Plan, StagePlan
from liger_convert.training import memory_estimate
from liger_convert.training.frozen import narrow_frozen
from liger_convert.training.student import add_lora

STAGES: dict[str, dict[str, Any]] = {
    "align": {"kind": "align", "learning_rates": {"mixer": 1e-4, "attention": 1e-4}},
    "distill": {"kind": "distill", "learning_rates": {"mixer": 1e-4, "attention": 1e-4, "body": 1e-4}},
    "finetune": {"kind": "finetune", "learning_rates": {"lora": 1e-4}, "lora": {}, "loss_on": "all"},
}
OF_LORA: dict[str, Any] = {"learning_rates": {"mixer": 1e-4, "lora": 1e-4}, "lora": {}}
OTHERS: dict[str, dict[str, Any]] = {
    "tinyllama-1.1b": {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    }
}
STAGES["finetune"]["lora"] = {"targets": ["q_proj", "k_proj", "v_proj"]}


def planned(config: Any, stage: dict[str, Any], monkeypatch: pytest.MonkeyPatch, device: str = "cuda") -> StagePlan:
    """The plan for a machine with this device, where bfloat16 is fast."""
    monkeypatch.setattr(plans, "pick_device", lambda name: torch.device(device))
    monkeypatch.setattr(plans, "compute_dtype", lambda device, precision: torch.bfloat16)
    recipe = {"version": 1, "name": "x", "base": "x", "mixer": {"type": "gla"}, "data": {"t": {"source": "pydoc"}}}
    made: Plan = plans.make_plan(build(recipe | {"stages": [stage | {"data": "t"}]}, "recipe"), config)
    return made.stages[0]


def shape(name: str) -> Any:
    values = dict((SHAPES | OTHERS)[name])
    return CONFIG_MAPPING[values.pop("model_type")](**values)


@pytest.mark.parametrize(
    ("model", "tokens", "stage", "measured"),
    [  # GB, from kernels/results/training-h200.md (align) and plan-gpu.md
        ("smollm2-135m", 32768, "align", 13),
        ("smollm2-135m", 8192, "distill", 11.32),
        ("smollm2-135m", 32768, "distill", 27.62),
        ("smollm2-135m", 32768, "finetune", 18.77),
        ("llama-3.2-1b", 16384, "align", 22),
        ("llama-3.2-1b", 16384, "distill", 49.65),
        ("llama-3.2-1b", 16384, "finetune", 26.92),
    ],
)
def test_a_stage_takes_about_the_memory_that_was_measured(
    model: str, tokens: int, stage: str, measured: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {"tokens": tokens, "seq_len": 2048, "batch_size": tokens // 2048, "concat_documents": True}
    found = planned(shape(model), STAGES[stage] | rows, monkeypatch)
    assert found.memory_bytes / 1e9 == pytest.approx(measured, rel=0.2)


@pytest.mark.parametrize(
    ("model", "seq_len", "shorter", "measured"),
    [  # GB, from kernels/results/plan-gpu.md: the distillations of recipes/default.yaml
        ("smollm2-135m", 1024, [], 11.18),
        ("smollm2-135m", 4096, [256], 13.76),
        ("tinyllama-1.1b", 1024, [], 24.33),
        ("tinyllama-1.1b", 2048, [256], 26.35),
    ],
)
def test_graphs_of_more_row_lengths_and_adapters_of_an_mlp_take_the_memory_that_was_measured(
    model: str, seq_len: int, shorter: list[int], measured: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: dict[str, Any] = {"tokens": 8192, "seq_len": seq_len, "batch_size": 8192 // seq_len, "concat_documents": True}
    rows["mixed_seq_lens"] = [{"seq_len": length, "fraction": 0.5} for length in shorter]
    stage = STAGES["distill"] | rows | {"learning_rates": {"mixer": 1e-3, "lora": 1e-4}}
    found = planned(shape(model), stage | {"lora": {"rank": 32, "targets": "all"}}, monkeypatch)
    assert found.memory_bytes / 1e9 == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("model", "tokens", "stage", "rows", "measured"),
    [  # GB, from kernels/results/plan-gpu.md; the last was measured when each of 6.98e9 frozen weights took four bytes,
        # of which two are left
        ("smollm2-135m", 8192, "distill", {}, 10.57),
        ("llama-3.2-1b", 8192, "distill", {"gradient_checkpointing": True}, 20.37),
        ("llama-3-8b", 2048, "distill", {"gradient_checkpointing": True} | OF_LORA, 53.99 - 2 * 6.98),
    ],
)
def test_a_stage_that_is_not_captured_has_no_gradients_beside_its_activations(
    model: str, tokens: int, stage: str, rows: dict[str, Any], measured: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With checkpointing, or as in the first case because a capture failed."""
    rows = {"tokens": tokens, "seq_len": 2048, "batch_size": tokens // 2048} | rows
    if not rows.get("gradient_checkpointing"):
        monkeypatch.setattr(memory_estimate, "_is_captured", lambda *_: False)
    found = planned(shape(model), STAGES[stage] | rows, monkeypatch)
    assert found.memory_bytes / 1e9 == pytest.approx(measured, rel=0.1)


def test_a_captured_layer_has_hidden_states_of_its_own_for_each_row_length(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"tokens": 8192, "seq_len": 2048, "batch_size": 4, "layerwise": True}

    def batches(**changes: Any) -> float:
        made = planned(shape("llama-3-8b"), STAGES["align"] | rows | changes, monkeypatch)
        return made.memory["hidden"] / (2 * 8192 * 4096)

    shorter = [{"seq_len": 256, "fraction": 0.5}]
    assert batches(compile=False) == batches(concat_documents=True, compile=False) == 4
    assert batches() == batches(concat_documents=True) == 6
    assert batches(concat_documents=True, mixed_seq_lens=shorter) == 8


def test_checkpointing_leaves_the_copies_of_one_layer_and_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"tokens": 2048, "seq_len": 2048, "batch_size": 1}
    config = shape("llama-3-8b")
    plain = planned(config, STAGES["distill"] | rows, monkeypatch).memory
    checkpointed = planned(config, STAGES["distill"] | rows | {"gradient_checkpointing": True}, monkeypatch).memory
    head = config.vocab_size * config.hidden_size
    assert plain["copies"] == pytest.approx(2 * (8.03e9 - head), rel=0.01)
    assert checkpointed["copies"] == pytest.approx(plain["copies"] / 32 + 2 * head, rel=0.07)
    assert checkpointed["activations"] < plain["activations"] / 6


def test_what_is_frozen_takes_two_bytes_and_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cases: only the mixers are trained, or adapters that do not read the weights next to them. If all weights are
    trained, none is frozen."""
    rows, config = {"tokens": 2048, "seq_len": 2048, "batch_size": 1}, shape("llama-3-8b")
    ends = 2 * config.vocab_size * config.hidden_size
    alone, lora, dora, whole = (
        planned(config, STAGES["distill"] | rows | fields, monkeypatch).memory
        for fields in (
            {"learning_rates": {"mixer": 1e-4}},
            OF_LORA,
            OF_LORA | {"lora": {"variant": "dora"}},
            {"learning_rates": {"mixer": 1e-4, "attention": 1e-4, "body": 1e-4}},
        )
    )
    assert alone["weights"] == lora["weights"]
    assert dora["weights"] == whole["weights"]
    assert whole["weights"] - alone["weights"] == 2 * (8_030_261_248 - ends)
    assert (alone["copies"], lora["copies"]) == (ends, ends)  # of the head, in two bytes
    assert whole["copies"] == dora["copies"] == 2 * (8_030_261_248 - ends // 2)


@pytest.mark.parametrize("variant", ["lora", "pissa"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_autocast_keeps_a_copy_of_every_matrix_in_float32_that_a_gradient_goes_through(
    checkpointing: bool, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `lora` adapters, that is only the head."""
    config = tiny_config("llama", tie_word_embeddings=False)
    rows = {"tokens": 26, "seq_len": 26, "batch_size": 1, "compile": False}
    lora = {"targets": ["q_proj", "k_proj", "v_proj"], "variant": variant}
    fields = STAGES["finetune"] | rows | {"gradient_checkpointing": checkpointing, "lora": lora}
    planned_stage = planned(config, fields, monkeypatch, "cpu")
    expected = planned_stage.memory["copies"]
    spec = plans.resolve_spec({"type": "gla"})
    linearized = linearized_config(config, {"format": 2, "mixers": {"main": spec}, "layers": ["main"] * 3})
    model = add_lora(CLASSES["llama"][2](linearized), Lora(targets=["q_proj", "k_proj", "v_proj"]), train_mixer=False)
    narrow_frozen(model, FinetuneStage.model_validate(fields | {"data": "t"}), torch.bfloat16)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    matrices = {tuple(p.shape) for name, p in model.named_parameters() if "lora" not in name and p.dim() == 2}
    kept: dict[int, torch.Tensor] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.bfloat16 and matrices & {tuple(x.shape), tuple(x.shape)[::-1]}:
            kept[x.untyped_storage().data_ptr()] = x  # held, so that no other takes its place
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), torch.autocast("cpu", torch.bfloat16):
        model.train()(torch.randint(3, 101, (1, 26)), use_cache=False)
    found = sum(x.nbytes for place, x in kept.items() if place not in own)
    head = 2 * config.vocab_size * config.hidden_size
    if variant == "lora":
        assert found == head == expected - 2 * checkpointing * planned_stage.trained
    elif checkpointing:
        assert found == head  # of the layers nothing: one at a time is run again
        assert found < expected
    else:
        # what goes into the first layer needs no gradient, so the weights of its q, k and v are not kept; norms have no
        # copies, but are counted, as they are small
        first, norms = 2 * 32 * 8 * (4 + 2 + 2), 2 * 32 * (2 * 3 + 1)
        assert found == expected - first - norms


@pytest.mark.slow
def test_the_script_that_measures_memory_runs_on_a_cpu(tmp_path: Path) -> None:
    cases = ["tiny/convert", "tiny/finetune", "tiny/distill-checkpointed"]
    script = [sys.executable, "kernels/bench_plan.py", "--cpu", "--precision", "float32", "--json", str(tmp_path / "x")]
    subprocess.run([*script, *cases], cwd=Path(__file__).parents[2], check=True, timeout=900)
    rows = json.loads((tmp_path / "x").read_text())["rows"]
    assert [row["case"] for row in rows] == cases
    assert all(row["measured"] > 0 for row in rows)
    assert all(0.5 < row["estimated"] / row["measured"] < 2 for row in rows[1:])
