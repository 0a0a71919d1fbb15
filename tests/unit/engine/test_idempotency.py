"""A call that was cut off is made again under the key it had, whatever happened in between."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.engine.journal.pipeline import Journal
from snapshotd.engine.protocol.agent_handler import Intent
from snapshotd.engine.runs.resume import Resumes
from snapshotd.engine.runs.sessions import Sessions
from snapshotd.engine.sandbox.live import LiveRecord, Survival
from snapshotd.engine.sandbox.sandbox import SandboxUse, UnsavedMind
from snapshotd.engine.sandbox.writer import TrajectoryWriter
from snapshotd.types import CallStatus, Ended, SideEffect, Snapshot, Trajectory, TrajectoryStatus, new_id
from tests.records import committed, fork, started


def same(value: Any) -> Any:
    return value


FUNNEL = SimpleNamespace(conceal=same, conceal_text=same, reveal=same, reveal_text=same)


class Rig:
    """A catalog, and the recorder of the program that runs last; nothing else of it is real."""

    def __init__(self, catalog: SqliteCatalog, directory: Path) -> None:
        self.catalog, self.directory = catalog, directory
        self.context: Any = MagicMock(catalog=catalog)
        self.context.secrecy.of.return_value = FUNNEL
        self.recorder: Any = None
        trajectory, self.head = started(catalog)
        catalog.trajectories.set_began(trajectory.id, self.head.id)
        self.id = trajectory.id
        self.resume()

    @property
    def trajectory(self) -> Trajectory:
        return self.catalog.trajectories.get(self.id)

    def _sandbox(self) -> Any:
        return SimpleNamespace(
            trajectory=self.trajectory,
            head=self.head.id,
            lock=threading.RLock(),
            survival=Survival(),
            writer=TrajectoryWriter(self.head.id, 0, 0),
            mind=UnsavedMind(),
            use=SandboxUse(self.trajectory.id),
            outlive=lambda _: None,
        )

    def resume(self) -> None:
        """The program starts again."""
        sessions: Any = SimpleNamespace(
            find=lambda _: None,
            start_lock=lambda _: contextlib.nullcontext(),
            launch=lambda *_: (self._sandbox(), None),
            adopt=self._adopt,
            start_agent=lambda *_: None,
        )
        self.catalog.trajectories.set_status(self.id, TrajectoryStatus.INTERRUPTED)
        Resumes(self.context, sessions).resume(self.trajectory, ())

    def _adopt(self, sandbox: Any, _: Any, *more: Any) -> None:
        places: Any = SimpleNamespace(newest=same)
        gate: Any = None
        self.recorder = Journal(self.context, sandbox, lambda *_: None, places, gate, *more).recorder

    def go_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Another daemon goes on with the program."""
        sandbox, calls = self._sandbox(), MagicMock()
        parts: list[Any] = [MagicMock() for _ in range(6)]
        parts[0].attach.return_value = (sandbox, calls)
        sessions = Sessions(self.context, *parts)
        monkeypatch.setattr(sessions, "_program", MagicMock())
        survivor: Any = MagicMock(
            trajectory=self.trajectory, record=LiveRecord(self.directory / new_id()), facts={"began_at_ns": 1}
        )
        sessions.go_on([survivor])
        self.recorder = calls.bind.call_args.args[0]._recorder

    def charge(self, n: int = 5, effect: SideEffect = SideEffect.IDEMPOTENT) -> tuple[str, str]:
        """Begin a call: its id and its key."""
        call = new_id()
        key = self.recorder.begin(Intent(call, "charge", {"n": n}, side_effect=effect)).entry.key
        return call, key

    def end(self, call: Any, status: CallStatus = CallStatus.DONE) -> None:
        self.catalog.journal.end(self.id, Ended(call, status, 5))

    def snapshot(self) -> Snapshot:
        self.head = committed(self.catalog, self.head)
        self.recorder.sandbox.head = self.head.id
        return self.head


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    catalog = SqliteCatalog(":memory:")
    yield Rig(catalog, tmp_path)
    catalog.close()


def test_a_snapshot_between_two_resumes(rig: Rig) -> None:
    call, key = rig.charge()
    assert key == call
    for _ in range(2):
        rig.resume()
        rig.snapshot()  # a person is asked, say, before the call begins again
    rig.resume()
    assert rig.charge()[1] == key
    rig.resume()
    rig.snapshot()
    rig.resume()
    assert [rig.charge()[1] == key for _ in range(2)] == [True, False], "two attempts had it, and it is one"


@pytest.mark.parametrize("status", [CallStatus.DONE, CallStatus.FAILED])
@pytest.mark.parametrize("bound", [False, True])
def test_a_call_that_has_ended_leaves_no_key(rig: Rig, status: CallStatus, bound: bool) -> None:
    _, key = rig.charge()
    rig.resume()
    rig.snapshot()
    again, used = rig.charge()
    assert used == key
    rig.end(again, status)
    if bound:
        rig.snapshot()
    rig.resume()
    call, new = rig.charge()
    assert new == call


def test_another_daemon_goes_on(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    _, key = rig.charge()
    rig.resume()
    rig.snapshot()
    rig.go_on(monkeypatch)
    assert rig.charge()[1] == key
    rig.go_on(monkeypatch)  # and that call is open
    call, new = rig.charge()
    assert new == call


def test_equal_calls_that_were_cut_off_side_by_side(rig: Rig) -> None:
    keys = [rig.charge()[1] for _ in range(3)]
    other = rig.charge(6)[1]
    rig.resume()
    assert [rig.charge()[1] for _ in range(2)] == keys[:2]
    rig.snapshot()
    rig.resume()
    assert [rig.charge(n)[1] for n in (6, 5, 5, 5)] == [other, *keys]
    call, new = rig.charge()
    assert new == call


def test_a_local_call_has_a_key_of_its_own(rig: Rig) -> None:
    rig.charge(effect=SideEffect.LOCAL)
    rig.resume()
    call, key = rig.charge()
    assert key == call


def test_a_fork_makes_calls_of_its_own(rig: Rig) -> None:
    rig.charge()
    rig.resume()
    forked = fork(rig.snapshot(), rig.trajectory)
    rig.catalog.trajectories.add([(forked, None)])
    rig.id = forked.id
    rig.resume()
    call, key = rig.charge()
    assert key == call
