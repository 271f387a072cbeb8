"""Sequence metadata for linearized layers: padding, document ids and positions of a batch's tokens.

It is computed once per forward, from the batch and the tokens before it, and modifies neither. The tokens before it are
those in the cache or, for a shard of a row, the last tokens of the previous shard.

Shapes: B batch, T new tokens, P tokens in the ring, S = P + T, M sinks of all documents in a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from gated_kernels.common.tracing import is_exporting, reads_no_values
from torch import Tensor
from transformers.masking_utils import find_packed_sequence_indices

from liger_convert.model.packing import check_mask, document_ids

PACKED_CACHE = "packed documents cannot be cached: pass use_cache=False"


class Positions(NamedTuple):
    """The positions of the tokens before the new ones.

    position_BP: positions of the last P tokens, oldest first, -1 on padding. seen_B: real tokens so far.
    since_BM: distance from each sink to the next token, 0 for sinks that have not been read yet; None without sinks.
    segment_ids_BP: document indices of the last P tokens; None if each row is one document.
    padded: whether there may be padding among the last P tokens. has_all_sinks: whether all sinks are known to have
    been read. ring_position: int64 scalar, the slot of the oldest token modulo P; None: slot 0.
    """

    position_BP: Tensor
    seen_B: Tensor
    since_BM: Tensor | None = None
    segment_ids_BP: Tensor | None = None
    padded: bool = False
    has_all_sinks: bool = False
    ring_position: Tensor | None = None


class Sinks(NamedTuple):
    """The sinks of each row.

    index_BM: their index among the new tokens, valid where found_BM is True. Both are None when all sinks are known to
    precede the new tokens. visible_BTM: whether a query attends to a sink separately, because it has left the window.
    lead: whether the sinks are known to be the first of the new tokens.
    """

    index_BM: Tensor | None
    found_BM: Tensor | None
    visible_BTM: Tensor
    lead: bool = False


class WriteMask(NamedTuple):
    """Which tokens are written to the memory, as bool [B,T,G,1], and which are left out, as bool [B,T,1,1]."""

    written_BTG1: Tensor
    left_out_BT11: Tensor


class WindowMetadata(NamedTuple):
    """Metadata of the ring's and the new tokens, shared by layers with equal window and sinks.

    position_BS: see SequenceMetadata. valid_BS: False on padding; None without padding. segment_ids_BS: None if each
    row is one document. cache_window: capacity of the ring in tokens. ring_order_P: slots of the ring, oldest first;
    None if the ring is already in that order. order_BS: the ring's and the new tokens with all padding first; None if
    they are already in that order.
    """

    position_BS: Tensor
    valid_BS: Tensor | None
    segment_ids_BS: Tensor | None
    sinks: Sinks | None
    sink_count: int
    cache_window: int
    ring_order_P: Tensor | None
    order_BS: Tensor | None = None


class SequenceMetadata:
    """Metadata of the new tokens of a batch, in the order of the layers: padding first where it must not separate real
    tokens, because a window counts its tokens by place.

    tokens: T. position_BT: the number of real tokens before a token in its document; -1 on padding. valid_BT: False on
    padding; None without padding. segment_ids_BT: the document index of each token in a packed row; None if each row is
    one document. static: no value may be read on the host, and no shape may depend on one. order_BT: the place in the
    batch of each of these tokens; None if it is their own. most_documents: the most that a row has; None: as many as
    `segment_ids_BT` says, which reads its values.

    past: with rows sharded over processes, the state before this shard, in place of a layer's cache.

    leading: how many tokens at the start of every row are known to be the first ones of its only document.
    """

    past: Any = None
    leading = 0
    follows_padding = False  # whether there may be padding between the ring and the new tokens

    def __init__(
        self,
        tokens: int,
        position_BT: Tensor,
        valid_BT: Tensor | None = None,
        segment_ids_BT: Tensor | None = None,
        static: bool = False,
        order_BT: Tensor | None = None,
        most_documents: int | None = None,
    ):
        self.tokens, self.static, self.order_BT, self.most_documents = tokens, static, order_BT, most_documents
        self._inverse_BT = None if order_BT is None else order_BT.argsort(1)
        self.position_BT, self.valid_BT, self.segment_ids_BT = position_BT, valid_BT, segment_ids_BT
        self._windows: dict[tuple[int, int], WindowMetadata] = {}
        self._write_masks: dict[tuple[int, int, int] | int, WriteMask] = {}
        self._elsewhere: dict[Any, SequenceMetadata] = {}

    def to(self, device: Any, non_blocking: bool = False) -> SequenceMetadata:
        """The same metadata on another device, made once for all layers there; None is this device. accelerate calls it
        before it runs a layer of a model that is spread over several devices."""
        position_BT = self.position_BT.to(device, non_blocking=non_blocking)
        if position_BT is self.position_BT:
            return self
        if position_BT.device not in self._elsewhere:
            valid_BT, segment_ids_BT, order_BT = (
                None if x is None else x.to(device, non_blocking=non_blocking)
                for x in (self.valid_BT, self.segment_ids_BT, self.order_BT)
            )
            there = SequenceMetadata(
                self.tokens, position_BT, valid_BT, segment_ids_BT, self.static, order_BT, self.most_documents
            )
            there.follows_padding, there.leading = self.follows_padding, self.leading
            self._elsewhere[position_BT.device] = there
        return self._elsewhere[position_BT.device]

    def ordered(self, x_BTX: Tensor) -> Tensor:
        """[B,T,X] in the order of the layers, from the batch's order; x may have one row for all."""
        return x_BTX if self.order_BT is None else take_tokens(x_BTX, self.order_BT)

    def restored(self, x_BTX: Tensor) -> Tensor:
        """[B,T,X] in the batch's order, from that of the layers."""
        return x_BTX if self._inverse_BT is None else take_tokens(x_BTX, self._inverse_BT)

    @classmethod
    def build(
        cls,
        given: Tensor,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        before: Positions | None = None,
        static: bool = False,
        cached: bool = False,
        most_documents: int | None = None,
    ) -> SequenceMetadata:
        """Builds the metadata from the arguments of a Hugging Face forward.

        given: input ids or embeddings [B,T,...]. before: the positions before the new tokens, from the cache. cached:
        whether a cache keeps the window for tokens that follow. Without `position_ids`, or with a mask, each row is one
        document. most_documents: how many documents a row has at most, so that no position is read on the host. Raises
        ValueError for inputs that a recurrent layer cannot honor.
        """
        (batch, tokens), device = given.shape[:2], given.device
        valid_BT = segment_ids_BT = order_BT = None
        if attention_mask is not None:
            if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
                raise ValueError(
                    "a linearized layer takes a 2-D padding mask [batch, tokens], not a mask of pairs of tokens"
                )
            valid_BT = attention_mask[:, -tokens:].to(device=device, dtype=torch.bool)
            if valid_BT.shape[1] != tokens:
                raise ValueError(f"attention_mask covers {attention_mask.shape[1]} tokens, but {tokens} are new")
            if not reads_no_values():
                check_mask(attention_mask, position_ids, tokens, None if before is None else before.seen_B)
                valid_BT = None if bool(valid_BT.all()) else valid_BT
            if valid_BT is not None and tokens > 1 and (reads_no_values() or _is_scattered(valid_BT, cached)):
                order_BT = _padding_first(valid_BT)
                valid_BT = valid_BT.gather(1, order_BT)
        elif tokens > 1 and position_ids is not None:
            segment_ids_BT = _documents(position_ids) if most_documents is None else document_ids(position_ids)
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
            position_BT = position_BT + before.seen_B[:, None].to(device)
        if valid_BT is not None:
            position_BT = torch.where(valid_BT, position_BT, -1)
        metadata = cls(tokens, position_BT, valid_BT, segment_ids_BT, static, order_BT, most_documents)
        metadata.follows_padding = valid_BT is not None and before is not None
        # an exported program takes any number of tokens, which must not be compared with that of the sinks
        if before is None and valid_BT is None and segment_ids_BT is None and not is_exporting():
            metadata.leading = tokens
        return metadata

    def for_window(self, cache_window: int, sinks: int, before: Positions | None = None) -> WindowMetadata:
        """The metadata for layers with a ring of `cache_window` tokens and `sinks` sinks.

        It is computed once for layers with equal values, so `before` must be the same for all of them.
        """
        key = (cache_window, sinks)
        if key not in self._windows:
            self._windows[key] = self._for_window(cache_window, sinks, before)
        return self._windows[key]

    def write_mask_on_eviction(self, window: WindowMetadata) -> Tensor:
        """bool [B,T]: whether the token that leaves the window at each new token is written to the memory."""
        mask_BT = self.position_on_eviction(window) >= window.sink_count
        if self.segment_ids_BT is not None and window.segment_ids_BS is not None:
            mask_BT = mask_BT & (self._on_eviction(window.segment_ids_BS, window) == self.segment_ids_BT)
        return mask_BT

    def write_mask_of_heads(self, heads: int, window: WindowMetadata | None) -> WriteMask | None:
        """The write mask of a layer with so many key-value heads: of the tokens that leave `window`, or without one of
        the new tokens. None if there is no padding among these."""
        key = heads if window is None else (heads, window.cache_window, window.sink_count)
        if key not in self._write_masks:
            mask_BT = self.valid_BT if window is None else self.write_mask_on_eviction(window)
            if mask_BT is None:
                return None
            mask_BT11 = mask_BT[:, :, None, None]
            self._write_masks[key] = WriteMask(mask_BT11.repeat(1, 1, heads, 1), ~mask_BT11)
        return self._write_masks[key]

    def position_on_eviction(self, window: WindowMetadata) -> Tensor:
        """[B,T]: the position of the token that leaves the window at each new token; -1 if none does."""
        return self._on_eviction(window.position_BS, window)

    def _on_eviction(self, of_BS: Tensor, window: WindowMetadata) -> Tensor:
        missing = window.cache_window + self.tokens - of_BS.shape[1]
        return F.pad(of_BS, (missing, 0), value=-1)[:, : self.tokens]

    def positions_after(self, window: WindowMetadata, before: Positions | None = None) -> Positions:
        """The positions to keep for the next forward, after these tokens."""
        start = max(0, window.position_BS.shape[1] - window.cache_window)
        new: int | Tensor = self.tokens if self.valid_BT is None else self.valid_BT.sum(1)
        seen_B = torch.zeros_like(self.position_BT[:, 0]) if before is None else before.seen_B
        since_BM = None
        if window.sinks is not None:
            since_BM = self._since_after(window.sinks, None if before is None else before.since_BM)
        segments = window.segment_ids_BS
        return Positions(
            # clone: a view of the last tokens would keep the whole prompt alive
            window.position_BS[:, start:].clone(),
            seen_B + new,
            since_BM,
            None if segments is None else segments[:, start:].clone(),
            self.valid_BT is not None or (before is not None and before.padded),
            before is not None and before.has_all_sinks,
        )

    def _for_window(self, cache_window: int, sinks: int, before: Positions | None) -> WindowMetadata:
        position_BS, segment_ids_BS, valid_BS, order_P = self.position_BT, self.segment_ids_BT, self.valid_BT, None
        order_BS = None
        if before is not None:
            position_BS = torch.cat((before.position_BP, position_BS), 1)
            if segment_ids_BS is not None and before.segment_ids_BP is not None:
                segment_ids_BS = torch.cat((before.segment_ids_BP, segment_ids_BS), 1)
            valid_BS = position_BS >= 0 if before.padded or valid_BS is not None else None
            size = before.position_BP.shape[1]
            if before.ring_position is not None and size:
                order_P = (torch.arange(size, device=position_BS.device) + before.ring_position) % size
            if self.follows_padding:
                order_BS = _padding_first(position_BS >= 0)
                position_BS = position_BS.gather(1, order_BS)
                valid_BS = position_BS >= 0
        found = self._find_sinks(cache_window, sinks, before) if sinks else None
        return WindowMetadata(position_BS, valid_BS, segment_ids_BS, found, sinks, cache_window, order_P, order_BS)

    def _find_sinks(self, cache_window: int, count: int, before: Positions | None) -> Sinks:
        """The sinks: the first `count` real tokens of each document."""
        device = self.position_BT.device
        query_T = torch.arange(self.tokens, device=device)
        since_BM = None if before is None else before.since_BM
        if self.static and before is not None and before.has_all_sinks and since_BM is not None:
            return Sinks(None, None, query_T[:, None] + since_BM[:, None] > cache_window)
        wanted_M = torch.arange(count, device=device)
        is_sink_BMT = self.position_BT[:, None] == wanted_M[None, :, None]
        if self.segment_ids_BT is not None:
            documents = int(self.segment_ids_BT.max()) + 1 if self.most_documents is None else self.most_documents
            of_M = torch.arange(documents, device=device).repeat_interleave(count)
            is_sink_BMT = is_sink_BMT.repeat(1, documents, 1) & (self.segment_ids_BT[:, None] == of_M[None, :, None])
        found_BM = is_sink_BMT.any(-1)
        index_BM = is_sink_BMT.int().argmax(-1)
        since_BM = _since(since_BM, index_BM)
        there_BM = found_BM | (since_BM > 0)
        since_BM = torch.where(found_BM, -index_BM, self._past_padding(since_BM))
        visible_BTM = there_BM[:, None] & (query_T[:, None] + since_BM[:, None] > cache_window)
        if self.segment_ids_BT is not None:
            visible_BTM = visible_BTM & (self.segment_ids_BT[:, :, None] == of_M)
        return Sinks(index_BM, found_BM, visible_BTM, lead=count <= self.leading)

    def _since_after(self, sinks: Sinks, since_BM: Tensor | None) -> Tensor:
        if sinks.index_BM is None or sinks.found_BM is None:
            assert since_BM is not None
            return since_BM + self.tokens
        since_BM = _since(since_BM, sinks.index_BM)
        there_BM = sinks.found_BM | (since_BM > 0)
        since_BM = torch.where(sinks.found_BM, -sinks.index_BM, self._past_padding(since_BM))
        return torch.where(there_BM, since_BM + self.tokens, 0)

    def _past_padding(self, since_BM: Tensor) -> Tensor:
        """Distances to the first new token, without the padding before it."""
        if not self.follows_padding or self.valid_BT is None:
            return since_BM
        return since_BM - (~self.valid_BT).sum(1, keepdim=True)


