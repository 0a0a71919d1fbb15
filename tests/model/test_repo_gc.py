"""Garbage collection against an oracle: what a root reaches always reads as it was saved, what no root reaches goes, at
any crash."""

from __future__ import annotations

import os
import pickle
import random
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from snapshotd import failpoints
from snapshotd.errors import DataLoss, NotFound, OutOfSpace
from snapshotd.repo.base import ObjectKind, Reclaimed, Roots
from snapshotd.repo.format import pack
from snapshotd.repo.reading.reader import PackReader
from snapshotd.repo.upkeep.maintenance import PackMaintenance
from snapshotd.store.local import LocalStore
from snapshotd.store.memory import MemoryStore
from snapshotd.types import BlobID
from tests import forked, long
from tests.faulty_store import Fault, FaultyStore, Script
from tests.loop_disk import memory_disk
from tests.model import repo_crash_child
from tests.model.repo_world import KEY, Author, Opened, Saved, is_as_saved, load, open_reader, roots_of, save, silent

NOTHING = Roots({}, {}, {})
Kept = dict[str, Saved]


def collect(opened: Opened, kept: Kept, *, dry_run: bool = False, grace_s: float = 0, later_s: float = 10) -> Reclaimed:
    return opened.collect(
        roots_of(kept.items()), grace_s=grace_s, now=time.time() + later_s, dry_run=dry_run, progress=silent
    )


def fill(opened: Opened, seed: int, count: int, kept: Kept | None = None) -> Kept:
    """Snapshots, each in a pack of its own, with a large file that changes a little each time."""
    rng = random.Random(seed)
    author = Author(rng, dict(next(reversed(kept.values())).files) if kept else {})
    large = rng.randbytes(600_000)
    snapshots: Kept = dict(kept or {})
    for number in range(count):
        previous = next(reversed(snapshots.values())) if snapshots else None
        name = f"s{seed}-{number}"
        at = rng.randrange(len(large))
        large = large[:at] + b"step %d" % number + large[at:]
        snapshots[name] = save(opened.repo, author.step() | {b"large": large}, name, previous)
        opened.repo.flush()
    return snapshots


def pack_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in (directory / "store" / "packs").rglob("*") if path.is_file())


def assert_is(directory: Path, kept: Kept) -> None:
    """Seen from outside: all that was kept is there, whole and checked, and the index knows nothing that is not."""
    reader = open_reader(directory)
    for one in kept.values():
        assert is_as_saved(reader, one)
    reader.close()
    reader.store.close()
    opened = Opened(directory)
    result = opened.check(roots_of(kept.items()), read_data=True, progress=silent)
    assert (result.faults, result.owners) == ((), ())
    opened.close()


def known_objects(opened: Opened) -> set[bytes]:
    index = opened.repo.index
    return {entry.id for entry in index.objects()}


def needed_objects(opened: Opened, kept: Kept) -> set[bytes]:
    """From what was saved, without walking any tree: ids, parts of lists, and bases of deltas."""
    needed: set[bytes] = set()
    waiting: list[bytes] = []
    for saved in kept.values():
        waiting += map(bytes.fromhex, (*saved.trees.values(), *saved.contents.values(), saved.record, saved.output))
    while waiting:
        raw = waiting.pop()
        if raw not in needed:
            needed.add(raw)
            entry = opened.repo.reader.find(raw)
            assert entry is not None
            waiting += (
                [entry.base] if entry.base is not None else []
            )  # of a list too: what is a delta against a dead one was rewritten
            waiting += (
                [part for part, _ in opened.repo.reader.contents.chunk_list(raw).parts]
                if entry.kind == ObjectKind.LIST
                else []
            )
    return needed


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("save"), st.integers(0, 1000)),
        st.tuples(st.just("drop"), st.integers(0, 1000)),
        st.tuples(st.just("collect"), st.just(0)),
        st.tuples(st.just("reopen"), st.just(0)),
        st.tuples(st.just("unflushed"), st.integers(0, 1000)),
    ),
    min_size=3,
    max_size=25,
)


