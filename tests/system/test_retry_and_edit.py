"""One failed task again, without what others completed; and another past, edited."""

from __future__ import annotations

import pytest

from snapshotd.api.history import RetryRequest, RewindRequest
from snapshotd.api.storage import CheckRequest
from snapshotd.api.trajectories import ForkRequest
from snapshotd.engine.base import EditRequest, FileEdit
from snapshotd.engine.journal.replay import Kept, Replay
from snapshotd.errors import Conflict, NotFound, UsageError
from snapshotd.types import CallStatus, EntryKind, SideEffect
from tests.mind_rig import Agent, message

pytestmark = pytest.mark.runc


# -- retry -------------------------------------------------------------------------------------------------------------


def test_what_others_completed_stays_and_the_rest_goes(agent: Agent) -> None:
    with agent.task("plan"):
        agent.tool("write", {"n": 1}, "echo plan > plan", task="plan")
    with agent.task("build", "plan", status="failed"):
        agent.send("upload", "broken", task="build")
        agent.tool("write", {"n": 2}, "echo broken > build; rm plan", task="build", status=CallStatus.FAILED)
    with agent.task("docs", "plan"):
        agent.calls.state_set("docs", (True,))
        agent.send("publish", "docs", task="docs")
        agent.tool("write", {"n": 3}, "echo docs > docs; ln docs docs2", task="docs", result="written")
    before = [e.id for e in agent.engine.journal.entries(agent.id)]
    snapshot = agent.engine.branching.retry(agent.id, RetryRequest("build", resume=False))
    assert snapshot.call.arguments["kept"] == ["docs"]
    assert agent.files() == {"plan": "plan\n", "docs": "docs\n", "docs2": "docs\n"}
    assert agent.sh("stat -c %h docs").strip() == "2"
    assert agent.engine.journal.state(agent.id) == {"docs": True}
    assert {t.name: t.status for t in agent.engine.journal.tasks(agent.id)} == {
        "plan": "completed",
        "docs": "completed",
    }
    # What it did outside was made up for; what the kept task did is not left behind.
    assert [(e.entry.arguments["key"], e.compensated) for e in agent.engine.branching.effects(agent.id)] == [
        ("broken", CallStatus.DONE)
    ]
    entries = list(agent.engine.journal.entries(agent.id))
    assert [(e.kind, e.name) for e in entries] == [
        (EntryKind.TOOL, "write"),
        (EntryKind.TASK, "plan"),
        (EntryKind.TOOL, "publish"),
        (EntryKind.TOOL, "write"),
        (EntryKind.TASK, "docs"),
    ]
    assert [e.result for e in entries[3:]] == ["written", {"of": "docs"}]
    # A resumed program has met everything before it comes to the task again.
    replay = Replay(entries)
    assert replay.match(EntryKind.TOOL, "write", {"n": 1}) == entries[0]
    assert replay.match(EntryKind.TASK, "plan", {}) == entries[1]
    assert replay.exhausted
    # A program that comes by is answered from the record, in its task and nowhere else.
    kept = Kept(entries)
    assert kept.take(EntryKind.TOOL, "write", {"n": 3}, "build") is None
    found = kept.take(EntryKind.TOOL, "write", {"n": 3}, "docs")
    assert found is not None
    assert found.result == "written"
    skipped = kept.skip_task("docs")
    assert skipped is not None
    assert skipped.result == {"of": "docs"}
    agent.engine.branching.undo(agent.id)
    assert [e.id for e in agent.engine.journal.entries(agent.id)] == before
    assert agent.files()["build"] == "broken\n"


def test_a_kept_link_to_a_file_that_goes_back_leaves_that_file_as_it_was(agent: Agent) -> None:
    with agent.task("plan"):
        agent.tool("write", {"n": 1}, "echo plan > plan", task="plan")
    with agent.task("build", status="failed"):
        agent.tool("write", {"n": 2}, "echo broken > plan", task="build")
    with agent.task("docs"):
        agent.tool("write", {"n": 3}, "ln plan docs", task="docs")
    agent.engine.branching.retry(agent.id, RetryRequest("build", resume=False))
    assert agent.files() == {"plan": "plan\n", "docs": "broken\n"}


