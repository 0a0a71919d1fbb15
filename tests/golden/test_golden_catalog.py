"""Catalogs as older versions wrote them, and what those versions read from them. The files here never change."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import apsw
import pytest

from snapshotd.catalog import schema
from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.errors import Conflict
from snapshotd.types import Message, RecordID, SnapshotID, SnapshotState, TreeID
from tests.golden import make_catalog
from tests.records import committed, make_entry

HERE = Path(__file__).parent


@pytest.fixture(params=[1, 2, 3, 4, 5, 6])
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
    assert sorted(path.name for path in HERE.glob("catalog-v*.db")) == [
        f"catalog-v{n}.db" for n in range(1, schema.VERSION)
    ]


def test_everything_is_read_after_the_migration(catalog: SqliteCatalog, version: int) -> None:
    content = make_catalog.expected(version)
    assert len(content["snapshots"]) == {1: 6, 2: 24, 3: 24, 4: 24, 5: 24, 6: 24}[version]  # the test sees something
    assert {one["state"] for one in content["snapshots"]} == {
        "captured",
        "lost",
        *({"stored", "pruned"} if version > 1 else ()),
    }
    assert {name: value for name, value in make_catalog.read(catalog).items() if name in content} == content
    assert catalog.get_meta("instance") == "7"
    unstored = [one["id"] for one in content["snapshots"] if one["state"] == "captured"]
    assert catalog.unstored() == unstored
    assert catalog.unstored_blobs() <= catalog.referenced_blobs()
    if version == 1:
        assert not catalog.referenced_trees()
        assert not catalog.referenced_records()
    for one in content["snapshots"]:
        of = SnapshotID(one["id"])
        if version > 2:
            continue
        earlier = content["conversations"].get(one["parent"], [])
        assert [asdict(message) for message in catalog.own_messages(of)] == content["conversations"][of][len(earlier) :]
        assert (catalog.state(of), catalog.own_state(of), catalog.own_entries(of), list(catalog.journal(of))) == (
            {},
            None,
            [],
            [],
        )


def test_a_migrated_catalog_goes_on(catalog: SqliteCatalog, version: int) -> None:
    for line in catalog.trajectories():
        head = catalog.get_snapshot(line.head)
        entry = make_entry(head, id=SnapshotID("e" + line.id[1:]))
        before = catalog.unbound(line.id)
        assert version > 2 or before == []
        catalog.begin_entry(line.id, entry, fence=catalog.draw_fence(line.id))
        *others, began = catalog.unbound(line.id)
        assert others == before
        assert began == (entry if version < 3 else replace(entry, number=began.number))
        new = committed(catalog, head, "after the migration", trajectory=line.id)
        assert catalog.get_snapshot(new.id) == new
        assert new.base == head.id
        assert catalog.own_messages(new.id) == [Message("user", "after the migration")]
        back = committed(catalog, new, "instead", after=head)
        assert list(catalog.conversation(back.id)) == [*catalog.conversation(head.id), Message("user", "instead")]
        assert catalog.unbound(line.id) == []
        catalog.set_image_tree(line.spec.image, TreeID("3" * 64))
    for snapshot_id in catalog.unstored():
        catalog.set_stored(snapshot_id, TreeID("1" * 64), RecordID("2" * 64))
    assert catalog.unstored() == []
    assert catalog.get_snapshot(new.id).state is SnapshotState.STORED
    assert catalog.referenced_trees() >= {TreeID("1" * 64), TreeID("3" * 64)}
    for trajectory in reversed(catalog.trajectories()):  # forks first
        with (
            contextlib.suppress(Conflict) if version > 2 else contextlib.nullcontext()
        ):  # in the random one some go on from each other
            catalog.remove_trajectory(trajectory.id)
    assert [line.id for line in catalog.trajectories()] == list(
        dict.fromkeys(one.trajectory for one in catalog.all_snapshots())
    )
    assert len(catalog.trajectories()) == {1: 0, 2: 0, 3: 3, 4: 3, 5: 3, 6: 3}[version]
    assert version > 2 or list(catalog.all_snapshots()) == []


def test_a_migrated_catalog_looks_like_a_new_one(catalog: SqliteCatalog, path: Path, tmp_path: Path) -> None:
    SqliteCatalog(tmp_path / "new.db").close()
    described = []
    for file in (path, tmp_path / "new.db"):
        connection = apsw.Connection(str(file), flags=apsw.SQLITE_OPEN_READWRITE)
        described.append(connection.execute("SELECT type, name, sql FROM sqlite_schema ORDER BY name").fetchall())
        assert connection.execute("PRAGMA user_version").fetchall() == [(schema.VERSION,)]
        connection.close()
    assert described[0] == described[1]


def test_tags_are_kept(catalog: SqliteCatalog, version: int) -> None:
    tagged = {tag: SnapshotID(one["id"]) for one in make_catalog.expected(version)["snapshots"] for tag in one["tags"]}
    assert len(tagged) == {1: 3, 2: 5, 3: 4, 4: 4, 5: 4, 6: 4}[version]
    assert {tag: catalog.resolve_snapshot(tag).id for tag in tagged} == tagged
    assert catalog.tags() == tagged
