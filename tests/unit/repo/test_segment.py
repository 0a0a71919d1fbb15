"""The bytes of index segments: what is encoded is decoded, and nothing else is believed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapshotd.errors import DataLoss, VersionMismatch
from snapshotd.repo.base import ObjectKind
from snapshotd.repo.format.index import IndexEntry, PackRow
from snapshotd.repo.format.segment import FIRST, Condemned, Sealer, Segment, seal_of
from tests.model.repo_world import KEY

SEALER = Sealer(KEY)
IDS, PACKS, NUMBERS = st.binary(min_size=32, max_size=32), st.binary(min_size=16, max_size=16), st.integers(0, 1 << 60)
ENTRIES = st.builds(
    IndexEntry, IDS, st.sampled_from(ObjectKind), PACKS, NUMBERS, NUMBERS, NUMBERS, st.none() | IDS, st.just(0)
)
SEGMENTS = st.builds(
    Segment,
    st.from_regex(r"[a-z0-9-]{1,63}", fullmatch=True),
    NUMBERS,
    IDS,
    st.booleans(),
    st.lists(st.tuples(st.from_regex(r"[a-z0-9-]{1,63}", fullmatch=True), NUMBERS), max_size=3),
    st.lists(st.builds(PackRow, PACKS, NUMBERS, NUMBERS), max_size=3),
    st.lists(ENTRIES, max_size=5),
    st.lists(st.builds(Condemned, IDS, PACKS, NUMBERS), max_size=3),
    st.lists(st.tuples(IDS, PACKS), max_size=3),
    st.lists(st.tuples(PACKS, NUMBERS), max_size=3),
    st.lists(PACKS, max_size=3),
)


@settings(max_examples=60, deadline=None)
@given(segment=SEGMENTS)
def test_what_is_encoded_is_decoded(segment: Segment) -> None:
    data = SEALER.encode(segment)
    assert SEALER.decode(data, segment.node, segment.number, segment.before) == segment
    assert SEALER.encode(segment) == data


def test_nothing_else_is_believed() -> None:
    one = Segment("a", 1, FIRST, packs=[PackRow(bytes(16), 100, 1)])
    data = SEALER.encode(one)
    for at in range(len(data)):
        bad = data[:at] + bytes((data[at] ^ 1 << random.Random(at).randrange(8),)) + data[at + 1 :]
        with pytest.raises((DataLoss, VersionMismatch), match="segment 1 of node a"):
            SEALER.decode(bad, "a", 1, FIRST)
    for cut in range(len(data)):
        with pytest.raises(DataLoss):
            SEALER.decode(data[:cut], "a", 1, FIRST)
    for node, number, before in (("b", 1, FIRST), ("a", 2, FIRST), ("a", 1, seal_of(data))):
        with pytest.raises(DataLoss, match="exchanged"):
            SEALER.decode(data, node, number, before)
    with pytest.raises(DataLoss, match="not made with the key"):
        Sealer(bytes(32)).decode(data, "a", 1, FIRST)


def test_the_bytes_are_those_of_the_page() -> None:
    """Golden: old segments stay readable."""
    entry = IndexEntry(b"i" * 32, ObjectKind.CHUNK, b"p" * 16, 26, 300, 900, b"b" * 32, 7)
    one = Segment("node-1", 2, b"s" * 32, False, [("b", 3)], [PackRow(b"p" * 16, 339, 1)], [entry])
    assert SEALER.encode(one)[:-32].hex() == (
        "736e61707365676d01000006"
        + b"node-1".hex()
        + "0200000000000000"
        + "73" * 32
        + "01"
        + "01"
        + "62"
        + "0300000000000000"
        + "01"
        + "70" * 16
        + "01"
        + "00"
        + "d302"
        + "01"
        + "01"
        + "69" * 32
        + "81"
        + "00"
        + "1a"
        + "ac02"
        + "8407"
        + "62" * 32
        + "00" * 4
    )
