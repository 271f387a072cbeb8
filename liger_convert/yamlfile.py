"""YAML as people write it: repeated keys refused, 1e-4 a number, errors with their line, `a.b[0].c=value` overrides."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from liger_convert.errors import BadInput


def read(path: Path | str) -> str:
    """The text of a file. Raises BadInput when there is none to read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BadInput(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read as text: {error}") from None


class _Loader(yaml.SafeLoader):
    """YAML without its two classic traps: a repeated key is an error, and 1e-4 is a number."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict:
    seen: set[str] = set()
    for key, _ in node.value:
        if key.value in seen:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key.value!r} appears twice", key.start_mark)
        seen.add(key.value)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_FLOAT = re.compile(r"[-+]?\d[\d_]*(\.\d*)?[eE][-+]?\d+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, [*"-+0123456789"])


def parse(text: str, where: str) -> Any:
    """YAML text as plain Python. Raises BadInput with `where` and the line when it is not YAML."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise BadInput(f"{where}:{line}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise BadInput(f"{where}: not valid YAML: {str(error).splitlines()[0]}") from None


def quoted(text: str) -> str:
    """A string as YAML that means it, in quotes only where it would mean something else."""
    try:
        plain = parse(text, "") == text
    except BadInput:
        plain = False
    return text if plain else json.dumps(text)


def _assign(data: Any, keys: Sequence[str | int], value: Any, flag: str) -> Any:
    """A copy of `data` with `value` at `keys`. Only what is on the way is copied: YAML anchors share the rest."""
    if not keys:
        return value
    key, rest = keys[0], keys[1:]
    if isinstance(key, int):
        if not isinstance(data, list) or key >= len(data):
            size = f"a list of {len(data)}" if isinstance(data, list) else "not a list"
            raise BadInput(f"{flag}: [{key}] is not there: what it points into is {size}")
        return [_assign(item, rest, value, flag) if i == key else item for i, item in enumerate(data)]
    if data is not None and not isinstance(data, dict):
        raise BadInput(f"{flag}: {key!r} is not there: what it points into is {data!r}, not a mapping")
    data = data or {}
    return data | {key: _assign(data.get(key), rest, value, flag)}


def override(data: Any, assignment: str) -> Any:
    """`data` with the assignment `a.b[0].c=value` (the value in YAML) carried out; raises BadInput."""
    flag = f"--set {assignment}"
    path, equals, value = assignment.partition("=")
    keys: list[str | int] = [int(key) if key.isdigit() else key for key in re.findall(r"\w[\w-]*", path)]
    if not equals or not re.fullmatch(r"[A-Za-z_][\w-]*(\[\d+\])*(\.[A-Za-z_][\w-]*(\[\d+\])*)*", path):
        raise BadInput(f"{flag}: write it as field=value, for example stages[0].tokens=20000")
    return _assign(data, keys, parse(value, flag), flag)
