"""`linearize serve` becomes a server that the openai package talks to; what is wrong with a request is the client's."""

from __future__ import annotations

import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
import torch
from running import LINEARIZE, NAME, running_server
from served import NEW, Answer, Reference, make_export, prompts
from tiny import tiny_tokenizer

TEXTS = prompts([5, 64])
MAX_LEN = 256
ASKED = [{"role": "user", "content": "Hello"}]


class Served(NamedTuple):
    client: Any
    url: str
    reference: Reference
    export: Path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("server")
    export = make_export(folder, "llama", ["main", "softmax", "main"], type="gla")
    with running_server(export, folder, "--max-len", str(MAX_LEN), "--max-requests", "8") as found:
        yield Served(found.client, found.url, Reference(export), export)


def complete(server: Served, text: Any, **options: Any) -> Any:
    greedy = {"model": NAME, "max_tokens": NEW, "temperature": 0, "extra_body": {"ignore_eos": True}}
    return server.client.completions.create(prompt=text, **{**greedy, **options})


def decoded(answer: Answer) -> str:
    return tiny_tokenizer().decode(answer.tokens, skip_special_tokens=True)


def wanted(server: Served, text: list[int]) -> str:
    return decoded(server.reference.generate(text))


def streamed(parts: Any) -> str:
    return "".join(part.choices[0].text for part in parts)


@pytest.mark.parametrize("text", TEXTS, ids=len)
def test_completions_equal_generate(server: Served, text: list[int]) -> None:
    assert complete(server, text).choices[0].text == wanted(server, text)
    assert len(complete(server, text, n=2, temperature=1).choices) == 2
    assert streamed(complete(server, text, stream=True)) == wanted(server, text)
    assert wanted(server, text) != wanted(server, text[::-1])


def test_logprobs_equal_those_of_the_model(server: Served) -> None:
    found, answer = complete(server, TEXTS[1], logprobs=1).choices[0], server.reference.generate(TEXTS[1])
    apart = (torch.tensor(found.logprobs.token_logprobs) - torch.tensor(answer.logprobs)).abs()
    assert apart.max() <= server.reference.tolerance(TEXTS[1])


def test_a_chat_equals_generate_on_its_template(server: Served) -> None:
    prompt = tiny_tokenizer().apply_chat_template(ASKED, add_generation_prompt=True, return_dict=False)
    asking = {"model": NAME, "messages": ASKED, "max_tokens": NEW, "temperature": 0, "extra_body": {"ignore_eos": True}}
    create = server.client.chat.completions.create
    said = create(**asking)
    assert said.choices[0].message.content == wanted(server, prompt)
    assert said.usage.prompt_tokens == len(prompt)
    assert "".join(part.choices[0].delta.content or "" for part in create(**asking, stream=True)) == wanted(
        server, prompt
    )
    assert wanted(server, prompt) != wanted(server, prompt[:-1])


def test_a_stop_string_ends_an_answer_before_it(server: Served) -> None:
    whole = wanted(server, TEXTS[1])
    stop = whole[4:6]
    found = complete(server, TEXTS[1], stop=[stop]).choices[0]
    assert (found.text, found.finish_reason) == (whole[: whole.index(stop)], "stop")
    assert complete(server, TEXTS[1], stop=["no such text"]).choices[0].text == whole


def test_a_seed_repeats_an_answer_and_another_does_not(server: Served) -> None:
    def sampled(seed: int) -> str:
        return complete(server, TEXTS[1] * 3, seed=seed, temperature=2.0).choices[0].text

    first = sampled(7)
    assert sampled(7) == first
    assert sampled(8) != first


def test_text_of_any_script_is_answered(server: Served) -> None:
    """The tokenizer has tokens for ASCII only; others become its unknown token."""
    assert complete(server, "naïve 漢字 🙂 \u0000\u202e").usage.prompt_tokens > 0


BAD: dict[str, dict[str, Any]] = {
    "empty prompt": {"prompt": ""},
    "no tokens": {"prompt": []},
    "a token that there is not": {"prompt": [10**6]},
    "a negative token": {"prompt": [-1]},
    "a prompt as long as a request may be": {"prompt": [5] * MAX_LEN},
    "an answer that does not fit": {"max_tokens": 10**6},
    "a negative answer": {"max_tokens": -1},
    "n=0": {"n": 0},
    "a negative temperature": {"temperature": -1},
    "a temperature that is no number": {"temperature": "hot"},
    "top_p above 1": {"top_p": 2},
    "logprobs of more tokens than are given": {"logprobs": 10**6},
    "negative logprobs": {"logprobs": -2},
    "an empty stop string": {"stop": [""]},
    "a seed of more than 64 bits": {"seed": 2**70},
    "an adapter": {"extra_body": {"lora_request": {"name": "x"}}, "model": "adapter"},
    "another model": {"model": "other"},
}


@pytest.mark.parametrize("wrong", BAD)
def test_a_bad_request_gets_4xx_and_the_server_goes_on(server: Served, wrong: str) -> None:
    options = {"text": TEXTS[0], **BAD[wrong]}
    with pytest.raises(openai.APIStatusError) as raised:
        complete(server, options.pop("prompt", options.pop("text")), **options)
    assert 400 <= raised.value.status_code < 500, raised.value
    assert complete(server, TEXTS[0]).choices[0].text == wanted(server, TEXTS[0])


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"model": "tiny"}', b"\xff\xfe"])
def test_a_request_that_is_no_json_of_the_api_gets_4xx(server: Served, body: bytes) -> None:
    asked = urllib.request.Request(f"{server.url}/v1/completions", body, {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(asked, timeout=30)
    assert 400 <= raised.value.code < 500
    assert complete(server, TEXTS[0]).choices[0].text == wanted(server, TEXTS[0])


def test_streams_that_clients_leave_do_not_change_what_others_get(server: Served) -> None:
    def leave(text: list[int]) -> None:
        stream = complete(server, text, max_tokens=100, temperature=1, stream=True)
        next(iter(stream))
        stream.close()

    with ThreadPoolExecutor(8) as pool:
        left = [pool.submit(leave, text) for text in prompts([20] * 12, seed=1)]
        kept = [pool.submit(complete, server, text) for text in TEXTS * 4]
    assert [part.exception() for part in left] == [None] * 12
    assert [part.result().choices[0].text for part in kept] == [wanted(server, text) for text in TEXTS] * 4


def test_its_health_and_metrics_are_read(server: Served) -> None:
    with urllib.request.urlopen(f"{server.url}/health", timeout=30) as answer:
        assert answer.status == 200
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        assert b"vllm:num_requests_running" in answer.read()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--port", "{port}"], "cannot listen there"),
        (["--vllm=--enable-lora"], "enable_lora"),
        (["--vllm=--pipeline-parallel-size=2"], "pipeline_parallel_size"),
        (["--vllm=--max-num-batched-tokens=8"], "max_num_batched_tokens"),
    ],
)
def test_a_server_that_cannot_start_says_why_in_a_sentence(server: Served, words: list[str], said: str) -> None:
    port = server.url.rsplit(":", 1)[1]
    words = [word.format(port=port) for word in words]
    free = [] if "--port" in words else ["--port", str(int(port) % 60000 + 1025)]
    command = [*LINEARIZE, str(server.export), *free, *words]
    found = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert found.returncode == 2
    (error,) = [line for line in found.stderr.splitlines() if line.startswith("error: ")]
    assert said in error
    assert "Traceback" not in found.stderr
