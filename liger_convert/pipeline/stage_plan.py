"""What one training stage of a run trains, and how much memory it takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from liger_convert.config.stages import AlignStage, Stage
from liger_convert.model import linear_layers, parameter_group
from liger_convert.training import sequence_parallel
from liger_convert.training.batch_split import split_batch
from liger_convert.training.memory_estimate import (
    Sizes,
    count,
    gathered_bytes,
    kept_gathered_bytes,
    layerwise_bytes,
    measuring_bytes,
    sharded_bytes,
    training_bytes,
    waiting_bytes,
)
from liger_convert.training.student import count_adapters, count_trained
from liger_convert.training.traffic_estimate import Traffic
from liger_convert.training.traffic_estimate import estimate as estimate_traffic

GATHERED_SHARE = 0.8  # of a GPU's memory, up to which layers stay gathered; estimates are off by up to a fifth


@dataclass(frozen=True)
class StagePlan:
    """One training stage.

    tokens: that it really sees, in whole optimizer steps. sources: the fraction of them from each source.
    trained: number of trained parameters.
    memory_bytes: at its peak. memory: the parts of the training's peak (`memory_estimate.training_bytes`).
    started: number of initial adapter weights of `pissa`, which are saved beside the checkpoints and in the result.
    sharded_bytes: peak of each of several processes if they shard the weights; None for one process and if it is
    layerwise.
    gathered_bytes: how much higher that peak is if layers stay gathered, see `training/sharding.py`.
    waiting_bytes: peak if the layers of the teacher are offloaded to the host's memory; None if they cannot be.
    traffic: what each of several processes sends and computes in a step; None for one process.
    """

    kind: str
    tokens: int
    sources: dict[str, float]
    trained: int
    memory_bytes: int
    memory: dict[str, int]
    started: int = 0
    sharded_bytes: int | None = None
    gathered_bytes: int = 0
    waiting_bytes: int | None = None
    traffic: Traffic | None = None

    def is_sharded(self, sharding: str, room: int | None) -> bool:
        """Whether a recipe with this `sharding` shards the stage on GPUs with `room` bytes (None: no GPU)."""
        if self.sharded_bytes is None or sharding == "none":
            return False
        return sharding == "full" or (room is not None and self.memory_bytes > room)

    def keeps_gathered(self, room: int | None) -> bool:
        """Whether layers of a sharded stage stay gathered on GPUs with `room` bytes (None: no GPU)."""
        if room is None or self.sharded_bytes is None:
            return False
        return self.sharded_bytes + self.gathered_bytes <= GATHERED_SHARE * room


def nothing_to_train(stage: Stage) -> str:
    """A sentence for a stage whose groups have no parameters in a model, as those of a mixer without any."""
    groups = " and ".join(stage.learning_rates.trained())
    what = f"nothing in this model is of the group {groups}, so the stage has nothing to train"
    return f"{what}; give another group a rate, or leave the stage out"


def idle_layer(stage: Stage, linear: Sequence[int], new: Iterable[str]) -> str | None:
    """A sentence for a layerwise stage of mixers alone which comes to one of the `linear` layers whose mixer has no
    parameters; None for any other stage. new: the names of the mixers' parameters."""
    if not (isinstance(stage, AlignStage) and stage.layerwise and list(stage.learning_rates.trained()) == ["mixer"]):
        return None
    own = {int(name.split(".")[2]) for name in new}  # model.layers.N.…
    idle = [i for i in linear if i not in own]
    if not idle:
        return None
    what = f"the mixer of layer {idle[0]} has no parameters, and layer by layer there is nothing else to train in it"
    return f"{what}; give the group attention a rate, or set layerwise: false"


class StagePlanner:
    """Plans single training stages of one linearized model on one device.

    config: that of the linearized model. reused, new: shapes by name of the base's parameters and of the new ones.
    compute: the dtype of the computation.
    """

    def __init__(
        self,
        config: Any,
        reused: dict[str, tuple[int, ...]],
        new: dict[str, tuple[int, ...]],
        device: torch.device,
        compute: torch.dtype,
    ):
        self.config, self.shapes, self.device, self.compute = config, reused | new, device, compute
        embeddings = {name: shape for name, shape in reused.items() if parameter_group(name, config) == "embeddings"}
        self.sizes = Sizes(count(reused), count(embeddings), count(new))

    def plan(self, stage: Stage, processes: int = 1, shards: int = 1) -> StagePlan:
        """The plan of `stage` for each of several `processes`, in groups of `shards` that split every row. Raises
        BadInput if the processes cannot share the stage's rows."""
        trained = count_trained(stage, self.config, self.shapes)
        batch_size, grad_accumulation = split_batch(stage, processes, shards)
        sequence_parallel.check(stage, self.config, shards)
        layerwise = isinstance(stage, AlignStage) and stage.layerwise
        own = stage.model_copy(update={"batch_size": batch_size, "grad_accumulation": grad_accumulation})
        if shards > 1:
            own = own.model_copy(update={"seq_len": stage.seq_len // shards, "compile": False})
        estimate = layerwise_bytes if layerwise else training_bytes
        adapters, magnitudes = count_adapters(stage, self.config, self.shapes)
        parts = estimate(own, self.config, self.sizes, trained, self.device, self.compute, magnitudes)
        parts["activations"] += gathered_bytes(own, self.config, self.compute, shards)
        sharded, gathered, traffic = None, 0, None
        if processes > 1 and not layerwise:
            shared = sharded_bytes(parts, own, self.config, self.sizes, trained, self.compute, processes)
            measuring = measuring_bytes(own, self.config, self.sizes, self.compute, processes)
            sharded = max(sum(shared.values()), measuring)
            gathered = kept_gathered_bytes(parts, self.config, self.sizes, self.compute, processes)
        if processes > 1:
            traffic = estimate_traffic(stage, self.config, self.shapes, adapters, self.compute, processes, shards)
            at_once = len(linear_layers(self.config)) if layerwise else 1
            parts["buckets"] = 4 * trained // at_once  # DDP's copy of the gradients, which it exchanges
        peak = max(sum(parts.values()), measuring_bytes(own, self.config, self.sizes, self.compute))
        waiting = None
        if parts["base"] and not layerwise:
            waiting = peak - waiting_bytes(self.config, self.sizes, self.compute)
        tokens = stage.steps * stage.step_tokens
        started = adapters if stage.uses_pissa else 0
        memory = peak, parts, started, sharded, gathered, waiting
        return StagePlan(stage.kind, tokens, stage.sources, trained, *memory, traffic)
