"""Reading what agents and providers write: any shape gives something, and a stream gives what the plain reply would."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from snapshotd.errors import UsageError
from snapshotd.gateway.anthropic import AnthropicMessages
from snapshotd.gateway.base import ReplyContent, TurnRequest
from snapshotd.gateway.dialect import Dialect
from snapshotd.gateway.digest import DigestMemo, digest_of
from snapshotd.gateway.gemini import GeminiContent
from snapshotd.gateway.openai_chat import OpenAIChat
from snapshotd.gateway.openai_responses import OpenAIResponses
from snapshotd.gateway.recording import Recording
from snapshotd.gateway.sse import EventReader
from snapshotd.testing.provider_wire import WIRES, Call, Reply

DIALECTS: list[Dialect] = [OpenAIChat(), OpenAIResponses(), AnthropicMessages(), GeminiContent()]
CHAT, RESPONSES, MESSAGES, GEMINI = DIALECTS
WIRE_OF = dict(zip(DIALECTS, WIRES.values(), strict=True))
NAMES = [dialect.api.value for dialect in DIALECTS]
few = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""Quick; and a busy machine is no failure."""
event_names = st.sampled_from(["", "message_start", "content_block_start", "error"])
field_names = st.sampled_from(["system", "instructions", "stream", "previous_response_id"])
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
arguments = st.dictionaries(
    texts, st.none() | st.booleans() | st.integers(-9, 9) | texts | st.lists(texts, max_size=3), max_size=3
)
calls = st.lists(st.builds(Call, st.uuids().map(str), st.sampled_from(["shell", "read"]), arguments), max_size=3)
replies = st.builds(
    Reply,
    st.integers(0, 99),
    st.just("m"),
    st.none() | texts.filter(bool),
    calls.map(tuple),
    st.integers(50, 99),
    st.integers(0, 99),
    st.integers(0, 49),
    st.integers(1, 9),
    st.just({"stream_options": {"include_usage": True}}),
)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from(["assistant", "user", "tool", "text", "function_call", "x"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                [
                    "role",
                    "content",
                    "type",
                    "text",
                    "tool_calls",
                    "function",
                    "id",
                    "name",
                    "arguments",
                    "choices",
                    "message",
                    "delta",
                    "index",
                    "output",
                    "usage",
                    "input",
                    "tool_use_id",
                    "call_id",
                    "error",
                    "response",
                    "item",
                    "content_block",
                    "finish_reason",
                    "annotations",
                    "parts",
                    "functionCall",
                    "function_call",
                    "functionResponse",
                    "args",
                    "candidates",
                    "finishReason",
                    "usageMetadata",
                    "thought",
                ]
            ),
            inner,
            max_size=6,
        )
    ),
    max_leaves=30,
)


def request_for(dialect: Dialect, **fields: Any) -> TurnRequest:
    conversation: Any = {"input": "go"} if dialect is RESPONSES else {"messages": [{"role": "user", "content": "go"}]}
    if dialect is GEMINI:
        conversation = {"contents": [{"role": "user", "parts": [{"text": "go"}]}]}
    return dialect.read_request({"model": "m", **conversation, **fields}, 0, DigestMemo(b"key"))


def pieces(stream: bytes, cuts: list[int]) -> list[bytes]:
    """The stream, cut at these places."""
    edges = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    return [stream[start:end] for start, end in pairwise(edges)]


def read_stream(dialect: Dialect, stream: bytes, cuts: list[int]) -> tuple[ReplyContent, bool]:
    recording = Recording(dialect, request_for(dialect), 200, "text/event-stream; charset=utf-8", 8 << 20)
    for piece in pieces(stream, cuts):
        recording.take(piece)
    reply = recording.reply(None, 0, 0)
    assert reply.body == stream
    return reply.content, reply.complete


