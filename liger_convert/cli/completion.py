"""What the shell completes: names of recipes, suites, mixers and shapes.

A key press should not wait for torch, which the registries of mixers and shapes import. So their names are read off
their source files; the tests hold them to the registries.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def recipes(incomplete: str) -> list[str]:
    """The shipped recipes that begin with `incomplete`."""
    return _shipped("recipes", incomplete)


def suites(incomplete: str) -> list[str]:
    """The shipped suites that begin with `incomplete`."""
    return _shipped("suites", incomplete)


def mixers(incomplete: str) -> list[str]:
    """The mixers that begin with `incomplete`: the `name` of each class in liger_convert/mixers."""
    found = (name for path in (PACKAGE / "mixers").rglob("*.py") for name in _class_names(path))
    return sorted(name for name in found if name.startswith(incomplete))


def shapes(incomplete: str) -> list[str]:
    """The shapes that begin with `incomplete`: the keys of SHAPES in benchmark/shapes.py."""
    for node in ast.parse((PACKAGE / "benchmark/shapes.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "SHAPES":
            assert isinstance(node.value, ast.Dict)
            keys = [str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)]
            return [name for name in keys if name.startswith(incomplete)]
    return []


def _shipped(kind: str, incomplete: str) -> list[str]:
    from liger_convert.config.resources import names

    return [name for name in names(kind) if name.startswith(incomplete)]


def _class_names(path: Path) -> Iterator[str]:
    """The strings that classes in a file assign to `name`."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for line in node.body:
            if not isinstance(line, ast.Assign) or [getattr(target, "id", "") for target in line.targets] != ["name"]:
                continue
            if isinstance(line.value, ast.Constant) and line.value.value:
                yield str(line.value.value)