@settings(
    max_examples=long.size(12, 400),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(actions=ACTIONS)
def test_what_is_reached_stays_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, int]]
) -> None:
    directory = tmp_path_factory.mktemp("world") / "repo"
    opened = Opened(directory)
    kept: Kept = {}
    dropped: Kept = {}
    for step, (action, number) in enumerate((*actions, ("collect", 0))):
        if action == "save":
            previous = list(kept.values())[number % len(kept)] if kept else None
            author = Author(random.Random(number), dict(previous.files) if previous else {}, big=number % 7 == 0)
            kept[f"s{step}"] = save(opened.repo, author.step(), f"s{step}", previous)
            opened.repo.flush()
        elif action == "drop" and kept:
            name = sorted(kept)[number % len(kept)]
            dropped[name] = kept.pop(name)
        elif action == "reopen":
            opened.close()
            opened = Opened(directory)
        elif action == "unflushed":
            save(opened.repo, Author(random.Random(number)).step(), "never", None)
            opened.close()
            opened = Opened(directory)
        elif action == "collect":
            planned = collect(opened, kept, dry_run=True)
            done = collect(opened, kept)
            assert abs(planned.freed_bytes - done.freed_bytes) <= 2000 + 100 * done.packs_rewritten
            assert done.packs_bytes == pack_bytes(directory)
            again = collect(opened, kept)
            assert (again.freed_bytes, again.packs_removed) == (0, 0) or again.packs_rewritten
            assert all(is_as_saved(opened.repo, one) for one in kept.values())
            assert known_objects(opened) == needed_objects(opened, kept)
            for one in dropped.values():  # what was forgotten can be saved again
                assert save(opened.repo, one.files, "again").tree == one.tree
            opened.repo.flush()
            assert all(load(opened.repo, one.tree) == one.files for one in dropped.values())
            collect(opened, kept)
    opened.close()
    assert_is(directory, kept)


def test_nothing_is_left_of_nothing(tmp_path: Path) -> None:
    opened = Opened(tmp_path / "repo")
    assert collect(opened, {}) == Reclaimed(0, 0, 0, 0, 0)
    fill(opened, 1, 5)
    before = pack_bytes(tmp_path / "repo")
    done = collect(opened, {})
    assert (done.freed_bytes, done.packs_bytes, done.packs_removed, done.packs_rewritten) == (before, 0, 5, 0)
    assert pack_bytes(tmp_path / "repo") == 0
    assert opened.repo.index.stored_bytes() == 0
    opened.close()


def test_many_small_packs_become_one(tmp_path: Path) -> None:
    opened = Opened(tmp_path / "repo")
    kept = fill(opened, 2, 40)
    done = collect(opened, kept)
    assert done.packs_rewritten > 20
    assert len(list(LocalStore(tmp_path / "repo" / "store").keys())) < 15
    assert [record for record, _ in opened.repo.records()] == [one.record for one in kept.values()]
    opened.close()
    assert_is(tmp_path / "repo", kept)


def test_mostly_dead_packs_are_rewritten(tmp_path: Path) -> None:
    opened = Opened(tmp_path / "repo")
    rng = random.Random(3)
    data = [rng.randbytes(200_000) for _ in range(20)]
    ids = [opened.repo.save_bytes(one) for one in data]
    opened.repo.flush()
    roots = Roots({}, {ids[number]: "kept" for number in (3, 11, 12)}, {})
    done = opened.collect(roots, grace_s=0, now=time.time() + 1, dry_run=False, progress=silent)
    assert (done.packs_removed, done.packs_rewritten) == (0, 1)
    assert 600_000 < pack_bytes(tmp_path / "repo") == done.packs_bytes < 601_000
    assert b"".join(opened.repo.load(ids[11])) == data[11]
    opened.close()