@pytest.mark.parametrize("dialect", DIALECTS, ids=NAMES)
@few
@given(reply=replies, cuts=st.lists(st.integers(0, 10_000), max_size=8), crlf=st.booleans())
def test_a_stream_says_what_the_plain_reply_says(dialect: Dialect, reply: Reply, cuts: list[int], crlf: bool) -> None:
    wire = WIRE_OF[dialect]
    plain = dialect.read_reply(json.loads(json.dumps(wire.plain(reply))), request_for(dialect))
    stream = b"".join(wire.stream(reply))
    streamed, complete = read_stream(dialect, stream.replace(b"\n", b"\r\n") if crlf else stream, cuts)
    assert complete
    assert streamed.digests == plain.digests
    assert (streamed.calls, streamed.stop_reason, streamed.usage) == (plain.calls, plain.stop_reason, plain.usage)
    assert (streamed.response_id, streamed.model, streamed.error) == (plain.response_id, plain.model, None)
    assert [(call.name, call.arguments) for call in plain.calls] == [(c.name, c.arguments) for c in reply.calls]
    assert dialect is GEMINI or [call.id for call in plain.calls] == [call.id for call in reply.calls]
    assert len({call.id for call in plain.calls}) == len(reply.calls)
    if reply.text:
        assert reply.text in json.dumps([m.content for m in streamed.messages], ensure_ascii=False) or json.dumps(
            reply.text
        )[1:-1] in json.dumps([m.content for m in streamed.messages])


CHUNK: dict[str, Any] = {"id": "c", "object": "chat.completion.chunk", "model": "m"}


def _chat_stream(ordinary: dict[str, Any], unfinished: Any) -> list[bytes]:
    """Three words, as providers send them that have something in every chunk which others have in the last one only."""
    chunks = [
        {
            **CHUNK,
            **ordinary,
            "choices": [{"index": 0, "delta": {"role": "assistant", "content": word}, "finish_reason": unfinished}],
        }
        for word in ("one ", "two ", "three")
    ]
    chunks.append({**CHUNK, **ordinary, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    return [*(f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks), b"data: [DONE]\n\n"]


@pytest.mark.parametrize("ordinary", [{}, {"error": None}, {"error": {}}, {"error": ""}], ids=repr)
@pytest.mark.parametrize("unfinished", [None, ""], ids=repr)
def test_a_stream_is_whole_when_it_ends_and_not_before(ordinary: dict[str, Any], unfinished: Any) -> None:
    events = _chat_stream(ordinary, unfinished)
    for sent in range(1, len(events) + 1):
        content, complete = read_stream(CHAT, b"".join(events[:sent]), [])
        assert complete == (sent > 3)
        (message,) = content.messages
        assert message.content == "".join(("one ", "two ", "three")[:sent])
        assert content.error is None


@pytest.mark.parametrize("dialect", DIALECTS, ids=NAMES)
@few
@given(value=json_values, events=st.lists(st.tuples(event_names, json_values), max_size=5))
def test_nothing_that_a_provider_sends_makes_reading_fail(
    dialect: Dialect, value: Any, events: list[tuple[str, Any]]
) -> None:
    dialect.read_reply(value, request_for(dialect))
    dialect.read_error(value)
    stream = b"".join(f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode() for kind, data in events)
    read_stream(dialect, stream, [])


@pytest.mark.parametrize("dialect", DIALECTS, ids=NAMES)
@few
@given(items=st.lists(json_values, max_size=5), more=st.dictionaries(field_names, json_values))
def test_a_request_is_read_or_refused(dialect: Dialect, items: list[Any], more: dict[str, Any]) -> None:
    try:
        said = {"messages": items, "input": items, "contents": items}
        request = dialect.read_request({"model": "m", **said, **more}, 0, DigestMemo())
    except UsageError:
        return
    assert len(request.new_messages()) == len(request.digests) == len(request.items)
    assert len(request.digest) == 32
    assert request.matching_prefix(request.digests) == len(request.items)
    request.results_since(0)


@pytest.mark.parametrize("dialect", DIALECTS, ids=NAMES)
@pytest.mark.parametrize(
    "body",
    [
        {},
        {"model": ""},
        {"model": "m"},
        {"model": 1, "messages": [], "input": [], "contents": []},
        {"model": "a\nb", "messages": [], "input": [], "contents": []},
        {"model": "m", "messages": ["x"], "input": ["x"], "contents": ["x"]},
        {"model": "m", "messages": [{"role": 1}], "input": [{"role": 1}], "contents": [{"role": 1}]},
        {"model": "m", "messages": [{"role": "x" * 65}], "input": [{"role": "a\x1b"}], "contents": [{"role": "\n"}]},
        {"model": "m", "messages": {}, "input": {}, "contents": {}},
    ],
)
def test_meaningless_requests_are_refused(dialect: Dialect, body: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        dialect.read_request(body, 0, DigestMemo())


CACHED = {"cache_control": {"type": "ephemeral"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1,  "b": 2}'}}
RESULT = {"type": "tool_result", "tool_use_id": "t"}
SAME: list[tuple[Dialect, dict[str, Any], dict[str, Any]]] = [
    (CHAT, {"role": "user", "content": "hi"}, {"role": "user", "content": [{"type": "text", "text": "hi", **CACHED}]}),
    (
        CHAT,
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "annotations": [],
            "reasoning_content": "hm",
            "tool_calls": [CALL],
        },
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**CALL, "index": 0, "function": {"name": "f", "arguments": '{"b":2,"a":1}'}}],
        },
    ),
    (
        RESPONSES,
        {
            "type": "message",
            "id": "m",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "hi", "annotations": [], "logprobs": []}],
        },
        {"role": "assistant", "content": "hi"},
    ),
    (
        RESPONSES,
        {
            "type": "function_call",
            "id": "fc",
            "call_id": "c",
            "name": "f",
            "arguments": '{"a": 1}',
            "status": "completed",
        },
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a":1}'},
    ),
    (
        MESSAGES,
        {"role": "user", "content": "hi"},
        {"role": "user", "content": [{"type": "text", "text": "hi", **CACHED}]},
    ),
    (
        MESSAGES,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "hi", "citations": None},
            ],
        },
        {"role": "assistant", "content": "hi"},
    ),
    (
        MESSAGES,
        {"role": "user", "content": [{**RESULT, "content": [{"type": "text", "text": "x"}], "is_error": False}]},
        {"role": "user", "content": [{**RESULT, "content": "x", **CACHED}]},
    ),
]


