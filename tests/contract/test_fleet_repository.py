"""The repository of a fleet, over a real S3 service: nodes that share what they store, and collections of it."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.errors import Conflict, DataLoss, NotPermitted, OutOfSpace, UsageError
from snapshotd.repo.fleet.base import segment_key
from snapshotd.store.base import Store
from snapshotd.store.memory import MemoryStore
from snapshotd.store.s3 import S3Store
from tests import long
from tests.faulty_store import Fault, FaultyStore, Script
from tests.fleet_rig import GRACE_S, Kept, NewNode, Node, packs_in, tombstones_in, write
from tests.model.repo_world import Author

HOUR_S = 3600.0


@pytest.fixture
def bucket(s3_bucket: tuple[str, str]) -> Iterator[Store]:
    endpoint, name = s3_bucket
    store = S3Store(name, f"fleet-{os.urandom(6).hex()}", endpoint=endpoint, attempts=2, timeout_s=20)
    yield store
    store.close()


@pytest.fixture
def new_node(tmp_path: Path, bucket: Store) -> Iterator[NewNode]:
    nodes: list[Node] = []

    def make(name: str) -> Node:
        nodes.append(Node(tmp_path, name, bucket))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


def test_each_node_reads_and_builds_upon_what_all_have_stored(new_node: NewNode, bucket: Store) -> None:
    a, b, c = new_node("a"), new_node("b"), new_node("c")
    of_a = write(a, 1, 4)
    a.publish_all(of_a)
    assert {key.split("/")[1] for key in packs_in(bucket)} == {"a"}
    b.merge()
    assert b.reads(of_a)
    before = b.repo.saved
    last = next(reversed(of_a.values()))
    assert b.save(last.files, list(of_a)[-1]).tree == last.tree
    b.repo.flush()
    assert b.repo.saved.objects == before.objects, "another node has it all"
    of_b = write(b, 2, 3, last)
    b.publish_all(of_b)
    c.merge()
    assert c.reads(of_a | of_b)
    a.merge()
    assert a.reads(of_a | of_b)
    assert [record for record, _ in a.repo.records()] == [record for record, _ in c.repo.records()]


def test_merging_again_changes_nothing(new_node: NewNode) -> None:
    a, b = new_node("a"), new_node("b")
    a.publish_all(write(a, 1, 2))
    b.merge()
    before = (list(b.index.objects()), b.index.packs())
    b.merge()
    assert (list(b.index.objects()), b.index.packs()) == before
    assert before[0] == list(a.index.objects())
    assert b.publish_all({}) == 0, "nothing of its own to tell"


def test_what_two_nodes_store_at_once_is_read_by_all(new_node: NewNode) -> None:
    """In either order of merging, though the two have made deltas against different bases."""
    a, b = new_node("a"), new_node("b")
    one, other = random.Random(1).randbytes(20_000), random.Random(1).randbytes(20_000) + b"changed"
    files = ({b"f": one}, {b"f": other})
    first_a = a.save(files[0], "x")
    kept_a = {"x": first_a, "y": a.save(files[1], "y", first_a)}
    first_b = b.save(files[1], "y")
    kept_b = {"y": first_b, "x": b.save(files[0], "x", first_b)}
    a.publish_all(kept_a)
    b.publish_all(kept_b)
    a.merge()
    c = new_node("c")
    c.merge()
    for node in (a, b, c):
        assert node.reads(kept_a)
        assert node.reads(kept_b)
    a.collect_all(kept_a | kept_b, 3 * GRACE_S)
    for node in (b, c):
        node.merge()
    a.collect_all(kept_a | kept_b, 5 * GRACE_S)
    for node in (a, b, c, new_node("d")):
        node.merge()
        assert node.reads(kept_a | kept_b)
        assert list(node.index.objects()) == list(a.index.objects())


def test_a_lost_disk_comes_back_from_the_segments(new_node: NewNode, tmp_path: Path) -> None:
    a = new_node("a")
    kept = write(a, 1, 2)
    a.publish_all(kept)
    a.close()
    shutil.rmtree(tmp_path / "a")
    again = new_node("a")
    more = write(again, 2, 1)
    again.publish_all(more)
    assert again.reads(kept | more)
    b = new_node("b")
    b.merge()
    assert b.reads(kept | more)


def test_a_number_that_an_earlier_life_has_used_is_not_used_again(
    new_node: NewNode, bucket: Store, tmp_path: Path
) -> None:
    """The segment was put, and the catalog never learned of it."""
    a = new_node("a")
    kept = write(a, 1, 1)
    a.publish_all(kept)
    a.close()
    shutil.rmtree(tmp_path / "a")
    again = new_node("a")
    again.peers.said = {}
    more = write(again, 2, 1)
    assert again.publish_all(more) == 2
    b = new_node("b")
    b.merge()
    assert b.reads(kept | more)


def test_another_key_is_refused(bucket: Store, new_node: NewNode, tmp_path: Path) -> None:
    new_node("a")
    with pytest.raises(NotPermitted, match="repo/key"):
        Node(tmp_path, "b", bucket, key=bytes(32))
    with pytest.raises(UsageError, match="name of a node"):
        Node(tmp_path, "b/../c", bucket)


@pytest.mark.parametrize("what", ["forged", "damaged", "missing", "exchanged"])
def test_a_wrong_segment_is_found_before_anything_is_believed(what: str, new_node: NewNode, bucket: Store) -> None:
    a, b = new_node("a"), new_node("b")
    for seed in (1, 2):
        a.publish_all(write(a, seed, 1))
    b.peers.said = {"a": 2}
    key = segment_key("a", 2)
    data = bucket.get(key)
    bucket.delete(key)
    if what == "damaged":
        bucket.put(key, [data[:99], bytes((data[99] ^ 1,)), data[100:]])
    elif what == "forged":
        bucket.put(key, [data[:-32], bytes(32)])
    elif what == "exchanged":
        bucket.put(key, [bucket.get(segment_key("a", 1))])
    with pytest.raises(DataLoss, match="index segment 2 of node a"):
        b.merge()
    assert b.index.last_merged("a")[0] == 1


def test_garbage_goes_in_three_steps(new_node: NewNode, bucket: Store) -> None:
    a, b = new_node("a"), new_node("b")
    of_a, of_b = write(a, 1, 3), write(b, 2, 3)
    a.publish_all(of_a)
    b.publish_all(of_b)
    everything = packs_in(bucket)
    b.collect_all(of_b, 2 * GRACE_S)
    assert set(everything) <= set(packs_in(bucket))
    assert len(tombstones_in(bucket)) >= 3
    a.merge()
    assert a.reads(of_a | of_b), "it can still be read"
    assert not a.repo.contains(next(iter(of_a.values())).tree), "and nothing is built upon it"
    b.collect_all(of_b, 2 * GRACE_S + HOUR_S)
    assert set(everything) <= set(packs_in(bucket)), "the grace is not over"
    b.peers.oldest_pin_s = 1.0
    b.collect_all(of_b, 4 * GRACE_S)
    assert set(everything) <= set(packs_in(bucket)), "a reader has pinned it"
    b.peers.oldest_pin_s = None
    b.collect_all(of_b, 4 * GRACE_S)
    assert not [key for key in packs_in(bucket) if key.startswith("nodes/a/")]
    assert tombstones_in(bucket) == []
    a.merge()
    for node in (a, b, new_node("c")):
        node.merge()
        assert node.reads(of_b)
        assert not node.repo.contains(next(iter(of_a.values())).tree)
        assert len(node.index.packs()) == len(packs_in(bucket))
    again = a.save(next(iter(of_a.values())).files, "again")
    a.publish_all(of_b | {"again": again}, 4 * GRACE_S)
    b.merge()
    assert b.reads({"again": again})


def test_what_a_publication_needs_is_taken_back(new_node: NewNode, bucket: Store) -> None:
    """It was stored before the collection, with an index that did not know of it, and published after."""
    a, b = new_node("a"), new_node("b")
    old = write(a, 1, 2)
    a.publish_all(old)
    b.merge()
    last = next(reversed(old.values()))
    new = {"new": b.save({**last.files, b"more": b"x" * 1000}, "new", last)}
    b.repo.flush()
    a.collect_all({}, 2 * GRACE_S)
    b.publish_all(new, 2 * GRACE_S + HOUR_S)
    for later_s in (2 * GRACE_S + 2 * HOUR_S, 4 * GRACE_S, 6 * GRACE_S):
        a.collect_all(new, later_s)
        for node in (a, b):
            node.merge()
            assert node.reads(new)
    assert tombstones_in(bucket) == []


@pytest.mark.long  # test_what_a_publication_needs_is_taken_back
def test_a_publication_that_comes_too_late_is_archived_again(new_node: NewNode) -> None:
    for gone in (False, True):
        a, b = new_node(f"a{gone}".lower()), new_node(f"b{gone}".lower())
        old = write(a, 1, 2)
        a.publish_all(old)
        b.merge()
        last = next(reversed(old.values()))
        b.save({**last.files, b"more": b"x" * 1000}, "new", last)
        b.repo.flush()
        a.collect_all({}, 2 * GRACE_S)
        if gone:
            a.collect_all({}, 4 * GRACE_S)
        late_s = (5 if gone else 2.9) * GRACE_S
        new = {"new": b.save({**last.files, b"more": b"x" * 1000}, "new")}
        with pytest.raises(Conflict, match="again"):
            b.publish_all(new, late_s)
        new = {"new": b.save({**last.files, b"more": b"x" * 1000}, "new")}
        b.publish_all(new, late_s)
        a.collect_all(new, 6 * GRACE_S)
        a.collect_all(new, 8 * GRACE_S)
        assert a.reads(new)
        c = new_node(f"c{gone}".lower())
        c.merge()
        assert c.reads(new)
        a.collect_all({}, 10 * GRACE_S)
        a.collect_all({}, 12 * GRACE_S)


def test_packs_that_are_about_to_be_published_are_no_garbage(new_node: NewNode) -> None:
    """The collector has never heard of them."""
    a, b = new_node("a"), new_node("b")
    b.publish_all(write(b, 2, 1))
    new = write(b, 3, 2)
    a.collect_all({}, 4 * GRACE_S)
    a.collect_all({}, 6 * GRACE_S)
    b.close()
    b = new_node("b")
    b.publish_all(new, 6 * GRACE_S)
    a.merge()
    assert a.reads(new)


@pytest.mark.long  # test_garbage_goes_in_three_steps
def test_a_reader_of_a_pack_that_is_gone_looks_again(new_node: NewNode, bucket: Store) -> None:
    a, b = new_node("a"), new_node("b")
    kept = write(a, 1, 12)
    a.publish_all(kept)
    b.merge()
    assert a.collect_all(kept, 2 * GRACE_S).packs_rewritten > 5
    a.collect_all(kept, 4 * GRACE_S)
    assert len(packs_in(bucket)) < 12
    assert b.reads(kept), "its index still names the old packs"


def test_nothing_is_half_published(tmp_path: Path, new_node: NewNode, bucket: Store) -> None:
    """The service fails at each request of a publication, before it is done or after; the next publication goes on."""
    for fault in (Fault.ERROR_BEFORE, Fault.ERROR_AFTER, Fault.FULL):
        for call in (1, 2, 3):
            name = f"n{call}{fault.value}"
            faulty = FaultyStore(bucket)
            node, other = Node(tmp_path, name, faulty), new_node(f"o{name}")
            kept = {"s": node.save({b"f": name.encode() * 99}, name)}
            faulty.schedule = Script([("put", call, fault)])
            try:
                node.publish_all(kept)
                assert not faulty.injected
            except OSError:
                node.close()
                node = Node(tmp_path, name, faulty)
                kept = {"s": node.save({b"f": name.encode() * 99}, name)}
            except OutOfSpace:
                kept = {"s": node.save({b"f": name.encode() * 99}, name)}
            node.publish_all(kept)
            other.merge()
            assert other.reads(kept)
            node.close()


@pytest.mark.parametrize("seed", range(long.size(1, 3)))
def test_many_nodes_and_two_collectors(tmp_path: Path, seed: int) -> None:
    """A week of a fleet, at random: what is published and kept is read by every node at any time."""
    rng, bucket = random.Random(seed), MemoryStore()
    nodes = [Node(tmp_path, f"n{number}", bucket) for number in range(4)]
    kept: Kept = {}
    later_s = 0.0
    for step in range(60):
        later_s += rng.choice((0, HOUR_S, 5 * HOUR_S, GRACE_S))
        node = rng.choice(nodes)
        what = rng.random()
        if what < 0.5:
            of = {name: one for name, one in kept.items() if node.repo.contains(one.tree)}
            previous = of[rng.choice(sorted(of))] if of else None
            files = Author(rng, dict(previous.files) if previous else {}, big=False).step()
            new = {f"s{step}": node.save(files, f"s{step}", previous)}
            try:
                node.publish_all(new, later_s)
            except Conflict:
                new = {f"s{step}": node.save(files, f"s{step}")}
                node.publish_all(new, later_s)
            kept |= new
        elif what < 0.65 and kept:
            del kept[rng.choice(sorted(kept))]
        elif what < 0.9:
            node.collect_all(kept, later_s)
        else:
            node.merge()
            assert node.reads(kept)
    for node in nodes:
        node.merge()
        assert node.reads(kept)
    nodes[0].collect_all({}, later_s + 3 * GRACE_S)
    nodes[0].collect_all({}, later_s + 6 * GRACE_S)
    nodes[0].collect_all({}, later_s + 9 * GRACE_S)
    assert packs_in(bucket) == tombstones_in(bucket) == []
    for node in nodes:
        node.merge()
        assert list(node.index.objects()) == []
        node.close()
