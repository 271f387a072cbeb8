"""Batches the requests of a step into rows for a linearized layer, and moves their caches from and to pages.

An engine concatenates the new tokens of all requests. All requests that decode form the rows of one call. Prompts or
prompt chunks form the rows of as few calls as are worth their padding: shorter ones are right-padded. What all layers
of a step share is computed once.

Shapes: N tokens of the step, R rows, T new tokens of the longest, P tokens in the ring, M sinks, K tokens to write.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from liger_convert.model.cache import LinearizedCacheLayer
from liger_convert.model.sequence import Positions, SequenceMetadata, WindowMetadata
from liger_convert.serving.page import PageField, PageLayout

Views = list[tuple[PageField, Tensor]]
# How many tokens of padding take as long as a further call of a layer.
CALL_CPU, CALL = 16, 4096


class Ring(NamedTuple):
    """Slot indices into the rings of one size.

    slot_RP: the slots of the tokens before the new ones, oldest first. slot_K: the slots that new tokens are written
    to. row_K: their rows. token_K: their indices in the flattened [R T]. If no row is padded, they are the last of
    every row: then token_K is None, and slot_K and row_K are of shape [R,K/R].
    """

    slot_RP: Tensor
    slot_K: Tensor
    row_K: Tensor
    token_K: Tensor | None


class Rows:
    """Requests that a layer processes in one call. Either all of them have earlier tokens, or none has.

    starts: the index in the step of each request's first new token. lengths: the number of its new tokens. seen: the
    number of its earlier tokens. requests: its index among the step's requests. pages: int64, the page of every request
    of the step.

    Nothing here reads a value on the host, because a GPU would then first finish all that it was given.
    """

    def __init__(self, starts: list[int], lengths: list[int], seen: list[int], requests: list[int], pages: Tensor):
        device = pages.device
        self.tokens, self.is_new, self.least_seen = max(lengths), not any(seen), min(seen)
        start_R, self.length_R, self.seen_R, self._requests_R = on_device([starts, lengths, seen, requests], device)
        self._lengths = lengths
        self.pages_R = pages[self._requests_R]
        index_T = torch.arange(self.tokens, device=device)
        is_padded = min(lengths) < self.tokens
        self.valid_RT = index_T < self.length_R[:, None] if is_padded else None
        adjacent = not is_padded and all(b - a == self.tokens for a, b in pairwise(starts))
        self._span = slice(starts[0], starts[0] + self.tokens * len(starts)) if adjacent else None
        # padding repeats the row's last token, so that its values are finite
        self._index_RT = start_R[:, None] + torch.minimum(index_T, self.length_R[:, None] - 1)
        if is_padded:
            row_N, index_N = self._last_tokens(self.tokens)
            self._token_N, self._place_N = row_N * self.tokens + index_N, start_R[row_N] + index_N
        self._written: dict[int, Tensor] = {}
        self._rings: dict[int, Ring] = {}
        self._positions: dict[tuple[int, int], Positions] = {}
        self._metadata: dict[bool, SequenceMetadata] = {}

    def on_pages(self, pages: Tensor) -> Rows:
        """The same rows for layers with other page indices. Cached results are shared."""
        rows = copy.copy(self)
        rows.pages_R, rows._written = pages[self._requests_R], {}
        return rows

    def take(self, x_1NX: Tensor) -> Tensor:
        """[R,T,...]: the rows' tokens of x [1,N,...]."""
        if self._span is None:
            return x_1NX[0, self._index_RT]
        if self._span != slice(0, x_1NX.shape[1]):
            x_1NX = x_1NX[:, self._span]
        return x_1NX if self.tokens == x_1NX.shape[1] else x_1NX.reshape(-1, self.tokens, *x_1NX.shape[2:])

    def put(self, into: Tensor, x: Tensor) -> None:
        """Writes x [R,T,...] to its tokens' places in `into` [N,...]."""
        if self._span is not None:
            into[self._span] = x.flatten(0, 1)
        elif self.valid_RT is None:
            into[self._index_RT] = x.to(into.dtype)
        else:
            into[self._place_N] = x.flatten(0, 1)[self._token_N].to(into.dtype)

    def metadata(self, layout: PageLayout) -> SequenceMetadata:
        """The sequence metadata of the new tokens, shared by layers with equal windows and sinks."""
        static = self.least_seen >= layout.sinks  # no sink is among the new tokens
        if static not in self._metadata:
            position_RT = self.seen_R[:, None] + torch.arange(self.tokens, device=self.seen_R.device)
            if self.valid_RT is not None:
                position_RT = position_RT.masked_fill(~self.valid_RT, -1)
            self._metadata[static] = _EndPadded(self.tokens, position_RT, self.valid_RT, static=static)
            self._metadata[static].leading = min(self._lengths) if self.is_new else 0
        return self._metadata[static]

    def positions(self, layout: PageLayout) -> Positions:
        """The positions of the tokens before the new ones."""
        key = layout.cache_window, layout.sinks
        if key not in self._positions:
            seen_R1, device = self.seen_R[:, None], self.seen_R.device
            position_RP = (seen_R1 + torch.arange(-layout.cache_window, 0, device=device)).clamp_min(-1)
            since_RM = (seen_R1 - torch.arange(layout.sinks, device=device)).clamp_min(0) if layout.sinks else None
            padded = self.least_seen < layout.cache_window
            has_all_sinks = self.least_seen >= layout.sinks
            self._positions[key] = Positions(position_RP, self.seen_R, since_RM, None, padded, has_all_sinks)
        return self._positions[key]

    def ring(self, cache_window: int) -> Ring:
        """The slot indices for rings of this size, which must be at least 1."""
        if cache_window not in self._rings:
            seen_R1, device = self.seen_R[:, None], self.seen_R.device
            slot_RP = (seen_R1 + torch.arange(cache_window, device=device)) % cache_window
            row_K, index_K = self._last_tokens(cache_window)
            slot_K, token_K = (self.seen_R[row_K] + index_K) % cache_window, None
            if self.valid_RT is None:
                slot_K, row_K = (x_K.view(len(seen_R1), -1) for x_K in (slot_K, row_K))
            else:
                token_K = row_K * self.tokens + index_K
            self._rings[cache_window] = Ring(slot_RP, slot_K, row_K, token_K)
        return self._rings[cache_window]

    def _last_tokens(self, most: int) -> tuple[Tensor, Tensor]:
        """The row, and the index among its new tokens, of the last tokens of every row, at most `most` of each."""
        count = sum(min(length, most) for length in self._lengths)
        count_R = self.length_R.clamp_max(most)
        row_N = torch.repeat_interleave(count_R, output_size=count)
        first_R = self.length_R - count_R.cumsum(0)  # of the numbers of a row, less the number of those before
        return row_N, torch.arange(count, device=row_N.device) + first_R[row_N]

    def load(self, layout: PageLayout, views: Views) -> PagedCache:
        """The rows' cache. Pages of new requests are not read: they hold stale data of earlier requests."""
        past = PagedCache()
        if self.is_new:
            return past
        past.positions, pages_R1 = self.positions(layout), self.pages_R[:, None]
        for field, kept in views:
            if field.group == "ring":
                tensor = kept[pages_R1, self.ring(layout.cache_window).slot_RP]
                if past.positions.padded:  # masked values must be finite
                    tensor = _zeros_unless(past.positions.position_BP >= 0, tensor)
                past.ring[field.name] = tensor
            elif field.group == "sinks":
                tensor = kept.index_select(0, self.pages_R)
                if not past.positions.has_all_sinks:
                    assert past.positions.since_BM is not None
                    tensor = _zeros_unless(past.positions.since_BM > 0, tensor)
                past.sinks[field.name] = tensor
            else:
                past.states[field.name] = kept.index_select(0, self.pages_R)
        return past

    def store(self, layout: PageLayout, views: Views, past: PagedCache) -> None:
        """Writes `past`, as a layer updated it, to the rows' pages; of the ring only the new tokens."""
        keeps_sinks = not self.is_new and self.least_seen >= layout.sinks
        if layout.cache_window:
            ring = self.ring(layout.cache_window)
            if layout.cache_window not in self._written:
                self._written[layout.cache_window] = self.pages_R[ring.row_K]
            written = self._written[layout.cache_window], ring.slot_K
        for field, kept in views:
            if field.group == "ring":
                new = past.new[field.name]
                last = new[:, -layout.cache_window :] if ring.token_K is None else new.flatten(0, 1)[ring.token_K]
                kept.index_put_(written, last.to(field.dtype))
            elif field.group == "states" or not keeps_sinks:
                kept.index_copy_(0, self.pages_R, getattr(past, field.group)[field.name].to(field.dtype))