@pytest.mark.parametrize(("dialect", "one", "other"), SAME)
def test_two_spellings_are_the_same_message(dialect: Dialect, one: dict[str, Any], other: dict[str, Any]) -> None:
    assert dialect.normal(one) == dialect.normal(other)


def _model(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "model", "parts": list(parts)}


def _user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "parts": list(parts)}


SAME += [
    (
        GEMINI,
        _model({"text": "hm", "thought": True}, {"text": "I "}, {"text": "look.", "thoughtSignature": "s"}),
        _model({"text": "I look."}, {"text": ""}),
    ),
    (
        GEMINI,
        _model({"functionCall": {"id": "a", "name": "f", "args": {"a": 1}}, "thoughtSignature": "s"}),
        _model({"function_call": {"name": "f", "args": {"a": 1}}}),
    ),
    (GEMINI, _model({"functionCall": {"name": "f"}}), _model({"functionCall": {"name": "f", "args": {}}})),
    (
        GEMINI,
        _user({"functionResponse": {"id": "a", "name": "f", "response": {"output": "x"}}}),
        _user({"function_response": {"name": "f", "response": {"output": "x"}}}),
    ),
    (GEMINI, {"parts": [{"text": "a"}]}, _user({"text": "a"})),
]
DIFFERENT: list[tuple[Dialect, dict[str, Any], dict[str, Any]]] = [
    (CHAT, {"role": "user", "content": "hi"}, {"role": "system", "content": "hi"}),
    (
        CHAT,
        {"role": "tool", "tool_call_id": "a", "content": "x"},
        {"role": "tool", "tool_call_id": "b", "content": "x"},
    ),
    (
        CHAT,
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{}"}}]},
    ),
    (
        RESPONSES,
        {"type": "function_call_output", "call_id": "c", "output": "1"},
        {"type": "function_call_output", "call_id": "c", "output": "2"},
    ),
    (RESPONSES, {"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}),
    (
        MESSAGES,
        {"role": "user", "content": [{**RESULT, "content": "x"}]},
        {"role": "user", "content": [{**RESULT, "content": "x", "is_error": True}]},
    ),
    (
        MESSAGES,
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "ab"},
    ),
    (GEMINI, _user({"text": "a"}, {"text": "b"}), _user({"text": "ab"})),
    (GEMINI, _user({"text": "a"}), _model({"text": "a"})),
    (
        GEMINI,
        _model({"functionCall": {"name": "f", "args": {"a": 1}}}),
        _model({"functionCall": {"name": "f", "args": {"a": 2}}}),
    ),
    (
        GEMINI,
        _user({"functionResponse": {"name": "f", "response": {"output": "x"}}}),
        _user({"functionResponse": {"name": "f", "response": {"error": "x"}}}),
    ),
]


@pytest.mark.parametrize(("dialect", "one", "other"), DIFFERENT)
def test_what_differs_is_not_the_same(dialect: Dialect, one: dict[str, Any], other: dict[str, Any]) -> None:
    assert dialect.normal(one) != dialect.normal(other)


def test_other_calls_and_results() -> None:
    """Older, newer and other services' forms."""
    old = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    request = request_for(CHAT, messages=[old, {"role": "function", "name": "f", "content": "1"}])
    assert [(result.id, result.name, result.content) for result in request.results_since(0)] == [("f", "f", "1")]
    custom = {
        "role": "assistant",
        "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "patch", "input": "not {json"}}],
    }
    [call] = CHAT.calls(custom)
    assert (call.name, call.arguments) == ("patch", "not {json")
    broken = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": '{"a": '}}]}
    [call] = CHAT.calls(broken)
    assert call.arguments == '{"a": '
    shell = {
        "type": "local_shell_call",
        "call_id": "s",
        "action": {"command": ["ls"]},
        "id": "x",
        "status": "completed",
    }
    [call] = RESPONSES.calls(shell)
    assert (call.id, call.name, call.arguments) == ("s", "local_shell", {"command": ["ls"]})
    assert list(RESPONSES.calls({"type": "web_search_call", "id": "w", "status": "completed"})) == []
    request = request_for(RESPONSES, input=[shell, {"type": "local_shell_call_output", "call_id": "s", "output": "a"}])
    assert [(result.id, result.name, result.content) for result in request.results_since(0)] == [
        ("s", "local_shell", "a")
    ]
    assert [message.role for message in request.new_messages()] == ["assistant", "tool"]


def test_results_are_those_from_a_message_on() -> None:
    def turn(number: int) -> list[dict[str, Any]]:
        return [
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": f"t{number}", "name": f"f{number}", "input": {}}],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": f"t{number}",
                        "content": f"r{number}",
                        "is_error": number == 2,
                    }
                ],
            },
        ]

    request = request_for(MESSAGES, system="Be.", messages=[{"role": "user", "content": "go"}, *turn(1), *turn(2)])
    [result] = request.results_since(5)
    assert (result.id, result.name, result.content, result.is_error, result.message) == ("t2", "f2", "r2", True, 5)
    assert [result.id for result in request.results_since(0)] == ["t1", "t2"]
    assert request.results_since(6) == []
    assert request.new_messages()[0].role == "system"


