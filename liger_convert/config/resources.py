"""The recipes and suites that come with the package, in a checkout or installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from liger_convert.config import yaml_file
from liger_convert.config.fields import plain_name
from liger_convert.utils.errors import BadInput, did_you_mean

PACKAGE = Path(__file__).parents[1]
# where each kind lies in a checkout; in an installed package it is a folder of the package (see pyproject.toml)
FOLDERS = {"recipes": PACKAGE.parent / "recipes", "suites": PACKAGE.parent / "eval" / "suites"}


def names(kind: str) -> list[str]:
    """The names of all shipped `recipes` or `suites`."""
    return sorted(path.stem for path in _folder(kind).glob("*.yaml"))


def recipe_path(name: str) -> Path:
    """The shipped recipe called `name`. Raises BadInput with the list."""
    return _find("recipes", name)


def is_shipped(name: str, text: str) -> bool:
    """Whether a recipe with this `text` is the shipped one called `name`, so that the name is enough to run it."""
    return name in names("recipes") and yaml_file.read(recipe_path(name)) == text


def chosen_recipe(recipe: Path | None, base: str | None, overrides: Sequence[str]) -> tuple[Path, list[str]]:
    """The recipe with `base` in place of its own, and with `overrides`, which come last. For a base without a recipe,
    the recipe `default`, named after the base. Raises BadInput when there is neither."""
    given = [] if base is None else [f"base={yaml_file.quoted(base)}"]
    if recipe is None:
        if base is None:
            raise BadInput("RECIPE: is missing; give a recipe, or just a checkpoint with --base")
        recipe = recipe_path("default")
        given.append(f"name={yaml_file.quoted(plain_name(Path(base).absolute().name.removesuffix('.gguf')))}")
    return recipe, [*given, *overrides]


def suite_path(name: str) -> Path:
    """The shipped suite called `name`. Raises BadInput with the list."""
    return _find("suites", name)


def _folder(kind: str) -> Path:
    packaged = PACKAGE / f"shipped_{kind}"
    return packaged if packaged.is_dir() else FOLDERS[kind]


def _find(kind: str, name: str) -> Path:
    if name not in (known := names(kind)):
        hint = did_you_mean(name, known)
        kinds = ", ".join(known)
        raise BadInput(f"{kind.removesuffix('s')}: {name!r} is unknown{hint}; use one of {kinds}, or give a .yaml file")
    return _folder(kind) / f"{name}.yaml"
