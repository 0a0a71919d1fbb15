"""A snapshot that could not be stored because its worker died again and again is stored later, without a restart."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.daemon.children import StatePlaces
from snapshotd.engine.context import Context
from snapshotd.engine.storage import archive_queue
from snapshotd.engine.storage.archive_queue import Archive
from snapshotd.engine.storage.archiver import Archiver
from snapshotd.errors import InternalError, Unavailable
from snapshotd.layers.store import LayerStore
from snapshotd.repo.spool import Spool
from snapshotd.types import ImageID, SnapshotState, TreeID
from tests.records import begin, make_image
from tests.storage_rig import wait_until

_DIES = 'n=$(cat $0); if [ $n -gt 0 ]; then echo $((n - 1)) > $0; exit 1; fi; exec "$@"'
"""A worker that dies at its start as often as a file says."""


class Rig:
    def __init__(self, state: Path) -> None:
        (state / "layers").mkdir()
        self._deaths = state / "deaths"
        self.catalog, self.store = SqliteCatalog(state / "catalog.db"), LayerStore(state / "layers", "plain")
        image = make_image()
        (state / "layers/images" / image.id / "root").mkdir(parents=True)
        self.catalog.images.add(image)
        trajectory, first = begin(image)
        self.snapshot = replace(first, call=replace(first.call, output=None, stdout=None, stderr=None))
        self.catalog.trajectories.add([(trajectory, self.snapshot)])
        spool = Spool(state / "repo")
        places = StatePlaces(state, state / "layers", "plain", (state / "repo/store").as_uri())
        context = SimpleNamespace(
            catalog=self.catalog,
            store=self.store,
            spool=spool,
            image=lambda _: self.catalog.images.list()[0],
            secrecy=SimpleNamespace(vault=SimpleNamespace(flush=lambda: None)),
        )
        command = ["sh", "-c", _DIES, str(self._deaths), *places.command("archive")]
        self.archiver = Archiver(command)
        self.archive = Archive(cast(Context, context), self.archiver)

    def die(self, times: int) -> None:
        self._deaths.write_text(f"{times}\n")

    def kill_worker(self) -> None:
        """The one that is there now."""
        pid = self.archiver.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: self.archiver.pid is None, "the worker is gone")

    def stored(self) -> bool:
        return self.catalog.snapshots.get(self.snapshot.id).state is SnapshotState.STORED


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(archive_queue, "_RETRY_S", (0.0,))
    made = Rig(tmp_path)
    yield made
    made.archive.close()
    made.catalog.close()
    made.store.close()


def test_it_is_tried_again_after_a_while(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_queue, "_STUCK_S", 0.01)
    rig.die(archive_queue._STRIKES + 1)
    rig.archive.start(lambda: None)
    wait_until(rig.stored, "the snapshot is stored in the end")
    assert rig.archive.stuck is None


def test_who_waits_has_it_tried_again(rig: Rig) -> None:
    rig.die(archive_queue._STRIKES)
    rig.archive.start(lambda: None)
    wait_until(lambda: rig.archive.stuck is not None and rig.archive.failure is None, "it is given up for a while")
    rig.die(1)
    rig.kill_worker()
    with pytest.raises(InternalError, match="cannot be stored yet, and is tried again each minute"):
        rig.archive.wait()
    rig.archive.wait()
    assert rig.stored()


def test_a_bucket_that_does_not_answer_sets_no_snapshot_aside(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the same for all, so the batch waits, and is tried again."""
    archive_image, tries = rig.archiver.archive_image, list[str]()

    def away(image: ImageID) -> TreeID:
        tries.append(image)
        if len(tries) < 6:  # more often than a snapshot is tried before it is set aside
            raise Unavailable("the bucket does not answer")
        return archive_image(image)

    rig.die(0)
    monkeypatch.setattr(rig.archiver, "archive_image", away)
    rig.archive.start(lambda: None)
    wait_until(rig.stored, "the snapshot is stored")
    assert (len(tries), dict(rig.archive._batches.stuck)) == (6, {})
