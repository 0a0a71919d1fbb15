"""Repositories as older versions wrote them: they are read, checked, and brought back from their packs alone. The files
never change.

Each folder was made once by `make.py` of its version; what it holds is in its `expected.json`.
"""

from __future__ import annotations

import json
import shutil
import stat
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import pytest

from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.engine.storing.rebuild import rebuild
from snapshotd.repo.base import Roots
from snapshotd.repo.format import pack
from snapshotd.repo.format.index import INDEX_VERSION
from snapshotd.repo.key import load_key
from snapshotd.repo.reading.reader import PackReader
from snapshotd.repo.spool import FileSpool
from snapshotd.repo.upkeep.maintenance import PackMaintenance
from snapshotd.repo.writing.writer import PackRepository
from snapshotd.types import BlobID, SnapshotID, SnapshotState
from tests.golden import make

VERSIONS = sorted(path.name for path in Path(__file__).parent.glob("repository-v*"))


def quiet(_: str) -> None:
    pass


@pytest.fixture(params=VERSIONS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy that may be changed."""
    copy = tmp_path / "golden"
    shutil.copytree(Path(__file__).parent / request.param, copy)
    for path in copy.rglob("*"):
        path.chmod(0o700 if stat.S_ISDIR(path.stat().st_mode) else 0o600)
    return copy


def expected(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "expected.json").read_text())
    return found


def roots(folder: Path) -> Roots:
    with closing(SqliteCatalog(folder / "catalog.db")) as catalog:
        stored = [one for one in catalog.all_snapshots() if one.state is SnapshotState.STORED]
        trees = {one.tree: str(one.id) for one in stored if one.tree is not None}
        trees.update({image.tree: str(image.id) for image in catalog.images() if image.tree is not None})
        outputs = {
            blob: str(one.id)
            for one in stored
            for blob in (one.call.output, one.call.stdout, one.call.stderr)
            if blob is not None
        }
        return Roots(trees, outputs, dict.fromkeys(catalog.referenced_records(), ""))


def sound(folder: Path) -> int:
    """How many objects a check of every byte saw."""
    maintenance = PackMaintenance(make.store_of(folder), folder / "index.db", load_key(folder))
    result = maintenance.check(roots(folder), read_data=True, progress=quiet)
    maintenance.writer().close()
    assert not result.faults
    return result.objects


def test_there_is_one_for_every_version() -> None:
    assert VERSIONS == ["repository-v1", "repository-v2"]


def frames(folder: Path) -> list[pack.Frame]:
    packs = [path.read_bytes() for path in (folder / "store" / "packs").rglob("*") if path.is_file()]
    return [frame for data in packs for frame in pack.frames(data) if isinstance(frame, pack.Frame)]


def test_each_holds_what_its_version_brought() -> None:
    """Version 2: the dictionary, alone and before the base of a delta."""
    one, two = (
        {(f.dictionary, f.base is not None) for f in frames(Path(__file__).parent / version)} for version in VERSIONS
    )
    assert one == {(False, False)}
    assert two == {(False, False), (True, False), (True, True)}


def test_an_older_repository_goes_on_in_the_present_format(folder: Path) -> None:
    """New versions of what an older one stored are deltas against it, with the dictionary."""
    old = {frame.payload.tobytes() for frame in frames(folder)}
    repository = PackRepository(make.store_of(folder), folder / "index.db", load_key(folder))
    texts = []
    for number in range(3):
        text = b"version %d\n" % number + b"the rest stays as it is\n" * 200
        previous = BlobID(repository.reader.identity.content(text).hex())
        assert repository.contains(previous)
        texts.append(text + b"and the class has a new method that returns self.value\n")
        repository.save_bytes(texts[-1], previous)
    repository.flush()
    found = [frame for frame in frames(folder) if frame.payload.tobytes() not in old]
    assert [(frame.dictionary, frame.base is not None) for frame in found] == [(True, True)] * 3
    for text in texts:
        assert b"".join(repository.load(BlobID(repository.reader.identity.content(text).hex()))) == text
    repository.close()
    assert sound(folder) > 40
    assert make.read(folder) == expected(folder)
    with closing(apsw.Connection(str(folder / "index.db"))) as index:
        assert index.pragma("user_version") == INDEX_VERSION, "an older snapshotd says that it cannot read this"


def test_everything_is_read_as_it_was(folder: Path) -> None:
    assert make.read(folder) == expected(folder)
    assert sound(folder) > 40


def test_an_output_that_waits_is_read(folder: Path) -> None:
    with closing(FileSpool(folder)) as spool:
        (blob,) = spool.blobs()
        assert b"".join(spool.load_blob(BlobID(blob))) == b"an output that is not archived yet\n" * 100


def test_the_index_comes_back_from_the_packs(folder: Path) -> None:
    objects = sound(folder)
    for path in folder.glob("index.db*"):
        path.unlink()
    maintenance = PackMaintenance(make.store_of(folder), folder / "index.db", load_key(folder))
    assert maintenance.repair(quiet).actions
    maintenance.writer().close()
    assert sound(folder) == objects
    assert make.read(folder) == expected(folder)


def test_the_catalog_comes_back_from_the_records(folder: Path) -> None:
    wanted = expected(folder)["snapshots"]
    for path in folder.glob("catalog.db*"):
        path.unlink()
    with (
        closing(PackReader(make.store_of(folder), folder / "index.db", load_key(folder))) as repository,
        closing(SqliteCatalog(folder / "catalog.db")) as catalog,
    ):
        report = rebuild(repository.records(), catalog, repository.contains)
        assert not report.unreadable
        assert not report.left_out
    found = make.read(folder)["snapshots"]
    stored = {one for one, facts in wanted.items() if facts["tree"] is not None}
    assert found.keys() == stored, "what was not stored has no record"
    for one in stored:
        wanted[one]["row"] = wanted[one]["row"].replace("('kept',)", "()")  # no record of tags was written
        assert found[one] == wanted[one], SnapshotID(one)


def test_the_present_format_is_the_newest_golden_one(tmp_path: Path) -> None:
    """What is made today has the same content; a new format needs a new folder beside the old ones."""
    (tmp_path / "now").mkdir()
    make.make(tmp_path / "now")
    now = expected(tmp_path / "now")
    golden = expected(Path(__file__).parent / VERSIONS[-1])
    assert [facts["tree"] for facts in now["snapshots"].values() if facts["tree"]]
    assert sorted(json.dumps(f["tree"], sort_keys=True) for f in now["snapshots"].values()) == sorted(
        json.dumps(f["tree"], sort_keys=True) for f in golden["snapshots"].values()
    )
