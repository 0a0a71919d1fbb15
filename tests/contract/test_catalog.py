"""The catalog's contract over every implementation, and what only holds for a file."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import apsw
import pytest

from snapshotd import sqlite
from snapshotd.catalog import schema
from snapshotd.catalog.base import Catalog, SnapshotRow
from snapshotd.catalog.postgres.catalog import PostgresCatalog
from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.errors import (
    Ambiguous,
    Conflict,
    DataLoss,
    InternalError,
    NotFound,
    NotPermitted,
    OutOfSpace,
    Unsupported,
    VersionMismatch,
)
from snapshotd.types import CallStatus, Ended, Message, RecordID, Snapshot, SnapshotState, TreeID
from tests.contracts.catalog import CHECKS
from tests.records import begin, committed, ended_entry, follow, make_entry, make_image, started


@pytest.fixture(params=["file", "memory", "postgres"])
def catalog(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Catalog]:
    if request.param == "postgres":
        with closing(PostgresCatalog(request.getfixturevalue("postgres_url"))) as made:
            yield made
        return
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


def test_a_name_that_an_older_version_gave_twice_means_neither(tmp_path: Path) -> None:
    """Until it is taken from one of them: what it names is said, of both."""
    path = tmp_path / "catalog.db"
    with closing(SqliteCatalog(path)) as catalog:
        trajectory, first = started(catalog, "twice")
        second = committed(catalog, first)
        catalog.refs.tag(first.id, "once")
    with_raw(path, "UPDATE tags SET name = 'twice'")
    with closing(SqliteCatalog(path)) as catalog:
        for find in (catalog.refs.find_snapshot, catalog.refs.find_trajectory):
            with pytest.raises(Ambiguous, match="twice") as caught:
                find("twice")
            for word in (first.id[:12], trajectory.id[:12], "snapshotd tag --delete twice"):
                assert word in caught.value.message
        assert catalog.refs.find_snapshot(trajectory.id).id == second.id
        with pytest.raises(Conflict):
            catalog.refs.tag(second.id, "twice", move=True)
        catalog.refs.untag("twice")
        assert catalog.refs.find_snapshot("twice").id == second.id


def test_everything_is_there_after_reopening(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    first = SqliteCatalog(path)
    trajectory, snapshot = started(first, "kept")
    second = committed(first, snapshot, "a", "b")
    first.close()
    first.close()
    again = SqliteCatalog(path)
    try:
        assert again.refs.find_snapshot("kept") == second
        assert again.snapshots.of_trajectory(trajectory.id) == [snapshot, second]
        assert [message.content for message in again.conversations.read(second.id)] == ["a", "b"]
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
    monkeypatch.setattr(sqlite, "_CHECKPOINT_LIMIT_PAGES", 50)
    catalog = SqliteCatalog(tmp_path / "catalog.db")
    try:
        for n in range(500):
            catalog.set_meta(f"key-{n}", "x" * 1000)
        assert (tmp_path / "catalog.db-wal").stat().st_size < 100 * 4200
        assert (tmp_path / "catalog.db").stat().st_size > 400_000
    finally:
        catalog.close()


def test_a_flush_empties_a_long_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "_CHECKPOINT_PAGES", 20)
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
        patch.setattr(
            schema,
            "MIGRATIONS",
            {**schema.MIGRATIONS, schema.VERSION + 1: "CREATE TABLE later (a INTEGER) STRICT; CREATE TABLE meta (b);"},
        )
        patch.setattr(schema, "VERSION", schema.VERSION + 1)
        with pytest.raises(InternalError):
            SqliteCatalog(path)
    with_raw(path, "PRAGMA user_version", [(schema.VERSION,)])
    with_raw(path, "SELECT count(*) FROM sqlite_schema WHERE name = 'later'", [(0,)])
    later = {schema.VERSION + 1: "CREATE TABLE later (a INTEGER) STRICT;"}
    monkeypatch.setattr(schema, "MIGRATIONS", {**schema.MIGRATIONS, **later})
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
    with pytest.raises(DataLoss, match="another program"):
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
            catalog.snapshots.of_trajectory(trajectory.id)
            list(catalog.conversations.read(head.id))
            catalog.snapshots.referenced_layers()
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
        "UPDATE entries SET kind = 'nonsense'",
        "UPDATE entries SET facts = '7'",
        "UPDATE entries SET result = '{'",
        "UPDATE states SET content = '[1]'",
    ],
)
def test_a_damaged_record_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "catalog.db"
    catalog = SqliteCatalog(path)
    trajectory, first = started(catalog)
    head = committed(catalog, first, "1", "2", "3", entries=[ended_entry(first)], saved={"a": 1})
    catalog.close()
    with_raw(path, damage)
    catalog = SqliteCatalog(path)
    try:
        with pytest.raises(DataLoss, match="restore the catalog"):  # noqa: PT012 - whichever reads the record
            catalog.images.list()
            catalog.trajectories.get(trajectory.id)
            catalog.snapshots.get(head.id)
            list(catalog.conversations.read(head.id))
            list(catalog.journal.read(head.id))
            catalog.conversations.state(head.id)
    finally:
        catalog.close()


def test_another_writer_is_waited_for_and_then_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "_BUSY_TIMEOUT_MS", 10)
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


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_a_folder_of_somebody_else_is_named() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        os.seteuid(65534)
        try:
            with pytest.raises(NotPermitted, match="run as the owner of the state directory"):
                SqliteCatalog(Path(folder) / "catalog.db")
        finally:
            os.seteuid(0)


def test_a_creation_that_was_cut_off_is_repeated(tmp_path: Path) -> None:
    (tmp_path / "catalog.db.new").write_bytes(b"half")
    (tmp_path / "catalog.db.new-wal").write_bytes(b"half")
    SqliteCatalog(tmp_path / "catalog.db").close()
    assert {path.name for path in tmp_path.iterdir()} <= {"catalog.db", "catalog.db-wal", "catalog.db-shm"}


def test_a_full_disk_changes_nothing(small_disk: Path) -> None:
    path = small_disk / "catalog.db"
    catalog = SqliteCatalog(path)
    image = make_image()
    catalog.images.add(image)
    trajectory, first = begin(image)
    catalog.trajectories.add([(trajectory, first)])
    (small_disk / "reserve").write_bytes(b"\0" * 262144)
    heads = [first]
    with pytest.raises(OutOfSpace, match="free some space"):  # noqa: PT012 - until it is full
        while True:
            heads.append(committed(catalog, heads[-1], "x" * 10_000))
    assert catalog.snapshots.of_trajectory(trajectory.id) == heads
    (small_disk / "reserve").unlink()
    heads.append(committed(catalog, heads[-1], "after"))
    catalog.close()
    catalog = SqliteCatalog(path)
    try:
        assert catalog.snapshots.of_trajectory(trajectory.id) == heads
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


def test_a_catalog_that_is_opened_on_a_full_disk_is_not_damaged(small_disk: Path) -> None:
    path = small_disk / "catalog.db"
    SqliteCatalog(path).close()
    Path(f"{path}-shm").unlink(missing_ok=True)
    with pytest.raises(OSError, match="No space"), (small_disk / "filler").open("wb", buffering=0) as filler:  # noqa: PT012
        while True:
            filler.write(b"\0" * 4096)
    with pytest.raises(OutOfSpace):
        SqliteCatalog(path)
    (small_disk / "filler").unlink()
    SqliteCatalog(path).close()


def steps(catalog: SqliteCatalog, action: Callable[[], object]) -> int:
    """What an action costs, counted in SQLite's own steps."""
    count = 0

    def tick() -> bool:
        nonlocal count
        count += 1
        return False

    connection = catalog._db.connection
    connection.set_progress_handler(tick, 1)
    try:
        action()
    finally:
        connection.set_progress_handler(None)
    return count


