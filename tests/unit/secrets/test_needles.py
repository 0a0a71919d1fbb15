"""Searching in pieces finds what one look at the whole finds."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from snapshotd.secrets.needles import Anchors, Beginnings, Needles

WORDS = st.text("ab", min_size=2, max_size=6).map(str.encode)
DATA = st.text("abc", max_size=30).map(str.encode)


@settings(deadline=None)
@given(st.lists(WORDS, min_size=1, max_size=5), DATA, st.integers(0, 30))
def test_the_first_open_beginning(literals: list[bytes], data: bytes, start: int) -> None:
    start = min(start, len(data))
    starts = [
        at
        for at in range(start, len(data))
        if any(len(data) - at < len(word) and word.startswith(data[at:]) for word in literals)
    ]
    assert Beginnings(literals).first(data, start) == min(starts, default=len(data))


@settings(deadline=None)
@given(st.lists(WORDS, min_size=1, max_size=5), DATA)
def test_a_beginning_after_the_wrong_byte_is_none(literals: list[bytes], data: bytes) -> None:
    starts = [
        at
        for at in range(len(data))
        if any(len(data) - at < len(word) and word.startswith(data[at:]) for word in literals)
        and not data[:at].endswith((b"a", b"c"))
    ]
    assert Beginnings(literals, dict.fromkeys(literals, b"ac")).first(data, 0) == min(starts, default=len(data))


def leftmost_longest(needles: list[bytes], data: bytes) -> list[tuple[int, int]]:
    found, at = [], 0
    while at < len(data):
        longest = max((len(needle) for needle in needles if data.startswith(needle, at)), default=0)
        if longest:
            found.append((at, at + longest))
        at += longest or 1
    return found


@settings(deadline=None)
@given(st.lists(WORDS, max_size=5), st.lists(DATA, max_size=6))
def test_needles_in_a_stream(needles: list[bytes], pieces: list[bytes]) -> None:
    search = Needles(needles)
    data, at, found = b"", 0, []
    for piece in pieces:
        data += piece
        spans, at = search.find(data, at, final=False)
        found += spans
    spans, at = search.find(data, at, final=True)
    assert at == len(data)
    assert found + spans == leftmost_longest(needles, data)


@settings(deadline=None)
@given(st.lists(WORDS, min_size=1, max_size=6, unique=True), DATA, st.integers(0, 30))
def test_anchors_with_all_overlaps(literals: list[bytes], data: bytes, start: int) -> None:
    start = min(start, len(data))
    found = [
        (at, at + len(literal), index)
        for at in range(start, len(data))
        for index, literal in sorted(enumerate(literals), key=lambda item: -len(item[1]))
        if data.startswith(literal, at)
    ]
    assert Anchors(literals).find(data, start) == found
