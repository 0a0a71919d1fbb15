"""Where forks go, by what nodes say of themselves."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshotd.errors import Conflict, LimitExceeded
from snapshotd.fleet.base import NodeID
from snapshotd.fleet.places import (
    LEAST_BLOCK,
    ForkBlock,
    ForkNeed,
    NodeRoom,
    Roster,
    capacity,
    decode_room,
    encode_room,
    score,
)

NODE = NodeRoom(
    NodeID("n"), "x86_64", frozenset({"overlay", "fuse"}), cpus=8, free_bytes=100, starting_most=16, lease_ns=1
)
NEED = ForkNeed(10, architecture="x86_64", abilities=frozenset({"overlay"}))


def nodes(count: int, **changes: object) -> list[NodeRoom]:
    return [replace(NODE, node=NodeID(f"n{number}"), **changes) for number in range(count)]  # type: ignore[arg-type]


def placed(rooms: list[NodeRoom], need: ForkNeed, count: int, seed: int = 1) -> list[ForkBlock]:
    return Roster(rooms).place(need, count, lambda _: "", random.Random(seed))


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({}, 10),
        ({"lease_ns": 0}, 0),
        ({"draining": True}, 0),
        ({"architecture": "aarch64"}, 0),
        ({"abilities": frozenset({"fuse"})}, 0),
        ({"free_bytes": 9}, 0),
        ({"free_bytes": -5}, 0),
        ({"starting": 9}, 7),
        ({"starting": 17}, 0),
    ],
)
def test_capacity(changes: dict[str, object], most: int) -> None:
    assert capacity(replace(NODE, **changes), NEED) == most  # type: ignore[arg-type]


def test_the_home_node_is_filled_before_others() -> None:
    need = replace(NEED, home=NodeID("n7"))
    first, *others = placed(nodes(20), need, 26)
    assert first == ForkBlock(NodeID("n7"), 10)
    assert [block.count for block in others] == [8, 8], "and none of the rest is a small block"
    assert "n7" not in {block.node for block in others}


def test_what_is_not_published_stays_at_home() -> None:
    need = replace(NEED, home=NodeID("n7"), published=False)
    assert placed(nodes(20), need, 10) == [ForkBlock(NodeID("n7"), 10)]
    with pytest.raises(LimitExceeded, match="on node n7, which alone can read the snapshot yet for 1 more fork"):
        placed(nodes(20), need, 11)


def test_a_warm_node_is_better_than_an_idle_one_and_an_overloaded_one_is_not() -> None:
    warm = replace(NODE, warm=frozenset({"base"}), promised_cpus=4)
    need = replace(NEED, base="base")
    assert score(warm, need) < score(NODE, need)
    assert score(replace(warm, promised_cpus=9), need) > score(NODE, need)


def test_a_room_that_another_took_is_not_asked_for_again() -> None:
    asked: list[NodeID] = []

    def reserve(block: ForkBlock) -> str:
        asked.append(block.node)
        if block.node != "n3":
            raise Conflict("taken")
        return "id"

    assert Roster(nodes(4)).place(NEED, 8, reserve, random.Random(1)) == [ForkBlock(NodeID("n3"), 8, "id")]
    assert sorted(asked) == sorted(set(asked))


def test_small_rooms_are_taken_where_there_is_no_other() -> None:
    blocks = placed(nodes(5, free_bytes=20), NEED, 10)
    assert sorted((block.node, block.count) for block in blocks) == [(f"n{number}", 2) for number in range(5)]
    with pytest.raises(LimitExceeded, match="in the fleet for 1 more fork"):
        placed(nodes(5, free_bytes=20), NEED, 11)
    with pytest.raises(LimitExceeded):
        placed([], NEED, 1)


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 20)), min_size=1, max_size=30),
    st.integers(1, 80),
    st.integers(0, 40),
    st.integers(0, 1000),
)
def test_no_node_gets_more_than_it_has_and_nothing_fits_that_is_refused(
    rooms: list[tuple[int, int]], count: int, home: int, seed: int
) -> None:
    made = [
        replace(NODE, node=NodeID(f"n{number}"), free_bytes=free, starting=starting)
        for number, (free, starting) in enumerate(rooms)
    ]
    need = replace(NEED, home=NodeID(f"n{home}"))
    most = {room.node: capacity(room, need) for room in made}
    try:
        blocks = placed(made, need, count, seed)
    except LimitExceeded:
        assert sum(most.values()) < count
        return
    got = {node: sum(block.count for block in blocks if block.node == node) for node in most}
    assert sum(got.values()) == count
    assert all(got[node] <= most[node] for node in most)
    if most.get(NodeID(f"n{home}"), 0):
        assert got[NodeID(f"n{home}")] == min(count, most[NodeID(f"n{home}")])
    if all(room >= 2 * LEAST_BLOCK for room in most.values()):
        assert all(block.count >= min(LEAST_BLOCK, count) for block in blocks if block.node != f"n{home}")


def test_what_a_node_says_is_read_as_it_was() -> None:
    said = encode_room(replace(NODE, warm=frozenset({"b", "a"}), unpublished=3))
    back = decode_room(said, "n", 1, False, 100, 0, 16)
    assert back == replace(NODE, warm=frozenset({"b", "a"}), unpublished=3)
    assert decode_room('{"later": 1}', "n", 1, True, 1, 2, 3).abilities == frozenset()


@pytest.mark.parametrize(
    "said",
    [
        "no JSON",
        "[" * 100_000,
        "[]",
        "null",
        '{"abilities": 5, "warm": [1], "architecture": ["x"]}',
        '{"cpus": "many", "promised_cpus": null, "unpublished": "<b>"}',
        '{"cpus": 0, "promised_cpus": -1, "unpublished": -1}',
        '{"cpus": 1e400, "promised_cpus": NaN, "unpublished": 1.5}',
        '{"address": "javascript:alert(1)"}',
        '{"address": "https://north:7676\\u001b[31m"}',
        '{"address": ["https://north:7676"]}',
    ],
)
def test_a_node_that_says_what_cannot_be_has_said_nothing(said: str) -> None:
    """One machine must not stop the others from looking at the fleet, nor write on somebody's terminal."""
    assert decode_room(said, "n", 1, False, 100, 0, 16) == decode_room("{}", "n", 1, False, 100, 0, 16)
