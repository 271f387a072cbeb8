"""The model that a stage trains: its adapters, its trainable parameters, and its compiled layers."""

from __future__ import annotations

import hashlib
import inspect
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import gated_kernels
import torch
import torch._functorch.config
import torch._inductor.config
from peft import LoraConfig, get_peft_model

import liger_convert
from liger_convert.config.stages import Lora, Stage
from liger_convert.mixers.base import Mixer
from liger_convert.model import MIXER_MODULE, linear_layers, parameter_group
from liger_convert.model.families import family_of
from liger_convert.model.placing import waits
from liger_convert.training.adapters import adapted_model
from liger_convert.training.align import AlignObjective
from liger_convert.training.batch_split import split_batch
from liger_convert.training.memory_estimate import Sizes, count, measuring_bytes, training_bytes
from liger_convert.training.trainer import Objective, freeze
from liger_convert.utils.errors import BadInput

CURVE_POINTS = 50
OF_LINEAR = ("attention", "linearized")  # LoRA targets that are limited to the linearized layers
# By default, inductor does not cache graphs that contain these. It is safe here: their arguments determine their
# result.
CACHEABLE = {f"torch.amp.autocast_mode.{name}": "1" for name in ("_enter_autocast", "_exit_autocast")}

Shapes = Mapping[str, tuple[int, ...]]  # by name


def prepare(model: Any, stage: Stage) -> Any:
    """Adds the stage's adapters to `model`, or freezes what the stage does not train. Returns the model to train."""
    if stage.lora is not None:
        return add_lora(model, stage.lora, train_mixer=stage.learning_rates.mixer is not None)
    freeze(model, stage.learning_rates.trained())
    return model


def gains_by_compiling(device: torch.device) -> bool:
    """Whether compiling layers pays off. On a CPU it does not: launches are cheap there, and ops that branch on values
    cause graph breaks."""
    return device.type == "cuda"


def compile_layers(model: Any, objective: Objective, aligning: bool) -> None:
    """Compiles the layers of `model` and of its teacher, in place; parameter names do not change.

    There is one graph for each kind of layer and each row length, because kernels for dynamic shapes are slower. In
    alignment only the attention of the linearized layers is compiled, as nothing else runs. A teacher with layers in
    host memory is not compiled: its weights are loaded by hooks that cannot be part of a graph.
    """
    _keep_compiled_graphs(model)
    torch._dynamo.config.recompile_limit = 64  # kinds of layers times row lengths
    torch._dynamo.config.optimize_ddp = False  # it splits graphs to send gradients earlier; single layers are fine
    whole = adapted_model(model)
    backbone = whole.model
    if aligning:
        compile_attention(model)
        assert isinstance(objective, AlignObjective)
        for layer in [] if waits(objective.base) else objective.base.model.layers:
            compile_parts(layer)
        return
    embeddings = whole.get_input_embeddings()
    if not embeddings.weight.requires_grad:
        embeddings.register_forward_hook(_with_gradient)
    teacher = getattr(objective, "base", None)
    of_teacher = [] if teacher is None or waits(teacher) else teacher.model.layers
    for layer in [*backbone.layers, *of_teacher]:
        layer.compile(dynamic=False)


def _keep_compiled_graphs(model: Any) -> None:
    """Lets torch's cache on disk keep the graphs of all layers, so that another run need not compile them again.

    A key of that cache does not see what an op does in its backward pass. So the keys are made to depend on our code,
    and on that of mixers from other packages.
    """
    torch._inductor.config.unsafe_marked_cacheable_functions = CACHEABLE
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    given = os.environ.get("TORCH_COMPILE_CACHE_KEY_TAG", "")  # torch's own variable, for a user's own tag
    folders = [Path(package.__path__[0]) for package in (liger_convert, gated_kernels)]
    files = {Path(inspect.getfile(type(module))) for module in model.modules() if isinstance(module, Mixer)}
    torch.compiler.config.cache_key_tag = given + code_hash(*folders, *sorted(files))


def code_hash(*paths: Path) -> str:
    """The hexadecimal sha256 of these Python files, and of all in these folders."""
    files = [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def _with_gradient(embeddings: torch.nn.Module, ids: Any, output_BTC: torch.Tensor) -> torch.Tensor:
    """Lets the input of the first layer need a gradient, as those of all others do. It would get a graph of its own
    otherwise."""
    return output_BTC.requires_grad_()


def compile_attention(model: Any) -> None:
    """Compiles the parts of `model` that alignment runs, in place."""
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.optimize_ddp = False  # as in `compile_layers`
    whole = adapted_model(model)
    for i in linear_layers(model.config):
        whole.model.layers[i].self_attn.compile(dynamic=False)
    # two kernels instead of a dozen that each write a float32 tensor of the layer's size
    whole.relative_error = torch.compile(whole.relative_error, dynamic=False)


def compile_parts(layer: torch.nn.Module) -> None:
    """Compiles each submodule of a base's layer separately, in place. Alignment hooks the inputs and outputs of the
    attention, and these hooks must stay outside of graphs."""
    for part in layer.children():
        part.forward = torch.compile(part.forward, dynamic=False)


def add_lora(model: Any, lora: Lora, *, train_mixer: bool) -> Any:
    """Adds adapters to `model` and returns the peft model. With `train_mixer`, the mixers are trained in full as well.

    Raises BadInput for unknown targets, and if the model does not support these adapters.
    """
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
        use_dora=lora.variant == "dora",  # pissa adapters are plain until `pissa.start`
        target_modules=list(targets),
        layers_to_transform=linear_layers(model.config) if lora.targets in OF_LINEAR else None,
        modules_to_save=[MIXER_MODULE] if train_mixer else None,
    )
    # a model on the meta device gets adapters on the meta device
    return get_peft_model(model, config, low_cpu_mem_usage=any(p.is_meta for p in model.parameters()))


