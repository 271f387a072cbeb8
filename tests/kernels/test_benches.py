"""The benches of kernels/ that need a GPU or minutes, here at tiny sizes on a CPU: every row is kept, nothing wrong is
timed."""

from __future__ import annotations

import argparse
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from liger_convert.benchmark import shapes

KERNELS = Path(__file__).parents[2] / "kernels"


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """bench_layer on a CPU, which compiles nothing, times nothing and runs the torch ops whatever is asked for."""
    monkeypatch.syspath_prepend(str(KERNELS))
    module = import_module("bench_layer")

    def runs(step: Any, op: Any, inputs: Any, seconds: float) -> tuple[float, float, float]:
        step(op, inputs[0])
        return 1.0, 1.0, 1.0

    monkeypatch.setattr(module, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(module, "ROTATED", 1)
    monkeypatch.setattr(module, "measured", runs)
    monkeypatch.setattr(module, "use", lambda path: setattr(module, "asked_for", path))
    monkeypatch.setattr(module.Core, "compile", lambda self, **options: None)
    return module


def layer_options(**changes: Any) -> argparse.Namespace:
    sizes = {"mixer": None, "head_size": [8], "shape": ["2x70"], "heads": 4, "kv_heads": 2, "codes": 8}
    return argparse.Namespace(**sizes | {"seconds": 0, "no_fla": True, "json": None} | changes)


def test_mixers_that_read_the_layers_input_are_timed_too(layer) -> None:
    """The router of `mom` and the forget gate of `forgetting` do."""
    rows = layer.measure(layer_options(mixer=["mom", "forgetting"]))
    assert [row["layer"] for row in rows if "both_ms" in row][:2] == ["ours, mom", "ours, forgetting"]


def test_a_layer_is_checked_and_timed_beside_its_peers_and_every_row_is_kept(layer, tmp_path: Path, capsys) -> None:
    rows = layer.measure(layer_options(json=tmp_path / "rows.json"))
    assert json.loads((tmp_path / "rows.json").read_text())["rows"] == rows
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == rows
    assert [row["layer"] for row in rows if "both_ms" in row][:2] == ["ours, liger-paper", "ours, gla"]
    cudnn = next(row for row in rows if "CUDNN" in row["layer"])
    assert "backend" in cudnn["missing"], "a peer that does not run here says so"
    layer.show(rows)


def test_an_op_that_takes_longer_than_its_time_is_called_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of the plain loop over thousands of tokens takes half a minute."""
    monkeypatch.syspath_prepend(str(KERNELS))
    bench = import_module("bench")
    called: list[int] = []

    def step(op: Any, inputs: int) -> None:
        called.append(inputs)

    assert bench.milliseconds(step, None, [1, 2], "cpu", seconds=0) > 0
    assert called == [1, 2]
    bench.milliseconds(step, None, [1, 2], "cpu", seconds=0.05)
    assert len(called) >= 7, "a quick one at least three times after its warm-up"


def test_a_layer_whose_gradients_are_wrong_is_not_timed(layer, monkeypatch) -> None:
    real = layer.results

    def scaled(run: Any, parameters: Any, *given: Any) -> dict[str, torch.Tensor]:
        found = real(run, parameters, *given)
        factors = {name: 1.2 if layer.asked_for == "triton" and "gate" in name else 1 for name in found}
        return {name: value * factors[name] for name, value in found.items()}

    monkeypatch.setattr(layer, "results", scaled)
    gla, *_ = layer.measure(layer_options(mixer=["gla"]))
    assert "gradient of gate_bias_GF errs by" in gla["wrong"]
    assert "both_ms" not in gla


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(KERNELS))
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 101}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    monkeypatch.setitem(shapes.SHAPES, "tiny", shapes.SHAPES["smollm2-135m"] | sizes | heads)
    module = import_module("bench_training")
    monkeypatch.setattr(module, "CHECKED", (3, 80))
    monkeypatch.setattr(module, "LEAST_STEPS", 1)
    return module


def training_options(**changes: Any) -> argparse.Namespace:
    options = {
        "shape": "tiny",
        "mixer": "gla",
        "lengths": [80, 160],
        "tokens_a_step": 320,
        "accumulate": 1,
        "documents": 1,
    }
    options |= {"stages": ["finetune"], "seconds": 0, "plain": False, "device": "cpu", "precision": "float32"}
    return argparse.Namespace(**options | {"json": None} | changes)


@pytest.mark.parametrize("documents", [1, 3])
def test_every_stage_is_checked_and_timed_at_every_length(documents: int, training, tmp_path: Path) -> None:
    options = training_options(stages=list(training.STAGES), json=tmp_path / "rows.json", documents=documents)
    rows = training.measure(options)
    assert json.loads((tmp_path / "rows.json").read_text())["rows"] == rows
    assert [(row["stage"], row["rows"], row["tokens_a_row"]) for row in rows] == [
        (stage, 320 // tokens, tokens)
        for stage in ("align", "distill", "finetune", "finetune-base")
        for tokens in (80, 160)
    ]
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(320 * 1000 / row["step_ms"]["median"])
        assert row["check"]["gradient_error"] <= row["check"]["gradient_allowed"]
    training.show(rows, "tiny")


def test_a_stage_whose_loss_is_not_finite_or_wrong_is_not_timed(training, monkeypatch) -> None:
    real = training.Training.backward
    monkeypatch.setattr(training.Training, "check", lambda self: {})
    monkeypatch.setattr(training.Training, "backward", lambda *given, **named: real(*given, **named) * torch.nan)
    assert all("not finite" in row["wrong"] for row in training.measure(training_options()))


def test_the_parts_of_a_step_add_up_to_the_whole(training) -> None:
    torch.manual_seed(0)
    options, device = training_options(), torch.device("cpu")
    for name in training.STAGES:
        stage = training.make_stage(name, 320, 80, 1)
        made = training.Training.of(name, stage, options, device, torch.float32)
        batch = made.batch(4, 80)
        whole = made.backward(batch)
        grads = [p.grad for p in made.trained]
        made.optimizer.zero_grad()
        parts = [{key: value[rows : rows + 2] for key, value in batch.items()} for rows in (0, 2)]
        summed = sum(made.backward(part, 2) for part in parts)
        torch.testing.assert_close(summed, whole)
        for p, grad in zip(made.trained, grads):
            torch.testing.assert_close(p.grad, grad, rtol=1e-3, atol=1e-5)
