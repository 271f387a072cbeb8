"""Strict loading of weights: a model loads with every tensor that its config implies, or raises BadInput.

transformers initializes missing tensors randomly, ignores unexpected ones, and only logs both. Therefore the file
headers are compared with the config before anything is allocated, and the loading report of transformers is checked
afterwards. For models outside the supported families the expected tensors are unknown here: their headers only show
whether the files are complete, and the loading report covers the rest.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from liger_convert.io import generation_config
from liger_convert.io.checkpoint import ADAPTER_CONFIG, DTYPES, INDEX, WEIGHTS, Checkpoint, load_config
from liger_convert.io.files import read_json
from liger_convert.model import linearized_classes, linearized_config, new_state
from liger_convert.model.bases import attention_option, check_settings, meta_model
from liger_convert.model.families import FAMILIES, base_model_type, family_of, is_linearized
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

# buffers that older checkpoints saved, but that every model recomputes
IGNORABLE = re.compile(r"\.rotary_emb\.inv_freq$")


def load_pretrained(folder: Path | str, *, trust_remote_code: bool = False, **options: Any) -> Any:
    """Loads the causal language model in `folder`: a base or a linearized model, of any family transformers supports.

    `options` are passed to `from_pretrained`, for example `dtype`. Raises BadInput, naming file and tensor, when
    tensors are missing, unexpected, misshapen or not finite, and when files are missing, truncated or corrupt.
    """
    checkpoint, config = _checked(folder, trust_remote_code)
    loader: Any = AutoModelForCausalLM.from_pretrained
    return _load(loader, checkpoint, config, trust_remote_code=trust_remote_code, **options)


def load_linearized(folder: Path | str, **options: Any) -> Any:
    """As `load_pretrained`, but only for linearized models, and never with code from `folder`."""
    checkpoint, config = _checked(folder, linearized=True)
    loader: Any = AutoModelForCausalLM.from_pretrained
    return _load(loader, checkpoint, config, **options)


def linearize_base(folder: Path | str, linearization: dict[str, Any], seed: int = 0, **options: Any) -> Any:
    """Loads the base in `folder` with untrained mixers; nothing is written to disk.

    linearization: the config entry that names mixers and layers. seed: of the mixers' initialization. Options and
    errors are those of `load_pretrained`.
    """
    checkpoint, base_config = _checked(folder)
    config = linearized_config(base_config, linearization)
    loader: Any = linearized_classes(family_of(config).model_type)[2]
    new = new_state(config, seed)
    model = _load(loader.from_pretrained, checkpoint, config, new=new, **options)
    model.load_state_dict(new, strict=False)
    return model


def load_base(path: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """Loads the frozen teacher onto `device`, with weights in `dtype`. Raises BadInput as `load_pretrained` does."""
    model = load_pretrained(path, dtype=dtype)
    return model.requires_grad_(False).eval().to(device)


def check_folder(folder: Path | str, trust_remote_code: bool = False, linearized: bool = False) -> Checkpoint:
    """Checks the headers of a model folder, for commands that have other work to do before they load the model.

    Raises BadInput as `load_pretrained` does, except that it does not look for non-finite values. If `linearized`, it
    also refuses a base.
    """
    return _checked(folder, trust_remote_code, linearized)[0]


def open_checkpoint(folder: Path, config: Any, any_dtype: bool = False) -> Checkpoint:
    """`Checkpoint.open`; raises BadInput when transformers would read other weights, more weights, or none."""
    if (other := getattr(config, "transformers_weights", None)) is not None:
        raise BadInput(f"{folder / 'config.json'}: transformers_weights names other weights, {other}; remove it")
    if (folder / ADAPTER_CONFIG).exists():
        what = "transformers would add this adapter to the weights in the same folder"
        raise BadInput(f"{folder / ADAPTER_CONFIG}: {what}; merge it into them or move it elsewhere")
    checkpoint = Checkpoint.open(folder, any_dtype)
    if folder / WEIGHTS not in checkpoint.files and not isinstance(read_json(folder / INDEX).get("metadata"), dict):
        raise BadInput(f'{folder / INDEX}: has no metadata, without which transformers fails; add "metadata": {{}}')
    return checkpoint


def check_tensors(checkpoint: Checkpoint, config: Any) -> list[str]:
    """Compares the tensors of a base or a linearized checkpoint with those its config implies.

    Returns the names of stored buffers that need not be copied, because the model recomputes them. Raises BadInput for
    tensors that are missing, unexpected, or of another shape, and for wrong dtypes in a quantized checkpoint.
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
    """Raises BadInput unless the tensors in `quantized` have the given dtypes and all others a floating-point dtype."""
    for info in checkpoint.tensors.values():
        wanted = quantized.get(info.name)
        if info.dtype != wanted if wanted is not None else info.dtype not in DTYPES.values():
            implied = "a floating dtype" if wanted is None else str(wanted).removeprefix("torch.")
            found = str(info.dtype).removeprefix("torch.")
            raise BadInput(f"{info.file}: tensor {info.name} is {found}, but config.json implies {implied}")


@dataclass(frozen=True)
class _ConfigKey:
    """A hashable cache key: equal for configs of the same class and content."""

    kind: type
    content: str
    config: Any = field(compare=False, repr=False)


