"""Estimates of the memory at the peak of each step of a run, from a config alone. Touches no weight.

Shapes in the formulas: C hidden size, H query heads, G key-value heads, D head size, I width of the MLP, V vocabulary,
F feature size, N tokens of a micro batch, P parameters, T trained ones, e bytes of a number in the compute dtype.
`kernels/bench_plan.py` compares the estimates with measured peaks.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch

from liger_convert.config.stages import AlignStage, DistillStage, Stage
from liger_convert.mixers import MIXERS, SOFTMAX, make_spec
from liger_convert.model import head_dims, linear_layers
from liger_convert.training.frozen import is_narrowed

COPY_BYTES = 32 << 20  # what convert takes for its buffers, whatever the checkpoint
# Logits that a loss works on at a time, by device: few enough that a chunk's float32 temporaries stay in a CPU's cache
# (five times the speed of one pass over all of them), many enough to fill a GPU for longer than it takes to launch the
# next.
CHUNK_LOGITS = {"cpu": 2**22, "cuda": 2**28}
# Logits that are made of hidden states at a time: enough for a product to be worth its pass over the head's weights.
HEAD_LOGITS = {"cpu": 2**25, "cuda": 2**28}
ERROR_ROWS = 4  # on which a stage's errors are reported: whatever the batch size, so that splitting one changes nothing
CALIBRATION_TOKENS = 8192  # some thirty for each of 256 codes
PREFILL = 2048  # tokens of a long prompt that a linearized model reads at a time
CODED = 64  # tokens of a chunk, for each of which the kernels make one state in the backward pass


@dataclass(frozen=True)
class Sizes:
    """What the estimates go by: parameters of the base, of its embeddings (both ends, tied ones once), and new ones."""

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
    """The peak of a stage on `device` in the compute dtype, by what it is spent on. magnitudes: how many `dora` trains.

    weights      4 P, of what is frozen in the layers e; see `frozen.py`
    base         e P_base, where it teaches
    optimizer    8 T: Adam's two moments
    average      4 T, with `ema_length`
    gradients    4 T, where they stand beside the activations: with several micro batches a step, and in a captured
                 graph. Else they come as the activations go, and what is counted is by how much they are more
    copies       under autocast, what the backward pass needs of the weights in the compute dtype: e for every weight of
                 a matrix product through which a gradient flows, unless it is held in that dtype. With checkpointing
                 one layer and the head; and where the layers are not compiled, the trained ones, which autocast keeps
                 until the forward pass ends
    activations  what N tokens keep for the backward pass, see `_kept`. With checkpointing 4 C a layer and one layer
                 in full; in alignment the attention alone, and e 2 C of targets. Of each projection with magnitudes
                 both parts of its output, e each
    passing      what one layer's backward pass takes for itself, see `_passing`
    logits       of a chunk of tokens, ours, their gradient, the base's, and what the loss makes of them; of all tokens
                 the base's hidden states and the gradient of ours, e N C each; in float32 the gradient of the head's
                 weights, twice, where they are trained; none in alignment
    """
    compiled = stage.compile and device.type == "cuda"
    e, dims, depth = dtype.itemsize, head_dims(config), config.num_hidden_layers
    tokens, aligns = stage.batch_size * stage.seq_len, isinstance(stage, AlignStage)
    teaches = aligns or (isinstance(stage, DistillStage) and stage.kl_weight > 0)
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
    captured = compiled and stage.concat_documents and not stage.gradient_checkpointing
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
    }


def _narrowed(stage: Stage, sizes: Sizes, trained: int) -> int:
    """How many parameters of the layers are frozen."""
    own = 0 if stage.lora is not None else _beside_mixers(stage, sizes, trained)
    own -= sizes.embeddings if "embeddings" in stage.learning_rates.trained() else 0
    return sizes.base - sizes.embeddings - own


def _beside_mixers(stage: Stage, sizes: Sizes, trained: int) -> int:
    """How many of the trained parameters are not the mixers'."""
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
    """The peak of training layer by layer: that of a model of one layer, the one that takes most, of which only the
    attention is there, and beside it

    base         e for each weight of one layer
    hidden       e 4 N C: what the layer was given and made, and what of it waits for the disk
    """
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
        parts["hidden"] = 4 * dtype.itemsize * stage.batch_size * stage.seq_len * dims.hidden
        made.append(parts)
    return max(made, key=lambda parts: sum(parts.values()))


def _of_one(config: Any, name: str) -> Any:
    """The config of a model of one layer with the mixer `name`."""
    one = copy.copy(config)
    one.num_hidden_layers, one.linearization = 1, config.linearization | {"layers": [name]}
    return one


def sharded_bytes(
    parts: dict[str, int], stage: Stage, config: Any, sizes: Sizes, trained: int, dtype: torch.dtype, processes: int
) -> dict[str, int]:
    """`parts`, the `training_bytes` of one of so many processes, where they share the weights, see `sharding.py`.

    weights, base, optimizer, average, gradients   a slice of what they were; what is frozen in the compute dtype
    copies       none: weights are gathered in the compute dtype
    units        what is whole at a time: of the decoder layers the one that runs and the next, with the gradient of
                 one; both ends of the model, and of the base; and the mixers
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


def gathered_bytes(stage: Stage, config: Any, dtype: torch.dtype, shards: int) -> int:
    """What a process keeps of other shards, where so many share each row: the keys and values of the softmax layers, of
    a model that recomputes its layers, or of a base, one at a time. stage: that of one shard's tokens."""
    dims, softmax = head_dims(config), config.linearization["layers"].count(SOFTMAX)
    at_once = 1 if stage.gradient_checkpointing or isinstance(stage, AlignStage) else max(1, softmax)
    row = 2 * dtype.itemsize * dims.kv_heads * dims.dim * stage.batch_size * stage.seq_len
    return at_once * row * shards if shards > 1 else 0


