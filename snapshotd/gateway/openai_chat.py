"""OpenAI chat completions, also as other services write it: `POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from snapshotd.errors import UsageError
from snapshotd.gateway.base import Api, ModelCall, ProviderKind, ReplyContent, TokenUsage, TurnRequest
from snapshotd.gateway.dialect import (
    PART_LIMIT,
    Dialect,
    StreamReader,
    first_by_index,
    index,
    mapping,
    normal_parts,
    objects,
    text,
    tokens,
    without,
)
from snapshotd.gateway.json_body import parse_text
from snapshotd.gateway.sse import Event
from snapshotd.types import Message

_UNSTABLE = frozenset(
    {
        "id",
        "index",
        "annotations",
        "logprobs",
        "cache_control",
        "reasoning",
        "reasoning_content",
        "reasoning_details",
        "provider_specific_fields",
    }
)
"""Fields that a provider adds and clients leave out, or move, when they send the message back."""


class OpenAIChat(Dialect):
    """See the module's text. A message with more than role and content has all its other fields as its content in the
    catalog."""

    api = Api.CHAT
    provider = ProviderKind.OPENAI
    path = "/v1/chat/completions"
    conversation_fields = frozenset({"messages"})

    def items(self, body: dict[str, Any]) -> list[Any]:
        messages = body.get("messages")
        if not isinstance(messages, list):
            raise UsageError("The request has no list of messages; set the field messages.")
        return messages

    def stores(self, body: dict[str, Any]) -> bool:
        return body.get("store") is True

    def message(self, item: dict[str, Any]) -> Message:
        fields = {name: value for name, value in item.items() if name != "role"}
        return Message(
            text(item.get("role")) or "user", fields.get("content") if fields.keys() <= {"content"} else fields
        )

    def item(self, message: Message) -> dict[str, Any]:
        content = message.content
        return {"role": message.role, **(content if isinstance(content, dict) else {"content": content})}

    def normal(self, item: dict[str, Any]) -> Any:
        fields = without(item, _UNSTABLE)
        fields["content"] = normal_parts(item.get("content"), _UNSTABLE)
        if "tool_calls" in fields:
            fields["tool_calls"] = [[call.id, call.name, call.arguments] for call in self.calls(item)]
        return fields

    def from_model(self, item: dict[str, Any]) -> bool:
        return item.get("role") == "assistant"

    def calls(self, item: dict[str, Any]) -> Iterable[ModelCall]:
        if not self.from_model(item):
            return
        for call in objects(item.get("tool_calls")):
            function, custom = mapping(call.get("function")), mapping(call.get("custom"))
            name, given = (
                text(function.get("name") or custom.get("name")),
                function.get("arguments", custom.get("input")),
            )
            yield ModelCall(
                text(call.get("id")) or "",
                name or "",
                parse_text(given) if isinstance(given, str) and function else given,
            )
        if isinstance(old := item.get("function_call"), dict):  # before tools: one call, known by its name
            name = text(old.get("name")) or ""
            yield ModelCall(name, name, parse_text(text(old.get("arguments")) or ""))

    def results(self, item: dict[str, Any]) -> Iterable[tuple[str, Any, bool]]:
        if item.get("role") == "tool":
            yield text(item.get("tool_call_id")) or "", item.get("content"), False
        elif item.get("role") == "function":
            yield text(item.get("name")) or "", item.get("content"), False

    def reply_items(self, reply: dict[str, Any], request: TurnRequest) -> list[dict[str, Any]]:
        message = mapping(first_by_index(reply.get("choices")).get("message"))
        return [{"role": "assistant", **message}] if message else []

    def content(self, reply: dict[str, Any]) -> ReplyContent:
        return ReplyContent(
            stop_reason=text(first_by_index(reply.get("choices")).get("finish_reason")),
            usage=read_usage(mapping(reply.get("usage"))),
            response_id=text(reply.get("id")),
            model=text(reply.get("model")),
            error=self.read_error(reply),
        )

    def stream_reader(self, request: TurnRequest) -> StreamReader:
        return _ChatStream(tokens(request.params.get("n")) or 1)


def read_usage(usage: dict[str, Any]) -> TokenUsage:
    """The `usage` of a chat reply."""
    cached = tokens(mapping(usage.get("prompt_tokens_details")).get("cached_tokens"))
    return TokenUsage(tokens(usage.get("prompt_tokens")), tokens(usage.get("completion_tokens")), cached)


class _Joined:
    """An object that arrives as deltas: texts grow, other values replace, lists of objects with an index are joined
    entry by entry."""

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {}
        self._values: dict[str, Any] = {}
        self._lists: dict[str, dict[int, _Joined]] = {}
        self._objects: dict[str, _Joined] = {}

    def add(self, delta: dict[str, Any], whole: frozenset[str]) -> None:
        """`whole`: fields whose text comes in one piece, and may come again."""
        for name, value in delta.items():
            if isinstance(value, str) and name not in whole:
                self._texts.setdefault(name, []).append(value)
            elif isinstance(value, list) and any(index(entry.get("index")) is not None for entry in objects(value)):
                entries = self._lists.setdefault(name, {})
                for entry in objects(value):
                    if (number := index(entry.get("index"))) is not None:
                        entries.setdefault(number, _Joined()).add(
                            {k: v for k, v in entry.items() if k != "index"}, whole
                        )
            elif isinstance(value, dict):
                self._objects.setdefault(name, _Joined()).add(value, whole)
            elif value is not None and (value != "" or name not in self._values):
                self._values[name] = value

    def value(self) -> dict[str, Any]:
        return {
            **self._values,
            **{name: "".join(pieces) for name, pieces in self._texts.items()},
            **{name: joined.value() for name, joined in self._objects.items()},
            **{name: [entries[number].value() for number in sorted(entries)] for name, entries in self._lists.items()},
        }


_WHOLE = frozenset({"role", "id", "type", "name"})


class _ChatStream(StreamReader):
    """`data:` chunks with deltas of each choice, `finish_reason`, at times the usage, and `[DONE]`."""

    def __init__(self, choices: int) -> None:
        self._expected = choices
        self._choices: dict[int, _Joined] = {}
        self._stops: dict[int, str] = {}
        self._top: dict[str, Any] = {}

    def take(self, event: Event, value: dict[str, Any]) -> None:
        if event.data.strip() == b"[DONE]":
            self.settled = self.finished = True
            return
        if value.get("error"):  # some providers send `"error": null` along with every chunk
            self._top["error"] = value["error"]
            self.finished = True
        self._top.update({name: value[name] for name in ("id", "model", "usage") if value.get(name) is not None})
        for choice in objects(value.get("choices")):
            number = index(choice.get("index")) or 0
            if len(self._choices) < PART_LIMIT:
                self._choices.setdefault(number, _Joined()).add(mapping(choice.get("delta")), _WHOLE)
            if isinstance(reason := choice.get("finish_reason"), str) and reason:  # "" until there is one, with some
                self._stops[number] = reason
        self.settled = self.settled or len(self._stops) >= self._expected

    def reply(self) -> dict[str, Any]:
        choices = [
            {"index": number, "message": joined.value(), "finish_reason": self._stops.get(number)}
            for number, joined in sorted(self._choices.items())
        ]
        return {**self._top, "choices": choices}
