"""8-bit weight quantization: files in the compressed-tensors format, which transformers and vLLM read.

The linear layers of attention and feed-forward are quantized. Every row of a weight (an output channel) has one scale,
the smallest that covers its largest magnitude; values are rounded to nearest. There is no calibration. The runtime also
quantizes the inputs of these layers, dynamically per token: this is the only scheme that vLLM supports for both int8
and fp8, on CPU and on GPUs. Embeddings, the language model head, norms and mixers are not quantized.

In memory, torchao quantizes the same weights and no inputs (`store_in_8_bits`). Decoding on a GPU reads such weights as
they are (model/fused_projections.py).

Shapes: N rows and K columns of a weight, R rows processed at a time.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from liger_convert.io.checkpoint import Checkpoint, TensorInfo
from liger_convert.model import MIXER_MODULE
from liger_convert.model.families import family_of
from liger_convert.model.shards import CHUNK, Entry, Shard, cast_pieces, checked_pieces, target_dtype
from liger_convert.utils.errors import BadInput, did_you_mean

METHOD = "compressed-tensors"
INSTALL = "pip install 'liger-convert[quantize]'"
INSTALL_TORCHAO = "pip install 'liger-convert[torchao]'"
SCALE = "_scale"  # suffix: the scales of a weight have the weight's name plus this
GROUP = "group_0"


@dataclass(frozen=True)
class Scheme:
    """One quantization scheme.

    preset, format: the names of the scheme and of its storage format in compressed-tensors. dtype: of stored weights.
    """

    preset: str
    format: str
    dtype: torch.dtype


SCHEMES = {
    "int8": Scheme("W8A8", "int-quantized", torch.int8),
    "fp8": Scheme("FP8_DYNAMIC", "float-quantized", torch.float8_e4m3fn),
}


def check_installed(what: str) -> None:
    """Raises BadInput when compressed-tensors is not installed. what: the beginning of the message, its purpose."""
    if importlib.util.find_spec("compressed_tensors") is None:
        raise BadInput(f"{what} needs the package {METHOD}, which is not installed; {INSTALL}")


def is_quantized(config: Any) -> bool:
    """Whether a config declares quantized weights, by any method."""
    return getattr(config, "quantization_config", None) is not None


def refuse_quantized(config: Any, folder: Any, command: str) -> None:
    """Raises BadInput for a quantized model, whose weights `command` cannot change."""
    if is_quantized(config):
        what = f"is quantized, and {command} needs weights that are not"
        raise BadInput(f"{folder}: {what}; give the model that it was made from")


def scheme_of(config: Any) -> str | None:
    """The key in SCHEMES of a linearized model's quantization.

    None if it is not quantized, or not in the way that `linearize export` quantizes.
    """
    stated = getattr(config, "quantization_config", None)
    if stated is not None and not isinstance(stated, dict):
        stated = stated.to_dict()
    if not stated or stated.get("quant_method") != METHOD or stated.get("quantization_status") != "compressed":
        return None
    weights = ((stated.get("config_groups") or {}).get(GROUP) or {}).get("weights") or {}
    if weights.get("num_bits") != 8 or weights.get("strategy") != "channel" or stated.get("ignore") != ignored():
        return None
    return next((name for name, scheme in SCHEMES.items() if scheme.format == stated.get("format")), None)


def quantization_config(name: str) -> dict[str, Any]:
    """The `quantization_config` of config.json for the scheme `name`. Requires compressed-tensors."""
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus

    scheme = SCHEMES[name]
    described = QuantizationConfig(
        config_groups={GROUP: _preset(name)},
        format=scheme.format,
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=ignored(),
    )
    # some versions of the package write fields that others do not read; dropping None values avoids that
    return _without_none(described.model_dump(mode="json"))


def ignored() -> list[str]:
    """The modules that are not quantized, in compressed-tensors' syntax: names, or patterns after `re:`."""
    return ["lm_head", "model.embed_tokens", r"re:.*norm$", rf"re:.*\.{MIXER_MODULE}(\..*)?$"]


def check_quantizable(config: Any, folder: Any, name: str) -> None:
    """Raises BadInput unless the linearized model in `folder` can be quantized by the scheme `name`.

    Refused are unknown schemes, models that are already quantized, families with experts, and environments without
    compressed-tensors.
    """
    _check_known(name)
    refuse_quantized(config, folder, "export")
    if family_of(config).moe:
        what = "has experts, whose int8 weights transformers cannot read and vLLM runs on few processors"
        raise BadInput(f"--quantize: {config.model_type} {what}; leave it out")
    check_installed(f"--quantize {name}:")


def _check_known(name: str) -> None:
    if name not in SCHEMES:
        raise BadInput(f"--quantize: {name!r} is unknown{did_you_mean(name, SCHEMES)}; use {' or '.join(SCHEMES)}")


