"""Each stage learns what it should, leaves the rest alone, and ends the same however it was interrupted or split."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from stages import CPU, SEQ_LEN, STAGES, documents, every_stage, files_of, folders, make_stage, result_bytes, train
from tiny_models import build
from torch import Tensor

from liger_convert.config.stages import LearningRates, Lora, Stage
from liger_convert.data.packed_rows import IGNORED, collate, pack
from liger_convert.mixers import resolve_spec
from liger_convert.mixers.linear.gateloop import GateLoop
from liger_convert.model import parameter_group
from liger_convert.model.loading import linearize_base, load_base
from liger_convert.training import finetune, losses, sharded_checkpoint, trainer
from liger_convert.training.merge import load_chain
from liger_convert.training.student import add_lora
from liger_convert.training.trainer import StageTrainer, freeze, optimizer_groups
from liger_convert.utils.errors import BadInput, LinearizeError

# --- the losses


def reference_sum(logits: Tensor, teacher: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Cross-entropy and KL, summed over the positions whose next token is labeled, written out."""
    keep = labels[:, 1:] != IGNORED
    student, taught, following = logits[:, :-1][keep], teacher[:, :-1][keep], labels[:, 1:][keep]
    p, log_q = (taught / temperature).softmax(-1), (student / temperature).log_softmax(-1)
    kl = (p * (p.log() - log_q)).sum() * temperature**2
    return F.cross_entropy(student, following, reduction="sum"), kl


def test_chunked_losses_and_their_gradients_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, teacher = (torch.randn(3, 11, 17, generator=generator, dtype=torch.float32) for _ in range(2))
    labels = torch.randint(0, 17, (3, 11), generator=generator)
    labels[torch.rand(3, 11, generator=generator) < 0.3] = IGNORED
    next_N = losses.next_tokens(labels)
    logits.requires_grad_()
    expected_ce, expected_kl = reference_sum(logits, teacher, labels, 1.7)
    expected = expected_ce + 0.5 * expected_kl
    (expected_grad,) = torch.autograd.grad(3 * expected, logits)
    for chunk in (17 * 4, 17 * 1000, 1):
        monkeypatch.setitem(losses.CHUNK_LOGITS, "cpu", chunk)

        def loss(piece_NV: Tensor, at: slice) -> Tensor:
            kl = losses.kl_divergence(piece_NV, teacher.flatten(0, 1)[at], next_N[at], 1.7)
            return losses.cross_entropy(piece_NV, next_N[at]) + 0.5 * kl

        total = losses.summed(logits.flatten(0, 1), loss)
        (grad,) = torch.autograd.grad(3 * total, logits)
        torch.testing.assert_close(total, expected)
        torch.testing.assert_close(grad, expected_grad)


@pytest.mark.parametrize("which", ["base", "linearized"])
def test_a_packed_row_is_its_documents_apart(which: str) -> None:
    base, linearized = folders()
    model = load_base(base, CPU, torch.float32) if which == "base" else load_chain(linearized).eval()
    packed = pack(documents(), SEQ_LEN, 8 * SEQ_LEN)
    batch = collate([packed[i] for i in range(8)])
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        assert (batch["position_ids"] == 0).sum() > 12
        for row, item in enumerate(packed):
            starts = [*(item["position_ids"] == 0).nonzero().flatten().tolist(), SEQ_LEN]
            for begin, end in itertools.pairwise(starts):
                alone = model(input_ids=item["input_ids"][None, begin:end], use_cache=False).logits[0]
                torch.testing.assert_close(logits[row, begin:end], alone, atol=1e-4, rtol=1e-4)


# --- learning


