"""Comparisons: one side that goes away meanwhile, and calls that are made over and over."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from snapshotd.api.trajectories import CreateRequest, RemoveQuery
from snapshotd.engine.base import Variant
from snapshotd.engine.engine import Engine
from snapshotd.engine.experiments.base import Attendance, ExperimentRequest, Scorer
from snapshotd.engine.experiments.comparing import _align, compare
from snapshotd.errors import NotFound, UsageError
from tests.small_engine import execute

PLAIN = CreateRequest(runtime="none")


class _Removing:
    """Services that remove a trajectory before one of their verbs is called."""

    def __init__(self, engine: Engine, doomed: str, after: int) -> None:
        self._engine, self._doomed, self.left = engine, doomed, after

    def __getattr__(self, name: str) -> Any:
        if name in ("runs", "snapshots", "journal", "branching"):
            return self
        self.left -= 1
        if self.left == -1:
            self._engine.runs.remove(self._doomed, RemoveQuery(force=True))
        services = (self._engine.snapshots, self._engine.journal)
        return next(getattr(one, name) for one in services if hasattr(one, name))


def test_a_branch_that_is_removed_while_it_is_compared(engine: Engine) -> None:
    """Before whichever verb that a comparison calls: the error names it, and the other branch is as it was."""
    base, _ = engine.runs.create(PLAIN)
    execute(engine, base.id, "ls")
    said: list[str] = []
    """The errors; those that do not name the branch as they are."""
    for number in itertools.count():
        gone, _ = engine.runs.create(PLAIN)
        execute(engine, gone.id, "touch", "x")
        removing = _Removing(engine, gone.id, number)
        try:
            compare(removing, [base.id, gone.id])  # type: ignore[arg-type]
            break
        except NotFound as exc:
            said.append(exc.message if gone.id[:12] not in exc.message else "it is named")
    assert set(said) == {"it is named"}
    assert len(said) > 4
    assert len(engine.snapshots.log(base.id)) == 2
    with pytest.raises(UsageError, match="two sides"):
        compare(engine.experiments._services, [base.id])


def test_a_call_that_is_made_over_and_over_is_matched_in_order(engine: Engine) -> None:
    """Without a number for each, a match of so many equal calls would take minutes of the daemon."""
    _, first = engine.runs.create(PLAIN)
    look, poll = (replace(first, call=replace(first.call, name="exec", arguments=[name])) for name in ("look", "poll"))
    calls = [look, poll] * 750
    rows = _align(calls, [*calls, look], 1)
    assert [row.difference for row in rows] == [*["same"] * 1500, "right"]


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
