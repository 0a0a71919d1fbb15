"""The API of the agent's mind as any HTTP client sees it: shapes, refusals, bounds, one writer at a time, watching."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import pytest
from starlette.requests import Request

from snapshotd.daemon.http.decoding import check_json
from snapshotd.daemon.http.peer import PEER_PID
from snapshotd.daemon.http.routes.shared import opener_of
from snapshotd.engine.base import Opener
from snapshotd.engine.folders.places import open_folder
from snapshotd.errors import LimitExceeded, Unsupported, UsageError
from snapshotd.kernel.identity import HostUser
from snapshotd.types import new_id, short
from tests.unit.daemon.asking import JSON, Connection, ask, eventually, lines
from tests.unit.daemon.process import Daemon

STORE = "/store/value?namespace=team/plans&key="


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.fixture
def box(shared_daemon: Daemon) -> str:
    """The name of a sandbox of the test's own."""
    name = f"box-{new_id()[:8]}"
    assert ask(shared_daemon, "POST", "/sandboxes", {"name": name})[0] == 201
    return name


def execute(daemon: Daemon, box: str, *argv: str, **options: Any) -> dict[str, Any]:
    return lines(daemon, "POST", f"/trajectories/{box}/exec", {"argv": list(argv), **options})[-1]


# -- journal, state, tasks ---------------------------------------------------------------------------------------------


def test_the_journal_has_every_field_and_an_end(shared_daemon: Daemon, box: str) -> None:
    execute(shared_daemon, box, "effect", "send")
    execute(shared_daemon, box, "cutoff", "pay")
    sent, paid, end = lines(shared_daemon, "GET", f"/snapshots/{box}/journal")
    assert end == {"event": "end"}
    assert list(sent) == [
        *("id", "kind", "name", "arguments", "side_effect", "key", "status", "started_at", "ended_at"),
        *("result", "error", "facts", "details", "parent", "snapshot"),
    ]
    assert (sent["kind"], sent["name"], sent["side_effect"], sent["status"]) == ("tool", "send", "irreversible", "done")
    assert sent["details"]["compensate"]["argv"] == ["undo", "send"]
    assert (paid["name"], paid["status"], paid["ended_at"]) == ("pay", None, None)
    own = ask(shared_daemon, "GET", f"/trajectories/{box}/log")[1]
    assert lines(shared_daemon, "GET", f"/snapshots/{sent['snapshot']}/journal") == [sent, end]
    assert [one["tool"]["name"] for one in own if one["id"] == sent["snapshot"]] == ["send"]


def test_state_and_tasks(shared_daemon: Daemon, box: str) -> None:
    assert ask(shared_daemon, "GET", f"/snapshots/{box}/state") == (200, {})
    execute(shared_daemon, box, "remember", "tries", "[1]")
    execute(shared_daemon, box, "plan", "plan", "build")
    assert ask(shared_daemon, "GET", f"/snapshots/{box}/state")[1] == {"tries": [1]}
    plan, build = ask(shared_daemon, "GET", f"/snapshots/{box}/tasks")[1]
    assert (plan["name"], plan["depends"]) == ("plan", [])
    assert list(build) == ["name", "status", "depends", "note", "started_in", "ended_in"]
    assert (build["status"], build["depends"]) == ("completed", ["plan"])


# -- going back and on -------------------------------------------------------------------------------------------------


