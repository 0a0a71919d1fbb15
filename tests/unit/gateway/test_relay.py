"""What passes through: everything as the provider sent it, when it sent it, and told to the handler before the agent
can act on it."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from snapshotd.errors import Conflict, NotPermitted, OutOfSpace
from snapshotd.gateway import forward
from snapshotd.gateway.base import RecordedReply, Timeouts, TurnReply, TurnRequest, Upstream
from snapshotd.testing.provider import ScriptedProvider
from tests.unit.gateway.rig import (
    AGENT_KEY,
    BODIES,
    CHAT,
    DEADLINE_S,
    GEMINI,
    KEY,
    MESSAGES,
    RESPONSES,
    Memory,
    ask,
    gateway,
    poll,
    port_of,
    raw_upstream,
    served,
    spelled,
    streamed,
)

PATHS = [CHAT, RESPONSES, MESSAGES, GEMINI]
SAYS = [{"text": "Hello there, this is a longer text.", "calls": [{"name": "shell", "arguments": {"command": "ls"}}]}]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_passes_byte_for_byte_and_is_read(path: str, stream: bool) -> None:
    with served(SAYS) as (server, provider, memory):
        body = {**BODIES[path], "stream": stream}
        direct = ask(port_of(provider.url), path, body)
        through = ask(server.port, path, body)
        assert (through.status, through.body) == (200, direct.body)
        assert through.headers["content-type"] == direct.headers["content-type"]
        reply = memory.reply
        assert reply.complete
        assert not reply.failed
        assert reply.body == direct.body
        assert reply.body_bytes == len(direct.body)
        assert reply.content_type.startswith("text/event-stream" if stream else "application/json")
        [call] = reply.content.calls
        assert (call.name, call.arguments) == ("shell", {"command": "ls"})
        assert path == GEMINI or call.id == "call_0_0"
        assert reply.content.model == "m"
        stops = {CHAT: "tool_calls", RESPONSES: "completed", MESSAGES: "tool_use", GEMINI: "STOP"}
        assert reply.content.stop_reason == stops[path]
        if not stream or path != CHAT:  # chat counts only for those who ask
            assert (
                reply.content.usage.input_tokens,
                reply.content.usage.output_tokens,
                reply.content.usage.cached_tokens,
            ) == (10, 5, 0)


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_arrives_while_it_is_made(path: str) -> None:
    """The first two events are there while the provider waits."""
    with served([{"text": "Hello and good morning", "hold": "gate", "hold_after": 2}]) as (server, provider, memory):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE_S)
        target, body = spelled(path, streamed(path))
        connection.request("POST", target, json.dumps(body))
        response = connection.getresponse()
        begun = b""
        while begun.count(b"\n\n") < 2:
            begun += response.read1(65536)
        assert memory.replies == []
        provider.release("gate")
        whole = begun + response.read()
        connection.close()
        assert whole == memory.reply.body


def read_all(connection: socket.socket) -> bytes:
    """Everything that comes until nothing comes for the socket's timeout."""
    seen = b""
    try:
        while data := connection.recv(65536):
            seen += data
    except TimeoutError:
        return seen
    raise AssertionError("the connection was closed")


