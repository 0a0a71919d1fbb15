"""Calls that wait for a person: bound to what they were asked for, once each, whatever happens meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from snapshotd.api.history import RewindRequest
from snapshotd.api.trajectories import ForkRequest
from snapshotd.engine.engine import Engine
from snapshotd.errors import Conflict, Denied, UsageError
from snapshotd.types import Approval, ApprovalStatus, SideEffect
from tests import mind_rig
from tests.mind_rig import DONE, FAILED, Agent

pytestmark = pytest.mark.runc
PENDING = ApprovalStatus.PENDING
WAIT_S = 60.0


@pytest.fixture
def agent(engine: Engine) -> Agent:
    engine.approvals._approvals.policy.path.unlink(missing_ok=True)
    return mind_rig.agent(engine)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def policy(agent: Agent, text: str) -> None:
    agent.engine.approvals._approvals.policy.path.write_text(text)


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WAIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def pending(agent: Agent, count: int = 1) -> list[Approval]:
    def own() -> list[Approval]:
        return [a for a in agent.engine.approvals.list(PENDING) if a.trajectory == agent.id]

    until(lambda: len(own()) == count)
    return own()


Begun = Future[tuple[str, dict[str, Any]]]


def asked(pool: ThreadPoolExecutor, agent: Agent, arguments: Any, **more: Any) -> Begun:
    return pool.submit(agent.begin, "mail", arguments, side_effect=SideEffect.IRREVERSIBLE, approve="may I?", **more)


def test_an_approved_call_runs_and_shows_what_it_was_asked_with(agent: Agent, pool: ThreadPoolExecutor) -> None:
    agent.tool("write", {}, "echo x > x")
    begun = asked(pool, agent, {"to": "a"})
    (approval,) = pending(agent)
    assert (approval.tool, approval.arguments, approval.question, approval.status) == (
        "mail",
        {"to": "a"},
        "may I?",
        PENDING,
    )
    assert agent.engine.snapshots.get(approval.snapshot).call.name == "approval"
    assert [c.path for c in agent.engine.approvals.view(approval.id[:8]).files] == [b"workspace/x"]
    assert not begun.done()
    decided = agent.engine.approvals.approve(approval.id, by="ann", reason="fine")
    assert (decided.status, decided.by, decided.reason) == (ApprovalStatus.APPROVED, "ann", "fine")
    call, answer = begun.result(WAIT_S)
    assert "arguments" not in answer
    agent.end(call, result="sent")
    with pytest.raises(Conflict, match="is approved by ann"):
        agent.engine.approvals.approve(approval.id, by="bob")
    # The next one is asked anew, and shows what changed since.
    agent.tool("write", {}, "echo y > y")
    begun = asked(pool, agent, {"to": "a"})
    (second,) = pending(agent)
    view = agent.engine.approvals.view(second.id)
    assert ([c.path for c in view.files], view.since) == ([b"workspace/y"], approval.snapshot)
    agent.engine.approvals.deny(second.id, by="bob", reason="enough")
    with pytest.raises(Denied, match="bob did not let mail run: enough"):
        begun.result(WAIT_S)
    journal = list(agent.engine.journal.entries(agent.id))
    assert [(e.name, e.status) for e in journal] == [("write", DONE), ("mail", DONE), ("write", DONE), ("mail", FAILED)]
    assert (journal[-1].error, journal[-1].side_effect) == ("bob did not let mail run: enough", SideEffect.IRREVERSIBLE)
    assert agent.engine.branching.effects(agent.id) == []


def test_other_arguments_can_be_put_in(agent: Agent, pool: ThreadPoolExecutor) -> None:
    begun = asked(pool, agent, {"to": "everybody"})
    agent.engine.approvals.approve(pending(agent)[0].id, by="ann", arguments=({"to": "bob"},))
    call, answer = begun.result(WAIT_S)
    assert answer["arguments"] == {"to": "bob"}
    agent.end(call)
    assert list(agent.engine.journal.entries(agent.id))[-1].arguments == {"to": "bob"}


def test_files_that_changed_make_an_approval_stale_and_the_call_asks_anew(
    agent: Agent, pool: ThreadPoolExecutor
) -> None:
    begun = asked(pool, agent, {"to": "a"})
    (first,) = pending(agent)
    agent.sh("echo sneaky > sneaky")
    with pytest.raises(Conflict, match="stale"):
        agent.engine.approvals.approve(first.id, by="ann")
    (second,) = pending(agent)
    assert second.id != first.id
    assert [a.status for a in agent.engine.approvals.list() if a.id == first.id] == [ApprovalStatus.STALE]
    agent.engine.approvals.approve(second.id, by="ann")
    begun.result(WAIT_S)


def test_side_by_side_each_call_has_its_own(agent: Agent, pool: ThreadPoolExecutor) -> None:
    begun = [asked(pool, agent, {"to": "same"}) for _ in range(2)]
    first, second = pending(agent, 2)
    agent.engine.approvals.approve(first.id, by="ann")
    until(lambda: any(b.done() for b in begun))
    assert [a.id for a in pending(agent)] == [second.id]
    agent.engine.approvals.deny(second.id, by="ann")
    assert sorted(isinstance(b.exception(WAIT_S), Denied) for b in begun) == [False, True]


def test_nobody_decides_in_time(agent: Agent, pool: ThreadPoolExecutor) -> None:
    policy(agent, '[[rule]]\nname = "ma*"\naction = "approve"\nexpires = "1s"\n')
    with pytest.raises(Denied, match="in time"):
        pool.submit(agent.begin, "mail", {}).result(WAIT_S)
    agent.tool("other", {})


def test_a_caller_that_is_gone_leaves_it_pending_and_finds_it_again(agent: Agent, pool: ThreadPoolExecutor) -> None:
    cancelled = threading.Event()
    begun = asked(pool, agent, {"to": "a"}, cancelled=cancelled)
    (approval,) = pending(agent)
    cancelled.set()
    with pytest.raises(Conflict, match="still waits"):
        begun.result(WAIT_S)
    agent.engine.approvals.approve(approval.id, by="ann")
    call, _ = asked(pool, agent, {"to": "a"}).result(WAIT_S)  # not asked again
    agent.end(call)
    begun = asked(pool, agent, {"to": "a"})  # but it is spent now
    (another,) = pending(agent)
    assert another.id != approval.id
    agent.engine.approvals.deny(another.id, by="ann")
    assert isinstance(begun.exception(WAIT_S), Denied)


def test_other_arguments_are_another_question(agent: Agent, pool: ThreadPoolExecutor) -> None:
    cancelled = threading.Event()
    begun = asked(pool, agent, {"to": "a"}, cancelled=cancelled)
    (approval,) = pending(agent)
    cancelled.set()
    assert isinstance(begun.exception(WAIT_S), Conflict)
    agent.engine.approvals.approve(approval.id, by="ann")
    begun = asked(pool, agent, {"to": "b"})
    (other,) = pending(agent)
    assert other.arguments == {"to": "b"}
    agent.engine.approvals.deny(other.id, by="ann")
    assert isinstance(begun.exception(WAIT_S), Denied)


def test_it_does_not_cross_a_fork(agent: Agent, pool: ThreadPoolExecutor) -> None:
    cancelled = threading.Event()
    begun = asked(pool, agent, {"to": "a"}, cancelled=cancelled)
    (approval,) = pending(agent)
    cancelled.set()
    assert isinstance(begun.exception(WAIT_S), Conflict)
    agent.engine.approvals.approve(approval.id, by="ann")
    (fork,) = agent.engine.branching.fork(approval.snapshot, ForkRequest()).trajectories
    forked = Agent(agent.engine, fork.id)
    begun = asked(pool, forked, {"to": "a"})
    (other,) = pending(forked)
    agent.engine.approvals.deny(other.id, by="ann")
    assert isinstance(begun.exception(WAIT_S), Denied)


def test_the_policy_decides_by_name_arguments_and_side_effect(agent: Agent, pool: ThreadPoolExecutor) -> None:
    policy(
        agent,
        """
