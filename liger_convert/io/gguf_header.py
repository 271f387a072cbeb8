"""Validates the header of a .gguf file before a library reads it, and says where its parts are. The library trusts
counts and lengths, so that a file of a hundred bytes could request a list of 2**60 items. It also takes many seconds
for the lists of a large vocabulary, which are skipped here."""

from __future__ import annotations

import functools
import math
import mmap
import re
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from liger_convert.io.config_sizes import check_sizes
from liger_convert.io.inputs import open_input
from liger_convert.utils.errors import BadInput

MAGIC = b"GGUF"
PREFIX_BYTES = 8  # the magic bytes and the version
SPLIT = "split."  # prefix of the fields that number the parts of a model
STRING, ARRAY = 8, 9
SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a value, by type
# whether an integer is signed, by type
WHOLE = {
    0: False,
    1: True,
    2: False,
    3: True,
    4: False,
    5: True,
    10: False,
    11: True,
}
# The library creates a Python object for every item, which for ten million takes minutes and gigabytes. A vocabulary
# of 262,144 with its scores, types and merges has 1.3 million items.
ITEMS = 1 << 21
TENSORS = 1 << 17  # the largest published models have a few thousand, as a layer's experts are stored in one tensor
NAME_BYTES = 1 << 10
DEPTH = 4  # maximum nesting of arrays


# The header's names of the sizes in `config_sizes`, without the prefix of the architecture.
NAMES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
}


def check(parts: list[Path]) -> list[Header]:
    """Reads and checks the headers of a model's `parts`, the first part first. Raises BadInput unless

    - all counts, lengths and offsets lie within their files,
    - the parts are numbered as their names say, and no tensor is in several of them,
    - the sizes are plausible and the tensor types can be dequantized,
    - there are tensors for every layer: transformers would initialize missing ones randomly.
    """
    from gguf import GGMLQuantizationType

    file, headers = parts[0], [Header(part) for part in parts]
    for number, header in enumerate(headers):
        count, own = header.numbers.get(f"{SPLIT}count", 1), header.numbers.get(f"{SPLIT}no", 0)
        if count != len(parts) or own != number:
            what = f"says that it is part {own + 1} of {count}, but its name says {number + 1} of {len(parts)}"
            way = "restore its original name, or join the parts (llama-gguf-split --merge)"
            raise BadInput(f"base: {header.path}: {what}; {way}")
        for name, tensor in header.tensors.items():
            if not _is_readable(tensor.kind):
                known = ", ".join(other.name for other in GGMLQuantizationType if _is_readable(other))
                what = f"tensor {name} is of type {tensor.kind.name}, which the package gguf cannot dequantize"
                raise BadInput(f"base: {header.path}: {what}; give one of {known}")
    tensors = Counter(name for header in headers for name in header.tensors)
    if (twice := tensors.most_common(1)) and twice[0][1] > 1:
        raise BadInput(f"base: {file}: tensor {twice[0][0]} is in {twice[0][1]} of its parts")
    numbers = {key.partition(".")[2]: value for key, value in headers[0].numbers.items()}
    check_sizes({size: numbers.get(name) for name, size in NAMES.items()}, f"base: {file}")
    blocks = {int(match[1]) for name in tensors if (match := re.match(r"blk\.(\d{1,9})\.", name))}
    if "block_count" in numbers and blocks != set(range(numbers["block_count"])):
        what = f"says that it has {numbers['block_count']} layers, but has tensors for {len(blocks)}"
        raise BadInput(f"base: {file}: {what}")
    return headers


@functools.cache
def _is_readable(kind: Any) -> bool:
    """Whether the package gguf can dequantize tensors of this type; tried on a block of zeros."""
    from gguf import GGML_QUANT_SIZES, dequantize

    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