@pytest.mark.parametrize("path", PATHS)
def test_the_reply_is_told_before_the_agent_can_act_on_it(path: str) -> None:
    with served(SAYS) as (server, _, memory):
        told, go_on = threading.Event(), threading.Event()

        def on_reply(reply: TurnReply) -> None:
            told.set()
            assert go_on.wait(DEADLINE_S)

        memory.on_reply = on_reply
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S)
        target, fields = spelled(path, streamed(path))
        body = json.dumps(fields).encode()
        connection.sendall(f"POST {target} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        assert told.wait(DEADLINE_S)
        connection.settimeout(0.2)
        seen = read_all(connection)
        ends = (b"[DONE]", b'finish_reason": "', b"message_stop", b'stop_reason": "', b"response.completed")
        for end in (*ends, b"functionCall"):
            assert end not in seen
        go_on.set()
        connection.settimeout(DEADLINE_S)
        while not seen.endswith(b"0\r\n\r\n"):
            data = connection.recv(65536)
            assert data
            seen += data
        connection.close()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_the_handler_works_while_the_provider_thinks(path: str, stream: bool) -> None:
    """The provider has the whole request, and nothing of its reply is passed on before the handler is ready."""
    ready = threading.Event()
    with served([{**SAYS[0], "hold": "thinks"}]) as (server, provider, memory):
        at_the_provider: list[int] = []

        def on_sent() -> None:
            at_the_provider.append(len(poll(lambda: provider.requests)))
            provider.release("thinks")
            assert ready.wait(DEADLINE_S)

        memory.on_sent = on_sent
        answers: list[Any] = []
        agent = threading.Thread(
            target=lambda: answers.append(ask(server.port, path, {**BODIES[path], "stream": stream}))
        )
        agent.start()
        poll(lambda: at_the_provider)
        assert not answers
        ready.set()
        agent.join(DEADLINE_S)
        assert answers[0].status == 200
        assert at_the_provider == [1]
        assert memory.reply.complete


def test_a_request_that_the_provider_never_gets_is_told_all_the_same() -> None:
    memory, told = Memory(), []
    memory.on_sent = lambda: told.append(len(memory.replies))
    with gateway("http://127.0.0.1:1", memory) as server:
        assert ask(server.port, CHAT, BODIES[CHAT]).status == 502
    assert told == [0]
    assert memory.reply.failed


def test_a_request_that_cannot_be_recorded_has_no_reply() -> None:
    def on_sent() -> None:
        raise OutOfSpace("The disk is full.")

    with served(SAYS * 2) as (server, _, memory):
        memory.on_sent = on_sent
        answer = ask(server.port, CHAT, BODIES[CHAT])
        assert (answer.status, "The disk is full." in str(answer.body)) == (OutOfSpace.http_status, True)
        assert memory.replies == []
        memory.on_sent = lambda: None
        assert ask(server.port, CHAT, BODIES[CHAT]).status == 200


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("stream", "cut_after"), [(True, 0), (True, 3), (False, 20)])
def test_a_reply_is_cut_where_the_provider_cut_it(path: str, stream: bool, cut_after: int) -> None:
    with served([{"text": "Hello there, and good morning", "cut_after": cut_after}]) as (server, provider, memory):
        body = {**BODIES[path], "stream": stream}
        direct = ask(port_of(provider.url), path, body)
        assert direct.cut
        through = ask(server.port, path, body)
        assert through == direct or (through.cut, through.body, through.status) == (True, direct.body, 200)
        assert memory.reply.failed
        assert not memory.reply.complete
        assert "cut" in (memory.reply.error or "")
        assert memory.reply.body == direct.body
        if stream and cut_after == 3 and path != RESPONSES:
            [message] = memory.reply.content.messages
            assert message.role == "assistant"


def test_a_stream_without_its_end_is_incomplete() -> None:
    """A provider that stops in the middle and says that this was all."""

    def answer(connection: socket.socket, head: bytes) -> None:
        event = b'data: {"choices": [{"index": 0, "delta": {"content": "Hal"}}]}\n\n'
        connection.sendall(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n%s" % (len(event), event)
        )

    memory = Memory()
    with raw_upstream(answer) as url, gateway(url, memory) as server:
        through = ask(server.port, CHAT, streamed(CHAT))
        assert not through.cut
        assert (memory.reply.complete, memory.reply.error) == (
            False,
            "the provider ended the stream before its last event",
        )
        assert memory.reply.content.messages[0].content == "Hal"


def test_a_stream_that_said_its_end_is_complete_though_the_connection_stays() -> None:
    done, release = threading.Event(), threading.Event()

    def answer(connection: socket.socket, head: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: [DONE]\n\n")
        assert release.wait(DEADLINE_S)
        done.set()

    memory = Memory()
    with raw_upstream(answer) as url, gateway(url, memory) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE_S)
        connection.request("POST", CHAT, json.dumps(streamed(CHAT)))
        assert connection.getresponse().read1(100) == b"data: [DONE]\n\n"
        assert memory.reply.complete
        assert not done.is_set()
        release.set()
        connection.close()