@pytest.mark.parametrize("size", [1000, pytest.param(10_000, marks=pytest.mark.long)])
def test_no_statement_of_a_commit_or_lookup_scans(tmp_path: Path, size: int) -> None:
    """Costs are counted in SQLite's own steps: they must not depend on how much history there is."""
    catalog = SqliteCatalog(tmp_path / "catalog.db")
    _, head = started(catalog, "long")
    for n in range(size):
        catalog.snapshots.set_stored(head.id, TreeID("1" * 64), RecordID("2" * 64))
        head = committed(catalog, head, f"message {n}")
    try:
        assert steps(catalog, lambda: committed(catalog, head, "one more")) < 600
        assert steps(catalog, lambda: catalog.refs.find_snapshot(head.id[:12])) < 400
        assert steps(catalog, lambda: catalog.refs.find_trajectory("long")) < 300
        assert steps(catalog, lambda: catalog.snapshots.get(head.id)) < 300
        assert steps(catalog, lambda: catalog.refs.tag(head.id, "tag")) < 200
        assert steps(catalog, lambda: catalog.snapshots.of_trajectory(head.trajectory, 50)) < 50 * 150
        assert steps(catalog, lambda: catalog.snapshots.count(head.trajectory)) < 10 * size
        assert steps(catalog, lambda: catalog.conversations.own(head.id)) < 200
        assert steps(catalog, catalog.snapshots.unstored) < 200
        assert steps(catalog, catalog.snapshots.unstored_blobs) < 200
        assert steps(catalog, lambda: catalog.snapshots.set_stored(head.id, TreeID("1" * 64), RecordID("2" * 64))) < 200
        assert steps(catalog, lambda: catalog.snapshots.set_pruned([head.id])) < 200
        assert steps(catalog, lambda: catalog.snapshots.set_state([head.id], SnapshotState.LOST)) < 200
        assert steps(catalog, catalog.snapshots.referenced_records) < 20 * size
        assert steps(catalog, catalog.snapshots.referenced_records) < 20 * size
        assert steps(catalog, lambda: next(catalog.conversations.read(head.id))) < 100 * 500  # one page
    finally:
        catalog.close()


