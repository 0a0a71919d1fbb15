"""Anthropic messages: `POST /v1/messages`. A message's content is a text or typed blocks; results are blocks of a
user's message."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from snapshotd.errors import UsageError
from snapshotd.gateway.base import Api, ModelCall, ProviderKind, ReplyContent, TokenUsage, TurnRequest
from snapshotd.gateway.dialect import (
    PART_LIMIT,
    Dialect,
    StreamReader,
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

_UNSTABLE = frozenset({"cache_control", "citations"})
_THOUGHTS = frozenset({"thinking", "redacted_thinking"})
"""Blocks that clients may leave out when they send a message back."""


class AnthropicMessages(Dialect):
    """See the module's text."""

    api = Api.MESSAGES
    provider = ProviderKind.ANTHROPIC
    path = "/v1/messages"
    conversation_fields = frozenset({"messages", "system"})

    def items(self, body: dict[str, Any]) -> list[Any]:
        messages, system = body.get("messages"), body.get("system")
        if not isinstance(messages, list):
            raise UsageError("The request has no list of messages; set the field messages.")
        return [{"role": "system", "content": system}, *messages] if system else messages

    def message(self, item: dict[str, Any]) -> Message:
        return Message(text(item.get("role")) or "user", item.get("content"))

    def item(self, message: Message) -> dict[str, Any]:
        return {"role": message.role, "content": message.content}

    def normal(self, item: dict[str, Any]) -> Any:
        return [item.get("role"), normal_parts(_plain_results(item.get("content")), _UNSTABLE, _THOUGHTS)]

    def from_model(self, item: dict[str, Any]) -> bool:
        return item.get("role") == "assistant"

    def calls(self, item: dict[str, Any]) -> Iterable[ModelCall]:
        if self.from_model(item):
            for block in objects(item.get("content")):
                if block.get("type") == "tool_use":
                    yield ModelCall(text(block.get("id")) or "", text(block.get("name")) or "", block.get("input"))

    def results(self, item: dict[str, Any]) -> Iterable[tuple[str, Any, bool]]:
        if item.get("role") == "user":
            for block in objects(item.get("content")):
                if block.get("type") == "tool_result":
                    yield text(block.get("tool_use_id")) or "", block.get("content"), block.get("is_error") is True

    def reply_items(self, reply: dict[str, Any], request: TurnRequest) -> list[dict[str, Any]]:
        content = reply.get("content")
        return [{"role": "assistant", "content": content}] if content else []

    def content(self, reply: dict[str, Any]) -> ReplyContent:
        return ReplyContent(
            stop_reason=text(reply.get("stop_reason")),
            usage=_usage(mapping(reply.get("usage"))),
            response_id=text(reply.get("id")),
            model=text(reply.get("model")),
            error=self.read_error(reply),
        )

    def stream_reader(self, request: TurnRequest) -> StreamReader:
        return _MessageStream()


def _usage(usage: dict[str, Any]) -> TokenUsage:
    """Their `input_tokens` leave out tokens that were read from, or written to, the cache."""
    plain, read, written = (
        tokens(usage.get(name)) for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    )
    return TokenUsage(
        None if plain is None else plain + (read or 0) + (written or 0), tokens(usage.get("output_tokens")), read
    )


def _plain_results(content: Any) -> Any:
    """The content with the cache marks inside tool results taken away too, and `is_error: false` the same as
    nothing."""
    if not isinstance(content, list):
        return content
    return [
        {
            **without(block, ("is_error",) if not block.get("is_error") else ()),
            "content": normal_parts(block.get("content"), _UNSTABLE),
        }
        if isinstance(block, dict) and block.get("type") == "tool_result"
        else block
        for block in content
    ]


class _MessageStream(StreamReader):
    """message_start, then for each block start, deltas and stop, then message_delta (stop reason, counts) and
    message_stop."""

    def __init__(self) -> None:
        self._message: dict[str, Any] = {}
        self._blocks: dict[int, dict[str, Any]] = {}
        self._pieces: dict[int, dict[str, list[Any]]] = {}

    def take(self, event: Event, value: dict[str, Any]) -> None:
        kind, number = text(value.get("type")) or event.type, index(value.get("index"))
        if kind == "message_start":
            self._message = dict(mapping(value.get("message")))
        elif kind == "content_block_start" and number is not None and len(self._blocks) < PART_LIMIT:
            self._blocks[number] = dict(mapping(value.get("content_block")))
        elif kind == "content_block_delta" and number in self._blocks and number is not None:
            self._delta(number, mapping(value.get("delta")))
        elif kind == "content_block_stop" and number in self._blocks and number is not None:
            self.asked = self.asked or self._blocks[number].get("type") == "tool_use"
        elif kind == "message_delta":
            self._message.update(mapping(value.get("delta")))
            usage = {name: count for name, count in mapping(value.get("usage")).items() if count is not None}
            self._message["usage"] = {**mapping(self._message.get("usage")), **usage}
            self.settled = self._message.get("stop_reason") is not None
        elif kind == "message_stop":
            self.settled = self.finished = True
        elif kind == "error":
            self._message["error"] = value.get("error")
            self.finished = True

    def _delta(self, number: int, delta: dict[str, Any]) -> None:
        pieces = self._pieces.setdefault(number, {})
        for name in ("text", "thinking", "signature", "partial_json"):
            if isinstance(delta.get(name), str):
                pieces.setdefault(name, []).append(delta[name])
        if "citation" in delta:
            pieces.setdefault("citations", []).append(delta["citation"])

    def _block(self, number: int) -> dict[str, Any]:
        block = dict(self._blocks[number])
        for name, pieces in self._pieces.get(number, {}).items():
            if name == "partial_json":
                block["input"] = parse_text("".join(pieces)) if any(pieces) else block.get("input", {})
            elif name == "citations":
                block["citations"] = pieces
            else:
                block[name] = (text(block.get(name)) or "") + "".join(pieces)
        return block

    def reply(self) -> dict[str, Any]:
        return {**self._message, "content": [self._block(number) for number in sorted(self._blocks)]}
