"""The daemon's end: hostile peers, limits, and what one connection may not do to another."""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from snapshotd.engine.protocol import agent_connection, agent_protocol, agent_wire
from snapshotd.engine.protocol.agent_handler import MESSAGE_LIMIT_BYTES, OPEN_CALL_LIMIT
from snapshotd.engine.protocol.agent_protocol import AgentServer
from snapshotd.errors import OutOfSpace
from snapshotd.kernel import turns
from snapshotd.types import Message
from tests import long

Connect = Callable[..., Any]
CALL = "0123456789abcdef" * 2


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not happen within a minute"
        time.sleep(0.002)


def begin(client: Any, call: str = CALL, **fields: Any) -> Any:
    return client.ask("call_begin", **{"call": call, "name": "t", "arguments": {}, **fields})


def test_a_call(connect: Connect, recorder: Any, server: AgentServer) -> None:
    seen: list[set[int]] = []
    recorder.at_end = lambda pid: seen.append(server.parked_pids())
    client = connect()
    assert begin(client) == {"id": 2, "key": CALL}
    answer = client.ask("call_end", call=CALL, status="done", result={"a": 1}, exit_code=3, parked=True)
    assert answer == {"id": 3, "snapshot": f"{1:032x}"}
    assert recorder.calls[CALL]["result"] == {"a": 1}
    assert recorder.calls[CALL]["exit_code"] == 3
    assert seen == [{os.getpid()}]
    assert server.parked_pids() == set()


def test_the_end_of_a_call_goes_first(connect: Connect, recorder: Any) -> None:
    seen: list[int] = []
    recorder.at_end = lambda pid: seen.append(turns._going_first)
    client = connect()
    begin(client)
    client.ask("call_end", call=CALL, status="done", result=None)
    client.ask("messages", offset=0, limit=1)  # the call has been left
    assert seen == [1]
    assert turns._going_first == 0


def test_who_does_not_park_does_not_count(connect: Connect, recorder: Any, server: AgentServer) -> None:
    seen: list[set[int]] = []
    recorder.at_end = lambda pid: seen.append(server.parked_pids())
    client = connect()
    begin(client)
    client.ask("call_end", call=CALL, status="done", result=None)
    assert seen == [set()]
    assert client.ask("checkpoint", call="e" * 32, name="x", parked=False)["snapshot"]


def test_two_connections_of_one_process_park_as_one(connect: Connect, recorder: Any, server: AgentServer) -> None:
    inside, leave = threading.Semaphore(0), [threading.Event(), threading.Event()]
    waiting = iter(leave)

    def wait(pid: int) -> None:
        mine = next(waiting)
        inside.release()
        assert mine.wait(60)

    recorder.at_end = wait
    clients = [connect(), connect()]
    threads = []
    for number, client in enumerate(clients):
        call = f"{number:032x}"
        begin(client, call)
        threads.append(
            threading.Thread(
                target=client.ask, args=("call_end",), kwargs={"call": call, "status": "done", "parked": True}
            )
        )
        threads[-1].start()
        assert inside.acquire(timeout=60)
    leave[0].set()
    threads[0].join(60)
    assert server.parked_pids() == {os.getpid()}
    leave[1].set()
    threads[1].join(60)
    assert server.parked_pids() == set()


def test_ending_what_did_not_begin_or_has_ended(connect: Connect, recorder: Any) -> None:
    mine, other = connect(), connect()
    assert mine.ask("call_end", call=CALL, status="done")["error"]["code"] == "NotFound"
    begin(mine)
    assert begin(mine)["error"]["code"] == "Conflict"
    assert other.ask("call_end", call=CALL, status="done")["error"]["code"] == "NotFound"
    assert "snapshot" in mine.ask("call_end", call=CALL, status="failed", error="E: x")
    assert mine.ask("call_end", call=CALL, status="done", body=b"1" * 100)["error"]["code"] == "NotFound"
    assert [event[0] for event in recorder.events] == ["begin", "end"]
    assert recorder.calls[CALL]["error"] == "E: x"


