"""The API as any HTTP client sees it: shapes, errors, versions, bounds, streams."""

from __future__ import annotations

import base64
import http.client
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from snapshotd.api.wire import API_VERSION, BODY_MAX_BYTES, VERSION_HEADER
from snapshotd.types import new_id
from tests.unit.daemon.asking import JSON, Connection, ask, eventually, lines, memory_of
from tests.unit.daemon.process import Daemon


@pytest.fixture
def box(shared_daemon: Daemon) -> str:
    """The name of a sandbox of the test's own."""
    name = f"box-{new_id()[:8]}"
    assert ask(shared_daemon, "POST", "/sandboxes", {"name": name})[0] == 201
    return name


def test_a_sandbox_from_creation_to_removal(daemon: Daemon) -> None:
    status, made = ask(daemon, "POST", "/sandboxes", {"name": "box", "env": {"A": "1"}})
    assert status == 201
    assert made["trajectory"]["head"] == made["snapshot"]["id"]
    snapshot = made["snapshot"]
    assert datetime.fromisoformat(snapshot["created_at"]).tzinfo == UTC
    assert (snapshot["tool"]["name"], snapshot["seq"], snapshot["pause_ms"] >= 0) == ("start", 0, True)
    assert ask(daemon, "GET", "/trajectories/box")[1]["id"] == made["trajectory"]["id"]
    assert [item["trajectory"]["name"] for item in ask(daemon, "GET", "/sandboxes")[1]] == ["box"]
    assert ask(daemon, "DELETE", "/trajectories/box")[0] == 409
    assert ask(daemon, "POST", "/trajectories/box/stop")[1]["status"] == "stopped"
    assert ask(daemon, "DELETE", "/trajectories/box") == (204, None)
    assert ask(daemon, "GET", "/trajectories/box")[0] == 404


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/trajectories/nobody", None, 404, "NotFound"),
        ("GET", "/snapshots/..%2f..%2fetc", None, 404, "NotFound"),
        ("GET", "/nothing/like/that", None, 404, "NotFound"),
        ("POST", "/sandboxes", {"wrong": 1}, 400, "UsageError"),
        ("POST", "/sandboxes", {"name": "../x"}, 400, "UsageError"),
        ("POST", "/sandboxes", {"workspace": "relative"}, 400, "UsageError"),
        ("POST", "/sandboxes", {"env": {"A=B": "1"}}, 400, "UsageError"),
        ("POST", "/sandboxes", {"limits": {"memory_bytes": 5}}, 400, "UsageError"),
        ("POST", "/sandboxes", {"limits": {"disk_bytes": 5}}, 400, "UsageError"),
        ("POST", "/runs", {}, 400, "UsageError"),
        ("POST", "/runs", {"agent": "/a.py", "command": ["ls"]}, 400, "UsageError"),
        ("POST", "/runs", {"command": ["ls\0"]}, 400, "UsageError"),
        ("POST", "/snapshots/box/fork", {"n": 0}, 400, "UsageError"),
        ("POST", "/snapshots/box/fork", {"n": 10000}, 400, "UsageError"),
        ("GET", "/snapshots/box/file?path_b64=%21", None, 400, "UsageError"),
        ("GET", "/snapshots/box/file?path_b64=Li4veA==", None, 400, "UsageError"),
        ("GET", "/files/box/content?path_b64=%21", None, 400, "UsageError"),
        ("GET", "/files/box/stat?path_b64=Li4veA==", None, 400, "UsageError"),
        ("GET", "/files/box/list", None, 400, "UsageError"),
        ("GET", "/files/nobody/archive?path_b64=eA==", None, 404, "NotFound"),
        ("POST", "/files/nobody/content?path_b64=eA==", {}, 404, "NotFound"),
        ("POST", "/files/box/content?path_b64=eA==&mode=4096", {}, 400, "UsageError"),
        ("POST", "/files/box/rename", {"path_b64": "eA=="}, 400, "UsageError"),
        ("POST", "/files/box/remove", {"path_b64": "Li4="}, 400, "UsageError"),
        ("GET", "/diff?a=a/b", None, 404, "NotFound"),
        ("POST", "/trajectories/box/exec", {"argv": []}, 400, "UsageError"),
    ],
)
def test_bad_requests_are_one_sentence(
    shared_daemon: Daemon, method: str, path: str, body: Any, status: int, code: str
) -> None:
    answered, answer = ask(shared_daemon, method, path, body)
    assert (answered, answer["error"]["code"]) == (status, code)
    message = answer["error"]["message"]
    assert message
    assert "\n" not in message
    assert "Traceback" not in message


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"nam": "box"}, "the request's nam is not acceptable: there is no such field; did you mean 'name'?"),
        (
            {"limits": {"cpu": 1}},
            "the request's limits.cpu is not acceptable: there is no such field; did you mean 'cpus'?",
        ),
        ({"wrong": 1}, "the request's wrong is not acceptable: there is no such field; known are "),
        ([1], "the request's body is not acceptable: Input should be an object"),
        ({"limits": 1}, "the request's limits is not acceptable: Input should be an object"),
    ],
)
def test_a_refusal_speaks_of_json_and_not_of_classes(shared_daemon: Daemon, body: Any, said: str) -> None:
    assert said in ask(shared_daemon, "POST", "/sandboxes", body)[1]["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/snapshots/box/fork", {"n": "1"}, "n"),
        ("/snapshots/box/fork", {"n": True}, "n"),
        ("/sandboxes", {"limits": {"cpus": "0.5"}}, "limits.cpus"),
        ("/sandboxes", {"capture_tokens": 1}, "capture_tokens"),
        ("/trajectories/box/exec", {"argv": ["ls"], "timeout_s": True}, "timeout_s"),
        ("/prune", {"policy": {"keep_last": "1"}}, "policy.keep_last"),
        ("/snapshots/box/edit", {"drop_messages": False}, "drop_messages"),
    ],
)
def test_a_number_is_a_number(shared_daemon: Daemon, path: str, body: Any, field: str) -> None:
    status, answer = ask(shared_daemon, "POST", path, body)
    assert status == 400
    assert f"the request's {field} is not acceptable: Input should be a valid" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PATCH", "/trajectories", "GET"),
        ("HEAD", "/trajectories/box", "DELETE, GET"),
        ("OPTIONS", "/policy", "DELETE, GET, PUT"),
        ("POST", "/openapi.json", "GET, HEAD"),
    ],
)
def test_a_method_that_a_path_has_not_is_answered_with_those_it_has(
    shared_daemon: Daemon, method: str, path: str, allowed: str
) -> None:
    connection = Connection(shared_daemon)
    connection.request(method, f"/v1{path}")
    answer = connection.getresponse()
    said = answer.read()
    connection.close()
    assert (answer.status, answer.headers["Allow"]) == (405, allowed)
    assert method == "HEAD" or json.loads(said)["error"]["code"] == "UsageError"


