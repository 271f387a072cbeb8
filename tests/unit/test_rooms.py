"""Imports inside of liger_convert go one way: a room imports from those before it, never from those behind it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import liger_convert

PACKAGE = Path(liger_convert.__file__).parent
ROOMS = [
    "utils",
    "io",
    "config",
    "mixers",
    "model",
    "serving",
    "data",
    "training",
    "eval",
    "pipeline",
    "benchmark",
    "cli",
]


def imported(source: str) -> Iterator[str]:
    """The modules of liger_convert that a file imports, inside of functions as well; not those under TYPE_CHECKING."""
    tree = ast.parse(source)
    checks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    types_only = {id(inner) for node in checks for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in types_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports name their module in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def upward(room: str, source: str) -> list[str]:
    """What a file in `room` imports from rooms behind it."""
    found = [name.split(".")[1] for name in imported(source) if name.startswith("liger_convert.")]
    return [name for name in found if name in ROOMS and ROOMS.index(name) > ROOMS.index(room)]


def test_every_folder_of_the_package_is_a_room():
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == set(ROOMS)


def test_no_room_imports_from_one_behind_it():
    files = [path for room in ROOMS for path in (PACKAGE / room).rglob("*.py")]
    assert len(files) > 100
    found = {
        str(path.relative_to(PACKAGE)): names
        for path in files
        if (names := upward(path.relative_to(PACKAGE).parts[0], path.read_text(encoding="utf-8")))
    }
    assert found == {}


def test_an_import_upwards_is_found_wherever_it_stands():
    planted = [
        "from liger_convert.pipeline import plan",
        "from liger_convert import pipeline",
        "import liger_convert.pipeline.plan",
        "def f():\n    from liger_convert.pipeline.plan import Plan",
    ]
    for line in planted:
        assert upward("data", line) == ["pipeline"], line
        assert upward("cli", line) == [], line
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from liger_convert.pipeline import plan"
    assert upward("data", typed) == []
