"""Which tokens of a batch are real, which document each belongs to, and where it stands: worked out once per forward.

Shapes: B batch, T new tokens, S = tokens of the ring + T, N sinks, M = sinks of all documents of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.masking_utils import find_packed_sequence_indices

from liger_convert.model.cache import LinearizedCacheLayer


class Sinks(NamedTuple):
    """Where each row's sinks stand: `index_BM` among the new tokens (meaningful where `found_BM`), `at_BM` in the
    whole sequence (-1: not there yet), and `visible_BTM`: seen by a query from beyond the window."""

    index_BM: Tensor
    found_BM: Tensor
    at_BM: Tensor
    visible_BTM: Tensor


class SequenceLayout:
    """valid_BT: False on padding, None when there is none. document_BT: index of the document in a packed row, None
    when a row is one document. rank_BT: how many real tokens of its document stand before a token, -1 on padding."""

    def __init__(self, tokens: int, start: int, rank_BT: Tensor, valid_BT: Tensor | None, document_BT: Tensor | None):
        self.tokens, self.start = tokens, start
        self.rank_BT, self.valid_BT, self.document_BT = rank_BT, valid_BT, document_BT
        self._sinks: dict[tuple[int, int], Sinks | None] = {}

    @classmethod
    def build(
        cls,
        batch: int,
        tokens: int,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        past: LinearizedCacheLayer | None,
    ) -> SequenceLayout:
        """From what a Hugging Face forward is given. Raises ValueError for what a recurrent layer cannot honour."""
        device = position_ids.device
        start = 0 if past is None else past.length
        valid_BT = document_BT = None
        if attention_mask is not None:
            if attention_mask.dim() != 2:
                raise ValueError(
                    "a linearized layer takes a 2-D padding mask [batch, tokens], not a mask of pairs of tokens"
                )
            valid_BT = attention_mask[:, -tokens:].to(device=device, dtype=torch.bool)
            if valid_BT.shape[1] != tokens:
                raise ValueError(f"attention_mask covers {attention_mask.shape[1]} tokens, but {tokens} are new")
            if bool(valid_BT.all()):
                valid_BT = None
        elif tokens > 1:
            document_BT = find_packed_sequence_indices(position_ids)
            if document_BT is not None and past is not None:
                raise ValueError("packed documents cannot be cached: pass use_cache=False")
        if document_BT is not None:
            document_BT = document_BT.expand(batch, tokens)
            index_T = torch.arange(tokens, device=device)
            new_BT = F.pad(document_BT[:, 1:] != document_BT[:, :-1], (1, 0), value=True)
            rank_BT = index_T - torch.where(new_BT, index_T, 0).cummax(1).values
        elif valid_BT is not None:
            rank_BT = valid_BT.long().cumsum(1) - 1
        else:
            rank_BT = torch.arange(tokens, device=device).expand(batch, tokens)
        if past is not None and "seen" in past.sinks:
            rank_BT = rank_BT + past.sinks["seen"][:, None]
        if valid_BT is not None:
            rank_BT = torch.where(valid_BT, rank_BT, -1)
        return cls(tokens, start, rank_BT, valid_BT, document_BT)

    def seen_B(self, past: LinearizedCacheLayer) -> Tensor:
        """Real tokens of each row after this call."""
        new: int | Tensor = self.tokens if self.valid_BT is None else self.valid_BT.sum(1)
        return past.sinks.get("seen", torch.zeros_like(self.rank_BT[:, 0])) + new

    def extend(self, past: LinearizedCacheLayer | None, name: str, new: Tensor, keep: int) -> Tensor:
        """`new` behind what the ring of `past` holds under `name`; the ring moves on."""
        return new if past is None else past.extend(name, new, keep)

    def valid_BS(self, past: LinearizedCacheLayer | None, rank_BS: Tensor) -> Tensor | None:
        """False on padding, among the ring's and the new tokens; None when there never was any."""
        if past is None:
            return self.valid_BT
        past.padded |= self.valid_BT is not None
        return rank_BS >= 0 if past.padded else None

    def written_on_eviction(self, rank_BS: Tensor, window: int, sinks: int) -> Tensor:
        """[B,T]: at each new token, whether the one that then leaves the window goes into the memory."""
        missing = window - 1 + self.tokens - rank_BS.shape[1]
        written_BT = F.pad(rank_BS, (missing, 0), value=-1)[:, : self.tokens] >= sinks
        if self.document_BT is not None:
            leaving_BT = F.pad(self.document_BT, (window - 1, 0), value=-1)[:, : self.tokens]
            written_BT = written_BT & (leaving_BT == self.document_BT)
        return written_BT

    def sinks(self, past: LinearizedCacheLayer | None, window: int, count: int) -> Sinks | None:
        """Where the first `count` real tokens of each document are; None when `count` is 0. Shared by equal layers."""
        if (window, count) not in self._sinks:
            self._sinks[window, count] = self._find_sinks(past, window, count) if count else None
        return self._sinks[window, count]

    def _find_sinks(self, past: LinearizedCacheLayer | None, window: int, count: int) -> Sinks:
        batch, device = len(self.rank_BT), self.rank_BT.device
        wanted_M = torch.arange(count, device=device)
        is_sink_BMT = self.rank_BT[:, None] == wanted_M[None, :, None]
        if self.document_BT is not None:
            documents = int(self.document_BT.max()) + 1
            of_M = torch.arange(documents, device=device).repeat_interleave(count)
            is_sink_BMT = is_sink_BMT.repeat(1, documents, 1) & (self.document_BT[:, None] == of_M[None, :, None])
        found_BM = is_sink_BMT.any(-1)
        index_BM = is_sink_BMT.int().argmax(-1)
        before = torch.full((batch, found_BM.shape[1]), -1, device=device) if past is None else past.sinks.get("at")
        if before is None:
            before = torch.full_like(index_BM, -1)
        at_BM = torch.where(found_BM, index_BM + self.start, before)
        query_T = torch.arange(self.tokens, device=device) + self.start
        visible_BTM = (at_BM >= 0)[:, None] & (query_T[None, :, None] - at_BM[:, None] >= window)
        if self.document_BT is not None:
            visible_BTM = visible_BTM & (self.document_BT[:, :, None] == of_M)
        return Sinks(index_BM, found_BM, at_BM, visible_BTM)
