"""Whatever connects is an attacker: nothing it sends costs more than its bounds, or disturbs another connection."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from snapshotd.errors import LimitExceeded, UsageError
from snapshotd.gateway import json_body, peer
from snapshotd.gateway.base import CONNECTION_LIMIT, Budget, RecordedReply, Upstream
from snapshotd.gateway.keys import KeyMask
from tests.unit.gateway.rig import BODIES, CHAT, DEADLINE_S, MESSAGES, Memory, ask, gateway, poll, served

SAYS = [{"text": "Hello."}]
NOWHERE = "http://127.0.0.1:9"


def recorded(*_: Any) -> RecordedReply:
    return RecordedReply(200, "application/json", b'{"recorded": true}')


def send(port: int, data: bytes, *, until_closed: bool = True) -> bytes:
    """Send bytes; what comes back until the connection is closed (or until something comes)."""
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as connection:
        connection.sendall(data)
        seen = b""
        try:
            while (piece := connection.recv(65536)) and until_closed:
                seen += piece
            return seen + piece
        except ConnectionResetError:
            return seen


def head(path: str, *lines: str) -> bytes:
    return "\r\n".join((f"POST {path} HTTP/1.1", "host: x", *lines, "", "")).encode()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),  # no host
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00\r\n" * 20, b"400"),  # TLS
        (head(CHAT, "x: " + "y" * 200_000), b"431"),
        (head(CHAT, "content-length: 12x"), b"400"),
        (head(CHAT, "content-length: 1", "content-length: 2"), b"400"),
        (head(CHAT, "transfer-encoding: gzip"), b"501"),
        (head(CHAT, "transfer-encoding: chunked") + b"zz\r\n", b"400"),
        (head(CHAT, f"content-length: {64 << 20}1"), b"413"),
    ],
)
def test_what_is_not_a_request_is_refused_and_closed(data: bytes, status: bytes) -> None:
    memory = Memory(on_turn=recorded)
    with gateway(NOWHERE, memory) as server:
        answer = send(server.port, data)
        assert answer.startswith(b"HTTP/1.1 " + status), answer
        assert b"x-should-retry: false" in answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"].endswith(".")
        assert ask(server.port, CHAT, BODIES[CHAT]).value == {"recorded": True}
    assert len(memory.turns) == 1


@pytest.mark.parametrize(
    "target",
    [
        "/",
        "/v1",
        "/v1/files",
        "/v1/chat/completions/",
        "//v1/chat/completions",
        "/v1/models/../files",
        "/v1/models/%2e%2e/files",
        "/v1/models/..",
        "/v1/chat/completions#x",
        "http://elsewhere/v1/chat/completions",
        "/v1/../v1/chat/completions",
        "/v1/fine_tuning/jobs",
        "/control/requests",
        "/v1/responses/resp_1",
        "/v1/models/a\\..\\b",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_with_the_daemons_key_only_models_can_be_used(method: str, target: str) -> None:
    with served(SAYS) as (server, provider, memory):
        answer = send(
            server.port,
            f"{method} {target} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{{}}".encode(),
        )
        assert answer.startswith(b"HTTP/1.1 404 ")
        assert (provider.requests, memory.turns) == ([], [])


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b'"x"', 400),
        (b'{"model": "m", "messages": "\xff"}', 400),
        (b'{"model": "m", "x": NaN}', 400),
        (b'{"model": "m", "x": 1e999}', 400),
        (b'{"x": ' + b"9" * 5000 + b"}", 400),
        (b"[" * 100_000, 413),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, 413),
        (b'{"messages": [' + b"[]," * 1_200_000 + b"[]]}", 413),
    ],
)
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_body_that_means_nothing_is_refused(path: str, body: bytes, status: int) -> None:
    with gateway(NOWHERE, memory := Memory()) as server:
        answer = ask(server.port, path, body)
        assert answer.status == status
        assert answer.value["error"]["message"].endswith(".")
        assert answer.headers["x-should-retry"] == "false"
    assert memory.turns == []


def test_a_body_beyond_the_limit_is_refused_however_it_is_sent() -> None:
    with gateway(NOWHERE, Memory(on_turn=recorded), body_limit_bytes=1000) as server:
        assert b" 413 " in send(server.port, head(CHAT, "content-length: 1001") + b"x" * 1001)
        assert b" 413 " in send(server.port, head(CHAT, "transfer-encoding: chunked") + b"3e9\r\n" + b"x" * 1001)
        assert ask(server.port, CHAT, BODIES[CHAT]).status == 200


def test_long_texts_are_not_many_values() -> None:
    text = "a,b:[{" * 300_000 + '"' + "\\"
    with gateway(NOWHERE, memory := Memory(on_turn=recorded)) as server:
        assert ask(server.port, CHAT, {"model": "m", "messages": [{"role": "user", "content": text}]}).status == 200
    assert memory.turns[0].new_messages()[0].content == text


def test_a_lone_surrogate_is_repaired_in_the_record() -> None:
    with gateway(NOWHERE, memory := Memory(on_turn=recorded)) as server:
        body = b'{"model": "m", "messages": [{"role": "user", "content": "a\\ud83d b\\ud83d\\ude00"}]}'
        assert ask(server.port, CHAT, body).status == 200
    assert memory.turns[0].new_messages()[0].content == "a\ufffd b\U0001f600"
    assert len(memory.turns[0].digest) == 32


@pytest.mark.parametrize(
    "data", [b"", b"POST ", head(CHAT, "content-length: 10"), head(CHAT, "content-length: 10") + b"12345"]
)
def test_a_peer_that_dawdles_is_cut_off(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    for limit in ("IDLE_S", "HEAD_S", "STALL_S"):
        monkeypatch.setattr(peer, limit, 0.1)
    with gateway(NOWHERE, memory := Memory()) as server:
        assert send(server.port, data) == b""
    assert memory.turns == []


def test_a_head_that_trickles_has_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "HEAD_S", 0.5)
    with (
        gateway(NOWHERE, Memory()) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S) as connection,
    ):
        connection.sendall(b"POST /")
        deadline = time.monotonic() + DEADLINE_S
        with pytest.raises(OSError):  # noqa: PT012 - each piece within the time, all of them not
            while time.monotonic() < deadline:
                connection.sendall(b"x")
                time.sleep(0.02)


def test_an_agent_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "STALL_S", 1.0)
    big = RecordedReply(200, "text/plain", b"x" * (32 << 20))
    with (
        gateway(NOWHERE, memory := Memory(on_turn=lambda request: big)) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S) as connection,
    ):
        body = json.dumps(BODIES[CHAT]).encode()
        connection.sendall(head(CHAT, f"content-length: {len(body)}") + body)
        poll(lambda: memory.turns and not [thread for thread in threading.enumerate() if thread.name == "gateway"])


def test_connections_are_bounded_and_come_back() -> None:
    with gateway(NOWHERE, Memory(on_turn=recorded)) as server:
        idle = [
            socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S) for _ in range(CONNECTION_LIMIT)
        ]
        poll(lambda: len([thread for thread in threading.enumerate() if thread.name == "gateway"]) == CONNECTION_LIMIT)
        with socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S) as connection:
            assert connection.recv(65536).startswith(b"HTTP/1.1 503 ")
        for connection in idle:
            connection.close()
        poll(lambda: len([thread for thread in threading.enumerate() if thread.name == "gateway"]) < CONNECTION_LIMIT)
        assert ask(server.port, CHAT, BODIES[CHAT]).status == 200


def test_memory_is_shared_and_given_back() -> None:
    budget = Budget(100_000)
    release, inside = threading.Event(), threading.Event()

    def slow(*_: Any) -> RecordedReply:
        inside.set()
        assert release.wait(DEADLINE_S)
        return recorded()

    large = {"model": "m", "messages": [{"role": "user", "content": "x" * 20_000}]}
    with gateway(NOWHERE, memory := Memory(on_turn=slow), budget=budget) as server:
        first = threading.Thread(target=ask, args=(server.port, CHAT, large))
        first.start()
        assert inside.wait(DEADLINE_S)
        refused = ask(server.port, CHAT, large)
        assert (refused.status, "memory" in refused.value["error"]["message"]) == (503, True)
        assert "x-should-retry" not in refused.headers
        assert len(memory.turns) == 1
        release.set()
        first.join(DEADLINE_S)
        assert poll(lambda: ask(server.port, CHAT, large).status == 200)
    assert budget.take(100_000)


def test_many_tiny_chunks_are_one_body() -> None:
    body = json.dumps(BODIES[CHAT]).encode()
    chunks = b"".join(b"1\r\n" + body[at : at + 1] + b"\r\n" for at in range(len(body)))
    with gateway(NOWHERE, memory := Memory(on_turn=recorded)) as server:
        data = head(CHAT, "transfer-encoding: chunked", "connection: close") + chunks + b"0\r\n\r\n"
        assert b'{"recorded": true}' in send(server.port, data)
    assert memory.turns[0].model == "m"


def test_other_ways_to_speak_http() -> None:
    """Requests sent ahead, a client that waits to be asked for its body, HTTP/1.0, and HEAD, which asks if there is a
    server."""
    body = json.dumps(BODIES[CHAT]).encode()
    length = f"content-length: {len(body)}"
    with gateway(NOWHERE, Memory(on_turn=recorded)) as server:
        assert (
            send(server.port, (head(CHAT, length) + body) * 3 + head(CHAT, length, "connection: close") + body).count(
                b"recorded"
            )
            == 4
        )
        asked = b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n" + head(CHAT, length, "connection: close") + body
        refused, _, rest = send(server.port, asked).partition(b"\r\n\r\n")
        assert refused.startswith(b"HTTP/1.1 404 ")
        assert rest.startswith(b"HTTP/1.1 200 ")
        assert b"recorded" in send(server.port, f"POST {CHAT} HTTP/1.0\r\n{length}\r\n\r\n".encode() + body)
        with socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S) as connection:
            connection.sendall(head(CHAT, length, "expect: 100-continue"))
            assert connection.recv(65536).startswith(b"HTTP/1.1 100 ")
            connection.sendall(body)
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Upstream("ftp://host"),
        lambda: Upstream("host/v1"),
        lambda: Upstream("https://user:pw@host"),
        lambda: Upstream("https://h/v1?key=1"),
        lambda: Upstream("https://"),
        lambda: Upstream("https://h:port"),
        lambda: Upstream("https://h", "key\r\nx: y"),
        lambda: Upstream("https://h", None, {"a": "b\nc"}),
        lambda: Upstream("https://h", "schlüssel"),
    ],
)
def test_a_provider_that_cannot_be_is_refused(make: Callable[[], Upstream]) -> None:
    with pytest.raises(UsageError):
        make()


def test_keys_are_not_shown() -> None:
    assert "sk-secret" not in repr(Upstream("https://h", "sk-secret", {"authorization": "sk-secret"}))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    parts=st.lists(
        st.sampled_from([b"sk-abcabcabd", b"sk-abcab", b"cabd", b"s", b"xyz", b"other-token", b"Bearer "]), max_size=12
    ),
    size=st.integers(1, 15),
)
def test_a_key_is_masked_wherever_the_pieces_end(parts: list[bytes], size: int) -> None:
    upstream = Upstream("https://h", "sk-abcabcabd", {"X-Auth": "Bearer other-token", "x-title": "xyzxyzxyz"})
    data = b"".join(parts)
    mask, shown = KeyMask(upstream), b""
    for start in range(0, len(data), size):
        shown += mask.feed(data[start : start + size])
    shown += mask.flush()
    assert shown == data.replace(b"sk-abcabcabd", b"*" * 12).replace(b"other-token", b"*" * 11)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        max_leaves=10,
        extend=lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_values_are_never_counted_too_few(value: Any) -> None:
    def count(node: Any) -> int:
        children = [*node, *node.values()] if isinstance(node, dict) else node if isinstance(node, list) else []
        return 1 + sum(map(count, children))

    body = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    assert json_body.count_values(body) >= count(value)
    try:
        parsed = json_body.parse(body)
    except (UsageError, LimitExceeded):
        return
    assert parsed == value or "\ufffd" in json.dumps(parsed, ensure_ascii=False)