def measuring_bytes(stage: Stage, config: Any, sizes: Sizes, dtype: torch.dtype, processes: int = 1) -> int:
    """The peak of what alignment does before its first step, 0 of other stages: the fit of the mixers and the errors of
    the layers keep what the base's layers saw and gave, on rows of their own. processes: that share the weights."""
    if not isinstance(stage, AlignStage):
        return 0
    dims, layers = head_dims(config), config.linearization["layers"]
    tokens = ERROR_ROWS * stage.seq_len
    if stage.calibrate and stage.learning_rates.mixer is not None:
        tokens = max(tokens, -(-CALIBRATION_TOKENS // stage.seq_len) * stage.seq_len)
    linear = [name for name in layers if name != SOFTMAX]
    targets = 2 * dtype.itemsize * dims.hidden * len(linear)
    one = 4 * (8 * dims.hidden + 3 * _width(config)) + max(_in_torch(config, name) for name in linear)
    weights = 4 * (sizes.base + sizes.new) + dtype.itemsize * sizes.base
    if stage.layerwise:  # one layer of either, or the embeddings, and the hidden states before it
        layer = (sizes.base - sizes.embeddings) // config.num_hidden_layers
        weights = max((4 + dtype.itemsize) * layer + 4 * sizes.new // len(linear), 4 * sizes.embeddings)
        targets = 2 * dtype.itemsize * dims.hidden + 2 * (4 + dtype.itemsize) * dims.hidden
    elif processes > 1:  # two layers and the embeddings are whole at a time
        layer = (sizes.base - sizes.embeddings) // config.num_hidden_layers
        weights = weights // processes + 4 * (2 * layer + sizes.embeddings + sizes.new)
    return weights + tokens * (targets + one)


def waiting_bytes(config: Any, sizes: Sizes, dtype: torch.dtype) -> int:
    """What of a teacher can wait in the host's memory: all layers but the one that runs."""
    depth = config.num_hidden_layers
    return dtype.itemsize * (sizes.base - sizes.embeddings) * (depth - 1) // depth


def inference_bytes(config: Any, sizes: Sizes, itemsize: int, cache: int) -> int:
    """The peak of reading a long prompt: weights, cache, and what one layer takes for a piece of the prompt."""
    dims = head_dims(config)
    layer = itemsize * (4 * dims.hidden + 4 * (dims.heads + dims.kv_heads) * dims.dim + 3 * _width(config))
    layer += max(_in_torch(config, name) for name in config.linearization["layers"] if name != SOFTMAX)
    return sizes.base * itemsize + 4 * sizes.new + cache + PREFILL * layer


def _width(config: Any) -> int:
    """The width of the MLP that one token goes through."""
    return getattr(config, "moe_intermediate_size", config.intermediate_size) * getattr(
        config, "num_experts_per_tok", 1
    )


def _kept(stage: Stage, config: Any, name: str, e: int, device: torch.device, compiled: bool) -> int:
    """What one token keeps in one layer for the backward pass.

    stream   float32: what goes into both norms, and uncompiled what both norms make of it
    inputs   e C, C and I: what trained products were given
    MLP      e 2 I, uncompiled e 3 I
    heads    queries before and after rotary, keys likewise, values, and the outputs of the window and of the memory
    mixer    in torch its maps, gates and outputs in float32; the kernels of a codebook keep nothing more but a gate
             per code and its logit; of a short convolution or a shift, in float32, what each tap multiplies, and of a
             norm or gate behind the read, the read twice
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
    inputs = e * dims.hidden * (2 if "body" in groups else 1) + (e * _width(config) if "body" in groups else 0)
    return heads + stream + inputs + e * (2 if compiled else 3) * _width(config)


def _passing(config: Any, name: str, e: int, device: torch.device, aligns: bool) -> int:
    """What one token takes while its layer is worked on backward: the gradients of its widest tensors, and of a
    codebook's maps, which are made once more, with the states between chunks."""
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
    """Whether the layer's maps are made inside the kernels of a codebook, and not kept."""
    spec = config.linearization["mixers"][name]
    return device.type == "cuda" and spec["type"] == "gla" and spec["feature_map"] == "codebook"


def _in_torch(config: Any, name: str) -> int:
    """What one token keeps of a mixer whose parts are torch's, in float32: features, gates and outputs."""
    dims, shapes = head_dims(config), _states(config, name)
    features = max((shape[-2] for state, shape in shapes.items() if state != "z"), default=0)
    return 4 * (3 * (dims.heads + dims.kv_heads) * features + 3 * dims.heads * dims.dim) if features else 0


def _of_gates(config: Any, name: str) -> int:
    """What one token keeps of gates beside kernels that make everything else: of one value a head, next to nothing."""
    dims, spec = head_dims(config), config.linearization["mixers"][name]
    return 8 * dims.kv_heads * spec["codes"] if spec["gate"] == "pooled" else 0


def _of_pieces(config: Any, name: str) -> int:
    """What one token keeps of a mixer's optional pieces."""
    dims, spec = head_dims(config), make_spec(config.linearization["mixers"][name])
    taps = spec.conv_taps + 2 * (spec.shift != "none")
    return 4 * (taps * (dims.heads + 2 * dims.kv_heads) + 2 * sum(spec.read_pieces) * dims.heads) * dims.dim


def count(shapes: dict[str, tuple[int, ...]]) -> int:
    """The numbers in tensors of these shapes."""
    return sum(math.prod(shape) for shape in shapes.values())
