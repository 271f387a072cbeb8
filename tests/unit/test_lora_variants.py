"""Each variant of adapters starts as the base, trains, is saved, goes on, and folds into the base as peft folds it."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import shared_folder
from safetensors.torch import load_file, save_file
from stages import folders, make_stage, result_bytes, train

from liger_convert.config.stages import LearningRates, Lora
from liger_convert.io.checkpoint import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from liger_convert.model.loading import load_linearized
from liger_convert.training import pissa
from liger_convert.training.merge import Chain, load_chain, merge_results
from liger_convert.training.student import add_lora, count_trained
from liger_convert.utils.errors import BadInput

VARIANTS: Any = ["lora", "rslora", "dora", "pissa"]
every_variant = pytest.mark.parametrize("variant", VARIANTS)
RANK = 4
TOKENS = torch.randint(3, 101, (2, 24), generator=torch.Generator().manual_seed(0))
Q = "model.layers.0.self_attn.q_proj"


def stage(variant: Any, **changes: Any) -> Any:
    lora = Lora(variant=variant, rank=RANK, targets=changes.pop("targets", "linearized"))
    return make_stage("lora", **{"steps": 4, "lora": lora} | changes)


@functools.cache
def trained(variant: Any) -> Path:
    """The result of a stage."""
    out = shared_folder("liger-test")
    train(stage(variant), out)
    return out / "result"


def weights(*results: Path, **changes: Any) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = load_chain(folders(**changes)[1], results).state_dict()
    return state


@every_variant
@torch.no_grad()
def test_it_starts_as_the_base(variant: Any, tmp_path: Path) -> None:
    """Rounding changes a logit by a few parts in 10^7 of the largest one. An adapter of random numbers changes it by
    more than a tenth."""
    plain = load_linearized(folders()[1], dtype=torch.float32).eval()
    want = plain(input_ids=TOKENS, use_cache=False).logits
    model = add_lora(plain, Lora(variant=variant, rank=RANK, targets="all"), train_mixer=True)
    if variant == "pissa":
        pissa.start(model, tmp_path, resumes=False)
    got = model.eval()(input_ids=TOKENS, use_cache=False).logits
    torch.testing.assert_close(got, want, atol=1e-5 * float(want.abs().max()), rtol=0)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.add_(torch.randn_like(parameter))
    assert (model(input_ids=TOKENS, use_cache=False).logits - want).abs().max() > 0.1 * want.abs().max()


@every_variant
def test_it_goes_on_to_the_bits_of_a_stage_that_nothing_stopped(
    variant: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This also holds if a decomposition would not give the same digits again."""

    def stop(done: float, total: float | None, note: str = "") -> None:
        if done == 3:
            raise KeyboardInterrupt

    made = stage(variant, save_every=2)
    train(made, tmp_path / "through")
    with pytest.raises(KeyboardInterrupt):
        train(made, tmp_path / "stopped", progress=stop)
    assert (tmp_path / "stopped/checkpoints" / pissa.START).exists() == (variant == "pissa")
    monkeypatch.setattr(pissa, "INIT", "pissa_niter_0")
    shutil.copytree(tmp_path / "stopped", tmp_path / "anew")
    train(made, tmp_path / "stopped", resume=True)
    assert result_bytes(tmp_path / "stopped") == result_bytes(tmp_path / "through")
    assert sorted(path.name for path in (tmp_path / "stopped").iterdir()) == ["result", "stats.json"]
    if variant == "pissa":  # the control
        shutil.rmtree(tmp_path / "anew/checkpoints")
        train(made, tmp_path / "anew", resume=True)
        assert result_bytes(tmp_path / "anew") != result_bytes(tmp_path / "through")


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?")])
def test_checkpoints_without_what_pissa_started_from_are_not_used(
    damage: Callable[[Path], object], tmp_path: Path, capsys: Any
) -> None:
    def stop(done: float, total: float | None, note: str = "") -> None:
        if done == 3:
            raise KeyboardInterrupt

    made, steps = stage("pissa", save_every=2), []
    with pytest.raises(KeyboardInterrupt):
        train(made, tmp_path, progress=stop)
    damage(tmp_path / "checkpoints" / pissa.START / pissa.FILE)
    train(made, tmp_path, resume=True, progress=lambda done, total, note="": steps.append(done))
    assert steps[0] == 1
    assert "are useless without it, so it starts again" in capsys.readouterr().err.replace("\n", " ")


@every_variant
def test_a_tensor_at_a_time_it_folds_as_peft_folds_it(variant: Any) -> None:
    """Results are equal to the last bit, also after another adapter."""
    first, second = trained("rslora"), trained(variant)
    for results in ([second], [first, second]):
        want, chain = weights(*results), Chain(folders()[1], results)
        for name in chain.checkpoint.tensors:
            assert chain.read(name).equal(want[name]), name
    start, end = weights(), weights(second)
    moved = {name for name in start if not start[name].equal(end[name])}
    assert f"{Q}.weight" in moved
    assert "model.layers.2.mlp.down_proj.weight" in moved
    assert not any(".layers.1." in name for name in moved)  # the softmax layer