@dataclass(frozen=True)
class Field:
    """A field of a header. The bytes from `begin` to `end` of the file are its name, type and value. items: how many,
    if it is a list."""

    begin: int
    end: int
    items: int | None


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file. The bytes from `begin` to `end` of the file are its name, shape and type. kind: the type.
    offset, nbytes: of its data, from the start of all data."""

    begin: int
    end: int
    kind: Any
    offset: int
    nbytes: int


class Header:
    """The header of the file `path`. fields, tensors: by name. numbers, texts: the values of the fields that are
    integers and short texts, by name. data_begin: where the data of the tensors begins. order: of bytes, `<` or `>`.

    Raises BadInput for a header that is broken or exceeds a limit.
    """

    def __init__(self, path: Path):
        self.path, self.items, self.at = path, 0, 0
        self.fields: dict[str, Field] = {}
        self.tensors: dict[str, Tensor] = {}
        self.numbers: dict[str, int] = {}
        self.texts: dict[str, str] = {}
        with open_input(path) as file:
            self.size = file.seek(0, 2)
            if not self.size:
                raise self._broken("it is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as self.data:
                self._entries()
        if self.alignment <= 0 or self.alignment & (self.alignment - 1):
            raise self._broken(f"general.alignment is {self.alignment}, which is not a power of two")
        self.data_begin = self.at + -self.at % self.alignment
        end = self.data_begin + max((tensor.offset + tensor.nbytes for tensor in self.tensors.values()), default=0)
        if self.tensors and end > self.size:
            raise self._broken(f"its tensors would end at byte {end:,}, but it has {self.size:,}")

    @property
    def alignment(self) -> int:
        return self.numbers.get("general.alignment", 32)

    @property
    def architecture(self) -> str:
        return self.texts.get("general.architecture", "")

    @property
    def vocabulary(self) -> int | None:
        """How many tokens the model has, if the header says so."""
        if (said := self.numbers.get(f"{self.architecture}.vocab_size")) is not None:
            return said
        tokens = self.fields.get("tokenizer.ggml.tokens")
        return tokens.items if tokens is not None else None

    def _entries(self) -> None:
        if self._take(4) != MAGIC:
            raise self._broken("it does not begin like a .gguf file")
        self.order = ">" if self._take(4)[:2] == b"\0\0" else "<"
        tensors, fields = self._number("Q"), self._number("Q")
        for _ in range(self._count(fields, 12, "fields")):
            begin = self.at
            key = self._string("a field's name")
            if key in self.fields:
                raise self._broken(f"it has the field {key!r} twice")
            kind, value = self._number("I"), None
            items = self._array(key, 0) if kind == ARRAY else None
            if kind != ARRAY:
                value = self._value(kind, key, 0)
            if isinstance(value, str):
                self.texts[key] = value
            elif value is not None:
                self.numbers[key] = value
            self.fields[key] = Field(begin, self.at, items)
        if self._count(tensors, 24, "tensors") > TENSORS:
            raise self._broken(f"it has more than {TENSORS:,} tensors")
        for _ in range(tensors):
            self._tensor()

    def _tensor(self) -> None:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        begin, name = self.at, self._string("a tensor's name")
        if not name or name in self.tensors:
            raise self._broken(f"it has the tensor {name!r} twice" if name else "it has a tensor without a name")
        axes = self._number("I")
        if axes > 8:
            raise self._broken(f"tensor {name} has {axes:,} axes")
        elements = math.prod([self._number("Q") for _ in range(axes)])
        kind, end, offset = self._number("I"), self.at, self._number("Q")
        if kind not in set(GGMLQuantizationType):
            raise self._broken(f"tensor {name} has the unknown type {kind}")
        block, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        self.tensors[name] = Tensor(begin, end, GGMLQuantizationType(kind), offset, -(-elements // block) * nbytes)

    def _value(self, kind: int, key: str, depth: int) -> int | str | None:
        """Reads one value of the field `key`. Returns it if it is an integer or a short text, else None."""
        if kind == STRING:
            length = self._number("Q")
            if depth or length > NAME_BYTES:
                self._skip(length, key)
                return None
            return self._take(length).decode("utf-8", "replace")
        if kind == ARRAY:
            self._array(key, depth)
            return None
        if kind not in SCALARS:
            raise self._broken(f"field {key} has the unknown type {kind}")
        data = self._take(SCALARS[kind])
        if kind not in WHOLE:
            return None
        return int.from_bytes(data, "little" if self.order == "<" else "big", signed=WHOLE[kind])

    def _array(self, key: str, depth: int) -> int:
        """Reads a list. Returns how many items it has."""
        if depth == DEPTH:
            raise self._broken(f"field {key} has arrays inside arrays")
        kind, count = self._number("I"), self._number("Q")
        smallest = SCALARS.get(kind, 8 if kind == STRING else 12)
        self.items += self._count(count, smallest, f"items in {key}")
        if self.items > ITEMS:
            raise self._broken(f"its lists have more than {ITEMS:,} items")
        if kind in SCALARS:
            self._skip(count * smallest, key)
            return count
        for _ in range(count):
            self._value(kind, key, depth + 1)
        return count

    def _count(self, count: int, smallest: int, what: str) -> int:
        left = self.size - self.at
        if count * smallest > left:
            raise self._broken(f"it says that it has {count:,} {what}, but ends {left:,} bytes later")
        return count

    def _string(self, what: str) -> str:
        length = self._number("Q")
        if length > NAME_BYTES:
            raise self._broken(f"{what} has {length:,} bytes")
        return self._take(length).decode("utf-8", "replace")

    def _number(self, kind: str) -> int:
        at = self.at
        self._skip(4 if kind == "I" else 8, "a number")
        return struct.unpack_from(self.order + kind, self.data, at)[0]

    def _take(self, count: int) -> bytes:
        at = self.at
        self._skip(count, "a text")
        return self.data[at : self.at]

    def _skip(self, count: int, what: str) -> None:
        if count > self.size - self.at:
            raise self._broken(
                f"it is cut off: {what} has {count:,} bytes, but it ends {self.size - self.at:,} bytes later"
            )
        self.at += count

    def _broken(self, what: str) -> BadInput:
        return BadInput(f"base: {self.path}: cannot be read as a GGUF model: {what}")
