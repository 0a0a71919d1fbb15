"""From a command's start to its commit the sandbox belongs to it: nobody gives it another root or another mind
meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from snapshotd.api.commands import ExecRequest
from snapshotd.api.history import RetryRequest, RewindRequest
from snapshotd.api.trajectories import RunAgentRequest
from snapshotd.catalog.tables.snapshots import SnapshotTable
from snapshotd.engine.base import EditRequest, ExecResult, FileEdit
from snapshotd.engine.engine import Engine
from snapshotd.engine.history import editing, effects
from snapshotd.engine.runs import commands
from snapshotd.errors import Conflict, OutOfSpace, SandboxFailed
from snapshotd.types import CallStatus, Snapshot, TrajectoryStatus
from tests.e2e.support import wait_until
from tests.mind_rig import Agent

pytestmark = pytest.mark.runc
WAIT_S = 60.0
ROUNDS = 12
OTHERS: dict[str, Callable[[Agent, Snapshot], object]] = {
    "rewind": lambda agent, first: agent.engine.branching.rewind(agent.id, RewindRequest(first.id)),
    "rewind of files": lambda agent, first: agent.engine.branching.rewind(
        agent.id, RewindRequest(first.id, mode="files")
    ),
    "rewind of the conversation": lambda agent, first: agent.engine.branching.rewind(
        agent.id, RewindRequest(first.id, mode="conversation")
    ),
    "undo": lambda agent, _: agent.engine.branching.undo(agent.id),
    "retry": lambda agent, _: agent.engine.branching.retry(agent.id, RetryRequest("task", resume=False)),
}


def execute(agent: Agent, script: str, sink: Callable[[str, bytes], object] = lambda *_: None) -> ExecResult:
    return agent.engine.runs.exec(agent.id, ExecRequest(("sh", "-c", script), cwd="/workspace"), sink=sink)  # type: ignore[arg-type]


def own(agent: Agent, done: ExecResult) -> bytes:
    """What the command's own snapshot has in the file `own`."""
    assert done.snapshot is not None
    return b"".join(agent.engine.snapshots.cat(done.snapshot.id, b"workspace/own"))


def at_the_gap(patch: pytest.MonkeyPatch, name: str, meanwhile: Callable[[], object], where: Any = commands) -> None:
    """Have something done, by another thread, when a command has ended and is not captured yet."""
    commit = where.commit_step

    def hooked(catalog: Any, sandbox: Any, call: Any, *rest: Any, **more: Any) -> Any:
        if call.name == name:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(meanwhile).result(WAIT_S)
        return commit(catalog, sandbox, call, *rest, **more)

    patch.setattr(where, "commit_step", hooked)


def refused(agent: Agent, first: Snapshot, what: str) -> None:
    with pytest.raises(Conflict, match="has not ended"):
        OTHERS[what](agent, first)


