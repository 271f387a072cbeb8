"""Processes that share the weights of a stage, each a slice, train as one process does that holds them all.

Each launch imports torch in every process, so several stages share one.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import distance, learned, one_thread, told
from peaks import TOLD
from ranks import do
from safetensors.torch import load_file
from stages import files_of, folders, result_bytes

from liger_convert.io import checksums
from liger_convert.io.checkpoint import WEIGHTS, load_config
from liger_convert.training import sharded_checkpoint
from liger_convert.training.merge import load_chain
from liger_convert.training.sharding import without_weights

EVERY = {"steps": 4, "batch": 2, "accumulation": 2, "warmup_ratio": 0.0, "schedule": "constant"}
ADAM = EVERY | {"ema_length": 0.2, "weight_decay": 0.1, "max_grad_norm": 0.1}
KEPT = {"keep_gathered": True}
TIED = {"tie_word_embeddings": True}
CASES: dict[str, dict[str, Any]] = {
    **{name: {"name": name} for name in ("align", "align-lora", "distill", "finetune", "distill-lora")},
    # its mixer is called twice in a layer
    "shifted": {"name": "distill", "options": {"changes": {"mixer": "shifted"}}},
    "shifted-recomputed": {
        "name": "distill",
        "fields": EVERY | {"gradient_checkpointing": True},
        "options": {"changes": {"mixer": "shifted"}},
    },
    "tied": {"name": "distill", "options": {"changes": TIED}},
    "tied-align": {"name": "align", "options": {"changes": TIED}},
    "tied-lora": {"name": "distill-lora", "options": {"changes": TIED}},
    "recomputed": {"name": "distill", "fields": EVERY | {"gradient_checkpointing": True}},
    "recomputed-align": {"name": "align", "fields": EVERY | {"gradient_checkpointing": True}},
    "split": {"name": "distill", "fields": EVERY | {"accumulation": 1, "batch": 4}},
    **{f"compiled-{name}": {"name": name, "compiled": True} for name in ("align", "distill-lora")},
    "adam": {"name": "distill", "fields": ADAM, "plain": False},
    **{f"gathered-{name}": {"name": name, "options": KEPT} for name in ("align", "distill", "distill-lora")},
    "gathered-recomputed": {
        "name": "distill-lora",
        "fields": EVERY | {"gradient_checkpointing": True},
        "options": KEPT,
    },
}
# in bfloat16, of a base whose weights are
HALF = {"precision": "bfloat16", "changes": {"dtype": "bfloat16"}}
VARIANTS: dict[str, dict[str, Any]] = {v: {"name": "distill-lora", "variant": v} for v in ("dora", "pissa")}
HALVES: dict[str, dict[str, Any]] = {
    "half-lora": {"name": "distill-lora", "options": HALF},
    "half-align": {"name": "align", "options": HALF},
    "half": {"name": "distill", "options": HALF},
    "half-dora": VARIANTS["dora"] | {"options": HALF},
    # mixers are units of their own, and gathered before anything in their layers is
    "half-shifted-recomputed": {
        "name": "distill",
        "fields": EVERY | {"gradient_checkpointing": True},
        "options": HALF | {"changes": HALF["changes"] | {"mixer": "shifted"}},
    },
    "half-compiled": {"name": "distill", "compiled": True, "options": HALF},
}
CONTROLS = {f"{name}-same": {"name": name, "same_rows": True} for name in ("align", "distill", "distill-lora")}
CONTROLS["half-dora-rounded"] = HALVES["half-dora"] | {"rounded": True}
KINDS = ["align", "lora", "finetune", "pissa-lora"]
OF_KIND: dict[str, Any] = {"pissa-lora": {"name": "distill-lora", "variant": "pissa"}}
RESUMED = {"steps": 8, "batch": 2, "accumulation": 2, "save_every": 2, "ema_length": 0.2}


def job(out: Path, case: dict[str, Any], shard: bool) -> dict[str, Any]:
    options = case.get("options", {}) | {"shard": shard}
    return {"plain": True, "fields": EVERY} | case | {"out": str(out), "options": options}


def changes(case: dict[str, Any]) -> dict[str, Any]:
    return case.get("options", {}).get("changes", {})


@pytest.fixture(scope="module", autouse=True)
def on_one_thread() -> Any:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A case in one process: its statistics, what it learned, and how far rounding alone leads from there."""
    folder, found = tmp_path_factory.mktemp("one"), {}

    def trained(name: str) -> Any:
        if name not in found:
            case = (CASES | HALVES | VARIANTS)[name] | {"compiled": False}
            stats = do(job(folder / name, case, shard=False))
            apart = case | {"fields": case.get("fields", EVERY) | {"batch": 1, "accumulation": 4}}
            do(job(folder / f"{name}-apart", apart, shard=False))
            whole = learned(folder / name, **changes(case))
            rounding = distance(learned(folder / f"{name}-apart", **changes(case)), whole)
            found[name] = stats, whole, rounding
        return found[name]

    return trained


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """All cases in two processes that share the weights, and some with a mistake."""
    folder = tmp_path_factory.mktemp("two")
    found: dict[str, Any] = {}
    for cases in (CASES, HALVES | CONTROLS):  # two launches, each of which has a limit
        found |= told(2, folder, [job(folder / name, case, shard=True) for name, case in cases.items()])
    return folder, found


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_processes_that_share_the_weights_learn_what_one_does(one: Any, two: Any, name: str) -> None:
    """Sums are taken in another order. That has about the same effect as processing a step's rows one by one. The
    control trains all processes on the rows of the first."""
    (stats, alone, rounding), (folder, several) = one(name), two
    ours = several[name]
    assert 0 < rounding < 1e-4
    assert distance(learned(folder / name, **changes(CASES[name])), alone) < 10 * rounding
    assert ours["sharded"]
    assert not stats["sharded"]
    same = ("steps", "tokens", "epochs", "trained_parameters")
    assert [ours[key] for key in same] == [stats[key] for key in same]
    assert [loss for _, loss in ours["loss"]] == pytest.approx([loss for _, loss in stats["loss"]], rel=1e-4)
    if "align_error" in stats:
        assert ours["align_error"]["after"] == pytest.approx(stats["align_error"]["after"], rel=1e-4)
    if f"{name}-same" in CONTROLS:
        assert distance(learned(folder / f"{name}-same"), alone) > 1000 * rounding


