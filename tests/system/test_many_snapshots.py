"""A long trajectory: looking at its newest snapshots, and forking them, is the work that it was when there were few.
Counted, not timed."""

from __future__ import annotations

import os
import statistics
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from snapshotd.api.snapshots import LogQuery
from snapshotd.api.trajectories import ForkRequest, RemoveQuery
from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.engine.engine import Engine
from snapshotd.engine.storage import merging
from snapshotd.types import Snapshot
from tests import long, mind_rig
from tests.mind_rig import Agent

pytestmark = pytest.mark.runc
FEW, MANY = long.size(60, 100), long.size(240, 600)
NEIGHBOURS = 16
FOLDERS, FILES = 20, 200
LISTED = 12
"""So many directories are listed to compare neighbours: the root, the workspace and one folder, in the one layer
between them."""


@dataclass(frozen=True, slots=True)
class Work:
    """What was done: instructions of SQLite's machine (in tens), by any thread; functions entered, Python's and C's,
    and directories listed, by this one."""

    instructions: int
    calls: int
    listed: int


@contextmanager
def _counted(engine: Engine) -> Iterator[list[Work]]:
    catalog, own = engine.life._catalog, threading.get_ident()
    assert isinstance(catalog, SqliteCatalog)
    instructions = calls = listed = 0
    result: list[Work] = []

    def progress() -> bool:
        nonlocal instructions
        instructions += 1
        return False

    def called(_frame: Any, event: str, argument: Any) -> None:
        nonlocal calls, listed
        if event in ("call", "c_call") and threading.get_ident() == own:
            calls += 1
            listed += event == "c_call" and argument is os.listdir

    catalog._db.connection.set_progress_handler(progress, 10)
    sys.setprofile(called)
    try:
        yield result
    finally:
        sys.setprofile(None)
        catalog._db.connection.set_progress_handler(None)
        result.append(Work(instructions, calls, listed))


def _work(engine: Engine, verb: Callable[[], object]) -> Work:
    """The least of a few rounds, since waiting for something is calls, too."""
    seen = []
    for _ in range(3):
        with _counted(engine) as result:
            verb()
        seen += result
    return Work(min(w.instructions for w in seen), min(w.calls for w in seen), min(w.listed for w in seen))


def _write(agent: Agent, first: int, end: int) -> None:
    """One snapshot for each number, which is in one of the files."""
    workspace = Path(f"/proc/{agent.sandbox.container.pid}/root/workspace")
    for number in range(first, end):
        call, _ = agent.begin("write", {"number": number})
        (workspace / f"d{number % FOLDERS}").mkdir(exist_ok=True)
        (workspace / f"d{number % FOLDERS}/f{number % FILES}").write_text(f"step {number}\n")
        agent.end(call)
    agent.engine.storage.flush()


def _verbs(agent: Agent, first: Snapshot) -> dict[str, Work]:
    engine = agent.engine
    newest = engine.snapshots.log(agent.id, LogQuery(NEIGHBOURS + 1))
    compared = [_work(engine, lambda a=a, b=b: list(engine.snapshots.diff(a.id, b.id))) for a, b in pairwise(newest)]  # type: ignore[misc]
    assert max(work.listed for work in compared) <= LISTED, "what was merged in between is not looked at"

    def fork() -> None:
        (made,) = engine.branching.fork(newest[-1].id, ForkRequest()).trajectories
        engine.runs.remove(made.id, RemoveQuery(force=True))

    return {
        "log": _work(engine, lambda: engine.snapshots.log(agent.id, LogQuery(50))),
        "show": _work(engine, lambda: engine.snapshots.get(newest[-1].id)),
        "show the first": _work(engine, lambda: engine.snapshots.get(first.id)),
        "fork": _work(engine, fork),
        "diff": Work(
            *(
                statistics.median(getattr(work, name) for work in compared)
                for name in ("instructions", "calls", "listed")
            )
        ),
    }


@pytest.mark.long  # e2e/test_scale.py has a hundred
def test_the_last_snapshots_are_the_work_that_the_first_were(small_root: Path) -> None:
    with mind_rig.engine(small_root) as engine:
        agent = mind_rig.agent(engine)
        first = agent.head
        _write(agent, 0, FEW)
        at_first = _verbs(agent, first)
        _write(agent, FEW, MANY)
        at_last = _verbs(agent, first)
        for verb, before in at_first.items():
            after = at_last[verb]
            report = f"{verb}: {before} with {FEW} snapshots, {after} with {MANY}"
            assert 0 < after.instructions <= 2 * before.instructions + 50, report
            assert 0 < after.calls <= 2 * before.calls, report
        store, merged = engine.life._context.store, engine.life._disposal._merger._merged
        assert len(store._pins) - len(merged) < FEW, "what the catalog refers to is not remembered besides"


def test_merged_layers_may_be_forgotten(small_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "MAX_MERGED", 12)  # as many runs as one stack may have, and fewer than are merged here
    with mind_rig.engine(small_root) as engine:
        agent = mind_rig.agent(engine)
        _write(agent, 0, 120)
        assert len(engine.life._disposal._merger._merged) == 12
        assert len(engine.life._disposal._merger._level) == 12
        taken = engine.snapshots.log(agent.id)
        assert max(len(snapshot.stack.layers) for snapshot in taken) <= merging.MAX_DEPTH
        (fork,) = engine.branching.fork(taken[60].id, ForkRequest()).trajectories
        engine.runs.remove(fork.id, RemoveQuery(force=True))
        engine.life._disposal.sweep()
        for number in (0, 59, 60, 119):
            path = f"workspace/d{number % FOLDERS}/f{number}".encode()
            assert b"".join(engine.snapshots.cat(taken[number + 1].id, path)) == f"step {number}\n".encode()
            assert [
                c.path for c in engine.snapshots.diff(taken[number + 1].id, None) if c.path.endswith(b"/f%d" % number)
            ] == [path]
