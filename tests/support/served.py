"""Tiny exports for a server, an engine of vLLM on them, and what the project's own code says of the same tokens."""

from __future__ import annotations

import contextlib
import os
import random
import unittest.mock
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # so that a control can break what the engine runs

import torch
from tiny import save_tiny_base, tiny_tokenizer
from tiny_models import linearization, moved_off_start

from liger_convert.model.loading import linearize_base, load_linearized

# heads of 32 channels, the smallest that vLLM's attention on a CPU takes
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 96, "head_dim": 32, "max_position_embeddings": 512}
LENGTHS = [1, 2, 5, 15, 16, 19, 33, 64, 97, 150]
NEW = 16
WINDOW, SINKS = 12, 3
LOGITS = 1e-4  # how far logits of one model may differ between ways to compute them, of the largest, in float32


class Answer(NamedTuple):
    """Tokens that a model wrote, and the log-probability that it gave each; `leads`: how far each is before the second
    best, where that is known."""

    tokens: list[int]
    logprobs: list[float]
    leads: list[float] = []  # noqa: RUF012 (a tuple's default, which nothing changes)


def prompts(lengths: list[int] = LENGTHS, seed: int = 0) -> list[list[int]]:
    """Prompts of these lengths, which share nothing."""
    rng = random.Random(seed)
    return [[rng.randrange(3, 101) for _ in range(n)] for n in lengths]


def make_export(folder: Path, family: str, layers: list[str], share: float = 4, **spec: Any) -> Path:
    """A tiny linearized model whose memory has weight. share: see `moved_off_start`. `spec` are the mixer's options."""
    base = save_tiny_base(family, folder / "base", tokenizer=False, **SIZES)
    bounded = {"window": WINDOW, "sinks": SINKS, **spec}
    model = moved_off_start(linearize_base(base, linearization(layers, **bounded), dtype=torch.float32), share)
    model.save_pretrained(folder / "export")
    tiny_tokenizer().save_pretrained(folder / "export")
    return folder / "export"


class Reference:
    """What the project's own code makes of an export."""

    def __init__(self, export: Path, dtype: torch.dtype = torch.float32):
        self.model = load_linearized(export, dtype=dtype).eval()

    @torch.no_grad()
    def generate(self, prompt: list[int], new: int = NEW) -> Answer:
        found = self.model.generate(
            torch.tensor([prompt]), max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0,
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        tokens = found.sequences[0, len(prompt) :].tolist()
        scores = [score[0].float().log_softmax(-1) for score in found.scores]
        leads = [float(-score.topk(2).values.diff()) for score in scores]
        return Answer(tokens, [float(score[token]) for score, token in zip(scores, tokens)], leads)

    @torch.no_grad()
    def logits(self, prompt: list[int], tokens: list[int]) -> torch.Tensor:
        """[T,V], in float32: those of all tokens at each of `tokens`, in one forward pass."""
        found: torch.Tensor = self.model(torch.tensor([prompt + tokens]), use_cache=False).logits[0]
        return found[len(prompt) - 1 : -1].float()

    def score(self, prompt: list[int], tokens: list[int]) -> torch.Tensor:
        """[T,V]: the log-probabilities of all tokens at each of `tokens`, in one forward pass."""
        return self.logits(prompt, tokens).log_softmax(-1)

    def score_prompt(self, prompt: list[int]) -> torch.Tensor:
        """The log-probabilities of a prompt's own tokens, but for the first."""
        return self.score(prompt[:1], prompt[1:]).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]

    @torch.no_grad()
    def tolerance(self, prompt: list[int]) -> float:
        """Of a log-probability in float32: that of a logit for itself, and as much for the sum of all."""
        return 2 * LOGITS * float(self.model(torch.tensor([prompt]), use_cache=False).logits.abs().max())


@contextlib.contextmanager
def engine(export: Path, **options: Any) -> Iterator[Any]:
    """vLLM on an export in this process, with few tokens a step, so that prompts are read in pieces."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    defaults = {
        "dtype": "float32", "max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 48,
        "enable_prefix_caching": False, "kv_cache_memory_bytes": 1 << 26, "disable_log_stats": False, "seed": 0,
    }  # fmt: skip
    llm = LLM(str(export), **{**defaults, **options})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()


def sampling(new: int = NEW, **options: Any) -> Any:
    """Greedy, unless `options` say otherwise. A request is answered once, with all its answers."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    greedy = {"temperature": 0, "max_tokens": new, "ignore_eos": True, "logprobs": 0}
    return SamplingParams(**{**greedy, "output_kind": RequestOutputKind.FINAL_ONLY, **options})


def answers(output: Any) -> list[Answer]:
    """All that vLLM wrote for one request."""
    return [
        Answer(list(o.token_ids), [at[token].logprob for at, token in zip(o.logprobs, o.token_ids)])
        for o in output.outputs
    ]


def run(
    llm: Any,
    texts: list[list[int]],
    params: Any = None,
    every: int = 0,
    together: int = 1,
    between: Callable[[int, Any], None] | None = None,
    name: str = "r",
) -> list[Any]:
    """vLLM's outputs for `texts` in their order. every: steps between two arrivals, of `together` requests each; 0: all
    come at once. `between` is called after each step with its number and the engine; what it aborts has no output
    (None)."""
    core, done, waiting, step = llm.llm_engine, {}, list(enumerate(texts)), 0
    while waiting or core.has_unfinished_requests():
        arriving = len(waiting) if not every else 0 if step % every else together
        for i, text in waiting[:arriving]:
            core.add_request(f"{name}{i}", {"prompt_token_ids": text}, params or sampling())
        del waiting[:arriving]
        for output in core.step():
            if output.finished:
                done[int(output.request_id.removeprefix(name))] = output
        if between is not None:
            between(step, core)
        step += 1
    return [done.get(i) for i in range(len(texts))]


def lose(group: str, name: str | None = None) -> Callable[[Any], bool]:
    """A fault: zeroes the tensors of a group of a layer's cache, or the one called `name`. Says whether it had any."""

    def fault(past: Any) -> bool:
        tensors = getattr(past, group)
        lost = [key for key in tensors if name in (None, key)]
        for key in lost:
            tensors[key] = torch.zeros_like(tensors[key])
        return bool(lost)

    return fault


@contextlib.contextmanager
def broken(fault: Callable[[Any], bool]) -> Iterator[list[bool]]:
    """Applies `fault` to all that an engine of this process reads from its pages; yields what it returned."""
    from liger_convert.serving.rows import Rows

    load, broke = Rows.load, []

    def faulty(self: Rows, *args: Any) -> Any:
        past = load(self, *args)
        broke.append(fault(past))
        return past

    with unittest.mock.patch.object(Rows, "load", faulty):
        yield broke


def prompt_logprobs(output: Any) -> torch.Tensor:
    """Those that vLLM gave a prompt's own tokens, but for the first."""
    return torch.tensor(
        [at[token].logprob for at, token in zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:])]
    )


def assert_same(found: Answer, wanted: Answer, tolerance: float) -> None:
    """Equal tokens and log-probabilities, up to where `found` has the other of two best within the tolerance."""
    pairs = enumerate(zip(found.tokens, wanted.tokens, strict=True))
    same = next((i for i, (a, b) in pairs if a != b and wanted.leads[i] <= tolerance), len(wanted.tokens))
    assert found.tokens[:same] == wanted.tokens[:same]
    assert max((abs(a - b) for a, b in zip(found.logprobs[:same], wanted.logprobs)), default=0) <= tolerance
