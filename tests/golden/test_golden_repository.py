"""A repository as an older version wrote it: it is read, checked, and brought back from its packs alone. The files never
change.

The folder was made once by `make.py` of its version; what it holds is in its `expected.json`.
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
from snapshotd.engine.storage.rebuild import rebuild
from snapshotd.errors import VersionMismatch
from snapshotd.repo.base import Roots
from snapshotd.repo.format import pack
from snapshotd.repo.format.index import INDEX_VERSION
from snapshotd.repo.key import load_key
from snapshotd.repo.reading.reader import PackReader
from snapshotd.repo.spool import Spool
from snapshotd.repo.upkeep.maintenance import PackMaintenance
from snapshotd.repo.writing.writer import PackRepository
from snapshotd.types import BlobID, SnapshotID, SnapshotState
from tests.golden import make

GOLDEN = Path(__file__).parent / f"repository-v{pack.PACK_VERSION}"


def quiet(_: str) -> None:
    pass


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy that may be changed."""
    copy = tmp_path / "golden"
    shutil.copytree(GOLDEN, copy)
    for path in copy.rglob("*"):
        path.chmod(0o700 if stat.S_ISDIR(path.stat().st_mode) else 0o600)
    return copy


def expected(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "expected.json").read_text())
    return found


def roots(folder: Path) -> Roots:
    with closing(SqliteCatalog(folder / "catalog.db")) as catalog:
        stored = [one for one in catalog.snapshots.all() if one.state is SnapshotState.STORED]
        trees = {one.tree: str(one.id) for one in stored if one.tree is not None}
        trees.update({image.tree: str(image.id) for image in catalog.images.list() if image.tree is not None})
        outputs = {
            blob: str(one.id)
            for one in stored
            for blob in (one.call.output, one.call.stdout, one.call.stderr)
            if blob is not None
        }
        return Roots(trees, outputs, dict.fromkeys(catalog.snapshots.referenced_records(), ""))


def sound(folder: Path) -> int:
    """How many objects a check of every byte saw."""
    maintenance = PackMaintenance(make.store_of(folder), folder / "index.db", load_key(folder))
    result = maintenance.check(roots(folder), read_data=True, progress=quiet)
    maintenance.writer().close()
    assert not result.faults
    return result.objects


def frames(folder: Path) -> list[pack.Frame]:
    packs = [path.read_bytes() for path in (folder / "store" / "packs").rglob("*") if path.is_file()]
    return [frame for data in packs for frame in pack.frames(data) if isinstance(frame, pack.Frame)]


def test_it_has_payloads_of_each_kind() -> None:
    """With the dictionary and without, alone and before the base of a delta."""
    kinds = {(frame.dictionary, frame.base is not None) for frame in frames(GOLDEN)}
    assert kinds == {(False, False), (True, False), (True, True)}


def test_packs_and_an_index_of_an_older_version_are_refused(folder: Path) -> None:
    path = next(path for path in (folder / "store" / "packs").rglob("*") if path.is_file())
    data = bytearray(path.read_bytes())
    data[8:10] = (pack.PACK_VERSION - 1).to_bytes(2, "little")
    with pytest.raises(VersionMismatch, match=r"older snapshotd .format 1, this one knows 2"):
        pack.check_head(data, bytes.fromhex(path.name))
    SqliteCatalog(":memory:").close()  # loads the checksums of pages
    with closing(apsw.Connection(str(folder / "index.db"))) as index:
        index.execute(f"PRAGMA user_version = {INDEX_VERSION - 1}")
    with pytest.raises(VersionMismatch, match="older snapshotd"):
        PackRepository(make.store_of(folder), folder / "index.db", load_key(folder))


def test_it_goes_on(folder: Path) -> None:
    """New versions of what it has are deltas, with the dictionary."""
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


def test_everything_is_read_as_it_was(folder: Path) -> None:
    assert make.read(folder) == expected(folder)
    assert sound(folder) > 40


def test_an_output_that_waits_is_read(folder: Path) -> None:
    with closing(Spool(folder)) as spool:
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


def test_the_present_format_is_the_golden_one(tmp_path: Path) -> None:
    """What is made today has the same content; a new format needs a new folder."""
    (tmp_path / "now").mkdir()
    make.make(tmp_path / "now")
    now = expected(tmp_path / "now")
    golden = expected(GOLDEN)
    assert [facts["tree"] for facts in now["snapshots"].values() if facts["tree"]]
    assert sorted(json.dumps(f["tree"], sort_keys=True) for f in now["snapshots"].values()) == sorted(
        json.dumps(f["tree"], sort_keys=True) for f in golden["snapshots"].values()
    )
