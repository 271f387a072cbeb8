"""Processes that share each row, a shard of its tokens each, compute and learn what one process does with whole rows.

Each launch imports torch in every process, so several cases share one.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import SECONDS, distance, learned, one_thread, said, spread, told
from ranks import do
from stages import make_stage
from tiny import tiny_config

from liger_convert.mixers import MIXERS, resolve_spec
from liger_convert.model import linearized_config
from liger_convert.training.batch_split import split_batch
from liger_convert.training.memory_estimate import gathered_bytes
from liger_convert.training.sequence_parallel import check
from liger_convert.utils.errors import BadInput

QUICK = ["gla", "liger-paper", "gated-deltanet"]
PASSING = [name for name, mixer in MIXERS.items() if mixer.passes_states and name != "forgetting"]
MORE: dict[str, dict[str, Any]] = {
    "gla, all layers": {"mixer": {"type": "gla"}, "layers": ["main"] * 3},
    "gla, all tokens": {"mixer": {"type": "gla", "scope": "all"}},
    "gla, no sinks": {"mixer": {"type": "gla", "sinks": 0}},
    "gla, window of 1": {"mixer": {"type": "gla", "window": 1}},
    "gla, forget": {"mixer": {"type": "gla", "forget": True}},
    "gla, gates by channel": {"mixer": {"type": "gla", "feature_map": "hedgehog", "gate": "pooled"}},
    "gla, rope, output gate": {"mixer": {"type": "gla", "rope": True, "output_gate": True}},
    "convolved gla": {"mixer": {"type": "gla", "short_conv": 4}},
    "titans, pairs": {"mixer": {"type": "titans", "persistent": 3}},
    "titans, gate": {"mixer": {"type": "titans", "combine": "gate", "scope": "all"}},
    "titans, context": {"mixer": {"type": "titans", "combine": "context"}},
    "convolved deltanet": {"mixer": {"type": "deltanet", "short_conv": 4, "output_norm": "rms"}},
    "convolved mamba, all tokens": {"mixer": {"type": "mamba", "short_conv": 3, "scope": "all"}},
    **{
        family: {"mixer": {"type": "gla"}, "family": family}
        for family in ("gemma2", "gemma3_text", "ministral3", "phi3", "smollm3", "stablelm", "qwen3_moe")
    },
}


def compared(processes: int, folder: Path, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What `shards.py` says of each case."""
    return said(spread(processes, folder, cases, "shards.py", 4 * SECONDS))


# whose memories have no parameters, or that have no memory
WITHOUT_PARAMETERS = ("liger-paper", "liger-hgrn2", "liger-gsa", "window")


def assert_equal(found: dict[str, float], *, has_parameters: bool = True) -> None:
    """Another order of sums has about the same effect as changing each weight to the next float32. In all cases here,
    it was less than twice that. The control runs each shard alone."""
    assert 0 < found["rounding_of_logits"] < 1e-4
    assert found["logits"] < 5 * found["rounding_of_logits"]
    assert found["gradients"] < 5 * found["rounding_of_gradients"]
    assert found["loss"] < 1e-5
    assert found["alone"] > 1000 * found["rounding_of_logits"]
    assert (found["size_of_mixers"] > 1e-4) == has_parameters


STEP = 2.0**-7  # between neighbors of bfloat16 at most, as a fraction


def assert_equal_in_bfloat16(found: dict[str, dict[str, float]], largest: float) -> None:
    """Split rows give the numbers of whole rows if the ops are the same. Those that go by chunks begin anew with each
    shard, so a last bit of float32 may change one of bfloat16; gradients are rounded before they are added. For softmax
    layers and the base, one process uses another op: transformers' masked attention, which rounds no less. So shards
    have to be as close to float64 as one process is. largest: compares the largest error of one process, since a mean
    error may be small by chance; what few changed bits do to it has to be far below. The control receives nothing from
    its neighbors."""
    whole, shards, alone, cut = (found[name] for name in ("whole", "shards", "alone", "cut"))
    assert cut["targets"] == 0
    assert cut["logits"] <= STEP
    assert cut["errors"] < largest / 100
    assert max(cut["gradients"], cut["align_gradients"]) < 2 * STEP
    for value in ("logits", "targets", "gradients", "align_gradients"):
        assert 0 < shards[value] < 1.5 * whole[value]
    assert shards["errors"] < 2 * largest
    assert alone["logits"] > 5 * whole["logits"]
    assert alone["errors"] > 3 * whole["errors"]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    cases: list[dict[str, Any]] = [{"mixer": {"type": name}} for name in QUICK]
    cases += [{"mixer": {"type": name}, "bfloat16": True} for name in QUICK[::2]]
    cases.append({"mixer": {"type": "gla"}, "fused": True})
    return compared(2, tmp_path_factory.mktemp("quick"), cases)