@pytest.mark.parametrize("path", PATHS)
def test_errors_and_their_headers_pass(path: str) -> None:
    headers = {
        "retry-after": "7",
        "x-ratelimit-remaining-requests": "0",
        "anthropic-ratelimit-requests-reset": "soon",
        "set-cookie": "a=b",
        "openai-organization": "org-secret",
        "x-should-retry": "true",
    }
    with served([{"status": 429, "type": "rate_limit_error", "message": "too fast", "headers": headers}]) as (
        server,
        provider,
        memory,
    ):
        direct = ask(port_of(provider.url), path, BODIES[path])
        through = ask(server.port, path, BODIES[path])
        assert (through.status, through.body) == (429, direct.body)
        for name in (
            "retry-after",
            "x-ratelimit-remaining-requests",
            "anthropic-ratelimit-requests-reset",
            "x-should-retry",
        ):
            assert through.headers[name] == headers[name]
        assert not {"set-cookie", "openai-organization"} & set(through.headers)
        assert (memory.reply.status, memory.reply.complete, memory.reply.error) == (
            429,
            True,
            "rate_limit_error: too fast",
        )
        assert memory.reply.failed


def message_of(path: str, value: dict[str, Any]) -> str:
    """The message of an error, in the shape that the path's clients expect."""
    if path == MESSAGES:
        assert value["type"] == "error"
    return str(value["error"]["message"])


@pytest.mark.parametrize("path", PATHS)
def test_no_answer_is_a_502(path: str) -> None:
    with served([{"drop": True}]) as (server, _, memory):
        through = ask(server.port, path, BODIES[path])
        assert through.status == 502
        assert "cannot be reached" in message_of(path, through.value)
        assert "x-should-retry" not in through.headers
        assert (memory.reply.status, memory.reply.complete) == (502, False)


def test_certificates_that_cannot_be_read_are_a_502(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable() -> None:
        raise FileNotFoundError(2, "no such file", "/certificates")

    monkeypatch.setattr(forward, "_tls", unreadable)
    with served(SAYS) as (server, provider, memory):
        assert ask(server.port, CHAT, BODIES[CHAT]).status == 502
        assert "/certificates" in (memory.reply.error or "")
        assert provider.requests == []


def test_a_refused_connection_is_a_502() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    memory = Memory()
    with gateway(f"http://127.0.0.1:{port}", memory) as server:
        assert ask(server.port, CHAT, BODIES[CHAT]).status == 502
        assert ask(server.port, "/v1/models", method="GET").status == 502
    assert memory.reply.failed


def test_silence_is_a_504() -> None:
    with served([{"text": "late", "hold": "gate"}], timeouts=Timeouts(read_s=0.2)) as (server, provider, memory):
        through = ask(server.port, MESSAGES, BODIES[MESSAGES])
        assert through.status == 504
        assert through.value["error"]["type"] == "timeout_error"
        assert "did not answer in time" in (memory.reply.error or "")
        provider.release("gate")


def test_silence_within_a_stream_cuts_it() -> None:
    with served([{"text": "late", "hold": "gate", "hold_after": 2}], timeouts=Timeouts(read_s=3)) as (
        server,
        provider,
        memory,
    ):
        through = ask(server.port, CHAT, streamed(CHAT))
        assert through.cut
        assert through.body.count(b"\n\n") == 2
        assert "sent nothing" in (memory.reply.error or "")
        provider.release("gate")


def test_without_a_provider_only_what_is_recorded_can_be_had() -> None:
    memory = Memory()
    with gateway("http://127.0.0.1:9", memory, upstreams={}) as server:
        through = ask(server.port, CHAT, BODIES[CHAT])
        assert (through.status, through.headers["x-should-retry"]) == (404, "false")
        assert "No provider is configured" in through.value["error"]["message"]
        memory.on_turn = lambda request: RecordedReply(200, "application/json", b'{"recorded": true}')
        assert ask(server.port, CHAT, BODIES[CHAT]).value == {"recorded": True}
        assert len(memory.replies) == 1


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_recorded_reply_is_sent_again_without_the_provider(path: str, stream: bool) -> None:
    with served(SAYS) as (server, provider, memory):
        body = {**BODIES[path], "stream": stream}
        first = ask(server.port, path, body)
        reply = memory.reply
        assert reply.body is not None
        memory.on_turn = lambda request: RecordedReply(reply.status, reply.content_type, reply.body or b"")
        again = ask(server.port, path, body)
        assert (again.status, again.body, again.headers["content-type"]) == (
            200,
            first.body,
            first.headers["content-type"],
        )
        assert len(provider.requests) == 1
        assert len(memory.replies) == 1
        assert memory.turns[0].digest == memory.turns[1].digest
        memory.on_turn = lambda request: RecordedReply(
            reply.status, reply.content_type, (reply.body or b"")[:30], complete=False
        )
        assert ask(server.port, path, body).cut


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("error", "status"), [(Conflict("It differs."), 409), (NotPermitted("It is denied."), 403)])
def test_a_handlers_refusal_has_the_providers_shape(path: str, error: Exception, status: int) -> None:
    def refuse(request: TurnRequest) -> RecordedReply | None:
        raise error

    with served(SAYS) as (server, provider, memory):
        memory.on_turn = refuse
        through = ask(server.port, path, BODIES[path])
        assert through.status == status
        assert message_of(path, through.value) == str(error)
        assert through.headers["x-should-retry"] == "false"
        assert provider.requests == []
        assert memory.replies == []


