"""Commands that perform a single step of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table

from liger_convert.cli import completion
from liger_convert.cli.options import (
    MAX_SEED,
    Base,
    Device,
    Dtype,
    Json,
    Model,
    Overrides,
    RecipeFile,
    Source,
    TrustCode,
)
from liger_convert.cli.output import show, stdout
from liger_convert.utils.progress import console as stderr
from liger_convert.utils.progress import show_progress


def select_layers(
    recipe: RecipeFile = None,
    base: Base = None,
    softmax_layers: Annotated[
        int | None, typer.Option(help="How many layers stay softmax.", show_default="recipe's", min=1, max=10**4)
    ] = None,
    set_: Overrides = None,
    as_json: Json = False,
) -> None:
    """Choose by measurement which layers stay softmax, those that help recall and quality most, and which have a longer
    window.

    Takes minutes and trains no weights. A run of a recipe with layers: {softmax_auto: N} or long_windows includes this
    step. The recipe's layers.select sets the method.

    Example: linearize select-layers recipes/smollm2-135m-quick.yaml --softmax-layers 4
    """
    from liger_convert.config.layers import LayerChoice
    from liger_convert.config.recipe import load
    from liger_convert.config.resources import chosen_recipe

    recipe, set_ = chosen_recipe(recipe, base, set_ or ())
    loaded = load(recipe, set_)
    if softmax_layers is not None:
        choice: dict[str, object] = {"softmax_auto": softmax_layers}
        if isinstance(loaded.layers, LayerChoice):
            choice |= loaded.layers.model_dump(include={"select", "select_tokens", "long_windows"})
        loaded = load(recipe, [*set_, f"layers={json.dumps(choice)}"])

    from liger_convert.cli.commands import select_layers as select

    selection = select(loaded)
    show(selection.render(), selection.to_dict(), as_json)
    if not as_json:
        windows = ""
        if (long := loaded.long_windows) is not None:
            window = long.window if selection.windows is None else selection.windows.window
            windows = f", long_windows: {{layers: {selection.long_layers}, window: {window}}}"
        print(f"layers: {{softmax: {selection.softmax_layers}{windows}}}")


def convert(
    base: Source,
    out: Annotated[Path, typer.Argument(help="New folder for the linearized model.", show_default=False)],
    mixer: Annotated[
        str, typer.Option(help="What replaces attention; see `linearize mixers`.", autocompletion=completion.mixers)
    ] = "gla",
    window: Annotated[
        int | None, typer.Option(help="How many of the last tokens a query attends to exactly.", show_default="mixer's")
    ] = None,
    sinks: Annotated[
        int | None, typer.Option(help="How many of the first tokens stay visible.", show_default="mixer's")
    ] = None,
    layers: Annotated[str, typer.Option(help="As in a recipe: all, LLLN (every 4th stays softmax), …")] = "all",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="OPTION=VALUE", help="Set another option of the mixer; repeatable."),
    ] = None,
    dtype: Dtype = "auto",
    seed: Annotated[int, typer.Option(help="Seed of the new parameters.", min=0, max=MAX_SEED)] = 0,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    trust_remote_code: TrustCode = False,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read pickle files, which can run code.")
    ] = False,
) -> None:
    """Convert a base without training it.

    Example: linearize convert HuggingFaceTB/SmolLM2-135M-Instruct out --mixer gla --window 64 --sinks 4 --layers LLLN
    """
    from liger_convert.cli.commands import convert_base
    from liger_convert.pipeline.plan_tables import render

    made = convert_base(
        base,
        out,
        mixer=mixer,
        window=window,
        sinks=sinks,
        layers=layers,
        options=set_ or (),
        dtype=dtype,
        seed=seed,
        revision=revision,
        trust_remote_code=trust_remote_code,
        allow_pickle=allow_pickle,
    )
    stdout().print(render(made))


def calibrate(
    model: Model,
    out: Annotated[Path, typer.Argument(help="New folder for the calibrated model.", show_default=False)],
    base: Annotated[
        str, typer.Option(help="The base it was made from: folder, hub id or .gguf file.", show_default=False)
    ],
    text: Annotated[str, typer.Option(help="Text to fit on: a data file, or pydoc, as in eval.", show_default=False)],
    tokens: Annotated[int, typer.Option(help="Tokens of the text to read.", min=1, max=10**9)] = 8192,
    seq_len: Annotated[int, typer.Option(help="Tokens per row.", min=2, max=10**8)] = 1024,
    seed: Annotated[int, typer.Option(help="Seed of the order of the documents.", min=0, max=MAX_SEED)] = 0,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Fit the mixers of a linearized model to its base in closed form, without training.

    Prints the distance of each layer's attention output from the base's on that text, before and after.

    Example: linearize calibrate converted calibrated --base HuggingFaceTB/SmolLM2-135M-Instruct --text pydoc
    """
    from liger_convert.cli.commands import calibrate_model

    found = calibrate_model(model, out, base, text=text, tokens=tokens, seq_len=seq_len, seed=seed, device=device)
    table = Table("layer", Column("error before", justify="right"), Column("error after", justify="right"))
    for row in found["layers"]:
        table.add_row(str(row["layer"]), f"{row['before']:.4f}", f"{row['after']:.4f}")
    show(table, found, as_json)