def test_a_preview_says_what_a_rewind_does(shared_daemon: Daemon, box: str) -> None:
    first = ask(shared_daemon, "GET", f"/trajectories/{box}")[1]["head"]
    execute(shared_daemon, box, "effect", "send")
    head = execute(shared_daemon, box, "touch", "a", "b", "c")["snapshot"]["id"]
    status, preview = ask(shared_daemon, "GET", f"/trajectories/{box}/rewind?to={first}&max_files=2")
    assert status == 200
    assert list(preview) == ["head", "target", "rewinds", "changes", "change_count", "messages", "effects", "untouched"]
    assert (preview["head"], preview["target"], preview["rewinds"]) == (head, first, "both")
    assert (len(preview["changes"]), preview["change_count"]) == (2, 3)
    assert preview["changes"][0]["path"] == "workspace/a"
    effect = preview["effects"][0]
    assert (effect["name"], effect["status"], effect["compensation"], effect["compensated"]) == (
        *("send", "done", ["undo", "send"], None),
    )
    assert ask(shared_daemon, "GET", f"/trajectories/{box}")[1]["head"] == head, "it changes nothing"
    assert ask(shared_daemon, "GET", f"/trajectories/{box}/rewind?to={first}&mode=files")[1]["effects"] == []
    mind = ask(shared_daemon, "GET", f"/trajectories/{box}/rewind?to={first}&mode=conversation")[1]
    assert (mind["changes"], mind["change_count"], len(mind["effects"])) == ([], 0, 1)


@pytest.mark.parametrize("mode", ["files", "conversation", "both"])
def test_rewind_and_undo(shared_daemon: Daemon, box: str, mode: str) -> None:
    first = ask(shared_daemon, "GET", f"/trajectories/{box}")[1]["head"]
    execute(shared_daemon, box, "remember", "k", "1")
    before = execute(shared_daemon, box, "touch", "made")["snapshot"]["id"]
    there = f"/files/{box}/stat?path_b64={b64(b'workspace/made')}"

    def now() -> tuple[bool, Any]:
        """Whether the file is there, and the state."""
        return ask(shared_daemon, "GET", there)[0] == 200, ask(shared_daemon, "GET", f"/snapshots/{box}/state")[1]

    status, taken = ask(shared_daemon, "POST", f"/trajectories/{box}/rewind", {"to": first, "mode": mode})
    assert (status, taken["tool"]["arguments"]["mode"]) == (200, mode)
    assert taken["follows"] == (None if mode == "files" else first)
    assert now() == (mode == "conversation", {"k": 1} if mode == "files" else {})
    status, undone = ask(shared_daemon, "POST", f"/trajectories/{box}/undo")
    assert (status, undone["tool"]["name"], undone["follows"]) == (200, "undo", before)
    assert now() == (True, {"k": 1})
    execute(shared_daemon, box, "ls")
    assert ask(shared_daemon, "POST", f"/trajectories/{box}/undo")[0] == 409


def test_what_was_left_behind_is_compensated_once(shared_daemon: Daemon, box: str) -> None:
    first = ask(shared_daemon, "GET", f"/trajectories/{box}")[1]["head"]
    execute(shared_daemon, box, "effect", "send")
    assert ask(shared_daemon, "GET", f"/trajectories/{box}/effects") == (200, [])
    ask(shared_daemon, "POST", f"/trajectories/{box}/rewind", {"to": first})
    left = ask(shared_daemon, "GET", f"/trajectories/{box}/effects")[1]
    assert [item["compensated"] for item in left] == [None]
    done = ask(shared_daemon, "POST", f"/trajectories/{box}/compensate", {"calls": [left[0]["call"][:8]]})
    assert (done[0], done[1][0]["compensated"]) == (200, "done")
    assert ask(shared_daemon, "POST", f"/trajectories/{box}/compensate", {"calls": ["ffffffff"]})[0] == 404


