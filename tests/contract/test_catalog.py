"""The catalog's contract over every implementation, and what only holds for a file."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import apsw
import pytest

from snapshotd.catalog import database, schema
from snapshotd.catalog.base import Catalog
from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.errors import Conflict, DataLoss, InternalError, NotFound, OutOfSpace, Unsupported, VersionMismatch
from snapshotd.testing.contracts.catalog import CHECKS
from snapshotd.testing.records import begin, committed, make_image, started
from snapshotd.types import RecordID, SnapshotState, TreeID


@pytest.fixture(params=["file", "memory"])
def catalog(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Catalog]:
    path: Path | Literal[":memory:"] = tmp_path / "catalog.db" if request.param == "file" else ":memory:"
    opened = SqliteCatalog(path)
    yield opened
    opened.flush()
    opened.close()
    if request.param == "file":
        with_raw(tmp_path / "catalog.db", "PRAGMA integrity_check", [("ok",)])
        with_raw(tmp_path / "catalog.db", "PRAGMA foreign_key_check", [])


def with_raw(path: Path, sql: str, expected: object | None = None) -> list[tuple[object, ...]]:
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    try:
        rows = connection.execute(sql).fetchall()
    finally:
        connection.close()
    if expected is not None:
        assert rows == expected
    return rows


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Callable[[Catalog], None], catalog: Catalog) -> None:
    check(catalog)


def test_everything_is_there_after_reopening(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    first = SqliteCatalog(path)
    trajectory, snapshot = started(first, "kept")
    second = committed(first, snapshot, "a", "b")
    first.close()
    first.close()
    again = SqliteCatalog(path)
    try:
        assert again.resolve_snapshot("kept") == second
        assert again.snapshots(trajectory.id) == [snapshot, second]
        assert [message.content for message in again.conversation(second.id)] == ["a", "b"]
    finally:
        again.close()
    with pytest.raises(InternalError):
        first.get_meta("x")


def test_a_catalog_is_for_its_owner_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        catalog = SqliteCatalog(tmp_path / "catalog.db")
        catalog.set_meta("a", "b")
    finally:
        os.umask(old)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"catalog.db": 0o600, "catalog.db-wal": 0o600, "catalog.db-shm": 0o600}
    catalog.close()
    (tmp_path / "catalog.db").chmod(0o644)
    SqliteCatalog(tmp_path / "catalog.db").close()
    assert stat.S_IMODE((tmp_path / "catalog.db").stat().st_mode) == 0o600


def test_a_commit_appends_to_the_log_and_a_flush_syncs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = SqliteCatalog(tmp_path / "catalog.db")
    synced: list[int] = []
    real = os.fdatasync

    def sync(fd: int) -> None:
        synced.append(os.fstat(fd).st_ino)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", sync)
    try:
        catalog.set_meta("a", "b")
        assert not synced
        catalog.flush()
        assert synced == [(tmp_path / "catalog.db-wal").stat().st_ino]
    finally:
        catalog.close()


def test_a_failed_sync_is_never_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = SqliteCatalog(tmp_path / "catalog.db")

    def fail(_fd: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        with pytest.raises(DataLoss, match="could not be made durable"):
            catalog.flush()
    try:
        with pytest.raises(DataLoss, match="could not be made durable"):
            catalog.flush()
    finally:
        catalog.close()


def test_the_log_stays_bounded_without_a_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "_CHECKPOINT_LIMIT_PAGES", 50)
    catalog = SqliteCatalog(tmp_path / "catalog.db")
    try:
        for n in range(500):
            catalog.set_meta(f"key-{n}", "x" * 1000)
        assert (tmp_path / "catalog.db-wal").stat().st_size < 100 * 4200
        assert (tmp_path / "catalog.db").stat().st_size > 400_000
    finally:
        catalog.close()


def test_a_flush_empties_a_long_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "_CHECKPOINT_PAGES", 20)
    catalog = SqliteCatalog(tmp_path / "catalog.db")
    try:
        for n in range(100):
            catalog.set_meta(f"key-{n}", "x" * 1000)
        before = (tmp_path / "catalog.db").stat().st_size
        catalog.flush()
        assert (tmp_path / "catalog.db").stat().st_size > before
    finally:
        catalog.close()


def test_a_newer_catalog_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    SqliteCatalog(path).close()
    with_raw(path, f"PRAGMA user_version = {schema.VERSION + 1}")
    before = path.read_bytes()
    with pytest.raises(VersionMismatch, match=f"format {schema.VERSION + 1}, this one knows {schema.VERSION}"):
        SqliteCatalog(path)
    assert path.read_bytes() == before


def test_a_migration_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "catalog.db"
    catalog = SqliteCatalog(path)
    catalog.set_meta("kept", "yes")
    catalog.close()
    with monkeypatch.context() as patch:
        patch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, "CREATE TABLE later (a INTEGER) STRICT; CREATE TABLE meta (broken)"))
        patch.setattr(schema, "VERSION", schema.VERSION + 1)
        with pytest.raises(InternalError):
            SqliteCatalog(path)
    with_raw(path, "PRAGMA user_version", [(schema.VERSION,)])
    with_raw(path, "SELECT count(*) FROM sqlite_schema WHERE name = 'later'", [(0,)])
    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, "CREATE TABLE later (a INTEGER) STRICT"))
    monkeypatch.setattr(schema, "VERSION", schema.VERSION + 1)
    catalog = SqliteCatalog(path)
    try:
        assert catalog.get_meta("kept") == "yes"
    finally:
        catalog.close()
    with_raw(path, "SELECT count(*) FROM sqlite_schema WHERE name = 'later'", [(1,)])


def test_an_old_sqlite_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apsw, "sqlite_lib_version", lambda: "3.51.2")
    with pytest.raises(Unsupported, match=r"3\.51\.3 or newer"):
        SqliteCatalog(tmp_path / "catalog.db")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"not a database" * 1000, b"SQLite format 3\0" + b"\xff" * 8176])
def test_what_is_no_catalog_is_damage(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "catalog.db"
    path.write_bytes(content)
    with pytest.raises(DataLoss, match=r"catalog\.db"):
        SqliteCatalog(path)
    assert path.read_bytes() == content


def test_another_programs_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    connection = apsw.Connection(str(path))
    connection.execute("CREATE TABLE t (a)").fetchall()
    connection.close()
    with pytest.raises(DataLoss, match="not a catalog"):
        SqliteCatalog(path)


def test_a_cut_catalog_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    catalog = SqliteCatalog(path)
    trajectory, head = started(catalog)
    for n in range(200):
        head = committed(catalog, head, f"{n}" * 100)
    catalog.close()
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(DataLoss, match="damaged"):  # noqa: PT012 - where it is met depends on which pages are gone
        catalog = SqliteCatalog(path)
        try:
            catalog.snapshots(trajectory.id)
            list(catalog.conversation(head.id))
            catalog.referenced_layers()
        finally:
            catalog.close()


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE snapshots SET state = 'nonsense'",
        "UPDATE snapshots SET call_arguments = '{'",
        "UPDATE stacks SET layers = '7'",
        "UPDATE trajectories SET agent = '[]'",
        "UPDATE trajectories SET network = ''",
        "UPDATE images SET env = '[[1]]'",
        "UPDATE messages SET content = ''",
        "DELETE FROM messages WHERE position = 1",
    ],
)
def test_a_damaged_record_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "catalog.db"
    catalog = SqliteCatalog(path)
    trajectory, first = started(catalog)
    head = committed(catalog, first, "1", "2", "3")
    catalog.close()
    with_raw(path, damage)
    catalog = SqliteCatalog(path)
    try:
        with pytest.raises(DataLoss, match="restore the catalog"):  # noqa: PT012 - whichever reads the record
            catalog.images()
            catalog.get_trajectory(trajectory.id)
            catalog.get_snapshot(head.id)
            list(catalog.conversation(head.id))
    finally:
        catalog.close()


def test_another_writer_is_waited_for_and_then_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "_PRAGMAS", database._PRAGMAS.replace("5000", "10"))
    path = tmp_path / "catalog.db"
    catalog = SqliteCatalog(path)
    other = apsw.Connection(str(path))
    other.execute("BEGIN IMMEDIATE").fetchall()
    try:
        with pytest.raises(Conflict, match="locked by another process"):
            catalog.set_meta("a", "b")
        other.execute("ROLLBACK").fetchall()
        catalog.set_meta("a", "b")
    finally:
        other.close()
        catalog.close()


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="folder does not exist"):
        SqliteCatalog(tmp_path / "nowhere" / "catalog.db")


def test_a_creation_that_was_cut_off_is_repeated(tmp_path: Path) -> None:
    (tmp_path / "catalog.db.new").write_bytes(b"half")
    (tmp_path / "catalog.db.new-wal").write_bytes(b"half")
    SqliteCatalog(tmp_path / "catalog.db").close()
    assert [path.name for path in tmp_path.iterdir()] == ["catalog.db"]


def test_a_full_disk_changes_nothing(small_disk: Path) -> None:
    path = small_disk / "catalog.db"
    catalog = SqliteCatalog(path)
    image = make_image()
    catalog.add_image(image)
    trajectory, first = begin(image)
    catalog.add_trajectories([(trajectory, first)])
    (small_disk / "reserve").write_bytes(b"\0" * 262144)
    heads = [first]
    with pytest.raises(OutOfSpace, match="free some space"):  # noqa: PT012 - until it is full
        while True:
            heads.append(committed(catalog, heads[-1], "x" * 10_000))
    assert catalog.snapshots(trajectory.id) == heads
    (small_disk / "reserve").unlink()
    heads.append(committed(catalog, heads[-1], "after"))
    catalog.close()
    catalog = SqliteCatalog(path)
    try:
        assert catalog.snapshots(trajectory.id) == heads
    finally:
        catalog.close()
    with_raw(path, "PRAGMA integrity_check", [("ok",)])


def test_no_catalog_is_left_by_a_creation_on_a_full_disk(small_disk: Path) -> None:
    with pytest.raises(OSError, match="No space"), (small_disk / "filler").open("wb", buffering=0) as filler:  # noqa: PT012
        while True:
            filler.write(b"\0" * 4096)
    with pytest.raises(OutOfSpace):
        SqliteCatalog(small_disk / "catalog.db")
    assert [path.name for path in small_disk.iterdir()] == ["filler"]


@pytest.mark.parametrize("size", [1000, 10_000])
def test_no_statement_of_a_commit_or_lookup_scans(tmp_path: Path, size: int) -> None:
    """Costs are counted in SQLite's own steps: they must not depend on how much history there is."""
    catalog = SqliteCatalog(tmp_path / "catalog.db")
    _, head = started(catalog, "long")
    for n in range(size):
        catalog.set_stored(head.id, TreeID("1" * 64), RecordID("2" * 64))
        head = committed(catalog, head, f"message {n}")
    connection = catalog._db.connection

    def steps(action: Callable[[], object]) -> int:
        count = 0

        def tick() -> bool:
            nonlocal count
            count += 1
            return False

        connection.set_progress_handler(tick, 1)
        try:
            action()
        finally:
            connection.set_progress_handler(None)
        return count

    try:
        assert steps(lambda: committed(catalog, head, "one more")) < 600
        assert steps(lambda: catalog.resolve_snapshot(head.id[:12])) < 400
        assert steps(lambda: catalog.resolve_trajectory("long")) < 300
        assert steps(lambda: catalog.get_snapshot(head.id)) < 300
        assert steps(lambda: catalog.tag(head.id, "tag")) < 200
        assert steps(lambda: catalog.snapshots(head.trajectory, 50)) < 50 * 150
        assert steps(lambda: catalog.count_snapshots(head.trajectory)) < 10 * size
        assert steps(lambda: catalog.own_messages(head.id)) < 200
        assert steps(catalog.unstored) < 200
        assert steps(catalog.unstored_blobs) < 200
        assert steps(lambda: catalog.set_stored(head.id, TreeID("1" * 64), RecordID("2" * 64))) < 200
        assert steps(lambda: catalog.set_pruned([head.id])) < 200
        assert steps(lambda: catalog.set_state([head.id], SnapshotState.LOST)) < 200
        assert steps(catalog.referenced_trees) < 20 * size
        assert steps(catalog.referenced_records) < 20 * size
        assert steps(lambda: next(catalog.conversation(head.id))) < 100 * 500  # one page
    finally:
        catalog.close()