class PagedCache(LinearizedCacheLayer):
    """A cache with rings in pages. It collects each ring's new tokens [R,T,...] by name, for `Rows.store` to write."""

    static = True  # no shape here depends on a value

    def __init__(self) -> None:
        super().__init__()
        self.new: dict[str, Tensor] = {}

    def extend(self, name: str, new: Tensor, window: WindowMetadata) -> Tensor:
        self.new[name], old = new, self.ring.get(name)
        return new if old is None else torch.cat((old, new), 1)


class _EndPadded(SequenceMetadata):
    """Metadata of right-padded rows: no token leaves the window at a padding token."""

    def position_on_eviction(self, window: WindowMetadata) -> Tensor:
        position_RT = super().position_on_eviction(window)
        return position_RT if self.valid_BT is None else position_RT.masked_fill(~self.valid_BT, -1)


def make_rows(starts: Sequence[int], seen: Sequence[int], pages: Tensor, most: int) -> list[Rows]:
    """Groups the requests of a step into rows. Requests without new tokens are left out.

    starts: the start of each request's new tokens, then the end of the last one's. seen: the number of earlier tokens
    of each request. pages: int64, the page of each request. most: see `fewest_calls`.
    """
    lengths = [after - start for start, after in pairwise(starts)]
    decoding = [r for r, before in enumerate(seen) if lengths[r] == 1 and before]
    groups = [decoding] if decoding else []
    call = CALL_CPU if pages.device.type == "cpu" else CALL
    for is_new in (False, True):
        reading = [r for r, before in enumerate(seen) if (before == 0) == is_new and lengths[r] > (0 if is_new else 1)]
        reading.sort(key=lambda r: -lengths[r])
        groups += [reading[rows] for rows in fewest_calls([lengths[r] for r in reading], call, most)]
    return [
        Rows([starts[r] for r in rows], [lengths[r] for r in rows], [seen[r] for r in rows], rows, pages)
        for rows in groups
    ]


