"""Turns a recipe and the base's config into a plan: what each layer becomes, and all sizes. Reads no weights.

`training.memory_estimate`, `training.disk_estimate` and `training.traffic_estimate` estimate memory, disk use and what
GPUs send each other.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rich.filesize import decimal

from liger_convert.config.names import LONG, MAIN, SOFTMAX
from liger_convert.config.recipe import Recipe
from liger_convert.config.stages import AlignStage, Stage
from liger_convert.mixers import MIXERS, make_spec, resolve_spec
from liger_convert.model import head_dims, linear_layers, linearized_config, new_state
from liger_convert.model.bases import check_base, context_length, meta_model
from liger_convert.model.configuration import FORMAT
from liger_convert.model.families import own_windows, sliding_layers
from liger_convert.pipeline import adapt
from liger_convert.pipeline.stage_plan import StagePlan, StagePlanner, idle_layer, nothing_to_train
from liger_convert.training import disk_estimate
from liger_convert.training.memory_estimate import (
    COPY_BYTES,
    count,
    inference_bytes,
)
from liger_convert.utils.device import compute_dtype, named_device, pick_device
from liger_convert.utils.errors import BadInput

CONTEXTS = (4096, 32768, 131072)


@dataclass(frozen=True)
class Plan:
    """What a conversion will do.

    new_parameters, reused_parameters: shapes by name, the latter in the naming of transformers' modules.
    state_bytes: cache of all linearized layers for one sequence, independent of its length. growing_bytes: what
        layers whose window holds all tokens keep in addition for each token.
    sliding_windows: the base's own window in each layer, if it has one.
    token_bytes: one token's key and value in one layer's cache.
    context: tokens that the base supports; None if its config does not say.
    teacher_tokens: for each source that the base generates, the number of tokens.
    memory_bytes: estimated peaks of `convert`, of `inference` at 4K tokens and of each stage, beyond the interpreter.
        memory_for: the device and the dtype of the training.
    sharded_bytes: peaks of the stages if several processes shard the weights; empty for one process.
    writes: what each step of a run writes, see `disk_estimate.py`.
    undecided, undecided_windows: number of softmax layers, and of layers with a longer window, that a run has yet to
        choose. Other layers stand for them in `linearization`, and all sizes are right unless the base's layers differ
        in their own windows. selected_by: how the softmax layers are chosen: copy, kl or gates.
    recipe_stages: the recipe's stages as they are trained. adapted: a sentence for each change that `adapt` made to
        the recipe to fit this base and this machine.
    """

    name: str
    model_type: str
    dtype: str
    linearization: dict[str, Any]
    new_parameters: dict[str, tuple[int, ...]]
    reused_parameters: dict[str, tuple[int, ...]]
    state_bytes: int
    growing_bytes: int
    sliding_windows: tuple[int | None, ...]
    token_bytes: int
    context: int | None
    stages: tuple[StagePlan, ...]
    teacher_tokens: dict[str, int]
    memory_bytes: dict[str, int]
    memory_for: str
    sharded_bytes: dict[str, int]
    writes: tuple[disk_estimate.Written, ...]
    undecided: int = 0
    undecided_windows: int = 0
    selected_by: str = "copy"
    adapted: tuple[str, ...] = ()
    recipe_stages: tuple[Stage, ...] = ()

    @property
    def disk_bytes(self) -> dict[str, int]:
        """The bytes that each step of a run writes at its peak."""
        return {step.step: step.peak for step in self.writes}

    @property
    def disk_peak(self) -> int:
        """The most disk space used at once. The files of a step are removed once no other step needs them."""
        return disk_estimate.peak(list(self.writes))

    @property
    def layers(self) -> list[str]:
        layers: list[str] = self.linearization["layers"]
        return layers

    @property
    def named_windows(self) -> list[int]:
        """The layers that the recipe names for the longer window of `layers.long_windows`."""
        return [] if self.undecided_windows else [i for i, name in enumerate(self.layers) if name == LONG]

    @property
    def sliding(self) -> list[int]:
        """The layers with a sliding window of the base's own, if other layers see all tokens."""
        return sliding_layers(self.sliding_windows)

    @property
    def lengths(self) -> list[int]:
        """The numbers of tokens for which the plan shows sizes: CONTEXTS, cut to the base's context."""
        return sorted({min(tokens, self.context or tokens) for tokens in CONTEXTS})

    def kv_bytes(self, tokens: int) -> int:
        """The bytes of the base's key-value cache for one sequence of `tokens` tokens."""
        return sum(self._kv_layer_bytes(i, tokens) for i in range(len(self.layers)))

    def cache_bytes(self, tokens: int) -> int:
        """The bytes of the linearized model's cache for one sequence: the linearized layers' states, and the key-value
        caches of the softmax layers."""
        kept = (i for i, mixer in enumerate(self.layers) if mixer == SOFTMAX)
        return self.state_bytes + self.growing_bytes * tokens + sum(self._kv_layer_bytes(i, tokens) for i in kept)

    def _kv_layer_bytes(self, layer: int, tokens: int) -> int:
        window = self.sliding_windows[layer]
        # a sliding cache layer keeps one token less than its window, because the query comes with its own key
        return self.token_bytes * (tokens if window is None else min(tokens, window - 1))

    def to_dict(self) -> dict[str, Any]:
        """What the tables show, as plain JSON. `cache_bytes` also has all CONTEXTS, so that runs can be compared."""
        lengths = sorted({*CONTEXTS, *self.lengths})
        return {
            "name": self.name,
            "model_type": self.model_type,
            "dtype": self.dtype,
            "linearization": self.linearization | self._undecided_layers(),
            "parameters": {"new": count(self.new_parameters), "reused": count(self.reused_parameters)},
            "new_parameters": {name: list(shape) for name, shape in self.new_parameters.items()},
            "state_bytes": self.state_bytes,
            "growing_bytes": self.growing_bytes,
            "sliding_windows": list(self.sliding_windows),
            "context": self.context,
            "cache_bytes": {str(n): {"base": self.kv_bytes(n), "linearized": self.cache_bytes(n)} for n in lengths},
            "stages": [asdict(stage) for stage in self.stages],
            "adapted": list(self.adapted),
            "teacher_tokens": self.teacher_tokens,
            "memory_bytes": self.memory_bytes,
            "sharded_bytes": self.sharded_bytes,
            "memory_for": self.memory_for,
            "disk_bytes": self.disk_bytes,
            "disk_peak": self.disk_peak,
        }

    def _undecided_layers(self) -> dict[str, Any]:
        """What stands for the names of all layers if a run has yet to choose some of them."""
        if not (self.undecided or self.undecided_windows):
            return {}
        found: dict[str, Any] = {"softmax_auto": self.undecided}
        if not self.undecided:
            found = {"softmax": [i for i, name in enumerate(self.layers) if name == SOFTMAX]}
        if LONG in self.layers:
            found["long_windows"] = self.undecided_windows or self.named_windows
        return {"layers": found}


