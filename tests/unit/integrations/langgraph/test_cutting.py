"""Where values are cut: between the elements of a list, and a list that grew is cut as if it had been cut afresh."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import ormsgpack
import pytest

from snapshotd.integrations.langgraph.cutting import Pieces, cut, cut_rest, elements, head_of
from tests import long


def value(draw: random.Random, depth: int = 0) -> Any:
    """Anything that msgpack has, of any length class."""
    kind = draw.randrange(9 if depth < 3 else 7)
    size = draw.choice([0, 1, 20, 31, 32, 200, 255, 256, 300, 70000] if depth == 0 else [0, 3, 15, 16, 40])
    if kind == 0:
        return "x" * size
    if kind == 1:
        return draw.randbytes(size)
    if kind == 2:
        return draw.choice([0, 1, 127, 128, 255, 256, 65535, 65536, 2**32, 2**63, -1, -32, -33, -129, -40000, -(2**40)])
    if kind == 3:
        return draw.choice([None, True, False, 1.5])
    if kind in (4, 5, 6):
        return ormsgpack.Ext(draw.randrange(8), draw.randbytes(draw.choice([1, 2, 4, 8, 16, 17, 300, 66000, 200000])))
    if kind == 7:
        return [value(draw, depth + 1) for _ in range(size % 50)]
    return {f"k{number}": value(draw, depth + 1) for number in range(size % 50)}


@pytest.mark.parametrize("seed", long.seeds(3, 500))
def test_a_list_that_grew_is_cut_as_if_afresh(seed: int) -> None:
    draw = random.Random(seed)
    items: list[Any] = []
    before: Pieces | None = None
    for _ in range(12):
        items += [value(draw) for _ in range(draw.choice([0, 1, 1, 2, 20]))]
        data = ormsgpack.packb(items)
        pieces = cut("msgpack", data)
        places = list(pieces.places(0))
        assert data[: pieces.head] + b"".join(data[begin:end] for begin, end in places) == data
        found = elements(data)
        if found is not None:
            begins = (found[0], *found[1])
            assert [data[begin:end] for begin, end in pairwise(begins)] == list(map(ormsgpack.packb, items))
        if before is not None and before.head and before.settled and pieces.head:
            assert cut_rest(data, head_of(data), before.ends[: before.settled]) == pieces
        before = pieces


def test_other_bytes_are_no_list() -> None:
    for data in (b"", b"\x93", b"\x93\xc7", b"\x92\x01\x02\x03", b"\xdc\xff\xff", b"\x80", b"text", b"\x91\xd9"):
        assert elements(data) is None or data == b"\x92\x01\x02"
        assert [end for _, end in cut("msgpack", data).places(0)][-1:] == [len(data)]
