"""The scripted provider keeps to its script: other tests build on it."""

from __future__ import annotations

import http.client
import threading
import time
from typing import Any

import pytest

from snapshotd.testing.provider import ScriptedProvider
from tests.unit.gateway.rig import BODIES, CHAT, DEADLINE_S, MESSAGES, RESPONSES, Answer, ask, poll, port_of

USER = {"role": "user", "content": "go"}
SAID = {"role": "assistant", "content": "said"}
TOOL = {"role": "tool", "tool_call_id": "t", "content": "x"}


def say(provider: ScriptedProvider, messages: list[dict[str, Any]], model: str = "m") -> Answer:
    return ask(port_of(provider.url), CHAT, {"model": model, "messages": messages})


def said(answer: Answer) -> str:
    return str(answer.value["choices"][0]["message"]["content"])


def test_a_step_is_chosen_by_the_turns_in_the_conversation() -> None:
    with ScriptedProvider([{"text": "zero"}, {"text": "one"}]) as provider:
        for _ in range(2):
            assert said(say(provider, [USER])) == "zero"
            assert said(say(provider, [USER, SAID, TOOL, TOOL])) == "one"
        beyond = say(provider, [USER, SAID, USER, SAID])
        assert (beyond.status, "no step 2" in beyond.value["error"]["message"]) == (400, True)
        assert [request["step"] for request in provider.requests] == [0, 1, 0, 1, None]


def test_a_step_is_chosen_by_the_results() -> None:
    with ScriptedProvider({"by": "results", "steps": [{"text": "zero"}, {"text": "one"}, {"text": "two"}]}) as provider:
        assert [said(say(provider, messages)) for messages in ([USER], [USER, SAID, TOOL, TOOL])] == ["zero", "two"]


def test_steps_in_sequence() -> None:
    with ScriptedProvider(
        {"by": "sequence", "steps": [{"text": "zero", "failures": [{"status": 500}]}, {"text": "one"}]}
    ) as provider:
        assert say(provider, [USER]).status == 500
        assert [said(say(provider, [USER])) for _ in range(2)] == ["zero", "one"]
        assert say(provider, [USER]).status == 400
        provider.reset()
        assert say(provider, [USER]).status == 500


def test_turns_of_the_responses_api() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "x"}
    with ScriptedProvider([{"text": str(number)} for number in range(4)]) as provider:
        for body, step in (
            ({"input": "go"}, 0),
            ({"input": [USER, call, call, output, output]}, 1),
            ({"input": [USER, call, output, SAID, USER]}, 2),
            ({"input": [output], "previous_response_id": "resp_2"}, 3),
        ):
            answer = ask(port_of(provider.url), RESPONSES, {"model": "m", **body})
            assert answer.value["id"] == f"resp_{step}"


def test_models_have_steps_of_their_own() -> None:
    with ScriptedProvider({"steps": [{"text": "a"}], "models": {"n": [{"text": "b"}]}}) as provider:
        assert [said(say(provider, [USER], model)) for model in ("m", "n")] == ["a", "b"]


def test_failures_come_first_for_each_request() -> None:
    failures = [{"status": 529, "headers": {"retry-after": "1"}, "message": "busy"}, {"cut_after": 5}]
    with ScriptedProvider([{"text": "fine", "failures": failures}]) as provider:
        for messages in ([USER], [{"role": "user", "content": "other"}]):
            first, second, third, fourth = (say(provider, messages) for _ in range(4))
            assert (first.status, first.headers["retry-after"]) == (529, "1")
            assert (second.cut, len(second.body)) == (True, 5)
            assert said(third) == said(fourth) == "fine"


def test_the_key_is_checked() -> None:
    with ScriptedProvider({"steps": [{"text": "a"}], "api_key": "right"}) as provider:
        port = port_of(provider.url)
        assert ask(port, MESSAGES, BODIES[MESSAGES]).status == 401
        assert ask(port, MESSAGES, BODIES[MESSAGES], {"x-api-key": "right"}).status == 200
        assert ask(port, CHAT, BODIES[CHAT], {"authorization": "Bearer right"}).status == 200


@pytest.mark.parametrize("close", [False, True])
def test_a_reply_is_held_until_its_gate_opens(close: bool) -> None:
    answers: list[Answer | Exception] = []

    def agent() -> None:
        try:
            answers.append(say(provider, [USER]))
        except (OSError, http.client.HTTPException) as exc:
            answers.append(exc)

    with ScriptedProvider([{"text": "late", "hold": "gate"}]) as provider:
        thread = threading.Thread(target=agent)
        thread.start()
        poll(lambda: provider.requests)
        assert answers == []
        if close:
            provider.close()
        else:
            assert ask(port_of(provider.url), "/control/release/gate", {}).status == 200
        thread.join(DEADLINE_S)
        assert len(answers) == 1


def test_a_delay() -> None:
    with ScriptedProvider([{"text": "late", "delay_s": 0.2}]) as provider:
        began = time.monotonic()
        assert said(say(provider, [USER])) == "late"
        assert time.monotonic() - began >= 0.2