def computes_in(recipe: Recipe) -> tuple[torch.device, torch.dtype]:
    """The device on which this machine would run `recipe`, and the dtype. A run on a GPU can be planned without one.
    Raises BadInput for a name that is not a device."""
    if recipe.device != "auto":
        named_device(recipe.device)
    device = pick_device("cpu" if recipe.device == "cpu" else "auto")
    return device, compute_dtype(device, recipe.precision)


def make_plan(
    recipe: Recipe,
    base_config: Any,
    processes: int | None = None,
    *,
    scale: float | None = None,
    stored: torch.dtype | None = None,
) -> Plan:
    """The plan of `recipe` for the base with this config.

    processes: the memory of stages is that of each of this many processes (None: as few as the recipe allows). `adapt`
    makes the changes that it would make for one process, so that training does not depend on the number. scale: of the
    base's weights (`io.weight_scale`), by which `adapt` sets the rates of adapters; None if it is not known. stored:
    their dtype (`checkpoint.stored_dtype`); None takes what the config says.

    Raises BadInput for a base that cannot be linearized, unknown mixers or options, layers that do not fit the base,
    and rows of a stage that the processes cannot share.
    """
    shards = recipe.sequence_parallel
    processes = shards if processes is None else processes
    check_base(base_config)
    recipe, specs, windows_of_main, fitted = _fit_mixers(recipe, base_config)
    windows = own_windows(base_config)
    sliding = sliding_layers(windows)
    layers = recipe.layer_names(base_config.num_hidden_layers, sliding)
    used = {name: spec for name, spec in specs.items() if name in layers}
    linearization = {"format": FORMAT, "mixers": used, "layers": layers}
    config = linearized_config(base_config, linearization)
    with torch.device("meta"):
        new = {name: tuple(tensor.shape) for name, tensor in new_state(config).items()}
    reused = {name: tuple(p.shape) for name, p in meta_model(base_config).named_parameters()}
    of_base = str(stored or base_config.dtype or torch.float32).removeprefix("torch.")
    dtype = recipe.export.dtype if recipe.export.dtype != "auto" else of_base
    itemsize = getattr(torch, dtype).itemsize
    dims = head_dims(base_config)
    device, compute = computes_in(recipe)
    planner = StagePlanner(config, reused, new, device, compute)
    recipe, adapted = adapt.adapt(recipe, base_config, planner, windows_of_main, scale)
    weights = planner.sizes
    stages = [planner.plan(stage, processes, shards) for stage in recipe.stages]
    _check_stages(recipe, stages, config, new)
    peaks = {name: stage.memory_bytes for name, stage in zip(recipe.stage_names, stages, strict=True)}
    linear = [name for name in layers if name != SOFTMAX]
    made = Plan(
        name=recipe.name,
        model_type=base_config.model_type,
        dtype=dtype,
        linearization=linearization,
        new_parameters=new,
        reused_parameters=reused,
        state_bytes=sum(_state_bytes(used[name], base_config, itemsize) for name in linear),
        growing_bytes=sum(
            _ring_bytes(used[name], base_config, itemsize) for name in linear if not used[name]["window"]
        ),
        sliding_windows=tuple(windows),
        token_bytes=2 * dims.kv_heads * dims.dim * itemsize,
        context=context_length(base_config),
        stages=tuple(stages),
        teacher_tokens={name: source.written_tokens for name, source in recipe.teachers.items()},
        memory_bytes={},
        sharded_bytes={
            name: stage.sharded_bytes
            for name, stage in zip(recipe.stage_names, stages, strict=True)
            if stage.sharded_bytes is not None
        },
        writes=tuple(
            disk_estimate.written(
                recipe,
                weights,
                [stage.trained for stage in stages],
                [stage.started for stage in stages],
                of_base,
                dtype,
                hidden_size=base_config.hidden_size,
                linear=len(linear),
                compute=compute,
            )
        ),
        memory_for=_machine(device, processes, shards) + f" in {str(compute).removeprefix('torch.')}",
        undecided=0 if recipe.softmax_auto is None else layers.count(SOFTMAX) - len(sliding),
        undecided_windows=layers.count(LONG) if recipe.measures_windows else 0,
        selected_by=recipe.selected_by,
        adapted=(*fitted, *adapted),
        recipe_stages=tuple(recipe.stages),
    )
    convert = COPY_BYTES + 4 * weights.new // len(linear)  # new tensors are float32 and created layer by layer
    inference = inference_bytes(config, weights, itemsize, made.cache_bytes(CONTEXTS[0]))
    return replace(made, memory_bytes={"convert": convert, "inference": inference, **peaks})


