"""A step that was sealed and could not be committed: its files are in no snapshot yet, and whoever looks for changes
finds them."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.config import Config
from snapshotd.engine.context import Context
from snapshotd.engine.history.rewinding import Rewinding
from snapshotd.engine.journal.approval.records import ApprovalRecords, WaitingCaller
from snapshotd.engine.runs import sessions
from snapshotd.engine.runs.sessions import Sessions
from snapshotd.engine.sandbox import root as roots
from snapshotd.engine.sandbox.live import Survival
from snapshotd.engine.sandbox.places import Places
from snapshotd.engine.sandbox.root import LayerSources, RootParts, SandboxRoot
from snapshotd.engine.sandbox.sandbox import Sandbox, SandboxUse
from snapshotd.engine.sandbox.step import commit_step, marker
from snapshotd.engine.sandbox.writer import TrajectoryWriter
from snapshotd.errors import DataLoss, OutOfSpace
from snapshotd.kernel import turns
from snapshotd.layers.store import LayerStore
from snapshotd.layers.upper import dress, is_unchanged
from snapshotd.types import Snapshot, ToolCall, Trajectory
from tests.records import begin, make_approval, make_image


class World:
    """A sandbox over a real catalog and layer store; only the kernel's part of a pivot is missing."""

    def __init__(self, directory: Path) -> None:
        self.catalog, self.store = SqliteCatalog(":memory:"), LayerStore(directory, "plain")
        image = make_image()
        (directory / "images" / image.id / "root").mkdir(parents=True)
        self.catalog.images.add(image)
        self.trajectory, self.first = begin(image)
        self.catalog.trajectories.add([(self.trajectory, self.first)])
        context = SimpleNamespace(catalog=self.catalog, store=self.store, state_dir=directory, config=Config())
        self.context = cast(Context, context)
        self.directory, self.sandbox = directory, self._sandbox(self.trajectory, self.first)

    def _sandbox(self, trajectory: Trajectory, head: Snapshot) -> Sandbox:
        upper = self.store.create()
        dress(self.store, upper, head.stack)
        part: Any = SimpleNamespace(
            id="container", pid=1, close=lambda: None, destroy=lambda _: None, bury=lambda: None, parked_pids=set
        )
        writer, survival = TrajectoryWriter(head.id, 0, 0), Survival()
        sources = LayerSources(lambda s: s, lambda _: ())
        parts = RootParts(trajectory.id, self.store, part, part, 1, set, 0, sources)
        made = Sandbox(
            trajectory=trajectory,
            runtime=part,
            container=part,
            cgroup=part,
            server=part,
            started_at_ns=0,
            root=SandboxRoot(parts, writer, survival, head.stack, upper, head.id),
            writer=writer,
            survival=survival,
            use=SandboxUse(trajectory.id),
        )
        made.writer.own(self.catalog.trajectories.draw_fence(trajectory.id))
        return made

    def step(self, call: ToolCall) -> Snapshot:
        return commit_step(self.catalog, self.sandbox, call, lambda *_: None)

    def seal_in_vain(self) -> None:
        """A step that leaves a file is sealed, and the catalog's disk is full."""
        (self.directory / self.sandbox.root.upper / "upper" / "result").write_text("an hour of work")
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(self.catalog.snapshots, "commit", _full)
            with pytest.raises(OutOfSpace):
                self.step(marker("exec", {}))
        assert is_unchanged(self.store, self.sandbox.root.upper, self.sandbox.root.stack)

    def newest(self) -> Snapshot:
        return self.catalog.snapshots.get(self.catalog.trajectories.get(self.trajectory.id).head)

    def kept(self) -> bool:
        """Whether the newest snapshot has the file."""
        newest = self.newest()
        return newest.own_layers == 1 and (self.directory / newest.stack.layers[0] / "upper" / "result").exists()

    def sessions(self) -> Sessions:
        launcher: Any = SimpleNamespace(end=lambda sandbox: sandbox.close())
        rest: Any = SimpleNamespace(submit=lambda *_: None, take=None)
        made = Sessions(self.context, launcher, rest, rest, rest, rest, rest)
        made._register(self.sandbox, cast(Any, None))
        return made

    def rewinding(self) -> Rewinding:
        rest: Any = None
        return Rewinding(self.context, self.sessions(), rest, rest, lambda *_: None)