def test_an_edit_makes_a_new_trajectory(shared_daemon: Daemon, box: str) -> None:
    execute(shared_daemon, box, "remember", "plan", "1")
    execute(shared_daemon, box, "touch", "ran")
    name = f"{box}-edited"
    written = {"path_b64": b64(b"workspace/b\xff"), "content_b64": b64(b"new\x00")}
    removed = {"path_b64": b64(b"workspace/ran"), "content_b64": None}
    status, made = ask(
        shared_daemon,
        "POST",
        f"/snapshots/{box}/edit",
        {
            "files": [written, removed],
            "add_messages": [{"role": "user", "content": {"text": "no"}}],
            "state": {"tries": 3, "plan": None},
            "env": {"A": "1"},
            "name": name,
        },
    )
    assert (status, made["name"]) == (201, name)
    assert made["forked_from"] == ask(shared_daemon, "GET", f"/trajectories/{box}")[1]["head"]
    assert ask(shared_daemon, "GET", f"/files/{name}/stat?path_b64={removed['path_b64']}")[0] == 404
    assert ask(shared_daemon, "GET", f"/snapshots/{name}/status?path_b64=d29ya3NwYWNlL2L_")[1]["size"] == 4
    assert execute(shared_daemon, name, "sh", "-c", "exit $A")["exit_code"] == 1, "it has the variable"
    messages = ask(shared_daemon, "GET", f"/snapshots/{name}/conversation")[1]
    assert messages == [{"role": "user", "content": {"text": "no"}}]
    assert ask(shared_daemon, "GET", f"/snapshots/{name}/state")[1] == {"tries": 3}
    again = ask(shared_daemon, "POST", f"/snapshots/{name}/edit", {"messages": []})[1]
    assert ask(shared_daemon, "GET", f"/snapshots/{again['id']}/conversation")[1] == []


def test_a_resume_answers_when_it_is_started_and_events_follow(shared_daemon: Daemon) -> None:
    run = ask(shared_daemon, "POST", "/runs", {"command": ["sh", "-c", "cutoff pay; exec forever"]})[1]["id"]
    here = f"/snapshots/{run}/journal"
    eventually(lambda: len(lines(shared_daemon, "GET", here)) == 2)
    ask(shared_daemon, "POST", f"/trajectories/{run}/stop")
    status, refused = ask(shared_daemon, "POST", f"/trajectories/{run}/resume", {})
    assert (status, refused["error"]["code"]) == (409, "Undecided")
    call = lines(shared_daemon, "GET", here)[0]["id"]
    decisions = {"decisions": [{"call": call[:8], "action": "result", "result": {"paid": None}}]}
    assert ask(shared_daemon, "POST", f"/trajectories/{run}/resume", decisions)[0] == 200
    events = f"/trajectories/{run}/events?follow=false"
    eventually(lambda: "replayed" in [event["event"] for event in lines(shared_daemon, "GET", events)])
    assert lines(shared_daemon, "GET", here)[0]["result"] == {"paid": None}


# -- refusals ----------------------------------------------------------------------------------------------------------

FILE = {"path_b64": b64(b"workspace/a"), "content_b64": None}


