"""Calls that wait for a person, whatever happens meanwhile: the daemon is killed, files or arguments change, it is
forked."""

from __future__ import annotations

import hashlib
import hmac
import json
import signal
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from snapshotd.engine.journal.approval.policy import FILE_NAME
from tests.e2e.listening import listening
from tests.e2e.support import Snap, wait_until

PROGRAM = """
import sys
from snapshotd.agent import Denied, message, store, tool

@tool
def prepare(text):
    open("/workspace/draft", "w").write(text)

@tool(side_effect="irreversible", approve="may I send it?")
def send(to):
    with open("/workspace/sent", "a") as sent:
        sent.write(to + "\\n")
    return "sent to " + to

prepare("a draft")
message("assistant", "I send it now")
try:
    message("assistant", send(store.get("to", "ann", namespace=sys.argv[1])))
except Denied as denied:
    message("assistant", "denied: %s" % denied)
"""


@pytest.fixture
def name(own_snap: Snap, tmp_path: Path) -> Iterator[str]:
    """Of a trajectory, and of its namespace in the store."""
    (tmp_path / "agent.py").write_text(PROGRAM)
    yield tmp_path.name.replace("_", "-")
    (own_snap.state_dir / FILE_NAME).unlink(missing_ok=True)
    for one in sorted(own_snap.json("ls"), key=lambda one: one["forked_from"] is None):  # forks first
        own_snap("rm", "--force", one["id"])


@pytest.fixture
def asked(own_snap: Snap, runtime: str, name: str, tmp_path: Path) -> dict[str, Any]:
    """The approval that a started agent waits for."""
    return _start(own_snap, runtime, name, tmp_path)


def _start(snap: Snap, runtime: str, name: str, folder: Path) -> dict[str, Any]:
    snap("run", "--detach", "--runtime", runtime, "--name", name, folder / "agent.py", name)
    return _pending(snap, name)


def _pending(snap: Snap, name: str, besides: str = "") -> dict[str, Any]:
    """The one approval that waits in a trajectory; polls for it."""
    (trajectory,) = [one["id"] for one in snap.json("ls") if one["name"] == name]
    found: list[dict[str, Any]] = []

    def waits() -> bool:
        found[:] = [one for one in snap.json("approvals") if one["trajectory"] == trajectory and one["id"] != besides]
        return bool(found)

    wait_until(waits, f"{name} asks", 120)
    (one,) = found
    return one


def _said(snap: Snap, name: str) -> list[str]:
    return [one["content"] for one in snap.json("show", "--conversation", name)]


def _sent(snap: Snap, name: str) -> str:
    return snap("cat", f"{name}:/workspace/sent").stdout


def test_pending_across_a_killed_daemon_then_approved_and_resumed(
    own_snap: Snap, name: str, asked: dict[str, Any]
) -> None:
    snap = own_snap
    assert (asked["name"], asked["arguments"], asked["question"]) == ("send", {"to": "ann"}, "may I send it?")
    shown = snap.json("approval", asked["id"])
    assert [one["path"] for one in shown["changes"]] == ["/workspace/draft"]
    snap.crash()
    assert _pending(snap, name) == asked
    assert snap.json("ps") == [], "nobody runs that waits for it"
    (decided,) = snap.json("approve", "--by", "ann", "--reason", "fine", asked["id"])
    assert (decided["status"], decided["by"], decided["reason"]) == ("approved", "ann", "fine")
    snap.crash()
    snap("resume", "--quiet", name)
    assert _sent(snap, name) == "ann\n"
    assert _said(snap, name) == ["I send it now", "sent to ann"]
    everything = [one for one in snap.json("approvals", "--all") if one["trajectory"] == asked["trajectory"]]
    assert [(one["id"], one["status"]) for one in everything] == [(asked["id"], "approved")], "it was not asked again"
    assert [one["status"] for one in snap.json("journal", name) if one["name"] == "send"] == ["done"]
    assert "approved" in snap("approve", asked["id"], code=6).stderr


def test_approved_while_the_agent_waits(own_snap: Snap, name: str, asked: dict[str, Any]) -> None:
    own_snap("approve", asked["id"])
    own_snap("attach", "--quiet", name)
    assert _sent(own_snap, name) == "ann\n"