def _full(*_: Any, **__: Any) -> None:
    raise OutOfSpace("the catalog cannot be written because the disk is full")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(roots, "layout_of", lambda _: SimpleNamespace(root_id=1))
    monkeypatch.setattr(roots, "blocker", lambda *_: None)
    monkeypatch.setattr(roots, "pivot", lambda *_, **__: None)
    monkeypatch.setattr(sessions, "is_alive", lambda sandbox: not sandbox.closed)
    made = World(tmp_path)
    yield made
    made.catalog.close()
    made.store.close()


def test_a_layer_that_was_taken_away_is_said(world: World) -> None:
    for number in range(3):
        if number == 2:
            shutil.rmtree(world.directory / world.sandbox.root.stack.layers[1])
        (world.directory / world.sandbox.root.upper / "upper" / "result").write_text(str(number))
        with pytest.raises(DataLoss, match="is missing in") if number == 2 else contextlib.nullcontext():
            world.step(marker("exec", {}))
    assert world.newest().seq == 2


def test_a_stop_keeps_it(world: World) -> None:
    world.seal_in_vain()
    world.sessions().stop(world.trajectory)
    assert world.newest().call.name == "stop"
    assert world.kept()


def test_closing_keeps_it(world: World) -> None:
    world.seal_in_vain()
    world.sessions().close()
    assert world.kept()


def test_what_goes_back_in_place_keeps_it(world: World) -> None:
    world.seal_in_vain()
    world.rewinding().settle(world.sandbox, mind=True)
    assert world.newest().call.arguments == {"name": "before rewind"}
    assert world.kept()


def test_a_preview_shows_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snapshotd.engine.history.rewinding._blocker", lambda _: None)
    world.seal_in_vain()
    with world.rewinding()._present(world.trajectory.id, world.first) as view:
        assert b"result" in [path for path, _ in view.walk()]


def test_an_approval_is_of_other_files(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snapshotd.engine.storage.look.changes", lambda *_: iter(["result"]))
    world.seal_in_vain()
    approvals, caller = (
        ApprovalRecords(world.context, cast(Any, None)),
        WaitingCaller(world.sandbox, world.step, threading.Event()),
    )
    assert not approvals.has_same_files(make_approval(world.first), caller)
    assert world.kept()


def test_a_program_is_not_there(world: World) -> None:
    places = Places(world.context, cast(Any, None))
    assert places._is_there(world.sandbox, world.first)
    world.seal_in_vain()
    assert not places._is_there(world.sandbox, world.first)


def test_it_is_kept_once(world: World) -> None:
    world.seal_in_vain()
    bound = world.step(marker("exec", {}))
    assert world.kept()
    world.rewinding().settle(world.sandbox, mind=True)
    world.sessions().stop(world.trajectory)
    assert world.newest().id == bound.id


def test_a_step_goes_first(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    commit = world.catalog.snapshots.commit

    def committing(*args: Any, **options: Any) -> None:
        seen.append(turns._going_first)
        commit(*args, **options)

    monkeypatch.setattr(world.catalog.snapshots, "commit", committing)
    world.step(marker("exec", {}))
    assert seen == [1]
    assert turns._going_first == 0


def test_nothing_new_takes_no_snapshot(world: World) -> None:
    """Neither in a first sandbox nor in that of a fork."""
    forked = replace(world.trajectory, forked_from=world.first.id)
    world.sandbox.renew(forked)
    world.rewinding().settle(world.sandbox, mind=True)
    world.sessions().stop(forked)
    assert world.catalog.snapshots.count(world.trajectory.id) == 1