@pytest.mark.parametrize(
    ("path", "body", "status", "sentence"),
    [
        ("/trajectories/nobody/resume", {}, 404, "nobody"),
        ("/trajectories/box/resume", {"decisions": [{"call": "abcd", "action": "guess"}]}, 400, "decisions.0.action"),
        ("/trajectories/box/resume", {"decisions": [{"call": "ab", "action": "skip"}]}, 400, "decisions.0.call"),
        ("/trajectories/box/resume", {"decisions": [{"call": "abcd", "action": "skip", "result": 1}]}, 400, "to skip"),
        ("/trajectories/box/resume", {"decisions": [{"call": "abcd", "action": "skip"}] * 2}, 400, "decided twice"),
        ("/trajectories/box/rewind", {"to": "a/b"}, 404, "a/b"),
        ("/trajectories/box/rewind", {"to": "x", "mode": "half"}, 400, "mode"),
        ("/trajectories/box/compensate", {"calls": ["../x"]}, 404, "../x"),
        ("/trajectories/box/retry", {"task": ""}, 400, "task"),
        ("/trajectories/box/exec", {"argv": ["ls"], "if_head": "a/b"}, 404, "a/b"),
        ("/snapshots/box/exec", {"argv": ["ls"], "if_head": "abcd"}, 400, "no head to compare"),
        ("/snapshots/box/edit", {"files": [{"path_b64": b64(b"/"), "content_b64": None}]}, 400, "root itself"),
        ("/snapshots/box/edit", {"files": [{"path_b64": b64(b"../etc/passwd"), "content_b64": ""}]}, 400, ".."),
        ("/snapshots/box/edit", {"files": [{"path_b64": b64(b"a"), "content_b64": "*"}]}, 400, "base64"),
        ("/snapshots/box/edit", {"files": [{**FILE, "mode": 0o10000}]}, 400, "files.0.mode"),
        ("/snapshots/box/edit", {"files": [FILE, FILE]}, 400, "twice"),
        ("/snapshots/box/edit", {"messages": [], "drop_messages": 1}, 400, "nothing to drop"),
        ("/snapshots/box/edit", {"add_messages": [{"role": "a\x1b", "content": 1}]}, 400, "role"),
        ("/snapshots/box/edit", {"name": "../x"}, 400, "cannot be a name"),
        ("/snapshots/box/edit", {"env": {"A=B": ""}}, 400, "'A=B' cannot be the name of an environment variable"),
        ("/snapshots/box/edit", {"env": {"A": "\ud800"}}, 400, "not Unicode"),
        ("/sandboxes", {"secrets": {"A": "\ud800"}}, 400, "the variable 'A' has text"),
        ("/sandboxes", {"program": "/\ud800"}, 400, "not Unicode"),
        ("/trajectories/box/exec", {"argv": ["\ud800"]}, 400, "not Unicode"),
        ("/snapshots/box/restore", {"to": "/\ud800"}, 400, "not Unicode"),
        ("/snapshots/box/edit", {"state": {"a": float("nan")}}, 400, "nan"),
        ("/snapshots/box/edit", {"add_messages": [{"role": "user", "content": "\ud800"}]}, 400, "not Unicode"),
        ("/approvals/a%2Fb/approve", {}, 404, "the API has no"),
        ("/approvals/ffffffff/approve", {}, 404, "no approval"),
        ("/approvals/ffffffff/deny", {"arguments": 1}, 400, "arguments"),
        ("/store/search", {"namespace": "a", "where": {"x": [1]}}, 400, "where"),
        ("/store/search", {"namespace": "a", "limit": 0}, 400, "limit"),
        ("/sandboxes", {"secrets": {"A": "1"}, "env": {"A": "1"}}, 400, "as a variable and as a secret"),
        ("/sandboxes", {"providers": [{"kind": "other"}]}, 400, "providers.0.kind"),
        ("/sandboxes", {"providers": [{"kind": "openai", "base_url": "ftp://x"}]}, 400, "provider openai is malformed"),
        ("/sandboxes", {"providers": [{"kind": "openai"}, {"kind": "openai"}]}, 400, "two providers of one kind"),
    ],
)
def test_bad_requests_are_one_sentence(shared_daemon: Daemon, path: str, body: Any, status: int, sentence: str) -> None:
    answered, answer = ask(shared_daemon, "POST", path, body)
    assert answered == status
    message = answer["error"]["message"]
    assert sentence in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "bad",
    [
        {"api_key": "sesame", "base_url": "https://ann:sesame@host/"},
        {"api_key": "sesame" * 1000},
        {"api_key": ["sesame"]},
    ],
)
def test_no_refusal_repeats_a_key(shared_daemon: Daemon, bad: dict[str, Any]) -> None:
    body = {"secrets": {"KEY": "sesame", "X=": "sesame"}, "providers": [{"kind": "openai", **bad}]}
    status, answer = ask(shared_daemon, "POST", "/sandboxes", body)
    assert status == 400
    assert "sesame" not in json.dumps(answer)


def test_secrets_reach_the_sandbox_and_nothing_else(daemon: Daemon) -> None:
    assert ask(daemon, "POST", "/sandboxes", {"name": "box", "secrets": {"TOKEN": "sesame"}})[0] == 201
    assert execute(daemon, "box", "sh", "-c", 'test "$TOKEN" = sesame')["exit_code"] == 0
    for path in ("/trajectories", "/sandboxes", "/snapshots", "/snapshots/box/journal"):
        connection = Connection(daemon)
        connection.request("GET", "/v1" + path, headers=JSON)
        assert b'"sesame"' not in connection.getresponse().read(), path
        connection.close()
    assert "sesame" not in daemon.log()