@every_stage
def test_the_loss_goes_down_and_only_groups_with_a_rate_change(name: str, tmp_path: Path) -> None:
    rates = STAGES[name]["learning_rates"] if name == "lora" else LearningRates(mixer=1e-2, attention=1e-2)
    stage = make_stage(name, steps=24, learning_rates=rates, warmup_ratio=0.1)
    stats = train(stage, tmp_path)
    curve = [loss for _, loss in stats["loss"]]
    assert np.mean(curve[-4:]) < 0.8 * np.mean(curve[:4])
    assert stats["tokens"] == stage.tokens
    before, after = (load_chain(folders()[1], results) for results in ([], [tmp_path / "result"]))
    new = after.state_dict()
    changed = {key for key, value in before.state_dict().items() if not value.equal(new[key])}
    groups = {key: parameter_group(key, before.config) for key in new}
    assert {groups[key] for key in changed} == {"mixer", "attention"}
    assert changed >= {key for key, group in groups.items() if group == "attention" and "proj" in key}


def test_alignment_lowers_the_error_of_every_layer(tmp_path: Path) -> None:
    errors = train(make_stage("align", steps=24), tmp_path)["align_error"]
    assert len(errors["before"]) == 2
    assert all(after < 0.8 * before for before, after in zip(errors["before"], errors["after"]))


def test_without_a_rate_the_mixers_of_a_lora_stage_are_frozen(tmp_path: Path) -> None:
    train(make_stage("lora", learning_rates=LearningRates(lora=1e-2)), tmp_path)
    before, after = (load_chain(folders()[1], results).state_dict() for results in ([], [tmp_path / "result"]))
    assert all(value.equal(after[key]) for key, value in before.items() if ".mixer." in key)
    assert not before["model.layers.0.self_attn.q_proj.weight"].equal(after["model.layers.0.self_attn.q_proj.weight"])


def test_the_base_is_loaded_only_where_it_teaches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("this stage has no teacher")

    monkeypatch.setattr("liger_convert.training.stage.load_pretrained", refuse)
    train(make_stage("finetune", steps=1), tmp_path / "finetune")
    train(make_stage("distill", steps=1, kl_weight=0.0), tmp_path / "distill")


def test_rates_and_decay_by_group() -> None:
    model = load_chain(folders()[1])
    rates = {"mixer": 1e-2, "body": 1e-4}
    freeze(model, rates)
    groups = {(g["lr"], g["weight_decay"]): g["params"] for g in optimizer_groups(model, rates, weight_decay=0.1)}
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert {key: len(params) > 0 for key, params in groups.items()} == dict.fromkeys(
        [(1e-2, 0.0), (1e-4, 0.0), (1e-4, 0.1)], True
    )
    assert all(".mixer." in names[p] for p in groups[1e-2, 0.0])
    assert all("norm" in names[p] for p in groups[1e-4, 0.0])
    assert all("norm" not in names[p] for p in groups[1e-4, 0.1])
    lora = add_lora(load_chain(folders()[1]), Lora(), train_mixer=False)
    (adapters,) = optimizer_groups(lora, {"lora": 2e-4}, weight_decay=0.1)
    assert (adapters["lr"], adapters["weight_decay"], len(adapters["params"])) == (2e-4, 0.1, 2 * 2 * 4)


def test_what_a_mixer_says_is_slow_learns_at_a_part_of_its_rate() -> None:
    model = build("llama", type="gateloop")
    freeze(model, {"mixer": 1e-2})
    names = {parameter: name for name, parameter in model.named_parameters()}
    rate = {names[p]: g["lr"] for g in optimizer_groups(model, {"mixer": 1e-2}, 0.0) for p in g["params"]}
    assert {name.rpartition(".")[2] for name, r in rate.items() if r != 1e-2} == {"phase_GDC"}
    assert {r for r in rate.values() if r != 1e-2} == {1e-2 * GateLoop.slow_parameters["phase_GDC"]}


def test_unknown_lora_targets_are_refused(tmp_path: Path) -> None:
    stage = make_stage("lora", lora=Lora(targets=["q_proj", "query"]))
    with pytest.raises(BadInput, match=r"lora\.targets: no projection is called 'query'; use some of .*q_proj"):
        train(stage, tmp_path)


