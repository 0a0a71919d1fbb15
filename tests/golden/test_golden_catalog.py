"""Catalogs as older versions wrote them, and what those versions read from them. The files here never change."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import apsw
import pytest

from snapshotd.catalog import schema
from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.engine.experiments import earlier
from snapshotd.errors import Conflict, VersionMismatch
from snapshotd.types import Message, RecordID, SnapshotID, SnapshotState, TreeID
from tests.golden import make_catalog
from tests.records import committed, make_entry, trees_of

HERE = Path(__file__).parent


@pytest.fixture(params=make_catalog.OLDER)
def version(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def path(tmp_path: Path, version: int) -> Path:
    return Path(shutil.copyfile(HERE / f"catalog-v{version}.db", tmp_path / "catalog.db"))


@pytest.fixture
def catalog(path: Path) -> Iterator[SqliteCatalog]:
    opened = SqliteCatalog(path)
    yield opened
    opened.close()
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    assert connection.execute("SELECT count(*) FROM snapshots WHERE line IS NULL").fetchall() == [(0,)]
    connection.close()


def test_the_file_is_of_its_version(path: Path, version: int) -> None:
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    assert connection.execute("PRAGMA user_version").fetchall() == [(version,)]
    connection.close()


def test_there_is_one_for_every_older_version() -> None:
    assert sorted(path.name for path in HERE.glob("catalog-v*.db")) == [f"catalog-v{n}.db" for n in make_catalog.OLDER]


def test_a_version_that_is_too_old_is_refused_and_left_alone(path: Path) -> None:
    SqliteCatalog(":memory:").close()  # loads the checksums of pages
    connection = apsw.Connection(str(path))
    connection.execute(f"PRAGMA user_version = {schema.OLDEST - 1}")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(VersionMismatch, match=f"older snapshotd .format {schema.OLDEST - 1}, .*: use that version, or"):
        SqliteCatalog(path)
    assert path.read_bytes() == before


def test_everything_is_read_after_the_migration(catalog: SqliteCatalog, version: int) -> None:
    content = make_catalog.expected(version)
    assert {one["state"] for one in content["snapshots"]} == {"captured", "lost", "stored", "pruned"}
    assert make_catalog.read(catalog) == content
    assert catalog.get_meta("instance") == "7"
    assert catalog.snapshots.unstored() == [one["id"] for one in content["snapshots"] if one["state"] == "captured"]
    assert catalog.snapshots.unstored_blobs() <= set(content["blobs"])


def test_a_migrated_catalog_goes_on(catalog: SqliteCatalog) -> None:
    for line in catalog.trajectories.list():
        head = catalog.snapshots.get(line.head)
        entry = make_entry(head, id=SnapshotID("e" + line.id[1:]))
        before = catalog.journal.unbound(line.id)
        catalog.journal.begin(line.id, entry, fence=catalog.trajectories.draw_fence(line.id))
        *others, began = catalog.journal.unbound(line.id)
        assert others == before
        assert began == replace(entry, number=began.number)
        new = committed(catalog, head, "after the migration", trajectory=line.id)
        assert catalog.snapshots.get(new.id) == new
        assert new.base == head.id
        assert catalog.conversations.own(new.id) == [Message("user", "after the migration")]
        back = committed(catalog, new, "instead", after=head)
        assert list(catalog.conversations.read(back.id)) == [
            *catalog.conversations.read(head.id),
            Message("user", "instead"),
        ]
        assert catalog.journal.unbound(line.id) == []
        catalog.images.set_tree(line.spec.image, TreeID("3" * 64))
    for snapshot_id in catalog.snapshots.unstored():
        catalog.snapshots.set_stored(snapshot_id, TreeID("1" * 64), RecordID("2" * 64))
    assert catalog.snapshots.unstored() == []
    assert catalog.snapshots.get(new.id).state is SnapshotState.STORED
    assert trees_of(catalog) >= {TreeID("1" * 64), TreeID("3" * 64)}
    for trajectory in reversed(catalog.trajectories.list()):  # forks first
        with contextlib.suppress(Conflict):  # some go on from each other
            catalog.trajectories.remove(trajectory.id)
    assert [line.id for line in catalog.trajectories.list()] == list(
        dict.fromkeys(one.trajectory for one in catalog.snapshots.all())
    )
    assert len(catalog.trajectories.list()) == 3


def test_a_migrated_catalog_has_the_tables_of_a_new_one(
    catalog: SqliteCatalog, path: Path, version: int, tmp_path: Path
) -> None:
    SqliteCatalog(tmp_path / "new.db").close()
    assert described(path) == described(tmp_path / "new.db")
    fresh = Path(shutil.copyfile(HERE / f"catalog-v{version}.db", tmp_path / "old.db"))
    assert described(fresh) != described(path), "the test sees something"


def described(path: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Each table and index with its columns, defaults, references and conditions; not as which statements made them."""
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    found = {"version": connection.execute("PRAGMA user_version").fetchall()}
    for name, kind, sql in connection.execute("SELECT name, type, sql FROM sqlite_schema").fetchall():
        asked = ("table_xinfo", "foreign_key_list", "index_list") if kind == "table" else ("index_xinfo",)
        for pragma in asked:
            found[f"{pragma} {name}"] = sorted(connection.execute(f"PRAGMA {pragma}({name})").fetchall(), key=str)
        found[name] = [(kind, sql if kind == "index" else (sql or "").rpartition(")")[2])]
    connection.close()
    return found


def test_experiments_are_kept(catalog: SqliteCatalog) -> None:
    """They were values of the key-value store."""
    earlier.adopt(catalog)
    (experiment,) = catalog.experiments.list()
    assert experiment.name == "parser"
    first = catalog.snapshots.get(experiment.snapshot)
    lines = [line.id for line in catalog.trajectories.list()[:3]]
    assert first.trajectory == lines[0]
    branches = catalog.experiments.branches("parser")
    assert [(one.called, one.state, one.score, one.trajectory) for one in branches] == [
        ("cold.0", "scored", 1.0, lines[0]),
        ("warm.0", "failed", None, lines[1]),
        ("cold.1", "stopped", None, lines[2]),
        ("warm.1", "waiting", None, None),
    ]


def test_tags_are_kept(catalog: SqliteCatalog, version: int) -> None:
    tagged = {tag: SnapshotID(one["id"]) for one in make_catalog.expected(version)["snapshots"] for tag in one["tags"]}
    assert len(tagged) == 4
    assert {tag: catalog.refs.find_snapshot(tag).id for tag in tagged} == tagged
    assert catalog.refs.tags() == tagged
