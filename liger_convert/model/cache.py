"""One layer's memory between two calls: the window ring, the sinks and the recurrent states. Constant in size,
unless the window has no end.

Shapes: B batch, P tokens kept in the ring (at most window - 1, if there is an end), N sinks, G key-value heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from liger_convert.mixers import SOFTMAX


class LinearizedCacheLayer(CacheLayerMixin):
    """Tensors by name, all with the batch first: `ring` [B,P,...], `sinks` [B,N,...] and float32 `states` [B,...].

    Queries of the library (length, mask sizes, beams, offloading) are answered for the whole layer. `is_sliding` is
    None, neither True nor False, because the library sizes the masks of the *kept* layers by the first cache layer
    that says either.
    """

    is_sliding = None
    is_croppable = False
    is_compileable = False

    def __init__(self) -> None:
        super().__init__()
        self.ring: dict[str, Tensor] = {}
        self.sinks: dict[str, Tensor] = {}
        self.states: dict[str, Tensor] = {}
        self.length = 0
        self.padded = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise RuntimeError("this cache layer belongs to a linearized layer, but softmax attention tried to use it")

    def extend(self, name: str, new: Tensor, keep: int) -> Tensor:
        """The ring called `name` followed by `new` [B,T,...]; its last `keep` tokens stay."""
        old = self.ring.get(name)
        stream = new if old is None else torch.cat((old, new), 1)
        whole = old is not None and stream.shape[1] <= keep
        # cloned, because a view of the last tokens would keep the whole prompt alive
        self.ring[name] = stream if whole else stream[:, max(0, stream.shape[1] - keep) :].clone()
        return stream

    def advance(self, tokens: int) -> None:
        """Counts `tokens` more tokens of every row, padding included."""
        self.length += tokens
        self.is_initialized = True

    def nbytes(self) -> int:
        """Bytes held for all rows together."""
        return sum(t.numel() * t.element_size() for group in self._groups() for t in group.values())

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove != 0:
            raise RuntimeError("a linearized model's state cannot be rolled back; start again from the prompt")

    def offload(self) -> None:
        self._map(lambda t: t.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Nothing to fetch ahead: every use moves with the layer's inputs."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda t: t.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda t: t[indices])

    def _groups(self) -> tuple[dict[str, Tensor], ...]:
        return self.ring, self.sinks, self.states

    def _map(self, change: Any) -> None:
        for group in self._groups():
            for name, tensor in group.items():
                group[name] = change(tensor)


def adopt_cache(cache: Any, layers: list[str]) -> None:
    """Gives every linearized layer of a fresh dynamic cache its own cache layer, in place.

    `layers` is the linearization's list of mixer names. Raises ValueError for a cache that is not dynamic, is
    offloaded or quantised, or already holds softmax keys of a layer that has been linearized.
    """
    if not isinstance(cache, Cache):
        raise ValueError(
            f"a linearized model needs a transformers Cache, not {type(cache).__name__}; use DynamicCache()"
        )
    if getattr(cache, "offloading", False):
        raise ValueError("a linearized model's cache is small and constant: use DynamicCache() without offloading")
    while len(cache.layers) < len(layers) and cache.layer_class_to_replicate is not None:
        cache.layers.append(cache.layer_class_to_replicate())
    for i, mixer in enumerate(layers):
        layer = cache.layers[i]
        if mixer == SOFTMAX or isinstance(layer, LinearizedCacheLayer):
            continue
        if not isinstance(layer, DynamicLayer):
            raise ValueError(
                f"a linearized model needs a dynamic cache, but layer {i} is {type(layer).__name__}; use DynamicCache()"
            )
        if layer.is_initialized:
            raise ValueError(
                f"cache layer {i} already holds the keys of a softmax layer; start with a fresh DynamicCache()"
            )
        cache.layers[i] = LinearizedCacheLayer()
