"""What `repair` makes of snapshots whose layers are there and of such whose layers are gone."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator, Sequence

import pytest

from snapshotd.api.storage import CheckRequest
from snapshotd.engine.engine import Engine
from snapshotd.engine.storage.archiver import ArchivedTree
from snapshotd.engine.storage.merging import FAN_IN
from snapshotd.errors import InternalError
from snapshotd.types import BlobID, LayerID, SnapshotState, TreeID, short
from tests import mind_rig
from tests.e2e.support import wait_until

pytestmark = pytest.mark.runc


@pytest.fixture
def engine(engine: Engine) -> Iterator[Engine]:
    yield engine
    mind_rig.clear(engine)


def test_nothing_is_stored_again_on_a_damaged_tree(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest snapshot stands on a merged layer, so it is there, though the layers of the one before it are gone."""
    agent = mind_rig.agent(engine)
    taken = []
    for number in range(FAN_IN + 3):
        taken.append(agent.tool("write", {}, f"echo {number} > file{number}"))
        engine.life._background.wait()
    engine.storage.flush()
    cold, hot, gone = next(
        (base, child, base.stack.layers[-1])
        for base, child in itertools.pairwise(engine.snapshots.get(one.id) for one in taken)
        if base.stack.layers[-1] not in child.stack.layers
    )
    assert hot.base == cold.id
    assert engine.life._context.store.evict(gone)
    assert not engine.life._cold.is_hot(cold)
    assert engine.life._cold.is_hot(hot)
    assert None not in (cold.tree, hot.tree)
    monkeypatch.setattr(engine.life._upkeep, "_find_unreadable", lambda _: {cold.tree, hot.tree})
    built_on: list[TreeID] = []
    store_tree = engine.life._archive._batches.archiver.archive_tree

    def tree(layers: Sequence[LayerID], parent: TreeID, outputs: Sequence[BlobID]) -> ArchivedTree:
        built_on.append(parent)
        return store_tree(layers, parent, outputs)

    monkeypatch.setattr(engine.life._archive._batches.archiver, "archive_tree", tree)
    report = engine.storage.repair(lambda _: None)
    assert cold.id in report.lost
    assert hot.id not in report.lost
    assert engine.snapshots.get(hot.id).state is SnapshotState.STORED
    assert built_on
    assert cold.tree not in built_on


def test_what_the_archive_cannot_store_costs_the_others_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storing one snapshot ends the archive's process each time, also at the last try: what was stored with it was not
    durable yet."""
    agent = mind_rig.agent(engine)
    monkeypatch.setattr("snapshotd.engine.storage.archive_queue._RETRY_S", (0.05,))
    archiver = engine.life._archive._batches.archiver
    store_tree = archiver.archive_tree
    poisonous: list[BlobID] = []

    def tree(layers: Sequence[LayerID], parent: TreeID, outputs: Sequence[BlobID]) -> ArchivedTree:
        if set(poisonous) & set(outputs):
            pid = archiver.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: archiver.pid is None, "it is gone")
            raise InternalError("the worker process ended")
        return store_tree(layers, parent, outputs)

    monkeypatch.setattr(archiver, "archive_tree", tree)
    engine.storage.flush()
    with engine.life._archive.pause():
        good = [agent.tool("write", {}, f"echo {number} > file{number}") for number in range(3)]
        bad = agent.tool("write", {}, "echo bad > bad", result="an output of its own")
        poisonous += bad.call.outputs
        assert poisonous
    wait_until(
        lambda: all(engine.snapshots.get(one.id).state is SnapshotState.STORED for one in good), "the others are stored"
    )
    with pytest.raises(InternalError, match="cannot be stored"):
        engine.storage.flush()
    assert engine.snapshots.get(bad.id).state is SnapshotState.CAPTURED
    assert not engine.storage.check(CheckRequest(read_data=True), lambda _: None).damages
    poisonous.clear()
    engine.life._archive.retry()
    engine.storage.flush()
    assert engine.snapshots.get(bad.id).state is SnapshotState.STORED


def test_a_damaged_image_is_stored_again_from_its_directory(engine: Engine) -> None:
    """Its files fill the largest pack."""
    agent = mind_rig.agent(engine)
    taken = agent.tool("write", {}, "echo one > file")
    engine.runs.stop(agent.id)
    engine.storage.flush()
    store = engine.life._context.state_dir / "repo" / "store"
    pack = max((path for path in store.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.chmod(0o600)
    pack.write_bytes(data)
    assert engine.storage.check(CheckRequest(read_data=True), lambda _: None).damages
    assert "image default was stored again from its directory" in engine.storage.repair(lambda _: None).actions
    assert not engine.storage.check(CheckRequest(read_data=True), lambda _: None).damages
    assert engine.snapshots.get(taken.id).state is SnapshotState.STORED


def test_what_the_layers_still_had_is_not_said_to_be_gone(engine: Engine) -> None:
    agent = mind_rig.agent(engine)
    taken = agent.tool("write", {}, "head -c 300000 /dev/urandom > file")
    engine.storage.flush()
    for pack in (engine.life._context.state_dir / "repo" / "store" / "packs").glob("??/*"):
        data = bytearray(pack.read_bytes())
        data[len(data) // 2] ^= 0xFF
        pack.write_bytes(data)
    report = engine.storage.repair(lambda _: None)
    assert f"snapshot {short(taken.id)} was stored again from its layers" in report.actions
    assert report.lost == ()
    assert [action for action in report.actions if "cannot be brought back" in action] == []
