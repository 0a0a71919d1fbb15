"""Experiments: what one has made is its own, and nothing else is; its stop; the secrets of its variants."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from snapshotd.api.trajectories import CreateRequest, ForkRequest, RemoveQuery
from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.engine.base import Forked, Variant
from snapshotd.engine.engine import Engine
from snapshotd.engine.experiments import service
from snapshotd.engine.experiments.base import ExperimentRequest, Scorer
from snapshotd.engine.experiments.service import ExperimentService
from snapshotd.engine.secrecy import Secrecy
from snapshotd.errors import Conflict, OutOfSpace
from snapshotd.scores import STOPPED, ExperimentInfo
from snapshotd.secrets.vault import Vault
from snapshotd.types import SnapshotID, TrajectoryStatus
from tests.mind_rig import clear
from tests.storage_rig import wait_until

PLAIN = CreateRequest(runtime="none")


class Bench:
    """Experiments with tables of their own, over an engine that a module shares."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine, catalog = engine, SqliteCatalog(folder / "catalog.db")
        secrecy = Secrecy(Vault(folder), catalog)
        self.experiments = ExperimentService(engine.experiments._services, catalog, secrecy)

    def names(self) -> list[str]:
        return sorted(line.name for line in self.engine.snapshots.trajectories() if line.name is not None)

    def create(self, source: str | CreateRequest, *variants: Variant, **more: Any) -> None:
        self.experiments.create(ExperimentRequest("way", source, variants, Scorer(("true",)), args=("true",), **more))

    def run(self, source: str | CreateRequest, *labels: str) -> ExperimentInfo:
        """To its end."""
        self.create(source, *map(Variant, labels))
        deque(self.experiments.events("way"), 0)
        return self.experiments.get("way")


@pytest.fixture
def bench(engine: Engine, tmp_path: Path) -> Iterator[Bench]:
    found = Bench(engine, tmp_path)
    yield found
    found.experiments.close()
    clear(engine)


# -- what is its own ---------------------------------------------------------------------------------------------------


def test_trajectories_of_others_with_such_names_stay(bench: Bench) -> None:
    _, first = bench.engine.runs.create(CreateRequest(name="way.base", runtime="none"))
    bench.engine.branching.fork(first.id, ForkRequest(name="way.a.0"))
    for name in ("way.base", "way.a.0"):
        bench.engine.runs.stop(name)
    info = bench.run(first.id, "a", "b")
    assert [(one.called, one.state, one.trajectory) for one in info.branches][:1] == [("a.0", "failed", None)]
    assert "belongs to another trajectory" in (info.branches[0].error or "")
    assert bench.names() == ["way.a.0", "way.b.0", "way.base"]
    bench.experiments.remove("way")
    assert bench.names() == ["way.a.0", "way.base"]


def test_a_sandbox_of_another_is_not_taken_for_the_source(bench: Bench) -> None:
    line, _ = bench.engine.runs.create(CreateRequest(name="way.base", runtime="none"))
    with pytest.raises(Conflict, match=r"way\.base belongs to another trajectory"):
        bench.run(PLAIN, "a")
    assert bench.engine.snapshots.trajectory(line.id).status is TrajectoryStatus.RUNNING
    assert bench.experiments.list() == []