def test_a_reply_that_cannot_be_recorded_is_kept_from_the_agent() -> None:
    def fail(reply: TurnReply) -> None:
        raise OutOfSpace("The disk is full.")

    with served(SAYS) as (server, _, memory):
        memory.on_reply = fail
        plain = ask(server.port, CHAT, BODIES[CHAT])
        assert (plain.status, plain.value["error"]["message"]) == (507, "The disk is full.")
        cut = ask(server.port, CHAT, streamed(CHAT))
        assert cut.cut
        assert b"[DONE]" not in cut.body


def test_a_defect_of_the_handler_is_an_error_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    with served(SAYS) as (server, _, memory):
        memory.on_turn = lambda request: RecordedReply(200, "text/plain", b"x", headers=(("bad header\n", "x"),))
        through = ask(server.port, CHAT, BODIES[CHAT])
        assert through.status == 500
        assert "details" in through.value["error"]["message"]
        assert "a request to the gateway" in caplog.text
        caplog.clear()


def test_the_providers_key_goes_out_and_never_comes_in() -> None:
    with served(SAYS) as (server, provider, _):
        for path in PATHS:
            ask(
                server.port,
                path,
                BODIES[path],
                {
                    "x-api-key": AGENT_KEY,
                    "x-goog-api-key": AGENT_KEY,
                    "x-goog-user-project": "theirs",
                    "openai-organization": "theirs",
                    "cookie": "a=b",
                    "connection": "x-hop",
                    "x-hop": "1",
                    "anthropic-beta": "kept",
                },
            )
        chat, responses, messages, gemini = (request["headers"] for request in provider.requests)
        assert chat["authorization"] == responses["authorization"] == f"Bearer {KEY}"
        assert messages["x-api-key"] == KEY
        assert "authorization" not in messages
        assert gemini["x-goog-api-key"] == KEY
        for headers in (chat, responses, messages, gemini):
            assert AGENT_KEY not in json.dumps(headers)
            assert not {"openai-organization", "cookie", "x-hop", "x-goog-user-project"} & set(headers)
            assert headers["anthropic-beta"] == "kept"
            assert headers["host"].startswith("127.0.0.1")


@pytest.mark.parametrize("kind", [b"text/event-stream", b"application/json"])
def test_a_key_that_the_provider_repeats_is_masked(kind: bytes) -> None:
    key = KEY.encode()

    def answer(connection: socket.socket, head: bytes) -> None:
        assert key in head
        connection.sendall(
            b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: " + kind + b'\r\n\r\ndata: {"you sent": "' + key[:9]
        )
        connection.sendall(key[9:] + b'"}\n\n' + key[:5])

    memory = Memory()
    with raw_upstream(answer) as url, gateway(url, memory) as server:
        through = ask(server.port, CHAT, streamed(CHAT))
        assert through.body == b'data: {"you sent": "' + b"*" * len(key) + b'"}\n\n' + key[:5]
        assert memory.reply.body == through.body


def test_headers_are_in_no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    with served([{"text": "x", "headers": {"set-cookie": "secret-cookie", "x-request-id": "secret-request"}}]) as (
        server,
        _,
        _,
    ):
        assert ask(server.port, CHAT, BODIES[CHAT], {"x-mine": "secret-header"}).status == 200
    assert "secret" not in caplog.text
    assert KEY not in caplog.text


