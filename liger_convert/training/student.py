"""The model that a stage trains: its adapters, what of it is trainable, and its compiled layers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch._inductor.config
from peft import LoraConfig, PeftModel, get_peft_model

from liger_convert.config.stages import Lora, Stage
from liger_convert.model import MIXER_MODULE, linear_layers, parameter_group
from liger_convert.model.families import family_of
from liger_convert.model.placing import waits
from liger_convert.training.align import AlignObjective
from liger_convert.training.memory_estimate import Sizes, count, measuring_bytes, training_bytes
from liger_convert.training.sharing import share
from liger_convert.training.trainer import Objective, freeze
from liger_convert.utils.errors import BadInput

CURVE_POINTS = 50
OF_LINEAR = ("attention", "linearized")  # targets in the linearized layers alone
# Graphs with these are not kept for other processes unless it is said that they may be: their arguments say all.
CACHEABLE = {f"torch.amp.autocast_mode.{name}": "1" for name in ("_enter_autocast", "_exit_autocast")}

Shapes = Mapping[str, tuple[int, ...]]  # by name


def prepare(model: Any, stage: Stage) -> Any:
    """`model` with the stage's adapters, and with no more trainable than the stage trains."""
    if stage.lora is not None:
        return add_lora(model, stage.lora, train_mixer=stage.learning_rates.mixer is not None)
    freeze(model, stage.learning_rates.trained())
    return model


def gains_by_compiling(device: torch.device) -> bool:
    """On a CPU launches cost little of a step, and the ops branch on values, which breaks graphs."""
    return device.type == "cuda"


def compile_layers(model: Any, objective: Objective, aligning: bool) -> None:
    """Compiles the layers in place, under the same names: one graph for each kind of layer and each length of rows, as
    kernels for any length are slower.

    In alignment only the attention of the linearized layers runs. A teacher whose layers wait in the host's memory
    stays as it is: its weights come by code that no graph holds.
    """
    torch._dynamo.config.recompile_limit = 64  # kinds of layers, times lengths of the last batch
    torch._dynamo.config.optimize_ddp = False  # which cuts graphs to send gradients sooner: a layer's are few enough
    torch._inductor.config.unsafe_marked_cacheable_functions = CACHEABLE
    whole: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    backbone = whole.model
    if aligning:
        compile_attention(model)
        assert isinstance(objective, AlignObjective)
        for layer in [] if waits(objective.base) else objective.base.model.layers:
            compile_parts(layer)
        return
    teacher = getattr(objective, "base", None)
    of_teacher = [] if teacher is None or waits(teacher) else teacher.model.layers
    for layer in [*backbone.layers, *of_teacher]:
        layer.compile(dynamic=False)


def compile_attention(model: Any) -> None:
    """Compiles what an alignment runs of `model`, in place."""
    torch._dynamo.config.recompile_limit = 64
    whole: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    for i in linear_layers(model.config):
        whole.model.layers[i].self_attn.compile(dynamic=False)
    # two kernels instead of a dozen, each of which writes a float32 tensor of the layer's size
    whole.relative_error = torch.compile(whole.relative_error, dynamic=False)


def compile_parts(layer: torch.nn.Module) -> None:
    """Compiles each part of a base's layer by itself, in place, because hooks watch what goes into its attention and
    what comes out, and hooks stay outside of graphs."""
    for part in layer.children():
        part.forward = torch.compile(part.forward, dynamic=False)


def add_lora(model: Any, lora: Lora, *, train_mixer: bool) -> Any:
    """`model` with adapters, and with its mixers trained in full as well. Raises BadInput for unknown targets."""
    linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    targets = lora_projections(lora, model.config, linears)
    shapes = {name: tuple(module.weight.shape) for name, module in linears.items()}
    if why := refusal(lora, model.config, shapes):
        raise BadInput(f"lora.{why}")
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # an int by its hint, a float in use
        lora_dropout=lora.dropout,
        use_rslora=lora.variant == "rslora",
        use_dora=lora.variant == "dora",  # pissa's are plain ones until they get where they start from
        target_modules=list(targets),
        layers_to_transform=linear_layers(model.config) if lora.targets in OF_LINEAR else None,
        modules_to_save=[MIXER_MODULE] if train_mixer else None,
    )
    # what has no weights yet gets adapters without weights
    return get_peft_model(model, config, low_cpu_mem_usage=any(p.is_meta for p in model.parameters()))