def test_json_is_bounded_as_an_agents_is() -> None:
    deep: Any = 0
    for _ in range(64):
        deep = [deep]
    assert check_json(deep, "it") is deep
    with pytest.raises(LimitExceeded, match="it is nested deeper than 64"):
        check_json({"a": [deep]}, "it")
    assert len(check_json([0] * 199_999, "it")) == 199_999
    with pytest.raises(LimitExceeded, match="200000 values"):
        check_json([0] * 200_000, "it")
    with pytest.raises(UsageError, match="not Unicode"):
        check_json({"a": {"\udc80": 1}}, "it")
    with pytest.raises(UsageError, match="inf"):
        check_json([1.5, [float("inf")]], "it")


# -- approvals ---------------------------------------------------------------------------------------------------------


def asked(daemon: Daemon, box: str, tool: str = "deploy") -> dict[str, Any]:
    """A question to a person, by a program outside of the sandbox."""
    question = {"trajectory": box, "call": new_id(), "tool": tool, "arguments": {"n": [1]}, "question": "really?"}
    found: dict[str, Any] = ask(daemon, "POST", "/approvals", question)[1]
    return found


def test_an_approval_is_shown_and_decided_once(shared_daemon: Daemon, box: str) -> None:
    execute(shared_daemon, box, "touch", "a", "b")
    item = asked(shared_daemon, box)
    assert (item["name"], item["arguments"], item["status"]) == ("deploy", {"n": [1]}, "pending")
    view = ask(shared_daemon, "GET", f"/approvals/{item['id'][:8]}?max_files=1")[1]
    assert (view["approval"], view["more"]) == (item, True)
    assert [change["path"] for change in view["changes"]] == ["workspace/a"]
    assert ask(shared_daemon, "GET", f"/approvals/{item['id']}")[1]["more"] is False
    status, decided = ask(
        shared_daemon, "POST", f"/approvals/{item['id']}/approve", {"reason": "fine", "arguments": None}
    )
    assert (status, decided["status"], decided["reason"], decided["edited"]) == (200, "approved", "fine", [None])
    assert decided["by"], "the user who asks"
    status, again = ask(shared_daemon, "POST", f"/approvals/{item['id']}/deny", {"by": "ann"})
    assert (status, again["error"]["code"]) == (409, "Conflict")
    assert item["id"] not in {each["id"] for each in ask(shared_daemon, "GET", "/approvals?status=pending")[1]}
    assert item["id"] in {each["id"] for each in ask(shared_daemon, "GET", "/approvals")[1]}


def test_a_denial_says_who_and_why(shared_daemon: Daemon, box: str) -> None:
    item = asked(shared_daemon, box)
    decided = ask(shared_daemon, "POST", f"/approvals/{item['id']}/deny", {"by": "ann", "reason": "too much"})[1]
    assert (decided["status"], decided["by"], decided["reason"], decided["edited"]) == (
        "denied",
        "ann",
        "too much",
        None,
    )


# -- watching ----------------------------------------------------------------------------------------------------------


def test_a_watcher_hears_what_happens_from_now_on(daemon: Daemon) -> None:
    ask(daemon, "POST", "/sandboxes", {"name": "box"})
    asked(daemon, "box")
    connections = [Connection(daemon) for _ in range(2)]
    answers = []
    for connection in connections:
        connection.request("GET", "/v1/watch", headers=JSON)
        answers.append(connection.getresponse())
        assert json.loads(answers[-1].readline()) == {"event": "watching"}
    asked(daemon, "box", "second")
    for answer in answers:
        event = next(item for item in map(json.loads, answer) if item["event"] == "approval")
        assert (event["event"], event["name"], event["status"]) == ("approval", "second", "pending")
        assert event["trajectory"] == ask(daemon, "GET", "/trajectories/box")[1]["id"]
    assert daemon.terminate() == 0, "watchers hold nobody up"
    for answer, connection in zip(answers, connections, strict=True):
        assert all(json.loads(line)["event"] != "approval" for line in answer)
        connection.close()


# -- one writer --------------------------------------------------------------------------------------------------------


