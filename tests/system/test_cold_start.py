"""Starting from snapshots whose layers are gone, or go just now, with the real kernel and runtime."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.engine.engine import Engine
from snapshotd.engine.storage import evict
from snapshotd.types import Snapshot, SnapshotState
from tests import mind_rig
from tests.e2e.support import wait_until
from tests.mind_rig import Agent

pytestmark = pytest.mark.runc


@pytest.fixture(scope="module")
def only(small_root: Path) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evict, "budget_bytes", lambda _: 0)
        with mind_rig.engine(small_root) as opened:
            yield opened


@pytest.fixture
def engine(only: Engine) -> Iterator[Engine]:
    yield only
    mind_rig.clear(only)


def make_cold(agent: Agent) -> None:
    agent.engine.runs.stop(agent.id)
    agent.engine.storage.flush()

    def is_cold() -> bool:
        agent.engine.life._disposal.evict()
        return not agent.engine.life._cold.is_hot(agent.engine.snapshots.get(agent.id))

    wait_until(is_cold, "no thread of the daemon holds the layers, so they are evicted")


def take_all(engine: Engine, snapshot: Snapshot) -> None:
    """Its files can be mounted."""
    stack = engine.life._cold.take(snapshot)
    engine.life._context.store.release(stack.layers)


def test_a_snapshot_that_was_stored_and_evicted_since_it_was_read(engine: Engine) -> None:
    agent = mind_rig.agent(engine)
    with engine.life._archive.pause():
        read = agent.tool("write", {}, "echo one > file")
    make_cold(agent)
    assert read.state is SnapshotState.CAPTURED
    assert not engine.life._cold.is_hot(read)
    take_all(engine, read)


def test_a_snapshot_on_a_layer_that_was_never_written_is_stored_first(engine: Engine) -> None:
    """As after a crash: what it was captured on is in the repository alone."""
    agent, store = mind_rig.agent(engine), engine.life._context.store
    agent.tool("write", {}, "echo one > file")
    make_cold(agent)
    with engine.life._archive.pause():
        on_cold = agent.tool("write", {}, "echo two > other")
        agent.engine.runs.stop(agent.id)
        below = on_cold.stack.layers[-1]
        wait_until(lambda: not store.lazy(below), "the layer is written")
        store.remove(below)
        read = engine.snapshots.get(on_cold.id)
        assert read.state is SnapshotState.CAPTURED
        assert not engine.life._cold.is_hot(read)
    take_all(engine, read)
    assert agent.files() == {"file": "one\n", "other": "two\n"}


def test_holes_of_a_file_that_changes_on_a_cold_start_stay_holes(engine: Engine, tmp_path: Path) -> None:
    """The kernel copies the file up from a mount that has no word for holes."""
    agent = mind_rig.agent(engine)
    make = "set -e; to() { dd if=/dev/null of=$1 bs=1 count=0 seek=$2; }; "
    holes = "for f in grown moded; do printf x | dd of=$f bs=1 seek=5000000; to $f 25165824; done"
    agent.tool("write", {}, make + holes)
    make_cold(agent)
    agent.tool("write", {}, make + "to grown 33554432; printf y >> grown; chmod 600 moded")
    agent.engine.storage.flush()
    assert agent.engine.snapshots.get(agent.id).state is SnapshotState.STORED
    make_cold(agent)
    agent.engine.snapshots.restore(agent.id, tmp_path / "out", path=b"workspace")
    grown, moded = tmp_path / "out" / "grown", tmp_path / "out" / "moded"
    data = bytearray(32 << 20) + b"y"
    data[5_000_000:5_000_001] = b"x"
    assert grown.read_bytes() == data
    assert moded.read_bytes() == data[: 24 << 20]
    assert grown.stat().st_blocks * 512 < 1 << 20
    assert moded.stat().st_blocks * 512 < 1 << 20
