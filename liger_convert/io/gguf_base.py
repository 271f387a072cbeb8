"""Bases in llama.cpp's GGUF format: converts them to a safetensors folder, using transformers' reader."""

from __future__ import annotations

import contextlib
import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from liger_convert.io import gguf_fields, gguf_header, gguf_tokenizer
from liger_convert.io.config_sizes import check_rotary, check_sizes
from liger_convert.io.files import atomic_dir
from liger_convert.io.gguf_header import Header
from liger_convert.io.gguf_parts import NAME, ROTARY, join, parts_of
from liger_convert.io.tokenizer import split_word
from liger_convert.utils.errors import BadInput, refusing

EXPERTS = ("num_experts", "num_local_experts")  # one of these is in the config of a model with experts


def is_gguf(path: Path) -> bool:
    """Whether `path` is an existing .gguf file."""
    return path.suffix == ".gguf" and path.is_file()


@contextlib.contextmanager
def _errors(file: Path) -> Iterator[None]:
    """Context that raises BadInput for a missing package, a broken file, or an unsupported model."""
    if importlib.util.find_spec("gguf") is None:
        raise BadInput(f"base: {file}: reading it needs more packages: pip install 'liger-convert[gguf]'")
    with refusing(f"base: {file}: cannot be read as a GGUF model"):
        yield


def _not_read(header: Header, which: str = "") -> BadInput:
    from transformers import __version__

    what = f"transformers {__version__} cannot read the architecture {header.architecture!r} {which}from a .gguf file"
    return BadInput(f"base: {header.path}: {what}; {gguf_fields.WAY}")


@contextlib.contextmanager
def _described(headers: list[Header]) -> Iterator[tuple[Any, Any]]:
    """Context with the config of the model with these checked `headers`, and a GGUFReader of its header, mostly without
    the lists of the tokenizer. Reads no weights."""
    from gguf import MODEL_ARCH_NAMES, GGUFReader
    from transformers import AutoConfig

    first = headers[0]
    with tempfile.TemporaryDirectory(prefix="liger-") as work:
        file = Path(work, first.path.name)
        if first.architecture and first.architecture not in MODEL_ARCH_NAMES.values():
            raise _not_read(first)
        try:
            join(headers, file, for_config=True, with_lists=False)
            try:
                config = AutoConfig.from_pretrained(work, gguf_file=str(file))
            except KeyError:  # the configs of some architectures need the number of tokens
                file = Path(work, f"whole-{first.path.name}")
                join(headers, file, for_config=True)
                config = AutoConfig.from_pretrained(work, gguf_file=str(file))
        except ValueError as error:
            if "architecture" not in str(error):
                raise
            raise _not_read(first) from error
        if first.numbers.get(f"{first.architecture}.expert_count") and not any(hasattr(config, n) for n in EXPERTS):
            raise _not_read(first, "with experts, as of Mixtral, ")
        reader = GGUFReader(file)
        if first.vocabulary is not None:
            config.vocab_size = first.vocabulary
        gguf_fields.complete(config, reader, first.path)
        gguf_tokenizer.check(first)
        check_sizes(config.to_dict(), f"base: {first.path}")
        check_rotary(config.to_dict(), f"base: {first.path}")
        yield config, reader


@contextlib.contextmanager
def _serving(reader: Any) -> Iterator[None]:
    """Context in which the package gguf gives `reader` for any file that transformers asks it for. It asks several
    times, and the package takes many seconds for the lists of a large vocabulary."""
    import gguf

    given = gguf.GGUFReader
    gguf.GGUFReader = lambda *_, **__: reader  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        gguf.GGUFReader = given  # type: ignore[misc]


def _tokenizer(file: Path, reader: Any) -> Any:
    """The tokenizer of a .gguf file. reader: a GGUFReader of its header without the lists of the tokenizer."""
    from gguf import GGUFReader
    from transformers import AutoTokenizer

    def read(reader: Any) -> Any:
        with _serving(reader):
            return AutoTokenizer.from_pretrained(file.parent, gguf_file=str(file.absolute()))

    try:
        return read(reader)  # transformers reads the lists itself
    except Exception:  # or, up to 5.17, has the package gguf do so
        whole = GGUFReader(file)
        if NAME not in reader.fields:  # it was left out, as it would mislead
            whole.fields.pop(NAME, None)
        return read(whole)