def test_shards_of_packed_rows_give_logits_and_gradients_of_whole_rows(quick: list[Any]) -> None:
    """In a model of linear and softmax layers."""
    for name, each in zip(QUICK, quick):
        assert_equal(each, has_parameters=name not in WITHOUT_PARAMETERS)


def test_in_bfloat16_shards_are_no_further_from_float64_than_whole_rows(quick: list[Any]) -> None:
    found = quick[len(QUICK) : -1]
    largest = max(each["whole"]["errors"] for each in found)
    for each in found:
        assert_equal_in_bfloat16(each, largest)


def test_softmax_layers_of_shards_are_for_the_fused_kernels(quick: list[Any]) -> None:
    """On a GPU these take no float32, and without them a layer holds a score for each pair of tokens. Processes that
    divide the heads have the same work."""
    assert quick[-1]["dtypes"] == ["bfloat16"]
    assert quick[-1]["scores"][0] == quick[-1]["scores"][1] > 0


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3, 4])
def test_every_mixer_family_and_option_passes_its_memory_on(tmp_path: Path, processes: int) -> None:
    cases = {name: {"mixer": {"type": name}} for name in PASSING} | MORE
    found = compared(processes, tmp_path, list(cases.values()))
    for name, each in zip(cases, found, strict=True):
        try:
            assert_equal(each, has_parameters=name not in WITHOUT_PARAMETERS)
        except AssertionError as error:
            raise AssertionError(f"{name}: {each}") from error


@pytest.mark.slow
def test_every_mixer_and_family_cuts_rows_in_bfloat16(tmp_path: Path) -> None:
    """Without experts, whose products torch has no float64 for."""
    cases = {name: {"mixer": {"type": name}} for name in PASSING} | MORE
    del cases["qwen3_moe"]
    found = compared(2, tmp_path, [case | {"bfloat16": True} for case in cases.values()])
    largest = max(each["whole"]["errors"] for each in found)
    for name, each in zip(cases, found, strict=True):
        try:
            assert_equal_in_bfloat16(each, largest)
        except AssertionError as error:
            raise AssertionError(f"{name}: {each}") from error


# --- stages

EVERY = {"steps": 4, "batch": 2, "accumulation": 2, "warmup_ratio": 0.0, "schedule": "constant"}
STAGES: dict[str, dict[str, Any]] = {
    **{name: {"name": name} for name in ("align", "distill", "finetune", "distill-lora")},
    "recomputed": {"name": "distill", "fields": EVERY | {"gradient_checkpointing": True}},
    "recomputed-align": {"name": "align", "fields": EVERY | {"gradient_checkpointing": True}},
    "concat": {"name": "distill", "fields": EVERY | {"concat_documents": True}},
}


def job(out: Path, case: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {"plain": True, "fields": EVERY} | case | {"out": str(out), "options": options}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A stage in one process: its statistics, what it learned, and how far rounding alone leads from there."""
    folder = tmp_path_factory.mktemp("one")

    @functools.cache
    def trained(name: str) -> Any:
        case = {"fields": EVERY} | STAGES[name]
        with one_thread():
            stats = do(job(folder / name, case))
            do(job(folder / f"{name}-apart", case | {"fields": case["fields"] | {"batch": 1, "accumulation": 4}}))
        whole = learned(folder / name)
        return stats, whole, distance(learned(folder / f"{name}-apart"), whole)

    return trained


def assert_learned_alike(folder: Path, name: str, ours: dict[str, Any], one: Any) -> None:
    """Shards round about as much as rows that are processed one by one: in the cases here, up to 12 times as much,
    since Adam magnifies what is rounded in gradients near zero. The control receives nothing from its neighbors."""
    stats, whole, rounding = one(name)
    assert 0 < rounding < 1e-4
    assert distance(learned(folder / name), whole) < 100 * rounding
    if name == "distill" and not ours["sharded"]:
        assert distance(learned(folder / "distill-deaf"), whole) > 1000 * rounding
    same = ("steps", "tokens", "epochs", "trained_parameters")
    assert [ours[key] for key in same] == [stats[key] for key in same]
    assert [loss for _, loss in ours["loss"]] == pytest.approx([loss for _, loss in stats["loss"]], rel=1e-4)
    if "align_error" in stats:
        for when, errors in stats["align_error"].items():
            assert ours["align_error"][when] == pytest.approx(errors, rel=1e-4)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Each stage in two processes, and in four that share rows in pairs and weights together."""
    found = {}
    for processes, shard in ((2, False), (4, True)):
        folder = tmp_path_factory.mktemp("shared")
        jobs = [job(folder / name, case, sequence_parallel=2, shard=shard) for name, case in STAGES.items()]
        if not shard:
            jobs.append(job(folder / "distill-deaf", STAGES["distill"] | {"deaf": True}, sequence_parallel=2))
        found[processes] = folder, told(processes, folder, jobs)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("processes", [2, 4])
def test_every_stage_learns_from_shared_rows_what_one_process_does(
    shared: Any, one: Any, name: str, processes: int
) -> None:
    folder, several = shared[processes]
    assert several[name]["sharded"] == (processes == 4)
    assert_learned_alike(folder, name, several[name], one)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["align", "distill"])
