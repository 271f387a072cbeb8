"""Clients that ask a server for minutes, in all ways at once, and what is left in it when they have gone.

    python tests/support/soak.py --seconds 600

serves a trained hybrid from so few blocks that requests are thrown out and start again. Clients ask for answers to
prompts of random length, for several answers, with seeds, streamed, and as a chat; they hang up in the middle; they ask
for what cannot be. In between come prompts whose answers are known. At the end no block is in use, and the server's
processes have the memory that they had after the first third.
"""

from __future__ import annotations

import argparse
import collections
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
from reminding import make_prompts, trained_export
from running import NAME, Running, running_server
from served import NEW, Reference
from tiny import tiny_tokenizer

CLIENTS, MAX_LEN, REQUESTS, BLOCKS = 6, 512, 6, 16
LEAST = 240  # times that clients ask
KNOWN = [1, 15, 64, 97, 150, 300]  # lengths of prompts whose answers are known
OPTIONS = ("--max-len", str(MAX_LEN), "--max-requests", str(REQUESTS), f"--vllm=--num-gpu-blocks-override={BLOCKS}")


class Soaked(NamedTuple):
    """What a soak found. counts: of each kind of request. memory: bytes at so many seconds, or later. in_use: the share
    of blocks in use, at the most and at the end. preempted: how many requests were thrown out. spared: tokens that
    were asked for and not written, as the client had hung up."""

    counts: dict[str, int]
    memory: dict[int, int]
    in_use: tuple[float, float]
    preempted: int
    spared: int


class Client(threading.Thread):
    """Asks until `over` is set. What an answer should not have been is kept in `wrong`."""

    def __init__(self, server: Running, known: dict[int, tuple[list[int], str]], seed: int, over: threading.Event):
        super().__init__(daemon=True)
        self.server, self.known, self.over, self.rng = server, known, over, random.Random(seed)
        self.counts: collections.Counter[str] = collections.Counter()
        self.tokens = 0  # that were asked for
        self.wrong: list[str] = []

    def run(self) -> None:
        ways = [self.ask_known] * 3 + [self.ask_several, self.hang_up, self.hang_up, self.chat, self.ask_in_vain]
        while not (self.over.is_set() or self.wrong):
            way = self.rng.choice(ways)
            try:
                way()
            except (openai.OpenAIError, AssertionError, pytest.fail.Exception) as error:
                self.wrong.append(f"{way.__name__}: {error!r}")
            self.counts[way.__name__] += 1

    def complete(self, prompt: list[int], **options: Any) -> Any:
        usual = {"model": NAME, "max_tokens": NEW, "temperature": 1, "extra_body": {"ignore_eos": True}}
        return self.server.client.completions.create(prompt=prompt, **{**usual, **options})

    def some_prompt(self) -> tuple[list[int], int]:
        """A prompt, and for how many tokens there is room behind it."""
        length = self.rng.randrange(1, MAX_LEN - 2)
        (prompt,) = make_prompts([length], seed=self.rng.randrange(10**6))
        return prompt, min(MAX_LEN - length, self.rng.randrange(1, 128))

    def ask_known(self) -> None:
        prompt, wanted = self.known[self.rng.choice(KNOWN)]
        found = self.complete(prompt, temperature=0).choices[0].text
        self.tokens += NEW
        assert found == wanted, f"{len(prompt)} tokens: {found!r} for {wanted!r}"

    def ask_several(self) -> None:
        prompt, room = self.some_prompt()
        assert len(self.complete(prompt, n=3, max_tokens=room, seed=self.rng.randrange(100)).choices) == 3
        self.tokens += 3 * room

    def hang_up(self) -> None:
        prompt, room = self.some_prompt()
        stream = self.complete(prompt, max_tokens=room, stream=True)
        self.tokens += room
        for _ in zip(range(self.rng.randrange(4)), stream):
            pass
        stream.close()

    def chat(self) -> None:
        asked = [{"role": "user", "content": "Hello " * self.rng.randrange(1, 20)}]
        said = self.server.client.chat.completions.create(model=NAME, messages=asked, max_tokens=8)
        assert said.usage.completion_tokens > 0
        self.tokens += said.usage.completion_tokens

    def ask_in_vain(self) -> None:
        prompt, _ = self.some_prompt()
        wrong = [
            {"max_tokens": 10**6},
            {"max_tokens": -1},
            {"model": "other"},
            {"temperature": -1},
            {"prompt": [10**9]},
            {"prompt": prompt * MAX_LEN},
        ]
        with pytest.raises(openai.APIStatusError) as raised:
            self.complete(**{"prompt": prompt, **self.rng.choice(wrong)})
        assert 400 <= raised.value.status_code < 500, raised.value


def soak(server: Running, export: Path, seconds: int, count: int = CLIENTS, least: int = LEAST) -> Soaked:
    """Has `count` clients ask for so long, and at least so many times: a slow machine has seen little after a third of
    the time. Raises AssertionError where an answer is wrong, a request fails, or one stays."""
    reference, decode, texts = Reference(export), tiny_tokenizer().decode, make_prompts(KNOWN)
    known = {len(text): (text, decode(reference.generate(text).tokens, skip_special_tokens=True)) for text in texts}
    start, most, memory, over = time.monotonic(), 0.0, {}, threading.Event()
    clients = [Client(server, known, seed, over) for seed in range(count)]
    for client in clients:
        client.start()
    measured = sorted({seconds // 3, 60, 300, 600, seconds})
    while any(client.is_alive() for client in clients):
        now, asked = time.monotonic() - start, sum(client.counts.total() for client in clients)
        most = max(most, server.metric("vllm:kv_cache_usage_perc"))
        if measured and now >= measured[0] and asked >= least * measured[0] / seconds:
            memory[measured.pop(0)] = server.memory()
        if now >= seconds and asked >= least:
            over.set()
        time.sleep(0.2)
    wrong = [message for client in clients for message in client.wrong]
    assert not wrong, wrong
    end = time.monotonic() + 30
    while server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting"):
        assert time.monotonic() < end, "requests stay in the server whose clients have gone"
        time.sleep(0.2)
    memory[seconds] = server.memory()
    counts = sum((client.counts for client in clients), collections.Counter())
    return Soaked(
        dict(counts),
        memory,
        (most, server.metric("vllm:kv_cache_usage_perc")),
        int(server.metric("vllm:num_preemptions_total")),
        sum(client.tokens for client in clients) - int(server.metric("vllm:generation_tokens_total")),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=int, default=600)
    seconds = parser.parse_args().seconds
    export = trained_export("hybrid", "gla")
    with tempfile.TemporaryDirectory() as folder, running_server(export, Path(folder), *OPTIONS) as server:
        found = soak(server, export, seconds)
    print(found.counts, f"{found.preempted} thrown out, {found.spared} tokens not written for those who hung up")
    print(f"blocks in use: {found.in_use[0]:.3f} at the most, {found.in_use[1]:.3f} at the end")
    print("memory, MB:", {at: round(bytes_ / 1e6, 1) for at, bytes_ in found.memory.items()})


if __name__ == "__main__":
    main()
