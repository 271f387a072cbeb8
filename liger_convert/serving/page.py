"""The cache of one linearized layer for one request, laid out in one page of fixed size.

A page is a row of float32 words. It holds the recurrent states, then the ring buffer of the window's last tokens, then
the sinks. The token at position p is in slot p modulo P of the ring. Positions follow from the number of tokens read,
so a page does not store them.

Shapes: N pages, P tokens in the ring, M sinks, G key-value heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from gated_kernels.fused_step.arguments import StepConfig
from gated_kernels.fused_step.chunk import is_covered
from torch import Tensor

from liger_convert.mixers import build_mixer, make_spec
from liger_convert.mixers.base import QKV, HeadDims
from liger_convert.mixers.fused_step import step_cache
from liger_convert.utils.errors import BadInput

WORD = 4  # bytes
Group = Literal["states", "ring", "sinks"]


class PageField(NamedTuple):
    """One tensor of a page: its group and name in the layer's cache, and its shape for one request."""

    group: Group
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def words(self) -> int:
        return math.ceil(math.prod(self.shape) * self.dtype.itemsize / WORD)


class PageLayout:
    """The layout of one layer's cache tensors in a page.

    mixer: the layer's resolved spec from `config.linearization`. dims: the layer's sizes. dtype: of its keys and
    values. has_fused_step: whether kernels exist that decode over these pages. Raises BadInput for a mixer whose cache
    grows with the text, or that uses a token shift.
    """

    def __init__(self, mixer: dict[str, Any], dims: HeadDims, dtype: torch.dtype):
        spec = make_spec(mixer)
        if not spec.window:
            raise BadInput(
                f"mixer {mixer['type']!r}: its unlimited window keeps more and more of a request, but a page has a "
                "fixed size; give it a window, or serve a model without it"
            )
        if spec.shift != "none":
            raise BadInput(
                f"mixer {mixer['type']!r}: reads part of the previous token (kv_shift or token_shift), which a server "
                "that projects all requests at once does not have; serve a model without it"
            )
        self.cache_window, self.sinks = spec.cache_window, spec.sinks
        with _on_one_cpu_thread(), torch.no_grad():
            module = build_mixer(mixer, dims).float()
            deferred = module.deferred_inputs(_one_token(dims, dtype)) if spec.scope == "evicted" else ()
        self.fields = [
            PageField("states", name, shape, torch.float32)
            for name, shape in type(module).cached_states(spec, dims).items()
        ]
        head = dims.kv_heads, dims.dim
        ring: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"k": (head, dtype), "v": (head, dtype)}
        if spec.forget:
            ring["log_f"] = ((dims.kv_heads,), torch.float32)
        ring |= {f"deferred{i}": (tuple(x.shape[2:]), x.dtype) for i, x in enumerate(deferred)}
        if spec.cache_window:
            self.fields += [
                PageField("ring", name, (spec.cache_window, *shape), kind) for name, (shape, kind) in ring.items()
            ]
        if spec.sinks:
            self.fields += [PageField("sinks", name, (spec.sinks, *head), dtype) for name in ("k", "v")]
        self.words = sum(field.words for field in self.fields)
        with _on_one_cpu_thread(), torch.no_grad():
            self.has_fused_step = self._has_fused_step(module.step_config(), dims.heads)

    def _has_fused_step(self, config: StepConfig | None, heads: int) -> bool:
        """Whether the kernels of the fused step take a mixer of this configuration over these pages."""
        nothing = torch.zeros(1, dtype=torch.long)
        groups = tensors_of(self.views(torch.zeros(1, self.words, dtype=torch.float32)))
        cache = step_cache(groups["ring"], groups["sinks"], groups["states"], nothing, nothing)
        return config is not None and cache is not None and is_covered(cache, config, heads)

    def views(self, pages: Tensor) -> list[tuple[PageField, Tensor]]:
        """The tensors of all pages, [N,*shape] each, as views of `pages`, float32 [N, at least `words`]."""
        found, start = [], 0
        for field in self.fields:
            words = pages[:, start : start + field.words]
            values = words.view(field.dtype)[:, : math.prod(field.shape)]
            found.append((field, values.unflatten(1, field.shape)))
            start += field.words
        return found


def tensors_of(views: list[tuple[PageField, Tensor]]) -> dict[Group, dict[str, Tensor]]:
    """The tensors of `PageLayout.views` by group and name."""
    found: dict[Group, dict[str, Tensor]] = {"states": {}, "ring": {}, "sinks": {}}
    for field, tensor in views:
        found[field.group][field.name] = tensor
    return found


@contextmanager
def _on_one_cpu_thread() -> Iterator[None]:
    """On the CPU, whatever the default device of a server is, and without further threads.

    An engine forks after the layouts were made, and makes them again in the new process. OpenMP there would wait for
    the threads of the first process, which a fork does not copy.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_num_threads(threads)


def _one_token(dims: HeadDims, dtype: torch.dtype) -> QKV:
    """Dummy projections of one token; only shapes and dtypes matter."""

    def token(*shape: int) -> Tensor:
        return torch.zeros(1, 1, *shape, dtype=dtype)

    q, k = token(dims.heads, dims.dim), token(dims.kv_heads, dims.dim)
    return QKV(q, k, q, k, k, torch.zeros(1, 1, dtype=torch.long), token(dims.hidden))
