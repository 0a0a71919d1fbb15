"""What a node's disk keeps of a bucket: the contract of stores is checked over it in test_store.py."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from snapshotd.errors import DataLoss, NotFound
from snapshotd.repo.base import Peers, Roots
from snapshotd.repo.fleet.blocks import BLOCK_BYTES, DiskBlocks
from snapshotd.repo.fleet.cached import CachedStore
from snapshotd.repo.fleet.maintenance import FleetMaintenance
from snapshotd.repo.fleet.reading import open_reader
from snapshotd.store.memory import MemoryStore
from tests.faulty_store import Fault, FaultyStore, Script

KEY = bytes(range(32))
VALUE = random.Random(1).randbytes(10 * BLOCK_BYTES + 1000)
BLOCK_USE = BLOCK_BYTES + 4096
ASK_S = 60


class Counted(MemoryStore):
    """A bucket that notes each range that it is asked for; `gate` holds the answers back."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, int, int | None]] = []
        self.gate = threading.Event()
        self.gate.set()

    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        self.asked.append((key, offset, length))
        assert self.gate.wait(ASK_S)
        return super().get(key, offset, length)


@pytest.fixture
def bucket() -> Counted:
    made = Counted()
    made.put("v", [VALUE])
    return made


@pytest.fixture
def blocks(tmp_path: Path) -> Iterator[DiskBlocks]:
    made = DiskBlocks(tmp_path / "cache", KEY, 1 << 30)
    yield made
    made.close()


def files_of(directory: Path) -> list[Path]:
    return [path for path in directory.glob("*/*") if path.parent.name != "@tmp"]


