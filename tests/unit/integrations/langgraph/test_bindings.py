"""The sandbox's snapshots that belong to steps of a graph."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from snapshotd.integrations.langgraph import SnapshotdSaver
from snapshotd.integrations.langgraph.daemon.bindings import Bindings, Bound
from tests.langgraph_rig import checkpoint, config

BOX = "box"


@pytest.fixture
def two_steps(tmp_path: Path) -> Iterator[tuple[Bindings, Bound, Bound]]:
    """Two steps that began with the files of one snapshot, "a"."""
    with SnapshotdSaver(tmp_path / "agent.db") as saver:
        saver._sandboxes = mock.Mock(**{"next_place.return_value": (BOX, "a")})
        bindings, bound = Bindings(saver._all.db), []
        for _ in range(2):
            made = checkpoint({"x": 1})
            saver.put(config("t"), made, {"source": "loop", "step": 1}, {"x": 1})
            found = bindings.find("t", "", made["id"])
            assert found is not None
            bound.append(found)
        yield bindings, bound[0], bound[1]


def test_a_snapshot_is_another_steps_before_its_process_has_noted_it(two_steps: tuple[Bindings, Bound, Bound]) -> None:
    bindings, mine, other = two_steps
    bindings.end(bindings.begin(mine, "first", BOX, "a"), "b")
    assert not bindings.has_moved_on(mine, "a", ["b"])
    call = bindings.begin(other, "second", BOX, "b")
    assert not bindings.has_moved_on(mine, "a", ["b"]), "it has not been made"
    assert bindings.has_moved_on(mine, "b", ["c"]), "it has been"
    assert not bindings.has_moved_on(other, "b", ["c"]), "its own step goes on"
    bindings.end(call, "c")
    assert bindings.has_moved_on(mine, "b", ["c"])


def test_what_a_person_did_after_a_call_that_was_cut_off_is_the_steps(two_steps: tuple[Bindings, Bound, Bound]) -> None:
    bindings, mine, other = two_steps
    bindings.begin(other, "cut off", BOX, "a")
    bindings.end(bindings.begin(mine, "first", BOX, "a"), "b")
    assert not bindings.has_moved_on(mine, "a", ["b", "a person's"])
