"""The requests of a step of an engine, and what the layers of the step share.

Requests that decode come first, with one new token each. Layers that have the fused step take them straight from their
pages. What this reads lies in tensors, so that a step captured as a CUDA graph runs again with other requests: nothing
of it depends on values, only on the number of these requests.

Shapes: R requests of the step, of which the first K decode; P tokens in the ring, S = P + 1, M sinks.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise, takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from liger_convert.model.sequence import SequenceMetadata
from liger_convert.serving.page import PageLayout
from liger_convert.serving.rows import Rows, make_rows, on_device


class DecodePositions(NamedTuple):
    """Where the caches of decoding requests are, for layers of one window and number of sinks (see StepInputs).

    ring_position_K: the number of tokens before the new one, 0 for padding. position_KS, sink_visible_KM (None without
    sinks): see StepInputs.
    """

    ring_position_K: Tensor
    position_KS: Tensor
    sink_visible_KM: Tensor | None


class StepMetadata(SequenceMetadata):
    """The metadata of a forward over the tokens of all requests. It keeps what the layers share about decoding.

    An engine makes one per forward, so that a captured forward also captures how these tensors are computed.
    """

    def __init__(self, position_N: Tensor):
        super().__init__(len(position_N), position_N[None])
        self._decode_positions: dict[tuple[int, int], DecodePositions] = {}

    def decode_positions(self, seen_K: Tensor, layout: PageLayout) -> DecodePositions:
        """seen_K: int64, the number of earlier tokens, -1 for padding."""
        window, sinks = key = layout.cache_window, layout.sinks
        if key not in self._decode_positions:
            seen_K1, device = seen_K[:, None], seen_K.device
            position_KS = (seen_K1 + torch.arange(-window, 1, device=device)).clamp_min(-1)
            visible_KM = seen_K1 - torch.arange(sinks, device=device) > window if sinks else None
            self._decode_positions[key] = DecodePositions(seen_K.clamp_min(0), position_KS, visible_KM)
        return self._decode_positions[key]


class Batch:
    """The requests of a step, as the layers of one table of pages see them.

    starts: the start of each request's new tokens, then the end of the last one's. seen: the number of each request's
    earlier tokens. page_R: int64, the page of each request. seen_R: int64, like `seen`, for the requests that decode;
    -1 for padding, which is requests without new tokens at the end of a batch whose other requests all decode.
    most: the largest number of tokens that a step may have.

    tokens: the number of new tokens. decoding: K, with padding.
    """

    def __init__(self, starts: Sequence[int], seen: Sequence[int], page_R: Tensor, seen_R: Tensor, most: int):
        self._starts, self._seen, self.page_R, self.seen_R = list(starts), list(seen), page_R, seen_R
        self._most = most
        lengths = [after - start for start, after in pairwise(starts)]
        decoding = len(list(takewhile(lambda length: length == 1, lengths)))
        self.tokens = starts[-1]
        self.decoding = decoding if any(lengths[decoding:]) else len(lengths)
        self._new = [r for r, before in enumerate(seen) if lengths[r] and not before]
        self._rows: dict[bool, list[Rows]] = {}
        self._first = self

    def on_pages(self, page_R: Tensor) -> Batch:
        """The same requests for layers with other pages. What is computed for one table is shared."""
        other = copy.copy(self)
        other.page_R, other._rows = page_R, {}
        return other

    def rows(self, fused: bool) -> list[Rows]:
        """The requests in rows; with `fused`, without those that decode."""
        start = self.decoding if fused else 0
        if fused not in self._rows:
            page_R = self.page_R[start:]
            if self._first is self:
                self._rows[fused] = make_rows(self._starts[start:], self._seen[start:], page_R, self._most)
            else:
                self._rows[fused] = [rows.on_pages(page_R) for rows in self._first.rows(fused)]
        return self._rows[fused]

    def new_pages(self) -> Tensor | None:
        """int64: the pages of the requests without earlier tokens; None if there is no such request."""
        if not self._new:
            return None
        return self.page_R.index_select(0, on_device(self._new, self.page_R.device))
