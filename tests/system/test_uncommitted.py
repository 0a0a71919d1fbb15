"""What a step leaves in the layer directory when it cannot be committed, and what comes back there, is gone once nobody
needs it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from snapshotd.api.trajectories import RemoveQuery, StopQuery
from snapshotd.catalog.base import Catalog
from snapshotd.catalog.tables.snapshots import SnapshotTable
from snapshotd.engine.engine import Engine
from snapshotd.engine.storage import cold, evict, records
from snapshotd.errors import OutOfSpace
from snapshotd.types import Image, Snapshot, SnapshotState, TrajectoryStatus
from tests import mind_rig, way
from tests.e2e.support import wait_until

pytestmark = pytest.mark.runc
COPIED = "sleep 600 < /dev/null > /dev/null 2>&1 & echo {0} > file{0}"
"""With something alive inside the step is taken by copying."""
SEALED = "echo {0} > file{0}"


@pytest.fixture
def engine(engine: Engine) -> Iterator[Engine]:
    yield engine
    mind_rig.clear(engine)


def refuse(*_: object, **__: object) -> None:
    raise OutOfSpace("the catalog's disk is full")


def _filled(engine: Engine) -> list[str]:
    """The layers that a sweep leaves, but for those made ahead."""
    engine.life._disposal.sweep()
    return [
        name
        for name in engine.life._context.store.layers()
        if any((engine.life._context.store.root / name / "upper").iterdir())
    ]


@pytest.mark.parametrize(
    ("runtime", "script"),
    [("runc", SEALED), ("runc", COPIED), ("none", SEALED), ("none", COPIED)],
    ids=["sealed", "copied", "in a folder", "in a folder with something alive"],
)
def test_a_step_that_is_never_committed(engine: Engine, runtime: str, script: str) -> None:
    agent = mind_rig.agent(engine, runtime)
    agent.tool("write", {}, script.format(0))
    engine.storage.flush()  # what stores the first step holds its layers meanwhile
    store = engine.life._context.store
    before = dict(store._held)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SnapshotTable, "commit", refuse)
        for number in (1, 2):
            with pytest.raises(OutOfSpace):
                agent.tool("write", {}, script.format(number))
            engine.life._disposal.sweep()
        held = sum(store._held.values()) - sum(before.values())
        assert held <= 2, "each uncommitted step is held once, as a part of what the sandbox stands on"
        engine.runs.remove(agent.id, RemoveQuery(force=True))
    assert not store._held
    assert not _filled(engine)


def test_a_copy_that_is_never_committed(engine: Engine) -> None:
    """It is gone with the next copy, though the sandbox lives."""
    agent = mind_rig.agent(engine)
    agent.tool("write", {}, COPIED.format(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SnapshotTable, "commit", refuse)
        for number in (1, 2):
            with pytest.raises(OutOfSpace):
                agent.tool("write", {}, SEALED.format(number))
    last = agent.tool("write", {}, SEALED.format(3))
    assert last.method == way.COPY
    engine.life._background.wait()
    assert set(_filled(engine)) == {*engine.life._catalog.snapshots.referenced_layers(), agent.sandbox.root.upper}


def test_a_stop_without_room_says_how_to_end_without_a_last_snapshot(engine: Engine) -> None:
    agent = mind_rig.agent(engine)
    head = agent.tool("write", {}, SEALED.format(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SnapshotTable, "commit", refuse)
        with pytest.raises(OutOfSpace):
            agent.tool("write", {}, SEALED.format(1))
        with pytest.raises(
            OutOfSpace, match=r"disk is full; `snapshotd stop --discard .*` ends it .*loses what changed"
        ):
            engine.runs.stop(agent.id)
        assert engine.snapshots.trajectory(agent.id).status is TrajectoryStatus.RUNNING
        stopped = engine.runs.stop(agent.id, StopQuery(discard=True))
    assert (stopped.status, stopped.head) == (TrajectoryStatus.STOPPED, head.id)
    assert engine.life._sessions.find(agent.id) is None


def test_one_that_is_removed_while_it_is_stored_is_no_failure(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snapshots of others are stored with the same batch."""
    gone, stays = mind_rig.agent(engine), mind_rig.agent(engine)
    engine.storage.flush()
    encode = records.encode_from

    def removed_first(catalog: Catalog, snapshot: Snapshot, image: Image) -> bytes:
        if snapshot.trajectory == gone.id and snapshot.trajectory in {
            one.id for one in engine.snapshots.trajectories()
        }:
            engine.runs.remove(gone.id, RemoveQuery(force=True))
        return encode(catalog, snapshot, image)

    monkeypatch.setattr(records, "encode_from", removed_first)
    for agent in (gone, stays):
        agent.tool("write", {}, SEALED.format(0))
    engine.storage.flush()
    assert [one.id for one in engine.snapshots.trajectories()] == [stays.id]
    assert engine.snapshots.get(stays.head.id).state is SnapshotState.STORED


def test_what_came_back_goes_again_by_itself(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork of a cold snapshot is removed before its layer is written, and nothing else happens after that."""
    monkeypatch.setattr(evict, "budget_bytes", lambda _: 0)
    may_end = threading.Event()
    monkeypatch.setattr(cold, "hit", lambda _: may_end.wait(60))
    agent = mind_rig.agent(engine)
    agent.tool("write", {}, "echo 0 > file")
    engine.runs.stop(agent.id)
    engine.storage.flush()

    def evicted() -> bool:
        engine.life._disposal.evict()
        return not set(agent.head.stack.layers) & set(engine.life._context.store.layers())

    wait_until(evicted, "no other thread holds its layer any more")
    stack = engine.life._cold.take(agent.head)
    engine.life._context.store.release(stack.layers)
    (layer,) = stack.layers
    assert engine.life._context.store.lazy(layer), "it is still to be written"
    may_end.set()
    wait_until(lambda: not engine.life._context.store.lazy(layer), "it is written")
    wait_until(lambda: layer not in engine.life._context.store.layers(), "the layer directory keeps its budget")