def linear_weights(model: nn.Module) -> list[str]:
    """The names of the weights of all nn.Linear modules of `model`, except its head and those in mixers."""
    linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head")
    return [f"{name}.weight" for name in linear if f".{MIXER_MODULE}." not in name]


def check_8_bits(name: str) -> None:
    """Raises BadInput unless `store_in_8_bits` knows the scheme `name`, and torchao is installed."""
    _check_known(name)
    if importlib.util.find_spec("torchao") is None:
        raise BadInput(f"--quantize {name}: needs the package torchao, which is not installed; {INSTALL_TORCHAO}")


def store_in_8_bits(model: nn.Module, name: str) -> None:
    """Stores the weights of `linear_weights` by torchao, in place; inputs are not quantized. name: a key of SCHEMES.

    Every row has one scale. This is what transformers does with `TorchAoConfig(Int8WeightOnlyConfig())`. Raises
    BadInput for an unknown name and without torchao.
    """
    check_8_bits(name)
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    chosen = set(linear_weights(model))
    config = Int8WeightOnlyConfig() if name == "int8" else Float8WeightOnlyConfig()
    quantize_(model, config, lambda module, path: f"{path}.weight" in chosen)


def quantized_shards(checkpoint: Checkpoint, weights: list[str], name: str, dtype: str = "auto") -> list[Shard]:
    """One output shard per checkpoint file, with `weights` quantized by the scheme `name` and their scales added.

    Other tensors, except those of mixers, and the scales are cast to `dtype`; `auto` keeps the stored dtypes. Only some
    rows of a weight are in memory at a time. Each weight is read twice, once for its scales. Requires
    compressed-tensors.
    """
    chosen, shards = set(weights), []
    for infos in checkpoint.files.values():
        parts: list[tuple[Entry, Callable[[], Iterator[Tensor]]]] = []
        for info in infos:
            target = target_dtype(info.name, info.dtype, dtype)
            if info.name in chosen:
                weight = _Weight(info, name, target)
                scales = Entry(info.name + SCALE, target, (info.shape[0], 1))
                parts.append((scales, weight.scales))
                parts.append((Entry(info.name, SCHEMES[name].dtype, info.shape), weight.rows))
            else:
                parts.append((Entry(info.name, target, info.shape), _Copied(info, target)))
        # wide dtypes first, so that every tensor is aligned, and scales before the rows they belong to
        parts.sort(key=lambda part: -part[0].dtype.itemsize)
        data = chain.from_iterable(make() for _, make in parts)
        shards.append(Shard([entry for entry, _ in parts], data, None))
    return shards


@dataclass(frozen=True)
class _Copied:
    """Makes the pieces of a tensor that is not quantized."""

    info: TensorInfo
    target: torch.dtype

    def __call__(self) -> Iterator[Tensor]:
        return cast_pieces(self.info, self.target)


@dataclass
class _Weight:
    """A weight to quantize: `scales` must run before `rows`."""

    info: TensorInfo
    scheme: str
    scale_dtype: torch.dtype
    scale_N1: Tensor = field(default_factory=lambda: torch.empty(0, 1))

    def scales(self) -> Iterator[Tensor]:
        from compressed_tensors.quantization.utils import calculate_qparams

        args = _preset(self.scheme).weights
        made = []
        for weight_RK in self._read():
            ends = weight_RK.amin(1, keepdim=True), weight_RK.amax(1, keepdim=True)
            made.append(calculate_qparams(*ends, args)[0])
        # rounded to bfloat16, the narrowest dtype models are loaded in, so that a later cast does not change the scales
        scale_N1 = torch.cat(made).bfloat16().to(self.scale_dtype)
        self.scale_N1 = scale_N1.clamp_min(torch.finfo(self.scale_dtype).smallest_normal)
        yield self.scale_N1.view(-1)

    def rows(self) -> Iterator[Tensor]:
        from compressed_tensors.quantization.lifecycle.forward import quantize

        args, dtype, start = _preset(self.scheme).weights, SCHEMES[self.scheme].dtype, 0
        for weight_RK in self._read():
            scale_R1 = self.scale_N1[start : start + len(weight_RK)].float()
            start += len(weight_RK)
            yield quantize(weight_RK, scale_R1, None, args, dtype).contiguous().view(-1)

    def _read(self) -> Iterator[Tensor]:
        """The weight in float32, some rows at a time."""
        columns = self.info.shape[1]
        row = columns * self.info.dtype.itemsize
        for piece in checked_pieces(self.info, max(1, CHUNK // row) * row):
            yield piece.float().view(-1, columns)


def _preset(name: str) -> Any:
    from compressed_tensors.quantization import preset_name_to_scheme

    return preset_name_to_scheme(SCHEMES[name].preset, ["Linear"])


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value
