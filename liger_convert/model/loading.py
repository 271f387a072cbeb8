"""The one door for weights: a model is loaded with every tensor that its config implies, or refused in one sentence.

transformers fills what a checkpoint lacks with random numbers, leaves out what it does not know, and only logs both. So
the headers of the files are compared with the config before anything is allocated, and what transformers says about its
own loading is read afterwards. Of models that are no family of ours nobody here knows the tensors: for them the headers
tell whether the files are whole, and transformers tells the rest.
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from liger_convert.io.checkpoint import ADAPTER_CONFIG, DTYPES, Checkpoint, load_config
from liger_convert.model import linearized_classes, linearized_config, new_state
from liger_convert.model.bases import attention_option, meta_model
from liger_convert.model.families import FAMILIES, PREFIX, family_of
from liger_convert.model.quantization import (
    SCALE,
    SCHEMES,
    check_installed,
    is_quantized,
    linear_weights,
    scheme_of,
)
from liger_convert.model.quantized_weights import widen
from liger_convert.model.shards import CHUNK, INFINITIES, all_finite
from liger_convert.utils.device import out_of_memory
from liger_convert.utils.errors import BadInput, first_line

# buffers that older checkpoints saved and that every model computes for itself
IGNORABLE = re.compile(r"\.rotary_emb\.inv_freq$")


def load_pretrained(folder: Path | str, *, trust_remote_code: bool = False, **options: Any) -> Any:
    """The causal language model in `folder`, a base or a linearized one, of any family that transformers loads.

    `options` are those of `from_pretrained`, such as `dtype`. Raises BadInput, naming file and tensor, for tensors that
    are missing, unexpected, of another shape or not finite, and for missing, cut or garbled files.
    """
    checkpoint, config = _checked(folder, trust_remote_code)
    loader: Any = AutoModelForCausalLM.from_pretrained
    return _load(loader, checkpoint, config, trust_remote_code=trust_remote_code, **options)


def load_linearized(folder: Path | str, **options: Any) -> Any:
    """As `load_pretrained`, for linearized models only and by the installed code, never by code that lies there."""
    checkpoint, config = _checked(folder, linearized=True)
    loader: Any = AutoModelForCausalLM.from_pretrained
    return _load(loader, checkpoint, config, **options)


def linearize_base(folder: Path | str, linearization: dict[str, Any], seed: int = 0, **options: Any) -> Any:
    """The base in `folder` with untrained mixers, in memory only. Options and errors are those of `load_pretrained`."""
    checkpoint, base_config = _checked(folder)
    config = linearized_config(base_config, linearization)
    loader: Any = linearized_classes(family_of(config).model_type)[2]
    new = new_state(config, seed)
    model = _load(loader.from_pretrained, checkpoint, config, new=new, **options)
    model.load_state_dict(new, strict=False)
    return model


def load_base(path: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """The frozen teacher, its weights already in the dtype it computes in. Raises BadInput for a damaged one."""
    model = load_pretrained(path, dtype=dtype)
    return model.requires_grad_(False).eval().to(device)


def check_folder(folder: Path | str, trust_remote_code: bool = False, linearized: bool = False) -> Checkpoint:
    """The headers of a model folder, for a command that has other work to do before it loads the model.

    Raises BadInput as `load_pretrained` does, but for values that are not finite; if `linearized`, for a base too.
    """
    return _checked(folder, trust_remote_code, linearized)[0]


def open_checkpoint(folder: Path, config: Any, any_dtype: bool = False) -> Checkpoint:
    """`Checkpoint.open`, where these are all the weights that transformers would read. Raises BadInput where not."""
    if (other := getattr(config, "transformers_weights", None)) is not None:
        raise BadInput(f"{folder / 'config.json'}: transformers_weights names other weights, {other}; remove it")
    if (folder / ADAPTER_CONFIG).exists():
        what = "transformers would add this adapter to the weights in the same folder"
        raise BadInput(f"{folder / ADAPTER_CONFIG}: {what}; merge it into them or move it elsewhere")
    return Checkpoint.open(folder, any_dtype)


def check_tensors(checkpoint: Checkpoint, config: Any) -> list[str]:
    """Compares the tensors of a base or a linearized checkpoint with what its config implies; returns the names of
    those that need no copying.

    Raises BadInput for tensors that are missing, unexpected, or of another shape.
    """
    implied = _implied_tensors(_ConfigKey(type(config), config.to_json_string(use_diff=False), config))
    found = checkpoint.tensors
    expected = max(implied.stored, implied.modules, key=lambda names: len(names.keys() & found.keys()))
    dropped = [name for name in found if name not in expected and IGNORABLE.search(name)]
    optional = implied.tied if config.tie_word_embeddings else ()
    scheme = scheme_of(config)
    quantized = implied.linear if scheme is not None else ()
    scales = {name + SCALE: (expected[name][0], 1) for name in quantized}
    compare(checkpoint, {**expected, **scales}, config.model_type, "config.json", ignored=dropped, optional=optional)
    if scheme is not None:
        _check_dtypes(checkpoint, dict.fromkeys(quantized, SCHEMES[scheme].dtype))
    return dropped


def _check_dtypes(checkpoint: Checkpoint, quantized: Mapping[str, torch.dtype]) -> None:
    """Raises BadInput unless the tensors in `quantized` have these dtypes, and all others a floating one."""
    for info in checkpoint.tensors.values():
        wanted = quantized.get(info.name)
        if info.dtype != wanted if wanted is not None else info.dtype not in DTYPES.values():
            implied = "a floating dtype" if wanted is None else str(wanted).removeprefix("torch.")
            found = str(info.dtype).removeprefix("torch.")
            raise BadInput(f"{info.file}: tensor {info.name} is {found}, but config.json implies {implied}")


@dataclass(frozen=True)
class _ConfigKey:
    """A config that equals any other of the same class and content."""

    kind: type
    content: str
    config: Any = field(compare=False, repr=False)


@dataclass(frozen=True)
class _ImpliedTensors:
    """Shapes by name, as a checkpoint stores them and as the modules hold them; the names that are tied; and
    those of the weights that are quantised where any are."""

    stored: Mapping[str, tuple[int, ...]]
    modules: Mapping[str, tuple[int, ...]]
    tied: Collection[str]
    linear: Collection[str]


@functools.lru_cache(maxsize=32)
def _implied_tensors(key: _ConfigKey) -> _ImpliedTensors:
    """The tensors that a config implies. Building the model, even without storage, takes longer than a tiny load."""
    model = meta_model(key.config)
    modules = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    # transformers fuses the experts of a layer while loading and saves them apart again; a checkpoint may be either
    stored = {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, model.state_dict()).items()}
    return _ImpliedTensors(stored, modules, tuple(model._tied_weights_keys or ()), linear_weights(model))


def compare(
    checkpoint: Checkpoint,
    expected: Mapping[str, tuple[int, ...]],
    kind: str,
    source: str,
    ignored: Collection[str] = (),
    optional: Collection[str] = (),
) -> None:
    """Raises BadInput unless the checkpoint holds tensors of these names and shapes, and no others.

    The shapes are those of a `kind` that the file `source` describes. `ignored` may be there, `optional` be missing.
    """
    found = checkpoint.tensors
    unknown = [name for name in found if name not in expected and name not in ignored]
    missing = [name for name in expected if name not in found and name not in optional]
    shapes = [(name, found[name].shape, shape) for name, shape in expected.items() if name in found]
    _refuse(checkpoint, kind, source, unknown, missing, [entry for entry in shapes if entry[1] != entry[2]])


def _refuse(
    checkpoint: Checkpoint,
    kind: str,
    source: str,
    unknown: Sequence[str],
    missing: Sequence[str],
    misshapen: Sequence[tuple[str, Iterable[int], Iterable[int]]],
) -> None:
    """Raises BadInput if there is anything to refuse; `misshapen`: name, shape found, shape implied by `source`."""
    if unknown:
        what = f"{_some(unknown)} not part of the {kind} that {source} describes"
        raise BadInput(f"{_file(checkpoint, unknown[0])}: {what}")
    if missing:
        raise BadInput(f"{checkpoint.folder}: {_some(missing)} missing, which {source} implies")
    for name, got, wanted in misshapen:
        where = _file(checkpoint, name)
        raise BadInput(f"{where}: tensor {name} is {list(got)}, but {source} implies {list(wanted)}")


def _checked(folder: Path | str, trust_remote_code: bool = False, linearized: bool = False) -> tuple[Checkpoint, Any]:
    """The folder's weights, by their headers, and its config, which belong to each other as far as headers tell."""
    folder = Path(folder)
    config = load_config(folder, trust_remote_code)
    if linearized and not config.model_type.startswith(PREFIX):
        raise BadInput(
            f"{folder}: is a {config.model_type} base, not a linearized model; `linearize convert` makes one from it"
        )
    known = _is_known(config)
    checkpoint = open_checkpoint(folder, config, any_dtype=not known or is_quantized(config))
    if known:
        check_tensors(checkpoint, config)
    return checkpoint, config


