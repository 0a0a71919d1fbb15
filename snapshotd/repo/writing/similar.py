"""Candidates for the base of a new file's delta: some files of the same sort that were saved lately, kept in memory by
the writer."""

from __future__ import annotations

from typing import NamedTuple

MAX_BYTES = 128 << 10
"""Larger files are neither kept nor compared with others: the part that they share with another file is small beside
their size."""
_MIN_BYTES = 256
_LARGEST, _LATEST, _SORTS = 4, 4, 16
_MAX_AGE = 200


class Similar(NamedTuple):
    """A file that was saved."""

    id: bytes
    data: bytes
    number: int


class Recent:
    """For each sort (the end of the name) the largest of the last 200, four at most: at most 6 MiB. Not thread-safe.

    The largest, because they have most to offer: against the four largest new sources become as small as against the 24
    latest, in a sixth of the time (a tenth smaller than alone).
    """

    def __init__(self) -> None:
        self._sorts: dict[bytes, list[Similar]] = {}
        self._number = 0

    def clear(self) -> None:
        self._sorts.clear()

    def get(self, sort: bytes, size_bytes: int) -> list[Similar]:
        """The files that a file of this size may be compared with."""
        return self._sorts.get(sort, []) if _MIN_BYTES <= size_bytes <= MAX_BYTES else []

    def add(self, sort: bytes, raw: bytes, data: bytes) -> None:
        """Add a file that was saved, in full or as a delta against another of its sort."""
        if not _MIN_BYTES <= len(data) <= MAX_BYTES:
            return
        self._number += 1
        kept = [one for one in self._sorts.pop(sort, []) if one.number > self._number - _MAX_AGE]
        kept.append(Similar(raw, data, self._number))
        kept.sort(key=lambda one: len(one.data), reverse=True)
        latest = sorted(kept, key=lambda one: one.number)[-_LATEST:]
        self._sorts[sort] = [
            one for place, one in enumerate(kept) if place < _LARGEST or one in latest
        ]  # the last in the table
        if len(self._sorts) > _SORTS:
            del self._sorts[next(iter(self._sorts))]


def sort_of(name: bytes) -> bytes:
    """Files whose names end alike are of one sort."""
    return name.rpartition(b".")[2][-16:] if b"." in name else b""
