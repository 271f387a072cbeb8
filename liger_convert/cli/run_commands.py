"""Commands that run a whole recipe, or show its plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from liger_convert.cli.options import Base, Json, Overrides, RecipeFile
from liger_convert.cli.output import show, stdout
from liger_convert.utils import processes
from liger_convert.utils.progress import console as stderr


def run(
    context: typer.Context,
    recipe: RecipeFile = None,
    base: Base = None,
    out: Annotated[Path | None, typer.Option(help="New folder for the results.", show_default="runs/NAME")] = None,
    set_: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")] = False,
    keep_steps: Annotated[bool, typer.Option("--keep-steps", help="Keep the models between the steps.")] = False,
    gpus: Annotated[
        int | None, typer.Option(help="Number of GPUs of this machine to train on.", show_default="1", min=1, max=1024)
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a whole recipe: convert, train, merge, export, evaluate, report.

    Writes export/ (a Hugging Face model folder), report.html, report.md, report.json and manifest.json to OUT.
    With --gpus, or under torchrun or accelerate launch, several processes train the stages.

    Example: linearize run recipes/smollm2-135m-quick.yaml --out runs/quick --set seed=1

    Example: linearize run --base HuggingFaceTB/SmolLM2-135M-Instruct
    """
    from liger_convert.config import yaml_file
    from liger_convert.config.recipe import parse
    from liger_convert.config.resources import chosen_recipe

    recipe, set_ = chosen_recipe(recipe, base, set_ or ())
    text = yaml_file.read(recipe)
    loaded = parse(text, set_, where=str(recipe))  # reports a mistake in the recipe before torch is imported
    folder = out or Path("runs", loaded.name)
    if processes.check_launch(gpus):
        from liger_convert.utils.torchrun import launch

        launch(gpus or 1, context.obj, f"the same command with --resume continues {folder}")
        return
    from liger_convert.pipeline.report import render
    from liger_convert.pipeline.runner import run as run_recipe

    run_recipe(loaded, folder, text=text, overrides=set_, resume=resume, keep_steps=keep_steps)
    if not processes.is_first():
        return
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    show(render(report), report, as_json)
    if not as_json:
        spoken = Table("prompt", "base", "linearized", show_lines=True)
        for said in report["continuations"]:
            spoken.add_row(*(Text(said[column]) for column in ("prompt", "base", "linearized")))
        stdout().print(spoken)
    stderr.print(f"{folder}: the model is in export/, the report in report.html and report.md", markup=False)


def plan(
    recipe: RecipeFile = None,
    base: Base = None,
    set_: Overrides = None,
    gpus: Annotated[
        int | None,
        typer.Option(help="Show the memory that each of this many GPUs needs.", show_default="1", min=1, max=1024),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what a recipe does to each layer, what it costs and what it saves. Reads few weights or none.

    Example: linearize plan recipes/smollm2-135m-quick.yaml --set layers=LLLN
    """
    from liger_convert.config.recipe import load
    from liger_convert.config.resources import chosen_recipe

    loaded = load(*chosen_recipe(recipe, base, set_ or ()))

    from liger_convert.eval import suites
    from liger_convert.io.checkpoint import base_config, locate_base, stored_dtype
    from liger_convert.io.weight_scale import weight_scale
    from liger_convert.pipeline.plan import make_plan
    from liger_convert.pipeline.plan_tables import render
    from liger_convert.pipeline.preflight import check_recipe

    config = base_config(loaded.base, **loaded.base_options.model_dump(exclude={"allow_pickle"}))
    folder = locate_base(loaded.base)  # None if the base is on the hub
    scale = stored = None
    if folder is not None and folder.is_dir():
        scale, stored = weight_scale(folder), stored_dtype(folder)
    made = make_plan(loaded, config, processes=gpus, scale=scale, stored=stored)
    warnings = check_recipe(loaded, made, config, suites.load(loaded.eval.suite), gpus)
    show(render(made), made.to_dict() | {"warnings": warnings}, as_json)
    for warning in warnings:
        stderr.print(f"warning: {warning}", markup=False, soft_wrap=True)