@pytest.mark.parametrize(("precision", "dtype"), [("bfloat16", torch.bfloat16), ("float32", torch.float32)])
def test_precision_is_that_of_the_products_and_weights_stay_float32(
    precision: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def spy(logits_NV: Tensor, next_N: Tensor) -> Tensor:
        seen.append(logits_NV.dtype)
        return losses.cross_entropy(logits_NV, next_N)

    monkeypatch.setattr(finetune, "cross_entropy", spy)
    train(make_stage("finetune", steps=2), tmp_path, precision=precision)
    assert set(seen) == {dtype}
    (saved,) = files_of(tmp_path)
    assert {tensor.dtype for tensor in load_file(saved).values()} == {torch.float32}


@pytest.mark.parametrize("name", ["align", "finetune"])
def test_gradient_checkpointing_changes_nothing(name: str, tmp_path: Path) -> None:
    curves = [
        train(make_stage(name, steps=3, gradient_checkpointing=on), tmp_path / str(on))["loss"] for on in (False, True)
    ]
    np.testing.assert_allclose(*curves, rtol=1e-5)


# --- splitting and stopping


@every_stage
def test_accumulated_batches_have_the_gradient_of_the_whole(name: str, tmp_path: Path) -> None:
    """Documents have different lengths, so micro-batches differ in how many tokens they train on. A mean of their means
    would be wrong."""
    lora = {"lora": Lora(rank=4)} if name == "lora" else {}
    trained = []
    for batch, accumulation in ((4, 1), (2, 2), (1, 4)):
        stage = make_stage(
            name, steps=2, batch=batch, accumulation=accumulation, warmup_ratio=0.0, schedule="constant", **lora
        )
        trained.append(sgd_step(stage, tmp_path / str(batch)))
    assert len(trained[0]) > 10
    for other in trained[1:]:
        for key, value in trained[0].items():
            torch.testing.assert_close(other[key], value, atol=1e-6, rtol=1e-3)


def sgd_step(stage: Stage, out: Path) -> dict[str, Tensor]:
    """The change of the weights in two steps of plain gradient descent. Adam's would not show the scale of the
    gradient."""
    from liger_convert.training import stage as module

    class Plain(StageTrainer):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            self.start = {name: p.detach().clone() for name, p in self._trained().items()}
            self.optimizer = torch.optim.SGD(self._trained().values(), lr=1e-2)
            kept.append(self)

    kept: list[Plain] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "StageTrainer", Plain)
        train(stage, out)
    return {name: p.detach() - kept[0].start[name] for name, p in kept[0]._trained().items()}


class Killed(BaseException):
    pass


@pytest.mark.parametrize(
    ("name", "family"),
    [*((name, "llama") for name in STAGES), ("finetune", "mixtral"), ("finetune", "olmoe"), ("lora", "phi3")],
)
def test_a_stage_that_was_killed_ends_with_the_same_bytes(name: str, family: str, tmp_path: Path) -> None:
    stage = make_stage(name, steps=7, accumulation=2, save_every=2)

    def kill(done: float, total: float, note: str) -> None:
        if done == 5:
            raise Killed

    whole = train(stage, tmp_path / "whole", family=family)
    with pytest.raises(Killed):
        train(stage, tmp_path / "killed", family=family, progress=kill)
    assert not (tmp_path / "killed" / "result").exists()
    steps = []
    resumed = train(
        stage, tmp_path / "killed", family=family, resume=True, progress=lambda done, total, note: steps.append(done)
    )
    assert steps == [5, 6, 7]
    assert resumed["loss"] == whole["loss"]
    assert result_bytes(tmp_path / "whole") == result_bytes(tmp_path / "killed")
    assert not (tmp_path / "killed" / "checkpoints").exists()