@pytest.mark.parametrize("what", OTHERS)
def test_what_comes_between_a_commands_end_and_its_snapshot(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    with agent.task("task"):
        first = agent.tool("write", {}, "echo before > own")
    agent.tool("write", {}, "echo after > other")
    if what == "undo":
        agent.engine.branching.rewind(agent.id, RewindRequest(first.id))
    at_the_gap(monkeypatch, "exec", lambda: refused(agent, first, what))
    done = execute(agent, "echo mine > own")
    assert own(agent, done) == b"mine\n"
    assert agent.head.id == done.snapshot.id  # type: ignore[union-attr]
    assert agent.files()["own"] == "mine\n"
    OTHERS["rewind"](agent, first)
    assert agent.files() == {"own": "before\n"}


def test_a_compensation_is_a_command_too(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    first = agent.tool("write", {}, "echo before > own")
    agent.send("mail", "a")
    agent.engine.branching.rewind(agent.id, RewindRequest(first.id))
    at_the_gap(monkeypatch, effects.COMPENSATE, lambda: refused(agent, first, "rewind of files"), effects)
    agent.engine.branching.compensate(agent.id, ())
    assert agent.head.call.name == effects.COMPENSATE
    assert b"".join(agent.engine.snapshots.cat(agent.head.id, b"workspace/undone")).count(b'"key": "a"') == 1


def test_a_replay_waits_for_it(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program asks for its next call, and with it for the files of another snapshot."""
    first = agent.tool("write", {}, "echo before > own")
    sandbox, places = agent.sandbox, agent.engine.life._sessions._adoption._places
    with ThreadPoolExecutor(1) as pool:
        moved: list[Future[None]] = []

        def move() -> None:
            moved.append(pool.submit(places.go_to, sandbox, first))
            wait_until(lambda: moved[0].done() or bool(sandbox.use._changing._waiters), "it goes there, or waits")  # type: ignore[attr-defined]

        at_the_gap(monkeypatch, "exec", move)
        done = execute(agent, "echo mine > own")
        moved[0].result(WAIT_S)
    assert own(agent, done) == b"mine\n"
    assert agent.files()["own"] == "before\n"


def test_a_fork_that_is_being_edited(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody runs a command in it before it is what was asked for."""
    source = agent.tool("write", {}, "echo before > own")
    at_gap, go_on = threading.Event(), threading.Event()
    pool = ThreadPoolExecutor(1)
    running: list[Future[ExecResult]] = []

    def hold() -> None:
        at_gap.set()
        assert go_on.wait(WAIT_S)

    def look_into_it(_: str) -> None:
        fork = next(one for one in agent.engine.snapshots.trajectories() if one.forked_from == source.id)
        running.append(pool.submit(execute, Agent(agent.engine, fork.id), "echo mine > own"))
        assert at_gap.wait(WAIT_S)

    at_the_gap(monkeypatch, "exec", hold)
    monkeypatch.setattr(editing, "hit", look_into_it)
    with pool:
        try:
            with pytest.raises(Conflict, match="has not ended"):
                agent.engine.branching.edit(source.id, EditRequest(files=(FileEdit(b"workspace/own", b"edited"),)))
        finally:
            go_on.set()
    assert running[0].exception() is not None, "the fork is gone"
    assert [one for one in agent.engine.snapshots.trajectories() if one.forked_from == source.id] == []


def test_commands_and_rewinds_as_fast_as_they_can(agent: Agent) -> None:
    first = agent.tool("write", {}, "echo before > own")
    ended = threading.Event()
    rewound = 0

    def rewind() -> None:
        nonlocal rewound
        while not ended.is_set():
            try:
                agent.engine.branching.rewind(agent.id, RewindRequest(first.id))
                rewound += 1
            except Conflict:
                continue

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(rewind)
        try:
            for number in range(ROUNDS):
                assert own(agent, execute(agent, f"echo {number} > own")) == b"%d\n" % number
                before = rewound
                wait_until(
                    lambda before=before: rewound > before or other.done(),
                    "a rewind comes through between two commands",
                )  # type: ignore[misc]
        finally:
            ended.set()
        other.result(WAIT_S)


def test_commands_at_the_same_time_do_not_wait_for_each_other(agent: Agent) -> None:
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(execute, agent, "while [ ! -e go ]; do sleep 0.05; done; echo first > own")
        pool.submit(execute, agent, "touch go").result(WAIT_S)
        assert own(agent, waiting.result(WAIT_S)) == b"first\n"


# -- its sandbox ends under it -----------------------------------------------------------------------------------------

HALF = "echo half > own; echo said so far; exec sleep 1000"


def begun(agent: Agent, pool: ThreadPoolExecutor, script: str = HALF) -> Future[ExecResult]:
    """A command that has said something, and does not end."""
    said = threading.Event()
    running = pool.submit(execute, agent, script, lambda *_: said.set())
    assert said.wait(WAIT_S)
    return running


def is_interrupted(agent: Agent, done: ExecResult) -> None:
    """With what it had printed and written."""
    assert done.snapshot is not None
    call = agent.engine.snapshots.get(done.snapshot.id).call
    assert (call.name, call.status, call.exit_code) == ("exec", CallStatus.INTERRUPTED, 137)
    assert b"".join(agent.engine.snapshots.output(done.snapshot.id, "stdout")) == b"said so far\n"
    assert own(agent, done) == b"half\n"


def test_a_stop_cuts_it_off_and_it_is_recorded(agent: Agent) -> None:
    with ThreadPoolExecutor(2) as pool:
        running = [begun(agent, pool) for _ in range(2)]
        assert agent.engine.runs.stop(agent.id).status is TrajectoryStatus.STOPPED
        for one in running:
            is_interrupted(agent, one.result(WAIT_S))
    assert [one.call.name for one in agent.engine.snapshots.log(agent.id)][:3] == ["start", "exec", "exec"]
    assert agent.files()["own"] == "half\n"


def test_a_stop_waits_until_one_that_has_ended_is_recorded(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = agent.sandbox
    with ThreadPoolExecutor(1) as pool:
        stopping: list[Future[object]] = []

        def stop() -> None:
            stopping.append(pool.submit(agent.engine.runs.stop, agent.id))
            wait_until(lambda: stopping[0].done() or bool(sandbox.use._changing._waiters), "it has stopped, or waits")  # type: ignore[attr-defined]

        at_the_gap(monkeypatch, "exec", stop)
        done = execute(agent, "echo mine > own")
        stopping[0].result(WAIT_S)
    assert done.call.status is CallStatus.DONE
    assert own(agent, done) == b"mine\n"
    assert agent.head.id == done.snapshot.id  # type: ignore[union-attr]


def test_a_stop_that_fails_leaves_the_sandbox_as_it_was(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    agent.sh("echo late > late")

    def refuse(*_: object, **__: object) -> None:
        raise OutOfSpace("the catalog's disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(SnapshotTable, "commit", refuse)
        with pytest.raises(OutOfSpace):
            agent.engine.runs.stop(agent.id)
    assert own(agent, execute(agent, "echo mine > own")) == b"mine\n"
    assert agent.files().keys() == {"late", "own"}


def test_the_end_of_the_program_cuts_it_off_too(engine: Engine) -> None:
    run = RunAgentRequest(runtime="runc", command=("sh", "-c", "while [ ! -e go ]; do sleep 0.05; done"))
    agent = Agent(engine, engine.runs.run(run).id)
    with ThreadPoolExecutor(1) as pool:
        running = begun(agent, pool)
        execute(agent, "touch go")
        is_interrupted(agent, running.result(WAIT_S))
    assert [event["status"] for event in engine.runs.events(agent.id, follow=True) if event["event"] == "finished"] == [
        "finished"
    ]
    assert agent.head.call.name == "exit"


def test_a_compensation_that_is_cut_off(agent: Agent) -> None:
    """It is not called done, and does not run again."""
    first = agent.tool("write", {}, "echo before > own")
    agent.send("mail", "a", compensate=("sh", "-c", "touch /workspace/begun; exec sleep 1000"))
    agent.engine.branching.rewind(agent.id, RewindRequest(first.id))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(agent.engine.branching.compensate, agent.id, ())
        wait_until(lambda: "begun" in agent.files(), "it has begun")
        agent.engine.runs.stop(agent.id)
        with pytest.raises(SandboxFailed, match="cut off"):
            running.result(WAIT_S)
    (left,) = agent.engine.branching.effects(agent.id)
    assert left.compensated is CallStatus.INTERRUPTED
    assert (agent.head.call.name, agent.head.call.status) == (effects.COMPENSATE, CallStatus.INTERRUPTED)


def test_a_resume_does_not_cut_it_off(engine: Engine) -> None:
    run = RunAgentRequest(runtime="runc", command=("sh", "-c", "exit 3"))
    agent = Agent(engine, engine.runs.run(run).id)
    list(engine.runs.events(agent.id, follow=True))
    with ThreadPoolExecutor(1) as pool:
        running = begun(agent, pool)
        with pytest.raises(Conflict, match="has not ended"):
            engine.runs.resume(agent.id)
        engine.runs.stop(agent.id)
        is_interrupted(agent, running.result(WAIT_S))
