"""Gemini's API: calls without ids, streams without an end mark, the model and the key in the address."""

from __future__ import annotations

import json
from typing import Any

import pytest

from snapshotd.gateway.base import Api, TurnRequest, Upstream
from snapshotd.gateway.digest import DigestMemo
from snapshotd.gateway.gemini import GeminiContent
from snapshotd.gateway.recording import Recording
from snapshotd.testing.provider import ScriptedProvider
from snapshotd.testing.provider_wire import Call, Gemini, Reply
from tests.unit.gateway.rig import AGENT_KEY, BODIES, KEY, Memory, ask, gateway, served
from tests.unit.gateway.rig import GEMINI as PATH

GEMINI = GeminiContent()
STREAM = PATH.replace(":generate", ":streamGenerate")
SAYS = [{"text": "I look.", "calls": [{"name": "shell", "arguments": {"command": "ls"}}]}, {"text": "Two files."}]


def _model(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "model", "parts": list(parts)}


def _user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "parts": list(parts)}


def _gemini(*contents: dict[str, Any], **more: Any) -> TurnRequest:
    return GEMINI.read_request({"model": "m", "contents": list(contents), **more}, 0, DigestMemo())


def _call(name: str, **given: Any) -> dict[str, Any]:
    return {"functionCall": {"name": name, "args": {}, **given}}


def _response(name: str, value: str, **given: Any) -> dict[str, Any]:
    return {"functionResponse": {"name": name, "response": {"output": value}, **given}}


@pytest.mark.parametrize("ids", ["none", "the provider's", "the client's", "the results have none", "other order"])
def test_the_calls_of_gemini_are_told_apart_whatever_their_ids(ids: str) -> None:
    """The reply's calls have ids only if the provider gives them, the next request's if the client has made some up."""
    theirs = ids == "the provider's"
    reply = GEMINI.read_reply(
        {
            "candidates": [
                {"content": _model(*(_call(n, **({"id": f"p{n}"} if theirs else {})) for n in ("f", "g", "f")))}
            ]
        },
        _gemini(_user({"text": "go"})),
    )
    named = {} if ids == "none" else {number: {"id": f"c{number}"} for number in range(3)}
    asked = [_call(name, **named.get(number, {})) for number, name in enumerate(("f", "g", "f"))]
    answers = [_response(name, f"r{number}", **named.get(number, {})) for number, name in enumerate(("f", "g", "f"))]
    if ids == "the results have none":
        answers = [_response(name, f"r{number}") for number, name in enumerate(("f", "g", "f"))]
    elif ids == "other order":
        answers.reverse()
    again = _gemini(_user({"text": "go"}), _model(*asked), _user(*answers))
    assert len({call.id for call in reply.calls}) == 3
    found = {result.id: (result.name, result.content["output"]) for result in again.results_since(0)}
    assert [found[call.id] for call in reply.calls] == [("f", "r0"), ("g", "r1"), ("f", "r2")]
    assert again.digests[1:2] == reply.digests


def test_the_turns_and_the_conversations_of_gemini_have_other_ids() -> None:
    def ids(task: str, turns: int) -> list[str]:
        turn = [_model(_call("f")), _user(_response("f", "r"))]
        request = _gemini(_user({"text": task}), *turn * turns, systemInstruction={"parts": [{"text": "Be."}]})
        return [result.id for result in request.results_since(0)]

    two, three = ids("go", 2), ids("go", 3)
    assert len(set(three)) == 3
    assert three[:2] == two, "a place keeps its id when the conversation goes on"
    assert not set(three) & set(ids("go on", 3))


@pytest.mark.parametrize("given", [{"id": "c"}, {}])
def test_a_result_that_comes_twice_is_one(given: dict[str, str]) -> None:
    """Gemini CLI sends each twice when it goes on with a session."""
    answers = [_response("f", "r", **given)] * 2
    [result] = _gemini(_user({"text": "go"}), _model(_call("f", **given)), _user(*answers)).results_since(0)
    assert result.id.endswith("-1-0")
    once = _gemini(_user({"text": "go"}), _model(_call("f", **given)), _user(*answers[:1]))
    again = _gemini(_user({"text": "go"}), _model(_call("f", **given)), _user(*answers))
    assert (once.digests == again.digests) == bool(given), "without ids they may be two"
    twice = _gemini(_user({"text": "go"}), _model(_call("f", **given)), _user(*answers), _user(*answers))
    assert {one.id for one in twice.results_since(0)} == {result.id}


def test_a_failed_result_of_gemini() -> None:
    failed = {"functionResponse": {"name": "f", "response": {"error": "no such file"}}}
    [result] = _gemini(_user({"text": "go"}), _model(_call("f")), _user(failed)).results_since(0)
    assert (result.is_error, result.content) == (True, {"error": "no such file"})


def test_a_client_of_gemini_may_keep_the_events_of_a_stream_as_they_came() -> None:
    pieces_of_it = [_model({"text": "I "}), _model({"text": "look."}), _model(_call("f"))]
    split = _gemini(_user({"text": "go"}), *pieces_of_it, _user(_response("f", "r")))
    whole = _gemini(_user({"text": "go"}), _model({"text": "I look."}, _call("f")), _user(_response("f", "r")))
    assert split.digests == whole.digests
    assert split.results_since(0) == whole.results_since(0)
    assert [message.role for message in split.new_messages()] == ["user", "assistant", "user"]


def test_a_stream_of_gemini_without_events_is_one_list() -> None:
    wire = Gemini()
    reply = Reply(0, "m", "Hello and good morning", (Call("c", "f", {"a": 1}),))
    plain = GEMINI.read_reply(wire.plain(reply), _gemini(_user({"text": "go"})))
    listed = [data for _, data in wire.events(reply)]
    assert len(listed) > 2
    assert GEMINI.read_reply(listed, _gemini(_user({"text": "go"}))) == plain