def _fit_mixers(
    recipe: Recipe, base_config: Any
) -> tuple[Recipe, dict[str, dict[str, Any]], tuple[int, int], tuple[str, ...]]:
    """Adapts the windows and the choice of layers of `recipe` to the base.

    Returns the recipe, the resolved spec of each mixer by its name in the recipe, the window of `main` before and
    after, and a sentence for each change. Raises BadInput for unknown mixers or options, and for long windows that are
    not longer.
    """
    recipe, longer = adapt.fit_long_windows(recipe, base_config)
    specs = {MAIN: resolve_spec(recipe.mixer.to_dict(), "mixer")}
    for name, spec in recipe.mixers.items():
        specs[name] = resolve_spec(spec.to_dict(), f"mixers.{name}")
    if recipe.long_windows is not None:
        specs[LONG] = resolve_spec(recipe.mixer.to_dict() | {"window": recipe.long_windows.window}, "mixer")
    window = specs[MAIN]["window"]
    specs, fitted = adapt.fit_windows(recipe, base_config, specs)
    recipe, kept = adapt.fit_layers(recipe, base_config)
    windows_of_main = window, specs[MAIN]["window"]
    if recipe.long_windows is not None and not _is_longer(specs):
        window, long = specs[MAIN]["window"], specs[LONG]["window"]
        shorter = f"the window of {window} in" if window else "the unlimited window in"
        why = f"{long} is not longer than {shorter} mixer.window"
        if recipe.adapt is None or not fitted:
            raise BadInput(f"layers.long_windows.window: {why}")
        left_out = f"layers.long_windows: left out, because {why}"
        recipe, fitted = recipe.with_layer_choice(long_windows=None), (*fitted, left_out)
    return recipe, specs, windows_of_main, (*kept, *longer, *fitted)


def _check_stages(recipe: Recipe, stages: list[StagePlan], config: Any, new: dict[str, tuple[int, ...]]) -> None:
    """Raises BadInput for a stage that trains nothing, and for a layerwise one with a layer in which it trains nothing.
    config: of the linearized model. new: shapes of its new parameters by name."""
    for i, (stage, planned) in enumerate(zip(recipe.stages, stages, strict=True)):
        if planned.trained == 0:
            raise BadInput(f"stages[{i}].learning_rates: {nothing_to_train(stage)}")
        if sentence := idle_layer(stage, linear_layers(config), new):
            raise BadInput(f"stages[{i}].layerwise: {sentence}")


