"""The API of durable storage as any HTTP client sees it: frames, uploads of any size, progress, bad requests, who
mounts."""

from __future__ import annotations

import http.client
import io
import json
import os
import struct
import tarfile
from pathlib import Path
from typing import Any

import boto3
import pytest
from starlette.requests import Request

from snapshotd.api.wire import BODY_MAX_BYTES, FRAMES
from snapshotd.daemon.http.peer import PEER_PID
from snapshotd.daemon.http.routes.storage import _namespace_pid
from snapshotd.daemon.http.streams import IDLE_MAX
from snapshotd.errors import Unavailable, Unsupported
from snapshotd.types import new_id
from tests import s3_service
from tests.unit.daemon.asking import Connection, ask, eventually, lines, memory_of
from tests.unit.daemon.process import Daemon, damage, start

MIB = 1 << 20


def made(daemon: Daemon, workspace: Path | None = None) -> str:
    name = f"box-{new_id()[:8]}"
    body = {"name": name} if workspace is None else {"name": name, "workspace": str(workspace)}
    assert ask(daemon, "POST", "/sandboxes", body)[0] == 201
    return name


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 8 MiB that cannot be compressed."""
    folder = tmp_path_factory.mktemp("large")
    (folder / "large").write_bytes(os.urandom(8 * MIB))
    return folder


def frames(daemon: Daemon, path: str) -> list[tuple[int, bytes]]:
    connection = Connection(daemon)
    connection.request("GET", "/v1" + path)
    answer = connection.getresponse()
    assert (answer.status, answer.headers["Content-Type"]) == (200, FRAMES)
    data, found, at = answer.read(), [], 0
    connection.close()
    while at < len(data):
        kind, length = struct.unpack_from(">BI", data, at)
        found.append((kind, data[at + 5 : at + 5 + length]))
        assert len(found[-1][1]) == length
        at += 5 + length
    return found


def test_log_can_be_limited(shared_daemon: Daemon) -> None:
    box = made(shared_daemon)
    for _ in range(3):
        lines(shared_daemon, "POST", f"/trajectories/{box}/exec", {"argv": ["ls"]})
    assert [item["seq"] for item in ask(shared_daemon, "GET", f"/trajectories/{box}/log")[1]] == [0, 1, 2, 3]
    assert [item["seq"] for item in ask(shared_daemon, "GET", f"/trajectories/{box}/log?last=2")[1]] == [2, 3]
    assert ask(shared_daemon, "GET", f"/trajectories/{box}/log?last=0")[0] == 400


def test_usage_names_every_state(shared_daemon: Daemon) -> None:
    usage = ask(shared_daemon, "GET", "/usage")[1]
    assert sorted(usage["states"]) == ["captured", "lost", "pruned", "stored"]
    assert usage["layer_budget_bytes"] > 0


def test_policies(daemon: Daemon) -> None:
    box = made(daemon)
    empty = dict.fromkeys(("keep_last", "keep_within_s", "keep_every", "keep_failed", "max_bytes"))
    assert ask(daemon, "GET", "/policy") == (200, empty)
    assert ask(daemon, "PUT", "/policy", {"keep_last": 5, "keep_within_s": 1.5}) == (
        200,
        {**empty, "keep_last": 5, "keep_within_s": 1.5},
    )
    assert ask(daemon, "GET", f"/policy?trajectory={box}")[1]["keep_last"] == 5
    assert ask(daemon, "PUT", f"/policy?trajectory={box}", {"keep_every": 2})[1] == {**empty, "keep_every": 2}
    assert ask(daemon, "GET", "/policy")[1]["keep_last"] == 5
    assert ask(daemon, "DELETE", f"/policy?trajectory={box}") == (204, None)
    assert ask(daemon, "GET", f"/policy?trajectory={box}")[1]["keep_last"] == 5
    assert ask(daemon, "GET", "/policy?trajectory=nobody")[0] == 404


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("PUT", "/policy", {"keep_last": -1}, 400, "UsageError"),
        ("PUT", "/policy", {"keep_last": 1.5}, 400, "UsageError"),
        ("PUT", "/policy", {"keep_every": 0}, 400, "UsageError"),
        ("PUT", "/policy", {"keep_failed": 0}, 400, "UsageError"),
        ("PUT", "/policy", {"max_bytes": 0}, 400, "UsageError"),
        ("PUT", "/policy", {"max_bytes": 1 << 60}, 400, "UsageError"),
        ("PUT", "/policy", {"keep_within_s": 0}, 400, "UsageError"),
        ("PUT", "/policy", {"keep_within_s": "NaN"}, 400, "UsageError"),
        ("PUT", "/policy", {"keep": 1}, 400, "UsageError"),
        ("PUT", "/policy?trajectory=a/b", {}, 404, "NotFound"),
        ("POST", "/prune", {"policy": {"keep_last": -1}}, 400, "UsageError"),
        ("POST", "/prune", {"grace_s": -1}, 400, "UsageError"),
        ("POST", "/prune", {"dryrun": True}, 400, "UsageError"),
        ("POST", "/check", {"read": True}, 400, "UsageError"),
        ("GET", "/snapshots/nobody/export", None, 404, "NotFound"),
        ("GET", "/snapshots/{box}/export?form=zip", None, 400, "UsageError"),
        ("GET", "/snapshots/{box}/export?form=tar&whole=true", None, 400, "UsageError"),
        ("GET", "/snapshots/{box}/export?since=a%2Fb", None, 404, "NotFound"),
        ("POST", "/import?name=..%2Fx", None, 400, "UsageError"),
        ("POST", "/import", None, 400, "UsageError"),
        ("POST", "/mount", {"directory": "relative"}, 400, "UsageError"),
        ("POST", "/mount", {"directory": "/nul\0"}, 400, "UsageError"),
        ("POST", "/mount", {}, 400, "UsageError"),
        ("POST", "/umount", {"directory": "/tmp"}, 404, "NotFound"),
    ],
)
def test_bad_requests_are_one_sentence(
    shared_daemon: Daemon, method: str, path: str, body: Any, status: int, code: str
) -> None:
    answered, answer = ask(shared_daemon, method, path.format(box=made(shared_daemon)), body)
    assert (answered, answer["error"]["code"]) == (status, code)
    assert answer["error"]["message"]
    assert "\n" not in answer["error"]["message"]


def test_prune_streams_progress_and_ends_with_its_report(daemon: Daemon) -> None:
    box = made(daemon)
    for name in "abc":
        lines(daemon, "POST", f"/trajectories/{box}/exec", {"argv": ["touch", name]})
    ask(daemon, "POST", "/flush")
    dry = lines(daemon, "POST", "/prune", {"dry_run": True, "policy": {"keep_last": 2}})
    assert {event["event"] for event in dry[:-1]} <= {"progress"}
    assert [item["seq"] for item in dry[-1]["report"]["pruned"]] == [1]
    assert dry[-1]["report"]["dry_run"]
    done = lines(daemon, "POST", "/prune", {"grace_s": 0, "policy": {"keep_last": 1}})
    assert [item["seq"] for item in done[-1]["report"]["pruned"]] == [1, 2]
    states = [item["state"] for item in ask(daemon, "GET", f"/trajectories/{box}/log")[1]]
    assert states == ["stored", "pruned", "pruned", "stored"]


def test_check_and_repair(daemon: Daemon, workspace: Path) -> None:
    made(daemon, workspace)
    ask(daemon, "POST", "/flush")
    assert lines(daemon, "POST", "/check", {})[-1]["report"]["damages"] == []
    assert lines(daemon, "POST", "/repair")[-1]["report"]["lost"] == []
    damage(daemon)
    report = lines(daemon, "POST", "/check", {"read_data": True})[-1]["report"]
    assert list(report["damages"][0])[:5] == ["pack", "object", "what", "snapshot", "path"]
    assert lines(daemon, "POST", "/repair")[-1]["event"] == "result"
    assert lines(daemon, "POST", "/check", {"read_data": True})[-1]["report"]["damages"] == []


# -- export ------------------------------------------------------------------------------------------------------------


@pytest.mark.long  # unit/engine/test_child.py has the worker process; here the client of the service tries five times
def test_a_bucket_that_does_not_answer_is_unavailable(short_dir: Path) -> None:
    with s3_service.running() as endpoint:
        bucket = boto3.client("s3", endpoint_url=endpoint)
        bucket.create_bucket(Bucket="packs")
        bucket.close()
        daemon = start(short_dir / "state", short_dir / "s", SNAPSHOTD_STORE=f"s3://packs?endpoint={endpoint}")
    try:
        for verb in (daemon.client.prune, daemon.client.check):
            with pytest.raises(Unavailable, match=endpoint):
                verb()
    finally:
        daemon.close()


def test_an_export_is_frames_of_bytes_and_events(shared_daemon: Daemon, workspace: Path) -> None:
    found = frames(shared_daemon, f"/snapshots/{made(shared_daemon, workspace)}/export?form=tar")
    events = [json.loads(content) for kind, content in found if kind == 1]
    assert events[-1] == {"event": "result", "warnings": []}
    assert found[-1][0] == 1
    assert all(len(content) <= MIB for _, content in found)
    with tarfile.open(fileobj=io.BytesIO(b"".join(content for kind, content in found if kind == 0))) as tree:
        assert "workspace/a.txt" in tree.getnames()


def test_an_export_nobody_reads_is_bounded_and_ends_with_its_client(daemon: Daemon, large: Path) -> None:
    box = made(daemon, large)
    ask(daemon, "POST", "/flush")
    before, threads = memory_of(daemon), threads_of(daemon)
    connections = []
    for _ in range(10):
        connection = Connection(daemon)
        connection.request("GET", f"/v1/snapshots/{box}/export?form=tar")
        connections.append(connection)
        assert connection.getresponse().read(5)
    assert memory_of(daemon) - before < 10 * 8 * MIB
    for connection in connections:
        connection.close()
    eventually(lambda: threads_of(daemon) <= threads + 1 + IDLE_MAX)


def threads_of(daemon: Daemon) -> int:
    return len(os.listdir(f"/proc/{daemon.process.pid}/task"))


# -- import ------------------------------------------------------------------------------------------------------------


def upload(daemon: Daemon, pieces: list[bytes], *, name: str, chunked: bool = True) -> tuple[int, list[dict[str, Any]]]:
    connection = Connection(daemon)
    headers = {} if chunked else {"Content-Length": str(sum(len(piece) for piece in pieces))}
    connection.request("POST", f"/v1/import?name={name}", iter(pieces), headers, encode_chunked=chunked)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def bundle(shared_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """One that is larger than other bodies may be, of something that is not here any more."""
    folder = tmp_path_factory.mktemp("larger")
    (folder / "large").write_bytes(os.urandom(BODY_MAX_BYTES + MIB))
    box = made(shared_daemon, folder)
    found = frames(shared_daemon, f"/snapshots/{box}/export")
    assert ask(shared_daemon, "DELETE", f"/trajectories/{box}?force=true")[0] == 204
    return b"".join(content for kind, content in found if kind == 0)


@pytest.mark.parametrize("chunked", [True, False])
def test_an_import_takes_a_body_of_any_size(shared_daemon: Daemon, bundle: bytes, chunked: bool) -> None:
    name = f"in-{new_id()[:8]}"
    pieces = [bundle[at : at + MIB] for at in range(0, len(bundle), MIB)]
    status, events = upload(shared_daemon, pieces, name=name, chunked=chunked)
    assert status == 200
    assert {event["event"] for event in events[:-1]} <= {"progress"}
    imported = events[-1]["imported"]
    assert (imported["trajectories"][0]["name"], imported["snapshot_count"]) == (name, 1)
    assert ask(shared_daemon, "DELETE", f"/trajectories/{name}?force=true")[0] == 204


def test_other_bodies_are_bounded_as_before(shared_daemon: Daemon) -> None:
    for path in ("/v1/imports", "/v1/import/", "/v1/check", "/v1/images/import"):
        connection = Connection(shared_daemon)
        connection.request(
            "POST", path, headers={"Content-Length": str(BODY_MAX_BYTES + 1), "Content-Type": "application/json"}
        )
        assert connection.getresponse().status == 413, path
        connection.close()


def test_a_client_that_goes_away_in_the_middle_imports_nothing(shared_daemon: Daemon, bundle: bytes) -> None:
    connection = Connection(shared_daemon)
    connection.putrequest("POST", "/v1/import?name=half")
    connection.putheader("Transfer-Encoding", "chunked")
    connection.endheaders()
    log, asked = shared_daemon.log, '"path": "/v1/import"'
    before = log().count(asked)
    connection.send(b"100000\r\n" + bundle[:MIB] + b"\r\n")
    connection.close()
    eventually(lambda: log().count(asked) > before)  # the request has ended
    assert ask(shared_daemon, "GET", "/trajectories/half")[0] == 404
    assert "Traceback" not in log()


def test_a_refused_import_answers_while_the_client_still_sends(shared_daemon: Daemon) -> None:
    """The daemon does not read what it will not take; a client that has not sent everything must get the sentence all
    the same."""
    for _ in range(5):
        connection = Connection(shared_daemon)
        connection.putrequest("POST", "/v1/import")
        connection.putheader("Transfer-Encoding", "chunked")
        connection.endheaders()
        chunk = b"100000\r\n" + b"x" * MIB + b"\r\n"
        try:
            for _ in range(64):
                connection.send(chunk)
        except (BrokenPipeError, ConnectionResetError):
            pass
        answer = connection.getresponse()
        assert answer.status == 400
        assert json.loads(answer.read())["error"]["code"] == "UsageError"
        connection.close()


# -- mount -------------------------------------------------------------------------------------------------------------


def test_a_client_whose_mounts_are_out_of_reach_is_told_so() -> None:
    """The kernel gives process id 0 for a peer outside of the daemon's process namespace."""
    with pytest.raises(Unsupported, match="docker exec"):
        _namespace_pid(Request({"type": "http", "state": {PEER_PID: 0}}))
    assert _namespace_pid(Request({"type": "http", "state": {PEER_PID: 7}})) == 7


def test_the_description_covers_storage() -> None:
    from snapshotd.daemon.http.api import openapi  # here: the import makes the whole application

    paths = openapi()["paths"]
    assert FRAMES in paths["/v1/snapshots/{ref}/export"]["get"]["responses"]["200"]["content"]
    assert "application/octet-stream" in paths["/v1/import"]["post"]["requestBody"]["content"]
    for path in ("/v1/prune", "/v1/check", "/v1/repair", "/v1/import"):
        assert "application/x-ndjson" in paths[path]["post"]["responses"]["200"]["content"]


def test_a_broken_off_frame_is_seen_by_any_client(daemon: Daemon, large: Path) -> None:
    box = made(daemon, large)
    connection = Connection(daemon)
    connection.request("GET", f"/v1/snapshots/{box}/export?form=tar")
    answer = connection.getresponse()
    assert answer.read(MIB)
    daemon.kill()
    with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
        answer.read()
    connection.close()