def test_a_body_that_is_refused_is_skipped(connect: Connect, recorder: Any) -> None:
    recorder.refuse["body_writer"] = OutOfSpace("The disk is full; free some space.")
    client = connect()
    begin(client)
    answer = client.ask("call_end", call=CALL, status="done", body=b"x" * 1_000_000)
    assert answer["error"] == {"code": "OutOfSpace", "message": "The disk is full; free some space."}
    del recorder.refuse["body_writer"]
    assert "snapshot" in client.ask("call_end", call=CALL, status="done", body=b'"' + b"x" * 1_000_000 + b'"')
    assert recorder.bodies[0].discarded


def test_a_body_that_is_cut_off_is_discarded(connect: Connect, recorder: Any) -> None:
    client = connect()
    begin(client)
    client.send(
        json.dumps({"id": 9, "op": "call_end", "call": CALL, "status": "done", "body_bytes": 1000}).encode() + b"\nhalf"
    )
    client.close()
    until(lambda: bool(recorder.bodies) and recorder.bodies[0].discarded)
    until(lambda: recorder.lost == [(os.getpid(), (CALL,))])
    assert ("end", "t", "done") not in recorder.events


MALFORMED = {
    "not JSON": b"hello\n",
    "nothing": b"\n",
    "not UTF-8": b'{"id":1,"op":"\xff"}\n',
    "an array": b"[1]\n",
    "no id": b'{"op":"messages"}\n',
    "a huge id": b'{"id":' + b"9" * 5000 + b',"op":"messages"}\n',
    "a big id": b'{"id":9007199254740993,"op":"messages"}\n',
    "a negative id": b'{"id":-1,"op":"messages"}\n',
    "a boolean id": b'{"id":true,"op":"messages"}\n',
    "an unknown op": b'{"id":1,"op":"rm"}\n',
    "an op of another type": b'{"id":1,"op":[]}\n',
    "a body where none belongs": b'{"id":1,"op":"messages","body_bytes":1}\nx',
    "a body of a wrong type": b'{"id":1,"op":"message","role":"u","body_bytes":"1"}\n',
    "a body that is negative": b'{"id":1,"op":"message","role":"u","body_bytes":-1}\n',
    "a body too large": b'{"id":1,"op":"message","role":"u","body_bytes":%d}\n' % (MESSAGE_LIMIT_BYTES + 1),
    "a result too large": b'{"id":1,"op":"call_end","call":"%s","status":"done","body_bytes":%d}\n'
    % (CALL.encode(), 65 << 20),
    "a line too long": b'{"id":1,"op":"message","content":"' + b"x" * (1 << 20) + b'"}\n',
    "a line without end": b"x" * ((1 << 20) + (64 << 10)),
    "too deep": b'{"id":1,"op":"message","role":"u","content":' + b"[" * 100 + b"]" * 100 + b"}\n",
    "much too deep": b'{"id":1,"op":"message","role":"u","content":' + b"[" * 300_000 + b"]" * 300_000 + b"}\n",
    "too many values": b'{"id":1,"op":"message","role":"u","content":[' + b"0," * 300_000 + b"0]}\n",
    "not a number": b'{"id":1,"op":"message","role":"u","content":NaN}\n',
    "an infinite number": b'{"id":1,"op":"message","role":"u","content":[1e999]}\n',
    "a lone surrogate": b'{"id":1,"op":"message","role":"u","content":{"\\udc80":1}}\n',
    "a role that moves the cursor": b'{"id":1,"op":"message","role":"\\u001b[2J","content":1}\n',
    "a message without content": b'{"id":1,"op":"message","role":"u"}\n',
    "a body that is not JSON": b'{"id":1,"op":"message","role":"u","body_bytes":2}\n[x',
    "a call id of another form": b'{"id":1,"op":"call_begin","call":"../../etc","name":"t"}\n',
    "a call id with a newline": b'{"id":1,"op":"call_begin","call":"%s\\n","name":"t"}\n' % CALL.encode(),
    "a call without name": b'{"id":1,"op":"call_begin","call":"%s"}\n' % CALL.encode(),
    "a name too long": b'{"id":1,"op":"call_begin","call":"%s","name":"%s"}\n' % (CALL.encode(), b"x" * 201),
    "an end with a strange status": b'{"id":1,"op":"call_end","call":"%s","status":"unknown"}\n' % CALL.encode(),
    "an exit code out of range": b'{"id":1,"op":"call_end","call":"%s","status":"done","exit_code":256}\n'
    % CALL.encode(),
    "a parked that is no boolean": b'{"id":1,"op":"checkpoint","name":"x","parked":1}\n',
    "an offset that is negative": b'{"id":1,"op":"messages","offset":-1}\n',
    "a side effect that is none": b'{"id":1,"op":"call_begin","call":"%s","name":"x","side_effect":"huge"}\n'
    % CALL.encode(),
    "a kind that is none": b'{"id":1,"op":"call_begin","call":"%s","name":"x","kind":"question"}\n' % CALL.encode(),
    "an empty key": b'{"id":1,"op":"call_begin","call":"%s","name":"x","key":""}\n' % CALL.encode(),
    "a number to approve": b'{"id":1,"op":"call_begin","call":"%s","name":"x","approve":1}\n' % CALL.encode(),
    "a compensation that is no command": b'{"id":1,"op":"call_begin","call":"%s","name":"x","compensate":{"argv":[1]}}\n'
    % CALL.encode(),
    "a task's status that is none": b'{"id":1,"op":"task","name":"x","status":"done"}\n',
    "dependencies that are a text": b'{"id":1,"op":"task","name":"x","status":"pending","depends":"y"}\n',
    "an approval without a question": b'{"id":1,"op":"approve","call":"%s"}\n' % CALL.encode(),
    "a version of a value that is a text": b'{"id":1,"op":"store_get","namespace":"n","key":"k","version":"1"}\n',
    "a search without a namespace": b'{"id":1,"op":"store_search"}\n',
    "a fact of no kind": b'{"id":1,"op":"fact","value":1}\n',
    "a state's key that is a number": b'{"id":1,"op":"state_set","key":1,"value":1}\n',
    "another version": b'{"id":1,"op":"hello","version":3}\n',
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_malformed_requests_end_their_connection_only(data: bytes, connect: Connect, recorder: Any) -> None:
    other = connect()
    client = connect()
    try:
        client.send(data)
    except (BrokenPipeError, ConnectionResetError):
        pass  # refused before it was all sent
    answer = client.read()
    assert answer["id"] is None
    assert set(answer["error"]) == {"code", "message"}
    assert len(answer["error"]["message"]) < 400
    try:
        assert client.read() is None
    except ConnectionResetError:
        pass  # closed with some of our bytes unread
    assert other.ask("message", role="user", content="still here") == {"id": 2}
    assert [entry.content for entry in recorder.conversation] == ["still here"]
    assert recorder.events == []


def test_hello_comes_first(connect: Connect) -> None:
    client = connect(hello=False)
    assert "hello" in client.ask("messages")["error"]["message"]
    assert client.read() is None


def test_a_half_line_keeps_nobody_waiting(connect: Connect) -> None:
    half = connect()
    half.send(b'{"id":2,"op":"mess')
    assert connect().ask("message", role="user", content=1) == {"id": 2}
    half.send(b'age","role":"user","content":2}\n')
    assert half.read() == {"id": 2}


def test_who_stalls_in_the_middle_is_cut_off(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_wire, "STALL_S", 0.05)
    idle, half = connect(), connect()
    half.send(b'{"id":2,"op":"mess')
    assert half.read() is None
    assert idle.ask("message", role="user", content=1) == {"id": 2}


def test_who_takes_no_answer_is_cut_off(
    connect: Connect, recorder: Any, server: AgentServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_wire, "STALL_S", 0.05)
    recorder.conversation.append(Message("u", "x" * 4_000_000))  # more than the socket holds
    connect().send(b'{"id":2,"op":"messages"}\n')
    until(lambda: not server._listening.connections)


def test_requests_may_come_at_once(connect: Connect) -> None:
    client = connect()
    client.send(b"".join(b'{"id":%d,"op":"message","role":"u","content":%d}\n' % (n, n) for n in range(500)))
    assert [client.read()["id"] for _ in range(500)] == list(range(500))


def test_text_that_is_no_unicode_is_handed_out_as_it_is(connect: Connect, recorder: Any) -> None:
    """The agent's requests cannot hold such; what a model said, or an older version recorded, can."""
    strange = {"\ud800": ["\udcff", "ü"]}
    recorder.conversation.append(Message("u", strange))
    recorder.values["key"] = strange
    assert connect().ask("messages")["body"] == [{"role": "u", "content": strange}]
    assert connect().ask("state")["body"] == {"key": strange}


def test_connections_are_limited(connect: Connect, server: AgentServer) -> None:
    clients = [connect() for _ in range(agent_protocol.CONNECTION_LIMIT)]
    refused = connect(hello=False)
    assert refused.read()["error"]["code"] == "LimitExceeded"
    assert refused.read() is None
    clients.pop().close()
    until(lambda: len(server._listening.connections) < agent_protocol.CONNECTION_LIMIT)
    assert connect().ask("messages")["body"] == []


def test_open_calls_are_limited(connect: Connect) -> None:
    client = connect()
    for number in range(OPEN_CALL_LIMIT):
        assert "error" not in begin(client, f"{number:032x}")
    assert begin(client)["error"]["code"] == "LimitExceeded"


def test_strangers_are_turned_away(recorder: Any, socket_path: Path) -> None:
    asked: list[int] = []

    def admit(pid: int) -> bool:
        asked.append(pid)
        return False

    with AgentServer(socket_path, lambda: recorder, admit), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(str(socket_path))
        assert json.loads(client.makefile().readline())["error"]["code"] == "NotPermitted"
    assert asked == [os.getpid()]
    assert recorder.pids == []


def test_defects_of_the_handler_are_contained(
    connect: Connect, recorder: Any, caplog: pytest.LogCaptureFixture
) -> None:
    recorder.refuse["message"] = ZeroDivisionError("a defect")
    client = connect()
    assert client.ask("message", role="user", content=1)["error"]["code"] == "InternalError"
    assert "ZeroDivisionError" in caplog.text
    del recorder.refuse["message"]
    assert client.ask("message", role="user", content=1) == {"id": 3}


def test_the_socket(recorder: Any, tmp_path: Path) -> None:
    path = tmp_path / "run" / "agent.sock"
    path.parent.mkdir()
    victim = tmp_path / "victim"
    victim.write_text("mine")
    victim.chmod(0o600)
    path.symlink_to(victim)  # what a container may leave there
    server = AgentServer(path, lambda: recorder, lambda pid: True)
    assert stat.S_ISSOCK(path.lstat().st_mode)
    assert stat.S_IMODE(path.lstat().st_mode) == 0o666
    assert (victim.read_text(), stat.S_IMODE(victim.stat().st_mode)) == ("mine", 0o600)
    path.unlink()
    path.mkdir()  # what a container may put there meanwhile
    server.close()
    server.close()
    assert path.is_dir()


def test_the_socket_of_a_killed_daemon_is_replaced(recorder: Any, socket_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
        left.bind(str(socket_path))
    with (
        AgentServer(socket_path, lambda: recorder, lambda pid: True),
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client,
    ):
        client.connect(str(socket_path))
    assert not socket_path.exists()


def test_a_missing_directory_is_the_callers_error(recorder: Any, tmp_path: Path) -> None:
    before = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        AgentServer(tmp_path / "none" / "agent.sock", lambda: recorder, lambda pid: True)
    (tmp_path / "agent.sock").mkdir()
    with pytest.raises(OSError, match=r"agent\.sock"):
        AgentServer(tmp_path / "agent.sock", lambda: recorder, lambda pid: True)
    assert set(threading.enumerate()) <= before[0]
    assert len(os.listdir("/proc/self/fd")) <= before[1]


def test_close_ends_idle_and_busy_connections(recorder: Any, socket_path: Path) -> None:
    server = AgentServer(socket_path, lambda: recorder, lambda pid: True)
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as idle,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as half,
    ):
        for client in (idle, half):
            client.connect(str(socket_path))
        half.send(b'{"id":')
        until(lambda: len(server._listening.connections) == 2)
        server.close()
        assert idle.recv(1) == b""
    assert not socket_path.exists()
    assert not any(thread.name.startswith("agent-") for thread in threading.enumerate())


LINES = st.one_of(
    st.binary(max_size=200),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    ).map(lambda value: json.dumps(value).encode()),
    st.fixed_dictionaries(
        {"id": st.integers(-1, 1 << 60), "op": st.sampled_from([*agent_connection._ACTIONS, "x"])},
        optional={
            "version": st.sampled_from([1, 2, "1", True]),
            "call": st.sampled_from([CALL, "f" * 32, 7]),
            "name": st.text(max_size=5) | st.integers(),
            "role": st.text(max_size=5),
            "content": st.text(),
            "arguments": st.lists(st.integers()),
            "status": st.sampled_from(["done", "failed", "unknown", None]),
            "result": st.none() | st.text(),
            "error": st.none() | st.text() | st.integers(),
            "exit_code": st.none() | st.integers(-1, 300),
            "parked": st.booleans() | st.integers(),
            "offset": st.integers(-1, 5),
            "kind": st.sampled_from(["tool", "model", "task", "now", "x", 1]),
            "side_effect": st.sampled_from(["local", "irreversible", "x", None]),
            "approve": st.booleans() | st.text(max_size=5) | st.integers(),
            "compensate": st.none()
            | st.dictionaries(st.sampled_from(["argv", "x"]), st.lists(st.text(max_size=5)) | st.integers()),
            "key": st.text(max_size=5) | st.integers(),
            "value": st.none() | st.text(max_size=5) | st.integers(),
            "depends": st.lists(st.text(max_size=5)) | st.text(max_size=5),
            "question": st.text(max_size=5),
            "expires_s": st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3),
            "namespace": st.text(max_size=5),
            "where": st.dictionaries(st.text(max_size=3), st.integers()) | st.integers(),
            "limit": st.integers(-1, 200),
            "stream": st.sampled_from(["stdout", "x"]),
            "data_b64": st.sampled_from(["", "eA==", "?", "e"]) | st.integers(),
            "body_bytes": st.integers(-1, 50),
        },
    ).map(lambda value: json.dumps(value).encode()),
)
HELLO = b'{"id":0,"op":"hello","version":2}'


@settings(max_examples=long.size(30, 150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(LINES, max_size=8), greet=st.booleans(), cut=st.integers(0, 20))
def test_garbage_never_harms_the_server_or_another(
    lines: list[bytes],
    greet: bool,
    cut: int,
    connect: Connect,
    recorder: Any,
    server: AgentServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = connect()
    data = b"\n".join([HELLO, *lines] if greet else lines) + b"\n"
    client = connect(hello=False)
    try:
        client.send(data[: len(data) - cut])
        client.socket.shutdown(socket.SHUT_WR)
    except (BrokenPipeError, ConnectionResetError):
        pass  # it had enough
    answers: list[Any] = []
    try:
        while (answer := client.read()) is not None:
            answers.append(answer)
    except ConnectionResetError:
        pass  # closed with some of our bytes unread
    assert all(answer["id"] is not None for answer in answers[:-1])
    assert not any(answer.get("error", {}).get("code") == "InternalError" for answer in answers)
    assert other.ask("message", role="user", content="unharmed") == {"id": 2}
    client.close()
    other.close()
    until(lambda: not server._listening.connections)
    assert server.parked_pids() == set()
    assert caplog.records == []
