"""A .gguf model that llama.cpp has split into parts: PREFIX-00001-of-00003.gguf and so on.

Each part has its own header and some of the tensors; the first one has all other fields. The libraries read only single
files, so the parts are joined into one.
"""

from __future__ import annotations

import re
from pathlib import Path

from liger_convert.io import gguf_header
from liger_convert.utils.errors import BadInput

NAME = re.compile(r"(.*-)(\d{5})-of-(\d{5})\.gguf")
MOST = 1000  # maximum number of parts; the largest published models have a few dozen


def parts_of(file: Path) -> list[Path]:
    """All parts of the model to which the part `file` belongs, in order; just `file` if its name is not that of a part.

    Raises BadInput for a missing part, and for an impossible part number.
    """
    match = NAME.fullmatch(file.name)
    if match is None or int(match[3]) < 2:
        return [file]
    count = int(match[3])
    if count > MOST or not 1 <= int(match[2]) <= count:
        raise BadInput(f"base: {file}: is named as part {int(match[2])} of {count}; give the first part of the model")
    parts = [file.with_name(f"{match[1]}{number:05}-of-{match[3]}.gguf") for number in range(1, count + 1)]
    if missing := [part for part in parts if not part.is_file()]:
        raise BadInput(f"base: {missing[0]}: this part of {file.name} is missing; put all {count} into one folder")
    return parts


def join(parts: list[Path], out: Path, *, with_data: bool = True) -> None:
    """Joins `parts`, whose headers have been checked, into the file `out`.

    with_data: False leaves a hole in place of the tensors, if only the header will be read.
    """
    from gguf import GGUFReader, GGUFValueType, GGUFWriter

    readers = [GGUFReader(part) for part in parts]
    first = readers[0]
    writer = GGUFWriter(out, first.fields["general.architecture"].contents(), endianess=first.endianess)
    try:
        for field in first.fields.values():
            if field.name == "general.architecture" or field.name.startswith(("GGUF.", gguf_header.SPLIT)):
                continue
            kind = field.types[0]
            writer.add_key_value(
                field.name, field.contents(), kind, field.types[-1] if kind == GGUFValueType.ARRAY else None
            )
        tensors = [tensor for reader in readers for tensor in reader.tensors]
        for tensor in tensors:
            data = tensor.data
            writer.add_tensor_info(tensor.name, data.shape, data.dtype, data.nbytes, tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if with_data:
            for tensor in tensors:
                writer.write_tensor_data(tensor.data, tensor_endianess=first.endianess)
    finally:
        writer.close()
    if not with_data:
        size = sum(tensor.data.nbytes + -tensor.data.nbytes % writer.data_alignment for tensor in tensors)
        with open(out, "r+b") as file:
            end = file.seek(0, 2)
            file.truncate(end + -end % writer.data_alignment + size)