def test_a_defect_is_logged_and_says_where(shared_daemon: Daemon, box: str) -> None:
    status, answer = ask(shared_daemon, "POST", f"/trajectories/{box}/exec", {"argv": ["crash"]})
    log = shared_daemon.state_dir / "daemon.log"
    assert (status, answer["error"]["code"]) == (500, "InternalError")
    assert str(log) in answer["error"]["message"]
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert any("ZeroDivisionError: a defect" in record.get("exception", "") for record in records)
    assert log.stat().st_mode & 0o777 == 0o600


def test_a_full_disk_is_told_apart(shared_daemon: Daemon, box: str) -> None:
    assert ask(shared_daemon, "POST", f"/trajectories/{box}/exec", {"argv": ["full"]})[0] == 507


def test_another_version_is_refused_by_name(shared_daemon: Daemon) -> None:
    status, answer = ask(shared_daemon, "GET", "/trajectories", headers={VERSION_HEADER: "9.7"})
    assert (status, answer["error"]["code"]) == (426, "VersionMismatch")
    assert "9.7" in answer["error"]["message"]
    assert API_VERSION in answer["error"]["message"]
    assert ask(shared_daemon, "GET", "/version", headers={VERSION_HEADER: API_VERSION})[0] == 200


def test_a_body_is_bounded_with_and_without_its_length(shared_daemon: Daemon) -> None:
    connection = Connection(shared_daemon)
    connection.request(
        "POST", "/v1/sandboxes", headers={"Content-Length": str(BODY_MAX_BYTES + 1), "Content-Type": "application/json"}
    )
    assert connection.getresponse().status == 413
    connection.close()

    connection = Connection(shared_daemon)
    connection.putrequest("POST", "/v1/sandboxes")
    connection.putheader("Transfer-Encoding", "chunked")
    connection.putheader("Content-Type", "application/json")
    connection.endheaders()
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    for _ in range(BODY_MAX_BYTES // 65536 + 1):
        try:
            connection.send(chunk)
        except (BrokenPipeError, ConnectionResetError):
            break  # refused before everything was sent
    try:
        connection.send(b"0\r\n\r\n")
        assert connection.getresponse().status == 413
    except (BrokenPipeError, ConnectionResetError, http.client.BadStatusLine):
        pass  # the daemon hung up on us, which bounds it, too
    assert ask(shared_daemon, "GET", "/version")[0] == 200


def test_exec_streams_and_ends_with_its_result(shared_daemon: Daemon, box: str) -> None:
    argv = ["sh", "-c", 'echo "$K in $PWD" >&2; exit 3']
    body = {"argv": argv, "env": {"K": "V"}, "cwd": "/tmp"}
    events = lines(shared_daemon, "POST", f"/trajectories/{box}/exec", body)
    assert [event["event"] for event in events] == ["output", "result"]
    assert base64.b64decode(events[0]["data_b64"]).startswith(b"V in /")
    assert events[0]["stream"] == "stderr"
    assert (events[1]["exit_code"], events[1]["call"]["status"]) == (3, "failed")
    recorded = events[1]["snapshot"]["tool"]["arguments"]
    assert (recorded["argv"], recorded["cwd"]) == (argv, "/tmp")
    assert lines(shared_daemon, "POST", f"/snapshots/{box}/exec", {"argv": ["ls"]})[-1]["snapshot"] is None


def test_a_command_survives_its_client_and_is_captured(shared_daemon: Daemon, box: str, short_dir: Path) -> None:
    connection = Connection(shared_daemon)
    go = short_dir / "go"
    connection.request("POST", f"/v1/trajectories/{box}/exec", json.dumps({"argv": ["await", str(go)]}), JSON)
    assert connection.getresponse().fp.readline()  # it runs
    connection.close()
    assert len(ask(shared_daemon, "GET", f"/trajectories/{box}/log")[1]) == 1
    go.touch()
    eventually(lambda: len(ask(shared_daemon, "GET", f"/trajectories/{box}/log")[1]) == 2)


def test_a_slow_reader_slows_the_command_down(shared_daemon: Daemon, box: str) -> None:
    """64 MiB of output with nobody reading: the daemon must hold a bounded part of it."""
    connection = Connection(shared_daemon)
    before = memory_of(shared_daemon)
    connection.request("POST", f"/v1/trajectories/{box}/exec", json.dumps({"argv": ["bytes", str(64 << 20)]}), JSON)
    answer = connection.getresponse()
    assert len(answer.read(10)) == 10
    assert len(ask(shared_daemon, "GET", f"/trajectories/{box}/log")[1]) == 1  # it cannot have ended
    assert memory_of(shared_daemon) - before < 24 << 20
    assert len(answer.read()) > 64 << 20
    connection.close()


def test_many_streams_block_nobody(shared_daemon: Daemon, box: str) -> None:
    """256 clients wait at once for what a command prints, and looking around goes on."""
    command = ask(shared_daemon, "POST", f"/trajectories/{box}/commands", {"argv": ["forever"]})[1]["id"]
    path, connections = f"/trajectories/{box}/commands/{command}", []
    for _ in range(256):
        connection = Connection(shared_daemon)
        connection.request("GET", f"/v1{path}/events")
        connections.append(connection)
    for connection in connections:
        assert connection.getresponse().fp.readline()
    assert ask(shared_daemon, "GET", f"/trajectories/{box}")[0] == 200
    assert ask(shared_daemon, "POST", f"{path}/signal", {"signal": 9})[0] == 200
    for connection in connections:
        connection.close()


def test_a_failure_in_the_middle_of_bytes_breaks_the_answer_off(shared_daemon: Daemon, box: str) -> None:
    connection = Connection(shared_daemon)
    connection.request(
        "GET", f"/v1/snapshots/{box}/file?path_b64=" + base64.urlsafe_b64encode(b"workspace/broken").decode()
    )
    answer = connection.getresponse()
    with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
        answer.read()
    connection.close()
    assert "in the middle" in (shared_daemon.state_dir / "daemon.log").read_text()


def test_paths_keep_every_byte(shared_daemon: Daemon, box: str) -> None:
    argv = ["sh", "-c", "echo hello > new$(printf '\\377').txt"]
    assert lines(shared_daemon, "POST", f"/trajectories/{box}/exec", {"argv": argv})[-1]["exit_code"] == 0
    change, end = lines(shared_daemon, "GET", f"/diff?a={box}")
    assert end == {"event": "end"}
    assert (change["change"], base64.b64decode(change["path_b64"])) == ("added", b"workspace/new\xff.txt")
    assert change["before"] is None
    assert (change["after"]["kind"], change["after"]["mode"], change["after"]["size"]) == ("file", "0644", 6)


def test_followers_end_when_the_daemon_does(daemon: Daemon, short_dir: Path) -> None:
    agent = short_dir / "agent.py"
    agent.write_text("print('text', flush=True)\nimport time\ntime.sleep(1000)\n")
    run = ask(daemon, "POST", "/runs", {"agent": str(agent)})[1]
    connection = Connection(daemon)
    connection.request("GET", f"/v1/trajectories/{run['id']}/events")
    follower = connection.getresponse()
    assert json.loads(follower.readline())["event"] == "started"
    assert any(json.loads(line)["event"] == "output" for line in iter(follower.readline, b""))
    assert daemon.terminate() == 0
    assert json.loads(follower.read().splitlines()[-1])["event"] == "finished"
    connection.close()
    assert not daemon.socket_path.exists()


def test_openapi_describes_every_error_and_stream() -> None:
    from snapshotd.daemon.http.api import openapi  # here: the import makes the whole application

    described = openapi()
    assert described["info"]["version"] == API_VERSION
    assert all(path.startswith("/v1/") for path in described["paths"])
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            assert "default" in operation["responses"], (method, path)
    assert (
        "application/x-ndjson"
        in described["paths"]["/v1/trajectories/{ref}/exec"]["post"]["responses"]["200"]["content"]
    )
    written = json.loads((Path(__file__).parents[3] / "docs" / "openapi.json").read_text())
    assert sorted(written["paths"]) == sorted(described["paths"]), (
        "regenerate docs/openapi.json: python -m snapshotd.daemon.http.api"
    )
