"""`linearize serve` becomes a server that the openai package talks to; what is wrong with a request is the client's."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
from served import NEW, Reference, make_export, prompts
from tiny import tiny_tokenizer

STARTS_WITHIN = 180
TEXTS = prompts([5, 64])


class Running(NamedTuple):
    client: Any
    url: str
    reference: Reference


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("server")
    export = make_export(folder, "llama", ["main", "softmax", "main"], type="gla")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--port", str(port), "--dtype", "float32", "--max-len", "256", "--max-requests", "8", "--name", "tiny"]
    words = [sys.executable, "-m", "liger_convert.cli", "serve", str(export), *options]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with (folder / "log").open("w") as log, subprocess.Popen(words, stdout=log, stderr=log, env=environment) as process:
        try:
            wait(f"http://127.0.0.1:{port}/health", process, folder / "log")
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
            yield Running(client, f"http://127.0.0.1:{port}", Reference(export))
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()


def wait(url: str, process: Any, log: Path) -> None:
    end = time.monotonic() + STARTS_WITHIN
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.5)
    pytest.fail(f"the server did not start:\n{log.read_text()[-3000:]}")


def complete(server: Running, text: list[int], **options: Any) -> Any:
    greedy = {"model": "tiny", "max_tokens": NEW, "temperature": 0, "extra_body": {"ignore_eos": True}}
    return server.client.completions.create(prompt=text, **{**greedy, **options})


def wanted(server: Running, text: list[int]) -> str:
    return tiny_tokenizer().decode(server.reference.generate(text).tokens, skip_special_tokens=True)


@pytest.mark.parametrize("text", TEXTS, ids=len)
def test_it_completes_as_generate_does(server: Running, text: list[int]) -> None:
    assert complete(server, text).choices[0].text == wanted(server, text)
    assert len(complete(server, text, n=2, temperature=1).choices) == 2
    assert "".join(part.choices[0].text for part in complete(server, text, stream=True)) == wanted(server, text)


def test_it_chats(server: Running) -> None:
    asked = [{"role": "user", "content": "Hello"}]
    said = server.client.chat.completions.create(model="tiny", messages=asked, max_tokens=8)
    assert said.usage.completion_tokens > 0


def test_a_bad_request_gets_4xx_and_the_server_goes_on(server: Running) -> None:
    with pytest.raises(openai.BadRequestError):
        complete(server, TEXTS[0], max_tokens=10**6)
    with pytest.raises(openai.NotFoundError):
        complete(server, TEXTS[0], model="other")
    assert complete(server, TEXTS[0]).choices[0].text == wanted(server, TEXTS[0])


def test_its_metrics_are_read(server: Running) -> None:
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:
        assert b"vllm:num_requests_running" in answer.read()
