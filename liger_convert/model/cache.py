"""What a layer caches between calls: the window's ring buffer, the sinks and the recurrent states.

The size is constant, unless the window is unbounded.

Shapes: B batch, T new tokens, P tokens in the ring (at most window - 1, if the window is bounded), N sinks, G key-value
heads, S capacity of a softmax layer in tokens, D head size. In `extend`, S = P + T.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gated_kernels.fused_step.arguments import StepCache
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_outputs import BaseModelOutputWithPast

from liger_convert.mixers import SOFTMAX
from liger_convert.mixers.base import Mixer
from liger_convert.mixers.fused_step import step_cache
from liger_convert.model.sequence import Positions, SequenceMetadata, Sinks, WindowMetadata, take_tokens

# transformers' name for a cache, among the arguments of a model and the fields of its output: `cache` since 5.24
CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"


class LinearizedCacheLayer(CacheLayerMixin):
    """The cache of one linearized layer.

    It holds tensors by name, batch first: `ring` [B,P,...], `sinks` [B,N,...] and float32 `states` [B,...].
    `positions` holds the positions of these tokens; layers with equal window and sinks share it.

    A ring is read from its oldest token onwards, whose slot is `positions.ring_position`. While `static` is true, no
    shape changes and no value is read on the host. If `in_place` is also true, tensors are updated at fixed addresses,
    as a captured step requires (see decoding.py): a new token overwrites the oldest. Otherwise the ring is rebuilt,
    oldest token first.

    transformers' cache queries (length, mask sizes, beams, offloading) are answered for the whole layer. `is_sliding`
    is None rather than a bool because transformers sizes the masks of the *softmax* layers from the first cache layer
    whose `is_sliding` is True or False.
    """

    is_sliding = None
    is_croppable = False
    static = False
    in_place = False

    def __init__(self) -> None:
        super().__init__()
        self.ring: dict[str, Tensor] = {}
        self.sinks: dict[str, Tensor] = {}
        self.states: dict[str, Tensor] = {}
        self.positions: Positions | None = None
        self.length = 0
        self.softmax: StaticSoftmaxLayer | None = None  # while static, answers mask queries for the softmax layers
        self.fused = False  # whether static steps run as one fused kernel

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        return self.static

    @property
    def device(self) -> torch.device | None:
        """Where its tensors are: with a model on several devices, that of its layer. None while it has no tensors, as
        when a prompt is read by graphs."""
        return next((tensor.device for tensor in self.ring.values()), None)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise RuntimeError("this cache layer belongs to a linearized layer, but softmax attention tried to use it")

    def extend(self, name: str, new: Tensor, window: WindowMetadata) -> Tensor:
        """[B,S,...]: the ring called `name`, oldest token first, followed by `new` [B,T,...], or with padding between
        them moved before both.

        Afterwards the ring holds the last `window.cache_window` of these tokens.
        """
        old, order_P = self.ring.get(name), window.ring_order_P
        ordered = old if old is None or order_P is None else old.index_select(1, order_P)
        stream = new if ordered is None else torch.cat((ordered, new), 1)
        if window.order_BS is not None:
            stream = take_tokens(stream, window.order_BS)
        if old is not None and self.static and self.in_place:
            if order_P is not None:
                old.index_copy_(1, order_P[:1], new.to(old.dtype))
            return stream
        last = stream[:, max(0, stream.shape[1] - window.cache_window) :]
        # clone after a prefill: a view would keep the whole prompt alive. A decode step's view keeps one extra token
        view = self.static or (old is not None and stream.shape[1] <= window.cache_window)
        self.ring[name] = last if view else last.clone()
        return stream

    def read_sinks(self, name: str, new: Tensor, sinks: Sinks) -> Tensor | None:
        """The cached keys or values of the sinks; None before the first token."""
        return self.sinks.get(name)

    def write_sinks(self, name: str, tensor: Tensor) -> Tensor:
        """Stores the sinks' keys or values and returns them."""
        self._write(self.sinks, name, tensor)
        return tensor

    def read_states(self, mixer: Mixer) -> dict[str, Tensor]:
        """The recurrent states by name; empty before the first token."""
        return self.states

    def write_states(self, states: dict[str, Tensor], read: Tensor, mixer: Mixer) -> Tensor:
        """Stores the states after a forward. Returns `read`, the memory's output, unchanged."""
        for name, state in states.items():
            self._write(self.states, name, state)
        return read

    def write_positions(self, positions: Positions) -> None:
        """Stores the positions of the tokens after a forward."""
        if not (self.static and self.in_place):
            self.positions = positions
            return
        assert self.positions is not None
        position_BP, seen_B, since_BM, *_, ring_position = self.positions
        position_BP.copy_(positions.position_BP)
        seen_B.copy_(positions.seen_B)
        if since_BM is not None and positions.since_BM is not None:
            since_BM.copy_(positions.since_BM)
        if ring_position is not None:
            ring_position.add_(1)

    def to_static(self, cache_window: int, in_place: bool) -> None:
        """Gives every tensor its final shape and its own memory.

        Rings are left-padded to `cache_window` tokens; the padding has position -1.
        """
        before = self.positions
        assert before is not None
        self.in_place, self.fused = in_place, False
        for name, tensor in self.ring.items():
            if before.ring_position is not None and tensor.shape[1]:
                tensor = tensor.roll(-int(before.ring_position) % tensor.shape[1], 1)
            self.ring[name] = _filled(tensor, cache_window, 0)
        self.sinks, self.states = (
            {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in group.items()}
            for group in (self.sinks, self.states)
        )
        self.positions = before._replace(
            position_BP=_filled(before.position_BP, cache_window, -1),
            seen_B=before.seen_B.clone(),
            since_BM=None if before.since_BM is None else before.since_BM.clone(),
            padded=True,
            has_all_sinks=before.since_BM is not None and bool((before.since_BM > 0).all()),
            ring_position=torch.zeros_like(before.seen_B[0]) if in_place else None,
        )

    def step_cache(self) -> StepCache | None:
        """The tensors that a fused step updates; None if the step does not support them."""
        if self.positions is None or self.positions.ring_position is None:
            return None
        return step_cache(self.ring, self.sinks, self.states, self.positions.ring_position)

    def tensors(self) -> list[Tensor]:
        """Every tensor that a decode step writes."""
        ring_position = None if self.positions is None else self.positions.ring_position
        return self._batched() + ([] if ring_position is None else [ring_position])

    def nbytes(self) -> int:
        """Bytes held for all rows."""
        return sum(t.numel() * t.element_size() for t in self._batched())

    def get_seq_length(self) -> Any:
        return self.softmax.get_seq_length() if self.static and self.softmax is not None else self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.static and self.softmax is not None:
            return self.softmax.get_mask_sizes(query_length)
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove != 0:
            raise RuntimeError(
                "a linearized model's state cannot be rolled back; start again from the prompt. It cannot be the "
                "assistant_model of assisted generation, which rolls back what was guessed wrong"
            )

    def offload(self) -> None:
        self._map(lambda t: t.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Does nothing: offloading is not supported (`adopt_cache` refuses it)."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda t: t.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda t: t[indices.to(t.device)])

    def _write(self, group: dict[str, Tensor], name: str, tensor: Tensor) -> None:
        if self.static and self.in_place:
            group[name].copy_(tensor)
        else:
            group[name] = tensor

    def _batched(self) -> list[Tensor]:
        of_positions = [] if self.positions is None else [self.positions.position_BP, self.positions.seen_B]
        if self.positions is not None and self.positions.since_BM is not None:
            of_positions.append(self.positions.since_BM)
        return [*of_positions, *(tensor for group in self._groups() for tensor in group.values())]

    def _groups(self) -> tuple[dict[str, Tensor], ...]:
        return self.ring, self.sinks, self.states

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        for group in self._groups():
            for name, tensor in group.items():
                group[name] = change(tensor)
        if (at := self.positions) is not None:
            since_BM = None if at.since_BM is None else change(at.since_BM)
            self.positions = at._replace(
                position_BP=change(at.position_BP), seen_B=change(at.seen_B), since_BM=since_BM
            )


def advance(layers: list[LinearizedCacheLayer], windows: list[WindowMetadata], metadata: SequenceMetadata) -> None:
    """Updates the positions and lengths of cache layers after a forward over `metadata`.

    windows: the window metadata that each layer used. Layers with the same window metadata share their positions.
    """
    first: dict[int, LinearizedCacheLayer] = {}
    for layer, window in zip(layers, windows, strict=True):
        if id(window) not in first:
            here = metadata.to(layer.device)
            layer.write_positions(here.positions_after(window, layer.positions))
            first[id(window)] = layer
        layer.positions = first[id(window)].positions
        layer.length += metadata.tokens
        layer.is_initialized = True


def _filled(tensor: Tensor, size: int, value: int) -> Tensor:
    """[B,size,...]: a copy of `tensor` [B,P,...], left-padded with `value`."""
    missing = tensor.new_full((len(tensor), size - tensor.shape[1], *tensor.shape[2:]), value)
    return torch.cat((missing, tensor), 1)


class StaticSoftmaxLayer(DynamicLayer):
    """A softmax layer's keys and values [B,G,S,D] at fixed addresses, converted from a dynamic layer and back.

    room: S. Sliding layers also keep all S tokens; the mask hides those that have left the window.
    """

    is_compileable = True
    is_croppable = False
    static = False
    keys: Any
    values: Any

    def __init__(self, dynamic: Any, room: int):
        super().__init__()
        self.dynamic, self.room, self.length = dynamic, room, dynamic.get_seq_length()
        self.is_sliding = dynamic.is_sliding
        held = slice(self.length - dynamic.keys.shape[2], self.length)
        self.keys, self.values = (t.new_zeros(*t.shape[:2], room, t.shape[3]) for t in (dynamic.keys, dynamic.values))
        self.keys[:, :, held], self.values[:, :, held] = dynamic.keys, dynamic.values
        dynamic.keys = dynamic.values = None  # restored by `to_dynamic`
        self.next = torch.tensor(self.length, device=self.keys.device)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        # under autocast keys and values may have different dtypes; the buffers have the dynamic layer's
        self.keys.index_copy_(2, self.next[None], key_states.to(self.keys.dtype))
        self.values.index_copy_(2, self.next[None], value_states.to(self.values.dtype))
        self.next += 1
        return self.keys, self.values

    def tensors(self) -> list[Tensor]:
        """Every tensor that a decode step writes."""
        return [self.keys, self.values, self.next]

    def get_seq_length(self) -> Any:
        return self.next if self.static else self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.room, 0

    def get_max_length(self) -> int:
        return self.room

    def reset(self) -> None:
        self.length = 0
        self.next.zero_()

    def to_dynamic(self) -> DynamicLayer:
        """The dynamic layer, as if it had cached all these tokens itself."""
        start = 0
        if isinstance(self.dynamic, DynamicSlidingWindowLayer):
            self.dynamic.cumulative_length = self.length
            start = max(0, self.length - self.dynamic.sliding_window + 1)
        held = slice(start, self.length)
        self.dynamic.keys, self.dynamic.values = (t[:, :, held].clone() for t in (self.keys, self.values))
        return self.dynamic


def one_cache(cache: Any, past_key_values: Any, layers: list[str]) -> Any:
    """The cache of a forward, which may be given by either of its names. layers: as for `adopt_cache`.

    Raises ValueError for two caches.
    """
    if cache is None or past_key_values is None or cache is past_key_values:
        return past_key_values if cache is None else cache
    adopt_cache(past_key_values, layers)  # refuses that of prefix tuning, which PEFT 0.21 adds to the one of `generate`
    raise ValueError("`cache` and `past_key_values` are names of one argument, but two caches were given; pass one")


def adopt_cache(cache: Any, layers: list[str]) -> None:
    """Installs a LinearizedCacheLayer for every linearized layer of a dynamic cache, in place.

    `layers` is the linearization's list of mixer names. Raises ValueError for a cache that is not dynamic, that is
    offloaded or quantized, or that already holds softmax keys for a linearized layer. Static softmax layers that
    decoding left behind become dynamic again.
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
        if isinstance(layer, StaticSoftmaxLayer) and not layer.static:
            cache.layers[i] = layer.to_dynamic()
        if mixer == SOFTMAX or isinstance(layer, LinearizedCacheLayer):
            continue
        if not isinstance(layer, DynamicLayer):
            raise ValueError(
                f"a linearized model needs a dynamic cache, but layer {i} is {type(layer).__name__}; use DynamicCache()"
            )
        if layer.is_initialized:
            raise ValueError(
                f"cache layer {i} already holds keys and values, which linearized layer {i} cannot read: start with a "
                "fresh DynamicCache(). Prefix tuning works by such keys; use LoRA or prompt tuning instead"
            )
        cache.layers[i] = LinearizedCacheLayer()
