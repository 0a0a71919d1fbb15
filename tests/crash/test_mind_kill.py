"""A daemon killed while a person decides, or while a call is made up for: nothing is asked, allowed or undone twice."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd import failpoints
from snapshotd.api.history import RewindRequest
from snapshotd.api.trajectories import ForkRequest
from snapshotd.engine.engine import Engine
from snapshotd.errors import Conflict
from snapshotd.failpoints import EXIT_CODE
from snapshotd.types import ApprovalStatus, CallStatus, SideEffect
from tests import forked, long, mind_rig
from tests.crash import mind_kill_child
from tests.crash.mind_kill_child import CHILD_S
from tests.mind_rig import Agent

pytestmark = pytest.mark.runc


class Bench:
    """One state directory for all tests, with an image, and the engine that is open on it."""

    def __init__(self, first: Engine) -> None:
        self.engine, self.state_dir = first, first.life._context.state_dir

    def killed_at(self, name: str, what: str, trajectory: str) -> Engine:
        """Do something in an engine of its own process, which dies at a failpoint. Returns the next engine."""
        self.engine.life.close()
        env = {**os.environ, "SNAPSHOTD_FAILPOINT": name}
        words = [str(self.state_dir), what, trajectory]
        code, _, said = forked.run(words, env=env, timeout_s=CHILD_S, module=mind_kill_child.__name__)
        self.engine = mind_rig.reopened(self.state_dir)
        assert code == EXIT_CODE, (code, said[-3000:].decode())
        assert f"failpoint {name} reached" in said.decode()
        return self.engine


@pytest.fixture(scope="module")
def only(small_root: Path) -> Iterator[Bench]:
    with mind_rig.engine(small_root) as first:
        bench = Bench(first)
        yield bench
        bench.engine.life.close()


@pytest.fixture
def bench(only: Bench) -> Iterator[Bench]:
    yield only
    mind_rig.clear(only.engine)


@pytest.mark.parametrize("name", [n for n in failpoints.NAMES if n.startswith("engine.compensate.")])
def test_a_compensation_that_was_cut_off_does_not_run_again(bench: Bench, name: str) -> None:
    agent = mind_rig.agent(bench.engine)
    start = agent.tool("write", {}, "echo x > x")
    agent.send("mail", "a")
    second = bench.killed_at(name, "rewind", agent.id)
    again = Agent(second, agent.id)
    assert again.head.call.name == "mail", "nothing was rewound"
    with pytest.raises(Conflict, match="does not run again"):
        second.branching.rewind(agent.id, RewindRequest(start.id, compensate=True))
    rewound = second.branching.rewind(agent.id, RewindRequest(start.id))
    assert rewound.call.name == "rewind"
    second.branching.compensate(agent.id, ())
    assert [e.compensated for e in second.branching.effects(agent.id)] == [CallStatus.UNKNOWN]
    assert "compensate" not in [s.call.name for s in second.snapshots.log(agent.id)]
    assert again.files() == {"x": "x\n"}


@pytest.mark.parametrize("name", [n for n in failpoints.NAMES if n.startswith("engine.approval.")])
def test_what_was_asked_or_decided_is_known_afterwards(bench: Bench, name: str) -> None:
    agent = mind_rig.agent(bench.engine)
    agent.tool("write", {}, "echo x > x")
    second = bench.killed_at(name, "approve" if name.endswith("decided") else "ask", agent.id)
    again = Agent(second, agent.id)
    (approval,) = second.approvals.list()
    assert approval.status is (ApprovalStatus.APPROVED if name.endswith("decided") else ApprovalStatus.PENDING)
    assert list(second.journal.entries(agent.id))[-1].name == "write", "the call has not begun"
    if approval.status is ApprovalStatus.PENDING:
        second.approvals.approve(approval.id, by="ann")
    call, _ = again.begin("mail", {"to": "a"}, side_effect=SideEffect.IRREVERSIBLE, approve=True)
    again.end(call)
    assert [a.id for a in second.approvals.list()] == [approval.id]


@pytest.mark.parametrize("name", long.some(["engine.edit.forked", "engine.fork.recorded", "engine.step.committed"], 1))
def test_an_edit_is_whole_or_not_there(bench: Bench, name: str) -> None:
    agent = mind_rig.agent(bench.engine)
    agent.tool("write", {}, "echo x > x")
    second = bench.killed_at(name, "edit", agent.id)
    made = [trajectory for trajectory in second.snapshots.trajectories() if trajectory.name == "edited"]
    if name == "engine.step.committed":
        assert [second.snapshots.log(one.id)[-1].call.name for one in made] == ["edit"]
    else:
        assert made == []
        second.branching.edit(second.snapshots.trajectory(agent.id).head, mind_kill_child.EDIT, name="edited")
    edited = Agent(second, second.snapshots.trajectory("edited").id)
    assert edited.files() == {"x": "x\n", "y": "y"}
    assert Agent(second, agent.id).files() == {"x": "x\n"}
    assert second.life._catalog.get_meta("half_made") == "[]"


@pytest.mark.parametrize("what", ["promote", "merge"])
@pytest.mark.parametrize("name", long.some(["engine.step.committed", "engine.step.sealed"], 1))
def test_a_promotion_or_merge_is_whole_or_not_there(bench: Bench, name: str, what: str) -> None:
    agent = mind_rig.agent(bench.engine)
    agent.tool("write", {}, "echo x > x")
    branch = bench.engine.branching.fork(agent.id, ForkRequest(name="branch")).trajectories[0].id
    Agent(bench.engine, branch).tool("write", {}, "echo y > y; rm x")
    before = [one.id for one in bench.engine.snapshots.log(agent.id)]
    second = bench.killed_at(name, what, agent.id)
    log, again = second.snapshots.log(agent.id), Agent(second, agent.id)
    if name == "engine.step.sealed":
        assert [one.id for one in log] == before
        assert again.files() == {"x": "x\n"}
        mind_kill_child.change(second, what, agent.id)
    else:
        assert [one.call.name for one in log[len(before) :]] == [what]
    assert again.files() == {"y": "y\n"}
    second.branching.undo(agent.id)
    assert again.files() == {"x": "x\n"}


@pytest.mark.parametrize("name", long.some(["engine.fork.changed", "engine.fork.recorded", "engine.step.committed"], 1))
def test_changed_children_are_all_there_or_none(bench: Bench, name: str) -> None:
    """Killed when the first of two children was changed, too."""
    agent = mind_rig.agent(bench.engine)
    agent.tool("write", {}, "echo x > x")
    second = bench.killed_at(name, "fork", agent.id)
    assert [trajectory.id for trajectory in second.snapshots.trajectories()] == [agent.id]
    assert second.life._catalog.get_meta("half_made") == "[]"
    forked = mind_kill_child.fork(second, agent.id)
    assert [Agent(second, one.id).files() for one in forked.trajectories] == [{"x": "x\n", "y": "y"}, {"x": "x\n"}]
    assert [len(second.snapshots.log(one.id)) for one in forked.trajectories] == [1, 0]
    assert second.life._catalog.get_meta("half_made") == "[]"
