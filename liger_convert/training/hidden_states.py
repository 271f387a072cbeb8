"""The hidden states of a stage's rows before one layer, kept on disk. Read and written a few rows at a time.

All rows have the same length, so each has a fixed place in the file and can be overwritten. A second file holds a
checksum for each row. It is checked when the row is read, and detects rows that were never written, are truncated, or
are in another row's place.

A background thread reads ahead and writes behind while the layer computes. At most two batches wait to be written.

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
PENDING = 2  # maximum number of batches that wait to be written


class HiddenStates:
    """`rows` rows of [`tokens`, `size`] elements of `dtype`, in the file `path` and its checksum file.

    Both files are created if they do not exist. Use it as a context manager, which closes them. pinned: read into
    pinned memory, for asynchronous copies to a GPU.
    """

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
        """The `count` rows from `row` on, [N,T,C], on the CPU. The next `count` rows are then read ahead.

        Raises LinearizeError for a row that does not match its checksum.
        """
        ahead, self._ahead = self._ahead, None
        x_NTC = ahead[1].result() if ahead is not None and ahead[0] == (row, count) else self._read(row, count)
        following = row + count, min(count, self.rows - row - count)
        if following[1] > 0:
            self._ahead = following, self._pool.submit(self._read, *following)
        return x_NTC

    def write(self, row: int, x: Tensor) -> None:
        """Writes rows from `row` on, from a tensor of any shape and device whose size is a whole number of rows.

        The write is asynchronous, so `x` must not be modified afterwards; see `flush`. Raises ValueError if the dtype
        is wrong.
        """
        if x.dtype != self.dtype:
            raise ValueError(f"hidden states are {x.dtype} and should be {self.dtype}")
        while len(self._written) >= PENDING:
            self._written.popleft().result()
        self._written.append(self._pool.submit(self._write, row, x.detach()))

    def flush(self) -> None:
        """Waits until all writes are on disk (fsync). Raises LinearizeError if a write failed, as on a full disk."""
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
    """The path of the checksum file that belongs to `path`."""
    return path.with_name(path.name + SUMS)


def _pread(descriptor: int, into: memoryview, offset: int) -> bool:
    """Reads from `offset` into `into`. Returns whether the file was long enough to fill it."""
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
    """[N]: each row's checksum, the sum of its 64-bit words plus its row number + 1.

    The row number keeps a row from passing for another, and an unwritten row, which is all zeros, for a written one.
    """
    words = raw_NB.shape[1] // SUM_BYTES * SUM_BYTES
    sums_N = raw_NB[:, :words].view(np.uint64).sum(1, dtype=np.uint64)
    rest_N = raw_NB[:, words:].sum(1, dtype=np.uint64)
    return sums_N + rest_N + np.arange(row + 1, row + 1 + len(raw_NB), dtype=np.uint64)
