"""What `plan` says that each GPU sends in a step is what the collectives of two processes move."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import torch
import yaml
from launching import SECONDS, said, spread
from ranks import stage_of
from rich.console import Console
from runs import RECIPE, STAGE
from stages import folders
from tiny import tiny_config
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from liger_convert.config.recipe import parse
from liger_convert.io.checkpoint import load_config
from liger_convert.pipeline.plan import make_plan
from liger_convert.pipeline.plan_tables import render
from liger_convert.training import traffic_estimate
from liger_convert.training.sharding import without_weights
from liger_convert.training.student import count_adapters
from liger_convert.training.traffic_estimate import PEAK, Traffic, estimate, needed_bandwidth, operations

STEPS = 2
EVERY = {"steps": STEPS, "batch": 2, "accumulation": 4}
EVEN = {"vocab_size": 104}  # two processes divide it, so that nothing is padded
HALF = {"precision": "bfloat16"}
ROWS = {"sequence_parallel": 2}
CASES: dict[str, dict[str, Any]] = {
    "distill": {"name": "distill"},
    "layerwise-align": {"name": "align", "fields": {"layerwise": True}},
    "sharded-align": {"name": "align", "options": {"shard": True, **HALF}},
    "sharded-distill": {"name": "distill", "options": {"shard": True, **HALF}},
    "sharded-finetune": {"name": "finetune", "options": {"shard": True}},
    "sharded-lora": {"name": "distill-lora", "options": {"shard": True, **HALF}},
    "gathered-lora": {"name": "distill-lora", "options": {"shard": True, "keep_gathered": True, **HALF}},
    "rows-align": {"name": "align", "options": {**ROWS, **HALF}},
    "rows-distill": {"name": "distill", "options": {**ROWS, **HALF}},
    "rows-recomputed": {"name": "finetune", "fields": {"gradient_checkpointing": True}, "options": ROWS},
    "rows-one-head": {"name": "distill", "options": ROWS, "changes": {"num_key_value_heads": 1}},
}


def shapes_of(config: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in without_weights(config).named_parameters()}


def expected(case: dict[str, Any]) -> tuple[Traffic, int]:
    """The estimate for two processes, and the bytes of the teacher's weights."""
    options = case["options"]
    config = load_config(folders(**options["changes"])[1])
    stage, shapes = stage_of(case), shapes_of(config)
    dtype = torch.bfloat16 if "precision" in options else torch.float32
    adapters, _ = count_adapters(stage, config, shapes)
    found = estimate(stage, config, shapes, adapters, dtype, 2, options.get("sequence_parallel", 1))
    weights = traffic_estimate.weights_of(stage, config, shapes, adapters)
    return found, dtype.itemsize * (weights.layers + weights.ends)


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The cases, and what their collectives moved in the first process."""
    folder = tmp_path_factory.mktemp("sent")
    jobs = {}
    for name, case in CASES.items():
        options = case.get("options", {}) | {"changes": EVEN | case.get("changes", {})}
        fields = EVERY | case.get("fields", {})
        jobs[name] = {"name": case["name"], "out": str(folder / name), "fields": fields, "options": options}
    found = said(spread(2, folder, list(jobs.values()), "sent.py", 2 * SECONDS))
    return {name: (job, each["processes"][0]) for (name, job), each in zip(jobs.items(), found, strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_the_estimate_is_what_two_processes_send(counted: Any, name: str) -> None:
    """To the byte. Of two processes each sends half of a gather, a scatter or an exchange, and as much as the whole in
    a sum. Weights that stay gathered are sent once before the first step."""
    job, moved = counted[name]
    made, of_base = expected(job)
    way = name.split("-")[0] if name.startswith(("sharded", "gathered")) else "whole"
    sent = {purpose: STEPS * size for purpose, size in getattr(made, way).items()}
    once = of_base if way == "gathered" else 0
    assert (moved.get("allgather_base", 0) - once) // 2 == sent.get("weights", 0) + sent.get("base", 0) + (
        sent["heads"] // 2 + sent["heads of base"] if name == "rows-one-head" else 0
    )
    reduced = "allreduce" if way == "whole" else "reduce_scatter_base"
    assert moved[reduced] == (1 if way == "whole" else 2) * sent["gradients"]
    if name == "rows-one-head":
        assert moved["reduce_scatter_base"] == sent["heads"]
    elif "heads" in sent:
        assert moved["alltoall_base"] // 2 == sent["heads"] + sent["heads of base"]
    # of two processes, one has no neighbor on its left and the other none on its right
    assert moved.get("send", 0) + moved.get("recv", 0) == sent.get("neighbors", 0)
    assert moved["small"] < 4096


def test_the_operations_are_those_of_the_products_of_a_step() -> None:
    """Of a finetuning of all weights, in a base whose products are counted. What the linear layers do beside their
    projections is not, so the rows are short."""
    config = load_config(folders(hidden_size=256, intermediate_size=512, head_dim=64)[1])
    stage = stage_of({"name": "finetune", "fields": {"steps": 1}})
    weights = traffic_estimate.weights_of(stage, config, shapes_of(config), 0)
    made = operations(stage, config, weights, 1)
    base = AutoModelForCausalLM.from_config(
        tiny_config("llama", hidden_size=256, intermediate_size=512, head_dim=64), attn_implementation="eager"
    )
    ids = torch.ones(stage.batch_size, stage.seq_len, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        base(ids, labels=ids).loss.backward()
    assert made == pytest.approx(counter.get_total_flops(), rel=0.2)


def test_a_stage_that_sends_twice_as_much_needs_links_twice_as_fast() -> None:
    assert needed_bandwidth(100, 10**6) == PEAK / 10**4
    assert needed_bandwidth(200, 10**6) == 2 * needed_bandwidth(100, 10**6)
    assert needed_bandwidth(100, 2 * 10**6) == needed_bandwidth(100, 10**6) / 2


def test_the_most_gpus_are_those_whose_links_still_hide_what_they_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight GPUs can share the rows of the stage, and each sends more beside fewer tokens than four do."""
    config = load_config(folders()[1])
    stage = stage_of({"name": "finetune", "fields": EVERY})

    def at(processes: int) -> Traffic:
        return estimate(stage, config, shapes_of(config), 0, torch.bfloat16, processes, 1)

    assert at(8).bandwidth["whole"] > at(4).bandwidth["whole"] > at(2).bandwidth["whole"] > 0
    links = {"fast": at(8).bandwidth["whole"], "slow": at(4).bandwidth["whole"], "none": 1.0}
    monkeypatch.setattr(traffic_estimate, "LINKS", links)
    found = at(2)
    assert found.most["whole"] == {"fast": 8, "slow": 4, "none": 1}
    assert found.sharing == 8
    assert "up to 8 GPUs over fast, up to 4 GPUs over slow, not over none" in found.line()


def test_a_plan_tells_the_traffic_of_each_stage_of_several_processes() -> None:
    stages = [STAGE | {"kind": "align", "learning_rates": {"mixer": 1e-2}}]
    stages += [STAGE | {"kind": "finetune", "loss_on": "all", "learning_rates": {"mixer": 1e-2, "body": 1e-3}}]
    recipe = parse(yaml.safe_dump(RECIPE | {"stages": stages}))
    alone, shared = (make_plan(recipe, tiny_config("llama"), processes) for processes in (1, 2))
    assert [stage["traffic"] for stage in alone.to_dict()["stages"]] == [None, None]
    told = json.loads(json.dumps(shared.to_dict()))["stages"]
    assert [stage["traffic"]["whole"]["gradients"] for stage in told] == [4 * stage.trained for stage in shared.stages]
    said = Console(width=10_000, file=io.StringIO(), record=True)
    said.print(render(shared))
    lines = [line for line in said.export_text().splitlines() if "TFLOP. Whole weights: sends" in line]
    assert [line.split(":")[0] for line in lines] == ["align", "finetune"]
