"""Estimates what each GPU sends in an optimizer step, and what it computes meanwhile, from a config alone.

N processes, one for each GPU, send over links of w bytes a second and compute up to f operations a second. Sending
costs no time while bytes / w <= operations / f, because it can then overlap with the computation. `needed_bandwidth` is
the w at which both are equal. Of a collective on n bytes, a process sends (N - 1)/N n in an all-gather, a reduce-
scatter or an all-to-all, and twice that in an all-reduce, as rings do.

The messages of a few bytes that each step also has (the number of labels, the loss, the norm of the gradients) are left
out, and so is the padding of tensors whose first dimension N does not divide.

Symbols in the formulas: H query heads, G key-value heads, D head size, S shards of a row, e bytes per element in the
compute dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rich.filesize import decimal

from liger_convert.config.stages import AlignStage, Stage
from liger_convert.mixers import MIXERS, SOFTMAX, make_spec
from liger_convert.model import MIXER_MODULE, head_dims, linear_layers, parameter_group
from liger_convert.model.families import own_windows
from liger_convert.training.batch_split import divides, sharing_groups, split_batch, whole_groups
from liger_convert.utils.data_sheets import GPU_SPEEDS
from liger_convert.utils.errors import counted

# Assumptions of `plan`, bytes or operations a second. The peak is that of dense bf16 products, the same on an H100. The
# links are those of each GPU in one direction: NVLink 4, and an InfiniBand adapter of 400 Gbit/s for each GPU.
PEAK = GPU_SPEEDS["NVIDIA H200"].peak
LINKS = {"NVLink": 450e9, "InfiniBand": 50e9}

ASSUMED = f"if it computes {PEAK / 1e12:.0f} TFLOP/s and sends " + " or ".join(
    f"{speed / 1e9:.0f} GB/s ({link})" for link, speed in LINKS.items()
)

Shapes = Mapping[str, tuple[int, ...]]  # by name


@dataclass(frozen=True)
class Weights:
    """Parameter counts of a linearized model, and of what a stage trains of it.

    layers: of the base's decoder layers. attention: of these, the attention of linearized layers. ends: embeddings,
    head and last norm. head: the output embeddings, which may also be the input embeddings. mixers: of the mixers.
    passed: of the layers, those that one token passes through, which are fewer in a mixture of experts.
    copies: of mixers that peft keeps beside those that it trains.
    trained: all trained parameters; adapters: those of them that are adapters; of_body: those that are neither adapters
    nor of mixers; products: those that are factors of a matmul.
    """

    layers: int
    attention: int
    ends: int
    head: int
    mixers: int
    passed: int
    copies: int
    trained: int
    adapters: int
    of_body: int
    products: int


def weights_of(stage: Stage, config: Any, shapes: Shapes, adapters: int) -> Weights:
    """The counts for `stage`. config: of the linearized model. shapes: of all its parameters, by name. adapters: number
    of parameters of the stage's adapters."""
    groups, linear = stage.learning_rates.trained(), linear_layers(config)
    found = {name: math.prod(shape) for name, shape in shapes.items()}
    mixers = {name for name in found if f".{MIXER_MODULE}." in name}
    layers = {name for name in found if name.startswith("model.layers.")} - mixers
    attention = {name for i in linear for name in layers if name.startswith(f"model.layers.{i}.self_attn.")}
    trained = {name for name in found if parameter_group(name, config) in groups}
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    share = config.num_experts_per_tok / experts if experts else 1.0

    def total(names: set[str]) -> int:
        return sum(found[name] for name in names)

    of_experts = total({name for name in layers if ".experts." in name})
    head = found.get("lm_head.weight", found["model.embed_tokens.weight"])
    multiplied = adapters + total((trained & layers) | (trained & mixers))
    return Weights(
        layers=total(layers),
        attention=total(attention),
        ends=total(set(found) - layers - mixers),
        head=head,
        mixers=total(mixers),
        passed=total(layers) - of_experts + round(share * of_experts),
        copies=total(mixers & trained) if adapters else 0,
        trained=total(trained) + adapters,
        adapters=adapters,
        of_body=total(trained - mixers),
        products=multiplied + (head if "embeddings" in groups else 0),
    )


def replicated_bytes(weights: Weights, processes: int) -> dict[str, int]:
    """What each process sends in a step if all have all weights: an all-reduce of the float32 gradients."""
    return {"gradients": 2 * _others(4 * weights.trained, processes)}