def fewest_calls(lengths: Sequence[int], call: int, most: int) -> list[slice]:
    """Divides rows into the calls that take the least time, as slices of `lengths`.

    lengths: of the rows, longest first. call: how many tokens take as long as a further call. most: the largest number
    of tokens in a call that pads any row, padding included, so that its memory is known beforehand.
    """
    # rows of equal length always share a call, so calls begin where the length changes
    bounds = [i for i, length in enumerate(lengths) if not i or length != lengths[i - 1]] + [len(lengths)]
    cost, begins = [0], [0]  # of the rows before each bound: the least cost, and where the last call begins
    for end in range(1, len(bounds)):
        found = []
        for begin in range(end - 1, -1, -1):
            tokens = lengths[bounds[begin]] * (bounds[end] - bounds[begin])
            if begin < end - 1 and tokens > most:
                break  # a call that begins earlier has more and longer rows
            found.append((cost[begin] + call + tokens, begin))
        least, begin = min(found)
        cost.append(least)
        begins.append(begin)
    calls, end = [], len(bounds) - 1
    while end:
        calls.append(slice(bounds[begins[end]], bounds[end]))
        end = begins[end]
    return calls[::-1]


def on_device(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """int64: `values` on `device`. A GPU copies them from pinned memory, for which the host does not wait."""
    on_gpu = device.type == "cuda"
    return torch.tensor(values, device="cpu", pin_memory=on_gpu).to(device, non_blocking=on_gpu)


def _zeros_unless(mask_RX: Tensor, x: Tensor) -> Tensor:
    return x.masked_fill(~mask_RX.reshape(*mask_RX.shape, *[1] * (x.dim() - 2)), 0)