def train(
    stage: Annotated[int, typer.Option(help="Number of the stage in the recipe, counted from 1.", show_default=False)],
    model: Annotated[Path, typer.Option(help="Folder of the linearized model to train.", show_default=False)],
    out: Annotated[Path, typer.Option(help="New folder for what the stage learns; see merge.", show_default=False)],
    recipe: RecipeFile = None,
    base: Base = None,
    set_: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted stage.")] = False,
    as_json: Json = False,
) -> None:
    """Run one stage of a recipe on a converted model.

    Example: linearize train recipes/smollm2-135m-quick.yaml --stage 1 --model converted --out aligned
    """
    from liger_convert.config.recipe import load
    from liger_convert.config.resources import chosen_recipe

    loaded = load(*chosen_recipe(recipe, base, set_ or ()))

    from liger_convert.cli.commands import train_stage

    stats = train_stage(loaded, stage, model, out, resume=resume)
    losses = [loss for _, loss in stats["loss"]]
    table = Table("steps", "tokens", "seconds", "loss, first → last")
    table.add_row(str(stats["steps"]), f"{stats['tokens']:,}", str(stats["seconds"]), f"{losses[0]} → {losses[-1]}")
    show(table, stats, as_json)


def merge(
    model: Model,
    trained: Annotated[list[Path], typer.Argument(help="OUT of each `linearize train`, in order.", show_default=False)],
    out: Annotated[Path, typer.Option(help="New folder for the merged model.", show_default=False)],
) -> None:
    """Fold what training stages learned into a model, in the order given.

    Example: linearize merge converted aligned distilled --out merged
    """
    from liger_convert.io.files import refuse_existing
    from liger_convert.pipeline.begun_stage import odd_merge
    from liger_convert.training.merge import last_model, merge_results

    results = [folder / "result" for folder in trained]
    refuse_existing(out)
    last_model(model, results)  # what can be refused without reading the weights
    if (odd := odd_merge(model, trained)) is not None:
        stderr.print(f"warning: {odd}", markup=False, soft_wrap=True)
    merge_results(model, results, out)
    stages = "1 stage" if len(trained) == 1 else f"{len(trained)} stages"
    stdout().print(f"{out}: {model} with {stages} merged, in float32", markup=False, soft_wrap=True)


def export(
    model: Model,
    out: Annotated[Path, typer.Argument(help="New folder for the export.", show_default=False)],
    dtype: Dtype = "auto",
    quantize: Annotated[
        str | None,
        typer.Option(help="int8 or fp8: store the linear projections of the layers in 8 bits.", show_default="no"),
    ] = None,
    text: Annotated[
        str,
        typer.Option(help="Held-out text to measure the loss of --quantize on: a data file, pydoc or none."),
    ] = "pydoc",
    name: Annotated[
        str | None, typer.Option(help="Name for the model card, such as its hub id; by default that of OUT.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="The base it was made from; the model card then names its hub id and license.")
    ] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Write a model that anyone can load: AutoModelForCausalLM.from_pretrained(OUT, trust_remote_code=True).

    With --quantize the weights have the format of compressed-tensors, which vLLM and transformers read. The command
    then also loads both models, one after the other, and reports how far apart they are; --text none skips that.

    Example: linearize export merged out --dtype bfloat16

    Example: linearize export runs/quick/export runs/quick/int8 --quantize int8 --dtype bfloat16
    """
    if quantize is None:
        from rich.filesize import decimal

        from liger_convert.pipeline.export import export_model

        with show_progress("export") as report:
            written = export_model(model, out, dtype=dtype, name=name, base=base, progress=report)
        if as_json:
            show("", written, as_json)
        else:
            size = f"{decimal(written['bytes'])} in {written['dtype']}"
            stdout().print(f"{out}: exported, {size}", markup=False, soft_wrap=True)
        return
    from liger_convert.cli.measuring import export_quantized
    from liger_convert.pipeline.quantization_report import rows

    written = export_quantized(
        model, out, quantize, text=None if text == "none" else text, device=device, dtype=dtype, name=name, base=base
    )
    table = Table("", Column("", justify="right"), show_header=False)
    for label, figure in rows(written):
        table.add_row(label, figure)
    show(table, written, as_json)
