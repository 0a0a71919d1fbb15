"""What is flushed is there: after a write that failed, or a child that was killed, nothing counts as archived that was
given up with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from snapshotd.engine.storage.archiver import Archiver, ArchiverService
from snapshotd.errors import InternalError
from snapshotd.layers.store import LayerStore
from snapshotd.repo.spool import Spool
from snapshotd.repo.upkeep.maintenance import PackMaintenance
from snapshotd.store.memory import MemoryStore
from snapshotd.types import RecordID

KEY = b"k" * 32


class Outage(MemoryStore):
    """A service that cannot be reached for a while."""

    down = False

    def put(self, key: str, parts: Any) -> None:
        if self.down:
            raise OSError(111, "the service cannot be reached")
        super().put(key, parts)


class Rig:
    def __init__(self, path: Path) -> None:
        self._path = path
        (path / "layers").mkdir()
        self.store, self._layers, self._spool = Outage(), LayerStore(path / "layers", "plain"), Spool(path / "repo")
        self.archiver = Archiver([])
        self.archiver._child = self  # type: ignore[assignment]
        self.start()

    def start(self) -> None:
        """The child, in this process."""
        self.maintenance = PackMaintenance(self.store, self._path / "index", KEY)
        self._service = ArchiverService(self.maintenance, self._layers, self._spool)

    def kill(self) -> None:
        self.maintenance._end_writer()
        self.start()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        return self._service(request, lambda _: None)

    def whole(self, *wanted: RecordID) -> None:
        found = {record for record, _ in self.maintenance.writer().records()}
        assert found == set(wanted)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.maintenance._end_writer()


def test_an_outage_of_the_store_passes(rig: Rig) -> None:
    kept = rig.archiver.archive_record(b"kept", None)
    rig.archiver.flush()
    rig.store.down = True
    for _ in range(2):
        rig.archiver.begin()
        rig.archiver.archive_record(b"a", None)
        with pytest.raises(OSError, match="cannot be reached"):
            rig.archiver.flush()
    rig.store.down = False
    rig.archiver.begin()
    again = [rig.archiver.archive_record(name, None) for name in (b"a", b"b")]
    rig.archiver.flush()
    rig.whole(kept, *again)


@pytest.mark.parametrize("how", ["given up", "killed"])
def test_what_was_given_up_meanwhile_does_not_count_as_flushed(rig: Rig, how: str) -> None:
    rig.archiver.begin()
    rig.archiver.archive_record(b"a", None)
    if how == "killed":
        rig.kill()
    else:
        rig.maintenance.writer().give_up()
    rig.archiver.archive_record(b"b", None)
    with pytest.raises(InternalError, match="archived again"):
        rig.archiver.flush()
    again = [rig.archiver.archive_record(name, None) for name in (b"a", b"b")]
    rig.archiver.flush()
    rig.whole(*again)
