"""Streaming writer for safetensors files: one buffer is read, checked, cast and written at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from liger_convert.io.checkpoint import DTYPES, INDEX, OTHER_DTYPES, Checkpoint, TensorInfo
from liger_convert.io.files import fsync
from liger_convert.io.inputs import open_input
from liger_convert.model import MIXER_MODULE
from liger_convert.utils.errors import BadInput
from liger_convert.utils.progress import Report

CHUNK = 1 << 20  # bytes read, checked, cast and written at a time: small enough to stay in a core's cache
CODES = {dtype: code for code, dtype in (DTYPES | OTHER_DTYPES).items()}
# the bits of +infinity
INFINITIES = {
    torch.float64: 0x7FF0_0000_0000_0000,
    torch.float32: 0x7F80_0000,
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
}


@dataclass(frozen=True)
class Entry:
    """The header entry of a tensor to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> list[Entry]:
        """The entries of a state dict."""
        return [cls(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Shard:
    """A file to be written: its entries, their data in pieces, and `same`, an existing file with identical contents."""

    entries: list[Entry]
    data: Iterator[Tensor]
    same: Path | None

    def write(self, path: Path, pool: ThreadPoolExecutor) -> Iterator[int]:
        """Writes the file; yields the number of bytes after each piece."""
        if self.same is not None:
            # the operating system copies the file faster; meanwhile the data is only checked here
            copy = pool.submit(shutil.copyfile, self.same, path)
            yield from (piece.nbytes for piece in self.data)
            copy.result()
            return
        with open(path, "wb") as file:
            file.write(safetensors_header(self.entries))
            for piece in self.data:
                nbytes = file.write(piece.view(torch.uint8).numpy().data)
                del piece  # free it before the next one is made
                yield nbytes


def target_dtype(name: str, stored: torch.dtype, dtype: str) -> torch.dtype:
    """The dtype in which to write the tensor `name`, stored as `stored`, when `dtype` is requested.

    `auto` keeps the stored dtype. Mixer tensors always keep theirs, because gates near 1 need more than bfloat16's 8
    bits of precision.
    """
    return stored if dtype == "auto" or f".{MIXER_MODULE}." in name else getattr(torch, dtype)


def copied_shards(
    checkpoint: Checkpoint,
    dtype: str = "auto",
    dropped: Container[str] = (),
    replaced: Mapping[str, Callable[[], Tensor]] | None = None,
) -> list[Shard]:
    """One output shard per file of the checkpoint, without the `dropped` tensors, cast to `dtype`.

    replaced: by tensor name, a function that makes the replacement of a stored tensor when it is about to be written.
    """
    shards, replaced = [], replaced or {}
    for file, infos in checkpoint.files.items():
        kept = [(info, target_dtype(info.name, info.dtype, dtype)) for info in infos if info.name not in dropped]
        # wide dtypes first, as safetensors does, so that every tensor is aligned; then in file order
        kept.sort(key=lambda pair: (-pair[1].itemsize, pair[0].offset))
        entries = [Entry(info.name, target, info.shape) for info, target in kept]
        copied = all(info.dtype == target and info.name not in replaced for info, target in kept)
        same = copied and len(kept) == len(infos)
        shards.append(Shard(entries, _checked_data(kept, replaced), file if same else None))
    return shards


def write_shards(shards: list[Shard], folder: Path, progress: Report | None = None) -> int:
    """Writes the files and their index to `folder`; returns the total bytes of all tensors."""
    shards = [shard for shard in shards if shard.entries]
    total = sum(entry.nbytes for shard in shards for entry in shard.entries)
    weight_map: dict[str, str] = {}
    done = 0
    with ThreadPoolExecutor(2) as pool:
        flushes = []
        for number, shard in enumerate(shards, 1):
            name = f"model-{number:05}-of-{len(shards):05}.safetensors"
            weight_map |= {entry.name: name for entry in shard.entries}
            for nbytes in shard.write(folder / name, pool):
                done += nbytes
                if progress is not None:
                    progress(done, total)
            flushes.append(pool.submit(fsync, folder / name))  # while the next file is copied
        for flush in flushes:
            flush.result()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return total


def write_file(path: Path, entries: list[Entry], tensors: Iterable[Tensor]) -> None:
    """Writes `tensors`, described by `entries`, to one safetensors file.

    They may be generated lazily and be on any device; at most one at a time is copied to host memory.
    """
    data = (tensor.detach().cpu().contiguous().view(-1) for tensor in tensors)
    with ThreadPoolExecutor(1) as pool:
        for _ in Shard(entries, data, None).write(path, pool):
            pass


def safetensors_header(entries: list[Entry]) -> bytes:
    """The header of a safetensors file that holds these tensors contiguously: length prefix and padded JSON."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        start, end = end, end + entry.nbytes
        header[entry.name] = {"dtype": CODES[entry.dtype], "shape": entry.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _checked_data(
    tensors: list[tuple[TensorInfo, torch.dtype]], replaced: Mapping[str, Callable[[], Tensor]]
) -> Iterator[Tensor]:
    """The tensors of one file in pieces, checked and cast to their dtypes. A piece is valid until the next one.

    Raises BadInput as `cast_pieces` does, and when a replacement is not finite.
    """
    for info, target in tensors:
        if info.name not in replaced:
            yield from cast_pieces(info, target)
            continue
        piece = replaced[info.name]().detach().to(target).contiguous().view(-1)
        if piece.numel() and not all_finite(piece):
            raise BadInput(f"{info.name}: contains NaN or infinity after the trained change is merged into it")
        yield piece
        del piece  # free it before the next one is made


def cast_pieces(info: TensorInfo, target: torch.dtype) -> Iterator[Tensor]:
    """The values of one tensor, cast to `target`, in pieces that are valid until the next one.

    Raises BadInput as `checked_pieces` does, and for values that overflow in `target`.
    """
    for piece in checked_pieces(info):
        if target != info.dtype:
            piece = piece.to(target)
            if not all_finite(piece):
                wanted = str(target).removeprefix("torch.")
                raise BadInput(f"{info.file}: tensor {info.name} is too large for {wanted}; use bfloat16")
        yield piece


def checked_pieces(info: TensorInfo, size: int = CHUNK) -> Iterator[Tensor]:
    """The values of one tensor in its stored dtype, `size` bytes at a time. A piece is valid until the next one.

    Raises BadInput when it holds NaN or infinity, or when its file was truncated or removed.
    """
    buffer = torch.empty(min(size, info.nbytes), dtype=torch.uint8)
    with open_input(info.file) as file:
        for start in range(0, info.nbytes, size):
            raw = buffer[: min(size, info.nbytes - start)]
            file.seek(info.offset + start)
            if file.readinto(raw.numpy().data) != len(raw):
                raise BadInput(f"{info.file}: ends inside tensor {info.name}; download the file again")
            piece = raw.view(info.dtype)
            if not all_finite(piece):
                raise BadInput(f"{info.file}: tensor {info.name} contains NaN or infinity; the checkpoint is damaged")
            yield piece


def all_finite(piece: Tensor) -> bool:
    """Whether a contiguous floating-point tensor has neither NaN nor infinity, at about memory bandwidth.

    Viewed as signed integers, +infinity and positive NaNs are greater than all finite values. Viewed as unsigned
    integers, -infinity and negative NaNs are. So two maxima suffice.
    """
    infinity, width = INFINITIES[piece.dtype], piece.itemsize
    bits = piece.view(-1).view(torch.uint8).numpy()
    sign = 1 << (8 * width - 1)
    return bool(bits.view(f"i{width}").max() < infinity and bits.view(f"u{width}").max() < infinity + sign)