@dataclass(frozen=True)
class _ImpliedTensors:
    """The tensors that a config implies.

    stored, modules: shapes by name, as a checkpoint stores them and as the modules hold them. tied: names of tied
    weights. linear: names of the weights that quantization applies to.
    """

    stored: Mapping[str, tuple[int, ...]]
    modules: Mapping[str, tuple[int, ...]]
    tied: Collection[str]
    linear: Collection[str]


@functools.lru_cache(maxsize=32)
def _implied_tensors(key: _ConfigKey) -> _ImpliedTensors:
    """The tensors that a config implies. Cached, because building even a meta model takes longer than a tiny load."""
    model = meta_model(key.config)
    modules = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    # transformers fuses a layer's experts on load and splits them on save; checkpoints exist in both forms
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

    kind, source: for the error message, the kind of model and the file that describes it. Tensors in `ignored` may be
    present, and tensors in `optional` may be missing.
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
    """Raises BadInput if any list is not empty; `misshapen`: name, shape found, shape implied by `source`."""
    if unknown:
        what = f"{_some(unknown)} not part of the {kind} that {source} describes"
        raise BadInput(f"{_file(checkpoint, unknown[0])}: {what}")
    if missing:
        raise BadInput(f"{checkpoint.folder}: {_some(missing)} missing, which {source} implies")
    for name, got, wanted in misshapen:
        where = _file(checkpoint, name)
        raise BadInput(f"{where}: tensor {name} is {list(got)}, but {source} implies {list(wanted)}")


def _checked(folder: Path | str, trust_remote_code: bool = False, linearized: bool = False) -> tuple[Checkpoint, Any]:
    """The folder's checkpoint and config, after checking that they match as far as the headers show."""
    folder = Path(folder)
    config = load_config(folder, trust_remote_code)
    if linearized and not is_linearized(config):
        raise BadInput(
            f"{folder}: is a {config.model_type} base, not a linearized model; `linearize convert` makes one from it"
        )
    known = _is_known(config)
    checkpoint = open_checkpoint(folder, config, any_dtype=not known or is_quantized(config))
    if known:
        check_settings(config)
        check_tensors(checkpoint, config)
    generation_config.read(folder, getattr(config, "vocab_size", None))
    return checkpoint, config


def _is_known(config: Any) -> bool:
    """Whether the config alone determines the tensors.

    True for supported families without remote code that are either not quantized, or quantized by this package.
    """
    foreign = type(config).__module__.partition(".")[0] == "transformers_modules"
    ours = is_linearized(config) and scheme_of(config) is not None
    return base_model_type(config) in FAMILIES and not foreign and (ours or not is_quantized(config))


def _load(
    loader: Callable[..., Any], checkpoint: Checkpoint, config: Any, *, new: Collection[str] = (), **options: Any
) -> Any:
    """Loads the checkpoint with `loader`, a `from_pretrained`. It must hold all tensors except those named in `new`."""
    folder = checkpoint.folder
    if is_quantized(config) and _is_known(config):
        check_installed(f"{folder}: is quantized, and reading it")
    # transformers reports shape mismatches instead of raising, and reads no pickle
    told = {"output_loading_info": True, "ignore_mismatched_sizes": True, "use_safetensors": True}
    # compressed-tensors always shows a progress bar
    quiet = contextlib.redirect_stderr(io.StringIO()) if is_quantized(config) else contextlib.nullcontext()
    try:
        with quiet:
            model, found = loader(folder, config=config, **told, **{**attention_option(config), **options})
    except (RuntimeError, ValueError, OSError, SafetensorError, ImportError) as error:
        # ImportError: a missing quantization package. The files may have changed since their headers were checked, and
        # our reader takes an index with a byte order mark.
        of_files = isinstance(error, OSError | SafetensorError | json.JSONDecodeError)
        if out_of_memory(error) or (_is_known(config) and not of_files):
            raise
        where = folder / INDEX if isinstance(error, json.JSONDecodeError) else folder
        raise BadInput(f"{where}: transformers cannot load it: {first_line(error)}") from error
    widen(model)  # for bases too, because evaluations call their backbone directly
    unknown, missing = sorted(found["unexpected_keys"]), sorted(found["missing_keys"] - set(new))
    _refuse(checkpoint, config.model_type, "config.json", unknown, missing, sorted(found["mismatched_keys"]))
    refuse_not_finite(checkpoint, ((name, x) for name, x in model.named_parameters() if name not in new))
    return model


def read_finite(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """Reads one tensor in its stored dtype. Raises BadInput when it holds NaN or infinity, or its file is truncated."""
    tensor = checkpoint.read(name)
    refuse_not_finite(checkpoint, [(name, tensor)])
    return tensor


def refuse_not_finite(checkpoint: Checkpoint, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises BadInput for a tensor that holds NaN or infinity.

    Each tensor is summed first, which is cheap: it reads memory-mapped pages that the first forward pass needs anyway.
    A sum can overflow although every value is finite, so a non-finite sum only triggers an exact check.
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
    """The file of a tensor, or the folder if only transformers uses that name, not the checkpoint."""
    info = checkpoint.tensors.get(name)
    return checkpoint.folder if info is None else info.file


def _some(names: Sequence[str]) -> str:
    return f"tensor {names[0]} is" if len(names) == 1 else f"{len(names)} tensors ({', '.join(names[:3])}, …) are"