def _is_scattered(valid_BT: Tensor, cached: bool) -> bool:
    """Whether padding separates real tokens of a row, or with `cached` may separate them from those that follow."""
    ends_BT = valid_BT[:, :-1] & ~valid_BT[:, 1:]
    if cached:
        return bool(ends_BT.any())
    return bool((ends_BT.cummax(1).values & valid_BT[:, 1:]).any())


def _padding_first(valid_BT: Tensor) -> Tensor:
    """The places of a row's tokens, padding first, and otherwise in their order."""
    return valid_BT.to(torch.uint8).argsort(dim=1, stable=True)


def take_tokens(x_BTX: Tensor, index_BT: Tensor) -> Tensor:
    """[B,T,X]: the tokens of x at these places; x may have one row for all."""
    x_BTX = x_BTX.expand(len(index_BT), *x_BTX.shape[1:])
    return x_BTX.gather(1, index_BT.view(*index_BT.shape, *[1] * (x_BTX.dim() - 2)).expand_as(x_BTX))


def _since(before_BM: Tensor | None, index_BM: Tensor) -> Tensor:
    """The distances of earlier sinks, extended by zeros for documents that begin among the new tokens."""
    if before_BM is None:
        return torch.zeros_like(index_BM)
    return F.pad(before_BM, (0, index_BM.shape[1] - before_BM.shape[1]))


def _documents(position_ids: Tensor) -> Tensor | None:
    """[B or 1,T]: the document index of each token; None if each row is one document."""
    segment_ids_BT = find_packed_sequence_indices(position_ids)
    if segment_ids_BT is None or not torch.compiler.is_compiling():
        return segment_ids_BT
    if is_exporting():
        raise ValueError(
            "torch.export cannot check whether position_ids restart, as in packed documents: leave position_ids "
            "out, or pass the attention_mask, with which a row is one document"
        )
    return segment_ids_BT if bool((segment_ids_BT > 0).any()) else None  # transformers skips this test when compiling
