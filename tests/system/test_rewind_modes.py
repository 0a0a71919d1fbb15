"""Rewind of files, of the mind, and of both; its preview; and undoing it."""

from __future__ import annotations

import pytest

from snapshotd.api.history import RewindQuery, RewindRequest
from snapshotd.api.trajectories import ForkRequest, RemoveQuery
from snapshotd.catalog.tables.snapshots import SnapshotTable
from snapshotd.engine.engine import Engine
from snapshotd.engine.runs.sessions import Sessions
from snapshotd.errors import Conflict, OutOfSpace, SandboxFailed
from snapshotd.types import CallStatus, SideEffect, Snapshot
from tests import mind_rig
from tests.mind_rig import Agent

pytestmark = pytest.mark.runc


def two_steps(agent: Agent) -> tuple[Snapshot, Snapshot]:
    """Both write a file, say something and set the state."""
    snapshots = []
    for name in ("one", "two"):
        agent.say(f"say {name}")
        agent.calls.state_set("at", (name,))
        snapshots.append(agent.tool("write", {"name": name}, f"echo {name} > file; echo {name} > {name}"))
    return snapshots[0], snapshots[1]


def everything(agent: Agent) -> tuple[object, ...]:
    """Files, conversation, state, journal."""
    return (
        agent.files(),
        agent.said(),
        agent.engine.journal.state(agent.id),
        [e.id for e in agent.engine.journal.entries(agent.id)],
    )


AT_ONE = {"file": "one\n", "one": "one\n"}
AT_TWO = {"file": "two\n", "one": "one\n", "two": "two\n"}


@pytest.mark.parametrize(
    ("mode", "files", "said"),
    [("files", AT_ONE, ["say one", "say two"]), ("conversation", AT_TWO, ["say one"]), ("both", AT_ONE, ["say one"])],
)
def test_the_chosen_parts_go_back_and_undo_brings_them_again(
    agent: Agent, mode: str, files: dict[str, str], said: list[str]
) -> None:
    one, two = two_steps(agent)
    before = everything(agent)
    preview = agent.engine.branching.preview_rewind(agent.id, RewindQuery(one.id, mode=mode))  # type: ignore[arg-type]
    rewound = agent.engine.branching.rewind(agent.id, RewindRequest(one.id, mode=mode))  # type: ignore[arg-type]
    assert rewound.call.arguments == {"to": one.id, "mode": mode, "from": two.id}
    assert (rewound.parent, rewound.follows) == (two.id, None if mode == "files" else one.id)
    assert agent.files() == files
    assert agent.said() == said
    assert agent.engine.journal.state(agent.id) == {"at": "two" if mode == "files" else "one"}
    assert len(list(agent.engine.journal.entries(agent.id))) == (2 if mode == "files" else 1)
    assert [m.content for m in preview.messages] == ["say two"][: 2 - len(said)]
    assert {c.path for c in preview.files} == {p for p in (b"workspace/file", b"workspace/two") if files == AT_ONE}
    assert preview.file_count == len(preview.files)
    undone = agent.engine.branching.undo(agent.id)
    assert undone.call.arguments == {"of": rewound.id, "to": two.id}
    assert everything(agent) == before
    agent.engine.branching.undo(agent.id)
    assert (agent.files(), agent.said()) == (files, said)


def test_steps_after_a_rewind_go_on_from_there(agent: Agent) -> None:
    one, _ = two_steps(agent)
    agent.engine.branching.rewind(agent.id, RewindRequest(one.id))
    agent.say("say three")
    third = agent.tool("write", {"name": "three"}, "echo three > three")
    assert agent.said() == ["say one", "say three"]
    assert agent.files() == {**AT_ONE, "three": "three\n"}
    with pytest.raises(Conflict, match="nothing to undo"):
        agent.engine.branching.undo(agent.id)
    assert agent.engine.snapshots.get(agent.id).id == third.id