def test_an_old_version_of_a_large_file_is_not_kept_for_its_list(tmp_path: Path) -> None:
    """The list of the new version is a delta against that of the old one, whose chunks go."""
    opened = Opened(tmp_path / "repo")
    rng = random.Random(13)
    data = rng.randbytes(3_000_000)
    versions = [data]
    for at in (100_000, 900_000, 1_700_000, 2_500_000):
        versions.append(versions[-1][:at] + rng.randbytes(200_000) + versions[-1][at + 200_000 :])
    ids: list[BlobID] = []
    for version in versions:
        ids.append(opened.repo.save_bytes(version, ids[-1] if ids else None))
        opened.repo.flush()
    index = opened.repo.index
    assert [entry.depth for entry in map(index.find, map(bytes.fromhex, ids)) if entry] == [0, 1, 2, 3, 4]
    kept = {2, 3}
    opened.collect(
        Roots({}, {ids[n]: str(n) for n in kept}, {}), grace_s=0, now=time.time() + 1, dry_run=False, progress=silent
    )
    assert [opened.repo.contains(one) for one in ids] == [False, False, True, True, False]
    assert [entry.depth for entry in map(index.find, map(bytes.fromhex, ids)) if entry] == [0, 1]
    assert opened.check(Roots({}, {}, {}), read_data=True, progress=silent).faults == ()
    for one, version in zip(ids, versions, strict=True):
        assert opened.repo.save_bytes(version) == one
    opened.repo.flush()
    assert all(b"".join(opened.repo.load(one)) == version for one, version in zip(ids, versions, strict=True))
    opened.close()


def test_young_packs_and_what_they_need_are_not_touched(tmp_path: Path) -> None:
    """A snapshot whose root is not in the catalog yet: its own objects are young, and what it shares with older ones
    stays as well."""
    opened = Opened(tmp_path / "repo")
    old = fill(opened, 4, 3)
    last = next(reversed(old.values()))
    kept = {"only": save(opened.repo, {b"other": b"x" * 1000}, "only")}
    opened.repo.flush()
    limit = time.time() + 0.002  # ages are in milliseconds: the next pack must be younger
    while time.time() <= limit:
        pass
    young = save(opened.repo, {**last.files, b"new": b"fresh" * 100}, "young", last)
    opened.repo.flush()
    now = time.time()
    collect(opened, kept, grace_s=now - limit, later_s=now - time.time())
    assert load(opened.repo, young.tree) == young.files
    assert known_objects(opened) == needed_objects(opened, {**kept, "young": young})
    collect(opened, kept)
    with pytest.raises(NotFound):
        opened.repo.load_tree(young.tree)
    opened.close()
    assert_is(tmp_path / "repo", kept)


@pytest.mark.parametrize("what", ["tree", "content", "record", "pack", "chunk"])
def test_a_damaged_repository_is_not_collected(tmp_path: Path, what: str) -> None:
    """Something that a root needs is missing: nothing is removed, and the owner is named."""
    opened = Opened(tmp_path / "repo")
    large = random.Random(5).randbytes(900_000)
    author = Author(random.Random(5), {b"a/b/c": b"some content", b"large": large})
    kept = {"snapshot-1": save(opened.repo, author.files, "one")}
    opened.repo.flush()
    fill(opened, 6, 4)
    one = kept["snapshot-1"]
    index = opened.repo.index
    victims = {
        "tree": one.trees[b"a/b"],
        "content": one.contents[b"a/b/c"],
        "record": one.record,
        "chunk": opened.repo.reader.contents.chunk_list(bytes.fromhex(one.contents[b"large"])).parts[1][0].hex(),
        "pack": one.tree,
    }
    raw = bytes.fromhex(victims[what])
    entry = index.find(raw)
    assert entry is not None
    if what == "pack":
        LocalStore(tmp_path / "repo" / "store").delete(pack.pack_key(entry.pack))
        opened.repo.reader.forget()
    else:
        with index.transaction():
            index.remove_objects([raw])
        opened.repo.reader.forget()
    before = sorted(LocalStore(tmp_path / "repo" / "store").keys())
    rows = sum(1 for _ in index.objects())
    with pytest.raises(DataLoss, match=r"snapshot-1|missing") as caught:
        collect(opened, kept)
    assert "nothing was removed" in caught.value.message
    expected = {"tree": "a/b", "content": "a/b/c", "chunk": "large"}.get(what)
    assert expected is None or f"'{expected}'" in caught.value.message
    assert sorted(LocalStore(tmp_path / "repo" / "store").keys()) == before
    assert sum(1 for _ in index.objects()) == rows
    opened.close()


