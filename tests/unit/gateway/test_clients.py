"""The providers' own clients, unmodified, against a provider process, through the gateway.

Their import takes two seconds, so only a process that runs these tests does it, and not each one that collects them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from snapshotd.errors import Conflict, NotPermitted
from snapshotd.gateway.base import Api, RecordedReply, TurnRequest
from tests.unit.gateway.rig import AGENT_KEY, KEY, Memory, ask, gateway, port_of

if TYPE_CHECKING:
    import anthropic
    import openai

STEPS: list[dict[str, Any]] = [
    {
        "text": "I look.",
        "calls": [{"name": "shell", "arguments": {"command": "ls"}}, {"name": "read", "arguments": {"path": "ü"}}],
        "usage": {"input": 100, "output": 20, "cached": 60},
    },
    {"text": "Two files."},
]
FLAKY: list[dict[str, Any]] = [
    {
        "text": "At last.",
        "failures": [{"status": 429, "headers": {"retry-after-ms": "1"}, "message": "slow down"}, {"drop": True}],
    }
]
TOOLS = [{"type": "function", "function": {"name": "shell", "parameters": {"type": "object", "properties": {}}}}]
OUTPUTS = {"shell": "a b", "read": "nothing"}


@pytest.fixture(scope="module")
def provider_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    script: Path = tmp_path_factory.mktemp("provider") / "script.json"
    script.write_text(json.dumps({"steps": STEPS, "models": {"flaky": FLAKY}, "api_key": KEY}))
    command = [sys.executable, "-m", "snapshotd.testing.provider", "--script", str(script), "--with-stdin"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        yield process.stdout.readline().strip()
        process.stdin.close()
        assert process.wait(60) == 0


class Provider:
    """The process, from here."""

    def __init__(self, url: str) -> None:
        self.port = port_of(url)

    @property
    def requests(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = ask(self.port, "/control/requests", method="GET").value
        return found


@contextmanager
def rig(url: str) -> Iterator[tuple[Memory, Provider, openai.OpenAI, anthropic.Anthropic]]:
    """With clients that know an agent's key, which the provider would refuse."""
    import anthropic
    import openai

    memory = Memory()
    ask(port_of(url), "/control/reset", {})
    with (
        gateway(url, memory) as server,
        openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=AGENT_KEY, max_retries=0) as gpt,
        anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.port}", api_key=AGENT_KEY, max_retries=0) as claude,
    ):
        yield memory, Provider(url), gpt, claude


def check_turns(memory: Memory, provider: Provider, api: Api) -> None:
    """Two turns: two calls, their two results, a last word. What the second request repeats equals what was recorded of
    the first reply."""
    first, second = memory.turns
    assert [first.api, second.api] == [api, api]
    (_, one), (_, two) = memory.replies
    assert not one.failed
    assert not two.failed
    assert [(call.id, call.name, call.arguments) for call in one.content.calls] == [
        ("call_0_0", "shell", {"command": "ls"}),
        ("call_0_1", "read", {"path": "ü"}),
    ]
    assert first.results_since(0) == []
    names = [None, None] if second.previous else ["shell", "read"]
    assert [(r.id, r.name, r.content, r.is_error) for r in second.results_since(0)] == [
        ("call_0_0", names[0], "a b", False),
        ("call_0_1", names[1], "nothing", False),
    ]
    known = (*first.digests, *one.content.digests)
    if second.previous is None:
        assert second.matching_prefix(known) == len(known)
        assert {message.role for message in second.new_messages(len(known))} <= {"tool", "user"}
    assert "Two files." in json.dumps(two.content.messages[0].content)
    assert len(provider.requests) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_chat(provider_url: str, stream: bool) -> None:
    with rig(provider_url) as (memory, provider, gpt, _):
        messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "go"}]
        for _ in STEPS:
            if stream:
                with gpt.chat.completions.stream(
                    model="m", messages=messages, stream_options={"include_usage": True}
                ) as events:
                    reply = events.get_final_completion()
            else:
                reply = gpt.chat.completions.create(model="m", messages=messages, tools=TOOLS)  # type: ignore[assignment]
            message = reply.choices[0].message
            messages.append(message.to_dict())
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": OUTPUTS[call.function.name]}
                for call in message.tool_calls or []
            ]
        assert message.content == "Two files."
        check_turns(memory, provider, Api.CHAT)
        assert memory.turns[0].new_messages()[0].role == "system"
        usage = memory.replies[0][1].content.usage
        assert (usage.input_tokens, usage.output_tokens, usage.cached_tokens) == (100, 20, 60)


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_responses(provider_url: str, stream: bool, chained: bool) -> None:
    import openai

    with rig(provider_url) as (memory, provider, gpt, _):
        items: list[Any] = [{"role": "user", "content": "go"}]
        previous: Any = openai.NOT_GIVEN
        for _ in STEPS:
            if stream:
                with gpt.responses.stream(
                    model="m", instructions="Be brief.", input=items, previous_response_id=previous
                ) as events:
                    reply: Any = events.get_final_response()
            else:
                reply = gpt.responses.create(
                    model="m", instructions="Be brief.", input=items, previous_response_id=previous
                )
            outputs = [
                {"type": "function_call_output", "call_id": item.call_id, "output": OUTPUTS[item.name]}
                for item in reply.output
                if item.type == "function_call"
            ]
            if chained:
                items, previous = outputs, reply.id
            else:
                items += [*(item.to_dict() for item in reply.output), *outputs]
        assert reply.output_text == "Two files."
        check_turns(memory, provider, Api.RESPONSES)
        assert memory.turns[1].previous == ("resp_0" if chained else None)
        assert memory.turns[1].store
        assert memory.replies[0][1].content.response_id == "resp_0"
        usage = memory.replies[0][1].content.usage
        assert (usage.input_tokens, usage.output_tokens, usage.cached_tokens) == (100, 20, 60)