def test_what_pissa_learned_folds_into_the_base_that_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training changes (W - s B0 A0) + s B A, and merging computes W + s (B A - B0 A0). A sum of n products is off by
    at most n roundings of the sum of their sizes. The control leaves out the initial adapters."""
    found: dict[str, torch.Tensor] = {}
    become_changes = pissa.become_changes

    def watched(model: Any, checkpoints: Path) -> None:
        module, key = model.get_submodule(f"base_model.model.{Q}"), f"base_model.model.{Q}"
        start = load_file(checkpoints / pissa.START / pissa.FILE)
        a, b, scale = module.lora_A.default.weight, module.lora_B.default.weight, module.scaling["default"]
        found["model"] = (module.base_layer.weight + module.get_delta_weight("default")).detach()
        sizes = b.abs() @ a.abs() + start[f"{key}.B"].abs() @ start[f"{key}.A"].abs()
        found["sizes"] = (scale * sizes + module.base_layer.weight.abs()).detach()
        become_changes(model, checkpoints)

    monkeypatch.setattr(pissa, "become_changes", watched)
    train(stage("pissa"), tmp_path)
    result = tmp_path / "result"
    bound = 2 * (2 * RANK + 4) * 2**-24 * found["sizes"]
    start, end = weights()[f"{Q}.weight"], weights(result)[f"{Q}.weight"]
    assert ((end - found["model"]).abs() <= bound).all()
    assert (end - start).abs().max() > 100 * bound.max()
    config = json.loads((result / "adapter" / ADAPTER_CONFIG).read_text())
    assert (config["r"], config["lora_alpha"], config["init_lora_weights"]) == (2 * RANK, 32.0, True)
    tensors = load_file(result / "adapter" / ADAPTER_WEIGHTS)
    for name in [name for name in tensors if "lora_B" in name]:
        tensors[name][:, RANK:] = 0
    save_file(tensors, result / "adapter" / ADAPTER_WEIGHTS)
    assert ((weights(result)[f"{Q}.weight"] - found["model"]).abs() > bound).any()


@pytest.mark.parametrize(("variant", "option"), [("dora", "use_dora"), ("rslora", "use_rslora")])
def test_folded_as_a_plain_adapter_it_would_be_another_model(variant: Any, option: str, tmp_path: Path) -> None:
    result = Path(shutil.copytree(trained(variant), tmp_path / "result"))
    start, right = weights()[f"{Q}.weight"], weights(result)[f"{Q}.weight"]
    path = result / "adapter" / ADAPTER_CONFIG
    config = json.loads(path.read_text())
    assert config[option] is True
    path.write_text(json.dumps(config | {option: False}))
    tensors = load_file(result / "adapter" / ADAPTER_WEIGHTS)
    plain = {name: x for name, x in tensors.items() if "magnitude" not in name}
    assert (len(plain) < len(tensors)) == (variant == "dora")
    save_file(plain, result / "adapter" / ADAPTER_WEIGHTS)
    wrong = weights(result)[f"{Q}.weight"]
    assert (wrong - right).norm() > 0.05 * (right - start).norm()


@every_variant
def test_tied_embeddings_stay_tied_and_as_they_were(variant: Any, tmp_path: Path) -> None:
    tied = {"tie_word_embeddings": True}
    train(stage(variant, targets="all", steps=2), tmp_path, changes=tied)
    merge_results(folders(**tied)[1], [tmp_path / "result"], tmp_path / "merged")
    merged = load_linearized(tmp_path / "merged", dtype=torch.float32)
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
    want = weights(tmp_path / "result", **tied)
    assert all(want[name].equal(x) for name, x in merged.state_dict().items())
    assert merged.lm_head.weight.equal(weights(**tied)["lm_head.weight"])


def test_pissa_is_refused_on_a_head_that_is_tied(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"lora\.targets: pissa changes the base, and lm_head is also the embeddings"):
        train(stage("pissa", targets=["lm_head"]), tmp_path, changes={"tie_word_embeddings": True})


def test_pissa_is_refused_with_more_vectors_than_there_are(tmp_path: Path) -> None:
    made = make_stage("lora", lora=Lora(variant="pissa", rank=17))
    with pytest.raises(BadInput, match=r"lora\.rank: pissa takes 17 .* but model\.layers\.0\.self_attn\.k_proj has 16"):
        train(made, tmp_path)
    assert not list(tmp_path.iterdir())


@every_variant
@pytest.mark.parametrize("targets", ["attention", "linearized", "all", ["q_proj", "down_proj"]])
def test_what_is_counted_is_what_peft_trains(variant: Any, targets: Any) -> None:
    model = load_linearized(folders()[1], dtype=torch.float32)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for rates in (LearningRates(lora=1e-3), LearningRates(mixer=1e-3, lora=1e-3)):
        made = stage(variant, targets=targets, learning_rates=rates)
        fresh = load_linearized(folders()[1], dtype=torch.float32)
        tuned = add_lora(fresh, made.lora, train_mixer=rates.mixer is not None)
        want = sum(p.numel() for p in tuned.parameters() if p.requires_grad)
        assert count_trained(made, model.config, shapes) == want


def test_a_projection_with_magnitudes_keeps_both_parts_of_its_output() -> None:
    """`training_bytes` counts both. Without autocast, as here, a tenth more is kept."""
    ids = torch.randint(3, 101, (1, 50), generator=torch.Generator().manual_seed(0))

    def kept(variant: Any) -> int:
        model = add_lora(load_linearized(folders()[1]), Lora(variant=variant, targets="all"), train_mixer=False)
        seen: dict[int, int] = {}

        def pack(x: torch.Tensor) -> torch.Tensor:
            if ids.numel() in x.shape:
                seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
                held.append(x)  # so that no other takes its place
            return x

        held: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            model.train()(ids, use_cache=False)
        return sum(seen.values())

    outputs = 3 * (32 + 16 + 16 + 32 + 48 + 48 + 32)
    assert kept("dora") - kept("lora") == pytest.approx(2 * 4 * outputs * ids.numel(), rel=0.15)
