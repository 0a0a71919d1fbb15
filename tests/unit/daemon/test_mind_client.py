"""The client's verbs of the agent's mind, against the real server: as methods of `Snapshotd`, and of its sandboxes and
snapshots."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from snapshotd.client import RECORDED, Provider, Sandbox, Snapshotd
from snapshotd.client.results import MessageInfo
from snapshotd.errors import Conflict, NotFound, SandboxFailed, Undecided, Unsupported, UsageError
from snapshotd.types import new_id
from tests.unit.daemon.asking import eventually

pytestmark = [pytest.mark.usefixtures("both_clients"), pytest.mark.same_verbs]


def test_journal_state_and_tasks_of_a_snapshot(box: Sandbox) -> None:
    first = box.head()
    box.exec("effect send; remember k [1]; plan plan build")
    (sent,) = box.head().journal()
    assert (sent.kind, sent.name, sent.side_effect, sent.status) == ("tool", "send", "irreversible", "done")
    assert sent.details["compensate"]["argv"] == ["undo", "send"]
    assert first.journal() == []
    assert box.head().state() == {"k": [1]}
    assert [(task.name, task.depends, task.status) for task in box.head().tasks()] == [
        ("plan", (), "completed"),
        ("build", ("plan",), "completed"),
    ]
    box.retry("plan", compensate=False, resume=False)
    assert box.head().tasks() == []
    with pytest.raises(NotFound, match="no task 'build'"):
        box.retry("build", resume=False)


def test_long_lists_come_in_parts(client: Snapshotd, box: Sandbox) -> None:
    for number in range(3):
        box.exec(f"snapshotd-agent message user {number}; echo output {number}")
    last = box.snapshots()[-1].info.seq
    assert [one.info.seq for one in box.snapshots(2, before=last)] == [last - 2, last - 1]
    assert [one.seq for one in client.log(box.id, before=2)] == [0, 1]
    assert [message.content for message in box.head().conversation(start=1, count=1)] == ["1"]
    assert [message.content for message in client.conversation(box.id, start=2)] == ["2"]
    assert b"".join(client.output(box.id, "stdout", start=2, count=4)) == b"tput"
    with pytest.raises(UsageError, match="start"):
        client.conversation(box.id, start=-1)


def test_a_rewind_is_previewed_done_and_undone(box: Sandbox) -> None:
    first = box.head()
    box.exec("touch made; effect send")
    preview = box.preview_rewind(first)
    assert [change.path for change in preview.changes] == ["/workspace/made"]
    assert [(item.name, item.compensation, item.compensated) for item in preview.effects] == [
        ("send", ("undo", "send"), None)
    ]
    assert box.preview_rewind(first, mode="files").effects == ()
    taken = box.rewind(first, mode="conversation", compensate=True, wait="stored")
    assert (taken.info.follows, taken.info.state) == (first.id, "stored")
    assert box.files.exists("made")
    assert box.undo().info.tool.name == "undo"
    box.exec(["ls"], if_head=box.head())
    with pytest.raises(Conflict, match="nothing to undo"):
        box.undo()
    with pytest.raises(Conflict, match=box.head().id[:12]):
        box.exec(["ls"], if_head=first)
    with pytest.raises(UsageError, match="captured or stored"):
        box.rewind(first, wait="forever")  # type: ignore[arg-type]


def test_a_fork_is_promoted(box: Sandbox) -> None:
    (fork,) = box.fork()
    fork.exec(["touch", "made"])
    taken = fork.promote(wait="stored")
    assert (taken.info.trajectory, taken.info.tool.name, taken.info.state) == (box.id, "promote", "stored")
    assert box.files.exists("made")
    with pytest.raises(Conflict, match="was not forked"):
        box.promote(compensate=True)


def test_effects_are_compensated(box: Sandbox) -> None:
    first = box.head()
    box.exec("effect send; effect bad")
    box.rewind(first)
    assert [item.name for item in box.effects()] == ["bad", "send"], "newest first"
    with pytest.raises(SandboxFailed, match=r"compensation of bad .* failed with exit code 1"):
        box.compensate()
    assert [item.compensated for item in box.effects()] == ["failed", None]
    assert [item.compensated for item in box.compensate(box.effects()[1].call)] == ["done"]
    with pytest.raises(NotFound):
        box.compensate("ffffffff")


def test_an_edit_of_everything(box: Sandbox) -> None:
    made = box.head().edit(
        files={"a.txt": "text ☃", b"/workspace/b\xff": b"\x00", "c": ""},
        add_messages=[("user", {"text": "no"})],
        state={"k": [1]},
        env={"A": "1"},
        name=f"{box.name}-edited",
    )
    assert made.name == f"{box.name}-edited"
    head = made.head()
    assert (head.cat("a.txt"), head.cat(b"/workspace/b\xff"), head.cat("c")) == ("text ☃".encode(), b"\0", b"")
    assert head.conversation() == [MessageInfo("user", {"text": "no"})]
    assert head.state() == {"k": [1]}
    assert made.exec("echo $A").stdout == "1\n"
    again = head.edit(files={"c": None}, messages=[("a", 1), ("b", 2)], state={"k": None}, result=RECORDED)
    with pytest.raises(NotFound):
        again.head().cat("c")
    assert again.head().conversation() == [MessageInfo("a", 1), MessageInfo("b", 2)]
    assert again.head().state() == {}
    assert again.head().edit(drop_messages=1).head().conversation() == [MessageInfo("a", 1)]


def test_a_resume_with_decisions(client: Snapshotd) -> None:
    calls = "cutoff pay; cutoff mail; cutoff post; exec forever"
    run = Sandbox.run(command=["sh", "-c", calls], detach=True, client=client)
    eventually(lambda: len(list(client.journal(run.id))) == 3)
    run.stop()
    with pytest.raises(Undecided, match="pay"):
        run.resume()
    pay, mail, post = client.journal(run.id)
    run.resume(skip=[pay.id, mail.id[:10]], results={post.id: {"n": 1}})
    eventually(lambda: [event["event"] for event in run.events(follow=False)].count("replayed") == 3)
    assert [one.result for one in list(client.journal(run.id))] == [None, None, {"n": 1}]


def test_a_sandbox_without_a_program_cannot_be_resumed(client: Snapshotd, box: Sandbox) -> None:
    calls: list[Callable[[], object]] = [
        box.resume,
        lambda: box.fork(resume=True),
        lambda: box.head().edit(resume=True),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="no program that could"):
            call()


def test_a_program_outside_asks(client: Snapshotd, box: Sandbox) -> None:
    call, first = new_id(), box.head().id
    box.exec(["touch", "a", "b"])
    assert client.ask(box.id, new_id(), "charge", {"n": 5}) is None, "the policy lets it run"
    asked = client.ask(box.id, call, "charge", {"n": 5}, side_effect="irreversible", question="Charge?", expires_s=60)
    assert asked is not None
    assert (asked.call, asked.status, asked.question, asked.side_effect) == (call, "pending", "Charge?", "irreversible")
    assert asked.expires_at is not None
    assert asked in client.approvals("pending")
    view = client.approval(asked.id[:8], max_files=1)
    assert (view.approval, view.trajectory.id, view.more, view.since) == (asked, box.id, True, first)
    assert [change.path for change in view.changes] == ["/workspace/a"]
    client.approve(asked.id, by="ann", reason="fine", arguments={"n": 4})
    with pytest.raises(Conflict, match="is approved by ann"):
        client.deny(asked.id)
    decided = client.ask(box.id, call, "charge", {"n": 5})
    assert decided is not None
    assert (decided.id, decided.status, decided.edited) == (asked.id, "approved", ({"n": 4},))
    with pytest.raises(Conflict, match="a name of its own"):
        client.ask(box.id, call, "charge", {"n": 6})
    for unknown in (lambda: client.ask("ffffffff", call, "charge"), lambda: client.approval("ffffffff")):
        with pytest.raises(NotFound):
            unknown()


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


def test_secrets_and_providers_of_a_sandbox(client: Snapshotd) -> None:
    provider = Provider("anthropic", api_key="sesame")
    assert "sesame" not in repr(provider)
    box = Sandbox.create(client=client, secrets={"TOKEN": "sesame"})
    assert box.exec('test "$TOKEN" = sesame').exit_code == 0
    with pytest.raises(Unsupported, match="gateway"):
        Sandbox.create(client=client, providers=[provider])
    with pytest.raises(UsageError, match="kind"):
        Sandbox.create(client=client, providers=[Provider("other")])
