"""Estimates the peak memory of each step of a run, in bytes, from a config alone. Reads no weights.

Symbols in the formulas: C hidden size, H query heads, G key-value heads, D head size, I MLP width, V vocabulary size,
F feature size, N tokens of a micro-batch, P parameters, T trained parameters, e bytes per element in the compute dtype.
`kernels/bench_plan.py` compares the estimates with measured peaks.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch

from liger_convert.config.stages import AlignStage, Stage
from liger_convert.mixers import MIXERS, SOFTMAX, make_spec
from liger_convert.model import head_dims, linear_layers
from liger_convert.model.families import family_of
from liger_convert.model.modeling import PREFILL_CHUNK
from liger_convert.training.frozen import is_narrowed

COPY_BYTES = 32 << 20  # size of convert's buffers, independent of the checkpoint
# Logits per chunk of a loss, by device. On a CPU, few enough that a chunk's float32 temporaries stay in the cache,
# which is five times as fast as one pass over all logits. On a GPU, enough that a chunk takes longer than launching the
# next.
CHUNK_LOGITS = {"cpu": 2**22, "cuda": 2**28}
# Logits computed from hidden states at a time: enough to amortize reading the head's weights for each matmul.
HEAD_LOGITS = {"cpu": 2**25, "cuda": 2**28}
ERROR_ROWS = 4  # rows on which a stage reports errors; fixed, so that the result does not depend on the batch size
CALIBRATION_TOKENS = 8192  # about thirty for each of 256 codes
CODED = 64  # tokens per chunk; the kernels materialize one state per chunk in the backward pass


@dataclass(frozen=True)
class Sizes:
    """Parameter counts that the estimates are based on.

    base: of the base model, embeddings included. embeddings: of the input and output embeddings, counted once if tied.
    new: of the mixers.
    """

    base: int
    embeddings: int
    new: int


def training_bytes(
    stage: Stage,
    config: Any,
    sizes: Sizes,
    trained: int,
    device: torch.device,
    dtype: torch.dtype,
    magnitudes: int = 0,
) -> dict[str, int]:
    """The peak memory of a stage on `device`, in bytes, by purpose. dtype: the compute dtype. trained: T. magnitudes:
    how many magnitudes DoRA trains.

    weights      4 P, or e for each frozen parameter of the layers; see `frozen.py`
    base         e P_base, if the stage has a teacher
    optimizer    8 T: Adam's two moments
    average      4 T, with `ema_length`
    gradients    4 T if they coexist with the activations, which they do with several micro-batches per step and in a
                 captured graph. Otherwise they replace the activations in the backward pass, and only the excess over
                 activations and logits counts
    copies       under autocast, the weights that the backward pass needs in the compute dtype: e for every weight of a
                 matmul through which a gradient flows, unless it is stored in that dtype. With gradient checkpointing,
                 one layer and the head; if the layers are not compiled, also the trained weights, which autocast caches
                 until the end of the forward pass
    activations  what N tokens save for the backward pass, see `_kept`. With gradient checkpointing, 4 C per layer and
                 one layer in full. In alignment, only the attention, plus 2 e C of targets. Each projection with
                 magnitudes saves both parts of its output, e each
    passing      the temporaries of one layer's backward pass, see `_passing`
    logits       for a chunk of tokens, the student's logits, their gradient, the teacher's logits, and the temporaries
                 of the loss; for all tokens, the teacher's hidden states and the gradient of the student's, e N C each;
                 the float32 gradient of the head's weights, twice, if they are trained. None in alignment
    graphs       of a captured pass, for each row length as much again as the logits, by measurement: what a graph holds
                 apart, and what the allocator cannot use for another
    """
    compiled = stage.compile and device.type == "cuda"
    e, dims, depth = dtype.itemsize, head_dims(config), config.num_hidden_layers
    tokens, aligns = stage.batch_size * stage.seq_len, isinstance(stage, AlignStage)
    teaches = stage.has_teacher
    layers = [_kept(stage, config, name, e, device, compiled) for name in config.linearization["layers"]]
    halves = 2 * e * magnitudes
    passing = max(_passing(config, name, e, device, aligns) for name in set(config.linearization["layers"]))
    if aligns:
        projections = sum(name != SOFTMAX for name in config.linearization["layers"])
        matrices = projections * dims.hidden * 2 * (dims.heads + dims.kv_heads) * dims.dim
        head = logits = 0
    else:
        head = config.vocab_size * dims.hidden
        matrices = sizes.base - sizes.embeddings
        chunk = min(tokens * config.vocab_size, CHUNK_LOGITS[device.type])
        made = min(tokens * config.vocab_size, HEAD_LOGITS[device.type])
        states = tokens * dims.hidden * (2 if teaches else 1)
        logits = e * (made * (3 if teaches else 2) + states) + (e if compiled else 16) * chunk
        logits += 8 * head if "embeddings" in stage.learning_rates.trained() else 0
    narrowed = _narrowed(stage, sizes, trained) if is_narrowed(stage, dtype) else 0
    if narrowed:
        matrices = min(matrices, sizes.base - sizes.embeddings - narrowed)
    activations, copies = sum(layers) + halves, matrices + head
    if stage.gradient_checkpointing:
        targets = (2 if aligns else 0) * e * dims.hidden
        activations = max(layers) + halves // max(1, len(linear_layers(config))) + depth * (targets or 4 * dims.hidden)
        copies = matrices // depth + head + (0 if compiled else trained)
    captured = _is_captured(stage, device)
    held = captured or stage.grad_accumulation > 1
    return {
        "weights": 4 * (sizes.base + sizes.new) - (4 - e) * narrowed,
        "base": e * sizes.base if teaches else 0,
        "optimizer": 8 * trained,
        "average": 4 * trained if stage.ema_length else 0,
        "gradients": 4 * trained if held else max(0, 4 * trained - tokens * activations - logits),
        "copies": e * copies if e < 4 else 0,
        "activations": tokens * activations,
        "passing": tokens * passing,
        "logits": logits,
        "graphs": logits * (1 + len(stage.mixed_seq_lens)) if captured else 0,
    }


def _is_captured(stage: Stage, device: torch.device) -> bool:
    return stage.compile and device.type == "cuda" and not stage.gradient_checkpointing


def _narrowed(stage: Stage, sizes: Sizes, trained: int) -> int:
    """The number of frozen parameters in the layers."""
    own = 0 if stage.lora is not None else _beside_mixers(stage, sizes, trained)
    own -= sizes.embeddings if "embeddings" in stage.learning_rates.trained() else 0
    return sizes.base - sizes.embeddings - own


def _beside_mixers(stage: Stage, sizes: Sizes, trained: int) -> int:
    """The number of trained parameters outside the mixers."""
    return trained - (sizes.new if "mixer" in stage.learning_rates.trained() else 0)


def layerwise_bytes(
    stage: Stage,
    config: Any,
    sizes: Sizes,
    trained: int,
    device: torch.device,
    dtype: torch.dtype,
    magnitudes: int = 0,
) -> dict[str, int]:
    """The peak memory of layerwise training, in bytes, by purpose. The arguments are those of `training_bytes`.

    It is that of a model which has only the most expensive layer, with these differences:

    weights      only those of the attention and the mixer, 4 each
    base         e for each weight of one layer
    hidden       4 e N C: the layer's inputs and outputs, the inputs of the next batch, and the outputs of the last one,
                 until they are copied to the host; and 2 e N C for the inputs and outputs that each captured graph has
                 of its own, one for each row length
    """
    batches = 4 + (2 * (1 + len(stage.mixed_seq_lens)) if _is_captured(stage, device) else 0)
    linear = [name for name in config.linearization["layers"] if name != SOFTMAX]
    dims, new = head_dims(config), sizes.new // len(linear)
    layer = (sizes.base - sizes.embeddings) // config.num_hidden_layers
    made = []
    for name in set(linear):
        parts = training_bytes(
            stage,
            _of_one(config, name),
            Sizes(layer, 0, new),
            trained // len(linear),
            device,
            dtype,
            magnitudes // len(linear),
        )
        parts["weights"] = 4 * (dims.hidden * 2 * (dims.heads + dims.kv_heads) * dims.dim + new)
        parts["hidden"] = batches * dtype.itemsize * stage.batch_size * stage.seq_len * dims.hidden
        made.append(parts)
    return max(made, key=lambda parts: sum(parts.values()))


def _of_one(config: Any, name: str) -> Any:
    """The config of a single-layer model with the mixer `name`."""
    one = copy.copy(config)
    one.num_hidden_layers, one.linearization = 1, config.linearization | {"layers": [name]}
    return one


def sharded_bytes(
    parts: dict[str, int], stage: Stage, config: Any, sizes: Sizes, trained: int, dtype: torch.dtype, processes: int
) -> dict[str, int]:
    """The peak memory of each of `processes` processes that shard the weights, see `sharding.py`. parts: the result of
    `training_bytes` for one process.

    weights, base, optimizer, average, gradients   one process's slice; frozen weights are in the compute dtype
    copies       none: weights are gathered in the compute dtype
    units        what is gathered at a time: the running decoder layer, the prefetched one, and the gradient of one; the
                 embeddings of the model and of the base; and the mixers
    """
    e, aligns = dtype.itemsize, isinstance(stage, AlignStage)
    own = _beside_mixers(stage, sizes, trained)
    adapters = own if stage.lora is not None else 0
    weights = 4 * (own + sizes.new) + e * (sizes.base + adapters - own)
    layer = (sizes.base - sizes.embeddings) // config.num_hidden_layers
    ends = 1 if aligns else 2 if parts["base"] else 1
    gradient = 0 if stage.lora is not None else (e + 4) * layer
    slices = {"weights": weights, "base": parts["base"], "optimizer": 8 * trained, "average": parts["average"]}
    return (
        {name: size // processes for name, size in (slices | {"gradients": 4 * trained}).items()}
        | {"units": e * (2 * layer + ends * sizes.embeddings) + gradient + 4 * sizes.new}
        | {name: parts[name] for name in ("activations", "passing", "logits")}
    )


def kept_gathered_bytes(parts: dict[str, int], config: Any, sizes: Sizes, dtype: torch.dtype, processes: int) -> int:
    """The bytes by which the peak of `sharded_bytes` rises if layers stay gathered: the other processes' slices of the
    model's layers and of the teacher's, except for the two layers that are gathered in any case."""
    models, depth = 2 if parts["base"] else 1, config.num_hidden_layers
    layers = models * depth - 2
    return dtype.itemsize * (sizes.base - sizes.embeddings) * layers // depth * (processes - 1) // processes


def gathered_bytes(stage: Stage, config: Any, dtype: torch.dtype, shards: int) -> int:
    """Bytes that a process needs for what it gets from other shards if `shards` processes share each row; 0 for one.

    If they divide the key-value heads, softmax layers keep as much as without shards, and one layer at a time has its
    queries, keys and values twice more: as they are sent and as they come. If not, these are the gathered keys and
    values: of one layer at a time in alignment and with gradient checkpointing, else of all of them, and at least of
    one. stage: one whose `seq_len` is that of a shard.
    """
    if shards == 1:
        return 0
    dims, softmax = head_dims(config), config.linearization["layers"].count(SOFTMAX)
    head = dtype.itemsize * dims.dim * stage.batch_size * stage.seq_len
    if dims.kv_heads % shards == 0:
        return 2 * (dims.heads + 2 * dims.kv_heads) * head
    at_once = 1 if stage.gradient_checkpointing or isinstance(stage, AlignStage) else max(1, softmax)
    return at_once * 2 * dims.kv_heads * head * shards


def measuring_bytes(stage: Stage, config: Any, sizes: Sizes, dtype: torch.dtype, processes: int = 1) -> int:
    """The peak memory of what alignment does before its first step, in bytes; 0 for other stages.

    That is the calibration of the mixers and the measurement of each layer's error. Both keep the inputs and outputs of
    the base's attention, on a batch of their own. processes: how many share the weights.
    """
    if not isinstance(stage, AlignStage):
        return 0
    dims, layers = head_dims(config), config.linearization["layers"]
    tokens = ERROR_ROWS * stage.seq_len
    if stage.fits_mixers:
        tokens = max(tokens, -(-CALIBRATION_TOKENS // stage.seq_len) * stage.seq_len)
    linear = [name for name in layers if name != SOFTMAX]
    targets = 2 * dtype.itemsize * dims.hidden * len(linear)
    one = 4 * (8 * dims.hidden + 3 * _width(config)) + max(_in_torch(config, name) for name in linear)
    weights = 4 * (sizes.base + sizes.new) + dtype.itemsize * sizes.base
    if stage.layerwise:  # one layer of each model, or the embeddings; and the hidden states before the layer
        layer = (sizes.base - sizes.embeddings) // config.num_hidden_layers
        weights = max((4 + dtype.itemsize) * layer + 4 * sizes.new // len(linear), 4 * sizes.embeddings)
        targets = 2 * dtype.itemsize * dims.hidden + 2 * (4 + dtype.itemsize) * dims.hidden
    elif processes > 1:  # two layers and the embeddings are gathered at a time
        layer = (sizes.base - sizes.embeddings) // config.num_hidden_layers
        weights = weights // processes + 4 * (2 * layer + sizes.embeddings + sizes.new)
    return weights + tokens * (targets + one)


def waiting_bytes(config: Any, sizes: Sizes, dtype: torch.dtype) -> int:
    """Bytes of a teacher that can be offloaded to host memory: all layers but the running one."""
    depth = config.num_hidden_layers
    return dtype.itemsize * (sizes.base - sizes.embeddings) * (depth - 1) // depth


def inference_bytes(config: Any, sizes: Sizes, itemsize: int, cache: int) -> int:
    """The peak memory of prefilling a long prompt, in bytes: weights, cache, and one layer's activations for a chunk of
    the prompt. itemsize: bytes of a weight of the base. cache: bytes of the cache."""
    dims = head_dims(config)
    layer = itemsize * (4 * dims.hidden + 4 * (dims.heads + dims.kv_heads) * dims.dim + 3 * _width(config))
    layer += max(_in_torch(config, name) for name in config.linearization["layers"] if name != SOFTMAX)
    return sizes.base * itemsize + 4 * sizes.new + cache + PREFILL_CHUNK * layer


def _width(config: Any) -> int:
    """The width of the MLP that one token passes through: in a mixture of experts, that of all its experts together."""
    return getattr(config, "moe_intermediate_size", config.intermediate_size) * getattr(
        config, "num_experts_per_tok", 1
    )


def _kept(stage: Stage, config: Any, name: str, e: int, device: torch.device, compiled: bool) -> int:
    """Bytes that one token saves in one layer for the backward pass.

    stream   in float32, the inputs of both norms and, if not compiled, their outputs
    inputs   e C, and if the MLP or adapters of it are trained another e C and e I: the inputs of matmuls
    MLP      2 e I, or 3 e I if not compiled
    heads    queries and keys before and after rotary, values, and the outputs of the window and of the memory
    mixer    in plain torch, its feature maps, gates and outputs in float32. The kernels of a codebook save only a gate
             per code and its logit. A short convolution or a shift saves the input of each tap, and a norm or gate
             after the read saves the read twice, all in float32
    """
    dims, groups = head_dims(config), stage.learning_rates.trained()
    q, k = e * dims.heads * dims.dim, e * dims.kv_heads * dims.dim
    heads = 4 * q + 3 * k + 8 * dims.heads if name != SOFTMAX else 2 * q + 2 * k
    if name != SOFTMAX:
        heads += _of_gates(config, name) if _fused(config, name, device) else _in_torch(config, name)
    heads += 0 if name == SOFTMAX else _of_pieces(config, name)
    if isinstance(stage, AlignStage):
        return heads + 4 * e * dims.hidden if name != SOFTMAX else 0
    stream = 8 * dims.hidden if compiled else 16 * dims.hidden
    inputs = e * dims.hidden
    if "body" in groups or _adapts_mlp(stage, config, name):
        inputs += e * (dims.hidden + _width(config))
    return heads + stream + inputs + e * (2 if compiled else 3) * _width(config)


def _adapts_mlp(stage: Stage, config: Any, name: str) -> bool:
    """Whether the MLP of a layer with this mixer has adapters."""
    if stage.lora is None:
        return False
    targets = stage.lora.targets
    if isinstance(targets, list):
        return not set(targets) <= set(family_of(config).projections)
    return targets == "all" or (targets == "linearized" and name != SOFTMAX)


def _passing(config: Any, name: str, e: int, device: torch.device, aligns: bool) -> int:
    """Bytes per token of temporaries in one layer's backward pass.

    They are the gradients of the widest tensors, or those of a codebook's feature maps if larger. The maps are
    recomputed, with the states between chunks.
    """
    dims = head_dims(config)
    widest = e * 4 * dims.heads * dims.dim if aligns else e * 4 * _width(config)
    if name == SOFTMAX or not _fused(config, name, device):
        return widest
    shapes = _states(config, name)
    groups, features, values = shapes["state"]
    values += "z" in shapes
    maps = 2 * e * (dims.heads + dims.kv_heads) * features
    return max(widest, maps + 2 * 4 * groups * features * values // CODED)


def _states(config: Any, name: str) -> dict[str, tuple[int, ...]]:
    spec = config.linearization["mixers"][name]
    return MIXERS[spec["type"]].state_shape(make_spec(spec), head_dims(config))


def _fused(config: Any, name: str, device: torch.device) -> bool:
    """Whether the layer's feature maps are computed inside a codebook's kernels, and not saved."""
    spec = config.linearization["mixers"][name]
    return device.type == "cuda" and spec["type"] == "gla" and spec["feature_map"] == "codebook"


def _in_torch(config: Any, name: str) -> int:
    """Bytes that one token saves in a mixer that runs in plain torch: features, gates and outputs, in float32."""
    dims, shapes = head_dims(config), _states(config, name)
    features = max((shape[-2] for state, shape in shapes.items() if state != "z"), default=0)
    return 4 * (3 * (dims.heads + dims.kv_heads) * features + 3 * dims.heads * dims.dim) if features else 0


def _of_gates(config: Any, name: str) -> int:
    """Bytes that one token saves for the gates of a mixer whose kernels compute everything else.

    Gates with a single value per head are not counted.
    """
    dims, spec = head_dims(config), config.linearization["mixers"][name]
    return 8 * dims.kv_heads * spec["codes"] if spec["gate"] == "pooled" else 0


def _of_pieces(config: Any, name: str) -> int:
    """Bytes that one token saves in a mixer's optional parts, in float32.

    They are convolutions, shifts, norms or gates on the read, projections to the memory's gates, and pairs beside the
    window: for each pair its logit, its exponential, its part of the sum and its share, and the window's output before
    and after.
    """
    mixer = config.linearization["mixers"][name]
    dims, spec = head_dims(config), make_spec(mixer)
    taps = spec.conv_taps + (spec.conv_function != "none") + 2 * (spec.shift != "none")
    outputs = 2 * (sum(spec.read_pieces) + bool(spec.pairs)) * dims.heads
    gates = 2 * sum(MIXERS[mixer["type"]].projected_sizes(spec, dims)) * dims.kv_heads
    pairs = 4 * spec.pairs * dims.heads
    return 4 * ((taps * (dims.heads + 2 * dims.kv_heads) + outputs) * dims.dim + gates + pairs)


def count(shapes: dict[str, tuple[int, ...]]) -> int:
    """The total number of elements in tensors of these shapes."""
    return sum(math.prod(shape) for shape in shapes.values())