@pytest.mark.long  # files that change later: the next test
def test_refused_when_the_files_have_changed(own_snap: Snap, name: str, asked: dict[str, Any]) -> None:
    snap = own_snap
    snap.crash()
    snap.sh(name, "echo another draft > draft")
    refused = snap("approve", asked["id"], code=6).stderr
    assert "stale" in refused
    assert "have changed" in refused
    assert [one["status"] for one in snap.json("approvals", "--all") if one["id"] == asked["id"]] == ["stale"]
    snap("resume", "--detach", name)
    again = _pending(snap, name)
    assert again["id"] != asked["id"]
    assert [one["path"] for one in snap.json("approval", again["id"])["changes"]] == ["/workspace/draft"]
    snap("approve", again["id"])
    snap("attach", "--quiet", name)
    assert _sent(snap, name) == "ann\n"


def test_an_approval_does_not_hold_for_files_that_changed_after_it(
    own_snap: Snap, name: str, asked: dict[str, Any]
) -> None:
    snap = own_snap
    snap.crash()
    snap("approve", asked["id"])
    snap.sh(name, "echo another draft > draft")
    snap("resume", "--detach", name)
    again = _pending(snap, name)
    assert again["id"] != asked["id"]
    snap("deny", "--reason", "not that one", again["id"])
    snap("attach", "--quiet", name)
    assert snap("cat", f"{name}:/workspace/sent", code=4).stdout == ""


def test_an_approval_does_not_hold_for_other_arguments(own_snap: Snap, name: str, asked: dict[str, Any]) -> None:
    snap = own_snap
    snap.crash()
    snap("approve", asked["id"])
    snap("store", "put", name, "to", '"bob"')
    snap("resume", "--detach", name)
    again = _pending(snap, name)
    assert (again["arguments"], again["id"] != asked["id"]) == ({"to": "bob"}, True)
    snap("deny", "--reason", "not to bob", "--by", "eve", again["id"])
    snap("attach", "--quiet", name)
    assert _said(snap, name)[-1].startswith("denied: eve did not let send run: not to bob")
    assert snap("cat", f"{name}:/workspace/sent", code=4).stdout == ""
    assert "denied" in snap("approve", again["id"], code=6).stderr


def test_other_arguments_are_put_in_by_the_approver(
    own_snap: Snap, name: str, asked: dict[str, Any], tmp_path: Path
) -> None:
    snap = own_snap
    (tmp_path / "arguments").write_text('{"to": "carol"}')
    snap("approve", asked["id"], "--arguments", tmp_path / "arguments")
    snap("attach", "--quiet", name)
    assert _sent(snap, name) == "carol\n"
    (call,) = [one for one in snap.json("journal", name) if one["name"] == "send"]
    assert call["arguments"] == {"to": "carol"}


@pytest.mark.long  # other arguments are asked for anew: two tests above
def test_a_fork_asks_for_itself(own_snap: Snap, name: str, asked: dict[str, Any]) -> None:
    snap = own_snap
    snap.crash()
    snap("approve", asked["id"])
    (fork,) = snap.json("fork", "--resume", "--name", f"{name}-fork", asked["snapshot"])["trajectories"]
    again = _pending(snap, f"{name}-fork")
    assert (again["trajectory"], again["arguments"]) == (fork, {"to": "ann"})
    snap("deny", again["id"])
    snap("attach", "--quiet", fork)
    assert snap("cat", f"{fork}:/workspace/sent", code=4).stdout == ""
    snap("resume", "--quiet", name)
    assert _sent(snap, name) == "ann\n", "the original's approval was not used up"


