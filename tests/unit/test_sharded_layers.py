"""Sharded layers are compiled as unsharded ones are, and compute in the same dtypes.

FSDP registers the same hooks in a group of one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stages import CPU, documents, folders, make_stage
from torch import Tensor
from torch.distributed import DeviceMesh, init_device_mesh

from liger_convert.config.stages import LearningRates, Lora
from liger_convert.data.packed_rows import collate, pack
from liger_convert.model import linear_layers
from liger_convert.training import sharding
from liger_convert.training.merge import load_chain
from liger_convert.training.student import prepare
from liger_convert.utils.device import autocast

BFLOAT16 = torch.bfloat16
ADAPTERS = LearningRates(mixer=1e-2, lora=1e-2)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def student(mesh: DeviceMesh | None, lora: Lora | None) -> Any:
    """A model of a base in bfloat16 with adapters, or all of whose weights are trained; with `mesh`, sharded."""
    fields: dict[str, Any] = {} if lora is None else {"learning_rates": ADAPTERS, "lora": lora}
    model = load_chain(folders(dtype="bfloat16")[1])
    torch.manual_seed(0)
    model = prepare(model, make_stage("finetune", **fields)).train()
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model if mesh is None else sharding.shard_student(model, mesh, BFLOAT16, aligns=False)


def logits(model: Any) -> Tensor:
    batch = collate([pack(documents(), 32, 64)[i] for i in range(2)])
    with autocast(CPU, BFLOAT16):
        found: Tensor = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    return found


def graphs_of_layers(model: Any, checkpoints: bool) -> int:
    """How many graphs run in a forward pass. Linear layers are compiled."""
    ran = []

    def backend(graph: Any, _inputs: Any) -> Any:
        def call(*args: Any) -> Any:
            ran.append(graph)
            return graph.forward(*args)

        return call

    torch.compiler.reset()
    whole = getattr(model, "get_base_model", lambda: model)()
    if checkpoints:
        whole.gradient_checkpointing_enable({"use_reentrant": False})
    for i in linear_layers(whole.config):
        whole.model.layers[i].compile(dynamic=False, backend=backend)
    logits(model)
    return len(ran)


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("lora", [Lora(rank=4), None], ids=["adapters", "all"])
def test_each_layer_is_one_graph(
    lora: Lora | None, checkpoints: bool, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are two linear layers. The control leaves FSDP's hooks on the mixers."""
    assert graphs_of_layers(student(mesh, lora), checkpoints) == 2
    if lora is None:
        monkeypatch.setattr(sharding, "_gather_with", lambda *_: None)
        assert graphs_of_layers(student(mesh, lora), checkpoints) != 2


@torch.no_grad()
def test_dora_computes_exactly_what_it_does_unsharded(mesh: DeviceMesh) -> None:
    """The control rounds the magnitudes to bfloat16."""
    dora = Lora(rank=4, variant="dora", targets=["q_proj", "down_proj", "lm_head"])
    want = logits(alone := student(None, dora))
    assert logits(student(mesh, dora)).equal(want)
    for name, parameter in alone.named_parameters():
        if "magnitude" in name:
            parameter.copy_(parameter.to(BFLOAT16))
    assert not logits(alone).equal(want)