def sharded_bytes(
    stage: Stage, weights: Weights, dtype: torch.dtype, processes: int, keep_gathered: bool = False
) -> dict[str, int]:
    """What each process sends in a step if all share the weights, see `sharding.py`, by purpose.

    weights     all-gathers in the forward and in the backward pass. Layers that stay gathered, both ends of the model
                and mixers that are units of their own are gathered once. Frozen weights, and those of the base that are
                trained, are sent in the compute dtype; adapters and mixers in float32. Alignment runs only the
                attention of linearized layers, which never stays gathered
    gradients   reduce-scatters of the trained weights' gradients, in float32
    base        all-gathers of the teacher's weights; none if it stays gathered. Alignment does not run its head

    stage: with the micro-batches of one process; each of them gathers and reduces again.
    """
    e, aligns = dtype.itemsize, isinstance(stage, AlignStage)
    apart = e < 4 and weights.of_body > 0 and not weights.adapters  # mixers are units of their own
    inner = e * (weights.attention if aligns else weights.layers) + 4 * weights.adapters
    inner += 0 if apart else 4 * (weights.mixers + weights.copies)
    times = 1 if keep_gathered and not aligns else 2
    gathered = times * inner + (4 * weights.mixers if apart else 0) + (0 if aligns else e * weights.ends)
    base = 0
    if stage.has_teacher and not keep_gathered:
        base = e * (weights.layers + weights.ends - (weights.head if aligns else 0))
    found = {"weights": gathered, "gradients": 4 * weights.trained, "base": base}
    return {name: stage.grad_accumulation * _others(size, processes) for name, size in found.items()}


def sequence_bytes(stage: Stage, config: Any, dtype: torch.dtype, shards: int) -> dict[str, int]:
    """What each process sends in a step if `shards` processes share each row, see `sequence_parallel.py`, by purpose.
    Nothing for one.

    neighbors       for each linearized layer, to the next process the keys, values and deferred inputs of a window, the
                    sinks, and the states in float32; as many gradients to the one before. The first and the last
                    process have one neighbor only, and send half as much
    heads           for each softmax layer, all-to-alls of queries, keys, values and outputs, (2 H + 2 G) D e for each
                    token, of which a process keeps its own part; or, where the shards do not divide the key-value
                    heads, an all-gather of keys and values, S - 1 times 2 G D e for each token. As much again for
                    gradients. Alignment does not run these layers
    heads of base   the same for all layers of the teacher, forward only

    With gradient checkpointing, the model's forward pass sends twice. stage: with the micro-batches of one process, and
    with the length of a shard.
    """
    if shards == 1:
        return {}
    dims, e = head_dims(config), dtype.itemsize
    tokens = stage.batch_size * stage.seq_len
    if dims.kv_heads % shards == 0:
        layer = _others((2 * dims.heads + 2 * dims.kv_heads) * dims.dim * e * tokens, shards)
    else:
        layer = (shards - 1) * 2 * dims.kv_heads * dims.dim * e * tokens
    names = config.linearization["layers"]
    passes = 3 if stage.gradient_checkpointing else 2
    softmax = 0 if isinstance(stage, AlignStage) else names.count(SOFTMAX)
    keys = e if isinstance(stage, AlignStage) else 4
    passed = sum(passed_on_bytes(config, name, e, keys) for name in names if name != SOFTMAX)
    found = {
        "neighbors": passes * stage.batch_size * passed,
        "heads": passes * softmax * layer,
        "heads of base": config.num_hidden_layers * layer if stage.has_teacher else 0,
    }
    return {name: stage.grad_accumulation * size for name, size in found.items()}


def passed_on_bytes(config: Any, name: str, e: int, keys: int) -> int:
    """What a layer with the mixer `name` passes on to the next process for each row. It does not depend on its length.

    keys: bytes per element of rotated keys, which are float32, except in alignment, where all inputs are the base's.
    """
    spec = config.linearization["mixers"][name]
    cls, options, dims = MIXERS[spec["type"]], make_spec(spec), head_dims(config)
    deferred = sum(cls.deferred_input_sizes(options, dims)) if options.scope == "evicted" else 0
    token = dims.kv_heads * ((keys + e) * dims.dim + e * deferred + 4 * options.forget)
    sinks = options.sinks * dims.kv_heads * dims.dim * (keys + e)
    states = 4 * sum(math.prod(shape) for shape in cls.cached_states(options, dims).values())
    return options.cache_window * token + sinks + states


def operations(stage: Stage, config: Any, weights: Weights, shards: int) -> int:
    """The floating-point operations of one process in a step.

    2 for each weight that a token passes through, and for each score of attention 4 D: all earlier tokens of a row in
    softmax layers and in the teacher, a window in linearized layers. A memory is written and read once, 2 for each
    value of its state and each head. The backward pass takes as much for gradients of activations, and 2 for each
    trained weight. With gradient checkpointing, the forward pass runs twice.

    stage: with the micro-batches of one process, and with the length of a shard.
    """
    dims, aligns = head_dims(config), isinstance(stage, AlignStage)
    names, row = config.linearization["layers"], stage.seq_len * shards

    def softmax(window: int | None) -> float:
        return 4 * dims.heads * dims.dim * min(row / 2, window or row)

    def linear(name: str) -> float:
        spec = config.linearization["mixers"][name]
        options = make_spec(spec)
        states = sum(math.prod(x) for x in MIXERS[spec["type"]].state_shape(options, dims).values())
        seen = min(row / 2, options.window or row) + options.sinks
        return 4 * dims.heads * dims.dim * seen + 2 * states * (1 + dims.heads / dims.kv_heads)

    windows = own_windows(config)
    kept = [softmax(window) for window, name in zip(windows, names, strict=True) if name == SOFTMAX]
    made = [linear(name) for name in names if name != SOFTMAX]
    forward: float = 2 * (weights.attention if aligns else weights.passed + weights.head) + 2 * weights.adapters
    forward += sum(made) + (0 if aligns else sum(kept))
    token = (3 if stage.gradient_checkpointing else 2) * forward + 2 * weights.products
    if stage.has_teacher:
        token += 2 * (weights.passed + (0 if aligns else weights.head)) + sum(map(softmax, windows))
    return round(token * stage.batch_size * stage.seq_len * stage.grad_accumulation)


