"""Imports inside liger_convert go one way: a subpackage imports only from those before it in SUBPACKAGES."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import liger_convert

PACKAGE = Path(liger_convert.__file__).parent
ROOT = Path(__file__).parents[2]
SUBPACKAGES = [
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


def upward(subpackage: str, source: str) -> list[str]:
    """The later subpackages that a file in `subpackage` imports from."""
    found = [name.split(".")[1] for name in imported(source) if name.startswith("liger_convert.")]
    return [name for name in found if name in SUBPACKAGES and SUBPACKAGES.index(name) > SUBPACKAGES.index(subpackage)]


def test_every_subpackage_is_in_the_list():
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == set(SUBPACKAGES)


def test_a_wheel_has_every_folder_of_the_packages():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    folders = {
        str(file.parent.relative_to(place)).replace("/", ".")
        for place, name in ((ROOT, "liger_convert"), (ROOT / "kernels", "gated_kernels"))
        for file in (place / name).rglob("*")
        if file.suffix in (".py", ".html", ".css")
    }
    data = {"liger_convert.shipped_recipes", "liger_convert.shipped_suites"}  # elsewhere in a checkout
    assert set(listed) == folders | data


def test_no_subpackage_imports_from_a_later_one():
    files = [path for name in SUBPACKAGES for path in (PACKAGE / name).rglob("*.py")]
    assert len(files) > 100
    found = {
        str(path.relative_to(PACKAGE)): names
        for path in files
        if (names := upward(path.relative_to(PACKAGE).parts[0], path.read_text(encoding="utf-8")))
    }
    assert found == {}


def test_a_forbidden_import_is_found_wherever_it_is():
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