@pytest.mark.runc
def test_nobody_decides_in_time_and_the_policy_file(
    own_snap: Snap, runc_ready: None, name: str, tmp_path: Path
) -> None:
    snap = own_snap
    policy = snap.state_dir / FILE_NAME
    policy.write_text('[[rule]]\nname = "send"\naction = "approve"\nexpires = "1s"\n')
    snap("run", "--quiet", "--runtime", "runc", "--name", name, tmp_path / "agent.py", name)
    assert "nobody decided" in _said(snap, name)[-1]
    assert [one["status"] for one in snap.json("approvals", "--all")] == ["expired"]
    policy.write_text(
        '[[rule]]\nname = "prep*"\narguments = { text = "^a dr" }\naction = "deny"\nreason = "no drafts"\n'
    )
    refused = snap(
        "run", "--quiet", "--runtime", "runc", "--name", f"{name}-2", tmp_path / "agent.py", name, code=1
    ).stderr
    assert "no drafts" in refused
    policy.write_text('[[rule]]\nname = "send"\nactoin = "deny"\n')
    refused = snap(
        "run", "--quiet", "--runtime", "runc", "--name", f"{name}-3", tmp_path / "agent.py", name, code=1
    ).stderr
    assert "actoin" in refused
    assert "line 1" in refused


@pytest.mark.runc
def test_a_webhook_and_a_watcher_are_told(own_snap: Snap, runc_ready: None, name: str, tmp_path: Path) -> None:
    snap = own_snap
    got: list[tuple[str, bytes]] = []

    def take(headers: Message, body: bytes) -> int:
        got.append((headers["X-Snapshotd-Signature"], body))
        return 204 if len(got) != 1 else 503  # the first has to be sent again

    with listening(take) as url:
        (snap.state_dir / FILE_NAME).write_text(f'[webhook]\nurl = "{url}"\nsecret = "shared"\n')
        watcher = snap.follow("approvals", "--watch", "--json")
        assert watcher.stdout is not None
        asked = _start(snap, "runc", name, tmp_path)
        seen = json.loads(watcher.stdout.readline())
        assert (seen["event"], seen["id"], seen["status"]) == ("approval", asked["id"], "pending")
        snap("approve", asked["id"], "--by", "ann")
        assert json.loads(watcher.stdout.readline())["status"] == "approved"
        watcher.send_signal(signal.SIGINT)
        watcher.communicate(timeout=60)
        assert watcher.returncode == 128 + signal.SIGINT
        snap("attach", "--quiet", name)
        wait_until(lambda: len(got) == 3, "both were announced, the first twice")
    for signature, body in got:
        assert signature == "sha256=" + hmac.new(b"shared", body, hashlib.sha256).hexdigest()
    bodies = [json.loads(body) for _, body in got]
    assert [one["status"] for one in bodies] == ["pending", "pending", "approved"]
    assert {(one["id"], one["name"], one["trajectory"]) for one in bodies} == {
        (asked["id"], "send", asked["trajectory"])
    }


REFUSED = """
import os
from snapshotd.agent import Denied, message, tool

ran = []

@tool
def shell(command):
    ran.append(command)
    with open("/workspace/log", "a") as log:
        log.write(command + "\\n")

for command in ("look", "rm it", "look again"):
    try:
        shell(command)
    except Denied as denied:
        message("assistant", str(denied))
if ran:
    os._exit(9)
"""


def test_what_the_policy_denies_is_in_the_journal_and_denied_again_in_a_replay(
    own_snap: Snap, runtime: str, name: str, tmp_path: Path
) -> None:
    snap, policy = own_snap, own_snap.state_dir / FILE_NAME
    (tmp_path / "refused.py").write_text(REFUSED)
    policy.write_text(
        '[[rule]]\nname = "shell"\narguments = { command = "^rm" }\naction = "deny"\nreason = "nothing is removed here"\n'
    )
    snap("run", "--quiet", "--runtime", runtime, "--name", name, tmp_path / "refused.py", code=9)
    said = ["the policy does not let shell run with these arguments: nothing is removed here"]
    journal = snap.json("journal", name)
    assert [(one["name"], one["arguments"], one["status"], one["error"]) for one in journal] == [
        ("shell", {"command": "look"}, "done", None),
        ("shell", {"command": "rm it"}, "failed", said[0]),
        ("shell", {"command": "look again"}, "done", None),
    ]
    assert [one["tool"]["name"] for one in snap.json("log", name)][1:4] == ["shell"] * 3
    policy.unlink()  # it would be let run now, but it was not
    snap("resume", "--quiet", name)
    assert _said(snap, name) == said
    assert snap("cat", f"{name}:/workspace/log").stdout == "look\nlook again\n"
    assert snap.json("journal", name) == journal