def test_a_prompt_that_gemini_refuses() -> None:
    refused = {"promptFeedback": {"blockReason": "SAFETY"}, "usageMetadata": {"promptTokenCount": 3}}
    recording = Recording(GEMINI, _gemini(_user({"text": "go"})), 200, "text/event-stream", 8 << 20)
    recording.take(b"data: " + json.dumps(refused).encode() + b"\r\n\r\n")
    reply = recording.reply(None, 0, 0)
    assert (reply.content.stop_reason, reply.content.messages, reply.complete) == ("SAFETY", (), True)


def test_thoughts_count_as_tokens_of_the_reply() -> None:
    usage = {"promptTokenCount": 9, "candidatesTokenCount": 4, "thoughtsTokenCount": 3, "cachedContentTokenCount": 5}
    content = GEMINI.read_reply({"usageMetadata": usage}, _gemini(_user({"text": "go"})))
    assert (content.usage.input_tokens, content.usage.output_tokens, content.usage.cached_tokens) == (9, 7, 5)


def test_a_conversation_through_the_gateway() -> None:
    """What the second request repeats equals what was recorded of the first reply."""
    with served(SAYS) as (server, provider, memory):
        contents = [_user({"text": "go"})]
        for _ in SAYS:
            answer = ask(server.port, PATH, {"contents": contents, "systemInstruction": {"parts": [{"text": "Be."}]}})
            said = answer.value["candidates"][0]["content"]
            results = [
                _response(part["functionCall"]["name"], "a b", id="made up")
                for part in said["parts"]
                if "functionCall" in part
            ]
            contents += [said, *([_user(*results)] if results else [])]
        first, second = memory.turns
        (_, one), (_, two) = memory.replies
        assert (first.api, first.model, first.stream) == (Api.GEMINI, "m", False)
        known = (*first.digests, *one.content.digests)
        assert second.matching_prefix(known) == len(known) == 3
        assert [message.role for message in second.new_messages()] == ["system", "user", "assistant", "user"]
        [call], [result] = one.content.calls, second.results_since(0)
        assert (call.name, call.arguments, call.id) == ("shell", {"command": "ls"}, result.id)
        assert (result.name, result.content, result.is_error) == ("shell", {"output": "a b"}, False)
        assert two.content.messages[0].content == [{"text": "Two files."}]
        assert [request["body"]["contents"] for request in provider.requests][1] == contents[:3], "it passes as it is"


def test_a_key_in_the_address_goes_nowhere() -> None:
    """And neither do parameters that set headers, or leave out parts of the reply."""
    with served(SAYS) as (server, provider, memory):
        more = f"&key={AGENT_KEY}&%6bey={AGENT_KEY}&$httpHeaders=x-goog-api-key:{AGENT_KEY}&fields=candidates"
        assert ask(server.port, f"{STREAM}?alt=sse{more}", BODIES[PATH]).status == 200
        [request] = provider.requests
        assert request["path"] == f"{STREAM}?alt=sse"
        assert request["headers"]["x-goog-api-key"] == KEY
        assert memory.turns[0].stream
        assert AGENT_KEY not in json.dumps(provider.requests)


def test_the_daemon_may_ask_for_another_model() -> None:
    memory = Memory()
    with ScriptedProvider(SAYS) as provider:
        upstream = Upstream(provider.url, None, model="large/../ö")
        with gateway(provider.url, memory, upstreams={"gemini": upstream}) as server:
            assert ask(server.port, f"{STREAM}?alt=sse", BODIES[PATH]).status == 200
        [request] = provider.requests
    assert request["path"] == f"{STREAM.replace('/m:', '/large%2F..%2F%C3%B6:')}?alt=sse"
    assert request["body"] == {**BODIES[PATH], "model": "large%2F..%2F%C3%B6", "stream": True}
    ((turn, _),) = memory.replies
    assert (turn.model, turn.sent_as) == ("m", "large/../ö")


def test_what_is_no_turn_is_passed_on_and_the_rest_refused() -> None:
    with served(SAYS) as (server, provider, memory):
        assert ask(server.port, PATH.replace("generateContent", "countTokens"), BODIES[PATH]).value["totalTokens"] > 0
        assert ask(server.port, "/v1beta/models?pageSize=5", method="GET").value["models"]
        assert [request["path"] for request in provider.requests][-1] == "/v1beta/models?pageSize=5"
        assert all(request["headers"]["x-goog-api-key"] == KEY for request in provider.requests)
        for method, path in (("POST", "/v1beta/cachedContents"), ("GET", "/v1beta/files"), ("GET", PATH)):
            refused = ask(server.port, path, BODIES[PATH] if method == "POST" else None, method=method)
            assert (refused.status, refused.value["error"]["status"]) == (404, "NOT_FOUND")
        assert len(provider.requests) == 2
        assert memory.turns == []


def test_the_day_of_a_known_client_is_no_part_of_the_conversation() -> None:
    """Neither of its messages nor of the ids of its calls."""

    def request(day: str, files: str, task: str) -> TurnRequest:
        context = f"<session_context>\nToday's date is {day}.\n{files}\n</session_context>"
        return _gemini(_user({"text": context}, {"text": task}), _model(_call("f")), _user(_response("f", "r")))

    one, other = request("Monday", "a", "go"), request("Friday", "a\nb", "go")
    assert one.digests == other.digests
    assert one.results_since(0) == other.results_since(0)
    assert request("Monday", "a", "stop").digests != one.digests
