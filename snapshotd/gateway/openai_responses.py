"""OpenAI responses: `POST /v1/responses`. A conversation here is a list of items: messages, calls, outputs,
reasoning."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from snapshotd.errors import UsageError
from snapshotd.gateway.base import Api, ModelCall, ProviderKind, ReplyContent, TokenUsage, TurnRequest
from snapshotd.gateway.clients import FIELDS
from snapshotd.gateway.dialect import (
    PART_LIMIT,
    Dialect,
    StreamReader,
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

_UNSTABLE = frozenset({"id", "status", "annotations", "logprobs", "created_by"}) | FIELDS
_OUTPUT = "_call_output"


class OpenAIResponses(Dialect):
    """See the module's text. A message's content is its content; every other item is, as it came, the content of an
    entry by its author."""

    api = Api.RESPONSES
    provider = ProviderKind.OPENAI
    path = "/v1/responses"
    conversation_fields = frozenset({"input", "instructions", "previous_response_id", "conversation"})

    def items(self, body: dict[str, Any]) -> list[Any]:
        if body.get("background") is True:
            raise UsageError("A response in the background cannot be recorded; leave out the field background.")
        given, instructions = body.get("input"), body.get("instructions")
        if isinstance(given, str):
            given = [{"role": "user", "content": given}]
        if given is None and (body.get("prompt") is not None or self.previous(body) is not None):
            given = []
        if not isinstance(given, list):
            raise UsageError("The request has no input; set the field input to a text or a list of items.")
        return (
            [{"role": "system", "content": instructions}, *given]
            if isinstance(instructions, str) and instructions
            else given
        )

    def previous(self, body: dict[str, Any]) -> str | None:
        conversation = body.get("conversation")
        if isinstance(conversation, dict):
            conversation = conversation.get("id")
        return text(body.get("previous_response_id")) or text(conversation)

    def stores(self, body: dict[str, Any]) -> bool:
        return body.get("store") is not False  # the provider's default

    def message(self, item: dict[str, Any]) -> Message:
        role = text(item.get("role"))
        if role and _kind(item) == "message":
            return Message(role, item.get("content"))
        return Message(
            "tool" if _kind(item).endswith(_OUTPUT) else "assistant" if self.from_model(item) else role or "user", item
        )

    def item(self, message: Message) -> dict[str, Any]:
        content = message.content
        return content if isinstance(content, dict) else {"role": message.role, "content": content}

    def normal(self, item: dict[str, Any]) -> Any:
        fields = without(item, _UNSTABLE | {"type"})
        fields["type"] = _kind(item)
        if "content" in fields:
            fields["content"] = normal_parts(_rename_texts(fields["content"]), _UNSTABLE)
        if isinstance(fields.get("arguments"), str):
            fields["arguments"] = parse_text(fields["arguments"])
        return fields

    def from_model(self, item: dict[str, Any]) -> bool:
        kind = _kind(item)
        if kind == "message":
            return item.get("role") == "assistant"
        return kind.endswith("_call") or kind in ("reasoning", "compaction", "mcp_list_tools", "mcp_approval_request")

    def calls(self, item: dict[str, Any]) -> Iterable[ModelCall]:
        """The call in an item, if it is one for the agent: these have a `call_id`. Calls that the provider makes itself (web
        search, ...) have none."""
        kind, call_id = _kind(item), text(item.get("call_id"))
        if not kind.endswith("_call") or call_id is None:
            return
        given = next(
            (item[name] for name in ("arguments", "input", "action", "operation") if item.get(name) is not None), None
        )
        arguments = parse_text(given) if isinstance(given, str) and "arguments" in item else given
        yield ModelCall(call_id, text(item.get("name")) or kind.removesuffix("_call"), arguments)

    def results(self, item: dict[str, Any]) -> Iterable[tuple[str, Any, bool]]:
        if _kind(item).endswith(_OUTPUT):
            yield text(item.get("call_id")) or "", item.get("output"), item.get("status") == "failed"

    def reply_items(self, reply: dict[str, Any], request: TurnRequest) -> list[dict[str, Any]]:
        return list(objects(reply.get("output")))

    def content(self, reply: dict[str, Any]) -> ReplyContent:
        status = text(reply.get("status"))
        reason = text(mapping(reply.get("incomplete_details")).get("reason"))
        usage = mapping(reply.get("usage"))
        cached = tokens(mapping(usage.get("input_tokens_details")).get("cached_tokens"))
        error = self.read_error(reply)
        return ReplyContent(
            stop_reason=reason or status,
            usage=TokenUsage(tokens(usage.get("input_tokens")), tokens(usage.get("output_tokens")), cached),
            response_id=text(reply.get("id")),
            model=text(reply.get("model")),
            error=error or ("the response failed" if status == "failed" else None),
        )

    def stream_reader(self, request: TurnRequest) -> StreamReader:
        return _ResponseStream()


def _kind(item: dict[str, Any]) -> str:
    return text(item.get("type")) or "message"


def _rename_texts(content: Any) -> Any:
    """Text parts under one name: an assistant's text is `output_text` in a reply, and comes back as either."""
    if not isinstance(content, list):
        return content
    texts = ("input_text", "output_text")
    return [
        {**part, "type": "text"} if isinstance(part, dict) and part.get("type") in texts else part for part in content
    ]


class _ResponseStream(StreamReader):
    """Typed events. The last holds the whole response; until then, finished items count."""

    def __init__(self) -> None:
        self._response: dict[str, Any] = {}
        self._items: list[dict[str, Any]] = []
        self._done = False

    def take(self, event: Event, value: dict[str, Any]) -> None:
        kind = text(value.get("type")) or event.type
        response = mapping(value.get("response"))
        if kind in ("response.completed", "response.incomplete", "response.failed"):
            self._response, self._done = response, bool(response)
            self.settled = self.finished = True
        elif (
            kind == "response.output_item.done"
            and isinstance(value.get("item"), dict)
            and len(self._items) < PART_LIMIT
        ):
            self._items.append(value["item"])
            self.asked = self.asked or value["item"].get("call_id") is not None
        elif kind == "error":
            self._response["error"] = value.get("error") or {
                "type": value.get("code") or "error",
                "message": value.get("message"),
            }
            self.finished = True
        elif response:
            self._response = response

    def reply(self) -> dict[str, Any]:
        return self._response if self._done else {**self._response, "output": self._items}