def test_a_spare_group_of_shards_changes_nothing(one: Any, tmp_path: Path, name: str) -> None:
    """Two groups of two, for steps of a single row. In the control of `align` the second group counts as well. Losses
    summed over tokens would not change by that: the same tokens would be counted twice."""
    single = {"name": name, "fields": EVERY | {"batch": 1, "accumulation": 1}}
    jobs = [job(tmp_path / "shared", single, sequence_parallel=2)]
    jobs.append(job(tmp_path / "counts", single | {"spare_counts": True}, sequence_parallel=2))
    told(4, tmp_path, jobs)
    with one_thread():
        do(job(tmp_path / "alone", single))
    alone, rounding = learned(tmp_path / "alone"), one(name)[2]
    assert distance(learned(tmp_path / "shared"), alone) < 100 * rounding
    if name == "align":
        assert distance(learned(tmp_path / "counts"), alone) > 1000 * rounding


# --- what is refused


def config(mixer: dict[str, Any], **changes: Any) -> Any:
    spec = resolve_spec(mixer, "mixer")
    linearization = {"format": 2, "mixers": {"main": spec}, "layers": ["main", "softmax", "main"]}
    return linearized_config(tiny_config("llama", **changes), linearization)


GLA = {"type": "gla", "window": 16}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], int, str]] = {
    "mom": ({"type": "mom"}, {}, 2, "mixer mom cannot pass its memory from one process to the next; use 1"),
    "shift": ({"type": "rwkv6", "token_shift": True}, {}, 2, "mixer rwkv6 shifts tokens before its window"),
    "window": ({"type": "forgetting"}, {}, 2, "mixer forgetting has an unlimited window"),
    "odd": (GLA, {}, 5, "finetune has rows of 32 tokens, which cannot be cut into 5 equal shards"),
    "short": (GLA, {}, 4, "finetune has rows of 32 tokens, so a shard is shorter than the window of 16; use 64"),
    "dropout": (GLA, {"attention_dropout": 0.1}, 2, "attention_dropout"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_refused_in_a_sentence(name: str) -> None:
    mixer, changes, shards, said = REFUSED[name]
    stage = make_stage("finetune")
    check(stage, config(mixer, **changes), 1)
    with pytest.raises(BadInput, match=rf"^sequence_parallel: .*{said}"):
        check(stage, config(mixer, **changes), shards)
    check(stage, config(GLA), 2)


def test_what_comes_from_other_processes_grows_with_their_number_only_where_heads_do_not_divide() -> None:
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 3}
    plan = {"format": 2, "mixers": {"main": resolve_spec({"type": "gla"})}, "layers": ["main", "softmax", "softmax"]}
    config = linearized_config(tiny_config("llama", **sizes), plan)
    stage = make_stage("distill")
    of = {n: gathered_bytes(stage, config, torch.float32, n) for n in (1, 2, 3, 4, 6)}
    assert of[1] == 0
    assert of[2] == of[4] > 0
    assert of[6] == 2 * of[3] > of[2]


def test_processes_are_put_in_whole_groups_that_share_the_rows_of_a_step() -> None:
    stage = make_stage("finetune", batch=4, accumulation=2)
    assert split_batch(stage, 4, 2) == split_batch(stage, 2) == (4, 1)
    with pytest.raises(
        BadInput, match="3 processes share a row, but 4 cannot be split into groups of 3; start a multiple"
    ):
        split_batch(stage, 4, 3)
    assert split_batch(stage, 6, 2) == split_batch(stage, 4, 2)  # the third group is spare
