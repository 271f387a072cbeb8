"""YAML as people write it: repeated keys and octal refused, 1e-4 a number, errors with their line, `a[0].c=value`
overrides."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from liger_convert.io import inputs
from liger_convert.utils.errors import BadInput

# PyYAML takes about 0.1 ms for a value, so these bounds are seconds; no shipped recipe has 300 values.
MAX_BYTES = 1 << 20
MAX_VALUES = 20_000
MAX_DEPTH = 50
MAX_DIGITS = 100  # of a number; no field of a recipe or a suite takes one of 20


def read(path: Path | str) -> str:
    """The text of a file. Raises BadInput when there is none to read."""
    return inputs.read_text(path, MAX_BYTES)


class _Loader(yaml.SafeLoader):
    """YAML without its traps: a repeated key is an error, so is 010, 1e-4 is a number, aliases cannot make a small file
    a large one, and a value that cannot be constructed is an error with its line."""

    values = depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.values, self.depth = self.values + 1, self.depth + 1
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        _bound(self.values, mark)
        if self.depth > MAX_DEPTH:
            raise _problem("it is nested too deeply", mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        if isinstance(node, yaml.ScalarNode):
            _plain_base(node, index)
        return node

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None:
            _expanded(node, {})
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        kind = node.tag.rpartition(":")[2]
        if kind in ("int", "float") and len(node.value) > MAX_DIGITS:
            raise _problem(f"a number with {len(node.value):,} digits", node.start_mark)
        try:
            value = super().construct_object(node, deep)
        except yaml.YAMLError:
            raise
        except Exception:  # a month 13, a !!int of letters, …: each tag's constructor raises whatever it does
            raise _problem(f"this is not a valid {kind}", node.start_mark) from None
        if isinstance(value, str) and not inputs.is_text(value):
            raise _problem("half of a surrogate pair, which is not a character", node.start_mark)
        if isinstance(value, str) and "\0" in value:
            raise _problem("a NUL, which no text holds", node.start_mark)
        return value


def _problem(what: str, mark: yaml.Mark) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, what, mark)


def _plain_base(node: yaml.ScalarNode, key: Any) -> None:
    """Refuses a number that YAML does not read as it looks. key: the node of its key, if it has one."""
    if node.tag.rpartition(":")[2] in ("int", "float") and (found := _OTHER_BASES.fullmatch(node.value)):
        field = f"{key.value}: " if isinstance(key, yaml.ScalarNode) else ""
        what, right = ("in base 60", "") if found["sixty"] else ("octal", "without the zero, or ")
        why = f"{field}{node.value[:MAX_DIGITS]} is {what} in YAML"
        raise _problem(f"{why}; write it {right}in quotes if it is text", node.start_mark)


def _bound(values: int, mark: yaml.Mark) -> None:
    if values > MAX_VALUES:
        raise _problem(f"more than {MAX_VALUES:,} values, each counted as often as aliases repeat it", mark)


def _expanded(node: yaml.Node, known: dict[yaml.Node, int]) -> int:
    """How many values a node stands for, with those behind its aliases. known: of the nodes that were counted; 0 for
    one that is being counted, which only an alias inside its own value meets."""
    if node in known:
        if not known[node]:
            raise _problem("an alias inside the value that it refers to", node.start_mark)
        return known[node]
    known[node] = 0
    parts = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
    total = 1 + (0 if isinstance(node, yaml.ScalarNode) else sum(_expanded(part, known) for part in parts))
    _bound(total, node.start_mark)
    known[node] = total
    return total


def _refuse_repeated(node: yaml.MappingNode) -> None:
    seen: set[str] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode):
            if key.value in seen:
                raise _problem(f"the key {key.value!r} appears twice", key.start_mark)
            seen.add(key.value)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise _problem("a key that is a list or a mapping; keys are plain words", key.start_mark)
    _refuse_repeated(node)
    made = loader.construct_mapping(node, deep=True)
    for key in made:
        if not isinstance(key, str):
            raise _problem(f"the key {key!r} is not a string; put it in quotes", node.start_mark)
    return made


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_OTHER_BASES = re.compile(r"[-+]?(0[0-7_]*[0-7]|(?P<sixty>[\d_]+:.*))")
_FLOAT = re.compile(r"[-+]?\d[\d_]*(\.\d*)?[eE][-+]?\d+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, [*"-+0123456789"])


def parse(text: str, where: str) -> Any:
    """YAML text as plain Python. Raises BadInput with `where` and the line when it is not YAML."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise BadInput(f"{where}: {problem(error)}") from None


def compose(text: str, where: str) -> yaml.Node | None:
    """YAML text as nodes, without making its values, which may have tags of another program. None if there is none.
    Raises BadInput for what is not YAML."""
    try:
        root: yaml.Node | None = yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise BadInput(f"{where}: {problem(error)}") from None
    return root


def refuse_repeated_keys(root: yaml.Node | None, where: str) -> None:
    """Raises BadInput if a key appears twice in any mapping of these nodes, as `parse` does."""
    waiting, seen = [] if root is None else [root], set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen or isinstance(node, yaml.ScalarNode):  # an alias leads to the same node again
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            try:
                _refuse_repeated(node)
            except yaml.YAMLError as error:
                raise BadInput(f"{where}: {problem(error)}") from None
            waiting += [part for pair in node.value for part in pair]
        else:
            waiting += node.value


def problem(error: yaml.YAMLError) -> str:
    """What PyYAML found wrong, in one line, with the line of the text if it is known."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return f"not valid YAML: {str(error).splitlines()[0]}"
    line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
    return f"{line}not valid YAML: {error.problem}"


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
            raise BadInput(f"{flag}: [{key}] does not exist, because the value before it is {size}")
        return [_assign(item, rest, value, flag) if i == key else item for i, item in enumerate(data)]
    if data is not None and not isinstance(data, dict):
        raise BadInput(f"{flag}: {key!r} does not exist, because the value before it is {data!r}, not a mapping")
    data = data or {}
    return data | {key: _assign(data.get(key), rest, value, flag)}


def override(data: Any, assignment: str) -> Any:
    """`data` with the assignment `a.b[0].c=value` (the value in YAML) carried out; raises BadInput."""
    flag = f"--set {assignment}" if len(assignment) <= 200 else f"--set {assignment[:200]}…"
    inputs.check_text(assignment, flag)
    path, equals, value = assignment.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][\w-]*(\[[0-9]{1,9}\])*(\.[A-Za-z_][\w-]*(\[[0-9]{1,9}\])*)*", path):
        raise BadInput(f"{flag}: write it as field=value, for example stages[0].tokens=20000")
    keys: list[str | int] = [int(key) if re.fullmatch("[0-9]+", key) else key for key in re.findall(r"\w[\w-]*", path)]
    return _assign(data, keys, parse(value, flag), flag)
