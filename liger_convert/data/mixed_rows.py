"""Rows of several sources in fixed proportions: every row is of one source, and any stretch of rows has all of them.

A row of two sources would gain nothing: proportions are as exact without it, documents of different sources stay apart
whatever `concat_documents` says, and what a row repeats or cuts is what a stage on that source alone would.
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

BLOCK = 4096  # rows that are dealt out at a time


class Schedule:
    """Which source each row is of.

    After any number of rows, each source has had its fraction of them to within less than one row: Tijdeman's rule for
    the chairman assignment problem (Discrete Mathematics 32, 1980). Nothing is drawn at random, as that would leave
    some optimizer steps without a rare source. fractions: above 0, with a sum of 1.
    """

    def __init__(self, fractions: Sequence[float]):
        self.fractions = [fraction / sum(fractions) for fraction in fractions]
        self._blocks: list[np.ndarray] = []
        self._before = [[0] * len(fractions)]  # rows of each source before each block

    def locate(self, row: int) -> tuple[int, int]:
        """(source, how many of its rows come before) of a row."""
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
            # of the sources that may have a row now, the one that must have it first
            ready = [k for k, share in enumerate(fractions) if (first + inside) * share - counts[k] >= slack - 1e-9]
            source = min(ready, key=lambda k: (counts[k] + 1 - slack) / fractions[k])
            dealt[inside] = source
            counts[source] += 1
        self._blocks.append(dealt)
        self._before.append(counts)


@dataclass(frozen=True)
class SourceShare:
    """What a stage reads of one source: its fraction of the tokens, and how many times it goes through the source."""

    fraction: float
    epochs: float


class MixedDataset(Dataset[dict[str, Tensor]]):
    """`rows` rows of a mix. An item is that of a PackedDataset of the row's source.

    parts, fractions: by the sources' names, in one order. How long the pieces of a row are is drawn for the micro-batch
    that it is in, as in a PackedDataset.
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
        """The row as it is where there are no shorter ones, [T] each."""
        source, number = self.schedule.locate(row)
        return self.parts[source].whole(number)

    def source_of(self, row: int) -> str:
        """The name of the source that a row is of."""
        return self.names[self.schedule.locate(row)[0]]

    @property
    def sources(self) -> dict[str, SourceShare]:
        """What is read of each source, by name."""
        return {
            name: SourceShare(fraction, fraction * self.rows * self.seq_len / part.tokens)
            for name, part, fraction in zip(self.names, self.parts, self.schedule.fractions)
        }

    @property
    def epochs(self) -> float:
        """How many times the source that is read most often is gone through."""
        return max(share.epochs for share in self.sources.values())


def mix(
    documents: Mapping[str, Sequence[Document]],
    fractions: Mapping[str, float],
    seq_len: int,
    tokens: int,
    seed: int = 0,
    **options: Any,
) -> MixedDataset:
    """`tokens // seq_len` rows, of each source in `fractions` that fraction. The order of a source's documents is drawn
    from `seed` and its name, whatever it is mixed with. options: those of `pack`.

    Raises BadInput when that is not one row, or a source is empty.
    """
    rows = tokens // seq_len
    if not rows:
        raise BadInput(f"data: {tokens} tokens do not fill one row of {seq_len} (seq_len)")
    parts = {
        # less than one row more than its fraction, see Schedule
        name: pack(documents[name], seq_len, seq_len * (int(rows * fraction) + 1), _seed(seed, name), **options)
        for name, fraction in fractions.items()
    }
    return MixedDataset(parts, fractions, rows)


def _seed(seed: int, name: str) -> int:
    """Sources need numbers of their own: else the same rows of all would repeat themselves."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=4).digest())
