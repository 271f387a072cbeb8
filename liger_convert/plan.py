"""From a recipe and the base's config to a plan: what each layer becomes, how large everything is. Touches no weight.

Shapes in the formulas: L layers, C hidden size, H query heads, G key-value heads, D head size, I width of the MLP,
V vocabulary, F feature size, N tokens, P parameters, T trained ones.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Group
from rich.filesize import decimal
from rich.table import Table
from transformers import AutoModelForCausalLM, DynamicCache

from liger_convert.device import compute_dtype, pick_device
from liger_convert.errors import BadInput, first_line
from liger_convert.families import PREFIX, family_of
from liger_convert.mixers import MIXERS, SOFTMAX, make_spec, resolve_spec
from liger_convert.model import head_dims, linearized_config, new_state, parameter_group
from liger_convert.model.configuration import FORMAT
from liger_convert.recipe import MAIN, Recipe, Stage

CONTEXTS = (4096, 32768, 131072)
COPY_BYTES = 32 << 20  # what convert takes for its buffers, whatever the checkpoint


@dataclass(frozen=True)
class StagePlan:
    """One training stage: tokens it really sees (whole optimizer steps), parameters it trains, bytes at its peak."""

    kind: str
    tokens: int
    trained: int
    memory_bytes: int


@dataclass(frozen=True)
class Plan:
    """What a conversion will do.

    new_parameters, reused_parameters: shapes by name, the latter in the naming of transformers' modules.
    state_bytes: what all linearized layers together keep for one sequence of any length. growing_bytes: what those
    whose window holds all tokens keep of each one besides. sliding_windows: the base's own window in each layer, if
    it has one. token_bytes: one token's key and value in one layer's cache.
    teacher_tokens: of each source that the base writes itself, how many it writes.
    undecided: how many layers stay softmax that a run has yet to choose; the last ones stand for them in
    `linearization`, and all sizes are right unless the base's layers differ in their own windows.
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
    stages: tuple[StagePlan, ...]
    teacher_tokens: dict[str, int]
    undecided: int = 0

    @property
    def layers(self) -> list[str]:
        return self.linearization["layers"]

    def kv_bytes(self, tokens: int) -> int:
        """The base's key-value cache of one sequence."""
        return sum(self._kv_layer_bytes(i, tokens) for i in range(len(self.layers)))

    def cache_bytes(self, tokens: int) -> int:
        """The linearized model's cache of one sequence: states, and the keys of layers that see all tokens."""
        kept = (i for i, mixer in enumerate(self.layers) if mixer == SOFTMAX)
        return self.state_bytes + self.growing_bytes * tokens + sum(self._kv_layer_bytes(i, tokens) for i in kept)

    def _kv_layer_bytes(self, layer: int, tokens: int) -> int:
        window = self.sliding_windows[layer]
        # a sliding cache layer keeps one token less than its window, because the query brings its own
        return self.token_bytes * (tokens if window is None else min(tokens, window - 1))

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Estimated peaks beyond the interpreter: of `convert`, of `inference` at 4K tokens, of each training stage."""
        itemsize = getattr(torch, self.dtype).itemsize
        new, reused = _count(self.new_parameters), _count(self.reused_parameters)
        linear = sum(name != SOFTMAX for name in self.layers)
        convert = COPY_BYTES + 4 * new // linear  # new tensors are float32 and made layer by layer
        inference = reused * itemsize + 4 * new + self.cache_bytes(CONTEXTS[0])
        stages = {f"{i}-{stage.kind}": stage.memory_bytes for i, stage in enumerate(self.stages, 1)}
        return {"convert": convert, "inference": inference, **stages}

    def to_dict(self) -> dict[str, Any]:
        """Everything the table says, as plain JSON."""
        return {
            "name": self.name,
            "model_type": self.model_type,
            "dtype": self.dtype,
            "linearization": self.linearization
            | ({"layers": {"softmax_auto": self.undecided}} if self.undecided else {}),
            "parameters": {"new": _count(self.new_parameters), "reused": _count(self.reused_parameters)},
            "new_parameters": {name: list(shape) for name, shape in self.new_parameters.items()},
            "state_bytes": self.state_bytes,
            "growing_bytes": self.growing_bytes,
            "cache_bytes": {str(n): {"base": self.kv_bytes(n), "linearized": self.cache_bytes(n)} for n in CONTEXTS},
            "stages": [asdict(stage) for stage in self.stages],
            "teacher_tokens": self.teacher_tokens,
            "memory_bytes": self.memory_bytes,
        }

    def render(self) -> Group:
        """The plan as tables for a terminal."""
        layers = Table("layers", "become", "window", "sinks", "memory", title=f"{self.name}: {self.model_type}")
        for name in dict.fromkeys(self.layers):
            where = _ranges([i for i, layer in enumerate(self.layers) if layer == name])
            if self.undecided:
                where = f"{self.layers.count(name)} of {len(self.layers)}, chosen by measurement in the run"
            if name == SOFTMAX:
                layers.add_row(where, "softmax attention, as it was", "", "", "")
                continue
            spec = self.linearization["mixers"][name]
            kind = spec["type"] if name == MAIN else f"{name}: {spec['type']}"
            layers.add_row(where, kind, str(spec["window"] or "all"), str(spec["sinks"]), MIXERS[spec["type"]].summary)
        sizes = Table("parameters", "", title="sizes")
        sizes.add_row("reused from the base", f"{_count(self.reused_parameters):,}")
        sizes.add_row("new", f"{_count(self.new_parameters):,}")
        sizes.add_row("state of one sequence", decimal(self.state_bytes))
        if self.growing_bytes:
            sizes.add_row("and of each of its tokens, as windows of all tokens grow", decimal(self.growing_bytes))
        cache = Table("tokens", "base", "linearized", "ratio", title="cache of one sequence")
        for n in CONTEXTS:
            base, ours = self.kv_bytes(n), self.cache_bytes(n)
            cache.add_row(f"{n // 1024}K", decimal(base), decimal(ours), f"{base / ours:.1f}x")
        tables = [layers, sizes, cache]
        if self.teacher_tokens:
            writing = Table("source", "tokens", title="data, written by the base")
            for name, tokens in self.teacher_tokens.items():
                writing.add_row(name, f"{tokens:,}")
            tables.append(writing)
        if self.stages:
            training = Table("stage", "tokens", "trained parameters", title="training")
            for stage in self.stages:
                training.add_row(stage.kind, f"{stage.tokens:,}", f"{stage.trained:,}")
            tables.append(training)
        memory = Table("step", "peak", title="memory, estimated, beyond the interpreter")
        for step, size in self.memory_bytes.items():
            memory.add_row(step, decimal(size))
        return Group(*tables, memory)


def make_plan(recipe: Recipe, base_config: Any) -> Plan:
    """The plan of `recipe` for the base with this config.

    Raises BadInput for a base that cannot be linearized, unknown mixers or options, and layers that do not fit it.
    """
    check_base(base_config)
    specs = {MAIN: resolve_spec(recipe.mixer.to_dict(), "mixer")}
    for name, spec in recipe.mixers.items():
        specs[name] = resolve_spec(spec.to_dict(), f"mixers.{name}")
    layers = resolve_layers(recipe.dump()["layers"], base_config.num_hidden_layers, list(specs))
    used = {name: spec for name, spec in specs.items() if name in layers}
    linearization = {"format": FORMAT, "mixers": used, "layers": layers}
    config = linearized_config(base_config, linearization)
    with torch.device("meta"):
        new = {name: tuple(tensor.shape) for name, tensor in new_state(config).items()}
    reused = {name: tuple(p.shape) for name, p in meta_model(base_config).named_parameters()}
    dtype = recipe.export.dtype if recipe.export.dtype != "auto" else _dtype_name(base_config)
    itemsize = getattr(torch, dtype).itemsize
    dims = head_dims(base_config)
    compute = compute_dtype(pick_device("auto"), recipe.precision)
    stages = []
    for stage in recipe.stages:
        trained = _trained(stage, config, reused | new)
        memory = _training_bytes(stage, config, _count(reused), _count(new), trained, compute.itemsize)
        stages.append(StagePlan(stage.kind, stage.steps * stage.step_tokens, trained, memory))
    cache, linear = DynamicCache(config=base_config), [name for name in layers if name != SOFTMAX]
    return Plan(
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
        sliding_windows=tuple(getattr(layer, "sliding_window", None) for layer in cache.layers),
        token_bytes=2 * dims.kv_heads * dims.dim * itemsize,
        stages=tuple(stages),
        teacher_tokens={name: source.written_tokens for name, source in recipe.teachers.items()},
        undecided=0 if recipe.softmax_auto is None else layers.count(SOFTMAX),
    )


def check_base(config: Any) -> None:
    """Raises BadInput unless `config` is an unquantised base of a known family."""
    if config.model_type.startswith(PREFIX):
        raise BadInput(f"base: model_type {config.model_type!r} is linearized already; give the model it was made from")
    family_of(config)
    if getattr(config, "quantization_config", None) is not None:
        raise BadInput("base: config.json says it is quantised; give the bf16, fp16 or fp32 weights it was made from")


def meta_model(config: Any) -> Any:
    """The base's model without storage. Raises BadInput when the config contradicts itself."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except Exception as error:  # whatever the family's code makes of sizes that do not fit
        raise BadInput(f"config.json: no {config.model_type} can be built from it: {first_line(error)}") from error


