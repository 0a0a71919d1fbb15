"""What the first cold start of a tree read is fetched ahead by the next ones."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from snapshotd.repo.base import Roots, Tree, TreeEntry
from snapshotd.repo.fleet import reads
from snapshotd.repo.fleet.blocks import BLOCK_BYTES, DiskBlocks
from snapshotd.repo.fleet.cached import CachedStore
from snapshotd.repo.fleet.maintenance import FleetMaintenance
from snapshotd.repo.fleet.reading import open_reader
from snapshotd.repo.fleet.reads import BucketOrders, order_key
from snapshotd.repo.reading.reader import PackReader
from snapshotd.store.memory import MemoryStore
from snapshotd.types import BlobID, Kind, TreeID
from tests.fleet_rig import BucketPeers

KEY = bytes(range(32))
BELOW = TreeID("b" * 64)
DEADLINE_S = 60.0
FILE_BYTES = 40_000


class Bucket(MemoryStore):
    """Notes the ranges that are asked for; when it is `away` it has no packs. `gate` holds answers back."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, int, int | None]] = []
        self.away = False
        self.gate = threading.Event()
        self.gate.set()

    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        self.asked.append((key, offset, length))
        if "/packs/" in key:
            if self.away:
                raise OSError("the bucket is away")
            assert self.gate.wait(DEADLINE_S)
        return super().get(key, offset, length)


class Stored:
    """A fleet's bucket with a tree of 200 files, a large one, and one that is a delta of another."""

    def __init__(self, directory: Path) -> None:
        self.bucket, self.directory = Bucket(), directory
        rng = random.Random(1)
        directory.mkdir()
        self.maintenance = FleetMaintenance(self.bucket, "one", BucketPeers(self.bucket), self.index, KEY)
        writer = self.maintenance.writer()
        self.data = [rng.randbytes(FILE_BYTES) for _ in range(200)]
        self.data.append(rng.randbytes(6_000_000))
        self.files = [writer.save_bytes(data) for data in self.data]
        self.data.append(self.data[3][:-10] + b"0123456789")
        self.files.append(writer.save_bytes(self.data[-1], previous=self.files[3]))
        self.tree = writer.save_tree(tree_of(self.files))
        self.publish(self.tree)

    def pack_requests(self) -> int:
        return sum("/packs/" in key for key, _, _ in self.bucket.asked)

    @property
    def index(self) -> Path:
        return self.directory / "index.db"

    def publish(self, tree: TreeID) -> None:
        self.maintenance.publish(Roots({tree: "it"}, {}, {}), now=time.time())

    @contextmanager
    def node(self, name: str) -> Iterator[tuple[PackReader, BucketOrders]]:
        """A node with an empty disk. It reads the first one's index, which merging makes equal."""
        blocks = DiskBlocks(self.directory / name, KEY, 1 << 30)
        cached = CachedStore(self.bucket, blocks)
        reader = open_reader(cached, "one", self.index, KEY)
        try:
            yield reader, BucketOrders(reader, cached, KEY, quiet_s=0.05)
        finally:
            reader.close()
            blocks.close()

    def read(self, orders: BucketOrders, wanted: list[int]) -> None:
        """What a program at the beginning of a fork reads, through FUSE."""
        followed = orders.follow(self.tree, BELOW)
        try:
            followed.repository.load_tree(self.tree)
            for number in wanted:
                offset = max(0, len(self.data[number]) - 100_000)
                data = followed.repository.read(self.files[number], offset, 100_000)
                assert data == self.data[number][offset:]
            await_that(lambda: order_key(self.tree, BELOW) in set(self.bucket.keys("reads/")))
        finally:
            followed.close()


def tree_of(files: list[BlobID]) -> Tree:
    own = TreeEntry(b"", Kind.DIRECTORY, 0o755, 0, 0, 0)
    entries = [
        TreeEntry(b"%03d" % n, Kind.FILE, 0o644, 0, 0, 0, size=FILE_BYTES, content=one) for n, one in enumerate(files)
    ]
    return Tree(own, tuple(entries))


