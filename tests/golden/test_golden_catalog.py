"""Catalogs as older versions wrote them, and what those versions read from them. The files here never change."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import apsw
import pytest

from snapshotd.catalog import schema
from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.testing.records import committed
from snapshotd.types import Message, RecordID, SnapshotID, SnapshotState, TreeID

HERE = Path(__file__).parent


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Path(shutil.copyfile(HERE / "catalog-v1.db", tmp_path / "catalog.db"))


@pytest.fixture
def catalog(path: Path) -> Iterator[SqliteCatalog]:
    opened = SqliteCatalog(path)
    yield opened
    opened.close()
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    connection.close()


def expected() -> dict[str, Any]:
    """What version 1 read, in the words of today."""
    content: dict[str, Any] = json.loads((HERE / "catalog-v1.json").read_text())
    for image in content["images"]:
        image["tree"] = None
    for snapshot in content["snapshots"]:
        was_flushed = snapshot["state"] == "stored"  # which is not yet in the repository
        snapshot |= {"state": "captured" if was_flushed else snapshot["state"], "base": None, "tree": None}
        snapshot["own_layers"] = len(snapshot["stack"]["layers"])
    return content


def shown(catalog: SqliteCatalog) -> dict[str, Any]:
    snapshots = list(catalog.all_snapshots())
    content = {
        "images": [asdict(image) for image in catalog.images()],
        "trajectories": [asdict(trajectory) for trajectory in catalog.trajectories()],
        "snapshots": [asdict(snapshot) for snapshot in snapshots],
        "conversations": {one.id: [asdict(message) for message in catalog.conversation(one.id)] for one in snapshots},
        "layers": sorted(catalog.referenced_layers()),
        "blobs": sorted(catalog.referenced_blobs()),
    }
    return json.loads(json.dumps(content))  # type: ignore[no-any-return]


def test_the_file_is_of_version_1(path: Path) -> None:
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    assert connection.execute("PRAGMA user_version").fetchall() == [(1,)]
    connection.close()


def test_everything_is_read_after_the_migration(catalog: SqliteCatalog) -> None:
    content = expected()
    assert len(content["snapshots"]) == 6  # the test sees something
    assert {one["state"] for one in content["snapshots"]} == {"captured", "lost"}
    assert shown(catalog) == content
    assert catalog.get_meta("instance") == "7"
    unstored = [one["id"] for one in content["snapshots"] if one["state"] == "captured"]
    assert catalog.unstored() == unstored
    assert not catalog.referenced_trees()
    assert not catalog.referenced_records()
    assert catalog.unstored_blobs() <= catalog.referenced_blobs()


def test_a_migrated_catalog_goes_on(catalog: SqliteCatalog) -> None:
    line = catalog.resolve_trajectory("line")
    head = catalog.get_snapshot(line.head)
    new = committed(catalog, head, "after the migration")
    assert catalog.get_snapshot(new.id) == new
    assert new.base == head.id
    assert catalog.own_messages(new.id) == [Message("user", "after the migration")]
    for snapshot_id in catalog.unstored():
        catalog.set_stored(snapshot_id, TreeID("1" * 64), RecordID("2" * 64))
    assert catalog.unstored() == []
    assert catalog.get_snapshot(new.id).state is SnapshotState.STORED
    catalog.set_image_tree(line.spec.image, TreeID("3" * 64))
    assert catalog.referenced_trees() == {TreeID("1" * 64), TreeID("3" * 64)}
    for trajectory in sorted(catalog.trajectories(), key=lambda one: one.forked_from is None):
        catalog.remove_trajectory(trajectory.id)
    assert list(catalog.all_snapshots()) == []


def test_a_migrated_catalog_looks_like_a_new_one(catalog: SqliteCatalog, path: Path, tmp_path: Path) -> None:
    SqliteCatalog(tmp_path / "new.db").close()
    described = []
    for file in (path, tmp_path / "new.db"):
        connection = apsw.Connection(str(file), flags=apsw.SQLITE_OPEN_READWRITE)
        described.append(connection.execute("SELECT type, name, sql FROM sqlite_schema ORDER BY name").fetchall())
        assert connection.execute("PRAGMA user_version").fetchall() == [(schema.VERSION,)]
        connection.close()
    assert described[0] == described[1]


def test_tags_are_kept(catalog: SqliteCatalog) -> None:
    tagged = {tag: SnapshotID(one["id"]) for one in expected()["snapshots"] for tag in one["tags"]}
    assert set(tagged) == {"best", "also", "forked"}
    assert {tag: catalog.resolve_snapshot(tag).id for tag in tagged} == tagged