def test_an_own_header_of_the_daemon_wins() -> None:
    own = {"X-Title": "ours", "Authorization": "Basic abc"}
    with (
        ScriptedProvider(SAYS) as provider,
        gateway(provider.url, Memory(), upstreams={"openai": Upstream(provider.url, None, own)}) as server,
    ):
        ask(server.port, CHAT, BODIES[CHAT], {"x-title": "theirs"})
        assert (provider.requests[0]["headers"]["x-title"], provider.requests[0]["headers"]["authorization"]) == (
            "ours",
            "Basic abc",
        )


def test_the_daemon_may_ask_for_another_model() -> None:
    """The record has the agent's own: a replay compares what the agent says."""
    memory = Memory()
    with (
        ScriptedProvider([{"text": "yes"}]) as provider,
        gateway(provider.url, memory, upstreams={"openai": Upstream(provider.url, None, model="small-ö")}) as server,
    ):
        body = {**BODIES[CHAT], "metadata": {"note": "\u2028ä"}}
        assert ask(server.port, CHAT, body).status == 200
        sent = provider.requests[0]["body"]
    assert sent["model"] == "small-ö"
    ((request, _),) = memory.replies
    assert (request.model, request.sent_as) == (BODIES[CHAT]["model"], "small-ö")


def test_a_reply_beyond_the_limit_passes_and_cannot_be_replayed() -> None:
    with served([{"text": "long " * 100}], replay_limit_bytes=200) as (server, provider, memory):
        for stream in (False, True):
            body = {**BODIES[CHAT], "stream": stream}
            assert ask(server.port, CHAT, body).body == ask(port_of(provider.url), CHAT, body).body
        (_, plain), (_, stream_reply) = memory.replies
        assert (plain.complete, plain.body) == (True, None)
        assert "too long" in (plain.error or "")
        assert stream_reply.body is None


def test_a_long_stream_is_read_though_it_cannot_be_replayed() -> None:
    with served([{"text": "long " * 1000}], replay_limit_bytes=2000) as (server, _, memory):
        ask(server.port, MESSAGES, streamed(MESSAGES))
        assert memory.reply.complete
        assert memory.reply.content.messages[0].content == [{"type": "text", "text": "long " * 1000}]


def test_what_is_no_turn_is_passed_on_and_not_told() -> None:
    with served(SAYS) as (server, provider, memory):
        assert ask(server.port, "/v1/models", method="GET").value["data"][0]["id"] == "scripted"
        assert ask(server.port, "/v1/models/no-such", method="GET").status == 404
        assert ask(server.port, "/v1/embeddings", {"model": "e", "input": "x"}).value["data"][0]["embedding"] == [
            0.5,
            0.25,
        ]
        assert ask(server.port, "/v1/messages/count_tokens?beta=true", BODIES[MESSAGES]).value["input_tokens"] > 0
        assert ask(server.port, "/v1/models", method="GET", headers={"anthropic-version": "2023-06-01"}).status == 200
        assert [request["path"] for request in provider.requests][-2:] == [
            "/v1/messages/count_tokens?beta=true",
            "/v1/models",
        ]
        assert provider.requests[-1]["headers"]["x-api-key"] == KEY
        assert memory.turns == []


@pytest.mark.parametrize(
    ("base", "path"),
    [
        ("{}/v1", CHAT),
        ("{}/v1/", CHAT),
        ("{}", CHAT),
        ("{}/", CHAT),
        ("{}", MESSAGES),
        ("{}/", MESSAGES),
        ("{}/v1", MESSAGES),
        ("{}", GEMINI),
        ("{}/", GEMINI),
        ("{}/v1beta", GEMINI),
    ],
)
def test_a_base_url_may_be_written_in_any_way(base: str, path: str) -> None:
    memory = Memory()
    with ScriptedProvider(SAYS) as provider:
        upstream = Upstream(base.format(provider.url), KEY)
        kinds = dict.fromkeys(("openai", "anthropic", "gemini"), upstream)
        with gateway(provider.url, memory, upstreams=kinds) as server:
            assert ask(server.port, path, BODIES[path]).status == 200


