"""Alignment layer by layer gives the same weights as alignment of the whole model, with one layer of the base in
memory.
"""

from __future__ import annotations

import math
import shutil
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import weights as run_weights
from runs import write_home
from stages import folders, make_stage, result_bytes, train

from liger_convert.cli import main
from liger_convert.config.stages import AlignStage, LearningRates, Lora, MixedSeqLen
from liger_convert.model import linear_layers
from liger_convert.pipeline import single_steps
from liger_convert.training import layerwise
from liger_convert.training.hidden_states import HiddenStates, sums_of
from liger_convert.training.merge import load_chain
from liger_convert.training.trainer import StageTrainer
from liger_convert.utils.errors import BadInput, LinearizeError

LORA = {"learning_rates": LearningRates(mixer=1e-2, lora=2e-2), "lora": Lora(rank=4)}


def stage(**changes: Any) -> Any:
    """A stage that does not clip, as layers are clipped one by one."""
    return make_stage("align", **{"steps": 6, "max_grad_norm": 1e9, "layerwise": True} | changes)


def whole(made: Any) -> Any:
    return made.model_copy(update={"layerwise": False})


def weights(out: Path, family: str = "llama") -> dict[str, torch.Tensor]:
    return load_chain(folders(family)[1], [out / "result"]).state_dict()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        pytest.param("llama", {}, marks=pytest.mark.slow),
        pytest.param(
            "llama",
            {"mixed_seq_lens": [MixedSeqLen(seq_len=16, fraction=0.5)], "accumulation": 2, "ema_length": 0.3},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "llama",
            {"learning_rates": LearningRates(mixer=1e-2), "gradient_checkpointing": True},
            marks=pytest.mark.slow,
        ),
        ("llama", LORA),
        pytest.param("llama", LORA | {"lora": Lora(rank=4, variant="dora")}, marks=pytest.mark.slow),
        ("llama", LORA | {"lora": Lora(rank=4, variant="pissa")}),
        pytest.param("gemma3_text", {}, marks=pytest.mark.slow),
        pytest.param("granite", {"calibrate": False}, marks=pytest.mark.slow),
        pytest.param("stablelm", {}, marks=pytest.mark.slow),
        pytest.param("olmoe", LORA, marks=pytest.mark.slow),
    ],
    ids=["full", "lengths", "mixers", "lora", "dora", "pissa", "gemma3_text", "granite", "stablelm", "olmoe"],
)
def test_layer_by_layer_gives_the_weights_of_aligning_the_whole_model(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    made = stage(**changes)
    stats = {name: train(s, tmp_path / name, family=family) for name, s in (("one", made), ("all", whole(made)))}
    start, one, all_ = (
        load_chain(folders(family)[1]).state_dict(),
        weights(tmp_path / "one", family),
        weights(tmp_path / "all", family),
    )
    assert any((one[name] - start[name]).abs().max() > 1e-3 for name in one)  # it has learned something
    assert {name: float((one[name] - all_[name]).abs().max()) for name in one if not one[name].equal(all_[name])} == {}
    for name in ("steps", "tokens", "trained_parameters", "align_error"):
        assert stats["one"][name] == stats["all"][name]
    assert [loss for _, loss in stats["one"]["loss"]] == pytest.approx([loss for _, loss in stats["all"]["loss"]], 1e-3)
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["result", "stats.json"]


def test_hidden_states_in_another_order_give_other_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(stage(), tmp_path / "right")
    read = HiddenStates.read

    def shuffled(self: HiddenStates, row: int, *args: Any) -> torch.Tensor:
        return read(self, (row + 2) % (self.rows - 1) if "hidden-2" in self.path.name else row, *args)

    monkeypatch.setattr(HiddenStates, "read", shuffled)
    train(stage(), tmp_path / "wrong")
    right, wrong = weights(tmp_path / "right"), weights(tmp_path / "wrong")
    differ = {name for name in right if not right[name].equal(wrong[name])}
    assert differ
    assert all(".layers.2." in name for name in differ)


class Stop(Exception):
    """Ends a stage at some moment, as a killed process would."""


def stopped(made: Any, out: Path, at: float) -> None:
    """Trains until progress reports so much done."""

    def progress(done: float, total: float | None, note: str = "") -> None:
        if total is not None and done >= at:
            raise Stop

    with pytest.raises(Stop):
        train(made, out, progress=progress)


@pytest.mark.parametrize(
    ("at", "changes"),
    [
        pytest.param(3, LORA, id="first layer, lora", marks=pytest.mark.slow),
        pytest.param(17, {}, id="last layer"),
        pytest.param(3, {}, id="first layer", marks=pytest.mark.slow),
        pytest.param(8, {}, id="softmax layer", marks=pytest.mark.slow),
        pytest.param(8, LORA, id="softmax layer, lora", marks=pytest.mark.slow),
        pytest.param(17, LORA, id="last layer, lora", marks=pytest.mark.slow),
        pytest.param(17, LORA | {"lora": Lora(rank=4, variant="dora")}, id="last layer, dora", marks=pytest.mark.slow),
        pytest.param(
            17, LORA | {"lora": Lora(rank=4, variant="pissa")}, id="last layer, pissa", marks=pytest.mark.slow
        ),
    ],
)
def test_a_killed_stage_goes_on_to_the_same_bits(at: int, changes: dict[str, Any], tmp_path: Path) -> None:
    made = stage(save_every=2, **changes)
    want = train(made, tmp_path / "at once")
    stopped(made, tmp_path / "stopped", at)
    assert (tmp_path / "stopped/layerwise/state.json").exists()
    got = train(made, tmp_path / "stopped", resume=True)
    assert result_bytes(tmp_path / "stopped") == result_bytes(tmp_path / "at once")
    assert got["align_error"] == want["align_error"]
    assert not (tmp_path / "stopped/layerwise").exists()


def test_hidden_states_that_changed_on_the_disk_are_refused(tmp_path: Path) -> None:
    made = stage(save_every=2)
    stopped(made, tmp_path, 13)
    path = tmp_path / "layerwise/hidden-2"
    data, sums = path.read_bytes(), sums_of(path).read_bytes()
    size = len(data) // 12
    rest, ten, eleven = data[: 10 * size], data[10 * size : 11 * size], data[11 * size :]
    for damaged in (rest + eleven + ten, rest + ten, rest + ten + b"\0" * size):
        path.write_bytes(damaged)
        if damaged.endswith(ten) and len(damaged) == len(data):  # their sums change places, too
            sums_of(path).write_bytes(sums[:80] + sums[88:] + sums[80:88])
        with pytest.raises(
            LinearizeError, match=r"hidden-2: row \d+ is not what was written there; remove .*layerwise"
        ):
            train(made, tmp_path, resume=True)
        sums_of(path).write_bytes(sums)
    path.write_bytes(data)
    train(made, tmp_path, resume=True)


def test_another_stage_does_not_go_on_from_it(tmp_path: Path) -> None:
    stopped(stage(save_every=2), tmp_path, 8)
    with pytest.raises(LinearizeError, match=r"state.json: belongs to another stage"):
        train(stage(save_every=2, learning_rates=LearningRates(mixer=2e-2)), tmp_path, resume=True)


def test_no_more_than_a_layer_of_the_base_and_an_attention_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_chain(folders()[1]).config
    held: list[tuple[set[str], set[str]]] = []
    made: list[Any] = []

    def loaded(model: Any) -> set[str]:
        return {name for name, parameter in model.named_parameters() if not parameter.is_meta}

    real, init = StageTrainer.training_step, layerwise.LayerwiseStage.__init__

    def keep(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        made.append(self)

    def step(self: StageTrainer, *args: Any, **options: Any) -> Any:
        held.append((loaded(self.model), loaded(made[0].base.model)))
        return real(self, *args, **options)

    monkeypatch.setattr(layerwise.LayerwiseStage, "__init__", keep)
    monkeypatch.setattr(StageTrainer, "training_step", step)
    train(stage(), tmp_path)
    assert len(held) == 6 * len(linear_layers(config))
    for number, names in zip(linear_layers(config), (held[0], held[-1]), strict=True):
        assert all(name.startswith(f"model.layers.{number}.self_attn.") for name in names[0])
        assert all(name.startswith(f"model.layers.{number}.") for name in names[1])
        assert any(".mlp." in name for name in names[1])


def test_a_layer_that_is_done_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Any]] = []
    real = layerwise.LayerwiseStage._student

    def student(self: Any, *args: Any) -> Any:
        assert all(other() is None for other in made)
        new = real(self, *args)
        made.append(weakref.ref(new.get_parameter(f"model.layers.{2 * len(made)}.self_attn.q_proj.weight")))
        return new

    monkeypatch.setattr(layerwise.LayerwiseStage, "_student", student)
    train(stage(), tmp_path)
    assert len(made) == 2