def await_that(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[Stored]:
    made = Stored(tmp_path / "fleet")
    yield made
    made.maintenance.writer().close()


WANTED = [180, 5, 77, 200, 201, 120, 40]
"""The large file and the delta among them."""


def test_a_second_node_has_what_the_first_one_read_before_it_asks(stored: Stored) -> None:
    with stored.node("two") as (_, orders):
        stored.read(orders, WANTED)
    by_reading = stored.pack_requests()
    stored.bucket.asked.clear()
    with stored.node("three") as (reader, orders):
        known = orders.read(order_key(stored.tree, BELOW))
        assert known is not None
        runs = list(reads.runs_of(reader, known))
        followed = orders.follow(stored.tree, BELOW)
        await_that(lambda: stored.pack_requests() >= len(runs))
        await_that(lambda: not reader.store.bucket._coming)  # type: ignore[attr-defined]
        assert stored.pack_requests() == len(runs) < by_reading
        stored.bucket.away = True
        followed.repository.load_tree(stored.tree)
        for number in WANTED:
            offset = max(0, len(stored.data[number]) - 100_000)
            assert followed.repository.read(stored.files[number], offset, 100_000) == stored.data[number][offset:]
        followed.close()
        fetched = sum(count for _, _, count in runs) * BLOCK_BYTES
        assert fetched < sum(map(len, stored.data)) // 2  # most of the large file stays where it is


def test_no_more_is_fetched_than_the_bound_and_nothing_when_the_tree_is_closed(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stored.node("two") as (_, orders):
        stored.read(orders, WANTED)
    stored.bucket.asked.clear()
    monkeypatch.setattr(reads, "AHEAD_BYTES", 4 * BLOCK_BYTES)
    with stored.node("three") as (reader, orders):
        known = orders.read(order_key(stored.tree, BELOW))
        assert known is not None
        assert sum(count for _, _, count in reads.runs_of(reader, known)) == 4
    monkeypatch.undo()
    monkeypatch.setattr(reads, "_AT_ONCE", 1)
    with stored.node("four") as (reader, orders):
        runs = list(reads.runs_of(reader, known))
        assert len(runs) > 2
        stored.bucket.gate.clear()
        followed = orders.follow(stored.tree, BELOW)
        await_that(stored.pack_requests)
        followed.close()
        stored.bucket.gate.set()
        await_that(lambda: not [one for one in threading.enumerate() if one.name.startswith("read-ahead")])
        assert stored.pack_requests() == 1


@pytest.mark.parametrize("forged", ["flipped", "of another tree", "cut off", "too long", "empty"])
def test_an_order_that_the_fleet_has_not_written_is_not_used(stored: Stored, forged: str) -> None:
    with stored.node("two") as (_, orders):
        stored.read(orders, WANTED)
    key = order_key(stored.tree, BELOW)
    data = bytearray(stored.bucket.get(key))
    if forged == "of another tree":
        key = order_key(stored.tree, TreeID("c" * 64))
    else:
        stored.bucket.delete(key)
    stored.bucket.asked.clear()
    data[20] ^= forged == "flipped"
    data += bytes(10_000_000) if forged == "too long" else b""
    stored.bucket.put(key, [data[: {"cut off": -32, "empty": 0}.get(forged, len(data))]])
    with stored.node("three") as (_, orders):
        assert orders.read(key) == []
    assert max(length or 1 << 60 for key, _, length in stored.bucket.asked if key.startswith("reads/")) < 1 << 20


def test_objects_that_are_gone_are_left_out_and_the_orders_of_lost_trees_removed(stored: Stored) -> None:
    with stored.node("two") as (_, orders):
        stored.read(orders, WANTED)
        orders.write(order_key(TreeID("d" * 64), BELOW), [bytes(32)])
    with stored.node("three") as (reader, _):
        assert list(reads.runs_of(reader, [bytes(32), b"x" * 32])) == []
    stored.bucket.put("reads/of-nobody", [b"x"])
    stored.maintenance.collect(
        Roots({stored.tree: "it"}, {}, {}), grace_s=0, now=time.time(), dry_run=False, progress=lambda _: None
    )
    assert set(stored.bucket.keys("reads/")) == {order_key(stored.tree, BELOW), "reads/of-nobody"}


def test_a_large_file_is_noted_by_the_parts_that_were_read(stored: Stored) -> None:
    with stored.node("two") as (_, orders):
        stored.read(orders, [200])
        known = orders.read(order_key(stored.tree, BELOW))
    assert known is not None
    assert 3 <= len(known) <= 6  # the tree, the list, and some of 24 chunks


def test_another_node_that_was_faster_stays(stored: Stored) -> None:
    with stored.node("two") as (_, orders):
        key = order_key(stored.tree, BELOW)
        orders.write(key, [bytes(32)])
        orders.write(key, [b"y" * 32])
        assert orders.read(key) == [bytes(32)]
