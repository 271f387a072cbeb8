"""The memory that a plan estimates: of several processes, of sharded weights, layer by layer, and what does not fit."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from planned import plan, recipe
from tiny import tiny_config

from liger_convert.pipeline.plan import Plan, make_plan, measured_in_parts, too_large
from liger_convert.utils.errors import BadInput


def test_several_processes_share_rows_and_nothing_else():
    rates = {"mixer": 1e-2, "body": 1e-5}
    stage = {"kind": "distill", "data": "text", "tokens": 2e5, "batch_size": 8, "learning_rates": rates}
    one, four = plan(stages=[stage]).stages[0], plan(stages=[stage], processes=4).stages[0]
    quarter = plan(stages=[stage | {"batch_size": 2}]).stages[0]
    assert four.memory == quarter.memory | {"buckets": 4 * four.trained}
    assert (four.tokens, four.trained, four.memory["weights"]) == (one.tokens, one.trained, one.memory["weights"])
    assert four.memory["activations"] * 4 == one.memory["activations"]
    in_parts = plan(stages=[stage | {"grad_accumulation": 4}], processes=4).stages[0]
    assert in_parts.memory["activations"] == one.memory["activations"]
    two, three = (plan(stages=[stage], processes=number).stages[0] for number in (2, 3))  # of which one is spare
    assert two.memory == three.memory


def test_processes_that_share_rows_take_a_part_of_their_tokens():
    """Each also holds the queries, keys and values that it sends and gets, for one layer of the base at a time."""
    rates = {"mixer": 1e-2, "body": 1e-5}
    stage = {"kind": "distill", "data": "text", "tokens": 2e5, "batch_size": 8, "learning_rates": rates}
    rows = stage | {"seq_len": 512}
    exact, config = {"precision": "float32"}, tiny_config("llama")
    cut = plan(stages=[rows], processes=4, sequence_parallel=2, **exact)
    half = plan(stages=[rows | {"seq_len": 256, "compile": False}], processes=2, **exact).stages[0].memory
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    exchanged = 2 * 4 * heads * config.head_dim * 4 * 256
    assert cut.stages[0].memory == half | {"activations": half["activations"] + exchanged}
    assert cut.memory_for == "each of 4 processes, 2 per row, on cpu in float32"
    assert plan(stages=[rows], processes=None, sequence_parallel=2).memory_for.startswith("each of 2 processes")
    with pytest.raises(BadInput, match="2 processes share a row, but 1 cannot be split into groups of 2"):
        plan(stages=[rows], processes=1, sequence_parallel=2)
    with pytest.raises(BadInput, match="rows of 512 tokens, so a shard is shorter than the window of 8"):
        plan(stages=[rows], processes=128, sequence_parallel=128)


def test_processes_that_share_the_weights_hold_a_slice_of_each():
    """All memory for weights falls with the number of processes, except for what is gathered at one time."""
    rates = {"mixer": 1e-3, "attention": 1e-4, "body": 1e-5, "embeddings": 1e-5}
    stage = {"kind": "distill", "data": "text", "tokens": 2e5, "batch_size": 8, "learning_rates": rates}
    made = {number: plan(stages=[stage | {"batch_size": number}], processes=number) for number in (1, 2, 4, 8)}
    one = made[1].stages[0]
    assert one.sharded_bytes is None
    assert not one.is_sharded("full", 1)
    shared = {number: made[number].stages[0].sharded_bytes or 0 for number in (2, 4, 8)}
    assert shared[2] - shared[4] == pytest.approx(2 * (shared[4] - shared[8]), rel=1e-6)
    sliced = sum(one.memory[name] for name in ("weights", "base", "optimizer")) + 4 * one.trained
    assert shared[4] - shared[8] == pytest.approx(sliced / 8, rel=1e-6)
    two = made[2].stages[0]
    assert shared[2] < two.memory_bytes
    room = two.memory_bytes
    assert [two.is_sharded(how, room) for how in ("none", "auto", "full")] == [False, False, True]
    assert [two.is_sharded(how, room - 1) for how in ("none", "auto", "full")] == [False, True, True]
    assert not two.is_sharded("auto", None)
    assert made[2].to_dict()["sharded_bytes"] == {"1-distill": shared[2]}
    # layers stay gathered where the other process's slices of them fit as well, with a fifth of the memory to spare
    enough = math.ceil((shared[2] + two.gathered_bytes) / 0.8)
    assert 0 < two.gathered_bytes < made[4].stages[0].gathered_bytes
    assert [two.keeps_gathered(room) for room in (None, enough - 1, enough)] == [False, False, True]
    assert not one.keeps_gathered(enough)
    assert made[1].to_dict()["sharded_bytes"] == {}


def test_a_stage_that_fits_with_its_weights_shared_is_not_named():
    rates = {"mixer": 1e-3, "attention": 1e-4, "body": 1e-5, "embeddings": 1e-5}
    stage = {"kind": "distill", "data": "text", "tokens": 2e5, "batch_size": 8, "learning_rates": rates}
    made = plan(stages=[stage], processes=8)
    room = made.stages[0].memory_bytes - 1
    assert too_large(made, room, "auto") == []
    (said,) = too_large(made, room, "none")
    assert "layers of its teacher stay in host memory" in said
    assert made.stages[0].waiting_bytes < made.stages[0].memory_bytes
    (said,) = too_large(made, made.stages[0].waiting_bytes - 1, "none")
    assert "because it holds all weights; set sharding: auto and start it on several GPUs" in said
    (said,) = too_large(made, 1, "auto")
    assert "although its weights are sharded; start it on more GPUs" in said


def test_layer_by_layer_takes_the_memory_of_a_layer_and_the_disk_of_hidden_states():
    """This holds for any number of layers, apart from the embeddings and the head."""
    rates = {"mixer": 1e-3, "attention": 1e-4}
    stage = {"kind": "align", "data": "text", "tokens": 2e5, "learning_rates": rates, "calibrate": False}

    def made(depth: int, **fields: Any) -> Plan:
        return make_plan(recipe(stages=[stage | fields]), tiny_config("llama", num_hidden_layers=depth))

    few, many = (made(depth, layerwise=True) for depth in (10, 40))
    assert few.stages[0].memory_bytes == pytest.approx(many.stages[0].memory_bytes, rel=1e-5)  # the last norm
    assert 4 * few.stages[0].trained == many.stages[0].trained
    assert made(40).stages[0].memory_bytes > 2 * made(10).stages[0].memory_bytes
    tokens, itemsize = many.stages[0].tokens, torch.float32.itemsize if "float32" in many.memory_for else 2
    assert many.disk_bytes["1-align"] > 2 * tokens * 32 * itemsize
    assert made(40, tokens=4e5, layerwise=True).disk_bytes["1-align"] > many.disk_bytes["1-align"]
    (said,) = too_large(made(40), 1, "none")
    assert "because it holds all weights; set sharding: auto and start it on several GPUs, set layerwise: true" in said
    (said,) = too_large(many, 1, "none")
    assert "although it holds only one layer at a time; lower batch_size" in said


def test_layer_by_layer_several_processes_share_the_rows_and_the_disk() -> None:
    """Each holds a whole layer, which is never sharded, and a copy of that layer's gradients to exchange."""
    stage = {"kind": "align", "data": "text", "tokens": 2e5, "batch_size": 4, "layerwise": True, "calibrate": False}
    stage |= {"learning_rates": {"mixer": 1e-3, "attention": 1e-4}}
    alone, shared = (
        make_plan(recipe(stages=[stage]), tiny_config("llama", num_hidden_layers=10), processes) for processes in (1, 2)
    )
    (one,), (two,) = alone.stages, shared.stages
    linear = sum(name != "softmax" for name in shared.linearization["layers"])
    assert {name: size for name, size in two.memory.items() if name != "buckets"} == {
        name: size // 2 if name in ("hidden", "activations", "passing") else size for name, size in one.memory.items()
    }
    assert two.memory["buckets"] == 4 * two.trained // linear
    assert shared.disk_bytes == alone.disk_bytes
    assert not two.is_sharded("full", 1)
    assert two.traffic is not None
    assert two.traffic.whole == {"gradients": 4 * two.trained}
    assert "Sharded" not in two.traffic.line()
    assert json.loads(json.dumps(shared.to_dict()))["stages"][0]["traffic"]["sharded"] == {}