def test_an_agent_that_hangs_up_ends_the_request_to_the_provider() -> None:
    with served([{"text": "late", "hold": "gate"}]) as (server, provider, memory):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE_S)
        connection.request("POST", CHAT, json.dumps(BODIES[CHAT]))
        poll(lambda: provider.requests)
        connection.close()
        assert memory.reply.failed
        assert "hung up" in (memory.reply.error or "")
        provider.release("gate")


def test_close_ends_what_waits_and_tells_the_handler() -> None:
    with served([{"text": "late", "hold": "gate"}]) as (server, provider, memory):
        answers: list[Any] = []

        def agent() -> None:
            try:
                answers.append(ask(server.port, CHAT, BODIES[CHAT]))
            except (OSError, http.client.HTTPException) as exc:
                answers.append(exc)

        thread = threading.Thread(target=agent)
        thread.start()
        poll(lambda: provider.requests)
        server.close()
        server.close()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        assert len(answers) == 1
        assert not memory.reply.complete
        assert "closed" in (memory.reply.error or "")
        provider.release("gate")


def test_a_handler_may_close_the_gateway() -> None:
    with served(SAYS) as (server, provider, memory):

        def close(request: TurnRequest) -> None:
            server.close()

        memory.on_turn = close
        memory.on_reply = lambda reply: time.sleep(0.2)  # who closes it a second time waits for this thread
        with pytest.raises((OSError, http.client.HTTPException)):
            ask(server.port, CHAT, BODIES[CHAT])
        assert provider.requests == []
        assert memory.reply.failed


def test_one_connection_carries_many_turns() -> None:
    with served(SAYS) as (server, provider, memory):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE_S)
        for _ in range(5):
            connection.request("POST", CHAT, json.dumps(BODIES[CHAT]))
            assert connection.getresponse().read()
        connection.close()
        assert len(memory.replies) == 5
        assert len(provider.requests) == 5


def test_a_websocket_is_told_to_come_over_http() -> None:
    """The Codex client then uses HTTP at once; at a 404 it tries the WebSocket again for seven seconds."""
    with served([{"text": "hi"}]) as (server, _, memory):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        headers = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
        connection.request("GET", "/v1/responses", headers=headers)
        answer = connection.getresponse()
        answer.read()
        assert (answer.status, answer.headers["upgrade"]) == (426, "HTTP/1.1")
        connection.close()
        assert ask(server.port, RESPONSES, BODIES[RESPONSES]).status == 200
        assert len(memory.turns) == 1


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_a_call_in_a_stream_is_recorded_before_the_agent_can_make_it(path: str) -> None:
    """Claude Code starts a tool when its block is complete, before the reply has ended."""
    calls = [{"name": "first", "arguments": {}}, {"name": "second", "arguments": {}}]
    ends = {RESPONSES: b"response.output_item.done", MESSAGES: b"content_block_stop"}[path]
    script = [{"calls": calls, "hold": "gate", "hold_after": 8 if path == MESSAGES else 9}]
    body = json.dumps({**BODIES[path], "stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: g\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    with (
        served(script) as (server, at, memory),
        socket.create_connection(("127.0.0.1", server.port), DEADLINE_S) as connection,
    ):
        connection.sendall(head.encode() + body)
        seen = b""
        while b"first" not in seen:
            seen += connection.recv(65536)
        assert memory.replies == []
        assert ends not in seen
        at.release("gate")
        while piece := connection.recv(65536):
            seen += piece
    assert seen.count(b"event: " + ends) == 2
    assert [call.name for call in memory.reply.content.calls] == ["first", "second"]


def test_the_first_request_need_not_wait_for_imports() -> None:
    """In a program of its own: this one has imported everything."""
    program = """
import socket, sys, time
from snapshotd.gateway.base import Budget
from snapshotd.gateway.server import GatewayServer
assert "httpcore2" not in sys.modules
with GatewayServer(socket.create_server(("127.0.0.1", 0)), None, {}, budget=Budget(1)):
    deadline = time.monotonic() + 60
    while "httpcore2" not in sys.modules:
        assert time.monotonic() < deadline, "it is not imported"
        time.sleep(0.01)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=2 * DEADLINE_S)
