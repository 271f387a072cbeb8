"""Arguments and options that several commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from liger_convert.cli import completion
from liger_convert.utils.errors import BadInput

MAX_SEED = 2**31 - 1  # as in a recipe


def recipe_file(path: Path | None) -> Path | None:
    """The file that RECIPE means: a path, or the name of a shipped recipe. Raises BadInput, also for what is a base."""
    if path is None:
        return path
    is_there, is_yaml = os.path.exists(path), path.suffix in (".yaml", ".yml")
    if os.path.isdir(path) or path.suffix == ".gguf" or not (is_there or is_yaml or path.name == str(path)):
        raise BadInput(f"RECIPE: {path}: is not a recipe (a YAML file); to convert a base, use --base {path}")
    if is_there:
        return path
    from liger_convert.config.resources import names, recipe_path

    if path.suffix and path.stem in names("recipes"):
        raise BadInput(f"RECIPE: {path}: there is no such file; the shipped recipe is called {path.stem}")
    return path if path.suffix else recipe_path(str(path))


RecipeFile = Annotated[
    Path | None,
    typer.Argument(
        help="A recipe file, or the name of a shipped recipe, such as smollm2-135m-quick.",
        callback=recipe_file,
        autocompletion=completion.recipes,
        show_default="the recipe default, if only --base is given",
    ),
]
Base = Annotated[
    str | None,
    typer.Option(help="Folder, hub id or .gguf file to use instead of the recipe's base.", show_default=False),
]
Source = Annotated[str, typer.Argument(help="Model folder, hub id or .gguf file.", show_default=False)]
Model = Annotated[Path, typer.Argument(help="Folder of a linearized model.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change one field of the recipe; repeatable.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Suite = Annotated[
    str,
    typer.Option(
        help="A suite by name (quick, honest, paper, recall, needle, …), or a file like those in eval/suites.",
        autocompletion=completion.suites,
    ),
]
TextFile = Annotated[str, typer.Option(help="Held-out text: a data file, or pydoc for Python's documentation.")]
OtherText = Annotated[
    str | None,
    typer.Option(help="Text of another kind: a data file, or pydoc.", show_default="pydoc, unless --text is pydoc"),
]
IncludePath = Annotated[
    Path | None,
    typer.Option(
        help="Folder of lm-eval task YAML files; Python functions that they name are run.", show_default=False
    ),
]
DataDir = Annotated[
    Path | None, typer.Option(help="Folder of JSONL files for the tasks; by default they come from the hub.")
]
Limit = Annotated[int | None, typer.Option(help="Rows per task.", show_default="all", min=1, max=10**9)]
BatchSize = Annotated[int, typer.Option(help="Rows at a time.", min=1, max=10**5)]
Precision = Annotated[str, typer.Option(help="auto (bfloat16 if it is fast), float32 or bfloat16.")]
Device = Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda or cuda:1.")]
TrustCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]
Dtype = Annotated[str, typer.Option(help="Dtype of the weights: auto (unchanged), float32, bfloat16 or float16.")]