def test_results_of_parallel_calls_that_a_client_wrote_alternating() -> None:
    items = []
    for number in (1, 2):
        items += [
            {"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": f"c{number}", "output": "x"},
        ]
    request = request_for(
        RESPONSES, input=[{"role": "user", "content": "go"}, {"type": "reasoning", "id": "r", "summary": []}, *items]
    )
    assert [result.id for result in request.results_since(0)] == ["c1", "c2"]


def test_the_prefix_and_the_digest() -> None:
    messages = [{"role": "user", "content": str(number)} for number in range(5)]
    request = request_for(CHAT, messages=messages, temperature=0)
    assert request.matching_prefix(()) == 0
    assert request.matching_prefix(request.digests[:3]) == 3
    assert request.matching_prefix((*request.digests[:3], b"x" * 32)) == 3
    assert request.matching_prefix((*request.digests, b"x" * 32)) == 5
    assert [message.content for message in request.new_messages(3)] == ["3", "4"]
    assert request_for(CHAT, messages=messages, temperature=0, user="other", metadata={"a": 1}).digest == request.digest
    for different in ({"temperature": 1}, {"stream": True}, {"model": "n"}, {"messages": messages[:4]}, {"tools": []}):
        assert request_for(CHAT, **{"messages": messages, "temperature": 0, **different}).digest != request.digest
    assert (
        CHAT.read_request({"model": "m", "messages": messages, "temperature": 0}, 0, DigestMemo(b"other")).digest
        != request.digest
    )