def _stored(tensors: list[Any], headers: list[Header]) -> list[Any]:
    """The `tensors` of a GGUFReader with the data that is stored in the parts with these headers. Reads none of it."""
    where = {name: (header, entry) for header in headers for name, entry in header.tensors.items()}
    files = {header.path: np.memmap(header.path, mode="r") for header in headers}
    found = []
    for tensor in tensors:
        header, entry = where[tensor.name]
        begin = header.data_begin + entry.offset
        data = files[header.path][begin : begin + entry.nbytes].view(tensor.data.dtype).reshape(tensor.data.shape)
        found.append(tensor._replace(data=data))
    return found


def load_config(path: Path) -> Any:
    """The config of the model in a .gguf file, without reading weights. For a model in parts, `path` is any of them.

    Raises BadInput for a file that is missing, broken or unsupported.
    """
    parts = parts_of(path)
    with _errors(parts[0]), _described(gguf_header.check(parts)) as (config, _):
        return config


def write_base(path: Path, out: Path) -> Path:
    """Converts a .gguf file to the new folder `out`, in float32, and returns `out`.

    For a model in parts, `path` is any of them. Raises BadInput for a file that is missing, broken or unsupported.
    """
    parts = parts_of(path)
    with _errors(parts[0]):
        headers = gguf_header.check(parts)  # before anything is allocated based on the sizes in the header
    if len(parts) == 1:
        return _write_joined(path, headers, out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".joined-", dir=out.parent) as work:
        file = Path(work, path.name)
        with _errors(parts[0]):
            join(headers, file)
        return _write_joined(file, headers, out)


def _not_finite(headers: list[Header]) -> str:
    """The file and name of the first tensor that holds NaN or infinity."""
    from gguf import GGUFReader, dequantize

    with np.errstate(all="ignore"):
        for header in headers:
            for tensor in GGUFReader(header.path).tensors:
                if not np.isfinite(dequantize(tensor.data, tensor.tensor_type)).all():
                    return f"{header.path}: tensor {tensor.name}"
    return f"{headers[0].path}: a tensor"


def _write_joined(file: Path, headers: list[Header], out: Path) -> Path:
    """Converts the single .gguf file `file` with transformers' reader. headers: of the files that it was joined from,
    or just of `file`."""
    import transformers
    from transformers import AutoModelForCausalLM

    given = headers[0].path
    with _errors(given), _described(headers) as (config, reader):
        stored = sum(int(tensor.n_elements) for tensor in reader.tensors if not tensor.name.startswith(ROTARY))
        # a bare name would be looked up in the working directory first
        options: dict[str, Any] = {"gguf_file": str(file.absolute()), "dtype": torch.float32}
        options |= {"config": config, "output_loading_info": True}
        options["ignore_mismatched_sizes"] = True
        with refusing(f"base: {given}: a field tokenizer.ggml of its tokenizer is missing or wrong"):
            tokenizer = _tokenizer(file, reader)
            gguf_tokenizer.complete(tokenizer, headers[0])
        if (word := split_word(tokenizer)) is not None:  # as of Gemma's files in 5.17
            version = f"transformers {transformers.__version__}"
            what = f"makes a tokenizer that splits words of its vocabulary, such as {word!r}"
            raise BadInput(f"base: {given}: {version} {what}; install a newer one, or give the model's own folder")
        reader.tensors = _stored(reader.tensors, headers)
        with _serving(reader):
            loaded: Any = AutoModelForCausalLM.from_pretrained(file.parent, **options)
    model, report = loaded
    # transformers only warns about tensors that are missing or of the wrong shape, and initializes them randomly
    if missing := sorted(report["missing_keys"]):
        raise BadInput(f"base: {given}: does not contain {len(missing)} of the model's tensors, such as {missing[0]}")
    for name, got, wanted in sorted(report["mismatched_keys"]):
        raise BadInput(f"base: {given}: tensor {name} is {list(got)}, but its own header implies {list(wanted)}")
    if extra := sorted(report["unexpected_keys"]):
        raise BadInput(f"base: {given}: has {len(extra)} tensors that are not part of the model, such as {extra[0]}")
    # transformers does not even report tensors that it has no place for
    if stored > (read := sum(parameter.numel() for parameter in model.parameters())):
        what = f"transformers would leave out {stored - read:,} of the {stored:,} values of its tensors"
        raise BadInput(f"base: {given}: {what}; {gguf_fields.WAY}")
    if not all(torch.stack(torch.aminmax(tensor)).isfinite().all() for tensor in model.state_dict().values()):
        raise BadInput(f"base: {_not_finite(headers)} contains NaN or infinity; the file is damaged")
    if len(ends := gguf_tokenizer.ends(tokenizer, headers[0], config.vocab_size)) > 1:
        model.generation_config.eos_token_id = ends
    # the weights are dequantized by now, but transformers still considers the model GGUF and would refuse to save it
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    with atomic_dir(out) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return out
