"""The requests of a batch as rows that a linearized layer takes at once, and their caches, read from pages and written.

An engine lays the new tokens of all requests behind each other. Requests with equally many new tokens become the rows
of one call: all that decode, and prompts, or pieces of prompts, of equal length.

Shapes: N tokens of the batch, R rows, T new tokens of each, P tokens of the ring, M sinks.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from liger_convert.model.cache import LinearizedCacheLayer
from liger_convert.model.sequence import Positions, SequenceMetadata
from liger_convert.serving.page import PageField, PageLayout

Views = list[tuple[PageField, Tensor]]


class Rows:
    """Requests with `tokens` new tokens each, before which either all or none of them have some.

    starts: where each one's new tokens begin in the batch. seen: how many tokens each has before them. pages_R: int64,
    the page of each one.
    """

    def __init__(self, starts: list[int], tokens: int, seen: list[int], pages_R: Tensor):
        device = pages_R.device
        self.tokens, self.pages_R, self.seen_R = tokens, pages_R, torch.tensor(seen, device=device)
        self.is_new, self.least_seen = not any(seen), min(seen)
        adjacent = all(b - a == tokens for a, b in pairwise(starts))
        self._span = slice(starts[0], starts[0] + tokens * len(starts)) if adjacent else None
        self._index_RT = torch.tensor(starts, device=device)[:, None] + torch.arange(tokens, device=device)
        self._positions: dict[tuple[int, int], Positions] = {}
        self._metadata: dict[bool, SequenceMetadata] = {}

    def take(self, x: Tensor) -> Tensor:
        """[R,T,...]: the rows' share of x [N,...]."""
        return x[self._index_RT] if self._span is None else x[self._span].unflatten(0, (-1, self.tokens))

    def put(self, into: Tensor, x: Tensor) -> None:
        """Writes x [R,T,...] to where its tokens stand in `into` [N,...]."""
        into[self._index_RT] = x.to(into.dtype)

    def metadata(self, layout: PageLayout, x_RTC: Tensor) -> SequenceMetadata:
        """What the rows' tokens are to a layer; equal layers share it."""
        static = self.least_seen >= layout.sinks  # no sink is among the new tokens
        if static not in self._metadata:
            before = None if self.is_new else self.positions(layout)
            self._metadata[static] = SequenceMetadata.build(x_RTC, None, None, before, static)
        return self._metadata[static]

    def positions(self, layout: PageLayout) -> Positions:
        """Where the tokens before the new ones stand."""
        key = layout.cache_window, layout.sinks
        if key not in self._positions:
            seen_R1, device = self.seen_R[:, None], self.seen_R.device
            position_RP = (seen_R1 + torch.arange(-layout.cache_window, 0, device=device)).clamp_min(-1)
            since_RM = (seen_R1 - torch.arange(layout.sinks, device=device)).clamp_min(0) if layout.sinks else None
            padded = self.least_seen < layout.cache_window
            has_all_sinks = self.least_seen >= layout.sinks
            self._positions[key] = Positions(position_RP, self.seen_R, since_RM, None, padded, has_all_sinks)
        return self._positions[key]

    def load(self, layout: PageLayout, views: Views) -> LinearizedCacheLayer:
        """The cache of the rows. Of a new request's page nothing is read: it holds what another has left."""
        past = LinearizedCacheLayer()
        past.static = True  # no shape here depends on a value
        if self.is_new:
            return past
        past.positions = self.positions(layout)
        slot_RP = (self.seen_R[:, None] + torch.arange(layout.cache_window, device=self.seen_R.device)) % max(
            1, layout.cache_window
        )
        for field, kept in views:
            if field.group == "ring":
                tensor = kept[self.pages_R[:, None], slot_RP]
                if past.positions.padded:  # what is masked must be finite
                    tensor = _zeros_unless(past.positions.position_BP >= 0, tensor)
                past.ring[field.name] = tensor
            elif field.group == "sinks":
                tensor = kept[self.pages_R]
                if not past.positions.has_all_sinks:
                    assert past.positions.since_BM is not None
                    tensor = _zeros_unless(past.positions.since_BM > 0, tensor)
                past.sinks[field.name] = tensor
            else:
                past.states[field.name] = kept[self.pages_R]
        return past

    def store(self, layout: PageLayout, views: Views, past: LinearizedCacheLayer) -> None:
        """Writes what a layer left in `past` to the rows' pages: of the ring only the new tokens."""
        new = min(self.tokens, layout.cache_window)
        end_R1 = self.seen_R[:, None] + self.tokens
        slot_RT = (end_R1 + torch.arange(-new, 0, device=self.seen_R.device)) % max(1, layout.cache_window)
        keeps_sinks = not self.is_new and self.least_seen >= layout.sinks
        for field, kept in views:
            if field.group == "ring":
                ring = past.ring[field.name]
                kept[self.pages_R[:, None], slot_RT] = ring[:, ring.shape[1] - new :].to(field.dtype)
            elif field.group == "states" or not keeps_sinks:
                kept[self.pages_R] = getattr(past, field.group)[field.name].to(field.dtype)


def make_rows(starts: list[int], seen: list[int], pages_R: Tensor) -> list[Rows]:
    """The rows of a batch. starts: where each request's new tokens begin, and where the last one's end. seen: how many
    tokens each request has before them. A request without a new token is left out."""
    found: dict[tuple[int, bool], list[int]] = {}
    for r, before in enumerate(seen):
        if tokens := starts[r + 1] - starts[r]:
            found.setdefault((tokens, before > 0), []).append(r)
    return [
        Rows([starts[r] for r in rows], tokens, [seen[r] for r in rows], pages_R[rows])
        for (tokens, _), rows in found.items()
    ]


def _zeros_unless(mask_RX: Tensor, x: Tensor) -> Tensor:
    return x.masked_fill(~mask_RX.reshape(*mask_RX.shape, *[1] * (x.dim() - 2)), 0)