def test_a_refused_undo_starts_no_sandbox(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end would be one more snapshot."""
    two_steps(agent)
    agent.engine.runs.stop(agent.id)
    monkeypatch.setattr(Sessions, "start_for_change", lambda *_: pytest.fail("a sandbox is started"))
    with pytest.raises(Conflict, match="nothing to undo"):
        agent.engine.branching.undo(agent.id)


def test_what_was_not_yet_captured_is_kept_on_the_line_that_is_left(agent: Agent) -> None:
    one, _ = two_steps(agent)
    agent.sh("echo late > late")
    agent.say("a late word")
    agent.calls.state_set("at", ("late",))
    before = (agent.files(), ["say one", "say two", "a late word"], {"at": "late"})
    preview = agent.engine.branching.preview_rewind(agent.id, RewindQuery(one.id))
    assert b"workspace/late" in {c.path for c in preview.files}
    assert [m.content for m in preview.messages] == ["say two", "a late word"]
    agent.engine.branching.rewind(agent.id, RewindRequest(one.id))
    assert (agent.files(), agent.said(), agent.engine.journal.state(agent.id)) == (AT_ONE, ["say one"], {"at": "one"})
    agent.engine.branching.undo(agent.id)
    assert (agent.files(), agent.said(), agent.engine.journal.state(agent.id)) == before


def test_a_rewind_of_files_that_fails_keeps_what_no_snapshot_has(agent: Agent) -> None:
    """A message and a change of the state, for the next snapshot."""
    one, _ = two_steps(agent)
    agent.say("a late word")
    agent.calls.state_set("at", ("late",))

    def refuse(*_: object, **__: object) -> None:
        raise OutOfSpace("the catalog's disk is full")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SnapshotTable, "commit", refuse)
        with pytest.raises(OutOfSpace):
            agent.engine.branching.rewind(agent.id, RewindRequest(one.id, mode="files"))
    agent.tool("write", {}, "echo three > three")
    assert agent.files() == {**AT_TWO, "three": "three\n"}
    assert agent.said() == ["say one", "say two", "a late word"]
    assert agent.engine.journal.state(agent.id) == {"at": "late"}


def test_the_mind_only_goes_where_it_has_been(engine: Engine, agent: Agent) -> None:
    one, two = two_steps(agent)
    other = mind_rig.agent(engine)
    other.tool("write", {}, "echo mine > mine")
    for mode in ("conversation", "both"):
        with pytest.raises(Conflict, match="not of its history"):
            engine.branching.rewind(other.id, RewindRequest(one.id, mode=mode))  # type: ignore[arg-type]
    engine.branching.rewind(other.id, RewindRequest(one.id, mode="files"))
    assert other.files() == AT_ONE
    (fork,) = engine.branching.fork(one.id, ForkRequest()).trajectories
    forked = Agent(engine, fork.id)
    forked.tool("write", {}, "echo x > x")
    engine.branching.rewind(fork.id, RewindRequest(one.id))
    assert (forked.files(), forked.said()) == (AT_ONE, ["say one"])
    with pytest.raises(Conflict, match="not of its history"):
        engine.branching.rewind(fork.id, RewindRequest(two.id))


def test_a_live_process_is_not_pulled_away_from_its_files(agent: Agent) -> None:
    one, _ = two_steps(agent)
    agent.sh("cd /workspace; setsid sleep 600 > /dev/null 2>&1 &")
    head = agent.head
    for mode in ("files", "conversation", "both"):
        with pytest.raises(Conflict, match="is live"):
            agent.engine.branching.rewind(agent.id, RewindRequest(one.id, mode=mode))  # type: ignore[arg-type]
    assert agent.head.id == head.id


# -- irreversible calls ------------------------------------------------------------------------------------------------


def test_irreversible_calls_that_are_left_behind_are_listed_and_compensated_once(agent: Agent) -> None:
    start = agent.tool("write", {}, "echo x > x")
    for key in ("a", "b"):
        agent.send("mail", key, result={"sent": key})
    agent.tool("mail without", {"key": "c"}, side_effect=SideEffect.IRREVERSIBLE)
    begun, _ = agent.begin("mail", {"key": "d"}, side_effect=SideEffect.IRREVERSIBLE)
    preview = agent.engine.branching.preview_rewind(agent.id, RewindQuery(start.id))
    assert [(e.entry.arguments["key"], e.compensation is not None, e.compensated) for e in preview.effects] == [
        ("d", False, None),
        ("c", False, None),
        ("b", True, None),
        ("a", True, None),
    ]
    assert agent.engine.branching.preview_rewind(agent.id, RewindQuery(start.id, mode="files")).effects == ()
    assert agent.engine.branching.effects(agent.id) == []
    agent.engine.branching.rewind(agent.id, RewindRequest(start.id))
    left = agent.engine.branching.effects(agent.id)
    assert [e.entry.arguments["key"] for e in left] == ["d", "c", "b", "a"]
    assert {e.entry.id: e.entry.status for e in left}[begun] is CallStatus.UNKNOWN  # type: ignore[index]
    done = agent.engine.branching.compensate(agent.id, ())
    assert [(e.entry.arguments["key"], e.compensated) for e in done] == [
        ("d", None),
        ("c", None),
        ("b", CallStatus.DONE),
        ("a", CallStatus.DONE),
    ]
    undone = agent.sh("cat undone").splitlines()
    assert [('"key": "b"' in line, '"sent": "b"' in line) for line in undone] == [(True, True), (False, False)]
    assert [s.call.name for s in agent.engine.snapshots.log(agent.id)][-3:] == ["rewind", "compensate", "compensate"]
    agent.engine.branching.compensate(agent.id, ())
    assert len(agent.sh("cat undone").splitlines()) == 2
    with pytest.raises(Conflict, match="at most once"):
        agent.engine.branching.compensate(agent.id, (left[3].entry.id[:8],))


def test_a_rewind_compensates_first_and_stays_where_it_is_if_that_fails(agent: Agent) -> None:
    start = agent.tool("write", {}, "echo x > x")
    agent.send("mail", "a")
    agent.send("mail", "b", compensate=("sh", "-c", "echo cannot; exit 3"))
    with pytest.raises(SandboxFailed, match="exit code 3"):
        agent.engine.branching.rewind(agent.id, RewindRequest(start.id, compensate=True))
    assert agent.head.call.name == "compensate"
    assert b"".join(agent.engine.snapshots.output(agent.head.id, "stdout")) == b"cannot\n"
    assert agent.files().keys() == {"x"}
    with pytest.raises(Conflict, match="does not run again"):
        agent.engine.branching.rewind(agent.id, RewindRequest(start.id, compensate=True))
    agent.engine.branching.rewind(agent.id, RewindRequest(start.id))
    assert agent.head.call.name == "rewind"
    assert [e.compensated for e in agent.engine.branching.effects(agent.id)] == [CallStatus.FAILED, None]
    agent.engine.branching.undo(agent.id)
    assert agent.engine.branching.effects(agent.id) == []


def test_what_cannot_be_removed_goes_on_running(engine: Engine) -> None:
    """Another trajectory was put onto a snapshot of it, and that is not stored yet: `rm --force` refuses, and ends
    nothing."""
    source, other = mind_rig.agent(engine), mind_rig.agent(engine)
    one, _ = two_steps(source)
    engine.storage.flush()
    with engine.life._archive.pause():
        engine.branching.rewind(other.id, RewindRequest(one.id, mode="files"))
        sandbox = source.sandbox
        source.sh("echo three > file")
        with pytest.raises(Conflict, match="not stored yet"):
            engine.runs.remove(source.id, RemoveQuery(force=True))
        assert not sandbox.closed
        assert source.sandbox is sandbox
        assert source.files()["file"] == "three\n"
    engine.storage.flush()
    engine.runs.remove(source.id, RemoveQuery(force=True))
    assert other.files() == AT_ONE
