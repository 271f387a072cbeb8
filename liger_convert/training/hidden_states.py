"""The hidden states of a stage's rows before one layer, on the disk: read and written a few rows at a time.

Rows are of equal length, so each has its place in the file, and may be written again. Each has a sum of its bits in a
second file. It tells a row that was never written, is cut or stands in another's place, when the row is read.

The next rows are read, and the last ones written, by threads while the layer works. A thread holds two batches at most.

Shapes: N rows, T tokens of a row, C hidden size.
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from liger_convert.io.files import disk_errors
from liger_convert.utils.errors import LinearizeError

SUMS = ".sums"
SUM_BYTES = 8
PENDING = 2  # batches that wait for the disk


class HiddenStates:
    """`rows` rows of `tokens` x `size` numbers of `dtype` in the file `path` and its sums, which are made where they
    are not there. A context that closes them. pinned: read into memory that a GPU copies from by itself."""

    def __init__(self, path: Path, rows: int, tokens: int, size: int, dtype: torch.dtype, pinned: bool = False):
        self.path, self.rows, self.shape, self.dtype = path, rows, (tokens, size), dtype
        self.row_bytes, self.pinned = tokens * size * dtype.itemsize, pinned
        flags = os.O_RDWR | os.O_CREAT
        with disk_errors(path):
            self._file, self._sums = os.open(path, flags), os.open(sums_of(path), flags)
        self._pool = ThreadPoolExecutor(1)
        self._written: deque[Future[None]] = deque()
        self._ahead: tuple[tuple[int, int], Future[Tensor]] | None = None

    def __enter__(self) -> HiddenStates:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        os.close(self._file)
        os.close(self._sums)

    def read(self, row: int, count: int) -> Tensor:
        """[N,T,C], on the CPU: `count` rows from `row` on; as many behind them are read ahead. Raises LinearizeError
        for a row that is not what was written."""
        ahead, self._ahead = self._ahead, None
        x_NTC = ahead[1].result() if ahead is not None and ahead[0] == (row, count) else self._read(row, count)
        following = row + count, min(count, self.rows - row - count)
        if following[1] > 0:
            self._ahead = following, self._pool.submit(self._read, *following)
        return x_NTC

    def write(self, row: int, x: Tensor) -> None:
        """Writes the rows from `row` on, from a tensor of any shape and device, which must not change any more. It may
        be written later: see `flush`."""
        if x.dtype != self.dtype:
            raise ValueError(f"hidden states are {x.dtype} and should be {self.dtype}")
        while len(self._written) >= PENDING:
            self._written.popleft().result()
        self._written.append(self._pool.submit(self._write, row, x.detach()))

    def flush(self) -> None:
        """Waits until what was written is on the disk. Raises LinearizeError when that is full."""
        while self._written:
            self._written.popleft().result()
        with disk_errors(self.path):
            os.fsync(self._file)
            os.fsync(self._sums)

    def _read(self, row: int, count: int) -> Tensor:
        bytes_NB = torch.empty(count, self.row_bytes, dtype=torch.uint8, pin_memory=self.pinned)
        raw_NB, sums_N = bytes_NB.numpy(), np.zeros(count, np.uint64)
        _pread(self._sums, sums_N.view(np.uint8).data, row * SUM_BYTES)
        whole = _pread(self._file, raw_NB.data.cast("B"), row * self.row_bytes)
        bad = np.flatnonzero(_sums(raw_NB, row) != sums_N)
        if bad.size or not whole:
            what = f"row {row + int(bad[0]) if bad.size else row} is not what was written there"
            raise LinearizeError(f"{self.path}: {what}; remove {self.path.parent} and start the stage again")
        return bytes_NB.view(self.dtype).view(count, *self.shape)

    def _write(self, row: int, x: Tensor) -> None:
        raw_NB = x.cpu().contiguous().view(-1).view(torch.uint8).numpy().reshape(-1, self.row_bytes)
        with disk_errors(self.path):
            _pwrite(self._file, raw_NB.data.cast("B"), row * self.row_bytes)
            _pwrite(self._sums, _sums(raw_NB, row).view(np.uint8).data, row * SUM_BYTES)


def sums_of(path: Path) -> Path:
    """The file with the sums of the file `path`."""
    return path.with_name(path.name + SUMS)


def _pread(descriptor: int, into: memoryview, offset: int) -> bool:
    """Whether the file was long enough to fill `into`."""
    while into:
        if not (got := os.preadv(descriptor, [into], offset)):
            return False
        into, offset = into[got:], offset + got
    return True


def _pwrite(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _sums(raw_NB: np.ndarray, row: int) -> np.ndarray:
    """[N]: the sum of each row's bits as 64-bit words, and its number, so that no row passes for another and an
    unwritten one, which is all zeros, for none."""
    words = raw_NB.shape[1] // SUM_BYTES * SUM_BYTES
    sums_N = raw_NB[:, :words].view(np.uint64).sum(1, dtype=np.uint64)
    rest_N = raw_NB[:, words:].sum(1, dtype=np.uint64)
    return sums_N + rest_N + np.arange(row + 1, row + 1 + len(raw_NB), dtype=np.uint64)