def lora_projections(lora: Lora, config: Any, linears: Iterable[str]) -> list[str]:
    """The last parts of the names of the projections that get an adapter. linears: the full names of all linear maps
    of the model; what is in a mixer is new, and trains as it is; a router keeps its choices."""
    if lora.targets == "attention":
        return list(family_of(config).projections)
    if lora.targets in ("linearized", "all"):
        body = (name for name in linears if re.search(r"\.layers\.\d+\.(self_attn|mlp)\.", name))
        return sorted({name.rpartition(".")[2] for name in body if f".{MIXER_MODULE}." not in name} - {"gate"})
    assert isinstance(lora.targets, list)
    return lora.targets


def adapted(lora: Lora, config: Any, shapes: Shapes, *, train_mixer: bool) -> Shapes:
    """Those of the linear maps of these shapes that get an adapter, as peft chooses them."""
    targets, layers = set(lora_projections(lora, config, shapes)), linear_layers(config)
    return {
        name: shape
        for name, shape in shapes.items()
        if name.rpartition(".")[2] in targets
        and not (train_mixer and f".{MIXER_MODULE}." in name)
        and (lora.targets not in OF_LINEAR or any(f".layers.{i}." in name for i in layers))
    }


def refusal(lora: Lora, config: Any, shapes: Shapes) -> str | None:
    """Why a model with linear maps of these shapes cannot have such adapters, beginning with the field; or None."""
    names = {name.rpartition(".")[2] for name in shapes}
    for target in lora_projections(lora, config, shapes):
        if target not in names:
            known = ", ".join(sorted(names - {"embed_tokens"}))
            return f"targets: no projection is called {target!r}; use some of {known}"
    if lora.variant != "pissa":
        return None
    found = adapted(lora, config, shapes, train_mixer=False)
    if getattr(config, "tie_word_embeddings", False) and any(name.endswith("lm_head") for name in found):
        return "targets: pissa changes the base, and lm_head is also the embeddings; use lora, or other projections"
    least = min(found, key=lambda name: min(found[name]))
    if lora.rank > (most := min(found[least])):
        return f"rank: pissa takes {lora.rank} singular vectors of each projection, but {least} has {most}; use {most}"
    return None


def count_adapters(stage: Stage, config: Any, shapes: Shapes) -> tuple[int, int]:
    """The parameters of a stage's adapters, for a model of these shapes, and how many of them are magnitudes, of which
    `dora` has one for each number that a projection gives."""
    if stage.lora is None:
        return 0, 0
    linears = {name.removesuffix(".weight"): shape for name, shape in shapes.items() if len(shape) == 2}
    train_mixer = stage.learning_rates.mixer is not None
    found = adapted(stage.lora, config, linears, train_mixer=train_mixer).values()
    magnitudes = sum(out for out, _ in found) if stage.lora.variant == "dora" else 0
    return stage.lora.rank * sum(sum(shape) for shape in found) + magnitudes, magnitudes


def count_trained(stage: Stage, config: Any, shapes: Shapes) -> int:
    """Parameters that a stage changes, of a model of these shapes: groups with a rate, and its adapters."""
    groups = stage.learning_rates.trained()
    trained = sum(math.prod(shape) for name, shape in shapes.items() if parameter_group(name, config) in groups)
    return trained + count_adapters(stage, config, shapes)[0]


def bytes_beside_teacher(
    stage: Stage, model: Any, device: torch.device, dtype: torch.dtype, processes: int, shards: int
) -> int:
    """What the training of `model` takes of each one of so many processes, of which `shards` share each row, without
    the base that teaches it: an estimate."""
    batch_size, grad_accumulation = share(stage, processes, shards)
    shape = {"batch_size": batch_size, "grad_accumulation": grad_accumulation, "seq_len": stage.seq_len // shards}
    own, shapes = stage.model_copy(update=shape), {name: tuple(p.shape) for name, p in model.named_parameters()}

    def numbers(group: str) -> int:
        return count({name: size for name, size in shapes.items() if parameter_group(name, model.config) == group})

    sizes = Sizes(count(shapes) - numbers("mixer"), numbers("embeddings"), numbers("mixer"))
    trained, (_, magnitudes) = count_trained(own, model.config, shapes), count_adapters(own, model.config, shapes)
    parts = training_bytes(own, model.config, sizes, trained, device, dtype, magnitudes)
    return max(sum(parts.values()), measuring_bytes(own, model.config, sizes, dtype)) - parts["base"]


def curve(losses: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most CURVE_POINTS points (step, mean loss since the last point)."""
    size = -(-len(losses) // CURVE_POINTS) or 1
    chunks = [losses[i : i + size] for i in range(0, len(losses), size)]
    return [(chunk[-1][0], round(sum(loss for _, loss in chunk) / len(chunk), 5)) for chunk in chunks]