def test_the_layer_of_what_was_kept_is_part_of_the_snapshot(agent: Agent) -> None:
    with agent.task("fails", status="failed"):
        agent.tool("write", {}, "echo x > x", task="fails")
    with agent.task("works"):
        agent.tool("write", {}, "echo y > y", task="works")
    snapshot = agent.engine.branching.retry(agent.id, RetryRequest("fails", resume=False))
    agent.tool("write", {}, "echo z > z")
    agent.engine.storage.flush()
    stored = agent.engine.snapshots.get(snapshot.id)
    assert stored.tree is not None
    (fork,) = agent.engine.branching.fork(snapshot.id, ForkRequest()).trajectories
    assert Agent(agent.engine, fork.id).files() == {"y": "y\n"}
    assert agent.engine.storage.check(CheckRequest(read_data=True), lambda _: None).damages == ()


@pytest.mark.parametrize(
    ("script", "path"), [("echo more >> built", "/workspace/built"), ("echo x > dir/file", "/workspace/dir")]
)
def test_what_builds_on_the_failed_task_is_refused_before_anything_happens(
    agent: Agent, script: str, path: str
) -> None:
    with agent.task("build", status="failed"):
        agent.tool("write", {}, "echo built > built; mkdir dir", task="build")
        agent.send("upload", "x", task="build")
    with agent.task("docs"):
        agent.tool("write", {}, script, task="docs")
    head = agent.head.id
    with pytest.raises(Conflict, match=path):
        agent.engine.branching.retry(agent.id, RetryRequest("build", resume=False))
    assert agent.head.id == head
    assert agent.engine.branching.effects(agent.id) == []


def test_dependents_go_with_it(agent: Agent) -> None:
    with agent.task("plan"):
        agent.tool("write", {}, "echo plan > plan", task="plan")
    with agent.task("build", "plan"):
        agent.tool("write", {}, "echo build > build", task="build")
    with pytest.raises(NotFound, match="'plan', 'build'"):
        agent.engine.branching.retry(agent.id, RetryRequest("deploy", resume=False))
    agent.engine.branching.retry(agent.id, RetryRequest("plan", resume=False))
    assert agent.files() == {}
    assert agent.engine.journal.tasks(agent.id) == []


def test_a_value_that_another_had_changed_is_refused(agent: Agent) -> None:
    with agent.task("build", status="failed"):
        agent.calls.state_set("count", (1,))
        agent.tool("write", {}, "true", task="build")
    with agent.task("docs"):
        agent.calls.state_set("count", (2,))
        agent.tool("write", {}, "true", task="docs")
    with pytest.raises(Conflict, match="'count'"):
        agent.engine.branching.retry(agent.id, RetryRequest("build", resume=False))


# -- edit --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def past(agent: Agent) -> Agent:
    agent.say("first")
    agent.tool("read", {"n": 1}, "echo one > file; chmod 640 file", result="one")
    agent.say("second")
    agent.calls.state_set("k", (1,))
    agent.tool("read", {"n": 2}, "echo two > other", result="two")
    return agent


def edited(agent: Agent, request: EditRequest) -> Agent:
    trajectory = agent.engine.branching.edit(agent.head.id, request)
    assert trajectory.forked_from == agent.head.id
    snapshot = agent.engine.snapshots.get(trajectory.id)
    assert (snapshot.call.name, snapshot.parent, snapshot.trajectory) == ("edit", agent.head.id, trajectory.id)
    return Agent(agent.engine, trajectory.id)


def test_nothing_of_the_original_changes(past: Agent) -> None:
    before = (
        past.files(),
        past.said(),
        past.engine.journal.state(past.id),
        list(past.engine.journal.entries(past.id)),
        past.head.id,
    )
    edited(
        past,
        EditRequest(files=(FileEdit(b"workspace/file", b"x"),), drop_messages=1, state=(("k", 2),), result=("three",)),
    )
    assert (
        past.files(),
        past.said(),
        past.engine.journal.state(past.id),
        list(past.engine.journal.entries(past.id)),
        past.head.id,
    ) == before