[[rule]]
name = "shell"
arguments = { "command" = "\\\\brm\\\\b" }
action = "deny"
reason = "nothing is removed here"
[[rule]]
name = "shell"
action = "allow"
[[rule]]
side_effect = "irreversible"
action = "approve"
""",
    )
    with pytest.raises(Denied, match="nothing is removed here"):
        agent.begin("shell", {"command": "rm -r /"})
    denied = agent.head.call
    assert (denied.name, denied.arguments, denied.status) == ("shell", {"command": "rm -r /"}, FAILED)
    assert denied.error == "the policy does not let shell run with these arguments: nothing is removed here"
    assert [entry.id for entry in agent.engine.journal.entries(agent.id)] == [denied.id]
    agent.tool("shell", {"command": "ls"}, side_effect=SideEffect.IRREVERSIBLE)
    agent.tool("mail", {})
    begun = pool.submit(agent.begin, "mail", {}, side_effect=SideEffect.IRREVERSIBLE)
    agent.engine.approvals.approve(pending(agent)[0].id, by="ann")
    begun.result(WAIT_S)
    policy(agent, "[[rule]]\nname = \n")
    with pytest.raises(UsageError, match="line 2"):
        agent.begin("shell", {"command": "ls"})


def test_what_outside_tools_see(agent: Agent, pool: ThreadPoolExecutor) -> None:
    told: SimpleQueue[dict[str, Any]] = SimpleQueue()
    agent.engine.life.listen(told.put)
    watching = (event for event in iter(lambda: told.get(timeout=WAIT_S), None) if event["event"] == "approval")
    begun = asked(pool, agent, {"to": "a"})
    (approval,) = pending(agent)
    event = {"event": "approval", "id": approval.id, "tool": "mail", "trajectory": agent.id}
    assert next(watching) == {**event, "status": "pending"}
    agent.engine.approvals.approve(approval.id, by="ann")
    assert next(watching) == {**event, "status": "approved"}
    begun.result(WAIT_S)


def test_a_compensation_can_need_approval(agent: Agent, pool: ThreadPoolExecutor) -> None:
    start = agent.tool("write", {}, "echo x > x")
    agent.send("mail", "a")
    agent.engine.branching.rewind(agent.id, RewindRequest(start.id))
    policy(agent, '[[rule]]\nname = "compensate"\naction = "approve"\n')
    running = pool.submit(agent.engine.branching.compensate, agent.id, ())
    (approval,) = pending(agent)
    assert approval.arguments["tool"] == "mail"
    assert agent.files() == {"x": "x\n"}
    agent.engine.approvals.deny(approval.id, by="ann")
    assert isinstance(running.exception(WAIT_S), Denied)
    running = pool.submit(agent.engine.branching.compensate, agent.id, ())
    agent.engine.approvals.approve(pending(agent)[0].id, by="ann")
    assert [e.compensated for e in running.result(WAIT_S)] == ["done"]


def test_a_pending_approval_is_still_there_after_a_restart(small_root: Path, pool: ThreadPoolExecutor) -> None:
    with mind_rig.engine(small_root) as first:
        agent = mind_rig.agent(first)
        state_dir = first.life._context.state_dir
        begun = asked(pool, agent, {"to": "a"})
        (approval,) = pending(agent)
        first.life.close()
        assert isinstance(begun.exception(WAIT_S), Conflict)
        second = mind_rig.reopened(state_dir)
        try:
            again = Agent(second, agent.id)
            assert [a.id for a in second.approvals.list(PENDING)] == [approval.id]
            begun = asked(pool, again, {"to": "a"})
            second.approvals.approve(approval.id, by="ann")
            call, _ = begun.result(WAIT_S)
            again.end(call)
            assert len(second.approvals.list()) == 1
        finally:
            second.life.close()
