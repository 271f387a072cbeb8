"""Safetensors files written as a stream: a buffer's worth is read, checked, cast and written at a time."""

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
from liger_convert.model import MIXER_MODULE
from liger_convert.utils.errors import BadInput
from liger_convert.utils.progress import Report

CHUNK = 1 << 20  # bytes read, checked, cast and written at a time: they stay in a core's cache from one to the next
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
    """A tensor as it will stand in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> list[Entry]:
        """Those of tensors by name."""
        return [cls(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Shard:
    """A file to be written: its tensors, their data in pieces, and `same`, a file whose bytes are these exactly."""

    entries: list[Entry]
    data: Iterator[Tensor]
    same: Path | None

    def write(self, path: Path, pool: ThreadPoolExecutor) -> Iterator[int]:
        """Writes the file, and says after each piece how many bytes that was."""
        if self.same is not None:
            # the system copies a file faster than anybody who looks at its bytes, and does it while we look
            copy = pool.submit(shutil.copyfile, self.same, path)
            yield from (piece.nbytes for piece in self.data)
            copy.result()
            return
        with open(path, "wb") as file:
            file.write(safetensors_header(self.entries))
            for piece in self.data:
                nbytes = file.write(piece.view(torch.uint8).numpy().data)
                del piece  # before the next one is made
                yield nbytes


def target_dtype(name: str, stored: torch.dtype, dtype: str) -> torch.dtype:
    """What a tensor becomes when `dtype` is asked for: `auto` leaves all as they are, and a mixer's never change, whose
    gates near 1 need more than bfloat16's 8 bits."""
    return stored if dtype == "auto" or f".{MIXER_MODULE}." in name else getattr(torch, dtype)


def copied_shards(
    checkpoint: Checkpoint,
    dtype: str = "auto",
    dropped: Container[str] = (),
    replaced: Mapping[str, Callable[[], Tensor]] | None = None,
) -> list[Shard]:
    """A file for each of the checkpoint's, without the `dropped` tensors, cast to `dtype`. replaced: what makes a
    tensor, by name, when its turn comes, in the place of the one that is stored."""
    shards, replaced = [], replaced or {}
    for file, infos in checkpoint.files.items():
        kept = [(info, target_dtype(info.name, info.dtype, dtype)) for info in infos if info.name not in dropped]
        # wide numbers first, as the library does, so that every tensor stands aligned; else in the order of the bytes
        kept.sort(key=lambda pair: (-pair[1].itemsize, pair[0].offset))
        entries = [Entry(info.name, target, info.shape) for info, target in kept]
        copied = all(info.dtype == target and info.name not in replaced for info, target in kept)
        same = copied and len(kept) == len(infos)
        shards.append(Shard(entries, _checked_data(kept, replaced), file if same else None))
    return shards


def write_shards(shards: list[Shard], folder: Path, progress: Report | None = None) -> int:
    """Writes the files and their index to `folder`; returns the bytes of all tensors."""
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
    """Writes one file of `tensors`, which may be made when their turn comes and be on any device: no more than one
    comes to the host's memory."""
    data = (tensor.detach().cpu().contiguous().view(-1) for tensor in tensors)
    with ThreadPoolExecutor(1) as pool:
        for _ in Shard(entries, data, None).write(path, pool):
            pass


def safetensors_header(entries: list[Entry]) -> bytes:
    """What stands before the data of a safetensors file with these tensors, back to back."""
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
    """The tensors of one file in pieces, checked and cast to their dtypes; a piece is valid until the next."""
    for info, target in tensors:
        if info.name not in replaced:
            yield from cast_pieces(info, target)
            continue
        piece = replaced[info.name]().detach().to(target).contiguous().view(-1)
        if piece.numel() and not all_finite(piece):
            raise BadInput(f"{info.name}: contains NaN or infinity after the trained change is merged into it")
        yield piece
        del piece  # before the next one is made


def cast_pieces(info: TensorInfo, target: torch.dtype) -> Iterator[Tensor]:
    """The numbers of one tensor as `target` in pieces, valid until the next. Raises BadInput as `checked_pieces` does,
    and for numbers that `target` does not hold."""
    for piece in checked_pieces(info):
        if target != info.dtype:
            piece = piece.to(target)
            if not all_finite(piece):
                wanted = str(target).removeprefix("torch.")
                raise BadInput(f"{info.file}: tensor {info.name} is too large for {wanted}; use bfloat16")
        yield piece


def checked_pieces(info: TensorInfo, size: int = CHUNK) -> Iterator[Tensor]:
    """The numbers of one tensor, `size` bytes at a time; a piece is valid until the next.

    Raises BadInput where it holds NaN or infinity, or its file has shrunk.
    """
    buffer = torch.empty(min(size, info.nbytes), dtype=torch.uint8)
    with open(info.file, "rb") as file:
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
    """Whether a contiguous floating tensor holds neither NaN nor infinity, about as fast as memory is read.

    In the order of their bits as integers, +infinity and its NaNs come after all positive numbers, and so do -infinity
    and its NaNs among all numbers once the sign counts as the highest bit: two maxima decide.
    """
    infinity, width = INFINITIES[piece.dtype], piece.itemsize
    bits = piece.view(-1).view(torch.uint8).numpy()
    sign = 1 << (8 * width - 1)
    return bool(bits.view(f"i{width}").max() < infinity and bits.view(f"u{width}").max() < infinity + sign)
