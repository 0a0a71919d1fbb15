"""The repository's contract over every implementation, and what only holds for packs."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snapshotd.errors import Conflict, DataLoss, InternalError, NotFound, OutOfSpace, VersionMismatch
from snapshotd.repo.base import RepositoryWriter
from snapshotd.repo.format import encode, pack
from snapshotd.repo.reading.reader import PackReader
from snapshotd.repo.writing import pending
from snapshotd.repo.writing.writer import PackRepository
from snapshotd.store.base import Store
from snapshotd.store.local import LocalStore
from snapshotd.store.memory import MemoryStore
from snapshotd.types import BlobID
from tests.contracts.repository import CHECKS, edited, load
from tests.memory_repository import MemoryRepository

KEY = bytes(range(32))


@pytest.fixture(params=["memory", "packs in memory", "packs in files"])
def repository(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RepositoryWriter]:
    before = len(os.listdir("/proc/self/fd"))
    store: Store | None = None
    if request.param == "memory":
        opened: RepositoryWriter = MemoryRepository()
    else:
        store = MemoryStore() if request.param == "packs in memory" else LocalStore(tmp_path / "store")
        opened = PackRepository(store, tmp_path / "index", KEY)
    yield opened
    opened.flush()
    opened.close()
    opened.close()
    if store is not None:
        store.close()
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Callable[[RepositoryWriter], None], repository: RepositoryWriter) -> None:
    check(repository)


def save_much(packs: PackRepository, size: int) -> BlobID:
    """Distinct contents of so many bytes in all, and flush. The id of the last."""
    for number in range(size // (256 << 10) + 1):
        content = packs.save_bytes(random.Random(number).randbytes(min(size, 256 << 10)))
    packs.flush()
    return content


class Failing(MemoryStore):
    """Fails when told to."""

    error: BaseException | None = None
    full_after: int | None = None
    """How many puts it has room for."""
    puts = 0

    def put(self, key: str, parts: object) -> None:
        self.puts += 1
        if self.full_after is not None and self.puts > self.full_after:
            raise OutOfSpace("full")
        if self.error is not None:
            raise self.error
        super().put(key, parts)  # type: ignore[arg-type]


@pytest.fixture
def store() -> Failing:
    return Failing()


@pytest.fixture
def packs(store: Failing, tmp_path: Path) -> Iterator[PackRepository]:
    opened = PackRepository(store, tmp_path / "index", KEY)
    yield opened
    opened.close()


def test_what_was_flushed_is_there_after_reopening(packs: PackRepository, store: Failing, tmp_path: Path) -> None:
    data = random.Random(1).randbytes(3_000_000)
    kept, large = packs.save_bytes(b"kept"), packs.save_bytes(data)
    packs.flush()
    lost = packs.save_bytes(b"never flushed")
    reader = PackReader(store, tmp_path / "index", KEY)
    assert not reader.contains(lost)
    assert b"".join(reader.load(large)) == data
    packs.close()
    again = PackRepository(store, tmp_path / "index", KEY)
    assert load(again, kept) == b"kept"
    assert not again.contains(lost)
    assert again.stored_bytes() == sum(map(store.size_bytes, store.keys()))
    again.close()
    reader.close()


def test_readers_see_what_is_flushed_and_nothing_else(packs: PackRepository, store: Failing, tmp_path: Path) -> None:
    reader = PackReader(store, tmp_path / "index", KEY)
    content = packs.save_bytes(b"soon there")
    assert not reader.contains(content)
    packs.flush()
    assert load(packs, content) == b"".join(reader.load(content)) == b"soon there"
    reader.close()
    with pytest.raises(InternalError, match="closed"):
        reader.contains(content)


def test_a_reader_of_nothing_waits_for_the_writer(store: Failing, tmp_path: Path) -> None:
    reader = PackReader(store, tmp_path / "index", KEY)
    assert list(reader.records()) == []
    assert reader.stored_bytes() == 0
    with pytest.raises(NotFound):
        reader.load(BlobID("0" * 64))
    writer = PackRepository(store, tmp_path / "index", KEY)
    content = writer.save_bytes(b"now")
    writer.flush()
    assert b"".join(reader.load(content)) == b"now"
    reader.close()
    writer.close()


def test_there_is_one_writer(
    packs: PackRepository, store: Failing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending, "LOCK_WAIT_S", 0.0)
    with pytest.raises(Conflict, match="another process"):
        PackRepository(store, tmp_path / "index", KEY)


def test_a_writer_waits_for_one_that_is_ending(store: Failing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of a killed daemon holds the lock until it has died."""
    held = pending.lock(tmp_path / "index")
    monkeypatch.setattr(pending.time, "sleep", lambda _: os.close(held))
    PackRepository(store, tmp_path / "index", KEY).close()


