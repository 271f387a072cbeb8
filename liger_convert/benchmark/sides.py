"""The sides of a benchmark: a model, the caches that it starts with, and how it decodes.

Shapes: B batch, T tokens of a prompt, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import CompileConfig, DynamicCache, StaticCache

from liger_convert.model import LinearizedCacheLayer
from liger_convert.model.cache import CACHE
from liger_convert.model.decoding import Decoder

Decode = Callable[[Any, Any, Tensor, int], tuple[Tensor, Tensor]]


class Side(NamedTuple):
    """What is measured. `caches(tokens)` returns a function that returns an empty cache with room for this many tokens.
    `decode` has the signature of the function below."""

    name: str
    model: Any
    caches: Callable[[int], Callable[[], Any]]
    decode: Decode


def prefill(model: Any, cache: Any, ids_BT: Tensor) -> Tensor:
    """Reads a prompt [B,T] into the cache and returns the first token after it, [B,1]."""
    logits = model(input_ids=ids_BT, **{CACHE: cache}, use_cache=True, logits_to_keep=1).logits
    return logits[:, -1].argmax(-1, keepdim=True)


def greedy(step: Callable[[Tensor, Tensor], Any], cache: Any, token_B1: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Decodes `steps` tokens greedily after `token_B1`. `step(token_B1, position_B1)` returns a model's output. Returns
    the tokens [B,steps], and the logits [B,V] of the last step."""
    chosen, start = [token_B1], int(cache.get_seq_length())
    for position in range(start, start + steps):
        logits_BV = step(chosen[-1], torch.full_like(token_B1, position)).logits[:, -1]
        chosen.append(logits_BV.argmax(-1, keepdim=True))
    return torch.cat(chosen[1:], 1), logits_BV.clone()  # the next replay of a CUDA graph overwrites them


def decode(model: Any, cache: Any, token_B1: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Decodes `steps` tokens with the model's forward, see `greedy`."""

    def step(ids_B1: Tensor, at_B1: Tensor) -> Any:
        return model(input_ids=ids_B1, **{CACHE: cache}, use_cache=True)

    return greedy(step, cache, token_B1, steps)


def decode_as_generated(model: Any) -> Decode:
    """A `decode` with the steps that `generate` uses for a linearized model: of fixed shape, and on a GPU captured as a
    CUDA graph.

    The first step with a cache captures, and the others replay it.
    """
    decoder = Decoder(model)

    def steps_of(_: Any, cache: Any, token_B1: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        def step(ids_B1: Tensor, at_B1: Tensor) -> Any:
            return decoder(input_ids=ids_B1, position_ids=at_B1, **{CACHE: cache}, use_cache=True)

        return greedy(step, cache, token_B1, steps)

    return steps_of


def decode_compiled(model: Any, cache: Any, token_B1: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Same as `decode`, with a static cache and the call that transformers' generation compiles for it on a GPU."""
    call = model.get_compiled_call(CompileConfig())

    def step(ids_B1: Tensor, at_B1: Tensor) -> Any:
        inputs = model.prepare_inputs_for_generation(ids_B1, **{CACHE: cache}, position_ids=at_B1, use_cache=True)
        return call(**inputs, logits_to_keep=1, return_dict=True)

    return greedy(step, cache, token_B1, steps)


def dynamic_caches(model: Any) -> Callable[[int], Callable[[], Any]]:
    return lambda tokens: lambda: DynamicCache(config=model.config)


def static_caches(model: Any) -> Callable[[int], Callable[[], Any]]:
    held: dict[int, Any] = {}  # only the last one, for which code is compiled

    def caches(tokens: int) -> Callable[[], Any]:
        if tokens not in held:
            held.clear()
            torch.compiler.reset()  # otherwise each length would count as a recompilation, and few are allowed
            held[tokens] = StaticCache(config=model.config, max_cache_len=tokens)
        cache = held[tokens]

        def empty() -> Any:
            cache.reset()
            return cache

        return empty

    return caches


def fill(cache: Any, tokens: int) -> None:
    """Extends a cache that holds some tokens by `tokens` more. Softmax layers get noise. In linearized layers only the
    length changes, because a bounded window, its sinks and a memory do not grow."""
    for layer in cache.layers:
        if isinstance(layer, LinearizedCacheLayer):
            layer.length += tokens
        else:
            batch, heads, _, size = layer.keys.shape
            noise = layer.keys.new_empty(batch, heads, tokens, size).normal_()
            layer.update(noise, noise)


def cache_bytes(cache: Any) -> int:
    """The bytes of all storages of a cache's tensors, each counted once."""
    held = {}
    for layer in cache.layers:
        for value in vars(layer).values():
            parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else (value,)
            for tensor in parts:
                if isinstance(tensor, Tensor):
                    held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(held.values())
