"""A base in the form of llama.cpp: what transformers' reader makes of it becomes a folder of safetensors."""

from __future__ import annotations

import contextlib
import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from liger_convert.io import gguf_fields, gguf_header
from liger_convert.io.files import atomic_dir
from liger_convert.io.gguf_parts import join, parts_of
from liger_convert.utils.errors import BadInput, refusing

# llama.cpp's names of vocabularies whose digits stand alone before GPT-2's split; transformers makes the plain split
SINGLE_DIGIT_VOCABULARIES = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}


def is_gguf(path: Path) -> bool:
    """Whether `path` is a .gguf file."""
    return path.suffix == ".gguf" and path.is_file()


@contextlib.contextmanager
def _errors(file: Path) -> Iterator[None]:
    """Whatever the libraries raise over a missing package, a broken file or an unsupported model becomes a sentence."""
    if importlib.util.find_spec("gguf") is None:
        raise BadInput(f"base: {file}: reading it needs more packages: pip install 'liger-convert[gguf]'")
    with refusing(f"base: {file}: cannot be read as a GGUF model"):
        yield


def _config(file: Path, parts: list[Path]) -> Any:
    """The config of a .gguf file, which joins `parts` or is the only one."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    gguf_fields.complete(config, parts)
    return config


def load_config(path: Path) -> Any:
    """The config of the model in a .gguf file, or in the parts that this is one of, without its weights. Raises
    BadInput."""
    parts = parts_of(path)
    with _errors(parts[0]), tempfile.TemporaryDirectory(prefix="liger-") as work:
        gguf_header.check(parts)
        file = path if len(parts) == 1 else Path(work, path.name)
        if len(parts) > 1:
            join(parts, file, with_data=False)
        return _config(file, parts)


def write_base(path: Path, out: Path) -> Path:
    """Writes the float32 folder `out` that a .gguf file, or the parts that this is one of, stands for; returns it.

    Raises BadInput for what is missing, broken, or cannot be read.
    """
    parts = parts_of(path)
    with _errors(parts[0]):
        gguf_header.check(parts)  # before anything of the sizes that it names is made
    if len(parts) == 1:
        return _write_joined(path, parts, out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".joined-", dir=out.parent) as work:
        file = Path(work, path.name)
        with _errors(parts[0]):
            join(parts, file)
        return _write_joined(file, parts, out)


def _write_joined(file: Path, parts: list[Path], out: Path) -> Path:
    """Writes the float32 folder that a .gguf file, which joins `parts` or is the only one, stands for, by transformers'
    own reader."""
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    given = parts[0]
    with _errors(given):
        from gguf import GGUFReader

        vocabulary = GGUFReader(file).get_field("tokenizer.ggml.pre")
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        options: dict[str, Any] = {"gguf_file": file.name, "dtype": torch.float32, "ignore_mismatched_sizes": True}
        options |= {"config": _config(file, parts), "output_loading_info": True}
        loaded: Any = AutoModelForCausalLM.from_pretrained(file.parent, **options)
    model, report = loaded
    # the library only warns, and fills what it did not find, or not in this shape, with random numbers
    if missing := sorted(report["missing_keys"]):
        raise BadInput(f"base: {given}: does not contain {len(missing)} of the model's tensors, such as {missing[0]}")
    for name, got, wanted in sorted(report["mismatched_keys"]):
        raise BadInput(f"base: {given}: tensor {name} is {list(got)}, but its own header implies {list(wanted)}")
    if extra := sorted(report["unexpected_keys"]):
        raise BadInput(f"base: {given}: has {len(extra)} tensors that are not part of the model, such as {extra[0]}")
    if vocabulary is not None and vocabulary.contents() in SINGLE_DIGIT_VOCABULARIES:
        splits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    # the weights are dequantised by now, but transformers goes on calling them GGUF and refuses to save that
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    with atomic_dir(out) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return out