def resolve_layers(layers: str | list[str] | dict[str, Any], depth: int, names: list[str]) -> list[str]:
    """What each of `depth` layers becomes, a mixer's name or softmax, from any form a recipe may give.

    Forms: `all`; letters such as `LLLN`, repeated to the depth; a list of names; `{softmax_every: n}` (the last of
    every n layers); `{linear: [...]}` or `{softmax: [...]}` with layer numbers; `{softmax_auto: n}`, or below 1 a share
    of the layers, where the last n stand for those that are chosen later; `{repeat: [...]}`, names repeated to the
    depth. Raises BadInput at `layers`.
    """
    if layers == "all":
        layers = "L"
    if isinstance(layers, str):
        if not layers or set(layers) - {"L", "N"}:
            raise BadInput(f"layers: {layers!r} is no pattern; use all, or letters such as LLLN (L linear, N softmax)")
        resolved = [MAIN if letter == "L" else SOFTMAX for letter in itertools.islice(itertools.cycle(layers), depth)]
    elif isinstance(layers, list):
        if len(layers) != depth:
            raise BadInput(f"layers: names {len(layers)} layers, but the base has {depth}")
        _check_names(layers, names, "layers")
        resolved = layers
    else:
        ((form, value),) = ((form, value) for form, value in layers.items() if value is not None)
        if form == "softmax_every":
            resolved = [SOFTMAX if (i + 1) % value == 0 else MAIN for i in range(depth)]
        elif form == "softmax_auto":
            if value >= depth:
                raise BadInput(f"layers.softmax_auto: {value} is too many; of the base's {depth} layers keep fewer")
            kept = value if value >= 1 else max(1, int(value * depth))
            resolved = [MAIN] * (depth - kept) + [SOFTMAX] * kept
        elif form == "repeat":
            _check_names(value, names, "layers.repeat")
            resolved = list(itertools.islice(itertools.cycle(value), depth))
        else:
            _check_numbers(value, depth, f"layers.{form}")
            resolved = [MAIN if (i in value) == (form == "linear") else SOFTMAX for i in range(depth)]
    if all(name == SOFTMAX for name in resolved):
        raise BadInput(f"layers: leaves all {depth} layers softmax, so there is nothing to linearize")
    return resolved