def test_a_command_for_another_head_is_refused_and_the_head_named(shared_daemon: Daemon, box: str) -> None:
    first = ask(shared_daemon, "GET", f"/trajectories/{box}")[1]["head"]
    second = execute(shared_daemon, box, "ls", if_head=first)["snapshot"]["id"]
    status, refused = ask(shared_daemon, "POST", f"/trajectories/{box}/exec", {"argv": ["ls"], "if_head": first})
    assert (status, refused["error"]["code"]) == (409, "Conflict")
    assert short(second) in refused["error"]["message"]
    assert f"snapshotd fork {short(first)}" in refused["error"]["message"]
    assert ask(shared_daemon, "GET", f"/trajectories/{box}")[1]["head"] == second
    assert execute(shared_daemon, box, "ls", if_head=box)["exit_code"] == 0, "the head, by the trajectory's name"


# -- key-value store ---------------------------------------------------------------------------------------------------


def test_the_store(daemon: Daemon) -> None:
    value = {"owner": {"name": "ann"}, "n": 1}
    status, first = ask(daemon, "PUT", STORE + "release", {"value": value, "ttl_s": 3600, "expected_version": 0})
    assert (status, first["version"], first["tenant"]) == (200, 1, "default")
    assert first["expires_at"] > first["created_at"]
    assert ask(daemon, "PUT", STORE + "release", {"value": 2, "expected_version": 0})[0] == 409
    assert ask(daemon, "PUT", STORE + "release", {"value": None})[1]["version"] == 2
    assert ask(daemon, "GET", STORE + "release")[1]["value"] is None
    assert ask(daemon, "GET", STORE + "release&version=1")[1] == first
    assert ask(daemon, "GET", STORE + "release&tenant=other")[0] == 404
    assert [item["version"] for item in ask(daemon, "GET", "/store/history?namespace=team/plans&key=release")[1]] == [
        2,
        1,
    ]
    assert ask(daemon, "DELETE", STORE + "release&expected_version=1")[0] == 409
    assert ask(daemon, "DELETE", STORE + "release&expected_version=2") == (204, None)
    assert ask(daemon, "GET", STORE + "release")[0] == 404
    assert ask(daemon, "GET", "/store/history?namespace=team/plans&key=release")[1][0]["is_deleted"] is True


def test_the_store_is_searched(daemon: Daemon) -> None:
    for key, value in (("a1", {"x": {"y": True}}), ("a2", {"x": {"y": 1}}), ("b/%26", "text")):
        assert ask(daemon, "PUT", STORE + key, {"value": value})[0] == 200

    def found(**search: Any) -> list[str]:
        return [item["key"] for item in ask(daemon, "POST", "/store/search", {"namespace": "team", **search})[1]]

    assert found() == ["a1", "a2", "b/&"], "names are taken as they are"
    assert found(prefix="a", limit=1) == ["a1"]
    assert found(after="a1") == ["a2", "b/&"]
    assert found(tenant="other") == []
    assert "a1" in found(where={"x.y": True})
    assert found(where={"x.z": 1}) == []


@pytest.mark.parametrize(
    "body",
    [
        {"value": 1, "ttl_s": 0},
        {"value": 1, "ttl_s": 1e12},
        {"value": 1, "ttl_s": float("nan")},
        {},
        {"value": float("inf")},
    ],
)
def test_values_that_nobody_could_keep_are_refused(shared_daemon: Daemon, body: dict[str, Any]) -> None:
    assert ask(shared_daemon, "PUT", STORE + "bad", body)[0] == 400


def test_a_folder_is_not_opened_for_a_client_whose_mounts_cannot_be_seen() -> None:
    """The kernel gives process id 0 for a peer outside of the daemon's process namespace."""
    assert asyncio.run(opener_of(Request({"type": "http", "state": {PEER_PID: 7}}))) == Opener(namespace_pid=7)
    unseen = asyncio.run(opener_of(Request({"type": "http", "state": {PEER_PID: 0}})))
    with pytest.raises(Unsupported, match="where the daemon runs"):
        open_folder("/var/tmp", HostUser(0, 0), unseen)