@pytest.mark.parametrize("stream", [False, True])
def test_messages(provider_url: str, stream: bool) -> None:
    with rig(provider_url) as (memory, provider, _, claude):
        messages: list[Any] = [{"role": "user", "content": "go"}]
        asked: dict[str, Any] = {"model": "m", "max_tokens": 100, "system": "Be brief.", "messages": messages}
        for _ in STEPS:
            if stream:
                with claude.messages.stream(**asked) as events:
                    reply: Any = events.get_final_message()
            else:
                reply = claude.messages.create(**asked)
            messages.append({"role": "assistant", "content": reply.content})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": OUTPUTS[block.name]}
                for block in reply.content
                if block.type == "tool_use"
            ]
            if results:
                results[-1]["cache_control"] = {"type": "ephemeral"}
                messages.append({"role": "user", "content": results})
        assert reply.content[0].text == "Two files."
        check_turns(memory, provider, Api.MESSAGES)
        usage = memory.replies[0][1].content.usage
        assert (usage.input_tokens, usage.output_tokens, usage.cached_tokens) == (100, 20, 60)


def test_a_clients_retries_are_recognised(provider_url: str) -> None:
    with rig(provider_url) as (memory, provider, gpt, claude):
        messages: list[Any] = [{"role": "user", "content": "go"}]
        said = gpt.with_options(max_retries=3).chat.completions.create(model="flaky", messages=messages)
        assert said.choices[0].message.content == "At last."
        message = claude.with_options(max_retries=3).messages.create(model="flaky", max_tokens=9, messages=messages)
        assert message.content[0].text == "At last."  # type: ignore[union-attr]
        for replies in (memory.replies[:3], memory.replies[3:]):
            assert [reply.status for _, reply in replies] == [429, 502, 200]
            assert [reply.failed for _, reply in replies] == [True, True, False]
            assert len({request.digest for request, _ in replies}) == 1
        assert [request["attempt"] for request in provider.requests] == [0, 1, 2] * 2


def test_errors_are_the_clients_own(provider_url: str) -> None:
    import anthropic
    import openai

    with rig(provider_url) as (_, _, gpt, claude):
        with pytest.raises(openai.RateLimitError, match="slow down") as limited:
            gpt.chat.completions.create(model="flaky", messages=[{"role": "user", "content": "go"}])
        assert limited.value.response.headers["retry-after-ms"] == "1"
        with pytest.raises(openai.InternalServerError, match="cannot be reached"):
            gpt.chat.completions.create(model="flaky", messages=[{"role": "user", "content": "go"}])
        with pytest.raises(anthropic.RateLimitError, match="slow down"):
            claude.messages.create(model="flaky", max_tokens=9, messages=[{"role": "user", "content": "go"}])
        with pytest.raises(openai.NotFoundError, match="does not answer"):
            gpt.files.list()
        with pytest.raises(openai.BadRequestError, match="background"):
            gpt.responses.create(model="m", input="go", background=True)


def test_a_refusal_is_told_once(provider_url: str) -> None:
    """The clients repeat a 409 unless they are told not to."""
    import anthropic
    import openai

    with rig(provider_url) as (memory, provider, gpt, claude):

        def differs(request: TurnRequest) -> RecordedReply | None:
            raise Conflict("The call differs from the recorded one.")

        def denied(request: TurnRequest) -> RecordedReply | None:
            raise NotPermitted("A person said no.")

        memory.on_turn = differs
        with pytest.raises(openai.ConflictError, match="differs"):
            gpt.with_options(max_retries=5).chat.completions.create(
                model="m", messages=[{"role": "user", "content": "go"}]
            )
        with pytest.raises(anthropic.ConflictError, match="differs"):
            claude.with_options(max_retries=5).messages.create(
                model="m", max_tokens=9, messages=[{"role": "user", "content": "go"}]
            )
        assert len(memory.turns) == 2
        memory.on_turn = denied
        with pytest.raises(anthropic.PermissionDeniedError, match="said no"):
            claude.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "go"}])
        assert provider.requests == []


def test_lists_counts_and_vectors(provider_url: str) -> None:
    with rig(provider_url) as (memory, provider, gpt, claude):
        assert [model.id for model in gpt.models.list()] == ["scripted"]
        assert [model.id for model in claude.models.list()] == ["scripted"]
        assert gpt.embeddings.create(model="e", input="x").data[0].embedding == [0.5, 0.25]
        assert claude.messages.count_tokens(model="m", messages=[{"role": "user", "content": "go"}]).input_tokens > 0
        assert memory.turns == []
        assert AGENT_KEY not in json.dumps(provider.requests)