def test_flushing_nothing_writes_nothing(packs: PackRepository, store: Failing) -> None:
    packs.flush()
    assert store.puts == 0
    packs.save_bytes(b"a")
    packs.flush()
    packs.save_bytes(b"a")
    packs.flush()
    assert store.puts == 1


def test_chains_of_deltas_are_bounded(packs: PackRepository, store: Failing, tmp_path: Path) -> None:
    rng = random.Random(2)
    small, large = rng.randbytes(4_000), rng.randbytes(200_000)
    last_small = last_large = None
    versions: dict[BlobID, bytes] = {}
    for number in range(3 * encode.MAX_CHAIN):
        small, large = edited(small, rng), edited(large, rng)
        last_small, last_large = packs.save_bytes(small, last_small), packs.save_bytes(large, last_large)
        versions |= {last_small: small, last_large: large}
        if number % 5 == 0:
            packs.flush()
    packs.flush()
    index = packs.index
    entries = list(index.objects())
    assert max(entry.depth for entry in entries) == encode.MAX_CHAIN
    for entry in entries:
        assert sum(one.plain for one in packs.reader.chain(entry)) <= 5 * encode.MAX_CHAIN_BYTES
        assert len(packs.reader.chain(entry)) == entry.depth + 1
    assert sum(entry.base is None for entry in entries) == 2, "a full chain branches, it does not begin again"
    assert packs.saved.packed_bytes < 400_000
    reader = PackReader(store, tmp_path / "index", KEY)
    assert all(b"".join(reader.load(content)) == data for content, data in versions.items())
    reader.close()


def test_a_full_disk_loses_only_what_was_not_flushed(packs: PackRepository, store: Failing) -> None:
    kept = packs.save_bytes(b"kept")
    packs.flush()
    saved = packs.saved
    for size in (10, 40 << 20):  # in place, and in threads
        store.error = OutOfSpace("full")
        with pytest.raises(OutOfSpace, match="full"):
            save_much(packs, size)
        assert packs.saved == saved
        assert len(list(store.keys())) == 1
    store.error = None
    again = save_much(packs, 20 << 20)
    assert packs.size_bytes(again) == 256 << 10
    again = packs.save_bytes(b"again", kept)
    packs.flush()
    assert load(packs, kept) == b"kept"
    assert load(packs, again) == b"again"


@pytest.mark.parametrize("room", [0, 1, 2])
def test_when_a_pack_does_not_fit_none_of_its_flush_stays(
    packs: PackRepository, store: Failing, tmp_path: Path, room: int
) -> None:
    """Packs are put side by side, and those that are durable go into the index's transaction while the last are on
    their way."""
    store.full_after = room
    with pytest.raises(OutOfSpace, match="full"):
        save_much(packs, 40 << 20)
    assert store.puts > room
    assert list(store.keys()) == []
    reader = PackReader(store, tmp_path / "index", KEY)
    assert reader.stored_bytes() == 0
    reader.close()
    store.full_after = None
    content = save_much(packs, 40 << 20)
    packs.flush()
    assert packs.size_bytes(content) == 256 << 10
    assert store.puts > 3


