"""Where serialised values are cut into pieces, so that what two of them share is the same piece.

A msgpack array (a list of messages) is cut between its elements: a list that grew has the pieces of the list before and
new ones. Its header, which holds the number of elements, is no part of any piece. Everything else, and a long element,
is cut where its content says so (FastCDC), so that an insertion moves no cut but its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pyfastcdc import FastCDC

_LEAST_BYTES = 256
"""Elements are put together up to this size, from the first on: a piece costs 30 bytes beside its own."""
_FEW_BYTES = 64
"""Below this average of its elements a list is cut as if it were none: to look for its elements would take longer than
to serialise it."""
_LONG_BYTES = 64 << 10
"""Longer pieces are cut by content."""
_AVERAGE_BYTES = 16 << 10

_FIXED = {0xC0: 1, 0xC1: 1, 0xC2: 1, 0xC3: 1, 0xCA: 5, 0xCB: 9, 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9}
_FIXED |= {0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9, 0xD4: 3, 0xD5: 4, 0xD6: 6, 0xD7: 10, 0xD8: 18}
"""First byte of an item to its whole length (https://github.com/msgpack/msgpack/blob/master/spec.md)."""
_SIZED = {0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1)}
_SIZED |= {0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)}
"""First byte to the bytes of its length, and the bytes between them and what they count."""
EXTENSIONS = frozenset((*range(0xC7, 0xCA), *range(0xD4, 0xD9)))
"""First bytes of a value of a class."""
_HOLDERS = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
"""First byte to the bytes of its count, and the items for each."""


class Pieces(NamedTuple):
    """The ends of a value's pieces, counted from behind its head."""

    head: int
    """The length of a head that is no piece."""
    ends: list[int]
    settled: int
    """Pieces at the beginning that stay the same, whatever elements are added."""

    def places(self, first: int) -> Iterator[tuple[int, int]]:
        """Where the pieces from number `first` on begin and end in the value."""
        begin = self.head + (self.ends[first - 1] if first else 0)
        for end in self.ends[first:]:
            yield begin, self.head + end
            begin = self.head + end


def cut(kind: str, data: bytes) -> Pieces:
    """The pieces of a value that a serialiser calls `kind`."""
    found = elements(data, _FEW_BYTES) if kind == "msgpack" else None
    return (
        Pieces(0, *_group(data, 0, 0, [len(data)]))
        if found is None
        else Pieces(found[0], *_group(data, found[0], 0, found[1]))
    )


def cut_rest(data: bytes, head: int, ends: Sequence[int]) -> Pieces:
    """The pieces of an array whose first pieces are known by their `ends`; the last known one ends with an element."""
    at, found = head + (ends[-1] if ends else 0), list[int]()
    while at < len(data):
        at = _skip(data, at)
        found.append(at)
    more, settled = _group(data, head, ends[-1] if ends else 0, found)
    return Pieces(head, [*ends, *more], len(ends) + settled)


def head_of(data: bytes) -> int:
    """The length of the header of an array; 0 for anything else."""
    first = data[0] if data else 0
    return 1 if 0x90 <= first < 0xA0 else {0xDC: 3, 0xDD: 5}.get(first, 0)


def _group(data: bytes, head: int, at: int, items: list[int]) -> tuple[list[int], int]:
    """(ends, settled) of the pieces that begin at `at` behind the head. `items`: the ends of the items to group."""
    ends, settled, begin = list[int](), 0, head + at
    for end in items:
        if end - begin >= _LEAST_BYTES or end == len(data):
            settled = len(ends)
            if end - begin > _LONG_BYTES:
                ends += [piece - head for piece in _by_content(data, begin, end)]
            else:
                ends.append(end - head)
            begin = end
    return ends, settled


def _by_content(data: bytes, begin: int, end: int) -> Iterator[int]:
    cutter = FastCDC(_AVERAGE_BYTES, min_size=_AVERAGE_BYTES // 4, max_size=_LONG_BYTES)
    for chunk in cutter.cut_buf(memoryview(data)[begin:end]):
        begin += chunk.length
        yield begin


def elements(data: bytes, average: int = 0) -> tuple[int, list[int]] | None:
    """(length of the header, end of each element) of an array; None for anything else, and if its elements have fewer
    than `average` bytes on average."""
    at = head_of(data)
    if not at:
        return None
    count = data[0] & 15 if at == 1 else int.from_bytes(data[1:at], "big")
    if len(data) < count * average or count < 1:
        return None
    begin, ends = at, []
    try:
        for _ in range(count):
            at = _skip(data, at)
            ends.append(at)
    except (IndexError, KeyError):  # another serialiser that calls its own format so
        return None
    return (begin, ends) if at == len(data) else None


def run_of_extensions(data: bytes) -> int:
    """The number of items, if there is nothing but whole extensions; else 0."""
    at = count = 0
    try:
        while at < len(data):
            if data[at] not in EXTENSIONS:
                return 0
            at = _skip(data, at)
            count += 1
    except IndexError:
        return 0
    return count if at == len(data) else 0


def _skip(data: bytes, at: int) -> int:
    """The end of the item that begins at `at`."""
    left = 1
    while left:
        left -= 1
        first = data[at]
        if first in _SIZED:
            size, more = _SIZED[first]
            at += 1 + size
            at += more + int.from_bytes(data[at - size : at], "big")
        elif first < 0x80 or first >= 0xE0:
            at += 1
        elif first >= 0xC0:
            if first in _FIXED:
                at += _FIXED[first]
            else:
                size, each = _HOLDERS[first]
                at += 1 + size
                left += each * int.from_bytes(data[at - size : at], "big")
        elif first >= 0xA0:
            at += 1 + (first & 31)
        else:
            left += (first & 15) * (1 if first >= 0x90 else 2)
            at += 1
    return at
