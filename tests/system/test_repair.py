"""What `repair` makes of snapshots whose layers are there and of such whose layers are gone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from snapshotd.engine.archiver import ArchivedTree
from snapshotd.engine.engine import LocalEngine
from snapshotd.engine.merging import FAN_IN
from snapshotd.types import BlobID, LayerID, SnapshotState, TreeID
from tests import mind_rig

pytestmark = pytest.mark.runc


@pytest.fixture
def engine(small_root: Path) -> Iterator[LocalEngine]:
    with mind_rig.engine(small_root) as opened:
        yield opened


def test_nothing_is_stored_again_on_a_damaged_tree(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest snapshot stands on a merged layer, so it is there, though the layers of the one before it are gone."""
    agent = mind_rig.agent(engine)
    taken = []
    for number in range(FAN_IN + 3):
        taken.append(agent.tool("write", {}, f"echo {number} > file{number}"))
        engine._background.wait()
    engine.flush()
    cold, hot, gone = next(
        (base, child, base.stack.layers[-1])
        for base, child in itertools.pairwise(engine.snapshot(one.id) for one in taken)
        if base.stack.layers[-1] not in child.stack.layers
    )
    assert hot.base == cold.id
    assert engine._context.store.evict(gone)
    assert not engine._cold.is_hot(cold)
    assert engine._cold.is_hot(hot)
    assert None not in (cold.tree, hot.tree)
    monkeypatch.setattr(engine._upkeep, "_unreadable", lambda _: {cold.tree, hot.tree})
    built_on: list[TreeID] = []
    store_tree = engine._archive._archiver.tree

    def tree(layers: Sequence[LayerID], parent: TreeID, outputs: Sequence[BlobID]) -> ArchivedTree:
        built_on.append(parent)
        return store_tree(layers, parent, outputs)

    monkeypatch.setattr(engine._archive._archiver, "tree", tree)
    report = engine.repair(lambda _: None)
    assert cold.id in report.lost
    assert hot.id not in report.lost
    assert engine.snapshot(hot.id).state is SnapshotState.STORED
    assert built_on
    assert cold.tree not in built_on