def _is_longer(specs: dict[str, Any]) -> bool:
    return bool(0 < specs[MAIN]["window"] < specs[LONG]["window"])


def _machine(device: torch.device, processes: int, shards: int) -> str:
    if processes == 1:
        return device.type
    shared = f", {shards} per row," if shards > 1 else ""
    return f"each of {processes} processes{shared} on {device.type}"


def too_large(made: Plan, room: int | None, sharding: str) -> list[str]:
    """A sentence for each stage that, trained with this `sharding`, takes more than `room`, the bytes of a GPU's memory
    (None: there is no GPU)."""
    sentences = []
    for i, stage in enumerate(made.stages):
        sharded = stage.is_sharded(sharding, room)
        size = stage.sharded_bytes if sharded else stage.memory_bytes
        if room is not None and size is not None and size > room:
            written = made.recipe_stages[i]
            aligns = written if isinstance(written, AlignStage) else None
            if not sharded and stage.waiting_bytes is not None and stage.waiting_bytes <= room:
                sentences.append(
                    f"stages[{i}] needs {decimal(size)}, but the GPU has {decimal(room)}: layers of its teacher stay "
                    "in host memory and are copied to the GPU in every pass, which is slower; on more GPUs, all of "
                    "them fit with sharding: full"
                )
                continue
            others = "set gradient_checkpointing: true, or train adapters (lora)"
            if aligns is not None and aligns.layerwise:
                why, how = "although it holds only one layer at a time", "lower batch_size"
            elif sharded:
                why, how = "although its weights are sharded", "start it on more GPUs"
            else:
                why, how = "because it holds all weights", "start it on more GPUs"
                if sharding == "none":
                    how = "set sharding: auto and start it on several GPUs"
                how += "" if aligns is None else ", set layerwise: true"
            sentences.append(
                f"stages[{i}] needs {decimal(size)}, but the GPU has {decimal(room)}, {why}; {how}, {others}"
            )
    return sentences


def measured_in_parts(made: Plan, room: int | None, gpus: int = 1) -> list[str]:
    """A sentence for each measurement of a run whose models take more than `room`, the bytes of a GPU's memory (None:
    there is no GPU). gpus: how many the layers may be spread over."""
    size, sentences = made.memory_bytes["inference"], []
    copied = "stay in host memory and are copied to the GPU in every pass, which is slower"
    spread = f"are spread over up to {gpus} GPUs"
    if room is not None and size > room:
        how = f"its layers {spread}" if size <= gpus * room else f"some layers {copied}"
        sentences.append(
            f"the model needs {decimal(size)} to run, but the GPU has {decimal(room)}: while checks and eval measure "
            f"it, {how}"
        )
    if room is not None and made.undecided and 2 * size > room:
        needed = f"choosing layers needs the base and the model at once, {decimal(2 * size)}"
        what = f"{needed}, but the GPU has {decimal(room)}"
        how = f"layers of both {spread if 2 * size <= gpus * room else copied}"
        if made.selected_by == "gates":
            how = "the backward pass needs both whole; set select: kl or copy, or name the softmax layers in `layers`"
        sentences.append(f"{what}: {how}")
    return sentences


def _ring_bytes(spec: dict[str, Any], config: Any, itemsize: int) -> int:
    """Bytes of one token in one linearized layer's ring: key, value, deferred inputs, log of the forget gate, and 8
    bytes for its position."""
    cls, options, dims = MIXERS[spec["type"]], make_spec(spec), head_dims(config)
    deferred = sum(cls.deferred_input_sizes(options, dims)) if options.scope == "evicted" else 0
    return dims.kv_heads * ((2 * dims.dim + deferred) * itemsize + 4 * options.forget) + 8


def _state_bytes(spec: dict[str, Any], config: Any, itemsize: int) -> int:
    """Bytes of one layer's LinearizedCacheLayer: a full ring, sinks, and recurrent states in float32."""
    cls, options, dims = MIXERS[spec["type"]], make_spec(spec), head_dims(config)
    ring = max(options.window - 1, 0) * _ring_bytes(spec, config, itemsize)
    # 8 bytes each: the position of a sink; the count of tokens seen
    sinks = options.sinks * (dims.kv_heads * 2 * dims.dim * itemsize + 8) + 8
    return ring + sinks + 4 * sum(math.prod(shape) for shape in cls.cached_states(options, dims).values())
