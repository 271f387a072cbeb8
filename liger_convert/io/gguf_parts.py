"""A .gguf model that llama.cpp has split into parts: PREFIX-00001-of-00003.gguf and so on.

Each part has its own header and some of the tensors; the first one has all other fields. The libraries read only single
files, so the parts are joined into one. For its config, any file is copied without what makes the libraries slow.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path

from liger_convert.io import gguf_header
from liger_convert.io.files import disk_errors
from liger_convert.io.gguf_header import Header
from liger_convert.io.inputs import open_input
from liger_convert.utils.errors import BadInput

PART = re.compile(r"(.*-)(\d{5})-of-(\d{5})\.gguf")
CHUNK = 1 << 24  # bytes copied at a time
ROTARY = "rope_"  # how the names of tensors begin that scale the rotary embedding
NAME = "general.name"
# A llama with this name is of another architecture to transformers, which the package gguf does not know.
MISLEADING = "mistral"
MOST = 1000  # maximum number of parts; the largest published models have a few dozen


def parts_of(file: Path) -> list[Path]:
    """All parts of the model to which the part `file` belongs, in order; just `file` if its name is not that of a part.

    Raises BadInput for a missing part, and for an impossible part number.
    """
    match = PART.fullmatch(file.name)
    if match is None or int(match[3]) < 2:
        return [file]
    count = int(match[3])
    if count > MOST or not 1 <= int(match[2]) <= count:
        raise BadInput(f"base: {file}: is named as part {int(match[2])} of {count}; give the first part of the model")
    parts = [file.with_name(f"{match[1]}{number:05}-of-{match[3]}.gguf") for number in range(1, count + 1)]
    if missing := [part for part in parts if not part.is_file()]:
        raise BadInput(f"base: {missing[0]}: this part of {file.name} is missing; put all {count} into one folder")
    return parts


def join(headers: list[Header], out: Path, *, for_config: bool = False, with_lists: bool = True) -> None:
    """Joins the parts with these checked `headers`, the first part first, into the file `out`.

    for_config: writes what a config is made of; all tensors but those of the rotary embedding share one hole.
    with_lists: False leaves out the lists of the tokenizer, for which the libraries take seconds if its vocabulary is
    large. Raises BadInput for a part that has shrunk since its header was read.
    """
    first, alignment = headers[0], headers[0].alignment
    tensors = [(header, name, tensor) for header in headers for name, tensor in header.tensors.items()]
    fields = [
        field
        for name, field in first.fields.items()
        if not name.startswith(gguf_header.SPLIT)
        and (with_lists or field.items is None or not name.startswith("tokenizer."))
        and not (for_config and name == NAME and first.texts.get(name) == MISLEADING)
    ]
    left_out = {name for _, name, _ in tensors if for_config and not name.startswith(ROTARY)}
    hole = max((tensor.nbytes for _, name, tensor in tensors if name in left_out), default=0)
    end = hole + -hole % alignment
    with disk_errors(out), open(out, "wb") as joined:

        def copy(path: Path, begin: int, count: int) -> None:
            with open_input(path) as file:  # each time: a process can have a thousand files open, or fewer
                file.seek(begin)
                while count:
                    if not (data := file.read(min(count, CHUNK))):
                        raise BadInput(f"base: {path}: has become shorter while it was read; download it again")
                    count -= joined.write(data)

        copy(first.path, 0, gguf_header.PREFIX_BYTES)
        joined.write(struct.pack(f"{first.order}QQ", len(tensors), len(fields)))
        for field in fields:
            copy(first.path, field.begin, field.end - field.begin)
        offsets = {}
        for header, name, tensor in tensors:
            offsets[name] = 0 if name in left_out else end
            copy(header.path, tensor.begin, tensor.end - tensor.begin)
            joined.write(struct.pack(f"{first.order}Q", offsets[name]))
            if name not in left_out:
                end += tensor.nbytes + -tensor.nbytes % alignment
        begin = joined.tell() + -joined.tell() % alignment
        for header, name, tensor in tensors:
            if name not in left_out:
                joined.seek(begin + offsets[name])
                copy(header.path, header.data_begin + tensor.offset, tensor.nbytes)
        joined.truncate(begin + end)