def test_a_damaged_pack_is_left_for_repair(tmp_path: Path) -> None:
    opened = Opened(tmp_path / "repo")
    rng = random.Random(6)
    data = [rng.randbytes(100_000) for _ in range(10)]
    ids = [opened.repo.save_bytes(one) for one in data]
    opened.repo.flush()
    (path,) = (one for one in (tmp_path / "repo" / "store" / "packs").rglob("*") if one.is_file())
    bad = bytearray(path.read_bytes())
    bad[bad.index(data[1][:50]) + 10] ^= 1
    path.write_bytes(bad)
    roots = Roots({}, {ids[1]: "a", ids[2]: "b"}, {})
    told: list[str] = []
    done = opened.collect(roots, grace_s=0, now=time.time() + 1, dry_run=False, progress=told.append)
    assert (done.packs_removed, done.packs_rewritten) == (0, 0)
    assert path.read_bytes() == bad
    assert any("damaged" in text for text in told)
    assert b"".join(opened.repo.load(ids[2])) == data[2]
    opened.close()


def test_packs_of_a_crash_are_removed(tmp_path: Path) -> None:
    opened = Opened(tmp_path / "repo")
    kept = fill(opened, 7, 2)
    store = LocalStore(tmp_path / "repo" / "store")
    orphan = pack.new_pack_id()
    store.put(pack.pack_key(orphan), [b"whatever a crash left"])
    store.put("packs/other", [b"no pack of ours"])
    done = collect(opened, kept)
    assert done.freed_bytes >= 21
    assert pack.pack_key(orphan) not in set(store.keys())
    assert "packs/other" in set(store.keys())
    opened.close()


def test_what_an_archive_that_failed_left_unflushed_is_given_up(tmp_path: Path) -> None:
    """Its packs are no longer there for a later flush to index, nor are the objects that its deltas are made
    against."""
    opened = Opened(tmp_path / "repo")
    rng = random.Random(3)
    old = rng.randbytes(100_000)
    base = opened.repo.save_bytes(old)
    opened.repo.flush()
    data = [rng.randbytes(250_000) for _ in range(150)] + [old + b"and more"]

    def archive() -> list[BlobID]:
        return [opened.repo.save_bytes(one, base) for one in data]

    archive()  # cut off here, by an error of the layer that it reads
    put = {row.id for _, row, _ in opened.repo._output._puts} | {row.id for row, _ in opened.repo._output.stored}
    assert put
    assert collect(opened, {}, dry_run=True).packs_removed > 0
    assert opened.repo.contains(base)
    collect(opened, {}, later_s=3600)
    opened.repo.flush()
    assert not any(
        opened.repo.contains(one)
        for one in (base, *(BlobID(opened.repo.reader.identity.content(one).hex()) for one in data))
    )
    ids = archive()  # done again
    opened.repo.flush()
    opened.close()
    reader = open_reader(tmp_path / "repo")
    assert [b"".join(reader.load(one)) for one in ids] == data
    reader.close()
    reader.store.close()


def test_it_works_on_a_full_disk(tmp_path: Path) -> None:
    """Nothing can be put: what is wholly dead goes, the rest is for the next time."""
    store = FaultyStore(LocalStore(tmp_path / "repo" / "store"))
    opened = Opened(tmp_path / "repo", store)
    fill(opened, 8, 3)
    rng = random.Random(8)
    data = [rng.randbytes(100_000) for _ in range(10)]
    ids = [opened.repo.save_bytes(one) for one in data]
    opened.repo.flush()
    store.schedule = Script([("put", 0, Fault.FULL)])
    roots = Roots({}, {ids[1]: "a"}, {})
    done = opened.collect(roots, grace_s=0, now=time.time() + 1, dry_run=False, progress=silent)
    assert (done.packs_removed, done.packs_rewritten) == (3, 0)
    with pytest.raises(OutOfSpace):
        opened.collect(roots, grace_s=0, now=time.time() + 1, dry_run=False, progress=silent)
    assert b"".join(opened.repo.load(ids[1])) == data[1]
    store.schedule = lambda _operation, _key: None
    done = opened.collect(roots, grace_s=0, now=time.time() + 1, dry_run=False, progress=silent)
    assert done.packs_rewritten == 1
    assert b"".join(opened.repo.load(ids[1])) == data[1]
    opened.close()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with memory_disk(tmp_path, "60m") as path:
        yield path