def test_a_conversation_on_the_providers_side() -> None:
    request = request_for(RESPONSES, input=[], previous_response_id="resp_1")
    assert (request.previous, request.store, request.items) == ("resp_1", True, [])
    request = request_for(RESPONSES, conversation={"id": "conv_1"}, store=False)
    assert (request.previous, request.store) == ("conv_1", False)


def test_an_error_within_a_stream() -> None:
    streams = {
        CHAT: b'data: {"error": {"type": "overloaded", "message": "no"}}\n\n',
        RESPONSES: b'event: error\ndata: {"type": "error", "code": "overloaded", "message": "no"}\n\n',
        MESSAGES: b'event: error\ndata: {"type": "error", "error": {"type": "overloaded", "message": "no"}}\n\n',
        GEMINI: b'data: {"error": {"code": 503, "status": "overloaded", "message": "no"}}\r\n\r\n',
    }
    for dialect, stream in streams.items():
        content, _ = read_stream(dialect, stream, [])
        assert content.error == "overloaded: no"


@few
@given(
    data=st.lists(st.sampled_from([b"data: a", b"data:b", b"event: x", b": c", b"", b"id: 1", b"data"]), max_size=12),
    end=st.sampled_from([b"\n", b"\r\n", b"\r"]),
    cuts=st.lists(st.integers(0, 200), max_size=6),
)
def test_events_do_not_depend_on_where_the_bytes_are_cut(data: list[bytes], end: bytes, cuts: list[int]) -> None:
    stream = b"".join(line + end for line in (*data, b"", b"data: last", b"", b""))
    whole = EventReader(10_000).feed(stream + b"\n")
    reader, found = EventReader(10_000), []
    for piece in pieces(stream, cuts):
        found += reader.feed(piece)
    assert found + reader.feed(b"\n") == whole
    assert whole[-1].data == b"last"


def test_an_endless_event_is_given_up() -> None:
    reader = EventReader(1000)
    for _ in range(100):
        reader.feed(b"data: " + b"x" * 100)
    assert reader.overflow
    assert reader.feed(b"\n\ndata: a\n\n") == []


@few
@given(items=st.lists(json_values, max_size=6), limit=st.integers(1, 4))
def test_a_remembered_digest_is_the_right_one(items: list[Any], limit: int) -> None:
    memo = DigestMemo(b"key", limit)
    for item in (*items, *items):
        for kind, normal in (("a", lambda value: value), ("b", lambda value: [value])):
            assert memo.of(kind, item, normal) == digest_of(normal(item), b"key")


def test_a_conversation_is_worked_out_once() -> None:
    """What a request costs does not grow with the messages that an earlier one had, but for finding them again."""
    worked_out = []

    class Counting(OpenAIChat):
        def normal(self, item: dict[str, Any]) -> Any:
            worked_out.append(item)
            return super().normal(item)

    dialect, memo, messages = Counting(), DigestMemo(), [{"role": "user", "content": "go"}]
    for number in range(50):
        messages.append({"role": "user", "content": str(number)})
        request = dialect.read_request({"model": "m", "messages": json.loads(json.dumps(messages))}, 0, memo)
        assert len(request.digests) == len(messages)
    assert len(worked_out) == len(messages)