def test_files(past: Agent) -> None:
    other = edited(
        past,
        EditRequest(
            files=(
                FileEdit(b"/workspace/file", b"changed\n"),
                FileEdit(b"workspace/other", None),
                FileEdit(b"workspace/new", b"new\n", 0o755),
            )
        ),
    )
    assert other.files() == {"file": "changed\n", "new": "new\n"}
    assert other.sh("stat -c '%a %u' file new").split() == ["640", "0", "755", "0"]
    assert other.head.follows is None
    assert (other.said(), len(list(other.engine.journal.entries(other.id)))) == (["first", "second"], 2)
    other.tool("write", {}, "echo more > more")
    assert "more" in other.files()


def test_messages(past: Agent) -> None:
    dropped = edited(past, EditRequest(drop_messages=1, add_messages=(message("instead"),)))
    assert dropped.said() == ["first", "instead"]
    whole = edited(past, EditRequest(messages=(message("first"), message("other"), message("third"))))
    assert whole.said() == ["first", "other", "third"]
    assert edited(past, EditRequest(messages=())).said() == []
    added = edited(past, EditRequest(add_messages=(message("third"),)))
    assert (added.said(), added.head.follows) == (["first", "second", "third"], None)
    assert {len(list(a.engine.journal.entries(a.id))) for a in (dropped, whole, added)} == {2}
    added.say("fourth")
    added.tool("write", {})
    assert added.said() == ["first", "second", "third", "fourth"]


def test_state_result_and_environment(past: Agent) -> None:
    other = edited(
        past, EditRequest(state=(("k", None), ("l", [1])), result=({"is": 3},), env=(("GREETING", "hello"),))
    )
    assert other.engine.journal.state(other.id) == {"l": [1]}
    entries = list(other.engine.journal.entries(other.id))
    assert [(e.name, e.arguments, e.status) for e in entries] == [("read", {"n": n}, CallStatus.DONE) for n in (1, 2)]
    assert entries[1].result == {"is": 3}
    assert entries[1].snapshot == other.head.id
    assert other.said() == ["first", "second"]
    assert other.sh("echo $GREETING") == "hello\n"


@pytest.mark.parametrize(
    "request_",
    [
        EditRequest(files=(FileEdit(b"../x", b""),)),
        EditRequest(files=(FileEdit(b"", b""),)),
        EditRequest(drop_messages=3),
        EditRequest(files=(FileEdit(b"workspace", b"x"),)),
        EditRequest(files=(FileEdit(b"workspace/file/x", b"x"),)),
        EditRequest(files=(FileEdit(b"bin/x", b"x"),)),
        EditRequest(files=(FileEdit(b"workspace/x", b"x", 0o17777),)),
    ],
)
def test_what_cannot_be_edited(past: Agent, request_: EditRequest) -> None:
    before = past.engine.snapshots.trajectories()
    with pytest.raises(UsageError):
        past.engine.branching.edit(past.head.id, request_)
    assert past.engine.snapshots.trajectories() == before


def test_what_is_not_there(past: Agent) -> None:
    with pytest.raises(NotFound, match="/workspace/none"):
        past.engine.branching.edit(past.head.id, EditRequest(files=(FileEdit(b"workspace/none", None),)))
    past.engine.branching.rewind(past.id, RewindRequest(past.head.id))
    with pytest.raises(UsageError, match="no result"):
        past.engine.branching.edit(past.head.id, EditRequest(result=(1,)))


def test_a_kept_irreversible_call_is_one_call(agent: Agent) -> None:
    """However often it was kept: it is left behind once, and compensated once."""
    start = agent.tool("start", {})
    with agent.task("fails", status="failed"):
        agent.tool("write", {}, "echo x > x", task="fails")
    with agent.task("works"):
        agent.send("mail", "a", task="works")
    for _ in range(2):
        began = agent.engine.branching.retry(agent.id, RetryRequest("fails", resume=False))
        assert agent.engine.branching.effects(agent.id) == []
        agent.engine.branching.undo(agent.id)
    agent.engine.branching.rewind(agent.id, RewindRequest(began.id))
    agent.engine.branching.rewind(agent.id, RewindRequest(start.id))
    (effect,) = agent.engine.branching.effects(agent.id)
    assert effect.entry.side_effect is SideEffect.IRREVERSIBLE
    agent.engine.branching.compensate(agent.id, ())
    agent.engine.branching.compensate(agent.id, ())
    assert len(agent.sh("cat undone").splitlines()) == 1
