"""Searching bytes for many literals at once, in pieces of a stream. Only this module uses ahocorasick_rs.

Measured on 2 cores: 30 literals in Python source text at 570 MB/s (overlapping) and 2,000 MB/s (not overlapping), where one alternation of
`re` reaches 57 MB/s and a `bytes.find` for each literal 300 MB/s divided by every further ten.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ahocorasick_rs import BytesAhoCorasick, MatchKind

_HEAD_BYTES = 16
"""So many bytes of a literal are in the automaton, the rest is compared: memory grows with the number of literals, not their length."""


class Beginnings:
    """Finds where, at the end of the data, a literal may have begun that only more data would complete."""

    def __init__(self, literals: Collection[bytes], not_after: Mapping[bytes, bytes] | None = None) -> None:
        """`not_after`: literal to the bytes that it never directly follows."""
        self._not_after = not_after or {}
        self._by_byte: dict[int, list[bytes]] = {}
        for literal in literals:
            for byte in set(literal[:-1]):
                self._by_byte.setdefault(byte, []).append(literal)

    def first(self, data: bytes, start: int) -> int:
        """The smallest i >= start so that data[i:] is a proper beginning of a literal; the length of the data if there is none."""
        size = len(data)
        best = size
        if start >= size:
            return size
        for literal in self._by_byte.get(data[-1], ()):
            at = max(start, size - len(literal) + 1)
            forbidden = self._not_after.get(literal, b"")
            while (at := data.find(literal[:1], at, best)) >= 0:
                if literal.startswith(data[at:]) and not (at and data[at - 1] in forbidden):
                    best = at
                    break
                at += 1
        return best


class Needles:
    """A fixed set of byte strings, each found wherever it stands: leftmost first, then longest, without overlaps."""

    def __init__(self, needles: Collection[bytes]) -> None:
        self._by_head: list[list[bytes]] = []
        heads: dict[bytes, list[bytes]] = {}
        for needle in sorted(set(needles), key=len, reverse=True):
            heads.setdefault(needle[:_HEAD_BYTES], []).append(needle)
        self._heads = list(heads)
        self._by_head = list(heads.values())
        self._automaton = BytesAhoCorasick(self._heads) if heads else None
        self._beginnings = Beginnings(needles)

    def find(self, data: bytes, start: int, final: bool) -> tuple[list[tuple[int, int]], int]:
        """The spans from `start` on that no further data can change, and the position from which on everything is still open.

        A search that goes on there, with more data, finds what one search in the whole would have found. With `final` nothing is open.
        """
        if self._automaton is None:
            return [], len(data)
        open_from = len(data) if final else self._beginnings.first(data, start)
        spans: list[tuple[int, int]] = []
        hits = self._automaton.find_matches_as_indexes(memoryview(data)[start:], overlapping=True)
        # A longer head belongs to longer needles: a head is shorter than the rest only if it is a whole needle.
        for begin, _, head in sorted((start + begin, begin - end, head) for head, begin, end in hits):
            if begin < start:
                continue
            if begin >= open_from:
                break
            needle = next((needle for needle in self._by_head[head] if data.startswith(needle, begin)), None)
            if needle is not None:
                start = begin + len(needle)
                spans.append((begin, start))
                if open_from < start:
                    open_from = len(data) if final else self._beginnings.first(data, start)
        return spans, max(start, open_from)


class Anchors:
    """Literals of which none begins inside another one but at its start: where they stand does not depend on where the search began."""

    def __init__(self, literals: Sequence[bytes]) -> None:
        self._automaton = BytesAhoCorasick(literals, matchkind=MatchKind.LeftmostLongest)

    def find(self, data: bytes, start: int) -> list[tuple[int, int, int]]:
        """(index of the literal, begin, end) of each, in order, of those that begin at the same place the longest."""
        hits = self._automaton.find_matches_as_indexes(memoryview(data)[start:])
        return [(index, begin + start, end + start) for index, begin, end in hits] if start else hits