def test_stages_that_do_not_fit_a_gpu_are_named():
    stage = {"kind": "distill", "data": "text", "tokens": 2e5, "learning_rates": {"mixer": 1e-2}}
    made = plan(stages=[stage, stage | {"batch_size": 64}])
    (said,) = too_large(made, made.stages[1].memory_bytes - 1, "none")
    assert said.startswith("stages[1] needs ")
    assert too_large(made, None, "none") == []


def test_what_is_measured_in_parts_is_said_beforehand():
    """The plan also says what needs two models at once. Gates need that, which is impossible on this GPU."""
    made, open_made = plan(), plan(layers={"softmax_auto": 1})
    size = made.memory_bytes["inference"]
    assert measured_in_parts(made, None) == measured_in_parts(made, size) == []
    (said,) = measured_in_parts(made, size - 1)
    assert "some layers stay in host memory and are copied to the GPU in every pass" in said
    (said,) = measured_in_parts(made, size - 1, gpus=2)
    assert said.endswith("its layers are spread over up to 2 GPUs")
    (said,) = measured_in_parts(made, size // 2 - 1, gpus=2)
    assert "some layers stay in host memory" in said
    room = open_made.memory_bytes["inference"]
    (said,) = measured_in_parts(open_made, room, gpus=2)
    assert said.endswith("layers of both are spread over up to 2 GPUs")
    for how, what in {"copy": "stay in host", "kl": "stay in host", "gates": "set select: kl"}.items():
        (said,) = measured_in_parts(plan(layers={"softmax_auto": 1, "select": how}), room)
        assert said.startswith("choosing layers needs the base and the model at once")
        assert what in said