def _check_names(written: list[str], names: list[str], where: str) -> None:
    for i, name in enumerate(written):
        if name not in (*names, SOFTMAX):
            raise BadInput(f"{where}[{i}]: {name!r} is no mixer; use one of {', '.join([*names, SOFTMAX])}")


def _check_numbers(numbers: list[int], depth: int, where: str) -> None:
    for number in numbers:
        if not 0 <= number < depth:
            raise BadInput(f"{where}: there is no layer {number}; the base has 0 to {depth - 1}")
        if numbers.count(number) > 1:
            raise BadInput(f"{where}: layer {number} is named twice")


def _ring_bytes(spec: dict[str, Any], config: Any, itemsize: int) -> int:
    """One token's share of one linearized layer's ring: key, value, what is pending, log f and, 8 bytes, its rank."""
    cls, options, dims = MIXERS[spec["type"]], make_spec(spec), head_dims(config)
    pending = sum(cls.pending_sizes(options, dims)) if options.scope == "evicted" else 0
    return dims.kv_heads * ((2 * dims.dim + pending) * itemsize + 4 * options.forget) + 8


def _state_bytes(spec: dict[str, Any], config: Any, itemsize: int) -> int:
    """One linearized layer's share of LinearizedCacheLayer: a full ring, sinks, and recurrent states in float32."""
    cls, options, dims = MIXERS[spec["type"]], make_spec(spec), head_dims(config)
    ring = max(options.window - 1, 0) * _ring_bytes(spec, config, itemsize)
    # 8 bytes each: where a sink stands; the count of tokens seen
    sinks = options.sinks * (dims.kv_heads * 2 * dims.dim * itemsize + 8) + 8
    return ring + sinks + 4 * sum(math.prod(shape) for shape in cls.state_shape(options, dims).values())


