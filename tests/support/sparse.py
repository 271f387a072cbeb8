"""A checkpoint of any size goes plan -> convert -> merge -> export -> verify, on a disk that cannot hold it.

    python tests/support/sparse.py FOLDER [LAYERS]

Its weights are zeros, which are holes in its files and in what is made of it. All else is as for any checkpoint: each
byte is read, checked, cast, folded and hashed; of writing there is little to do. Prints a line for each step: seconds,
bytes of the weights, and by how much the memory of the process grew at most. The shapes are those of a Llama of 70B,
with 80 layers unless LAYERS says less.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from peaks import forget_peak, peak
from peft import get_peft_model_state_dict
from safetensors.torch import save_file
from tiny import tiny_tokenizer
from transformers import LlamaConfig

from liger_convert.config.recipe import build
from liger_convert.config.stages import Lora
from liger_convert.io.checkpoint import ADAPTER_WEIGHTS, INDEX, load_config
from liger_convert.model import shards
from liger_convert.model.bases import meta_model
from liger_convert.model.shards import Entry, safetensors_header
from liger_convert.pipeline import convert, export, verify
from liger_convert.pipeline.plan import make_plan
from liger_convert.training import merge
from liger_convert.training.merge import ADAPTER
from liger_convert.training.sharding import without_weights
from liger_convert.training.student import add_lora

SEVENTY = {"vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
SEVENTY |= {"num_key_value_heads": 8, "max_position_embeddings": 8192, "rope_theta": 5e5}
SHARD = 5 * 10**9
LEFT = 12 * 10**9  # bytes that the disk keeps


def sparse_base(folder: Path, config: Any, shard: int = SHARD) -> Path:
    """A base of zeros in bfloat16, in files of about so many bytes, which take no room on the disk."""
    config.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    files: list[list[Entry]] = [[]]
    for name, tensor in meta_model(config).state_dict().items():
        if sum(entry.nbytes for entry in files[-1]) > shard:
            files.append([])
        files[-1].append(Entry(name, torch.bfloat16, tuple(tensor.shape)))
    weight_map = {}
    for number, entries in enumerate(files):
        file, header = f"model-{number}.safetensors", safetensors_header(entries)
        (folder / file).write_bytes(header)
        os.truncate(folder / file, len(header) + sum(entry.nbytes for entry in entries))
        weight_map |= {entry.name: file for entry in entries}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def adapter(model: Path, result: Path, value: float = 1e-3) -> Path:
    """What a LoRA stage leaves, all of one value; 0 leaves zeros what they are."""
    made = add_lora(without_weights(load_config(model)), Lora(rank=4, targets="all"), train_mixer=True)
    made.peft_config["default"].save_pretrained(result / ADAPTER)
    state = get_peft_model_state_dict(made, save_embedding_layers=False)
    save_file(
        {name: torch.full(tensor.shape, value) for name, tensor in state.items()}, result / ADAPTER / ADAPTER_WEIGHTS
    )
    return result


class _Holes:
    """A file in which zeros are left out."""

    def __init__(self, path: Path):
        self.file = open(path, "wb")  # noqa: SIM115 (closed below)

    def write(self, data: Any) -> int:
        found = np.frombuffer(data, np.uint8)
        words = found[: len(found) // 8 * 8].view(np.uint64)
        if words.any() or found[len(words) * 8 :].any():
            return self.file.write(data)
        self.file.seek(len(found), os.SEEK_CUR)
        return len(found)

    def __enter__(self) -> _Holes:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.truncate()
        self.file.close()


def _copy(source: Path, target: Path) -> None:
    """A copy with the holes of `source`."""
    with open(source, "rb") as from_file, open(target, "wb") as to_file:
        end = os.fstat(from_file.fileno()).st_size
        place = 0
        while place < end:
            try:
                start = os.lseek(from_file.fileno(), place, os.SEEK_DATA)
            except OSError:  # nothing but a hole is left
                break
            place = os.lseek(from_file.fileno(), start, os.SEEK_HOLE)
            from_file.seek(start)
            to_file.seek(start)
            to_file.write(from_file.read(place - start))
        to_file.truncate(end)


@contextlib.contextmanager
def holes() -> Iterator[None]:
    """In the block zeros of weights are written as holes."""

    def opened(path: Path, mode: str) -> Any:
        return _Holes(path) if mode == "wb" else open(path, mode)

    with mock.patch.object(shards, "open", opened, create=True), mock.patch.object(shards.shutil, "copyfile", _copy):
        yield


def steps(folder: Path, layers: int) -> Iterator[dict[str, Any]]:
    """Takes a model of so many layers of a 70B through the steps: of each, what it took."""
    config = LlamaConfig(**SEVENTY, num_hidden_layers=layers, dtype=torch.bfloat16)
    base = sparse_base(folder / "base", config)
    fields = {"version": 1, "name": "large", "base": str(base), "mixer": {"type": "gla"}, "device": "cpu"}
    recipe = build(fields | {"data": {"text": {"source": "pydoc"}}}, "recipe")

    def told(name: str, work: Callable[[], Any], out: str) -> Any:
        held, started = forget_peak(), time.perf_counter()
        found = work()
        seconds, grew = round(time.perf_counter() - started, 1), peak() - held
        size = sum(path.stat().st_size for path in (folder / out).glob("*.safetensors"))
        used = sum(512 * path.stat().st_blocks for path in folder.rglob("*") if path.is_file())
        assert shutil.disk_usage(folder).free > LEFT
        said.append({"step": name, "seconds": seconds, "grew": grew, "bytes": size, "on_disk": used})
        return found

    said: list[dict[str, Any]] = []
    plan = told("plan", lambda: make_plan(recipe, load_config(base)), "base")
    yield said[-1]
    with holes():
        told("convert", lambda: convert.convert_checkpoint(base, folder / "model", plan.linearization), "model")
        yield said[-1]
        result = adapter(folder / "model", folder / "result", 0.0)
        told("merge", lambda: merge.merge_results(folder / "model", [result], folder / "merged"), "merged")
        yield said[-1]
        told("export", lambda: export.export_model(folder / "merged", folder / "export", dtype="bfloat16"), "export")
        yield said[-1]
    told("verify", lambda: verify.verify_files(folder / "export"), "export")
    yield said[-1]


if __name__ == "__main__":
    with contextlib.ExitStack() as stack:
        work = Path(sys.argv[1]) / "sparse"
        work.mkdir()
        stack.callback(shutil.rmtree, work)
        for step in steps(work, int((sys.argv[2:] or ["80"])[0])):
            print(json.dumps(step), flush=True)
