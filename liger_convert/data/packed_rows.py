"""Packs documents into training rows of equal length, in a random order that depends only on the seed.

Shapes: N tokens of a document, T tokens of a row, B batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from liger_convert.data.documents import Document
from liger_convert.utils.errors import BadInput

IGNORED = -100  # the label that cross-entropy ignores

# The fraction of the rows with a copy in which random tokens are copied. Only a memory can predict these, while copied
# text can partly be guessed from its context.
RANDOM_COPIES = 0.3

ORDERS = 16  # epochs whose order is cached; rows are read in sequence, but random copies draw from all epochs


class PackedDataset(Dataset[dict[str, Tensor]]):
    """Rows of exactly T tokens, packed from concatenated documents without padding. A document that crosses the end of
    a row is cut there, and its rest is a separate segment in the next row.

    An item is {"input_ids", "position_ids", "labels"}, int64 [T]. Positions restart at 0 with each segment, which keeps
    documents apart in attention. The label of a segment's first token is -100, because nothing in the segment precedes
    it. With `responses_only`, so is the label of every token outside its document's `loss` mask. Rows are assembled
    when an item is requested; the dataset holds only the documents, and their order in some epochs.

    The first token of a row that continues a document is replaced by the document's BOS token, if it has one: such a
    base has hardly seen text without it, and predicts it much worse. So are as many tokens as the tokenizer puts before
    every text.

    concat_documents: makes each row a single segment. A memory learns to hold information over thousands of tokens only
    in long segments, and most documents are short.

    copy_fraction: the fraction of rows in which a stretch is repeated later in the row. Plain text rewards little
    beyond the window; a copy rewards remembering what has left it. Such a row is a single segment, since otherwise the
    original might not be visible from the copy. Which rows have a copy, and where, depends only on `seed` and the row's
    number. It cannot be combined with `responses_only`, as a copied stretch has no response mask.

    mixed_seq_lens: pairs (length, fraction). In that fraction of the micro-batches, of `batch_size` rows each, all rows
    are cut into pieces of that length, and each piece is a row of its own. The item is then [T / length, length].
    """

    def __init__(
        self,
        documents: Sequence[Document],
        seq_len: int,
        rows: int,
        responses_only: bool,
        copy_fraction: float,
        concat_documents: bool,
        mixed_seq_lens: Sequence[tuple[int, float]],
        batch_size: int,
        seed: int,
    ):
        self.documents = documents
        self.tokens = sum(len(document.ids) for document in documents)
        self._orders: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.seq_len, self.rows, self.responses_only = seq_len, rows, responses_only
        self.copy_fraction, self.concat_documents, self.seed = copy_fraction, concat_documents, seed
        self.batch_size = batch_size
        self.lengths = [seq_len, *(length for length, _ in mixed_seq_lens)]
        fractions = [fraction for _, fraction in mixed_seq_lens]
        self.fractions = [1 - sum(fractions), *fractions]

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        if not 0 <= row < self.rows:
            raise IndexError(row)
        return self.item(row, self.drawn_length(row))

    def drawn_length(self, row: int) -> int:
        """The length of the pieces that the row is cut into; the same for all rows of its micro-batch."""
        drawn = np.random.default_rng((self.seed, row // self.batch_size, 2)).choice(self.lengths, p=self.fractions)
        return int(drawn)

    def item(self, row: int, length: int) -> dict[str, Tensor]:
        """The row, cut into pieces of `length`: [T / length, length] each, or [T] if `length` is `seq_len`."""
        return self.whole(row) if length == self.seq_len else self._cut(row, length)

    def whole(self, row: int) -> dict[str, Tensor]:
        """The row, not cut into pieces, [T] each."""
        return {name: x_1T[0] for name, x_1T in self._cut(row, self.seq_len).items()}

    def _cut(self, row: int, length: int) -> dict[str, Tensor]:
        """The row in pieces, [T / length, length] each."""
        rng = np.random.default_rng((self.seed, row, 1))  # 1: a different stream from the one that draws orders
        starts = range(row * self.seq_len, (row + 1) * self.seq_len, length)
        arrays = zip(*(self._tokens(at, length, rng) for at in starts))
        names = "input_ids", "position_ids", "labels"
        return {name: torch.from_numpy(np.stack(pieces)) for name, pieces in zip(names, arrays, strict=True)}

    def _tokens(self, at: int, length: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids, positions and labels of `length` tokens, as one row. at: the first token's index in all epochs' text."""
        input_ids_T, position_ids_T, labels_T = (np.empty(length, np.int64) for _ in range(3))
        filled = 0
        epoch, inside = divmod(at, self.tokens)
        order, ends = self._epoch(epoch)
        which = int(np.searchsorted(ends, inside, side="right"))
        first, left = self.documents[order[which]], int(ends[which]) - inside
        while filled < length:
            if which == len(order):
                epoch, which = epoch + 1, 0
                order, ends = self._epoch(epoch)
            document = self.documents[order[which]]
            begin = at + filled - epoch * self.tokens - int(ends[which]) + len(document.ids)
            ids_N = document.ids[begin : begin + length - filled]
            segment = slice(filled, filled + len(ids_N))
            input_ids_T[segment] = labels_T[segment] = ids_N
            position_ids_T[segment] = np.arange(len(ids_N)) + (filled if self.concat_documents else 0)
            if self.responses_only:
                labels_T[segment][~document.loss[begin : begin + len(ids_N)]] = IGNORED
            if not (self.concat_documents and filled):
                labels_T[filled] = IGNORED
            filled += len(ids_N)
            which += 1
        begin = min(first.begin, left)
        input_ids_T[:begin], labels_T[:begin] = first.ids[:begin], IGNORED
        text_T = input_ids_T[begin:]
        if rng.random() < self.copy_fraction and len(text_T) > 1:
            self._copy_stretch(text_T, rng)
            position_ids_T[:] = np.arange(length)
            labels_T[1:] = input_ids_T[1:]
        return input_ids_T, position_ids_T, labels_T

    def _copy_stretch(self, ids_T: np.ndarray, rng: np.random.Generator) -> None:
        """Copies one stretch of `ids_T` over a later part of it, in place. All non-overlapping pairs of places are
        equally likely."""
        T = len(ids_T)
        shortest, longest = max(1, min(32, T // 4)), T // 2 - T // 32
        length = int(rng.integers(shortest, longest, endpoint=True))
        # the numbers of tokens outside both stretches that come before the first one and before the second one
        first, second = np.sort(rng.choice(T - 2 * length + 2, 2, replace=False)) - (0, 1)
        if rng.random() < RANDOM_COPIES:
            at_N = rng.integers(math.ceil(self.epochs) * self.tokens, size=length)  # from the tokens of all epochs
            ids_T[first : first + length] = [self._token(int(at)) for at in at_N]
        ids_T[second + length : second + 2 * length] = ids_T[first : first + length]

    def _token(self, at: int) -> int:
        epoch, inside = divmod(at, self.tokens)
        order, ends = self._epoch(epoch)
        which = int(np.searchsorted(ends, inside, side="right"))
        return self.documents[order[which]].ids[inside - ends[which]]

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The order of the documents in an epoch, and the offset at which each of them ends. Drawn when needed, because
        the token budget may be many times the text."""
        if epoch not in self._orders:
            if len(self._orders) == ORDERS:
                del self._orders[next(iter(self._orders))]
            order = np.random.default_rng((self.seed, epoch)).permutation(len(self.documents))
            self._orders[epoch] = order, np.cumsum([len(self.documents[i].ids) for i in order])
        return self._orders[epoch]

    def most_documents(self) -> int:
        """The largest number of documents in a row, parts of documents included; no piece of a row has more."""
        most = 1
        carried = np.zeros(0, np.int64)  # rows of the documents that begin in a row which the epoch before began
        for epoch in range(math.ceil(self.epochs)):
            begins = epoch * self.tokens + self._epoch(epoch)[1]  # of the documents after the first one
            inside = begins[begins % self.seq_len != 0] // self.seq_len
            inside = np.concatenate((carried, inside[inside < self.rows]))
            if len(inside):
                most = max(most, 1 + int(np.unique(inside, return_counts=True)[1].max()))
                carried = inside[inside == inside[-1]]
        return most

    @property
    def epochs(self) -> float:
        """The number of passes over the documents."""
        return self.rows * self.seq_len / self.tokens


def pack(
    documents: Sequence[Document],
    seq_len: int,
    tokens: int | None = None,
    seed: int = 0,
    *,
    responses_only: bool = False,
    copy_fraction: float = 0.0,
    concat_documents: bool = False,
    mixed_seq_lens: Sequence[tuple[int, float]] = (),
    batch_size: int = 1,
) -> PackedDataset:
    """Packs `documents` into `tokens // seq_len` rows. Without `tokens`, into as many full rows as one pass gives.

    The order of the documents is drawn from `seed`, again for each pass. Tokens that do not fill a row are dropped. See
    PackedDataset for the other arguments. Raises BadInput if the tokens do not fill one row.
    """
    documents = [document for document in documents if len(document.ids)]
    total = sum(len(document.ids) for document in documents)
    rows = (total if tokens is None else tokens) // seq_len
    if not total or not rows:
        raise BadInput(f"data: {total if tokens is None else tokens} tokens do not fill one row of {seq_len} (seq_len)")
    return PackedDataset(
        documents, seq_len, rows, responses_only, copy_fraction, concat_documents, mixed_seq_lens, batch_size, seed
    )


def collate(items: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Combines items of a PackedDataset, all of the same length, into one batch, [B,T] each."""
    return {name: torch.cat([item[name].view(-1, item[name].shape[-1]) for item in items]) for name in items[0]}
