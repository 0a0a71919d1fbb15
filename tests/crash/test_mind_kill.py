"""A daemon killed while a person decides, or while a call is made up for: nothing is asked, allowed or undone twice."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from snapshotd import failpoints
from snapshotd.engine.base import EditRequest, FileEdit, Forked, MergeRequest, Variant
from snapshotd.engine.engine import LocalEngine
from snapshotd.errors import Conflict, SnapshotdError
from snapshotd.failpoints import EXIT_CODE
from snapshotd.types import ApprovalStatus, CallStatus, ExperimentID, RequestKey, SideEffect
from tests import mind_rig
from tests.mind_rig import Agent

pytestmark = pytest.mark.runc
CHILD_S = 120
ROOT = Path(__file__).parents[2]
_EDIT = EditRequest(files=(FileEdit(b"workspace/y", b"y"),))


@pytest.fixture
def first(small_root: Path) -> Iterator[LocalEngine]:
    with mind_rig.engine(small_root) as opened:
        yield opened


def killed_at(name: str, state_dir: Path, what: str, trajectory: str) -> None:
    """Do something in an engine of its own process, which dies at a failpoint."""
    command = [sys.executable, "-m", "tests.crash.test_mind_kill", str(state_dir), what, trajectory]
    environment = {**os.environ, "SNAPSHOTD_FAILPOINT": name}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=CHILD_S, check=False
    )
    assert done.returncode == EXIT_CODE, (done.returncode, done.stderr[-3000:])
    assert f"failpoint {name} reached" in done.stderr


@pytest.mark.parametrize("name", [n for n in failpoints.NAMES if n.startswith("engine.compensate.")])
def test_a_compensation_that_was_cut_off_does_not_run_again(first: LocalEngine, name: str) -> None:
    agent = mind_rig.agent(first)
    start = agent.tool("write", {}, "echo x > x")
    agent.send("mail", "a")
    state_dir = first._context.state_dir
    first.close()
    killed_at(name, state_dir, "rewind", agent.id)
    second = mind_rig.reopened(state_dir)
    try:
        again = Agent(second, agent.id)
        assert again.head.call.name == "mail", "nothing was rewound"
        rewound = second.rewind(agent.id, start.id, compensate=True)
        assert rewound.call.name == "rewind"
        second.compensate(agent.id, ())
        assert [e.compensated for e in second.effects(agent.id)] == [CallStatus.UNKNOWN]
        assert "compensate" not in [s.call.name for s in second.log(agent.id)]
        assert again.files() == {"x": "x\n"}
    finally:
        second.close()


@pytest.mark.parametrize("name", [n for n in failpoints.NAMES if n.startswith("engine.approval.")])
def test_what_was_asked_or_decided_is_known_afterwards(first: LocalEngine, name: str) -> None:
    agent = mind_rig.agent(first)
    agent.tool("write", {}, "echo x > x")
    state_dir = first._context.state_dir
    first.close()
    killed_at(name, state_dir, "approve" if name.endswith("decided") else "ask", agent.id)
    second = mind_rig.reopened(state_dir)
    try:
        again = Agent(second, agent.id)
        (approval,) = second.approvals()
        assert approval.status is (ApprovalStatus.APPROVED if name.endswith("decided") else ApprovalStatus.PENDING)
        assert second.journal(agent.id)[-1].name == "write", "the call has not begun"
        if approval.status is ApprovalStatus.PENDING:
            second.approve(approval.id, by="ann")
        call, _ = again.begin("mail", {"to": "a"}, side_effect=SideEffect.IRREVERSIBLE, approve=True)
        again.end(call)
        assert [a.id for a in second.approvals()] == [approval.id]
    finally:
        second.close()


@pytest.mark.parametrize("name", ["engine.fork.recorded", "engine.edit.forked", "engine.step.committed"])
def test_an_edit_is_whole_or_not_there(first: LocalEngine, name: str) -> None:
    agent = mind_rig.agent(first)
    agent.tool("write", {}, "echo x > x")
    state_dir = first._context.state_dir
    first.close()
    killed_at(name, state_dir, "edit", agent.id)
    second = mind_rig.reopened(state_dir)
    try:
        made = [trajectory for trajectory in second.trajectories() if trajectory.name == "edited"]
        if name == "engine.step.committed":
            assert [second.log(one.id)[-1].call.name for one in made] == ["edit"]
        else:
            assert made == []
            second.edit(second.trajectory(agent.id).head, _EDIT, name="edited")
        edited = Agent(second, second.trajectory("edited").id)
        assert edited.files() == {"x": "x\n", "y": "y"}
        assert Agent(second, agent.id).files() == {"x": "x\n"}
        assert second._catalog.get_meta("half_made") == "[]"
    finally:
        second.close()


@pytest.mark.parametrize("what", ["promote", "merge"])
@pytest.mark.parametrize("name", ["engine.step.sealed", "engine.step.committed"])
def test_a_promotion_or_merge_is_whole_or_not_there(first: LocalEngine, name: str, what: str) -> None:
    agent = mind_rig.agent(first)
    agent.tool("write", {}, "echo x > x")
    branch = first.fork(agent.id, 1, args=None, name="branch").trajectories[0].id
    Agent(first, branch).tool("write", {}, "echo y > y; rm x")
    before = [one.id for one in first.log(agent.id)]
    state_dir = first._context.state_dir
    first.close()
    killed_at(name, state_dir, what, agent.id)
    second = mind_rig.reopened(state_dir)
    try:
        log, again = second.log(agent.id), Agent(second, agent.id)
        if name == "engine.step.sealed":
            assert [one.id for one in log] == before
            assert again.files() == {"x": "x\n"}
            _change(second, what, agent.id)
        else:
            assert [one.call.name for one in log[len(before) :]] == [what]
        assert again.files() == {"y": "y\n"}
        second.undo(agent.id)
        assert again.files() == {"x": "x\n"}
    finally:
        second.close()


def _change(engine: LocalEngine, what: str, trajectory: str) -> None:
    if what == "promote":
        engine.promote("branch")
        return
    head = engine.trajectory(trajectory).head
    request = MergeRequest(head, head, take=(b"workspace/y",), delete=(b"workspace/x",))
    engine.merge(trajectory, engine.trajectory("branch").head, request)


@pytest.mark.parametrize("name", ["engine.fork.recorded", "engine.step.committed", "engine.fork.changed"])
def test_changed_children_are_all_there_or_none(first: LocalEngine, name: str) -> None:
    """Killed when the first of two children was changed, too."""
    agent = mind_rig.agent(first)
    agent.tool("write", {}, "echo x > x")
    state_dir = first._context.state_dir
    first.close()
    killed_at(name, state_dir, "fork", agent.id)
    second = mind_rig.reopened(state_dir)
    try:
        assert [trajectory.id for trajectory in second.trajectories()] == [agent.id]
        assert second._catalog.get_meta("half_made") == "[]"
        forked = _fork(second, agent.id)
        assert [Agent(second, one.id).files() for one in forked.trajectories] == [{"x": "x\n", "y": "y"}, {"x": "x\n"}]
        assert [len(second.log(one.id)) for one in forked.trajectories] == [1, 0]
        assert second._catalog.get_meta("half_made") == "[]"
    finally:
        second.close()


def _fork(engine: LocalEngine, trajectory: str) -> Forked:
    """Each time under one key, as a client does that has lost the answer."""
    variants = (Variant("changed", edit=_EDIT), Variant("same"))
    head = engine.trajectory(trajectory).head

    def recall(made: tuple[str, ...]) -> Forked:
        found = tuple(map(engine.trajectory, made))
        return Forked(found[0].experiment or ExperimentID(""), found)

    with engine.asking(RequestKey("fork", "the same", time.time_ns())) as asking:
        return asking.once(lambda: engine.fork(head, 2, args=None, name=None, variants=variants), recall)


def _ask(agent: Agent, gone: threading.Event, **more: Any) -> None:
    with contextlib.suppress(Conflict):
        agent.begin("mail", {"to": "a"}, cancelled=gone, **more)


def _child(state_dir: Path, what: str, trajectory: str) -> None:
    engine = mind_rig.reopened(state_dir)
    agent = Agent(engine, trajectory)
    if what == "rewind":
        engine.rewind(trajectory, engine.log(trajectory)[1].id, compensate=True)
        return
    if what in ("promote", "merge"):
        _change(engine, what, trajectory)
        return
    if what == "edit":
        engine.edit(engine.trajectory(trajectory).head, _EDIT, name="edited")
        return
    if what == "fork":
        _fork(engine, trajectory)
        return
    more = {"side_effect": SideEffect.IRREVERSIBLE, "approve": True}
    gone = threading.Event()
    asking = threading.Thread(target=_ask, args=(agent, gone), kwargs=more, daemon=True)
    asking.start()
    deadline = time.monotonic() + CHILD_S
    while time.monotonic() < deadline:
        pending = (
            engine.approvals(ApprovalStatus.PENDING) if what == "approve" else ()
        )  # else it dies before anybody can decide
        for approval in pending:
            gone.set()
            asking.join(CHILD_S)  # who asked does not see the decision before this process dies of it
            try:
                engine.approve(approval.id, by="ann")
            except SnapshotdError as exc:
                sys.exit(exc.message)
        time.sleep(0.01)


if __name__ == "__main__":
    _child(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
