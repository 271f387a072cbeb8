"""What the shell completes: names of recipes, suites, mixers and shapes.

A key press should not wait for torch, which the registries of mixers and shapes import. So their names are read off
their source files; the tests hold them to the registries.
"""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def recipes(incomplete: str) -> list[str]:
    """The shipped recipes that begin with `incomplete`."""
    return _shipped("recipes", incomplete)


def suites(incomplete: str) -> list[str]:
    """The shipped suites that begin with `incomplete`."""
    return _shipped("suites", incomplete)


def mixers(incomplete: str) -> list[str]:
    """The mixers that begin with `incomplete`: the names in the table of mixers/registry.py."""
    for node in ast.walk(ast.parse((PACKAGE / "mixers/registry.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.Dict) and node.keys:
            names = [str(key.value) for key in node.keys if isinstance(key, ast.Constant)]
            return sorted(name for name in names if name.startswith(incomplete))
    return []


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