def grown(size: int) -> tuple[SqliteCatalog, Snapshot]:
    """A trajectory of so many snapshots, each with a message, a call in the journal and a state of its own; and its
    head."""
    catalog = SqliteCatalog(":memory:")
    image = make_image()
    trajectory, first = begin(image)
    line = [first]
    rows = [SnapshotRow(first)]
    for n in range(size):
        line.append(follow(line[-1], messages=1, stack=first.stack, own_layers=0))
        entry = ended_entry(line[-2], snapshot=line[-1].id, number=n)
        rows.append(SnapshotRow(line[-1], (Message("user", f"{n}"),), None, (entry,), {"n": n}))
    catalog.others.restore([image], [replace(trajectory, head=line[-1].id, began=first.id)], rows)
    return catalog, line[-1]


def costs(catalog: SqliteCatalog, head: Snapshot) -> dict[str, int]:
    """What the everyday things cost there, in steps."""
    back = catalog.snapshots.of_trajectory(head.trajectory, 3)[0]
    found: dict[str, int] = {}
    fence = catalog.trajectories.draw_fence(head.trajectory)
    intents = [make_entry(head) for _ in range(2)]
    ends = [Ended(entry.id, CallStatus.DONE, 5, "result") for entry in intents]
    made: list[Snapshot] = [head]

    def commit(*texts: str, **fields: Any) -> None:
        made.append(committed(catalog, made[-1], *texts, stack=head.stack, own_layers=0, **fields))

    found["draw_fence"] = steps(catalog, lambda: catalog.trajectories.draw_fence(head.trajectory))
    fence += 1
    found["begin"] = steps(catalog, lambda: catalog.journal.begin(head.trajectory, intents[0], fence=fence))
    catalog.journal.begin(head.trajectory, intents[1])
    found["end"] = steps(catalog, lambda: catalog.journal.end(head.trajectory, ends[0]))
    found["unbound"] = steps(catalog, lambda: catalog.journal.unbound(head.trajectory))
    found["commit"] = steps(
        catalog, lambda: commit("one", ended=ends[1], entries=[ended_entry(head)], saved={"new": 1}, fence=fence)
    )
    found["rewind"] = steps(catalog, lambda: commit("two", after=back, keep=back.messages - 1))
    found["commit after it"] = steps(catalog, lambda: commit("three"))
    for own in (catalog.conversations.own, catalog.journal.own, catalog.conversations.own_state):
        found[own.__name__] = steps(catalog, lambda own=own: own(made[1].id))  # type: ignore[misc]
    found["state"] = steps(catalog, lambda: catalog.conversations.state(head.id))
    found["find"] = steps(
        catalog, lambda: (catalog.journal.get(intents[0].id), catalog.journal.find(intents[0].id[:12]))
    )
    found["last of the conversation"] = steps(
        catalog, lambda: list(catalog.conversations.read(made[-1].id, made[-1].messages - 3))
    )
    found["last of the journal"] = steps(catalog, lambda: list(catalog.journal.read(made[1].id, back.id)))
    return found


def test_a_long_trajectory_costs_no_more_than_a_short_one() -> None:
    """A step, a rewind and a look at what is new cost the same after 10 snapshots and after 10,000."""
    found = []
    for size in (10, 10_000):
        catalog, head = grown(size)
        try:
            found.append(costs(catalog, head))
        finally:
            catalog.close()
    short, long = found
    assert short["commit"] > 100, "steps are counted"
    for action, count in short.items():
        assert long[action] <= count * 1.1 + 5, action
