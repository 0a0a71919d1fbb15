"""The data of a regular file of a layer: a map of its extents, and a reader of these alone.

Sources: lseek(2) for SEEK_DATA and SEEK_HOLE. A hole, an unwritten extent and the space beyond the end all read as
zeros, so it is safe to take a hole for data and never the other way round.
"""

from __future__ import annotations

import errno
import heapq
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence

from snapshotd.errors import DataLoss

_PIECE_BYTES, _BLOCK_BYTES = 1 << 20, 4096
_ZEROS = bytes(_PIECE_BYTES)
MOST_EXTENTS = 4096
"""Extents kept of one file. Beyond that number, extents are joined over the smallest gaps, whose zeros are then stored
as data."""

Extents = tuple[tuple[int, int], ...]
"""(offset, length) of data in ascending order, none empty, none touching another."""


def find_extents(fd: int, size: int, holes: Extents = ()) -> tuple[Extents | None, int]:
    """The extents of the data of a file of `size` bytes (None: everywhere), and the number of bytes of holes that count
    as data for lack of extents.

    `holes`: those that the file had in the parent tree. Zeros in them are holes still: the kernel copies a file up as a
    whole from a file system that cannot tell its holes, as FUSE.

    At most `MOST_EXTENTS`. Cost: two lseek per extent on disk, for any size, and reading the data in `holes`; memory is
    bounded. Raises OSError (EIO: the file system contradicts itself).
    """
    if size == 0 or (not holes and os.lseek(fd, 0, os.SEEK_HOLE) >= size):
        return None, 0
    first, last, zeros = -1, 0, 0

    def gaps() -> Iterator[tuple[int, int, int]]:
        """(length, end of the data before, start of the data after) of each hole between data."""
        nonlocal first, last, zeros
        for start, end in _join_touching(_without_zeros(fd, _walk(fd, size), holes)):
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
    if starts == [0] and ends == [size]:
        return None, zeros
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


def holes_of(extents: Extents | None, size: int) -> Extents:
    """(offset, length) of what lies between the extents of a file."""
    if extents is None:
        return ()
    ends = [0, *(start + length for start, length in extents)]
    starts = [*(start for start, _ in extents), size]
    return tuple((end, start - end) for end, start in zip(ends, starts, strict=True) if start > end)


def _without_zeros(fd: int, pieces: Iterator[tuple[int, int]], holes: Extents) -> Iterator[tuple[int, int]]:
    """The pieces (start, end), without blocks of zeros that lie in one of the holes."""
    for start, end in pieces:
        at, next_hole = start, max(bisect_right(holes, start, key=lambda one: one[0]) - 1, 0)
        while next_hole < len(holes) and holes[next_hole][0] < end:
            hole, length = holes[next_hole]
            next_hole += 1
            if hole + length <= at:
                continue
            if hole > at:
                yield at, hole
                at = hole
            stop = min(hole + length, end)
            while at < stop:
                upto = min(stop, at - at % _PIECE_BYTES + _PIECE_BYTES)
                yield from _data_in(fd, at, upto)
                at = upto
        if at < end:
            yield at, end


def _data_in(fd: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """The blocks that are not zeros. A file that has become shorter counts as data: its reader reports that."""
    data = os.pread(fd, end - start, start)
    if len(data) == end - start and data == _ZEROS[: len(data)]:
        return
    for at in range(start - start % _BLOCK_BYTES, end, _BLOCK_BYTES):
        first, last = max(at, start), min(at + _BLOCK_BYTES, end)
        block = data[first - start : last - start]
        if len(block) < last - first or block != _ZEROS[: len(block)]:
            yield first, last


def _join_touching(pieces: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The pieces, with those that touch joined into one."""
    begun: tuple[int, int] | None = None
    for start, end in pieces:
        if begun is not None and start == begun[1]:
            begun = begun[0], end
            continue
        if begun is not None:
            yield begun
        begun = start, end
    if begun is not None:
        yield begun


class DataReader:
    """`read(n)` over the given extents of an open file, as `repo.base.Reader`. Raises DataLoss when the file ends before its
    extents do, OSError."""

    def __init__(self, fd: int, name: bytes, extents: Sequence[tuple[int, int]]) -> None:
        self._fd = fd
        self._name = name
        self._left = iter(extents)
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
        return data

    def read_all(self) -> bytes:
        """Everything at once, for a file that is known to be small."""
        pieces = []
        while piece := self(1 << 30):
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)