def _trained(stage: Stage, config: Any, shapes: dict[str, tuple[int, ...]]) -> int:
    """Parameters that a stage changes: groups with a rate, and the factors of LoRA beside its targets."""
    groups = stage.rates.trained()
    trained = sum(math.prod(shape) for name, shape in shapes.items() if parameter_group(name, config) in groups)
    if stage.lora is not None:
        targets = family_of(config).projections if stage.lora.targets == "attention" else stage.lora.targets
        adapted = [shape for name, shape in shapes.items() if name.endswith(tuple(f".{t}.weight" for t in targets))]
        trained += stage.lora.rank * sum(sum(shape) for shape in adapted)
    return trained


def _training_bytes(stage: Stage, config: Any, reused: int, new: int, trained: int, itemsize: int) -> int:
    """Roughly, with e bytes in a number of the compute dtype and N tokens in a micro batch:

    weights      4 P, and under autocast their copies e P; the base beside them e P_base, unless finetuning
    optimizer    12 T: a gradient and Adam's two moments
    activations  kept for the backward pass, N times in each layer: attention e (4 C + 4 (H + G) D), MLP e (4 C + 4 I),
                 norms in float32 16 C, mixer in float32 4 (3 (H + G) F + 3 H D). With checkpointing e C a layer, and
                 one layer in full; in alignment no MLP, half the norms, and e 2 C of targets
    logits       e N V for ours, their gradient twice, and the base's in distillation; none in alignment
    """
    dims, depth = head_dims(config), config.num_hidden_layers
    width = getattr(config, "moe_intermediate_size", config.intermediate_size)
    width *= getattr(config, "num_experts_per_tok", 1)
    attention = itemsize * (4 * dims.hidden + 4 * (dims.heads + dims.kv_heads) * dims.dim)
    mlp = itemsize * (4 * dims.hidden + 4 * width)
    norms = 16 * dims.hidden
    mixers = sum(_mixer_bytes(config, name) for name in config.linearization["layers"] if name != SOFTMAX)
    layer, logits = {
        "align": (attention + norms // 2 + itemsize * 2 * dims.hidden, 0),
        "distill": (attention + mlp + norms, 4 * config.vocab_size),
        "finetune": (attention + mlp + norms, 3 * config.vocab_size),
    }[stage.kind]
    layers = depth * layer + mixers
    if stage.gradient_checkpointing:
        layers = depth * itemsize * dims.hidden + layers // depth
    copies = (new + reused if itemsize < 4 else 0) + (0 if stage.kind == "finetune" else reused)
    tokens = stage.batch_size * stage.seq_len
    return 4 * (new + reused) + 12 * trained + itemsize * copies + tokens * (layers + itemsize * logits)


def _mixer_bytes(config: Any, name: str) -> int:
    """What one layer's mixer keeps of a token for the backward pass, in float32: features, gates and outputs."""
    spec, dims = config.linearization["mixers"][name], head_dims(config)
    shapes = MIXERS[spec["type"]].state_shape(make_spec(spec), dims).values()
    features = max((shape[-2] for shape in shapes), default=0)
    return 4 * (3 * (dims.heads + dims.kv_heads) * features + 3 * dims.heads * dims.dim) if features else 0


def _dtype_name(config: Any) -> str:
    dtype = config.dtype or torch.float32
    return str(dtype).removeprefix("torch.")


def _count(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def _ranges(numbers: list[int]) -> str:
    """`0-2, 4, 6-9`: ascending numbers with neighbours joined."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