def test_the_gradients_of_all_layers_together_are_no_larger_than_the_norm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    norms: list[float] = []
    clip = torch.nn.utils.clip_grad_norm_

    def watched(parameters: Any, max_norm: float, *args: Any, **options: Any) -> Any:
        parameters = list(parameters)
        total = clip(parameters, max_norm, *args, **options)
        norms.append(float(torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()))
        return total

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", watched)
    train(stage(max_grad_norm=1e-3), tmp_path)
    together = [math.hypot(first, last) for first, last in zip(norms[:6], norms[6:], strict=True)]
    assert together == pytest.approx([1e-3] * 6, rel=1e-3)  # both are clipped


def test_a_disk_without_room_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=10_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(BadInput, match=r"hidden states of this stage need .* of disk, but only 10.0 kB are free"):
        train(stage(), tmp_path)
    assert not list(tmp_path.rglob("hidden-*"))


def test_only_the_attention_of_linear_layers_can_have_adapters() -> None:
    with pytest.raises(ValueError, match="layerwise holds only the attention"):
        stage(**LORA | {"lora": Lora(rank=4, targets="all")})
    assert isinstance(stage(**LORA), AlignStage)


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"))],
)
def test_hidden_states_are_read_as_they_were_written(device: str, tmp_path: Path) -> None:
    x_NTC = torch.randn(7, 3, 5, device=device).to(torch.bfloat16)
    with HiddenStates(tmp_path / "x", 7, 3, 5, torch.bfloat16, on_gpu=device == "cuda") as states:
        for row in (0, 2, 4, 6):
            states.write(row, x_NTC[row : row + 2])
        states.flush()
        assert all(states.read(row, 2).equal(x_NTC[row : row + 2]) for row in (0, 2, 1, 4))
        assert states.read(6, 1).device.type == device
        with pytest.raises(ValueError, match=r"should be torch\.bfloat16"):
            states.write(0, x_NTC.float())


