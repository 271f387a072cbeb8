"""Which tokens of a batch are real, which document each belongs to, and where it stands: worked out once per forward.

Shapes: B batch, T new tokens, S = tokens of the ring + T, N sinks, M = sinks of all documents of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from gated_kernels.common.tracing import reads_no_values
from torch import Tensor
from transformers.masking_utils import find_packed_sequence_indices

from liger_convert.model.cache import LinearizedCacheLayer
from liger_convert.model.packing import check_mask

PACKED_CACHE = "packed documents cannot be cached: pass use_cache=False"


class Sinks(NamedTuple):
    """Where each row's sinks stand: `index_BM` among the new tokens (meaningful where `found_BM`; both None when all
    are known to stand before them), and `visible_BTM`: seen by a query from beyond the window."""

    index_BM: Tensor | None
    found_BM: Tensor | None
    visible_BTM: Tensor


class Sight(NamedTuple):
    """What layers of equal window and sinks have before them: the ranks of the ring's and the new tokens, which of
    them are no padding (None: all), and the sinks (None: none)."""

    rank_BS: Tensor
    valid_BS: Tensor | None
    sinks: Sinks | None


class SequenceLayout:
    """valid_BT: False on padding, None when there is none. document_BT: index of the document in a packed row, None
    when a row is one document. rank_BT: how many real tokens of its document stand before a token, -1 on padding."""

    def __init__(self, tokens: int, rank_BT: Tensor, valid_BT: Tensor | None, document_BT: Tensor | None):
        self.tokens = tokens
        self.rank_BT, self.valid_BT, self.document_BT = rank_BT, valid_BT, document_BT
        self._sights: dict[tuple[int, int], tuple[Sight, LinearizedCacheLayer | None]] = {}
        self._written: dict[tuple[int, int], Tensor] = {}

    @classmethod
    def build(
        cls,
        given: Tensor,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        past: LinearizedCacheLayer | None,
    ) -> SequenceLayout:
        """From what a Hugging Face forward is given, which is `given` [B,T,...]. Without `position_ids` a row is one
        document, and no value is looked at. Raises ValueError for what a recurrent layer cannot honour."""
        (batch, tokens), device = given.shape[:2], given.device
        valid_BT = document_BT = None
        if attention_mask is not None:
            if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
                raise ValueError(
                    "a linearized layer takes a 2-D padding mask [batch, tokens], not a mask of pairs of tokens"
                )
            valid_BT = attention_mask[:, -tokens:].to(device=device, dtype=torch.bool)
            if valid_BT.shape[1] != tokens:
                raise ValueError(f"attention_mask covers {attention_mask.shape[1]} tokens, but {tokens} are new")
            # a static step and a graph must not look at the values
            static = past is not None and past.static
            if not static and not reads_no_values(valid_BT):
                seen_B = None if past is None else past.sinks.get("seen")
                check_mask(attention_mask, position_ids, tokens, seen_B)
                valid_BT = None if bool(valid_BT.all()) else valid_BT
        elif tokens > 1 and position_ids is not None:
            document_BT = _documents(position_ids)
            if document_BT is not None and past is not None:
                raise ValueError(PACKED_CACHE)
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
        return cls(tokens, rank_BT, valid_BT, document_BT)

    def extend(self, past: LinearizedCacheLayer | None, name: str, new: Tensor, keep: int) -> Tensor:
        """`new` behind what the ring of `past` holds under `name`; the ring moves on."""
        return new if past is None else past.extend(name, new, keep)

    def look(self, past: LinearizedCacheLayer | None, keep: int, sinks: int) -> Sight:
        """Of a layer whose ring keeps `keep` tokens. Worked out once for equal layers, whose caches then share it;
        `past` moves on."""
        key = (keep, sinks)
        if key not in self._sights:
            self._sights[key] = self._look(past, keep, sinks), past
        sight, first = self._sights[key]
        if past is not None and first is not None and past is not first:
            past.share(first)
        return sight

    def written_on_eviction(self, rank_BS: Tensor, window: int, sinks: int) -> Tensor:
        """[B,T]: at each new token, whether the one that then leaves the window goes into the memory."""
        key = (window, sinks)
        if key not in self._written:
            missing = window - 1 + self.tokens - rank_BS.shape[1]
            written_BT = F.pad(rank_BS, (missing, 0), value=-1)[:, : self.tokens] >= sinks
            if self.document_BT is not None:
                leaving_BT = F.pad(self.document_BT, (window - 1, 0), value=-1)[:, : self.tokens]
                written_BT = written_BT & (leaving_BT == self.document_BT)
            self._written[key] = written_BT
        return self._written[key]

    def _look(self, past: LinearizedCacheLayer | None, keep: int, count: int) -> Sight:
        rank_BS = self.extend(past, "rank", self.rank_BT, keep)
        sinks = self._find_sinks(past, keep, count) if count else None
        valid_BS = self.valid_BT
        if past is not None:
            new: int | Tensor = self.tokens if self.valid_BT is None else self.valid_BT.sum(1)
            seen_B = past.sinks.get("seen", torch.zeros_like(self.rank_BT[:, 0])) + new
            past.write(past.sinks, "seen", seen_B)
            past.padded |= self.valid_BT is not None
            valid_BS = rank_BS >= 0 if past.padded else None
        return Sight(rank_BS, valid_BS, sinks)

    def _find_sinks(self, past: LinearizedCacheLayer | None, keep: int, count: int) -> Sinks:
        """Of each document's first `count` real tokens. The cache keeps how far the next token is from each, 0 where a
        sink has not come yet."""
        batch, device = len(self.rank_BT), self.rank_BT.device
        query_T = torch.arange(self.tokens, device=device)
        if past is not None and past.static and past.has_all_sinks:
            since_BM = past.sinks["since"]
            visible_BTM = query_T[:, None] + since_BM[:, None] > keep
            past.write(past.sinks, "since", since_BM + self.tokens)
            return Sinks(None, None, visible_BTM)
        wanted_M = torch.arange(count, device=device)
        is_sink_BMT = self.rank_BT[:, None] == wanted_M[None, :, None]
        if self.document_BT is not None:
            documents = int(self.document_BT.max()) + 1
            of_M = torch.arange(documents, device=device).repeat_interleave(count)
            is_sink_BMT = is_sink_BMT.repeat(1, documents, 1) & (self.document_BT[:, None] == of_M[None, :, None])
        found_BM = is_sink_BMT.any(-1)
        index_BM = is_sink_BMT.int().argmax(-1)
        before_BM = None if past is None else past.sinks.get("since")
        if before_BM is None:
            before_BM = index_BM.new_zeros(batch, found_BM.shape[1])
        there_BM = found_BM | (before_BM > 0)
        since_BM = torch.where(found_BM, -index_BM, before_BM)
        visible_BTM = there_BM[:, None] & (query_T[:, None] + since_BM[:, None] > keep)
        if self.document_BT is not None:
            visible_BTM = visible_BTM & (self.document_BT[:, :, None] == of_M)
        if past is not None:
            past.write(past.sinks, "since", torch.where(there_BM, since_BM + self.tokens, 0))
        return Sinks(index_BM, found_BM, visible_BTM)


def _documents(position_ids: Tensor) -> Tensor | None:
    """[B,T]: the index of each token's document, None where every row is one."""
    document_BT = find_packed_sequence_indices(position_ids)
    if document_BT is None or not torch.compiler.is_compiling():
        return document_BT
    if torch.compiler.is_exporting():
        raise ValueError(
            "torch.export cannot look whether position_ids restart, as packed documents have them: leave position_ids "
            "out, or pass the attention_mask, with which a row is one document"
        )
    return document_BT if bool((document_BT > 0).any()) else None  # which the library does not ask in a graph
