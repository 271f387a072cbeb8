"""`linearize serve` becomes a server that the openai package talks to; what is wrong with a request is the client's."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

import openai
import pytest
from running import NAME, running_server
from served import NEW, Reference, make_export, prompts
from tiny import tiny_tokenizer

TEXTS = prompts([5, 64])


class Served(NamedTuple):
    client: Any
    url: str
    reference: Reference


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("server")
    export = make_export(folder, "llama", ["main", "softmax", "main"], type="gla")
    with running_server(export, folder, "--max-len", "256", "--max-requests", "8") as found:
        yield Served(found.client, found.url, Reference(export))


def complete(server: Served, text: list[int], **options: Any) -> Any:
    greedy = {"model": NAME, "max_tokens": NEW, "temperature": 0, "extra_body": {"ignore_eos": True}}
    return server.client.completions.create(prompt=text, **{**greedy, **options})


def wanted(server: Served, text: list[int]) -> str:
    return tiny_tokenizer().decode(server.reference.generate(text).tokens, skip_special_tokens=True)


@pytest.mark.parametrize("text", TEXTS, ids=len)
def test_completions_equal_generate(server: Served, text: list[int]) -> None:
    assert complete(server, text).choices[0].text == wanted(server, text)
    assert len(complete(server, text, n=2, temperature=1).choices) == 2
    assert "".join(part.choices[0].text for part in complete(server, text, stream=True)) == wanted(server, text)


def test_the_server_answers_a_chat(server: Served) -> None:
    asked = [{"role": "user", "content": "Hello"}]
    said = server.client.chat.completions.create(model=NAME, messages=asked, max_tokens=8)
    assert said.usage.completion_tokens > 0


def test_a_bad_request_gets_4xx_and_the_server_goes_on(server: Served) -> None:
    with pytest.raises(openai.BadRequestError):
        complete(server, TEXTS[0], max_tokens=10**6)
    with pytest.raises(openai.NotFoundError):
        complete(server, TEXTS[0], model="other")
    assert complete(server, TEXTS[0]).choices[0].text == wanted(server, TEXTS[0])


def test_its_metrics_are_read(server: Served) -> None:
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:
        assert b"vllm:num_requests_running" in answer.read()
