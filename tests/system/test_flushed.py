"""What a power cut leaves of the catalog's file: only what was flushed. `test_power_cut.py` cuts the power of a whole
disk, at random moments."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from pathlib import Path

import pytest

from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.engine.engine import Engine
from snapshotd.engine.runs.recover import mark_clean
from snapshotd.engine.storage import evict
from snapshotd.types import SnapshotState
from tests import mind_rig
from tests.e2e.support import wait_until

pytestmark = pytest.mark.runc
Left = Callable[[], AbstractContextManager[SqliteCatalog]]


@pytest.fixture
def engine(small_root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(evict, "budget_bytes", lambda _: 0)
    with mind_rig.engine(small_root) as opened:
        yield opened


@pytest.fixture
def left(engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Left:
    """Opens a copy of the catalog without the end of its WAL that was not flushed."""
    path, flush, flushed_bytes = engine.life._context.state_dir / "catalog.db", os.fdatasync, dict[int, int]()

    def fdatasync(fd: int) -> None:
        size = os.fstat(fd).st_size
        flush(fd)
        flushed_bytes[os.fstat(fd).st_ino] = size

    def opened() -> AbstractContextManager[SqliteCatalog]:
        copy, wal = tmp_path / "catalog.db", path.with_name("catalog.db-wal")
        shutil.copy(path, copy)
        shutil.copy(wal, tmp_path / wal.name)
        os.truncate(tmp_path / wal.name, flushed_bytes.get(wal.stat().st_ino, 0))
        return closing(SqliteCatalog(copy))

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    return opened


def test_a_snapshot_that_repair_gives_up_stays_lost(
    engine: Engine, left: Left, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = mind_rig.agent(engine)
    taken = agent.tool("write", {}, "echo 1 > file")
    engine.runs.stop(agent.id)
    engine.storage.flush()
    stored = engine.snapshots.get(taken.id)
    wait_until(lambda: not any(map(engine.life._context.store.is_held, stored.stack.layers)), "the layers are let go")
    engine.life._disposal.evict()
    monkeypatch.setattr(engine.life._upkeep, "_find_unreadable", lambda _: {stored.tree})
    assert taken.id in engine.storage.repair(lambda _: None).lost
    with left() as catalog:
        assert catalog.snapshots.get(taken.id).state is SnapshotState.LOST


def test_the_mark_of_a_clean_end_stays(engine: Engine, left: Left) -> None:
    """Without it the next start declares lost whatever was only captured."""
    engine.storage.flush()
    mark_clean(engine.life._context)
    with left() as catalog:
        assert catalog.get_meta("clean_boot_id") == engine.life._catalog.get_meta("boot_id")
