"""The hidden states of a stage's rows before one layer, kept on disk. Read and written a few rows at a time.

All rows have the same length, so each has a fixed place in the file and can be overwritten. A second file holds a
checksum for each row. It is checked when the row is read, and detects rows that were never written, are truncated, or
are in another row's place.

Several processes, also on several hosts that share the disk, open the same file. Each reads and writes rows of its own.

A background thread reads ahead and writes behind while the layer computes. At most two batches wait to be written. It
shares the bytes of a batch out to further threads in pieces, since a single one copies and adds up fewer bytes a second
than a layer takes on a GPU. Copies to and from a GPU have streams of their own, so that the layer need not wait for
them.

Shapes: N rows, T tokens of a row, C hidden size.
"""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from liger_convert.io.files import disk_errors
from liger_convert.utils.errors import LinearizeError

SUMS = ".sums"
SUM_BYTES = 8
PENDING = 2  # maximum number of batches that wait to be written
PIECE = 4 << 20  # bytes that a thread copies and adds up at a time; a multiple of SUM_BYTES
THREADS = 8  # at most, for the pieces of a batch


class HiddenStates:
    """`rows` rows of [`tokens`, `size`] elements of `dtype`, in the file `path` and its checksum file.

    Both files are created if they do not exist. Use it as a context manager, which closes them. on_gpu: read to the
    current GPU, instead of to the CPU.
    """

    def __init__(self, path: Path, rows: int, tokens: int, size: int, dtype: torch.dtype, on_gpu: bool = False):
        self.path, self.rows, self.shape, self.dtype = path, rows, (tokens, size), dtype
        self.row_bytes, self.on_gpu = tokens * size * dtype.itemsize, on_gpu
        self._to_gpu = _copying("to") if on_gpu else None
        self._from_gpu = _copying("from") if on_gpu else None
        with disk_errors(path):
            self._file, self._sums = _Opened(path), _Opened(sums_of(path))
        self._pool = ThreadPoolExecutor(1)
        self._helpers = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1))
        self._written: deque[Future[None]] = deque()
        self._ahead: tuple[tuple[int, int], Future[Tensor]] | None = None

    def __enter__(self) -> HiddenStates:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._helpers.shutdown()
        self._file.close()
        self._sums.close()

    def read(self, row: int, count: int, following: int | None = None) -> Tensor:
        """The `count` rows from `row` on, [N,T,C]. Those from `following` on are then read ahead, by default the next.

        Raises LinearizeError for a row that does not match its checksum.
        """
        ahead, self._ahead = self._ahead, None
        x_NTC = ahead[1].result() if ahead is not None and ahead[0] == (row, count) else self._fetch(row, count)
        if self._to_gpu is not None:
            current = torch.cuda.current_stream()
            current.wait_stream(self._to_gpu)
            x_NTC.record_stream(current)  # it was allocated on the other stream
        start = row + count if following is None else following
        if start < self.rows:
            ahead_of = start, min(count, self.rows - start)
            self._ahead = ahead_of, self._pool.submit(self._fetch, *ahead_of)
        return x_NTC

    def write(self, row: int, x: Tensor) -> None:
        """Writes rows from `row` on, from a tensor of any shape and device whose size is a whole number of rows.

        The write is asynchronous, so `x` must not be modified afterwards, not even by work that is queued on a GPU; see
        `flush`. Raises ValueError if the dtype is wrong.
        """
        if x.dtype != self.dtype:
            raise ValueError(f"hidden states are {x.dtype} and should be {self.dtype}")
        while len(self._written) >= PENDING:
            self._written.popleft().result()
        self._written.append(self._pool.submit(self._write, row, *self._to_host(x.detach())))

    def wait_until_idle(self) -> None:
        """Waits until the background thread has nothing left to do. A failure is raised by the next call."""
        wait(self._written)
        if self._ahead is not None:
            wait([self._ahead[1]])

    def flush(self) -> None:
        """Waits until all writes are on disk (fsync). Raises LinearizeError if a write failed, as on a full disk."""
        while self._written:
            self._written.popleft().result()
        with disk_errors(self.path):
            os.fsync(self._file.writing)
            os.fsync(self._sums.writing)

    def _fetch(self, row: int, count: int) -> Tensor:
        x_NTC = self._read(row, count)
        if self._to_gpu is None:
            return x_NTC
        with torch.cuda.stream(self._to_gpu):
            return x_NTC.to(self._to_gpu.device, non_blocking=True)

    def _to_host(self, x: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """`x` in host memory, and what has to happen before it is there."""
        if self._from_gpu is None or not x.is_cuda:
            return x.cpu(), None
        # a copy to pageable memory is several times as slow, and the GPU waits for it
        there = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        self._from_gpu.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._from_gpu):
            there.copy_(x, non_blocking=True)
        x.record_stream(self._from_gpu)  # its memory is not used again before it is copied
        copied = torch.cuda.Event(blocking=True)
        copied.record(self._from_gpu)
        return there, copied

    def _read(self, row: int, count: int) -> Tensor:
        bytes_NB = torch.empty(count, self.row_bytes, dtype=torch.uint8, pin_memory=self.on_gpu)
        raw_NB, sums_N = bytes_NB.numpy(), np.zeros(count, np.uint64)
        _pread(self._sums.reading, sums_N.view(np.uint8).data, row * SUM_BYTES)
        bad = np.flatnonzero(self._each_piece(raw_NB, row, self._file.reading, _pread) != sums_N)
        if bad.size:
            what = f"row {row + int(bad[0])} is not what was written there"
            raise LinearizeError(f"{self.path}: {what}; remove {self.path.parent} and start the stage again")
        return bytes_NB.view(self.dtype).view(count, *self.shape)

    def _write(self, row: int, x: Tensor, copied: torch.cuda.Event | None) -> None:
        if copied is not None:
            copied.synchronize()
        raw_NB = x.contiguous().view(-1).view(torch.uint8).numpy().reshape(-1, self.row_bytes)
        with disk_errors(self.path):
            sums_N = self._each_piece(raw_NB, row, self._file.writing, _pwrite)
            _pwrite(self._sums.writing, sums_N.view(np.uint8).data, row * SUM_BYTES)

    def _each_piece(
        self, raw_NB: np.ndarray, row: int, descriptor: int, do: Callable[[int, memoryview, int], None]
    ) -> np.ndarray:
        """Reads or writes rows from `row` on, in pieces that run at the same time.

        do: `_pread` or `_pwrite`, with the file's `descriptor` for that. Returns each row's checksum [N]: the sum of
        its 64-bit words and of the bytes behind the last of them, plus its row number + 1. The row number keeps a row
        from passing for another, and an unwritten row, which is all zeros, for a written one.
        """

        def piece(n: int, start: int) -> int:
            bytes_P = raw_NB[n, start : start + PIECE]
            do(descriptor, bytes_P.data, (row + n) * self.row_bytes + start)
            words = len(bytes_P) // SUM_BYTES * SUM_BYTES
            return int(bytes_P[:words].view(np.uint64).sum(dtype=np.uint64)) + int(bytes_P[words:].sum(dtype=np.uint64))

        sums = [row + 1 + n for n in range(len(raw_NB))]
        places = [(n, start) for n in range(len(raw_NB)) for start in range(0, self.row_bytes, PIECE)]
        for (n, _), total in zip(places, self._helpers.map(piece, *zip(*places))):
            sums[n] += total
        return np.array([total % (1 << 8 * SUM_BYTES) for total in sums], np.uint64)


class _Opened:
    """A file, created if it does not exist, with one descriptor for reading and one for writing.

    Through a descriptor for both, a network file system may first read what surrounds the written bytes, and then write
    it back over what another host has written there meanwhile.
    """

    def __init__(self, path: Path):
        self.writing = os.open(path, os.O_WRONLY | os.O_CREAT)
        self.reading = os.open(path, os.O_RDONLY)

    def close(self) -> None:
        os.close(self.writing)
        os.close(self.reading)


@functools.cache
def _copying(direction: str) -> torch.cuda.Stream:
    """The stream of copies in one direction, the same for all files: memory freed on one is not reused on another.

    direction: "to" or "from" the GPU. A copy to it must not wait until the layer is done, as one from it has to.
    """
    return torch.cuda.Stream()


def sums_of(path: Path) -> Path:
    """The path of the checksum file that belongs to `path`."""
    return path.with_name(path.name + SUMS)


def _pread(descriptor: int, into: memoryview, offset: int) -> None:
    """Reads from `offset` into `into`, and fills with zeros what lies behind the end of the file."""
    while into:
        if not (got := os.preadv(descriptor, [into], offset)):
            into[:] = bytes(len(into))
            return
        into, offset = into[got:], offset + got


def _pwrite(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
