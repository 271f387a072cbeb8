"""Mixes rows of several sources in fixed proportions. Every row is from one source, and any stretch of rows has the
given proportions.

Mixing sources within a row would have no advantage. The proportions are as exact without it, documents of different
sources stay apart whatever `concat_documents` says, and each row is one that a stage on that source alone could have.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from liger_convert.data.documents import Document
from liger_convert.data.packed_rows import PackedDataset, pack
from liger_convert.utils.errors import BadInput

BLOCK = 4096  # rows that are assigned to sources at a time


class Schedule:
    """Assigns each row to a source.

    After any number of rows, each source has had its fraction of them to within less than one row, by Tijdeman's rule
    for the chairman assignment problem (Discrete Mathematics 32, 1980). The assignment is not random, because that
    would leave some optimizer steps without a rare source. fractions: positive; they are normalized to a sum of 1.
    """

    def __init__(self, fractions: Sequence[float]):
        self.fractions = [fraction / sum(fractions) for fraction in fractions]
        self._blocks: list[np.ndarray] = []
        self._before = [[0] * len(fractions)]  # rows of each source before each block

    def locate(self, row: int) -> tuple[int, int]:
        """(source, number of earlier rows of that source) for a row."""
        block, inside = divmod(row, BLOCK)
        while len(self._blocks) <= block:
            self._deal()
        dealt = self._blocks[block]
        source = int(dealt[inside])
        return source, self._before[block][source] + int(np.count_nonzero(dealt[:inside] == source))

    def _deal(self) -> None:
        fractions, slack = self.fractions, 1 / max(2 * len(self.fractions) - 2, 1)
        counts, dealt = list(self._before[-1]), np.empty(BLOCK, np.int32)
        first = len(self._blocks) * BLOCK + 1
        for inside in range(BLOCK):
            # among the sources that may get a row now, the one with the earliest deadline
            ready = [k for k, share in enumerate(fractions) if (first + inside) * share - counts[k] >= slack - 1e-9]
            source = min(ready, key=lambda k: (counts[k] + 1 - slack) / fractions[k])
            dealt[inside] = source
            counts[source] += 1
        self._blocks.append(dealt)
        self._before.append(counts)


@dataclass(frozen=True)
class SourceShare:
    """How much a stage reads of one source: its fraction of the tokens, and the number of passes over the source."""

    fraction: float
    epochs: float


class MixedDataset(Dataset[dict[str, Tensor]]):
    """`rows` rows of a mix. Each item comes from the PackedDataset of the row's source.

    parts, fractions: by source name, in the same order. The length of a row's pieces (`mixed_seq_lens`) is drawn once
    for each micro-batch, as in a PackedDataset.
    """

    def __init__(self, parts: Mapping[str, PackedDataset], fractions: Mapping[str, float], rows: int):
        self.parts, self.rows = list(parts.values()), rows
        self.names, self.schedule = list(parts), Schedule([fractions[name] for name in parts])
        self.seq_len = self.parts[0].seq_len

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        if not 0 <= row < self.rows:
            raise IndexError(row)
        source, number = self.schedule.locate(row)
        return self.parts[source].item(number, self.parts[0].drawn_length(row))

    def whole(self, row: int) -> dict[str, Tensor]:
        """The row, not cut into pieces, [T] each."""
        source, number = self.schedule.locate(row)
        return self.parts[source].whole(number)

    def most_documents(self) -> int:
        """The largest number of documents in a row, see PackedDataset."""
        return max(part.most_documents() for part in self.parts)

    @property
    def sources(self) -> dict[str, SourceShare]:
        """How much is read of each source, by name."""
        return {
            name: SourceShare(fraction, fraction * self.rows * self.seq_len / part.tokens)
            for name, part, fraction in zip(self.names, self.parts, self.schedule.fractions)
        }

    @property
    def epochs(self) -> float:
        """The number of passes over the source that is read most often."""
        return max(share.epochs for share in self.sources.values())


def mix(
    documents: Mapping[str, Sequence[Document]],
    fractions: Mapping[str, float],
    seq_len: int,
    tokens: int,
    seed: int = 0,
    **options: Any,
) -> MixedDataset:
    """Packs documents into `tokens // seq_len` rows, in the given fractions of the sources.

    documents, fractions: by source name. The order of a source's documents is drawn from `seed` and its name, so it
    does not depend on the other sources. options: those of `pack`. Raises BadInput if the tokens do not fill one row,
    or if a source is empty.
    """
    rows = tokens // seq_len
    if not rows:
        raise BadInput(f"data: {tokens} tokens do not fill one row of {seq_len} (seq_len)")
    parts = {
        # a source gets less than one row more than its fraction, see Schedule
        name: pack(documents[name], seq_len, seq_len * (int(rows * fraction) + 1), _seed(seed, name), **options)
        for name, fraction in fractions.items()
    }
    return MixedDataset(parts, fractions, rows)


def _seed(seed: int, name: str) -> int:
    """A seed for each source. With a common seed, rows of the same number would draw the same copies in all sources."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=4).digest())