def use_up(disk: Path) -> None:
    """Fill the disk to its last block."""
    with pytest.raises(OSError, match="No space"), (disk / os.urandom(8).hex()).open("wb", buffering=0) as filler:  # noqa: PT012
        while True:
            filler.write(bytes(4096))
    assert os.statvfs(disk).f_bfree == 0


@pytest.mark.parametrize("reopened", [False, True])
def test_it_works_on_a_disk_without_a_free_block(disk: Path, reopened: bool) -> None:
    rng = random.Random(12)
    author = Author(rng, big=False)
    snapshots: Kept = {}
    with closing(Opened(disk / "repo")) as opened:
        with pytest.raises(OutOfSpace):  # noqa: PT012 - until it is full
            while True:
                files = author.step() | {b"noise": rng.randbytes(1_000_000)}
                name = f"s{len(snapshots)}"
                saved = save(opened.repo, files, name, next(reversed(snapshots.values())) if snapshots else None)
                opened.repo.flush()
                snapshots[name] = saved
        use_up(disk)
        if not reopened:
            assert collect(opened, dict(list(snapshots.items())[-3:])).freed_bytes > 30_000_000
    kept = dict(list(snapshots.items())[-3:])
    with closing(Opened(disk / "repo")) as opened:
        if reopened:  # the log of the index was gone
            use_up(disk)
            assert collect(opened, kept).freed_bytes > 30_000_000
        kept["more"] = save(opened.repo, {b"more": rng.randbytes(20_000_000)}, "more")
        opened.repo.flush()
    assert_is(disk / "repo", kept)