def _is_known(config: Any) -> bool:
    """Whether the config alone tells which tensors there are: of our families, run by no other code, and unquantised or
    quantised by us."""
    foreign = type(config).__module__.partition(".")[0] == "transformers_modules"
    ours = config.model_type.startswith(PREFIX) and scheme_of(config) is not None
    return config.model_type.removeprefix(PREFIX) in FAMILIES and not foreign and (ours or not is_quantized(config))


def _load(
    loader: Callable[..., Any], checkpoint: Checkpoint, config: Any, *, new: Collection[str] = (), **options: Any
) -> Any:
    """What `loader`, a `from_pretrained`, makes of the checkpoint, which has to hold all but the `new` tensors."""
    folder = checkpoint.folder
    if is_quantized(config) and _is_known(config):
        check_installed(f"{folder}: is quantised, and reading it")
    # shapes that differ are told instead of raised, and no pickle is read
    told = {"output_loading_info": True, "ignore_mismatched_sizes": True, "use_safetensors": True}
    # compressed-tensors shows a bar, whatever it is told
    quiet = contextlib.redirect_stderr(io.StringIO()) if is_quantized(config) else contextlib.nullcontext()
    try:
        with quiet:
            model, found = loader(folder, config=config, **told, **{**attention_option(config), **options})
    except (RuntimeError, ValueError, OSError, ImportError) as error:  # ImportError: what reads a quantised one
        if _is_known(config) or out_of_memory(error):
            raise
        raise BadInput(f"{folder}: transformers cannot load it: {first_line(error)}") from error
    widen(model)  # a base's, too: measures call its backbone by itself
    unknown, missing = sorted(found["unexpected_keys"]), sorted(found["missing_keys"] - set(new))
    _refuse(checkpoint, config.model_type, "config.json", unknown, missing, sorted(found["mismatched_keys"]))
    refuse_not_finite(checkpoint, ((name, x) for name, x in model.named_parameters() if name not in new))
    return model


