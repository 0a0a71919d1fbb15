"""What an experiment has made is its own, and nothing else is, whatever it is called."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.engine.base import SandboxRequest, Variant
from snapshotd.engine.experiments.base import ExperimentRequest, Scorer
from snapshotd.engine.experiments.service import ExperimentService
from snapshotd.engine.secrecy import Secrecy
from snapshotd.errors import Conflict, OutOfSpace
from snapshotd.scores import ExperimentInfo
from snapshotd.secrets.vault import FileVault
from snapshotd.types import SnapshotID, TrajectoryStatus
from tests.unit.daemon.fake_engine import FakeEngine


class Bench:
    """The real experiments over the fake engine."""

    def __init__(self, folder: Path) -> None:
        self.engine, self.catalog = FakeEngine(), SqliteCatalog(folder / "catalog.db")
        self.experiments = ExperimentService(self.engine, self.catalog, Secrecy(FileVault(folder), self.catalog))

    def names(self) -> list[str]:
        return sorted(line.name for line in self.engine.trajectories() if line.name is not None)

    def run(self, source: str | SandboxRequest, *labels: str, **more: Any) -> ExperimentInfo:
        """To its end."""
        variants = tuple(Variant(label) for label in labels)
        request = ExperimentRequest("way", source, variants, Scorer(("true",)), args=("true",), **more)
        self.experiments.create(request)
        for _ in self.experiments.events("way"):
            pass
        return self.experiments.get("way")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    found = Bench(tmp_path)
    yield found
    found.experiments.close()


def test_trajectories_of_others_with_such_names_stay(bench: Bench) -> None:
    _, first = bench.engine.create(SandboxRequest(name="way.base"))
    bench.engine.fork(first.id, 1, args=None, name="way.a.0")
    for name in ("way.base", "way.a.0"):
        bench.engine.stop(name)
    info = bench.run(first.id, "a", "b")
    assert [(one.called, one.state, one.trajectory) for one in info.branches][:1] == [("a.0", "failed", None)]
    assert "belongs to another trajectory" in (info.branches[0].error or "")
    assert bench.names() == ["way.a.0", "way.b.0", "way.base"]
    bench.experiments.remove("way")
    assert bench.names() == ["way.a.0", "way.base"]


def test_a_sandbox_of_another_is_not_taken_for_the_source(bench: Bench) -> None:
    line, _ = bench.engine.create(SandboxRequest(name="way.base"))
    with pytest.raises(Conflict, match=r"way\.base belongs to another trajectory"):
        bench.run(SandboxRequest(), "a")
    assert bench.engine.trajectory(line.id).status is TrajectoryStatus.RUNNING
    assert bench.experiments.list() == []


def test_one_that_was_cut_off_goes_on_with_the_sandbox_that_it_made(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(ref: str) -> list[SnapshotID]:
        raise OutOfSpace("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(bench.engine, "log", full)
        with pytest.raises(OutOfSpace):
            bench.run(SandboxRequest(), "a")
    (base,) = bench.engine.trajectories()
    with pytest.raises(Conflict, match="belongs to another trajectory"):
        bench.run(SandboxRequest(env=(("OTHER", "1"),)), "a")
    info = bench.run(SandboxRequest(), "a")
    assert (info.snapshot, [one.state for one in info.branches]) == (bench.engine.log(base.id)[0].id, ["scored"])
    assert bench.names() == ["way.a.0", "way.base"]
    bench.experiments.remove("way")
    assert bench.names() == []


def test_nothing_is_removed_when_another_was_forked_from_a_branch(bench: Bench) -> None:
    bench.run(SandboxRequest(), "a", "b", "c")
    bench.engine.fork("way.b.0", 1, args=None, name="child")
    before = bench.names()
    with pytest.raises(Conflict, match="forked from it"):
        bench.experiments.remove("way", force=True)
    assert bench.names() == before == ["child", "way.a.0", "way.b.0", "way.base", "way.c.0"]
    bench.engine.remove("child", force=True)
    bench.experiments.remove("way")
    assert bench.names() == []