@pytest.mark.slow
def test_four_processes_that_share_the_weights_learn_what_one_does(one: Any, tmp_path: Path) -> None:
    """Each has a row of each step. Of tensors with two rows, such as those of two heads, two of them hold nothing. The
    control trains all processes on the rows of the first."""
    cases = {"align": CASES["align"], "align-same": CONTROLS["align-same"]}
    several = told(4, tmp_path, [job(tmp_path / name, case, shard=True) for name, case in cases.items()])
    _, alone, rounding = one("align")
    assert several["align"]["sharded"]
    assert distance(learned(tmp_path / "align"), alone) < 10 * rounding
    assert distance(learned(tmp_path / "align-same"), alone) > 1000 * rounding


@pytest.mark.slow
def test_variants_of_adapters_learn_what_they_do_in_one_process(one: Any, tmp_path: Path) -> None:
    told(2, tmp_path, [job(tmp_path / name, case, shard=True) for name, case in VARIANTS.items()])
    for name in VARIANTS:
        _, alone, rounding = one(name)
        assert 0 < rounding < 1e-4
        assert distance(learned(tmp_path / name), alone) < 10 * rounding


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_process_holds_half_of_the_weights(one: Any, two: Any, name: str) -> None:
    """Sizes that do not divide, such as 101 rows, are an exception. An alignment does not run the base's head, so no
    GPU holds it; here it stays in the memory of the first process, which has read it. Where layers stay gathered, each
    process holds the whole base until the stage is done."""
    whole, ours = one(name)[0]["held"], two[1][name]["held"]
    assert 0.5 <= ours["model"] / whole["model"] < 0.51
    if "base" in whole and "align" not in name:
        share = ours["base"] / whole["base"]
        assert share == 1 if name.startswith("gathered") else 0.5 <= share < 0.51


@pytest.mark.slow
def test_in_bfloat16_mixers_stay_float32_and_what_is_frozen_does_not(one: Any, two: Any) -> None:
    """With the base's weights frozen, both compute exactly the same products. Embeddings and norms that are trained are
    gathered in bfloat16, while one process uses them in float32. The difference is as large as one digit of bfloat16.

    The control gathers adapters and magnitudes in bfloat16.
    """
    folder, several = two
    for name, case in HALVES.items():
        stats, alone, rounding = one(name)
        if not case.get("compiled"):
            assert several[name]["mixers_computed_in"] == ["float32"]
        dtypes = several[name]["held"]["dtypes"]
        assert dtypes["mixer"] == dtypes["trained"] == ["float32"]
        assert dtypes.get("frozen", ["bfloat16"]) == ["bfloat16"]
        away = distance(learned(folder / name, **changes(case)), alone)
        rounds = case["name"] == "distill"
        if rounds:
            assert away < 10 * rounding
        else:
            assert away < 1e-4
        losses = [[loss for _, loss in told["loss"]] for told in (several[name], stats)]
        assert losses[0] == pytest.approx(losses[1], rel=2**-8 if rounds else 1e-4)
    rounded = learned(folder / "half-dora-rounded", **changes(HALVES["half-dora"]))
    assert distance(rounded, one("half-dora")[1]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["compiled-distill-lora", "half-compiled"])
def test_each_layer_runs_as_one_graph(two: Any, name: str) -> None:
    """Three layers of the model and three of its teacher run in each of four steps."""
    assert two[1][name]["graphs"] == 4 * (3 + 3)