def disk_use(directory: Path) -> int:
    total = 0
    for path in files_of(directory):
        with suppress(FileNotFoundError):  # writers go on
            total += -(-path.stat().st_size // 4096) * 4096
    return total


def test_a_range_is_asked_for_once_and_in_one_request(bucket: Counted, blocks: DiskBlocks) -> None:
    store = CachedStore(bucket, blocks)
    assert store.get("v", BLOCK_BYTES + 5, 2 * BLOCK_BYTES) == VALUE[BLOCK_BYTES + 5 : 3 * BLOCK_BYTES + 5]
    assert bucket.asked == [("v", BLOCK_BYTES, 3 * BLOCK_BYTES)]
    another = CachedStore(bucket, blocks)  # as another process: nothing is in its memory
    assert another.get("v", BLOCK_BYTES + 9, 7) == VALUE[BLOCK_BYTES + 9 :][:7]
    assert another.get("v", 0, 6 * BLOCK_BYTES) == VALUE[: 6 * BLOCK_BYTES]
    assert bucket.asked[1:] == [("v", 0, BLOCK_BYTES), ("v", 4 * BLOCK_BYTES, 2 * BLOCK_BYTES)]
    assert another.get("v", len(VALUE) - 5, 100) == VALUE[-5:]
    assert another.get("v", len(VALUE) + 10 * BLOCK_BYTES, 10) == b""


def test_two_threads_ask_once(bucket: Counted, blocks: DiskBlocks) -> None:
    store = CachedStore(bucket, blocks)
    bucket.gate.clear()
    got: list[bytes] = []
    threads = [threading.Thread(target=lambda: got.append(store.get("v", 10, 20))) for _ in range(8)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + ASK_S
    while not bucket.asked:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    bucket.gate.set()
    for thread in threads:
        thread.join(ASK_S)
    assert got == [VALUE[10:30]] * 8
    assert len(bucket.asked) == 1


def test_a_thread_whose_block_did_not_come_to_another_one_asks_itself(blocks: DiskBlocks) -> None:
    bucket = Counted()
    store = CachedStore(bucket, blocks)
    bucket.gate.clear()
    failed: list[object] = []

    def ask() -> None:
        try:
            store.get("none", 0, 3 * BLOCK_BYTES)
        except NotFound as exc:
            failed.append(exc)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    bucket.gate.set()
    for thread in threads:
        thread.join(ASK_S)
    assert len(failed) == 4
    bucket.put("none", [VALUE])
    assert store.get("none", 0, 3) == VALUE[:3]


@pytest.mark.parametrize(
    "damage", ["flipped", "cut off", "of another block", "of another value", "a link", "sealed by another key"]
)
def test_a_wrong_block_is_none(bucket: Counted, blocks: DiskBlocks, tmp_path: Path, damage: str) -> None:
    store = CachedStore(bucket, blocks)
    bucket.put("w", [VALUE[::-1]])
    store.get("v", 0, 2 * BLOCK_BYTES)
    (folder,) = (tmp_path / "cache").glob("?" * 32)
    path = folder / "1"
    if damage == "flipped":
        data = bytearray(path.read_bytes())
        data[random.Random(2).randrange(len(data))] ^= 4
        path.write_bytes(data)
    elif damage == "cut off":
        os.truncate(path, 5000)
    elif damage == "of another block":
        path.write_bytes((folder / "0").read_bytes())
    elif damage == "of another value":
        store.get("w", BLOCK_BYTES, 1)
        (other,) = [one for one in files_of(tmp_path / "cache") if one.parent != folder]
        path.write_bytes(other.read_bytes())
    elif damage == "a link":
        (tmp_path / "elsewhere").write_bytes(path.read_bytes())
        path.unlink()
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.unlink()
        DiskBlocks(tmp_path / "cache", bytes(32), 1 << 30).save("v", 1, bytes(100))
    assert blocks.load("v", 1) is None
    fresh = CachedStore(bucket, blocks)
    assert fresh.get("v", 0, 2 * BLOCK_BYTES) == VALUE[: 2 * BLOCK_BYTES]


def test_the_block_that_was_not_read_for_longest_goes(tmp_path: Path) -> None:
    blocks = DiskBlocks(tmp_path / "cache", KEY, 10 * BLOCK_USE)
    for number in range(10):
        blocks.save("v", number, VALUE[:BLOCK_BYTES])
        (path,) = tmp_path.glob(f"cache/*/{number}")
        os.utime(path, ns=(number, number))
    assert blocks.load("v", 0) is not None
    blocks.save("v", 10, VALUE[:BLOCK_BYTES])
    left = {int(path.name) for path in files_of(tmp_path / "cache")}
    assert left == {0, *range(3, 11)}
    assert blocks.used_bytes() == disk_use(tmp_path / "cache") == 9 * BLOCK_USE


def test_a_budget_that_became_smaller_holds_at_the_next_start(tmp_path: Path, blocks: DiskBlocks) -> None:
    for number in range(10):
        blocks.save("v", number, VALUE[:BLOCK_BYTES])
    smaller = DiskBlocks(tmp_path / "cache", KEY, 4 * BLOCK_USE)
    smaller.recount()
    assert 0 < smaller.used_bytes() == disk_use(tmp_path / "cache") <= 4 * BLOCK_USE
    none = DiskBlocks(tmp_path / "cache", KEY, 0)
    none.recount()
    none.save("v", 1, b"x")
    assert files_of(tmp_path / "cache") == []
    assert none.used_bytes() == 0


FILL_FOR_EVER = """
import sys
from pathlib import Path
from snapshotd.repo.fleet.blocks import BLOCK_BYTES, DiskBlocks
blocks = DiskBlocks(Path(sys.argv[1]), bytes(range(32)), int(sys.argv[2]))
number = 0
print("ready", flush=True)
while True:
    blocks.save(f"value-{sys.argv[3]}-{number // 16}", number % 16, number.to_bytes(8, "little") * (BLOCK_BYTES // 8))
    number += 1
"""


def test_killed_processes_leave_no_half_block_and_no_more_than_the_budget(tmp_path: Path) -> None:
    directory, budget = tmp_path / "cache", 40 * BLOCK_USE
    for _ in range(4):
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", FILL_FOR_EVER, str(directory), str(budget), str(one)], stdout=subprocess.PIPE
            )
            for one in range(3)
        ]
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
        deadline = time.monotonic() + ASK_S
        while disk_use(directory) < budget // 2:
            assert time.monotonic() < deadline
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.communicate(timeout=ASK_S)
        blocks = DiskBlocks(directory, KEY, budget)
        blocks.recount()
        assert blocks.used_bytes() == disk_use(directory) <= budget
        found = 0
        for writer_number in range(3):
            for number in range(3000):
                data = blocks.load(f"value-{writer_number}-{number // 16}", number % 16)
                if data is not None:
                    assert data == number.to_bytes(8, "little") * (BLOCK_BYTES // 8)
                    found += 1
        assert found
        blocks.close()


def test_a_disk_that_others_fill_gets_its_room_back(small_disk: Path) -> None:
    """On 2 MiB a 16th, 128 KiB, stays free."""
    spare = (2 << 20) // 16
    blocks = DiskBlocks(small_disk / "cache", KEY, 1 << 30)

    def free() -> int:
        st = os.statvfs(small_disk)
        return st.f_bavail * st.f_frsize

    for number in range(12):
        blocks.save("v", number, VALUE[:BLOCK_BYTES])
        assert free() >= spare
    assert blocks.load("v", 11) == VALUE[:BLOCK_BYTES]
    kept = blocks.used_bytes()
    assert kept >= 5 * BLOCK_USE
    (small_disk / "other").write_bytes(bytes(free() - 8192))
    blocks.give_room()
    assert free() >= spare
    assert blocks.used_bytes() < kept
    while True:  # what others need most is not the cache's
        try:
            with (small_disk / "other").open("ab", buffering=0) as file:
                file.write(bytes(4096))
        except OSError:
            break
    blocks.save("w", 0, VALUE[:BLOCK_BYTES])
    store = CachedStore(MemoryStore(), blocks)
    store.put("full", [VALUE])
    assert store.get("full", 3, 3 * BLOCK_BYTES) == VALUE[3 : 3 * BLOCK_BYTES + 3]
    blocks.close()


def stored(bucket: MemoryStore, directory: Path, data: bytes) -> str:
    """A content in a fleet's bucket, put there by the node `one`."""
    directory.mkdir()
    maintenance = FleetMaintenance(bucket, "one", Peers(), directory / "index.db", KEY)
    content = maintenance.writer().save_bytes(data)
    maintenance.publish(Roots({}, {content: "it"}, {}), now=time.time())
    maintenance.writer().close()
    return content


def test_so_they_are_where_the_disk_keeps_nothing(tmp_path: Path) -> None:
    """Memory keeps the last blocks all the same."""
    bucket = MemoryStore()
    content = stored(bucket, tmp_path / "one", VALUE[:100_000])
    faulty = FaultyStore(bucket)
    faulty.schedule = Script([("get", 1, Fault.FLIPPED)])
    store = CachedStore(faulty, DiskBlocks(tmp_path / "cache", KEY, 0))
    with closing(open_reader(store, "one", tmp_path / "one" / "index.db", KEY)) as reader:
        assert reader.read(content, 0, 100_000) == VALUE[:100_000]
    assert len(faulty.injected) == 1


def test_bytes_that_came_wrong_from_the_bucket_are_read_once_more(tmp_path: Path) -> None:
    """A cache would else keep what the network spoiled once."""
    bucket = MemoryStore()
    content = stored(bucket, tmp_path / "one", VALUE[:100_000])
    faulty = FaultyStore(bucket)
    blocks = DiskBlocks(tmp_path / "cache", KEY, 1 << 30)
    for fault, again in ((Fault.FLIPPED, True), (Fault.TRUNCATED, True), (None, False)):
        reader = open_reader(CachedStore(faulty, blocks), "one", tmp_path / "one" / "index.db", KEY)
        faulty.schedule = Script([("get", 1, fault)] if fault else [("get", 0, Fault.FLIPPED)])
        if again:
            assert reader.read(content, 0, 100_000) == VALUE[:100_000]
            assert [what for _, _, what in faulty.injected] == [fault]
            reader.close()
            reader = open_reader(CachedStore(faulty, blocks), "one", tmp_path / "one" / "index.db", KEY)
            assert reader.read(content, 0, 100_000) == VALUE[:100_000]  # from the disk
            (pack,) = [key for key in list(bucket.keys("nodes/")) if "/packs/" in key]
            assert blocks.forget(pack)
        else:
            with pytest.raises(DataLoss):
                reader.read(content, 0, 100_000)
            assert len(faulty.injected) == 2
        faulty.injected.clear()
        reader.close()