def test_one_that_was_cut_off_goes_on_with_the_sandbox_that_it_made(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(ref: str) -> list[SnapshotID]:
        raise OutOfSpace("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(bench.engine.snapshots, "log", full)
        with pytest.raises(OutOfSpace):
            bench.run(PLAIN, "a")
    (base,) = bench.engine.snapshots.trajectories()
    with pytest.raises(Conflict, match="belongs to another trajectory"):
        bench.run(CreateRequest(runtime="none", env={"OTHER": "1"}), "a")
    info = bench.run(PLAIN, "a")
    first = bench.engine.snapshots.log(base.id)[0].id
    assert (info.snapshot, [one.state for one in info.branches]) == (first, ["scored"])
    assert bench.names() == ["way.a.0", "way.base"]
    bench.experiments.remove("way")
    assert bench.names() == []


def test_one_of_an_earlier_version_goes_on(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was stopped, or cut off before it was recorded, and its sandbox is known by the digest of then."""
    digests = service._digests
    with monkeypatch.context() as patch:
        patch.setattr(service, "_digests", lambda request: digests(request)[1:])
        bench.create(PLAIN, Variant("a"))
        bench.experiments.stop("way")
        before = bench.experiments._table.get("way")
    bench.experiments._table.set_ended("way", STOPPED)
    with pytest.raises(Conflict, match="another description"):
        bench.create(PLAIN, Variant("a"), repeat=2)
    with pytest.raises(Conflict, match="another description"):
        bench.create(replace(PLAIN, env={"A": "1"}), Variant("a"))
    info = bench.run(PLAIN, "a")
    assert (info.ended, bench.experiments._table.get("way").id) == ("all branches have ended", before.id)
    assert bench.experiments._table.get("way").digest != before.digest, "it has the digest of this version from now on"
    bench.experiments._table.remove("way")
    for line in bench.engine.snapshots.trajectories():
        if line.name == "way.a.0":
            bench.engine.runs.remove(line.id)
    assert [one.score for one in bench.run(PLAIN, "a").branches] == [1.0]
    assert bench.experiments._table.get("way").id == before.id, "it goes on with the sandbox that was there"


def test_nothing_is_removed_when_another_was_forked_from_a_branch(bench: Bench) -> None:
    bench.run(PLAIN, "a", "b", "c")
    bench.engine.branching.fork("way.b.0", ForkRequest(name="child"))
    before = bench.names()
    with pytest.raises(Conflict, match="forked from it"):
        bench.experiments.remove("way", force=True)
    assert bench.names() == before == ["child", "way.a.0", "way.b.0", "way.base", "way.c.0"]
    bench.engine.runs.remove("child", RemoveQuery(force=True))
    bench.experiments.remove("way")
    assert bench.names() == []


# -- its stop ----------------------------------------------------------------------------------------------------------


def test_no_branch_is_forked_after_the_stop(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty may run at once, and all of them are about to be forked."""
    first = bench.engine.runs.create(PLAIN)[1].id
    fork, begun, go_on = bench.engine.branching.fork, threading.Semaphore(0), threading.Event()

    def slow(*args: Any, **options: Any) -> Forked:
        begun.release()
        assert go_on.wait(60)
        return fork(*args, **options)

    monkeypatch.setattr(bench.engine.branching, "fork", slow)
    bench.create(first, Variant("a"), repeat=60, parallel=60)
    assert begun.acquire(timeout=60)
    stopping = threading.Thread(target=bench.experiments.stop, args=("way",))
    stopping.start()
    wait_until(lambda: bench.experiments.get("way").ended is not None, "the experiment has ended")
    go_on.set()
    stopping.join(60)
    states = [one.state for one in bench.experiments.get("way").branches]
    assert len(bench.engine.snapshots.trajectories()) - 1 == sum(state != "skipped" for state in states) <= 8
    assert sum(state == "skipped" for state in states) >= 52


# -- secrets of its variants -------------------------------------------------------------------------------------------


def secret(label: str, value: str) -> Variant:
    return Variant(label, secrets=(("TOKEN", value),))


def test_branches_that_begin_later_get_the_new_value(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    first = bench.engine.runs.create(PLAIN)[1].id
    got, begun, go_on = list[str](), threading.Semaphore(0), threading.Event()
    fork = bench.engine.branching.fork

    def noting(*args: Any, **options: Any) -> Forked:
        got.append(dict(args[2][0].secrets)["TOKEN"])
        begun.release()
        assert go_on.wait(60)
        return fork(*args, **options)

    monkeypatch.setattr(bench.engine.branching, "fork", noting)
    bench.create(first, secret("a", "the-old-value"), repeat=2, parallel=1)
    assert begun.acquire(timeout=60)
    bench.create(first, secret("a", "the-new-value"), repeat=2, parallel=1)
    go_on.set()
    deque(bench.experiments.events("way"), 0)
    assert got == ["the-old-value", "the-new-value"]


def test_an_error_quotes_no_secret_of_another_variant(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    first = bench.engine.runs.create(PLAIN)[1].id

    def refusing(*args: Any, **options: Any) -> Forked:
        raise Conflict("neither value-of-the-first nor value-of-the-second will do")

    monkeypatch.setattr(bench.engine.branching, "fork", refusing)
    bench.create(first, secret("a", "value-of-the-first"), secret("b", "value-of-the-second"), parallel=1)
    deque(bench.experiments.events("way"), 0)
    errors = [one.error or "" for one in bench.experiments.get("way").branches]
    assert all(error.startswith("neither [secret:") for error in errors), errors
    assert not any("value-of" in error for error in errors)
