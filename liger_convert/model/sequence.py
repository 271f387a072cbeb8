"""What a batch's tokens are to a linearized layer: which are padding, which document each belongs to, and its position.

Everything is computed once per forward, from the batch and from the tokens before it, and changes neither. The tokens
before it are those that a cache holds or, for a shard of a row, those with which the previous shard ended.

Shapes: B batch, T new tokens, P tokens of the ring, S = P + T, N sinks, M = sinks of all documents of a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from gated_kernels.common.tracing import is_exporting, reads_no_values
from torch import Tensor
from transformers.masking_utils import find_packed_sequence_indices

from liger_convert.model.packing import check_mask

PACKED_CACHE = "packed documents cannot be cached: pass use_cache=False"


class Positions(NamedTuple):
    """What stands before the new tokens.

    position_BP: positions of the last P tokens, oldest first, -1 on padding. seen_B: real tokens so far.
    since_BM: how far the next token is from each sink, 0 where that has not come yet; None without sinks.
    segment_ids_BP: documents of the last P tokens; None where a row is one document.
    padded: whether padding may be among the last P tokens. has_all_sinks: whether all sinks are known to have come.
    ring_position: int64 [], which slot of the ring is the oldest, modulo P; None: the first.
    """

    position_BP: Tensor
    seen_B: Tensor
    since_BM: Tensor | None = None
    segment_ids_BP: Tensor | None = None
    padded: bool = False
    has_all_sinks: bool = False
    ring_position: Tensor | None = None


class Sinks(NamedTuple):
    """Where each row's sinks stand: `index_BM` among the new tokens (meaningful where `found_BM`; both None when all
    are known to stand before them), and `visible_BTM`: seen by a query from beyond the window."""

    index_BM: Tensor | None
    found_BM: Tensor | None
    visible_BTM: Tensor


class WindowMetadata(NamedTuple):
    """What layers of equal window and sinks need to know, of the ring's tokens and the new ones.

    position_BS: see SequenceMetadata. valid_BS: False on padding; None: there is none. segment_ids_BS: None where a row
    is one document. cache_window: tokens that the ring has room for. ring_order_P: the slots of the ring, oldest first;
    None where they stand so.
    """

    position_BS: Tensor
    valid_BS: Tensor | None
    segment_ids_BS: Tensor | None
    sinks: Sinks | None
    sink_count: int
    cache_window: int
    ring_order_P: Tensor | None


class SequenceMetadata:
    """tokens: T. position_BT: how many real tokens of its document stand before a token, -1 on padding. valid_BT: False
    on padding, None when there is none. segment_ids_BT: the index of a token's document in a packed row, None when a
    row is one document. static: no value may be looked at, and no shape may depend on one.

    past: what stands before a shard of a row, in the place of a layer's cache, where rows are shared by processes.
    """

    past: Any = None

    def __init__(
        self,
        tokens: int,
        position_BT: Tensor,
        valid_BT: Tensor | None = None,
        segment_ids_BT: Tensor | None = None,
        static: bool = False,
    ):
        self.tokens, self.static = tokens, static
        self.position_BT, self.valid_BT, self.segment_ids_BT = position_BT, valid_BT, segment_ids_BT
        self._windows: dict[tuple[int, int], WindowMetadata] = {}
        self._write_masks: dict[tuple[int, int], Tensor] = {}

    @classmethod
    def build(
        cls,
        given: Tensor,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        before: Positions | None = None,
        static: bool = False,
    ) -> SequenceMetadata:
        """From what a Hugging Face forward is given, which is `given` [B,T,...]. Without `position_ids` a row is one
        document, and no value is looked at. Raises ValueError for what a recurrent layer cannot honour."""
        (batch, tokens), device = given.shape[:2], given.device
        valid_BT = segment_ids_BT = None
        if attention_mask is not None:
            if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
                raise ValueError(
                    "a linearized layer takes a 2-D padding mask [batch, tokens], not a mask of pairs of tokens"
                )
            valid_BT = attention_mask[:, -tokens:].to(device=device, dtype=torch.bool)
            if valid_BT.shape[1] != tokens:
                raise ValueError(f"attention_mask covers {attention_mask.shape[1]} tokens, but {tokens} are new")
            if not static and not reads_no_values():
                check_mask(attention_mask, position_ids, tokens, None if before is None else before.seen_B)
                valid_BT = None if bool(valid_BT.all()) else valid_BT
        elif tokens > 1 and position_ids is not None:
            segment_ids_BT = _documents(position_ids)
            if segment_ids_BT is not None and before is not None:
                raise ValueError(PACKED_CACHE)
        if segment_ids_BT is not None:
            segment_ids_BT = segment_ids_BT.expand(batch, tokens)
            index_T = torch.arange(tokens, device=device)
            new_BT = F.pad(segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1], (1, 0), value=True)
            position_BT = index_T - torch.where(new_BT, index_T, 0).cummax(1).values
        elif valid_BT is not None:
            position_BT = valid_BT.long().cumsum(1) - 1
        else:
            position_BT = torch.arange(tokens, device=device).expand(batch, tokens)
        if before is not None:
            position_BT = position_BT + before.seen_B[:, None]
        if valid_BT is not None:
            position_BT = torch.where(valid_BT, position_BT, -1)
        return cls(tokens, position_BT, valid_BT, segment_ids_BT, static)

    def for_window(self, cache_window: int, sinks: int, before: Positions | None = None) -> WindowMetadata:
        """For layers whose ring has room for `cache_window` tokens and that have so many sinks. It is worked out once
        for equal layers, before whose tokens the same must stand."""
        key = (cache_window, sinks)
        if key not in self._windows:
            self._windows[key] = self._for_window(cache_window, sinks, before)
        return self._windows[key]

    def write_mask_on_eviction(self, window: WindowMetadata) -> Tensor:
        """[B,T]: at each new token, whether the one that then leaves the window goes into the memory."""
        key = (window.cache_window, window.sink_count)
        if key not in self._write_masks:
            mask_BT = self.position_on_eviction(window) >= window.sink_count
            if self.segment_ids_BT is not None and window.segment_ids_BS is not None:
                mask_BT = mask_BT & (self._on_eviction(window.segment_ids_BS, window) == self.segment_ids_BT)
            self._write_masks[key] = mask_BT
        return self._write_masks[key]

    def position_on_eviction(self, window: WindowMetadata) -> Tensor:
        """[B,T]: at each new token, the position of the one that then leaves the window; -1 where none does."""
        return self._on_eviction(window.position_BS, window)

    def _on_eviction(self, of_BS: Tensor, window: WindowMetadata) -> Tensor:
        missing = window.cache_window + self.tokens - of_BS.shape[1]
        return F.pad(of_BS, (missing, 0), value=-1)[:, : self.tokens]

    def positions_after(self, window: WindowMetadata, before: Positions | None = None) -> Positions:
        """What stands before the tokens that come after these."""
        start = max(0, window.position_BS.shape[1] - window.cache_window)
        new: int | Tensor = self.tokens if self.valid_BT is None else self.valid_BT.sum(1)
        seen_B = torch.zeros_like(self.position_BT[:, 0]) if before is None else before.seen_B
        since_BM = None
        if window.sinks is not None:
            since_BM = self._since_after(window.sinks, None if before is None else before.since_BM)
        segments = window.segment_ids_BS
        return Positions(
            # copies, because a view of the last tokens would keep the whole prompt alive
            window.position_BS[:, start:].clone(),
            seen_B + new,
            since_BM,
            None if segments is None else segments[:, start:].clone(),
            self.valid_BT is not None or (before is not None and before.padded),
            before is not None and before.has_all_sinks,
        )

    def _for_window(self, cache_window: int, sinks: int, before: Positions | None) -> WindowMetadata:
        position_BS, segment_ids_BS, valid_BS, order_P = self.position_BT, self.segment_ids_BT, self.valid_BT, None
        if before is not None:
            position_BS = torch.cat((before.position_BP, position_BS), 1)
            if segment_ids_BS is not None and before.segment_ids_BP is not None:
                segment_ids_BS = torch.cat((before.segment_ids_BP, segment_ids_BS), 1)
            valid_BS = position_BS >= 0 if before.padded or valid_BS is not None else None
            size = before.position_BP.shape[1]
            if before.ring_position is not None and size:
                order_P = (torch.arange(size, device=position_BS.device) + before.ring_position) % size
        found = self._find_sinks(cache_window, sinks, before) if sinks else None
        return WindowMetadata(position_BS, valid_BS, segment_ids_BS, found, sinks, cache_window, order_P)

    def _find_sinks(self, cache_window: int, count: int, before: Positions | None) -> Sinks:
        """Of each document's first `count` real tokens."""
        device = self.position_BT.device
        query_T = torch.arange(self.tokens, device=device)
        since_BM = None if before is None else before.since_BM
        if self.static and before is not None and before.has_all_sinks and since_BM is not None:
            return Sinks(None, None, query_T[:, None] + since_BM[:, None] > cache_window)
        wanted_M = torch.arange(count, device=device)
        is_sink_BMT = self.position_BT[:, None] == wanted_M[None, :, None]
        if self.segment_ids_BT is not None:
            documents = int(self.segment_ids_BT.max()) + 1
            of_M = torch.arange(documents, device=device).repeat_interleave(count)
            is_sink_BMT = is_sink_BMT.repeat(1, documents, 1) & (self.segment_ids_BT[:, None] == of_M[None, :, None])
        found_BM = is_sink_BMT.any(-1)
        index_BM = is_sink_BMT.int().argmax(-1)
        since_BM = _since(since_BM, index_BM)
        there_BM = found_BM | (since_BM > 0)
        since_BM = torch.where(found_BM, -index_BM, since_BM)
        visible_BTM = there_BM[:, None] & (query_T[:, None] + since_BM[:, None] > cache_window)
        if self.segment_ids_BT is not None:
            visible_BTM = visible_BTM & (self.segment_ids_BT[:, :, None] == of_M)
        return Sinks(index_BM, found_BM, visible_BTM)

    def _since_after(self, sinks: Sinks, since_BM: Tensor | None) -> Tensor:
        if sinks.index_BM is None or sinks.found_BM is None:
            assert since_BM is not None
            return since_BM + self.tokens
        since_BM = _since(since_BM, sinks.index_BM)
        there_BM = sinks.found_BM | (since_BM > 0)
        return torch.where(there_BM, torch.where(sinks.found_BM, -sinks.index_BM, since_BM) + self.tokens, 0)


def _since(before_BM: Tensor | None, index_BM: Tensor) -> Tensor:
    """How far the sinks known before stand back; 0 for those of documents that begin among the new tokens."""
    if before_BM is None:
        return torch.zeros_like(index_BM)
    return F.pad(before_BM, (0, index_BM.shape[1] - before_BM.shape[1]))


def _documents(position_ids: Tensor) -> Tensor | None:
    """[B,T]: the index of each token's document, None where every row is one."""
    segment_ids_BT = find_packed_sequence_indices(position_ids)
    if segment_ids_BT is None or not torch.compiler.is_compiling():
        return segment_ids_BT
    if is_exporting():
        raise ValueError(
            "torch.export cannot check whether position_ids restart, as in packed documents: leave position_ids "
            "out, or pass the attention_mask, with which a row is one document"
        )
    return segment_ids_BT if bool((segment_ids_BT > 0).any()) else None  # which the library does not ask in a graph
