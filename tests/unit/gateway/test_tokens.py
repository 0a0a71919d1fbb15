"""Tokens that the gateway captures: asked for, kept with the reply, and taken out again before the agent has it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from snapshotd.gateway.base import Api
from snapshotd.gateway.tokens import EVENT_LIMIT_BYTES, READ_LIMIT_BYTES, TokenFilter, capture_of
from tests.unit.gateway.rig import (
    BODIES,
    CHAT,
    MESSAGES,
    RESPONSES,
    Memory,
    ask,
    gateway,
    port_of,
    raw_upstream,
    served,
)

SAYS = {"text": "Hello there, this is it.", "calls": [{"name": "shell", "arguments": {"command": "ls"}}]}
LOGPROBS = [-0.5, -1.0, -1.5]
IDS = [100, 101, 102, 103, 104, 105]
INCLUDE = "message.output_text.logprobs"
KEPT: dict[str, Any] = {
    CHAT: {"prompt_token_ids": [7, 8, 9], "logprobs": LOGPROBS, "completion_token_ids": IDS},
    RESPONSES: {"logprobs": LOGPROBS},
}


def events(body: bytes) -> list[Any]:
    """The values of a stream, or the one of a plain reply."""
    if not body.startswith((b"data:", b"event:")):
        return [json.loads(body)]
    data = [line[6:] for line in body.splitlines() if line.startswith(b"data: ")]
    return [value if value == b"[DONE]" else json.loads(value) for value in data]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_they_are_kept_and_the_agent_sees_nothing_of_them(path: str, stream: bool) -> None:
    with served([SAYS], capture_tokens=True) as (server, provider, memory):
        body = {**BODIES[path], "stream": stream, "user": "\ud83d"}
        through = ask(server.port, path, body)
        sent = provider.requests[0]["body"]
        direct = ask(port_of(provider.url), path, body)
        assert events(through.body) == events(direct.body)
        assert through.status == 200
        reply = memory.reply
        assert reply.complete
        assert reply.tokens == KEPT[path]
        assert reply.body == through.body
        assert [call.id for call in reply.content.calls] == ["call_0_0"]
        added = {"logprobs": True, "return_token_ids": True} if path == CHAT else {"include": [INCLUDE]}
        assert sent == {**body, **added}
        assert reply.capture == {"added": sorted(added)}


@pytest.mark.parametrize("stream", [False, True])
def test_the_agent_gets_what_it_asked_for_itself(stream: bool) -> None:
    own = [(CHAT, {"logprobs": True, "return_token_ids": True}), (RESPONSES, {"include": [INCLUDE]})]
    for path, fields in own:
        with served([SAYS], capture_tokens=True) as (server, provider, memory):
            body = {**BODIES[path], **fields, "stream": stream}
            assert ask(server.port, path, body).body == ask(port_of(provider.url), path, body).body
            assert memory.reply.capture == {"added": []}
    with served([SAYS], capture_tokens=True) as (server, provider, memory):
        body = {**BODIES[CHAT], "logprobs": True, "stream": stream}
        through = events(ask(server.port, CHAT, body).body)
        assert through == events(ask(port_of(provider.url), CHAT, body).body)
        assert memory.reply.tokens == KEPT[CHAT]
        assert memory.reply.capture == {"added": ["return_token_ids"]}


@pytest.mark.parametrize(
    ("refuses", "asked", "tokens"),
    [
        (["return_token_ids"], 2, {"logprobs": LOGPROBS}),
        (["logprobs"], 3, None),
        (["return_token_ids", "logprobs"], 3, None),
    ],
)
def test_a_provider_that_refuses_is_asked_again_with_less(refuses: list[str], asked: int, tokens: Any) -> None:
    script = {"steps": [SAYS, SAYS], "refuses": refuses}
    with served(script, capture_tokens=True) as (server, provider, memory):
        assert ask(server.port, CHAT, BODIES[CHAT]).status == 200
        assert len(provider.requests) == asked
        assert memory.reply.tokens == tokens
        assert memory.reply.capture is not None
        assert memory.reply.capture["refused"] == sorted(
            {*refuses, "return_token_ids", *(["logprobs"] if asked == 3 else [])}
        )
        assert "return_token_ids" not in memory.reply.capture["added"]
        ask(server.port, CHAT, BODIES[CHAT])
        assert len(provider.requests) == asked + 1, "what the model does not take is remembered"


def test_a_request_that_is_wrong_anyway_is_told_and_nothing_is_remembered() -> None:
    script = {"steps": [SAYS], "refuses": ["temperature"]}
    with served(script, capture_tokens=True) as (server, provider, memory):
        wrong = ask(server.port, CHAT, {**BODIES[CHAT], "temperature": 9})
        assert wrong.status == 400
        assert "temperature" in wrong.value["error"]["message"]
        assert [len(provider.requests), len(memory.replies)] == [3, 1]
        ask(server.port, CHAT, BODIES[CHAT])
        assert provider.requests[-1]["body"]["return_token_ids"] is True
        assert memory.replies[-1][1].tokens == KEPT[CHAT]


@pytest.mark.parametrize("stream", [False, True])
def test_an_api_that_has_none_is_left_alone(stream: bool) -> None:
    with served([SAYS], capture_tokens=True) as (server, provider, memory):
        body = {**BODIES[MESSAGES], "stream": stream}
        assert ask(server.port, MESSAGES, body).body == ask(port_of(provider.url), MESSAGES, body).body
        assert provider.requests[0]["body"] == body
        assert (memory.reply.tokens, memory.reply.capture) == (None, None)


def test_without_the_option_nothing_is_added() -> None:
    with served([SAYS]) as (server, provider, memory):
        ask(server.port, CHAT, BODIES[CHAT])
        assert provider.requests[0]["body"] == BODIES[CHAT]
        assert memory.reply.tokens is None


HOSTILE = [
    b'data: {"choices":[{"index":0,"logprobs":{"content":"x"},"token_ids":7}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{"content":"a"},"logprobs":{"content":[{"logprob":true},{"logprob":-1},3]}}]}\r\n\r\n',
    b'data: {"prompt_token_ids":[1,true,"2",3],"choices":{}}\n\n',
    b"data: {\n\n: a comment\n\ndata: [DONE]\n\n",
]


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_a_stream_of_any_shape_in_any_pieces(size: int) -> None:
    whole = b"".join(HOSTILE)

    def answer(connection: Any, head: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        for start in range(0, len(whole), size):
            connection.sendall(whole[start : start + size])

    memory = Memory()
    with raw_upstream(answer) as url, gateway(url, memory, capture_tokens=True) as server:
        answered = ask(server.port, CHAT, {**BODIES[CHAT], "stream": True})
        assert b"data: {\n\n: a comment\n\ndata: [DONE]\n\n" in answered.body
        assert b"token_ids" not in answered.body
        assert b'logprob":' not in answered.body
        assert memory.reply.tokens == {"logprobs": [-1], "prompt_token_ids": [1, 3]}


@pytest.mark.parametrize("stream", [False, True])
def test_beyond_the_limits_a_reply_passes_as_it_is(stream: bool) -> None:
    capture = capture_of(Api.CHAT, json.dumps(BODIES[CHAT]).encode(), 0)
    assert capture is not None
    found = TokenFilter(capture, stream)
    limit = EVENT_LIMIT_BYTES if stream else READ_LIMIT_BYTES
    begins, rest = b'data: {"a":"', b"x" * limit
    assert (found.feed(begins), found.feed(rest)) == (b"", begins + rest)
    assert found.feed(b'data: {"prompt_token_ids":[1]}\n\n') == b'data: {"prompt_token_ids":[1]}\n\n'
    assert found.end() == b""
    assert capture.tokens is None