@dataclass(frozen=True)
class Traffic:
    """What each of several GPUs sends and computes in a step.

    computed: operations. whole, sharded, gathered: bytes by purpose, if each has all weights, if all share them, and if
    layers then stay gathered. A layerwise stage, whose steps are counted as if all layers took them together, does not
    share weights: `sharded` and `gathered` are empty, and not in the other fields. bandwidth: for each of these, the
    bytes a second over which sending takes as long as computing. most: for each of these and each of LINKS, the largest
    number of GPUs that share the step's rows and hide what they send; 0 for none. sharing: the largest number that can
    share the rows. spare: how many of the given number are spare, see `sharing_groups`.
    """

    computed: int
    whole: dict[str, int]
    sharded: dict[str, int]
    gathered: dict[str, int]
    bandwidth: dict[str, float]
    most: dict[str, dict[str, int]]
    sharing: int
    spare: int

    def line(self) -> str:
        """The estimate in plain words."""
        kept = f" ({decimal(sum(self.gathered.values()))} where layers stay gathered)"
        sharded = f" Sharded weights: {self._words('sharded', kept)}." if self.sharded else ""
        spare = f"; {self.spare} of these {'is' if self.spare == 1 else 'are'} spare" if self.spare else ""
        return (
            f"computes {self.computed / 1e12:,.1f} TFLOP. Whole weights: {self._words('whole')}.{sharded} At most "
            f"{counted(self.sharing, 'GPU')} can share its rows{spare}"
        )

    def _words(self, way: str, kept: str = "") -> str:
        most = [f"{f'up to {n} GPUs' if n > 1 else 'not'} over {link}" for link, n in self.most[way].items()]
        sent, needed = decimal(sum(getattr(self, way).values())), decimal(round(self.bandwidth[way]))
        return f"sends {sent}{kept}, hidden by links of {needed}/s: {', '.join(most)}"


def estimate(
    stage: Stage, config: Any, shapes: Shapes, adapters: int, dtype: torch.dtype, processes: int, shards: int
) -> Traffic:
    """The traffic of `stage` in `processes` processes, in groups of `shards` that share every row. The arguments are
    those of `weights_of`, and the compute dtype."""
    weights = weights_of(stage, config, shapes, adapters)
    by_layer = isinstance(stage, AlignStage) and stage.layerwise

    def sent_and_computed(number: int) -> tuple[dict[str, dict[str, int]], int]:
        rows, times = split_batch(stage, number, shards)
        changes = {"batch_size": rows, "grad_accumulation": times, "seq_len": stage.seq_len // shards}
        own = stage.model_copy(update=changes)
        between = sequence_bytes(own, config, dtype, shards)
        sent = {"whole": replicated_bytes(weights, number) | between}
        if not by_layer:
            sent["sharded"] = sharded_bytes(own, weights, dtype, number) | between
            sent["gathered"] = sharded_bytes(own, weights, dtype, number, keep_gathered=True) | between
        return sent, operations(own, config, weights, shards)

    sharing = stage.batch_size * stage.grad_accumulation
    sent, computed = sent_and_computed(processes)
    needed = {way: needed_bandwidth(sum(sizes.values()), computed) for way, sizes in sent.items()}
    most = {way: dict.fromkeys(LINKS, 0) for way in sent}
    for groups in (n for n in range(1, sharing + 1) if divides(stage, n)):
        of_others, theirs = sent_and_computed(groups * shards)
        for way, numbers in most.items():
            for link, speed in LINKS.items():
                if needed_bandwidth(sum(of_others[way].values()), theirs) <= speed:
                    numbers[link] = groups * shards
    sizes = sent["whole"], sent.get("sharded", {}), sent.get("gathered", {})
    spare = processes - sharing_groups(stage, whole_groups(processes, shards)) * shards
    return Traffic(computed, *sizes, bandwidth=needed, most=most, sharing=sharing * shards, spare=spare)


def needed_bandwidth(sent: int, computed: int) -> float:
    """The bytes a second at which sending `sent` bytes takes as long as `computed` operations at PEAK."""
    return sent * PEAK / computed


def _others(size: int, processes: int) -> int:
    """The part of `size` bytes that a process sends in a collective of a ring."""
    return size * (processes - 1) // processes
