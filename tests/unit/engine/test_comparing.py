"""Comparisons over an engine in memory: one side that goes away meanwhile, and calls that are made over and over."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from snapshotd.api.commands import ExecRequest
from snapshotd.engine.base import SandboxRequest, Variant
from snapshotd.engine.experiments.base import Attendance, ExperimentRequest, Scorer
from snapshotd.engine.experiments.comparing import compare
from snapshotd.errors import NotFound, UsageError
from tests.unit.daemon.fake_engine import FakeEngine


def execute(engine: FakeEngine, ref: str, *words: str) -> None:
    engine.exec(ref, ExecRequest(words), sink=lambda _stream, _data: None)


class _Removing:
    """An engine that removes a trajectory before one of its verbs is called."""

    def __init__(self, engine: FakeEngine, doomed: str, after: int) -> None:
        self._engine, self._doomed, self.left = engine, doomed, after

    def __getattr__(self, name: str) -> Any:
        if name in ("runs", "snapshots", "mind", "branching"):
            return self
        self.left -= 1
        if self.left == -1:
            self._engine.remove(self._doomed, force=True)
        return getattr(self._engine, name)


def test_a_branch_that_is_removed_while_it_is_compared() -> None:
    """Before whichever verb that a comparison calls: the error names it, and the other branch is as it was."""
    engine = FakeEngine()
    base, _ = engine.create(SandboxRequest())
    execute(engine, base.id, "ls")
    said: list[str] = []
    """The errors; those that do not name the branch as they are."""
    for number in itertools.count():
        gone, _ = engine.create(SandboxRequest())
        execute(engine, gone.id, "cat", "x")
        removing = _Removing(engine, gone.id, number)
        try:
            compare(removing, [base.id, gone.id])  # type: ignore[arg-type]
            break
        except NotFound as exc:
            said.append(exc.message if gone.id[:12] not in exc.message else "it is named")
    assert set(said) == {"it is named"}
    assert len(said) > 4
    assert len(engine.log(base.id)) == 2


def test_a_call_that_is_made_over_and_over_is_matched_in_order() -> None:
    """Without a number for each, a match of so many equal calls would take minutes of the daemon."""
    engine = FakeEngine()
    sides = [engine.create(SandboxRequest())[0].id for _ in range(2)]
    for side, extra in zip(sides, (0, 1), strict=True):
        for number in range(1500 + extra):
            execute(engine, side, "poll" if number % 2 else "look")
    (pair,) = compare(engine, sides).pairs
    assert [call.difference for call in pair.calls] == [*["same"] * 1500, "right"]
    with pytest.raises(UsageError, match="two sides"):
        compare(engine, sides[:1])


def test_a_client_that_has_left_ends_each_command() -> None:
    attendance = Attendance()
    with attendance.caller() as first:
        attendance.leave()
        assert first.gone
    with attendance.caller() as second:
        assert second.gone


def test_branches_begin_once_each_and_then_again() -> None:
    request = ExperimentRequest("n", "a1b2", (Variant("cold"), Variant("warm")), Scorer(("true",)), repeat=2)
    assert request.branches() == [("cold", 0), ("warm", 0), ("cold", 1), ("warm", 1)]
