"""The client's verbs of the agent's mind, against the real server: as methods of `Snapshotd`, and of its sandboxes and
snapshots."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from snapshotd.client import RECORDED, Provider, Sandbox, Snapshotd
from snapshotd.client.results import MessageInfo
from snapshotd.errors import Conflict, NotFound, OutOfSpace, Undecided, UsageError
from snapshotd.types import new_id
from tests.unit.daemon.process import Daemon

pytestmark = pytest.mark.usefixtures("both_clients")


@pytest.fixture
def client(shared_daemon: Daemon) -> Snapshotd:
    return shared_daemon.client


@pytest.fixture
def box(client: Snapshotd) -> Sandbox:
    return Sandbox.create(name=f"box-{new_id()[:8]}", client=client)


def test_journal_state_tasks_and_conversation_of_a_snapshot(box: Sandbox) -> None:
    first = box.head()
    box.exec(["effect", "send"])
    box.exec(["remember", "tasks", "plan,build"])
    sent, remembered = box.head().journal()
    assert (sent.kind, sent.name, sent.side_effect, sent.status, sent.facts) == (
        "tool",
        "send",
        "irreversible",
        "done",
        (),
    )
    assert sent.details == {"compensate": {"argv": ["undo", "send"]}}
    assert remembered.snapshot == box.head().id
    assert first.journal() == []
    assert box.head().state() == {"tasks": ["plan", "build"]}
    assert [(task.name, task.depends, task.status) for task in box.head().tasks()] == [
        ("plan", (), "completed"),
        ("build", ("plan",), "completed"),
    ]
    assert box.head().conversation()[0] == MessageInfo("user", "fix it")


def test_a_rewind_is_previewed_done_and_undone(box: Sandbox) -> None:
    first = box.head()
    box.exec(["effect", "send"])
    preview = box.preview_rewind(first)
    assert [change.path for change in preview.changes] == ["/workspace/0.txt", "/workspace/1.txt", "/workspace/2.txt"]
    assert preview.messages == (MessageInfo("assistant", "to go\x1b[31m"),)
    assert [(item.name, item.compensation, item.compensated) for item in preview.effects] == [
        ("send", ("undo", "send"), None)
    ]
    assert box.preview_rewind(first, mode="files").effects == ()
    taken = box.rewind(first, mode="conversation", compensate=True)
    assert taken.info.tool.arguments == {"to": first.id, "mode": "conversation", "compensated": ["send"]}
    assert taken.info.follows == first.id
    assert box.undo().info.tool.name == "undo"
    box.exec(["ls"])
    with pytest.raises(Conflict, match="nothing to undo"):
        box.undo()


def test_a_fork_is_promoted(box: Sandbox) -> None:
    (fork,) = box.fork()
    fork.exec(["ls"])
    taken = fork.promote()
    assert (taken.info.trajectory, taken.info.tool.name) == (box.id, "promote")
    with pytest.raises(Conflict, match="went on since the fork"):
        fork.promote()
    assert fork.promote(into=box.id, leave_behind=True, wait="stored").info.state == "stored"
    with pytest.raises(Conflict, match="was not forked"):
        box.promote(compensate=True)


def test_effects_are_compensated(box: Sandbox) -> None:
    first = box.head()
    box.exec(["effect", "send"])
    box.exec(["effect", "bad"])
    box.rewind(first)
    assert [item.name for item in box.effects()] == ["bad", "send"], "newest first"
    assert [item.compensated for item in box.compensate()] == ["failed", "done"]
    with pytest.raises(NotFound):
        box.compensate("ffffffff")


def test_an_edit_of_everything(box: Sandbox) -> None:
    made = box.head().edit(
        files={"a.txt": "text ☃", b"/workspace/b\xff": b"\x00", "c": ""},
        drop_messages=2,
        add_messages=[("user", {"text": "no"})],
        result=None,
        state={"k": [1]},
        env={"A": "1"},
        name=f"{box.name}-edited",
    )
    assert made.name == f"{box.name}-edited"
    head = made.head()
    assert (head.cat("a.txt"), head.cat(b"/workspace/b\xff"), head.cat("c")) == ("text ☃".encode(), b"\0", b"")
    assert head.conversation() == [MessageInfo("user", {"text": "no"})]
    assert head.info.tool.arguments == {"result": [None], "env": {"A": "1"}}
    assert head.state() == {"k": [1]}
    again = head.edit(files={"c": None}, messages=[("a", 1), ("b", 2)], state={"k": None}, result=RECORDED)
    with pytest.raises(NotFound):
        again.head().cat("c")
    assert again.head().conversation() == [MessageInfo("a", 1), MessageInfo("b", 2)]
    assert (again.head().state(), again.head().info.tool.arguments["result"]) == ({}, None)


def test_a_resume_with_decisions(client: Snapshotd) -> None:
    run = Sandbox.connect(client.run(command=["ls"]).id, client=client)
    for name in ("pay", "mail", "post"):
        run.exec(["cutoff", name])
    with pytest.raises(Undecided, match="pay"):
        run.resume()
    pay, mail, post = run.head().journal()
    run.resume(retry=[pay.id], skip=[mail.id[:10]], results={post.id: {"n": 1}})
    assert [event["event"] for event in run.events()][-2:] == ["snapshot", "finished"]
    decided = run.head().info.tool.arguments
    assert decided == {
        "decisions": [[pay.id, "retry"], [mail.id[:10], "skip"], [post.id, "result"]],
        "results": [{"n": 1}],
    }


def test_a_sandbox_without_a_program_cannot_be_resumed(client: Snapshotd, box: Sandbox) -> None:
    calls: list[Callable[[], object]] = [
        box.resume,
        lambda: box.fork(resume=True),
        lambda: box.head().edit(resume=True),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="no program ever ran"):
            call()


def test_a_task_is_retried(box: Sandbox) -> None:
    box.exec(["remember", "tasks", "plan"])
    taken = box.retry("plan", compensate=False)
    assert taken.info.tool.arguments == {"task": "plan", "compensate": False, "resume": True}
    with pytest.raises(NotFound, match="snapshotd tasks"):
        box.retry("build")


def test_what_makes_a_snapshot_waits_if_told(client: Snapshotd, box: Sandbox) -> None:
    first = box.head()
    box.exec(["remember", "tasks", "plan"])
    assert box.rewind(first, wait="stored").info.state == "stored"
    assert box.undo(wait="stored").info.state == "stored"
    assert box.retry("plan", wait="stored").info.state == "stored"
    full = Sandbox.create(name=f"full-{new_id()[:8]}", client=client)
    with pytest.raises(OutOfSpace):
        full.rewind(full.head(), wait="stored")
    assert full.head().info.tool.name == "rewind", "it is captured all the same"
    with pytest.raises(UsageError, match="nothing to wait for"):
        box.rewind(first, wait="forever")  # type: ignore[arg-type]


def test_writers_that_name_the_head(box: Sandbox) -> None:
    first = box.head()
    box.exec(["ls"], if_head=first)
    with pytest.raises(Conflict, match=box.head().id[:12]):
        box.exec(["ls"], if_head=first)
    assert len(box.snapshots()) == 2


def test_approvals(client: Snapshotd, box: Sandbox) -> None:
    box.exec(["ask", "deploy"])
    item = next(each for each in client.approvals("pending") if each.trajectory == box.id)
    view = client.approval(item.id[:8], max_files=1)
    assert (view.approval, view.trajectory.id, view.more, view.since) == (item, box.id, True, None)
    assert [change.path for change in view.changes] == ["/workspace/0\udcff.txt"]
    done = client.approve(item.id, by="ann", reason="fine", arguments={"small": True})
    assert (done.status, done.by, done.reason, done.edited) == ("approved", "ann", "fine", ({"small": True},))
    with pytest.raises(Conflict, match="approved already, by ann"):
        client.deny(item.id)
    box.exec(["ask", "deploy"])
    item = next(each for each in client.approvals("pending") if each.trajectory == box.id)
    assert client.approve(item.id).edited is None
    with pytest.raises(NotFound):
        client.approval("ffffffff")


def test_a_program_outside_asks(client: Snapshotd, box: Sandbox) -> None:
    call = new_id()
    assert client.ask(box.id, call, "charge", {"n": 5}) is None
    asked = client.ask(box.id, call, "charge", {"n": 5}, side_effect="irreversible", question="Charge?", expires_s=60)
    assert asked is not None
    assert (asked.call, asked.status, asked.question, asked.side_effect) == (call, "pending", "Charge?", "irreversible")
    assert asked.expires_at is not None
    client.approve(asked.id, by="ann", arguments={"n": 4})
    decided = client.ask(box.id, call, "charge", {"n": 5})
    assert decided is not None
    assert (decided.id, decided.status, decided.edited) == (asked.id, "approved", ({"n": 4},))
    with pytest.raises(Conflict, match="a name of its own"):
        client.ask(box.id, call, "charge", {"n": 6})
    with pytest.raises(NotFound):
        client.ask("ffffffff", call, "charge")


def test_the_store(client: Snapshotd) -> None:
    space = f"team/{new_id()[:8]}"
    first = client.put_value(space, "a/b & c", {"x": {"y": 1}}, ttl_s=60, expected_version=0)
    assert (first.version, first.key, first.is_deleted) == (1, "a/b & c", False)
    assert first.expires_at is not None
    with pytest.raises(Conflict, match="version 1"):
        client.put_value(space, "a/b & c", 2, expected_version=7)
    client.put_value(space, "a/b & c", None)
    assert client.get_value(space, "a/b & c").value is None
    assert client.get_value(space, "a/b & c", version=1) == first
    assert client.search_values(space, where={"x.y": 1}) == []
    client.put_value(space, "z", {"x": {"y": 1}})
    assert [item.key for item in client.search_values(space, where={"x.y": 1})] == ["z"]
    assert [item.key for item in client.search_values(space, limit=1, after="a/b & c")] == ["z"]
    client.delete_value(space, "z", expected_version=1)
    assert [item.version for item in client.value_history(space, "z")] == [2, 1]
    with pytest.raises(NotFound):
        client.get_value(space, "z")
    client.put_value(space, "z", 1, tenant="other")
    assert client.search_values(space, prefix="z") == []


def test_secrets_and_providers_of_a_sandbox(daemon: Daemon) -> None:
    provider = Provider("anthropic", api_key="sesame")
    box = Sandbox.create(client=daemon.client, secrets={"TOKEN": "sesame"}, providers=[provider])
    status = daemon.client.status()
    assert status["secret_names"] == {box.id: ["TOKEN"]}
    assert status["providers"] == {
        box.id: [{"kind": "anthropic", "base_url": "https://api.anthropic.com", "api_key": "sesame"}]
    }
    assert "sesame" not in repr(provider)
    with pytest.raises(UsageError, match="kind"):
        Sandbox.create(client=daemon.client, providers=[Provider("other")])