def read_finite(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """One tensor in its own dtype. Raises BadInput where it holds NaN or infinity, or its file has shrunk."""
    tensor = checkpoint.read(name)
    refuse_not_finite(checkpoint, [(name, tensor)])
    return tensor


def refuse_not_finite(checkpoint: Checkpoint, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises BadInput for a tensor that holds NaN or infinity.

    A sum of each tensor tells, on the pages that transformers has mapped and that the first forward pass would read.
    It can overflow where no number did, so it only says where to look closer.
    """
    for name, tensor in tensors:
        tensor = tensor.detach()
        if tensor.dtype not in INFINITIES or tensor.is_meta or tensor.sum().isfinite():
            continue
        if not all(all_finite(piece.cpu()) for piece in tensor.contiguous().view(-1).split(CHUNK)):
            raise BadInput(
                f"{_file(checkpoint, name)}: tensor {name} contains NaN or infinity; the checkpoint is damaged"
            )


def _file(checkpoint: Checkpoint, name: str) -> Path:
    """The file of a tensor, or the folder where the name is none of the checkpoint's but transformers' own."""
    info = checkpoint.tensors.get(name)
    return checkpoint.folder if info is None else info.file


def _some(names: Sequence[str]) -> str:
    return f"tensor {names[0]} is" if len(names) == 1 else f"{len(names)} tensors ({', '.join(names[:3])}, …) are"
