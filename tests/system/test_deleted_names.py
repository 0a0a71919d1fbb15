"""Names of deleted files stay deleted in the running root, whatever became of the layers that hold their whiteouts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.engine import evict, recover
from snapshotd.engine.base import SandboxRequest
from snapshotd.engine.engine import LocalEngine
from snapshotd.layers.lookup import ORIGIN
from snapshotd.types import Snapshot
from tests import mind_rig
from tests.e2e.support import wait_until
from tests.mind_rig import Agent

pytestmark = pytest.mark.runc

USE = "ls src && cat src/*.py && rm -rf /tmp/copy && cp -r src /tmp/copy && rm -r /tmp/copy"
"""What meets each name that a directory lists; it leaves /workspace as it is."""


@pytest.fixture
def engine(small_root: Path) -> Iterator[LocalEngine]:
    with mind_rig.engine(small_root) as opened:
        yield opened


@pytest.fixture
def agent(engine: LocalEngine, tmp_path: Path) -> Agent:
    """In a sandbox with a copied workspace: its folders have no marks, unlike those that are made in a sandbox."""
    (tmp_path / "src").mkdir()
    for name in ("keep.py", "gone.py", "late.py"):
        (tmp_path / "src" / name).write_text(f"# {name}\n")
    return Agent(engine, engine.create(SandboxRequest(runtime="runc", workspace=tmp_path))[0].id)


def delete_and_merge(agent: Agent, name: str) -> Snapshot:
    """A step that deletes, and as many more as it takes until its layer is merged with those below. Returns the step."""
    deleted = agent.tool("remove", {}, f"rm src/{name}")
    own = deleted.stack.layers[0]
    for number in range(20):
        agent.engine._background.wait()
        if own not in agent.tool("write", {}, f"echo {number} > of-{name}").stack.layers:
            return deleted
    raise AssertionError("nothing was merged")


def looks_in(engine: LocalEngine, snapshot: Snapshot) -> str:
    said: list[bytes] = []
    done = engine.exec_snapshot(
        snapshot.id, ("sh", "-c", USE), cwd="/workspace", env=(), user=None, sink=lambda _, data: said.append(data)
    )
    assert done.exit_code == 0, b"".join(said)
    return b"".join(said).decode()


def test_after_a_merge_a_rewind_a_fork_and_over_a_rebuilt_layer(
    engine: LocalEngine, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = "keep.py\nlate.py\n# keep.py\n# late.py\n"
    deleted = delete_and_merge(agent, "gone.py")
    assert agent.sh(USE) == shown
    merged = agent.tool("write", {}, "echo 1 > more")
    engine.rewind(agent.id, deleted.id)
    assert agent.sh(USE) == shown
    (fork,) = engine.fork(merged.id, 1, args=None, name=None).trajectories
    assert Agent(engine, fork.id).sh(USE) == shown
    assert looks_in(engine, merged) == shown
    engine.stop(fork.id)
    engine.stop(agent.id)
    engine.flush()
    monkeypatch.setattr(evict, "BUDGET", "0")
    engine._evict()
    assert not engine._cold.is_hot(merged)
    monkeypatch.undo()
    assert looks_in(engine, merged) == shown
    again = Agent(engine, engine.fork(merged.id, 1, args=None, name=None).trajectories[0].id)
    assert again.sh(USE) == shown
    wait_until(lambda: not engine._context.store.any_lazy(again.sandbox.stack), "the layer is written")
    delete_and_merge(again, "late.py")
    assert again.sh(USE) == "keep.py\n# keep.py\n"
    again.sh("rm -r src; ! ls src 2>/dev/null")


def test_layers_that_an_earlier_version_merged_are_mended_once(engine: LocalEngine, agent: Agent) -> None:
    delete_and_merge(agent, "gone.py")
    merged = agent.tool("write", {}, "echo 1 > more")
    store = engine._context.store
    (folder,) = [path for layer in merged.stack.layers if (path := store.root / layer / "upper/workspace/src").exists()]
    os.removexattr(folder, ORIGIN)
    with pytest.raises(AssertionError, match=r"gone\.py"):
        looks_in(engine, merged)
    engine._marking.join()
    recover.mark_whiteouts(engine._context, lambda: False)
    with pytest.raises(OSError):  # it was done at the start, and is not done again
        os.getxattr(folder, ORIGIN)
    engine._context.catalog.set_meta("layers.whiteouts", "")
    recover.mark_whiteouts(engine._context, lambda: False)
    assert looks_in(engine, merged) == "keep.py\nlate.py\n# keep.py\n# late.py\n"