@pytest.mark.parametrize("size", [10, 40 << 20])
def test_a_failed_write_is_final(packs: PackRepository, store: Failing, tmp_path: Path, size: int) -> None:
    kept = packs.save_bytes(b"kept")
    packs.flush()
    store.error = OSError(5, "input/output error")
    with pytest.raises(OSError, match="input/output error"):
        save_much(packs, size)
    store.error = None
    for call in (packs.flush, lambda: packs.save_bytes(b"x"), lambda: packs.save_record(b"x")):
        with pytest.raises(OSError, match="refuses to write"):
            call()
    assert load(packs, kept) == b"kept"
    packs.close()
    again = PackRepository(store, tmp_path / "index", KEY)
    assert load(again, kept) == b"kept"
    again.save_bytes(b"x")
    again.flush()
    again.close()


def test_a_missing_index_is_never_a_fresh_start(packs: PackRepository, store: Failing, tmp_path: Path) -> None:
    packs.save_bytes(b"kept")
    packs.flush()
    packs.close()
    for name in os.listdir(tmp_path):
        (tmp_path / name).unlink()
    with pytest.raises(DataLoss, match="snapshotd repair"):
        PackRepository(store, tmp_path / "index", KEY)
    reader = PackReader(store, tmp_path / "index", KEY)
    with pytest.raises(DataLoss, match="snapshotd repair"):
        reader.size_bytes(BlobID("0" * 64))
    reader.close()
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize("bad", [b"", b"no database at all" * 300])
def test_a_damaged_index_is_found_at_open(packs: PackRepository, store: Failing, tmp_path: Path, bad: bytes) -> None:
    packs.close()
    (tmp_path / "index").write_bytes(bad)
    with pytest.raises(DataLoss, match="snapshotd repair"):
        PackRepository(store, tmp_path / "index", KEY)
    reader = PackReader(store, tmp_path / "index", KEY)
    with pytest.raises(DataLoss, match="snapshotd repair"):
        reader.size_bytes(BlobID("0" * 64))
    reader.close()


def test_a_newer_index_is_refused(packs: PackRepository, store: Failing, tmp_path: Path) -> None:
    index = packs.index
    index._db.write("PRAGMA user_version = 99")
    packs.close()
    with pytest.raises(VersionMismatch, match="newer"):
        PackRepository(store, tmp_path / "index", KEY)


def test_missing_packs_are_named(packs: PackRepository, store: Failing) -> None:
    content = packs.save_bytes(b"gone")
    packs.flush()
    (key,) = store.keys()
    store.delete(key)
    packs.reader.forget()
    with pytest.raises(DataLoss, match=rf"{content}.*{key.rpartition('/')[2]}.*missing"):
        list(packs.load(content))


def test_an_object_that_moved_is_found_again(packs: PackRepository, store: Failing, tmp_path: Path) -> None:
    """The garbage collection puts a new pack, updates the index, deletes the old pack, at any moment of a reader."""
    content = packs.save_bytes(b"moves")
    packs.flush()
    reader = PackReader(store, tmp_path / "index", KEY)
    index = packs.index
    entry = index.find(bytes.fromhex(content))
    assert entry is not None
    old = store.get(pack.pack_key(entry.pack))
    pack_id = pack.new_pack_id()
    store.put(pack.pack_key(pack_id), [pack.encode_head(pack_id), old[pack.HEAD_BYTES :]])
    find = reader.find

    def find_then_move(raw: bytes) -> object:
        found = find(raw)
        reader.find = find  # type: ignore[method-assign]
        with index.transaction():
            index.add_pack(index.packs()[0]._replace(id=pack_id))
            index.add_objects([entry._replace(pack=pack_id)])
            index.remove_empty_packs([entry.pack])
        store.delete(pack.pack_key(entry.pack))
        return found

    reader.find = find_then_move  # type: ignore[assignment,method-assign]
    assert reader.plain(bytes.fromhex(content)) == b"moves"
    reader.close()