def test_the_seconds_of_a_stage_include_those_before_it_was_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, later = time.monotonic, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now() + later)

    def slow_then_killed(done: float, total: float | None, note: str) -> None:
        nonlocal later
        later = 1000.0
        if done == 5:
            raise Killed

    stage = make_stage("lora", save_every=2)
    with pytest.raises(Killed):
        train(stage, tmp_path, progress=slow_then_killed)
    assert 1000 < train(stage, tmp_path, resume=True)["seconds"] < 2000


@pytest.mark.parametrize("name", ["finetune", "lora"])
def test_an_optimizer_that_another_device_has_resumes_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This simulates a GPU, to which the optimizer's state is moved tensor by tensor. The control gets no state."""
    stage = make_stage(name, save_every=2)
    train(stage, tmp_path / "whole")

    def killed(done: float, total: float | None, note: str) -> None:
        if done == 5:
            raise Killed

    monkeypatch.setattr(trainer, "READ_WHOLE", {})
    for folder in ("resumed", "control"):
        with pytest.raises(Killed):
            train(stage, tmp_path / folder, progress=killed)
        train(stage, tmp_path / folder, resume=True)
        monkeypatch.setattr(sharded_checkpoint, "load_whole_optimizer", lambda *_: None)
    assert result_bytes(tmp_path / "resumed") == result_bytes(tmp_path / "whole")
    assert result_bytes(tmp_path / "control") != result_bytes(tmp_path / "whole")


def test_a_finished_stage_is_not_trained_again(tmp_path: Path) -> None:
    stage = make_stage("lora", steps=1)
    stats = train(stage, tmp_path)
    assert json.loads(json.dumps(stats)) == json.loads((tmp_path / "stats.json").read_text())

    def refuse(*_: Any) -> None:
        raise AssertionError("trained again")

    assert train(stage, tmp_path, resume=True, progress=refuse)["loss"]
    with pytest.raises(BadInput, match="result: already exists"):
        train(stage, tmp_path)


@pytest.mark.parametrize("name", ["align", "distill", "lora"])
def test_a_diverged_loss_stops_the_stage_and_saves_nothing(name: str, tmp_path: Path) -> None:
    second = "lora" if name == "lora" else "attention"
    rates = LearningRates().model_copy(update={"mixer": 1e30, second: 1e30})  # a recipe would be refused
    with pytest.raises(LinearizeError, match=r"diverged: the (loss|gradient norm) is (nan|inf) at step \d of 8"):
        train(make_stage(name, learning_rates=rates, warmup_ratio=0.0), tmp_path)
    assert not (tmp_path / "result").exists()


def test_a_trained_model_keeps_its_cache_switched_on(tmp_path: Path) -> None:
    train(make_stage("finetune", steps=1), tmp_path)
    assert json.loads((tmp_path / "result" / "model" / "config.json").read_text())["use_cache"] is True


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["align", "distill", "finetune"])
def test_every_stage_trains_the_routers_of_memories_towards_balance(
    name: str, checkpointing: bool, tmp_path: Path
) -> None:
    # one memory a token: its weight is 1 whatever the router says, which so learns from the balance alone
    spec = {"type": "mom", "memories": 3, "active": 1, "window": 6, "sinks": 2}
    stage = make_stage(name, steps=2, gradient_checkpointing=checkpointing)
    moved = {}
    for balance in (0.0, 1.0):
        plan = {"format": 2, "mixers": {"main": resolve_spec(spec | {"balance": balance})}, "layers": ["main"] * 3}
        folder = tmp_path / str(balance)
        linearize_base(folders()[0], plan).save_pretrained(folder)
        train(stage, folder / "out", model=folder)
        (before,), (after,) = (folder.glob("*.safetensors"), (folder / "out" / "result").rglob("*.safetensors"))
        old, new = load_file(before), load_file(after)
        moved[balance] = {not torch.equal(old[name], new[name]) for name in old if name.endswith("router_GNC")}
    assert moved == {0.0: {False}, 1.0: {True}}
