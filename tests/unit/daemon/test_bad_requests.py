"""Requests that are written wrongly are refused with a sentence that says where, and nothing is made."""

from __future__ import annotations

import json
from typing import Any

import pytest

from snapshotd.api.wire import KEY_HEADER
from tests.unit.daemon.asking import JSON, Connection, ask
from tests.unit.daemon.process import Daemon


def _raw(daemon: Daemon, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, str]:
    connection = Connection(daemon)
    connection.request(method, "/v1" + path, body, {**JSON, **headers})
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, str(json.loads(text)["error"]["message"]) if answer.status >= 400 else ""


@pytest.fixture(scope="module")
def box(shared_daemon: Daemon) -> str:
    assert ask(shared_daemon, "POST", "/sandboxes", {"name": "box"})[0] == 201
    return "box"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/trajectories?nosuch=1", "has 'nosuch', which is no parameter of this operation; it has none"),
        ("/trajectories/box/log?lst=1", "has 'lst', which is no parameter of this operation; did you mean 'last'?"),
        ("/diff?a=box&zzz=1", "has 'zzz', which is no parameter of this operation; known are a, b"),
        ("/trajectories/box/log?last=1&last=2", "has the parameter 'last' twice"),
    ],
)
def test_a_query_with_what_the_operation_does_not_have(shared_daemon: Daemon, box: str, path: str, said: str) -> None:
    status, message = _raw(shared_daemon, "GET", path)
    assert (status, said in message) == (400, True), message


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "the request's body is not acceptable: it is no JSON (Expecting property name"),
        (b'{"name": "one", "name": "two"}', "it is no JSON ('name' is there twice)"),
        (b'{"env": {"A": "1", "A": "2"}}', "it is no JSON ('A' is there twice)"),
        (b'{"env": {"A=B": "1"}}', "'A=B' cannot be the name of an environment variable"),
        (b'{"env": {"A\\nB": "1"}}', "'A\\nB' cannot be the name of an environment variable"),
        (b'{"env": {"": "1"}}', "'' cannot be the name of an environment variable"),
        (b'{"env": {"LONG": "' + b"x" * (128 << 10) + b'"}}', "the variable 'LONG' has more than 131070 bytes"),
        (b'{"secrets": {"A\\u0000": "1"}}', "'A\\x00' cannot be the name of an environment variable"),
    ],
)
def test_a_body_that_cannot_be_meant(shared_daemon: Daemon, body: bytes, said: str) -> None:
    before = ask(shared_daemon, "GET", "/trajectories")[1]
    status, message = _raw(shared_daemon, "POST", "/sandboxes", body)
    assert (status in (400, 413), said in message) == (True, True), message
    assert ask(shared_daemon, "GET", "/trajectories")[1] == before


@pytest.mark.parametrize(
    ("body", "said"), [(b'{"argv": ["a"], "argv": ["b"]}\n', "'argv' is there twice"), (b"{\n", "no JSON")]
)
def test_a_command_that_cannot_be_meant(shared_daemon: Daemon, box: str, body: bytes, said: str) -> None:
    for path in ("/trajectories/box/exec", "/trajectories/box/exec/attended"):
        status, message = _raw(shared_daemon, "POST", path, body)
        assert (status, said in message) == (400, True), message


@pytest.mark.parametrize("key", ["", "a b", "x" * 201])
def test_a_key_that_is_none(shared_daemon: Daemon, key: str) -> None:
    status, message = _raw(shared_daemon, "POST", "/sandboxes", b"{}", **{KEY_HEADER: key})
    assert status == 400
    assert f"the request's header {KEY_HEADER} is not acceptable: it has 1 to 200 printable" in message


@pytest.mark.parametrize(
    ("body", "said"),
    [({"files_b64": "AAAA"}, "the scorer's files are no tar"), ({"files_b64": ""}, "the scorer's files are no tar")],
)
def test_a_score_with_files_that_are_no_tar_does_not_begin(
    shared_daemon: Daemon, box: str, body: dict[str, Any], said: str
) -> None:
    status, answer = ask(shared_daemon, "POST", "/score", {"refs": ["box"], "argv": ["true"], **body})
    assert (status, said in answer["error"]["message"]) == (400, True), answer
