"""Tensors at fixed addresses for reading prompts with CUDA graphs, see prompt_graphs.py.

Shapes: B rows, N new tokens of a chunk, T tokens of a graph, C hidden size, P tokens in the ring, W its capacity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_convert.model.cache import LinearizedCacheLayer
from liger_convert.model.sequence import Positions, SequenceMetadata

GROUPS = ("ring", "sinks", "states")  # of a cache layer's tensors


class Kind(NamedTuple):
    """What chunks must have in common to share graphs. is_new: whether they are the first of their prompt."""

    tokens: int
    is_new: bool


class LayerState:
    """The cache of one layer at fixed addresses.

    tensors: by group, see GROUPS, and name. Rings have their full capacity W, with the newest token last. held: how
    many of a ring's tokens the prompt's own cache would hold. is_newer: whether the prompt's cache has yet to get these
    tensors.
    """

    def __init__(self, cache_window: int):
        self.cache_window = cache_window
        self.tensors: dict[tuple[str, str], Tensor] = {}
        self.held, self.is_newer = 0, False

    def write(self, layer: LinearizedCacheLayer) -> None:
        """Copies the tensors of `layer` to the fixed addresses. A ring with fewer tokens is filled with zeros."""
        for group in GROUPS:
            for name, tensor in getattr(layer, group).items():
                full = list(tensor.shape)
                if group == "ring":
                    full[1] = self.cache_window
                if (group, name) not in self.tensors:
                    self.tensors[group, name] = tensor.new_zeros(full)
                into = self.tensors[group, name]
                if missing := full[1] - tensor.shape[1]:
                    into[:, :missing].zero_()
                into[:, missing:].copy_(tensor)

    def fits(self, layer: LinearizedCacheLayer) -> bool:
        """Whether the tensors of `layer` can be copied here without a change of their dtype."""
        given = [(group, name, x) for group in GROUPS for name, x in getattr(layer, group).items()]
        return all(self.tensors.get((group, name), x).dtype == x.dtype for group, name, x in given)

    def as_cache(self, positions: Positions | None) -> LinearizedCacheLayer:
        """A cache layer of the tensors themselves; empty without positions."""
        layer = LinearizedCacheLayer()
        if positions is not None:
            for (group, name), tensor in self.tensors.items():
                getattr(layer, group)[name] = tensor
            layer.positions = positions
        return layer

    def copy_to(self, layer: LinearizedCacheLayer) -> None:
        """Gives `layer` its own copies of the tensors."""
        for (group, name), tensor in self.tensors.items():
            start = self.cache_window - self.held if group == "ring" else 0
            getattr(layer, group)[name] = tensor[:, start:].clone()
        self.is_newer = False


class Chunks:
    """The inputs of chunks of one kind at fixed addresses, and their graphs.

    x_BTC: the input and output of every layer. valid_BT: False on padding; None if there can be none. before: the
    positions of the tokens before the chunk, by window and number of sinks. angles: cos and sin, for each pair that
    the layers of a chunk get. options: the other arguments of each layer.
    """

    def __init__(self, kind: Kind, rows: int, device: torch.device):
        tokens = kind.tokens
        self.kind, self.seen = kind, False
        self.position_BT = torch.full((rows, tokens), -1, dtype=torch.long, device=device)
        self.valid_BT = torch.zeros(rows, tokens, dtype=torch.bool, device=device) if kind.is_new else None
        self.before: dict[tuple[int, int], Positions] = {}
        self.x_BTC: Tensor | None = None
        self.angles: list[tuple[Tensor, ...]] = []
        self.metadata: SequenceMetadata | None = None
        self.replay_metadata: Callable[[], None] | None = None
        self.replays: dict[int, Callable[[], None]] = {}
        self.options: dict[int, dict[str, Any]] = {}

    def copy_metadata(self, metadata: SequenceMetadata) -> None:
        """Copies what a chunk's own metadata says about its tokens."""
        start = self.kind.tokens - metadata.tokens
        self.position_BT[:, :start] = -1
        self.position_BT[:, start:] = metadata.position_BT
        if self.valid_BT is not None:
            self.valid_BT[:, :start] = False
            self.valid_BT[:, start:] = True if metadata.valid_BT is None else metadata.valid_BT

    def copy_positions(self, key: tuple[int, int], given: Positions) -> None:
        """Copies the positions of the tokens before the chunk, for layers with this window and number of sinks."""
        if key not in self.before:
            rows, device = len(given.seen_B), given.seen_B.device
            position_BW = torch.full((rows, key[0]), -1, dtype=torch.long, device=device)
            since_BM = None if given.since_BM is None else given.since_BM.clone()
            self.before[key] = Positions(position_BW, given.seen_B.clone(), since_BM, padded=True)
        ours = self.before[key]
        missing = key[0] - given.position_BP.shape[1]
        ours.position_BP[:, :missing] = -1
        ours.position_BP[:, missing:] = given.position_BP
        ours.seen_B.copy_(given.seen_B)
        if ours.since_BM is not None and given.since_BM is not None:
            ours.since_BM.copy_(given.since_BM)
