"""The data of a regular file of a layer: a map of its extents, and a reader of these alone.

Sources: lseek(2) for SEEK_DATA and SEEK_HOLE. A hole, an unwritten extent and the space beyond the end all read as
zeros, so it is safe to take a hole for data and never the other way round.
"""

from __future__ import annotations

import errno
import heapq
import os
from collections.abc import Callable, Iterator, Sequence

from snapshotd.errors import DataLoss

MOST_EXTENTS = 4096
"""Extents kept of one file. Beyond that number, extents are joined over the smallest gaps, whose zeros are then stored
as data."""

Extents = tuple[tuple[int, int], ...]
"""(offset, length) of data in ascending order, none empty, none touching another."""


def find_extents(fd: int, size: int) -> tuple[Extents | None, int]:
    """The extents of the data of a file of `size` bytes (None: everywhere), and the number of bytes of holes that count
    as data for lack of extents.

    At most `MOST_EXTENTS`. Cost: two lseek per extent on disk, for any size; memory is bounded. Raises OSError (EIO:
    the file system contradicts itself).
    """
    if size == 0 or os.lseek(fd, 0, os.SEEK_HOLE) >= size:
        return None, 0
    first, last, zeros = -1, 0, 0

    def gaps() -> Iterator[tuple[int, int, int]]:
        """(length, end of the data before, start of the data after) of each hole between data."""
        nonlocal first, last, zeros
        for start, end in _walk(fd, size):
            if first < 0:
                first = start
            else:
                zeros += start - last
                yield start - last, last, start
            last = end

    # The largest gaps that were seen so far contain those that are largest in the end: one pass, and memory for the
    # kept ones.
    kept = sorted(gap[1:] for gap in heapq.nlargest(MOST_EXTENTS - 1, gaps()))
    if first < 0:
        return (), 0
    starts = [first, *(after for _, after in kept)]
    ends = [*(before for before, _ in kept), last]
    zeros -= sum(after - before for before, after in kept)
    return tuple((start, end - start) for start, end in zip(starts, ends, strict=True)), zeros


def _walk(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """(start, end) of each piece of data, within `size`."""
    at = 0
    while at < size:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as exc:
            if exc.errno == errno.ENXIO:  # only a hole is left
                return
            raise
        if start >= size:
            return
        end = min(os.lseek(fd, start, os.SEEK_HOLE), size)
        if start < at or end <= start:
            raise OSError(errno.EIO, "SEEK_DATA and SEEK_HOLE contradict each other")
        yield start, end
        at = end


class DataReader:
    """`read(n)` over the given extents of an open file, as `repo.base.Reader`; tells `progress` how much each call has
    read.

    Raises DataLoss when the file ends before its extents do, OSError.
    """

    def __init__(
        self, fd: int, name: bytes, extents: Sequence[tuple[int, int]], progress: Callable[[int], object] | None
    ) -> None:
        self._fd = fd
        self._name = name
        self._left = iter(extents)
        self._progress = progress
        self._at = self._end = 0

    def __call__(self, most: int) -> bytes:
        while self._at >= self._end:
            extent = next(self._left, None)
            if extent is None:
                return b""
            self._at, self._end = extent[0], extent[0] + extent[1]
        data = os.pread(self._fd, min(most, self._end - self._at), self._at)
        if not data:
            raise DataLoss(
                f"file {os.fsdecode(self._name)!a} of a sealed layer is shorter on disk than recorded; check the disk"
            )
        self._at += len(data)
        if self._progress is not None:
            self._progress(len(data))
        return data

    def read_all(self) -> bytes:
        """Everything at once, for a file that is known to be small."""
        pieces = []
        while piece := self(1 << 30):
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)