def test_an_index_is_made_anew_whole_or_not_at_all(disk: Path) -> None:
    """However little room there is, for its log only, say: OutOfSpace, and the same repair succeeds later."""
    rng = random.Random(2)
    maintenance = PackMaintenance(MemoryStore(), disk / "index.db", KEY)
    writer = maintenance.writer()
    ids = [writer.save_bytes(rng.randbytes(100)) for _ in range(long.size(4_000, 10_000))]
    writer.flush()
    writer.close()
    whole = (disk / "index.db").stat().st_size
    outcomes = []
    for percent in range(0, 301, 25):
        for path in disk.iterdir():
            path.unlink()
        room = (whole * percent // 100 + (64 << 10)) // 4096 * 4096
        (disk / "filler").write_bytes(bytes(os.statvfs(disk).f_bavail * 4096 - room))
        again = PackMaintenance(maintenance._store, disk / "index.db", KEY)
        try:
            again.repair(silent)
        except OutOfSpace:
            outcomes.append(False)
            assert {path.name for path in disk.iterdir()} <= {"filler", "index.db.lock"}, "nothing of it stays"
            continue
        outcomes.append(True)
        with closing(PackReader(maintenance._store, disk / "index.db", KEY)) as reader:
            assert all(reader.contains(one) for one in ids)
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {False, True}


@pytest.mark.parametrize("seed", long.seeds(1, 60))
def test_faults_of_the_store_harm_nothing(tmp_path: Path, seed: int) -> None:
    """Whatever call to the store fails, before or after it was done: the next collection without faults is right."""
    rng = random.Random(seed)
    store = FaultyStore(LocalStore(tmp_path / "repo" / "store"))
    opened = Opened(tmp_path / "repo", store)
    kept: Kept = {}
    for number in range(8):
        kept = {name: one for name, one in fill(opened, 100 * seed + number, 8, kept).items() if rng.random() < 0.5}
        operation = rng.choice(["put", "get", "delete", "keys"])
        fault = rng.choice([Fault.ERROR_BEFORE, *([Fault.ERROR_AFTER] if operation in ("put", "delete") else [])])
        store.schedule = Script([(operation, rng.randint(1, 2), fault)])
        try:
            collect(opened, kept)
        except OSError:
            pass
        store.schedule = lambda _operation, _key: None
        opened.repo.reader.forget()
        assert all(is_as_saved(opened.repo, one) for one in kept.values())
    assert store.injected
    collect(opened, kept)
    assert {key for key in store.keys("packs/")} == {pack.pack_key(row.id) for row in opened.repo.index.packs()}
    opened.close()
    assert_is(tmp_path / "repo", kept)


def crash(directory: Path, kept: Kept, point: str, count: int, what: str) -> bool:
    """Run in a process that dies at the failpoint; False when it came through."""
    oracle = directory.with_name("kept")
    oracle.write_bytes(pickle.dumps(kept))
    env = {**os.environ, "SNAPSHOTD_FAILPOINT": f"{point}:{count}"}
    words = [str(directory), str(oracle), what]
    code, _, said = forked.run(words, env=env, timeout_s=120, module=repo_crash_child.__name__)
    assert code in (0, failpoints.EXIT_CODE), said
    return code == failpoints.EXIT_CODE


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(5, marks=pytest.mark.long)])
@pytest.mark.parametrize("point", [name for name in failpoints.NAMES if name.startswith("repo.gc.")])
def test_a_crash_loses_nothing_and_leaks_nothing(tmp_path: Path, point: str, count: int) -> None:
    directory = tmp_path / "repo"
    opened = Opened(directory)
    snapshots = fill(opened, 9, 30)
    opened.close()
    rng = random.Random(9)
    kept = {name: one for name, one in snapshots.items() if rng.random() < 0.5}
    died = crash(directory, kept, point, count, "collect")
    assert died or count > 1
    assert_is(directory, kept)
    opened = Opened(directory)
    for one in snapshots.values():  # what the index knows is whole: whatever is saved again can be read
        assert save(opened.repo, one.files, "again").tree == one.tree
    opened.repo.flush()
    assert all(load(opened.repo, one.tree) == one.files for one in snapshots.values())
    collect(opened, kept)
    collect(opened, kept)
    assert pack_bytes(directory) == opened.repo.stored_bytes()
    opened.close()
    assert_is(directory, kept)


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("index_too", [False, True])
@pytest.mark.parametrize("point", [name for name in failpoints.NAMES if name.startswith("repo.repair.")])
def test_a_repair_that_is_cut_off_goes_on(tmp_path: Path, point: str, index_too: bool, count: int) -> None:
    directory = tmp_path / "repo"
    opened = Opened(directory)
    kept = fill(opened, 10, 8)
    opened.close()
    store = LocalStore(directory / "store")
    for key in list(store.keys())[::2]:
        path = directory / "store" / key
        path.write_bytes(path.read_bytes()[:-5])  # the end mark: no object is lost
    if index_too:
        (directory / "index.db").write_bytes(b"")
    died = crash(directory, kept, point, count, "repair")
    assert died or count > 1 or (point == "repo.repair.kept" and not index_too)
    opened = Opened(directory)
    assert opened.repair(silent).gone == ()
    assert opened.repair(silent).actions == ()
    opened.close()
    assert_is(directory, kept)


def test_a_reader_goes_on_while_packs_are_rewritten(tmp_path: Path) -> None:
    """It looks the object up again when the pack is gone."""
    opened = Opened(tmp_path / "repo")
    kept = fill(opened, 11, 40)
    reader = open_reader(tmp_path / "repo")
    assert is_as_saved(reader, next(iter(kept.values())))
    collect(opened, kept)
    reader.forget()
    assert all(is_as_saved(reader, one) for one in kept.values())
    reader.close()
    opened.close()


def test_trees_of_any_depth_are_walked(tmp_path: Path) -> None:
    """Deeper than any recursion limit."""
    opened = Opened(tmp_path / "repo")
    deep = b"/".join([b"d"] * 3000) + b"/file"
    kept = {"deep": save(opened.repo, {deep: b"at the bottom"}, "deep")}
    opened.repo.flush()
    collect(opened, kept)
    result = opened.check(roots_of(kept.items()), read_data=True, progress=silent)
    assert (result.faults, result.objects) == ((), 3001 + 3)
    opened.close()
