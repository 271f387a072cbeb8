"""The command that serves a model."""

from __future__ import annotations

from typing import Annotated

import typer

from liger_convert.cli.options import Model
from liger_convert.utils.progress import console as stderr


def serve(
    model: Model,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 8000,
    max_len: Annotated[
        int | None,
        typer.Option(
            help="Maximum tokens of a request, including its answer.", show_default="base's", min=1, max=10**9
        ),
    ] = None,
    max_requests: Annotated[int, typer.Option(help="Requests that run at the same time.", min=1, max=10**5)] = 64,
    dtype: Annotated[
        str, typer.Option(help="auto (the export's; bfloat16 for float32), float32, bfloat16 or float16.")
    ] = "auto",
    name: Annotated[
        str | None, typer.Option(help="Name of the model for clients.", show_default="the folder's name")
    ] = None,
    vllm: Annotated[
        list[str] | None,
        typer.Option("--vllm", metavar="WORD", help="An extra argument for vLLM's server, such as --vllm=--api-key=K."),
    ] = None,
) -> None:
    """Serve an export with vLLM, through the OpenAI API. Needs vllm, see docs/serving.md.

    Prints the memory that a request needs, checks that every mixer can be served, and turns into vLLM's server.

    Example: linearize serve runs/quick/export --port 8000 --max-requests 32
    """
    from liger_convert.serving import launch

    options = launch.ServerOptions(host, port, max_len, max_requests, dtype, name)
    said = launch.describe(model, options)
    launch.check_installed()
    launch.check_address(host, port)
    stderr.print(said, markup=False, soft_wrap=True)
    launch.start(launch.server_command(model, options, vllm or ()))