@pytest.mark.parametrize("piece", [8, 16, 24, 4096])
def test_rows_are_read_and_checked_in_pieces_of_any_size(
    piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row has 30 bytes here, so pieces end within it and at its end. A change of any of its bytes is noticed."""
    monkeypatch.setattr("liger_convert.training.hidden_states.PIECE", piece)
    x_NTC = torch.randn(4, 3, 5).to(torch.bfloat16)
    x_NTC[1] = -torch.inf  # sums of 64-bit words that do not fit into 64 bits
    path = tmp_path / "x"
    with HiddenStates(path, 4, 3, 5, torch.bfloat16) as states:
        states.write(0, x_NTC)
        states.flush()
        assert states.read(0, 4).equal(x_NTC)
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        with HiddenStates(path, 4, 3, 5, torch.bfloat16) as states:
            assert states.read(0, at // 30).equal(x_NTC[: at // 30])
            with pytest.raises(LinearizeError, match=f"row {at // 30} is not what was written there"):
                states.read(0, 4)


@pytest.mark.slow
def test_a_run_that_was_stopped_within_a_layer_ends_with_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {"mixer": 1e-2, "attention": 1e-3}
    write_home(tmp_path, [{"kind": "align", "layerwise": True, "learning_rates": rates, "save_every": 2}])
    monkeypatch.chdir(tmp_path)
    assert main.main(["run", "recipe.yaml", "--out", "whole"]) == 0
    real = single_steps.show_progress

    @contextmanager
    def progress(name: str) -> Iterator[Any]:
        with real(name) as report:

            def watched(done: float, total: float | None, note: str = "") -> None:
                if name == "1-align" and total is not None and done >= 15:
                    raise KeyboardInterrupt
                report(done, total, note)

            yield watched

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(single_steps, "show_progress", progress)
        assert main.main(["run", "recipe.yaml", "--out", "stopped"]) == 130
    assert (tmp_path / "stopped/steps/1-align/layerwise/hidden-2").exists()
    assert main.main(["run", "recipe.yaml", "--out", "stopped", "--resume"]) == 0
    assert run_weights(tmp_path / "stopped") == run_weights(tmp_path / "whole")