def lora_projections(lora: Lora, config: Any, linears: Iterable[str]) -> list[str]:
    """The names of the projections that get an adapter, without their path.

    linears: the full names of all linear maps of the model. Unless `lora.targets` names them itself, linear maps in a
    mixer get no adapter, because they are new and trained in full. Neither do routers, so that routing does not change.
    """
    if lora.targets == "attention":
        return list(family_of(config).projections)
    if lora.targets in ("linearized", "all"):
        body = (name for name in linears if re.search(r"\.layers\.\d+\.(self_attn|mlp)\.", name))
        return sorted({name.rpartition(".")[2] for name in body if f".{MIXER_MODULE}." not in name} - {"gate"})
    assert isinstance(lora.targets, list)
    return lora.targets


def adapted(lora: Lora, config: Any, shapes: Shapes, *, train_mixer: bool) -> Shapes:
    """The linear maps among `shapes` that get an adapter, chosen as peft does."""
    targets, layers = set(lora_projections(lora, config, shapes)), linear_layers(config)
    return {
        name: shape
        for name, shape in shapes.items()
        if name.rpartition(".")[2] in targets
        and not (train_mixer and f".{MIXER_MODULE}." in name)
        and (lora.targets not in OF_LINEAR or any(f".layers.{i}." in name for i in layers))
    }


def refusal(lora: Lora, config: Any, shapes: Shapes) -> str | None:
    """Why a model with linear maps of these shapes does not support such adapters, or None. The sentence begins with
    the name of the field."""
    names = {name.rpartition(".")[2] for name in shapes} - {"embed_tokens"}  # no linear map
    for target in lora_projections(lora, config, shapes):
        if target not in names:
            return f"targets: no projection is called {target!r}; use some of {', '.join(sorted(names))}"
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
    """The number of parameters of a stage's adapters, and how many of them are magnitudes. DoRA has one magnitude for
    each output of a projection. shapes: of all parameters of the model, by name."""
    if stage.lora is None:
        return 0, 0
    linears = {name.removesuffix(".weight"): shape for name, shape in shapes.items() if len(shape) == 2}
    train_mixer = stage.learning_rates.mixer is not None
    found = adapted(stage.lora, config, linears, train_mixer=train_mixer).values()
    magnitudes = sum(out for out, _ in found) if stage.lora.variant == "dora" else 0
    return stage.lora.rank * sum(sum(shape) for shape in found) + magnitudes, magnitudes


def count_trained(stage: Stage, config: Any, shapes: Shapes) -> int:
    """The number of parameters that a stage trains: groups with a learning rate, and its adapters. shapes: of all
    parameters of the model, by name."""
    groups = stage.learning_rates.trained()
    trained = sum(math.prod(shape) for name, shape in shapes.items() if parameter_group(name, config) in groups)
    return trained + count_adapters(stage, config, shapes)[0]


def bytes_beside_teacher(
    stage: Stage, model: Any, device: torch.device, dtype: torch.dtype, processes: int, shards: int
) -> int:
    """Estimates the bytes that training `model` takes in each of `processes` processes, without those of the teacher.

    shards: how many processes share each row. The weights are not sharded.
    """
    batch_size, grad_accumulation = split_batch(stage, processes, shards)
    shape = {"batch_size": batch_size, "grad_accumulation": grad_accumulation, "seq_len": stage.seq_len // shards}
    own, shapes = stage.model_copy(update=shape), {name: tuple(p.shape) for name, p in model.named_parameters()}

    def numbers(group: str) -> int:
        return count({name: size for name, size in shapes.items() if parameter_group(name, model.config) == group})

    sizes = Sizes(count(shapes) - numbers("mixer"), numbers("embeddings"), numbers("mixer"))
    trained, (_, magnitudes) = count_trained(own, model.config, shapes), count_adapters(own, model.config, shapes)
    parts = training_bytes(own, model.config, sizes, trained, device, dtype, magnitudes)
    return max(sum(parts.values()), measuring_bytes(own, model.config, sizes, dtype)) - parts["base"]


def curve(losses: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Reduces a loss curve to at most CURVE_POINTS points (step, mean loss since the previous point). losses: pairs
    (step, loss)."""
    size = -(-len(losses) // CURVE_POINTS) or 1
    chunks = [losses[i : i + size] for i in range(0, len(losses), size)]
    return [(chunk[-1][0], round(sum(loss for _, loss in chunk) / len(chunk), 5)) for chunk in chunks]