@pytest.mark.slow
@pytest.mark.skipif(not TOLD, reason="only Linux tells such a peak")
def test_a_full_result_is_written_without_the_whole_model(tmp_path: Path) -> None:
    """The model has 131 MB. Weights that are not trained come from the model that the stage began with, in full
    precision. The control keeps everything that is gathered."""
    large = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 9, "vocab_size": 4000}
    options = {"shard": True, "precision": "bfloat16", "changes": large}
    jobs = [{"name": name, "out": f"{tmp_path}/{name}", "fields": {"steps": 1}} for name in ("align", "finetune")]
    jobs.append(jobs[-1] | {"out": f"{tmp_path}/control", "hoards": True})
    found = told(2, tmp_path, [each | {"options": options} for each in jobs])
    assert all(each["sharded"] for each in found.values())
    assert found["control"]["writing"] > 100e6
    assert max(found[name]["writing"] for name in ("align", "finetune")) < 60e6
    ours, start = load_file(*files_of(tmp_path / "align")), load_file(folders(**large)[1] / WEIGHTS)
    assert ours.keys() == start.keys()
    same = {name for name, x in ours.items() if torch.equal(x, start[name])}
    assert {"model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight"} <= same
    assert "model.layers.0.self_attn.q_proj.weight" not in same


# --- stopping and going on


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stage, both complete and stopped in its sixth step, in one process and in two that share the weights. Those of
    two processes are resumed in two, sharded and not."""
    folder = tmp_path_factory.mktemp("stopped")

    def one_job(out: str, name: str = "finetune", shard: bool = True, **more: Any) -> dict[str, Any]:
        return {"name": name, "out": f"{folder}/{out}", "fields": RESUMED, "options": {"shard": shard}} | more

    do(one_job("one", shard=False, keeps=6))
    shutil.copytree(folder / "one-kept", folder / "one-to-two")
    jobs = [one_job(name, keeps=6, **OF_KIND.get(name, {"name": name})) for name in KINDS]
    told(2, folder, [*jobs, one_job("one-to-two", resume=True)])
    for name in KINDS:
        checkpoint = folder / f"{name}-kept/checkpoints/checkpoint-4"
        assert sharded_checkpoint.is_sharded(checkpoint)
        hashed = checksums.read_sums(checkpoint)
        assert {"shards/.metadata", "shards/__0_0.distcp", "shards/__1_0.distcp"} <= hashed.keys()
        shutil.copytree(folder / f"{name}-kept", folder / f"{name}-on")
    shutil.copytree(folder / "finetune-kept", folder / "finetune-to-copies")
    jobs = [one_job(f"{name}-on", resume=True, **OF_KIND.get(name, {"name": name})) for name in KINDS]
    told(2, folder, [*jobs, one_job("finetune-to-copies", shard=False, resume=True)])
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_as_many_processes_end_with_the_weights_of_a_stage_that_nothing_stopped(stopped: Path, name: str) -> None:
    assert result_bytes(stopped / f"{name}-on") == result_bytes(stopped / name)


@pytest.mark.slow
def test_a_stage_goes_on_in_one_process_in_more_and_in_copies(stopped: Path) -> None:
    """The control resumes two steps too late."""
    through = learned(stopped / "one")
    shutil.copytree(stopped / "finetune-kept", stopped / "two-to-one")
    do({"name": "finetune", "out": stopped / "two-to-one", "fields": RESUMED, "resume": True})
    shutil.copytree(stopped / "finetune-kept", stopped / "two-to-four")
    more = {"name": "finetune", "out": str(stopped / "two-to-four"), "fields": RESUMED, "resume": True}
    told(4, stopped, [more | {"options": {"shard": True}}])
    for out in ("one-to-two", "two-to-one", "two-to-four", "finetune-to-copies"):
        assert distance(learned(stopped / out), through) < 1e-4, out
    late = Path(shutil.copytree(stopped / "finetune-kept", stopped / "late"))
    for checkpoint in (late / "checkpoints").glob("checkpoint-*"):
        if checkpoint.name != "checkpoint-2":
            shutil.rmtree(checkpoint)
    (late / "checkpoints/checkpoint-2").rename(late / "checkpoints/checkpoint-4")
    state = late / "checkpoints/checkpoint-4/trainer_state.json"
    state.write_text(state.read_text().replace('"global_step": 2', '"global_step": 4'))
    checksums.write_sums(state.parent)
    do({"name": "finetune", "out": late, "fields": RESUMED, "resume": True})
    assert distance(learned(late), through) > 1e-2


def test_a_model_without_weights_has_the_names_and_ties_of_one_with_them() -> None:
    linearized = folders(**TIED)[1]
    made, whole = without_weights(load_config(linearized)), load_chain(linearized)
    assert [name for name, _ in made.named_parameters()] == [name for name, _ in whole.named_parameters()]
    assert made.lm_head.weight is made.model.embed_tokens.weight
    assert all(parameter.is_meta for parameter in made.parameters())
    buffers = dict(whole.named_buffers())
    assert all(value.equal(buffers[name]) for name, value in made.named_buffers())
