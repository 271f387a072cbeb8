"""One layer's memory between two calls: the window ring, the sinks and the recurrent states. Constant in size,
unless the window has no end.

Shapes: B batch, T new tokens, P tokens kept in the ring (at most window - 1, if there is an end), N sinks, G key-value
heads, S tokens that a kept layer has room for, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gated_kernels.fused_step.chunk import StepCache, StepConfig, StepInputs, fused_step
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from liger_convert.mixers import SOFTMAX


class LinearizedCacheLayer(CacheLayerMixin):
    """Tensors by name, all with the batch first: `ring` [B,P,...], `sinks` [B,N,...] and float32 `states` [B,...].

    Queries of the library (length, mask sizes, beams, offloading) are answered for the whole layer. `is_sliding` is
    None, neither True nor False, because the library sizes the masks of the *kept* layers by the first cache layer
    that says either.

    While `static` holds, no shape changes and no value is looked at; what is `in_place` besides is written to where it
    stands, as a captured step needs it (decode.py). Fused steps (gated_kernels.fused_step) do not shift the ring but go
    round in it: `taken` counts them and thus names the slot of the oldest token, until `settle` restores the order.
    The ranks are always in order. They also keep the normaliser, otherwise the state's last column, in a tensor `z` of
    its own.
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
        self.length = 0
        self.padded = False
        self.has_all_sinks = False  # known, not merely so: what a static step goes by
        self.kept: FixedLayer | None = None  # answers for the masks of the kept layers while static
        self.taken: Tensor | None = None
        self.taken_from = 0  # the length at the first of these steps

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        return self.static

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise RuntimeError("this cache layer belongs to a linearized layer, but softmax attention tried to use it")

    def extend(self, name: str, new: Tensor, keep: int) -> Tensor:
        """The ring called `name` followed by `new` [B,T,...]; its last `keep` tokens stay."""
        old = self.ring.get(name)
        stream = new if old is None else torch.cat((old, new), 1)
        last = stream[:, max(0, stream.shape[1] - keep) :]
        # cloned, because a view of the last tokens would keep the whole prompt alive; a step's keeps one token more
        view = self.static or (old is not None and stream.shape[1] <= keep)
        self.write(self.ring, name, last if view else last.clone())
        return stream

    def write(self, group: dict[str, Tensor], name: str, tensor: Tensor) -> None:
        """Keeps `tensor` as `name` of one of the three groups."""
        if self.static and self.in_place:
            group[name].copy_(tensor)
        else:
            group[name] = tensor

    def share(self, other: LinearizedCacheLayer) -> None:
        """Takes over what equal layers have in common: which tokens there are and where the sinks stand."""
        self.ring["rank"] = other.ring["rank"]
        self.sinks.update({name: other.sinks[name] for name in ("seen", "since") if name in other.sinks})
        self.padded = other.padded

    def freeze(self, keep: int, in_place: bool) -> None:
        """Gives every tensor the shape it stays at and memory of its own; ranks of -1 fill a ring to `keep` tokens."""
        self.settle()
        self.in_place = in_place
        for name, tensor in self.ring.items():
            missing = tensor.new_full((len(tensor), keep - tensor.shape[1], *tensor.shape[2:]), -(name == "rank"))
            self.ring[name] = torch.cat((missing, tensor), 1)
        self.sinks = {name: tensor.clone() for name, tensor in self.sinks.items()}
        self.states = {name: tensor.clone() for name, tensor in self.states.items()}
        self.padded = True
        self.has_all_sinks = "since" in self.sinks and bool((self.sinks["since"] > 0).all())

    def fuse(self, taken: Tensor, takes: Callable[[StepCache], bool]) -> bool:
        """Has the steps from here on be fused and go round by `taken`, where these take what is kept here."""
        if not {"k", "v", "rank"} <= self.ring.keys() <= {"k", "v", "rank", "pending0"}:
            return False
        if self.states.keys() != {"state"}:
            return False
        before, size = self.states["state"], self.ring["v"].shape[-1]
        if before.shape[-1] == size + 1:
            self.states = {"state": before[..., :size].contiguous(), "z": before[..., size].contiguous()}
        if not takes(self._kept(taken)):
            self.states = {"state": before}
            return False
        self.taken, self.taken_from = taken, self.length
        return True

    def step(self, token: StepInputs, rules: StepConfig | None) -> Tensor:
        """The layer's output [B,1,H,D] by the fused step."""
        assert self.taken is not None
        assert rules is not None
        return fused_step(token, self._kept(self.taken), rules)[:, None]

    def settle(self) -> None:
        """Puts the oldest token first again and the state together, after fused steps."""
        if self.taken is not None:
            for name, tensor in self.ring.items():
                if name != "rank":
                    self.ring[name] = tensor.roll((self.taken_from - self.length) % tensor.shape[1], 1)
            if "z" in self.states:
                self.states = {"state": torch.cat((self.states["state"], self.states["z"][..., None]), -1)}
            self.taken = None

    def tensors(self) -> list[Tensor]:
        """Everything a step writes to."""
        return [tensor for group in self._groups() for tensor in group.values()]

    def advance(self, tokens: int) -> None:
        """Counts `tokens` more tokens of every row, padding included."""
        self.length += tokens
        self.is_initialized = True

    def nbytes(self) -> int:
        """Bytes held for all rows together."""
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def get_seq_length(self) -> Any:
        return self.kept.get_seq_length() if self.static and self.kept is not None else self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.static and self.kept is not None:
            return self.kept.get_mask_sizes(query_length)
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

    def _kept(self, taken: Tensor) -> StepCache:
        """What a fused step writes to."""
        ring, sinks, states = self._groups()
        of_sinks = sinks.get("k"), sinks.get("v")
        return StepCache(ring["k"], ring["v"], ring.get("pending0"), *of_sinks, states["state"], states.get("z"), taken)

    def _groups(self) -> tuple[dict[str, Tensor], ...]:
        return self.ring, self.sinks, self.states

    def _map(self, change: Any) -> None:
        for group in self._groups():
            for name, tensor in group.items():
                group[name] = change(tensor)


class FixedLayer(DynamicLayer):
    """A kept layer's keys and values [B,G,S,D] at fixed addresses, made from a dynamic layer and turned back into it.

    Sliding layers keep all S tokens too: what has left their window is masked, as it is at any full length.
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
        dynamic.keys = dynamic.values = None  # until `thaw`
        self.next = torch.tensor(self.length, device=self.keys.device)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        # under autocast keys and values come in different dtypes, and the dynamic layer has made one of them
        self.keys.index_copy_(2, self.next[None], key_states.to(self.keys.dtype))
        self.values.index_copy_(2, self.next[None], value_states.to(self.values.dtype))
        self.next += 1
        return self.keys, self.values

    def tensors(self) -> list[Tensor]:
        """Everything a step writes to."""
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

    def thaw(self) -> DynamicLayer:
        """The dynamic layer, as it would be had it made these steps."""
        start = 0
        if isinstance(self.dynamic, DynamicSlidingWindowLayer):
            self.dynamic.cumulative_length = self.length
            start = max(0, self.length - self.dynamic.sliding_window + 1)
        held = slice(start, self.length)
        self.dynamic.keys, self.dynamic.values = (t[:, :, held].clone() for t in (self.keys, self.values))
        return self.dynamic


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
        if isinstance(layer, FixedLayer) and not layer.static:
            cache.layers[i] = layer.thaw()
        if isinstance(layer, LinearizedCacheLayer) and not layer.static:
            layer.settle()
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
