"""A stage with `ema_length` ends with the averaged weights. Its training steps are the same as without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from stages import every_stage, folders, make_stage, result_bytes, train
from torch import Tensor
from transformers import TrainerCallback

from liger_convert.io import checksums
from liger_convert.training import stage as module
from liger_convert.training.memory_estimate import Sizes, training_bytes
from liger_convert.training.merge import load_chain
from liger_convert.training.trainer import AVERAGE_FILE, StageTrainer
from liger_convert.training.weight_average import WeightAverage
from liger_convert.utils.errors import LinearizeError

LENGTH = 0.3
Weights = dict[str, Tensor]


def recorded(stage: Any, out: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Weights], Weights]:
    """The weights after every step, and the result of the stage, in float64."""

    class Recorder(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            steps.append(weights())

    class Recorded(StageTrainer):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            self.add_callback(Recorder())
            trainers.append(self)

    def weights() -> Weights:
        return {name: p.detach().double().clone() for name, p in trainers[0]._trained().items()}

    steps: list[Weights] = []
    trainers: list[Recorded] = []
    with monkeypatch.context() as patch:
        patch.setattr(module, "StageTrainer", Recorded)
        train(stage, out)
    return steps, weights()


def written_out(steps: list[Weights], length: float) -> Weights:
    """The average after the last of `steps`, by its definition."""
    shares = torch.arange(1 - len(steps), 1, dtype=torch.float64).div(length).exp()
    shares = shares / shares.sum()
    return {name: sum(share * step[name] for share, step in zip(shares, steps)) for name in steps[-1]}  # type: ignore[misc]


def distance(ours: Weights, theirs: Weights) -> float:
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)


@every_stage
def test_the_result_is_the_average_and_the_training_is_as_without(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, last = recorded(make_stage(name), tmp_path / "plain", monkeypatch)
    steps, ended = recorded(make_stage(name, ema_length=LENGTH), tmp_path / "average", monkeypatch)
    assert len(steps) == len(plain) == 8
    assert all(ours[key].equal(theirs[key]) for ours, theirs in zip(steps, plain) for key in theirs)
    expected = written_out(steps, LENGTH * 8)
    assert distance(ended, expected) < 1e-6
    assert distance(ended, last) > 1e-4  # the last weights are something else
    merged, raw = (load_chain(folders()[1], [tmp_path / out / "result"]).state_dict() for out in ("average", "plain"))
    assert {key for key in raw if not merged[key].equal(raw[key])}  # what is saved differs, too
    assert result_bytes(tmp_path / "average").keys() == result_bytes(tmp_path / "plain").keys()


def test_without_it_nothing_is_kept_beside_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("an average is kept")

    monkeypatch.setattr(WeightAverage, "__init__", refuse)
    steps, ended = recorded(make_stage("finetune"), tmp_path, monkeypatch)
    assert all(ended[key].equal(value) for key, value in steps[-1].items())
    with pytest.raises(AssertionError, match="an average is kept"):
        train(make_stage("finetune", ema_length=LENGTH), tmp_path / "with")


def test_an_average_shorter_than_a_step_is_the_last_weights(tmp_path: Path) -> None:
    for length in (0.0, 1e-3):
        train(make_stage("finetune", ema_length=length), tmp_path / str(length))
    assert result_bytes(tmp_path / "0.001") == result_bytes(tmp_path / "0.0")


def test_averaged_adapters_are_near_the_average_of_their_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, ended = recorded(make_stage("lora", ema_length=LENGTH), tmp_path, monkeypatch)
    pairs = [(key, key.replace("lora_A", "lora_B")) for key in ended if "lora_A" in key]
    assert len(pairs) == 8

    def products(weights: Weights) -> Weights:
        return {a: weights[b] @ weights[a] for a, b in pairs}

    exact = written_out([products(step) for step in steps], LENGTH * 8)
    size = sum(float(value.square().sum()) for value in exact.values()) ** 0.5

    def off(found: Weights) -> float:
        return sum(float((found[a] - exact[a]).square().sum()) for a in exact) ** 0.5 / size

    print(f"of averaged factors {off(products(ended)):.4f}, of the last ones {off(products(steps[-1])):.4f}")
    assert off(products(ended)) < 0.2 * off(products(steps[-1]))


# --- stopping and going on


class Killed(BaseException):
    pass


def killed(stage: Any, out: Path) -> None:
    """Stops the stage in its sixth step, after its checkpoints of steps 2 and 4."""

    def stop(done: float, total: float | None, note: str = "") -> None:
        if done == 6:
            raise Killed

    with pytest.raises(Killed):
        train(stage, out, progress=stop)


@pytest.mark.parametrize("name", ["align", *(pytest.param(n, marks=pytest.mark.slow) for n in ("finetune", "lora"))])
def test_a_stage_that_was_killed_ends_with_the_same_average(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = make_stage(name, save_every=2, ema_length=LENGTH)
    train(stage, tmp_path / "whole")
    for out in ("killed", "forgetful"):
        killed(stage, tmp_path / out)
        assert len(list((tmp_path / out / "checkpoints").glob(f"*/{AVERAGE_FILE}"))) == 2
    train(stage, tmp_path / "killed", resume=True)
    assert result_bytes(tmp_path / "killed") == result_bytes(tmp_path / "whole")
    monkeypatch.setattr(WeightAverage, "load", lambda *_: None)
    train(stage, tmp_path / "forgetful", resume=True)
    assert result_bytes(tmp_path / "forgetful") != result_bytes(tmp_path / "whole")


def test_a_checkpoint_holds_the_weights_that_training_goes_on_from(tmp_path: Path) -> None:
    """A stage with an average and one without reach the same weights from each other's checkpoints."""
    with_it, without = (make_stage("finetune", save_every=2, ema_length=length) for length in (LENGTH, 0.0))
    train(without, tmp_path / "whole")
    killed(with_it, tmp_path / "averaged")
    train(without, tmp_path / "averaged", resume=True)
    assert result_bytes(tmp_path / "averaged") == result_bytes(tmp_path / "whole")


def test_a_checkpoint_without_an_average_is_refused(tmp_path: Path) -> None:
    killed(make_stage("finetune", save_every=2), tmp_path)
    with pytest.raises(LinearizeError, match=r"checkpoint-4: belongs to a stage without ema_length; remove it"):
        train(make_stage("finetune", save_every=2, ema_length=LENGTH), tmp_path, resume=True)


def test_a_damaged_average_costs_the_steps_behind_the_checkpoint_before(tmp_path: Path) -> None:
    stage = make_stage("finetune", save_every=2, ema_length=LENGTH)
    train(stage, tmp_path / "whole")
    killed(stage, tmp_path / "killed")
    newest = tmp_path / "killed/checkpoints/checkpoint-4"
    assert AVERAGE_FILE in checksums.read_sums(newest)
    (newest / AVERAGE_FILE).write_bytes(b"")
    done: list[float] = []
    train(stage, tmp_path / "killed", resume=True, progress=lambda so_far, total, note="": done.append(so_far))
    assert done[0] == 3
    assert result_bytes(tmp_path / "killed") == result_bytes(tmp_path / "whole")


# --- what it costs


def test_the_plan_counts_it() -> None:
    config, sizes = load_chain(folders()[1]).config, Sizes(base=1000, embeddings=100, new=50)
    found = [
        training_bytes(make_stage("finetune", ema_length=length), config, sizes, 77, torch.device("cpu"), torch.float32)
        for length in (0.0, LENGTH)
    ]
    assert [parts.pop("average") for parts in found] == [0, 4 * 77]
    assert found[0] == found[1]
